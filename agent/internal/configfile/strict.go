package configfile

import (
	"errors"
	"fmt"
	"reflect"
	"strings"

	"go.yaml.in/yaml/v3"
)

// unknownKeys returns an error for each key below n that the struct into which
// n would be decoded does not have, and for each key that is there twice.
func unknownKeys(n *yaml.Node, into any) error {
	return errors.Join(walk(n, reflect.TypeOf(into).Elem(), "")...)
}

func walk(n *yaml.Node, t reflect.Type, at string) []error {
	if t.Kind() != reflect.Struct {
		return nil
	}
	if n.Kind != yaml.MappingNode {
		return []error{fmt.Errorf("line %d: %swant keys with values", n.Line, prefix(at))}
	}
	fields := map[string]reflect.Type{}
	var known []string
	for i := range t.NumField() {
		key := t.Field(i).Tag.Get("yaml")
		fields[key] = t.Field(i).Type
		known = append(known, key)
	}
	var errs []error
	for i := 0; i+1 < len(n.Content); i += 2 {
		key, value := n.Content[i], n.Content[i+1]
		field, ok := fields[key.Value]
		if !ok {
			errs = append(errs, fmt.Errorf("line %d: %sunknown key %q; the keys are %s", key.Line, prefix(at), key.Value, strings.Join(known, ", ")))
			continue
		}
		errs = append(errs, walk(value, field, key.Value)...)
	}
	return errs
}

func prefix(at string) string {
	if at == "" {
		return ""
	}
	return at + ": "
}
