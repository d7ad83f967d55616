package child

import (
	"errors"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// FormatError writes an error so that [ParseError], in another process, gives
// one with the same message for which errors.Is finds the same system error.
func FormatError(err error) string {
	var errno syscall.Errno
	if errors.As(err, &errno) {
		if name := unix.ErrnoName(errno); name != "" {
			return name + ": " + err.Error()
		}
	}
	return "-: " + err.Error()
}

// ParseError reads what [FormatError] wrote.
func ParseError(s string) error {
	name, msg, ok := strings.Cut(s, ": ")
	if !ok || (name != "-" && errnoByName(name) == 0) {
		return errors.New(s)
	}
	if errno := errnoByName(name); errno != 0 {
		return &osError{msg: msg, errno: errno}
	}
	return errors.New(msg)
}

// highestErrno is above every error number of Linux.
const highestErrno = 256

func errnoByName(name string) syscall.Errno {
	for e := syscall.Errno(1); e < highestErrno; e++ {
		if unix.ErrnoName(e) == name {
			return e
		}
	}
	return 0
}

type osError struct {
	msg   string
	errno syscall.Errno
}

func (e *osError) Error() string { return e.msg }
func (e *osError) Unwrap() error { return e.errno }
