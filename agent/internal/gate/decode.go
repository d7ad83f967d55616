package gate

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"path"
	"regexp"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"
)

// policyVersion is the newest version of the file's format.
const policyVersion = "1"

var kindPattern = regexp.MustCompile(`^(\*|[a-z][a-z0-9_]*\.(\*|[a-z][a-z0-9_]*))$`)

// ParsePolicy reads the content of a policy file. Everything in it must be
// known: a word that is not understood could be the one that denies. The error
// names the file and the line.
func ParsePolicy(file string, b []byte) (*Policy, error) {
	p := &policyParser{file: file}
	if len(b) > maxPolicyBytes {
		return nil, fmt.Errorf("%s: it is larger than %d bytes", file, maxPolicyBytes)
	}
	d := yaml.NewDecoder(bytes.NewReader(b))
	var doc, next yaml.Node
	if err := d.Decode(&doc); errors.Is(err, io.EOF) {
		return nil, fmt.Errorf("%s: it is empty; it must say version and rules", file)
	} else if err != nil {
		return nil, fmt.Errorf("%s: %s", file, strings.TrimPrefix(err.Error(), "yaml: "))
	}
	if err := d.Decode(&next); !errors.Is(err, io.EOF) {
		return nil, fmt.Errorf("%s: it has more than one document; only one is read", file)
	}
	if len(doc.Content) != 1 {
		return nil, fmt.Errorf("%s: it is empty; it must say version and rules", file)
	}
	return p.policy(doc.Content[0])
}

type policyParser struct{ file string }

func (p *policyParser) wrong(n *yaml.Node, format string, args ...any) error {
	return fmt.Errorf("%s: line %d: %s", p.file, n.Line, fmt.Sprintf(format, args...))
}

func (p *policyParser) policy(n *yaml.Node) (*Policy, error) {
	fields, err := p.mapping(n, "the file", "version", "rules")
	if err != nil {
		return nil, err
	}
	version, rules := fields["version"], fields["rules"]
	switch {
	case version == nil:
		return nil, p.wrong(n, "version is missing; write version: %s", policyVersion)
	case version.Value != policyVersion:
		return nil, p.wrong(version, "version %q is not known; write version: %s, or update the agent", version.Value, policyVersion)
	case rules == nil:
		return nil, p.wrong(n, "rules is missing; write rules: [] to deny everything")
	case rules.Kind != yaml.SequenceNode:
		return nil, p.wrong(rules, "rules must be a list")
	}
	out := &Policy{file: p.file}
	for _, item := range rules.Content {
		r, err := p.rule(item)
		if err != nil {
			return nil, err
		}
		out.rules = append(out.rules, r)
	}
	return out, nil
}

func (p *policyParser) rule(n *yaml.Node) (rule, error) {
	fields, err := p.mapping(n, "a rule", "allow", "deny", "roles", "argv")
	if err != nil {
		return rule{}, err
	}
	allow, deny := fields["allow"], fields["deny"]
	if (allow == nil) == (deny == nil) {
		return rule{}, p.wrong(n, "a rule has either allow or deny")
	}
	r, kind := rule{line: n.Line, allow: allow != nil}, allow
	if kind == nil {
		kind = deny
	}
	if kind.Kind != yaml.ScalarNode || !kindPattern.MatchString(kind.Value) {
		return rule{}, p.wrong(kind, "%q is no kind; write a kind such as storage.mount, a domain such as storage.*, or \"*\"", kind.Value)
	}
	r.kind = kind.Value
	if r.roles, err = p.list(fields["roles"], "roles", func(s string) string {
		if slices.Contains([]string{"operator", "controller"}, s) {
			return ""
		}
		return "is no role; the roles are operator and controller"
	}); err != nil {
		return rule{}, err
	}
	if r.argv, err = p.list(fields["argv"], "argv", checkProgram); err != nil {
		return rule{}, err
	}
	if r.argv != nil && r.kind != "system.command" {
		return rule{}, p.wrong(fields["argv"], "argv is only for system.command, and this rule is for %s", r.kind)
	}
	return r, nil
}

func checkProgram(s string) string {
	if _, err := path.Match(s, "/"); err != nil {
		return "is no pattern: " + err.Error()
	}
	if !path.IsAbs(s) || path.Clean(s) != s {
		return "is no clean absolute path of a program; * stands for a part of one name"
	}
	return ""
}

// list reads a list of texts that is not empty. A missing one is nil.
func (p *policyParser) list(n *yaml.Node, name string, check func(string) string) ([]string, error) {
	if n == nil {
		return nil, nil
	}
	if n.Kind != yaml.SequenceNode || len(n.Content) == 0 {
		return nil, p.wrong(n, "%s must be a list that is not empty", name)
	}
	var out []string
	for _, item := range n.Content {
		if item.Kind != yaml.ScalarNode || item.Tag != "!!str" {
			return nil, p.wrong(item, "%s holds something that is no text", name)
		}
		if problem := check(item.Value); problem != "" {
			return nil, p.wrong(item, "%s: %q %s", name, item.Value, problem)
		}
		out = append(out, item.Value)
	}
	return out, nil
}

// mapping reads the fields of a mapping: each one known, and once.
func (p *policyParser) mapping(n *yaml.Node, what string, known ...string) (map[string]*yaml.Node, error) {
	if n.Kind != yaml.MappingNode {
		return nil, p.wrong(n, "%s must hold fields: %s", what, strings.Join(known, ", "))
	}
	out := map[string]*yaml.Node{}
	for i := 0; i+1 < len(n.Content); i += 2 {
		key, value := n.Content[i], n.Content[i+1]
		switch {
		case !slices.Contains(known, key.Value):
			return nil, p.wrong(key, "unknown field %q; known are %s", key.Value, strings.Join(known, ", "))
		case out[key.Value] != nil:
			return nil, p.wrong(key, "field %q is given twice", key.Value)
		case value.Kind == yaml.AliasNode || value.Anchor != "":
			return nil, p.wrong(value, "field %q: anchors and aliases are not allowed here", key.Value)
		}
		out[key.Value] = value
	}
	return out, nil
}
