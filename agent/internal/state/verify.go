package state

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/gpuaas/millwright/agent/internal/child"
)

// The exit codes of the process that looks at a state file. A fault or a panic
// ends it with 2.
const (
	exitSound   = 0
	exitOther   = 1
	exitDied    = 2
	exitDamaged = 3
	exitLocked  = 4
	exitNewer   = 5
)

// VerifyMain is millwrightd verify-state: it looks at one state file, in a
// process of its own, as [InspectFile] or, with the word glance, [GlanceFile], or,
// with the word full, [CheckFile] does. Its arguments are that word, the file, and how long to wait for whoever
// holds it. It writes the facts to stdout and an error to stderr, for
// [Verified], and returns the exit code.
//
// The word repair saves what it can into FILE.repaired, as [RepairFile] does, and
// writes the [Rescue].
func VerifyMain(args []string, stdout, stderr io.Writer) int {
	f, err := verify(args, stderr)
	if b, e := json.Marshal(f); e == nil {
		_, _ = stdout.Write(b) // whoever does not get it says so
	}
	code := exitSound
	switch {
	case err == nil:
		return code
	case errors.Is(err, ErrDamaged), errors.Is(err, ErrInvariant):
		code = exitDamaged
	case errors.Is(err, ErrLocked):
		code = exitLocked
	case errors.Is(err, ErrNewerSchema):
		code = exitNewer
	default:
		code = exitOther
	}
	_, _ = io.WriteString(stderr, child.FormatError(err)) // there is nobody else to tell
	return code
}

func verify(args []string, stderr io.Writer) (any, error) {
	if len(args) != 3 || !filepath.IsAbs(args[1]) {
		return Facts{}, errors.New("usage: verify-state glance|inspect|full|repair FILE WAIT")
	}
	wait, err := time.ParseDuration(args[2])
	if err != nil {
		return Facts{}, fmt.Errorf("verify-state: %w", err)
	}
	if err := limitSelf(args[1], verifyCPU, stderr); err != nil {
		return Facts{}, err
	}
	switch args[0] {
	case "inspect":
		return InspectFile(args[1], wait)
	case "glance":
		return GlanceFile(args[1])
	case "full":
		return CheckFile(args[1], wait)
	case "repair":
		return RepairFile(args[1], args[1]+repaired)
	}
	return Facts{}, fmt.Errorf("verify-state %s: want glance, inspect, full or repair", strconv.Quote(args[0]))
}

// VerifyWithin bounds a process that looks at a state file. A file that takes
// longer is not judged, and not touched.
const VerifyWithin = time.Minute

// InAnotherProcess returns what looks at a file as [InspectFile] and [GlanceFile]
// do, in a process of its own: executable is a millwrightd, and run runs it.
func InAnotherProcess(run func(context.Context, child.Spec) (child.Result, error), executable string) func(context.Context, string, bool) (Facts, error) {
	return func(ctx context.Context, path string, whole bool) (Facts, error) {
		how := "glance"
		if whole {
			how = "inspect"
		}
		r, err := run(ctx, VerifySpec(executable, how, path, defaultLockTimeout))
		return Verified(r, err)
	}
}

// repaired is what is added to the name of a copy for what was saved of it.
const repaired = ".repaired"

// CheckCopy looks at a copy of the state file at path, all of it, in another
// process, as [CheckFile] does. The file is neither locked nor changed.
func CheckCopy(ctx context.Context, run func(context.Context, child.Spec) (child.Result, error), executable, path string) (f Facts, err error) {
	err = withCopy(path, func(copied string) error {
		r, err := run(ctx, VerifySpec(executable, "full", copied, defaultLockTimeout))
		f, err = Verified(r, err)
		return err
	})
	return f, err
}

// RepairCopy saves what another process can read of a copy of the state file at
// path, as [RepairFile] does, into a new file at out, which must not exist.
func RepairCopy(ctx context.Context, run func(context.Context, child.Spec) (child.Result, error), executable, path, out string) (*Rescue, error) {
	if _, err := os.Lstat(out); err == nil {
		return nil, fmt.Errorf("repair %s into %s: %w; name a file that is not there", path, out, os.ErrExist)
	}
	rescue := new(Rescue)
	err := withCopy(path, func(copied string) error {
		r, err := run(ctx, VerifySpec(executable, "repair", copied, defaultLockTimeout))
		if err := verified(r, err, &rescue); err != nil {
			return err
		}
		return copyFile(copied+repaired, out)
	})
	if err != nil {
		return nil, err
	}
	return rescue, syncDir(filepath.Dir(out))
}

// withCopy calls do with a copy of a state file that is gone afterwards.
func withCopy(path string, do func(copied string) error) (err error) {
	dir, err := os.MkdirTemp("", "millwright-state-")
	if err != nil {
		return fmt.Errorf("make directory for a copy of %s: %w", path, err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	copied := filepath.Join(dir, dbName)
	if err := copySettled(path, copied); err != nil {
		return err
	}
	return do(copied)
}

// VerifySpec is the process that looks at path; how is glance, inspect, full or repair.
func VerifySpec(executable, how, path string, wait time.Duration) child.Spec {
	return child.Spec{
		Argv: []string{executable, "verify-state", how, path, wait.String()}, Timeout: VerifyWithin, Key: "verify-state " + path,
	}
}

// Verified turns what a process with [VerifyMain] left behind into the facts
// and the error. A process that died on the file, or asked for more memory or
// processor time than a sound file needs, makes it damaged; one that lacked a
// little memory or was killed says nothing about the file.
func Verified(r child.Result, err error) (f Facts, _ error) {
	err = verified(r, err, &f)
	return f, err
}

func verified(r child.Result, err error, into any) error {
	var signal *child.SignalError
	if errors.As(err, &signal) && isFault(signal.Signal) {
		return fmt.Errorf("%w: the process that read it died: %w", ErrDamaged, signal)
	}
	if err != nil {
		return fmt.Errorf("look at the state file in another process: %w", err)
	}
	said := string(r.Stderr)
	switch r.ExitCode {
	case exitSound, exitDamaged:
		if e := json.Unmarshal(r.Stdout, into); e != nil {
			return fmt.Errorf("look at the state file in another process: its answer: %w", e)
		}
		if r.ExitCode == exitDamaged {
			return as(ErrDamaged, said)
		}
		return nil
	case exitDied:
		if starved(said) && !askedTooMuch(said) {
			return fmt.Errorf("look at the state file in another process: %s", firstLine(said))
		}
		return fmt.Errorf("%w: the process that read it died: %s", ErrDamaged, firstLine(said))
	case exitLocked:
		return as(ErrLocked, said)
	case exitNewer:
		return as(ErrNewerSchema, said)
	}
	return child.ParseError(said)
}

// starved reports whether a Go program ended for want of memory or threads.
func starved(said string) bool {
	for _, s := range []string{"out of memory", "cannot allocate memory", "failed to create new OS thread"} {
		if strings.Contains(said, s) {
			return true
		}
	}
	return false
}

func firstLine(s string) string {
	s, _, _ = strings.Cut(strings.TrimSpace(s), "\n")
	return s
}

// told is an error of another process.
type told struct {
	kind, said error
}

func as(kind error, said string) error { return &told{kind, child.ParseError(said)} }

func (t *told) Error() string { return t.said.Error() }

func (t *told) Unwrap() []error { return []error{t.kind, t.said} }
