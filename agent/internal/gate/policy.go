package gate

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"slices"
	"strings"
	"syscall"
)

const maxPolicyBytes = 256 << 10

// Policy is the node's rules, in the order of the file.
type Policy struct {
	file  string
	rules []rule
}

type rule struct {
	line  int
	allow bool
	kind  string   // a kind, domain.* or *
	roles []string // nil: any
	argv  []string // patterns of argv[0]; nil: any
}

// Request is what a policy is asked about.
type Request struct {
	// Kind is the task's kind.
	Kind string
	// Roles are those that the signers count for.
	Roles []string
	// Argv is the command of a kind that has one.
	Argv []string
}

// Verdict is a policy's answer.
type Verdict struct {
	// Allowed is the answer.
	Allowed bool
	// Line is the line of the rule that decided, 0 when none matched.
	Line int
	// Message names the rule, and the way out of a denial.
	Message string
}

// ReadPolicy reads the policy file. Like a program that runs as root, it must
// belong to root, or to who runs the agent, and be writable by no one else.
// An error names the file, and the line where there is one.
func ReadPolicy(file string) (*Policy, error) {
	// The open of a pipe would wait for a writer, and the node with it.
	f, err := os.OpenFile(file, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	switch {
	case errors.Is(err, os.ErrNotExist):
		return nil, fmt.Errorf("%s: no policy file; without one nothing is accepted: restore it from the package, or write one", file)
	case err != nil:
		return nil, fmt.Errorf("open policy: %w", err)
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, fmt.Errorf("look at policy: %w", err)
	}
	if !info.Mode().IsRegular() {
		return nil, fmt.Errorf("%s: it is not a regular file: restore it from the package, or write one", file)
	}
	if st, ok := info.Sys().(*syscall.Stat_t); ok && st.Uid != 0 && int(st.Uid) != os.Geteuid() {
		return nil, fmt.Errorf("%s: it belongs to user %d: it must belong to root", file, st.Uid)
	}
	if info.Mode().Perm()&0o022 != 0 {
		return nil, fmt.Errorf("%s: mode %#o: others than its owner can write it; run chmod go-w %s", file, info.Mode().Perm(), file)
	}
	b, err := io.ReadAll(io.LimitReader(f, maxPolicyBytes+1))
	if err != nil {
		return nil, fmt.Errorf("read policy: %w", err)
	}
	return ParsePolicy(file, b)
}

// Decide returns the answer of the first rule that matches; without one the
// answer is no.
func (p *Policy) Decide(req Request) Verdict {
	for _, r := range p.rules {
		if !r.matches(req) {
			continue
		}
		if r.allow {
			return Verdict{Allowed: true, Line: r.line, Message: fmt.Sprintf("%s:%d: allow: %s", p.file, r.line, r.kind)}
		}
		return Verdict{Line: r.line, Message: fmt.Sprintf(
			"%s is denied by %s, line %d (deny: %s); to allow it, put %s above that line on the node",
			req.subject(), p.file, r.line, r.kind, req.suggest())}
	}
	return Verdict{Message: fmt.Sprintf(
		"%s is denied: no rule of %s matches it; to allow it, add %s on the node", req.subject(), p.file, req.suggest())}
}

func (r rule) matches(req Request) bool {
	if !kindMatches(r.kind, req.Kind) {
		return false
	}
	if r.roles != nil && !slices.ContainsFunc(req.Roles, func(role string) bool { return slices.Contains(r.roles, role) }) {
		return false
	}
	return r.argv == nil || slices.ContainsFunc(r.argv, func(pattern string) bool { return programMatches(pattern, req.Argv) })
}

func kindMatches(pattern, kind string) bool {
	if domain, ok := strings.CutSuffix(pattern, "*"); ok {
		return strings.HasPrefix(kind, domain)
	}
	return pattern == kind
}

// programMatches compares the program alone. It must be clean, so that a
// pattern for a directory matches nothing outside.
func programMatches(pattern string, argv []string) bool {
	if len(argv) == 0 || !path.IsAbs(argv[0]) || path.Clean(argv[0]) != argv[0] {
		return false
	}
	ok, err := path.Match(pattern, argv[0])
	return err == nil && ok
}

func (req Request) subject() string {
	if len(req.Argv) > 0 {
		return fmt.Sprintf("%s of %q", req.Kind, req.Argv[0])
	}
	return req.Kind
}

func (req Request) suggest() string {
	if len(req.Argv) > 0 {
		return fmt.Sprintf("\"- allow: %s\" with \"argv: [%q]\"", req.Kind, req.Argv[0])
	}
	return fmt.Sprintf("\"- allow: %s\"", req.Kind)
}
