package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// The exit codes.
const (
	exitOK          = 0
	exitError       = 1
	exitUsage       = 2
	exitDenied      = 4
	exitNotFound    = 5
	exitConflict    = 6
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

func usagef(format string, args ...any) error {
	return &failure{code: exitUsage, err: fmt.Errorf(format, args...)}
}

// exitWith ends with a code about which everything was said.
func exitWith(code int) error {
	if code == exitOK {
		return nil
	}
	return &failure{code: code}
}

// exitCode tells err, if it was not told already, and returns its exit code.
func exitCode(ctx context.Context, stderr io.Writer, err error) int {
	if err == nil {
		return exitOK
	}
	var f *failure
	known := errors.As(err, &f)
	switch {
	case known && f.err == nil:
		return f.code
	case !known && ctx.Err() != nil:
		fmt.Fprintln(stderr, "millwrightd: interrupted")
		return exitInterrupted
	}
	fmt.Fprintf(stderr, "millwrightd: %s\n", strings.ReplaceAll(strings.TrimSpace(err.Error()), "\n", "\n  "))
	if known {
		return f.code
	}
	return exitError
}

// answered turns the agent's refusal into an error with its exit code.
func answered(err error) error {
	st, ok := status.FromError(err)
	if err == nil || !ok {
		return err
	}
	exits := map[codes.Code]int{
		codes.InvalidArgument: exitUsage, codes.PermissionDenied: exitDenied, codes.Unauthenticated: exitDenied,
		codes.NotFound: exitNotFound, codes.FailedPrecondition: exitConflict,
	}
	code, ok := exits[st.Code()]
	if !ok {
		code = exitError
	}
	return &failure{code: code, err: errors.New(st.Message())}
}
