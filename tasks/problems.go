package tasks

import (
	"fmt"
	"strings"
)

// Problem is one thing wrong with a spec: the field by its path, its value, the
// rule it breaks and the way out.
type Problem struct {
	Field string // for example glusterfs.servers[1]
	Value string // as the user gave it; empty when it is missing
	Rule  string // what must hold, and what to do
}

// Problems is every problem of one spec. It is an error.
type Problems []Problem

// Error lists the problems, one a line.
func (p Problems) Error() string {
	lines := make([]string, len(p))
	for i, q := range p {
		if q.Value == "" {
			lines[i] = fmt.Sprintf("%s: %s", q.Field, q.Rule)
		} else {
			lines[i] = fmt.Sprintf("%s: %q: %s", q.Field, q.Value, q.Rule)
		}
	}
	return strings.Join(lines, "\n")
}

// Add appends a problem.
func (p *Problems) Add(field, value, rule string) {
	*p = append(*p, Problem{Field: field, Value: value, Rule: rule})
}

// Err returns p as an error, or nil when there is no problem.
func (p Problems) Err() error {
	if len(p) == 0 {
		return nil
	}
	return p
}
