package ctl

import (
	"encoding/base64"
	"encoding/hex"
	"strings"

	"go.yaml.in/yaml/v3"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
)

// asYAML returns the fields of a message as a spec file has them, but bytes in
// hex: they are hashes, which people compare.
func asYAML(m proto.Message) (string, error) {
	b, err := protojson.MarshalOptions{UseProtoNames: true}.Marshal(m)
	if err != nil {
		return "", err
	}
	var n yaml.Node
	if err := yaml.Unmarshal(b, &n); err != nil {
		return "", err
	}
	block(&n)
	for _, root := range n.Content {
		plain(root, m.ProtoReflect().Descriptor())
	}
	var out strings.Builder
	enc := yaml.NewEncoder(&out)
	enc.SetIndent(2)
	if err := enc.Encode(&n); err != nil {
		return "", err
	}
	return strings.TrimRight(out.String(), "\n"), enc.Close()
}

// block sets a node in YAML's block style.
func block(n *yaml.Node) {
	n.Style = 0
	for _, c := range n.Content {
		block(c)
	}
}

// plain rewrites what JSON has for machines in a message's fields: whole numbers
// in quotation marks, bytes in base64 and the long names of enums.
func plain(n *yaml.Node, md protoreflect.MessageDescriptor) {
	for i := 0; i+1 < len(n.Content); i += 2 {
		fd := md.Fields().ByName(protoreflect.Name(n.Content[i].Value))
		if fd == nil || fd.IsMap() {
			continue
		}
		values := n.Content[i+1 : i+2]
		if fd.IsList() {
			values = values[0].Content
		}
		for _, v := range values {
			plainValue(v, fd)
		}
	}
}

func plainValue(n *yaml.Node, fd protoreflect.FieldDescriptor) {
	switch fd.Kind() {
	case protoreflect.MessageKind:
		if n.Kind == yaml.MappingNode {
			plain(n, fd.Message())
		}
	case protoreflect.Int64Kind, protoreflect.Sint64Kind, protoreflect.Sfixed64Kind,
		protoreflect.Uint64Kind, protoreflect.Fixed64Kind:
		n.Tag = "!!int"
	case protoreflect.BytesKind:
		if b, err := base64.StdEncoding.DecodeString(n.Value); err == nil {
			n.SetString(hex.EncodeToString(b))
		}
	case protoreflect.EnumKind:
		n.Value = strings.ToLower(strings.TrimPrefix(n.Value, enumPrefix(fd.Enum())))
	}
}
