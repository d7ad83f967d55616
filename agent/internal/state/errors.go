package state

import (
	"errors"
	"syscall"
)

var (
	// ErrLocked is returned by [Open] when another process holds the file.
	ErrLocked = errors.New("another process holds the state file")
	// ErrNewerSchema is returned by [Open] for a file that a newer agent wrote.
	ErrNewerSchema = errors.New("the state file was written by a newer agent")
	// ErrDamaged is wrapped by what a damaged file makes of a read.
	ErrDamaged = errors.New("the file is damaged")
	// ErrClosed is returned once the store is closed.
	ErrClosed = errors.New("the state file is closed")
	// ErrNotFound is returned for a record that is not there.
	ErrNotFound = errors.New("not found")
	// ErrWrite is wrapped by the error of a change that could not be made
	// durable. Whether it is durable nevertheless is not known.
	ErrWrite = errors.New("the change could not be made durable")
	// ErrMoved is wrapped by the error of a change while the state file, or its
	// mark, is not under its name, or an older copy was written over it: what is
	// written would be lost.
	ErrMoved = errors.New("the state file is not in its place")
	// ErrAckAhead is returned for an acknowledgement of a frame that was never
	// written.
	ErrAckAhead = errors.New("acknowledged beyond the last frame")
	// ErrInvariant is wrapped by what [Store.Check] finds.
	ErrInvariant = errors.New("the journal contradicts itself")
)

// DiskFull reports whether err says that the disk has no room or no quota.
func DiskFull(err error) bool {
	return errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT)
}

// DiskBroken reports whether err says that the disk is read-only or fails.
func DiskBroken(err error) bool { return errors.Is(err, syscall.EROFS) || errors.Is(err, syscall.EIO) }
