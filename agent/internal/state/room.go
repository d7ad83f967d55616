package state

import (
	"fmt"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

const (
	// defaultReserve is what the commands of all credits leave behind, nearly:
	// two streams of head and tail each, beside the journal.
	defaultReserve = 64 << 20
	// inodes is how many files those commands make, nearly.
	inodes = 512
)

// Room says why the disk of the state has no room for one more task; for its
// error [DiskFull] is true. The journal itself often finds a free page on a
// full disk: what is accepted then has nowhere to put its output and fails.
func (s *Store) Room() error {
	var st unix.Statfs_t
	if err := unix.Statfs(s.cfg.Dir, &st); err != nil {
		return &os.PathError{Op: "statfs", Path: s.cfg.Dir, Err: err}
	}
	if free := st.Bavail * uint64(st.Bsize); free < s.cfg.Reserve { // a block has no negative size
		return fmt.Errorf("%s has %d KiB free and needs %d for one more task: %w", s.cfg.Dir, free>>10, s.cfg.Reserve>>10, syscall.ENOSPC)
	}
	if st.Files > 0 && st.Ffree < inodes {
		return fmt.Errorf("%s has room for %d more files and needs %d for one more task: %w", s.cfg.Dir, st.Ffree, inodes, syscall.ENOSPC)
	}
	return nil
}
