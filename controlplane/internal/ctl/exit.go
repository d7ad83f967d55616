package ctl

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"

	"google.golang.org/grpc/codes"
)

// The exit codes.
const (
	exitOK          = 0
	exitError       = 1
	exitUsage       = 2
	exitUnsuccess   = 3
	exitDenied      = 4
	exitNotFound    = 5
	exitConflict    = 6
	exitTimeout     = 7
	exitInterrupted = 130
)

// failure is an error that decides the exit code.
type failure struct {
	code int
	err  error // nil when everything was said already
}

func (f *failure) Error() string {
	if f.err == nil {
		return fmt.Sprintf("exit code %d", f.code)
	}
	return f.err.Error()
}

func (f *failure) Unwrap() error { return f.err }

// usagef is the error for what a person typed wrong.
func usagef(format string, args ...any) error {
	return &failure{code: exitUsage, err: fmt.Errorf(format, args...)}
}

// errTimedOut is the cause of a context that ends because --timeout is over.
var errTimedOut = errors.New("timed out")

// exitCode tells err, if it was not told already, and returns its exit code.
func exitCode(ctx context.Context, stderr io.Writer, err error) int {
	if err == nil {
		return exitOK
	}
	var f *failure
	known := errors.As(err, &f)
	if ctx.Err() != nil && (!known || f.code != exitInterrupted) {
		fmt.Fprintln(stderr, "millctl: interrupted")
		return exitInterrupted
	}
	if known && f.err == nil {
		return f.code
	}
	fmt.Fprintf(stderr, "millctl: %s\n", indent(err.Error()))
	if known {
		return f.code
	}
	return exitError
}

// indent sets the lines after the first one off.
func indent(s string) string {
	return strings.ReplaceAll(strings.TrimRight(s, "\n"), "\n", "\n  ")
}

// exitOf is the exit code for a status of the API.
func exitOf(c codes.Code) int {
	switch c {
	case codes.OK:
		return exitOK
	case codes.InvalidArgument, codes.OutOfRange:
		return exitUsage
	case codes.Unauthenticated, codes.PermissionDenied:
		return exitDenied
	case codes.NotFound:
		return exitNotFound
	case codes.AlreadyExists, codes.FailedPrecondition, codes.Aborted:
		return exitConflict
	default:
		return exitError
	}
}
