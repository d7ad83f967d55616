package specfile

import (
	"encoding/base64"
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"
)

const (
	durationName  protoreflect.FullName = "google.protobuf.Duration"
	timestampName protoreflect.FullName = "google.protobuf.Timestamp"
)

// wellKnown reports whether a message is written as one value.
func wellKnown(md protoreflect.MessageDescriptor) bool {
	return md.FullName() == durationName || md.FullName() == timestampName
}

// scalar reads one value as it is written.
func scalar(n *yaml.Node, fd protoreflect.FieldDescriptor) (protoreflect.Value, bool) {
	text := n.Value
	switch fd.Kind() {
	case protoreflect.StringKind:
		return protoreflect.ValueOfString(text), true
	case protoreflect.BoolKind:
		return protoreflect.ValueOfBool(text == "true"), n.Style == 0 && (text == "true" || text == "false")
	case protoreflect.BytesKind:
		b, err := base64.StdEncoding.DecodeString(text)
		return protoreflect.ValueOfBytes(b), err == nil
	case protoreflect.EnumKind:
		return enum(text, fd.Enum())
	case protoreflect.MessageKind:
		return message(text, fd.Message())
	default:
		return number(text, fd.Kind())
	}
}

func number(text string, kind protoreflect.Kind) (protoreflect.Value, bool) {
	switch kind {
	case protoreflect.Int32Kind, protoreflect.Sint32Kind, protoreflect.Sfixed32Kind:
		i, err := strconv.ParseInt(text, 10, 32)
		return protoreflect.ValueOfInt32(int32(i)), err == nil
	case protoreflect.Int64Kind, protoreflect.Sint64Kind, protoreflect.Sfixed64Kind:
		i, err := strconv.ParseInt(text, 10, 64)
		return protoreflect.ValueOfInt64(i), err == nil
	case protoreflect.Uint32Kind, protoreflect.Fixed32Kind:
		i, err := strconv.ParseUint(text, 10, 32)
		return protoreflect.ValueOfUint32(uint32(i)), err == nil
	case protoreflect.Uint64Kind, protoreflect.Fixed64Kind:
		i, err := strconv.ParseUint(text, 10, 64)
		return protoreflect.ValueOfUint64(i), err == nil
	case protoreflect.FloatKind:
		f, err := strconv.ParseFloat(text, 32)
		return protoreflect.ValueOfFloat32(float32(f)), err == nil
	case protoreflect.DoubleKind:
		f, err := strconv.ParseFloat(text, 64)
		return protoreflect.ValueOfFloat64(f), err == nil
	default:
		return protoreflect.Value{}, false
	}
}

func enum(text string, ed protoreflect.EnumDescriptor) (protoreflect.Value, bool) {
	for _, name := range []string{text, prefix(ed) + strings.ToUpper(text)} {
		if v := ed.Values().ByName(protoreflect.Name(name)); v != nil && v.Number() != 0 {
			return protoreflect.ValueOfEnum(v.Number()), true
		}
	}
	return protoreflect.Value{}, false
}

// prefix is what the names of an enum's values begin with, by the rule that the
// one for 0 is the type's name with _UNSPECIFIED.
func prefix(ed protoreflect.EnumDescriptor) string {
	zero := ed.Values().ByNumber(0)
	if zero == nil {
		return ""
	}
	return strings.TrimSuffix(string(zero.Name()), "UNSPECIFIED")
}

func message(text string, md protoreflect.MessageDescriptor) (protoreflect.Value, bool) {
	if md.FullName() == durationName {
		v, err := time.ParseDuration(text)
		return protoreflect.ValueOfMessage(durationpb.New(v).ProtoReflect()), err == nil
	}
	t, err := time.Parse(time.RFC3339Nano, text)
	stamp := timestamppb.New(t)
	return protoreflect.ValueOfMessage(stamp.ProtoReflect()), err == nil && stamp.IsValid()
}

// wanted says in words what a field takes.
func wanted(fd protoreflect.FieldDescriptor) string {
	switch fd.Kind() {
	case protoreflect.StringKind:
		return "a text"
	case protoreflect.BoolKind:
		return "true or false"
	case protoreflect.BytesKind:
		return "bytes in base64"
	case protoreflect.EnumKind:
		return "one of " + choices(fd.Enum())
	case protoreflect.FloatKind, protoreflect.DoubleKind:
		return "a number"
	case protoreflect.MessageKind:
		if fd.Message().FullName() == durationName {
			return "a duration such as 90s or 1h30m"
		}
		return "a time such as 2027-01-31T15:04:05Z"
	default:
		low, high := bounds(fd.Kind())
		return fmt.Sprintf("a whole number from %s to %s, in decimal and without a unit", low, high)
	}
}

func choices(ed protoreflect.EnumDescriptor) string {
	var names []string
	for i := range ed.Values().Len() {
		if v := ed.Values().Get(i); v.Number() != 0 {
			names = append(names, strings.ToLower(strings.TrimPrefix(string(v.Name()), prefix(ed))))
		}
	}
	return strings.Join(names, ", ")
}

func bounds(kind protoreflect.Kind) (low, high string) {
	switch kind {
	case protoreflect.Int32Kind, protoreflect.Sint32Kind, protoreflect.Sfixed32Kind:
		return strconv.Itoa(math.MinInt32), strconv.Itoa(math.MaxInt32)
	case protoreflect.Int64Kind, protoreflect.Sint64Kind, protoreflect.Sfixed64Kind:
		return strconv.FormatInt(math.MinInt64, 10), strconv.FormatInt(math.MaxInt64, 10)
	case protoreflect.Uint32Kind, protoreflect.Fixed32Kind:
		return "0", strconv.FormatUint(math.MaxUint32, 10)
	default:
		return "0", strconv.FormatUint(math.MaxUint64, 10)
	}
}
