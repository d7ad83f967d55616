package state

import (
	"errors"

	"golang.org/x/sys/unix"
)

// defaultResults is what the last steps, results and frames of all credits take
// in the file, with the copies of pages that bbolt makes on the way.
const defaultResults = 16 << 20

// reserve has the disk keep room in the state file behind its last page, so that
// the results of what runs become durable on a full disk. It is filled up when a
// quarter is used. What the disk does not give now it is asked for again by the
// next commit: new tasks wait for [Store.Room], which asks for much more.
func (s *Store) reserve(used int64) {
	if s.cfg.Results < 0 || s.reserved-used >= s.cfg.Results/4*3 {
		return
	}
	const keepSize = unix.FALLOC_FL_KEEP_SIZE // bbolt sees nothing of it
	err := unix.Fallocate(int(s.raw.Fd()), keepSize, 0, used+s.cfg.Results)
	switch {
	case err == nil:
		s.reserved = used + s.cfg.Results
	case errors.Is(err, unix.EOPNOTSUPP), errors.Is(err, unix.ENOSYS):
		s.cfg.Results = -1
		s.cfg.Logger.Warn("the file system of the state keeps no room for results", "dir", s.cfg.Dir, "err", err)
	}
}
