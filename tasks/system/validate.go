package system

import (
	"fmt"
	"path"
	"regexp"
	"strings"

	"google.golang.org/protobuf/types/known/durationpb"

	systemv1 "github.com/gpuaas/millwright/proto/millwright/system/v1"
	"github.com/gpuaas/millwright/tasks"
)

const (
	maxArgs        = 256
	maxEnvironment = 256
	maxBytes       = 128 << 10 // of all arguments and variables together
	maxPath        = 4095
)

// Validate implements [tasks.Task].
func (Command) Validate(s *systemv1.CommandSpec) error {
	var p tasks.Problems
	checkArgv(&p, s.GetArgv())
	if dir := s.GetWorkingDirectory(); dir != "" {
		checkPath(&p, "working_directory", dir)
	}
	checkEnvironment(&p, s.GetEnvironment())
	if s.GetUser() != "" && !userName(s.GetUser()) {
		p.Add("user", s.GetUser(), "must be the name of a user: lower-case letters, digits, _ and -, beginning with a letter or _, at most 32 bytes")
	}
	checkTimeout(&p, s.GetTimeout())
	checkSpan(&p, "stop_grace", s.GetStopGrace(), minTimeout, maxStopGrace, "10s")
	checkCodes(&p, s.GetSuccessExitCodes())
	total := 0
	for _, a := range s.GetArgv() {
		total += len(a) + 1
	}
	for _, e := range s.GetEnvironment() {
		total += len(e.GetName()) + len(e.GetValue()) + 2
	}
	if total > maxBytes {
		p.Add("argv and environment", fmt.Sprintf("%d bytes", total), fmt.Sprintf("must be at most %d bytes together: pass a file's path in place of its content", maxBytes))
	}
	return p.Err()
}

func checkArgv(p *tasks.Problems, argv []string) {
	switch n := len(argv); {
	case n == 0:
		p.Add("argv", "", "is required: give the program's absolute path, and its arguments")
		return
	case n > maxArgs:
		p.Add("argv", fmt.Sprintf("%d arguments", n), fmt.Sprintf("must be at most %d: pass the path of a file that lists them", maxArgs))
	}
	checkPath(p, "argv[0]", argv[0])
	for i, a := range argv[1:] {
		if strings.ContainsRune(a, 0) {
			p.Add(fmt.Sprintf("argv[%d]", i+1), shorten(a), "must not hold a zero byte: take it out")
		}
	}
}

func checkPath(p *tasks.Problems, field, value string) {
	switch {
	case value == "":
		p.Add(field, value, "is required: give an absolute path such as /usr/bin/true")
	case strings.ContainsRune(value, 0):
		p.Add(field, shorten(value), "must not hold a zero byte: take it out")
	case !strings.HasPrefix(value, "/"):
		p.Add(field, shorten(value), "must be an absolute path: no search path is used and no shell reads it")
	case path.Clean(value) != value:
		p.Add(field, shorten(value), fmt.Sprintf("must be a clean path: write %q", shorten(path.Clean(value))))
	case len(value) > maxPath:
		p.Add(field, shorten(value), fmt.Sprintf("must be at most %d bytes: shorten it", maxPath))
	}
}

func checkEnvironment(p *tasks.Problems, env []*systemv1.EnvironmentVariable) {
	if n := len(env); n > maxEnvironment {
		p.Add("environment", fmt.Sprintf("%d variables", n), fmt.Sprintf("must be at most %d: pass a file's path", maxEnvironment))
	}
	seen := map[string]bool{}
	for i, e := range env {
		field := fmt.Sprintf("environment[%d].name", i)
		switch name := e.GetName(); {
		case name == "":
			p.Add(field, name, "is required: name the variable")
		case !variableName(name):
			p.Add(field, shorten(name), "must be ASCII letters, digits and _, and not begin with a digit: rename it")
		case reserved(name):
			p.Add(field, shorten(name), "is set by the agent, or would change what the program is: leave it out")
		case seen[name]:
			p.Add(field, shorten(name), "is set twice: set each variable once")
		}
		seen[e.GetName()] = true
		if strings.ContainsRune(e.GetValue(), 0) {
			p.Add(fmt.Sprintf("environment[%d].value", i), shorten(e.GetValue()), "must not hold a zero byte: take it out")
		}
	}
}

// reserved reports whether a variable is not the spec's to set. The dynamic
// linker's would let an allowed program run other code than its own.
func reserved(name string) bool {
	switch name {
	case "PATH", "NOTIFY_SOCKET", "INVOCATION_ID", "JOURNAL_STREAM":
		return true
	}
	return strings.HasPrefix(name, "LD_") || strings.HasPrefix(name, "MILLWRIGHT_")
}

func checkTimeout(p *tasks.Problems, d *durationpb.Duration) {
	if d == nil {
		return
	}
	if err := d.CheckValid(); err != nil || d.AsDuration() < minTimeout || d.AsDuration() > maxTimeout {
		p.Add("timeout", fmt.Sprintf("%d.%09ds", d.GetSeconds(), d.GetNanos()), fmt.Sprintf("must be from %v to %v: leave it out for %v", minTimeout, maxTimeout, defaultTimeout))
	}
}

func checkCodes(p *tasks.Problems, codes []int32) {
	seen := map[int32]bool{}
	for i, c := range codes {
		field := fmt.Sprintf("success_exit_codes[%d]", i)
		switch {
		case c < 0 || c > 255:
			p.Add(field, fmt.Sprint(c), "must be from 0 to 255: an exit code is one byte")
		case seen[c]:
			p.Add(field, fmt.Sprint(c), "is named twice: name each code once")
		}
		seen[c] = true
	}
}

func userName(s string) bool { return matches(`^[a-z_][a-z0-9_-]{0,31}$`, s) }

func variableName(s string) bool { return matches(`^[A-Za-z_][A-Za-z0-9_]{0,255}$`, s) }

func matches(pattern, s string) bool { return regexp.MustCompile(pattern).MatchString(s) }

// shorten cuts a value that is to appear in a message.
func shorten(s string) string {
	const most = 80
	if len(s) <= most {
		return s
	}
	return strings.ToValidUTF8(s[:most], "") + "..."
}
