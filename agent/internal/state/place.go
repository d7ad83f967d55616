package state

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
)

// InPlace says why what the store writes would not be found by the next start:
// its file or its mark is not under its name any more. The error wraps
// [ErrMoved]. It is asked before each commit, which is refused then.
func (s *Store) InPlace() error {
	return errors.Join(inPlace(filepath.Join(s.cfg.Dir, dbName), s.raw), inPlace(filepath.Join(s.cfg.Dir, markName), s.mark.file))
}

func inPlace(path string, f *os.File) error {
	open, err := f.Stat()
	if err != nil {
		return fmt.Errorf("stat open %s: %w", path, err)
	}
	there, err := os.Stat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("%w: %s was removed or renamed; put it back, or restart the agent, which then begins a new journal and asks what became of its tasks", ErrMoved, path)
	case err != nil:
		return fmt.Errorf("stat %s: %w", path, err)
	case !os.SameFile(open, there):
		return fmt.Errorf("%w: another file lies at %s; put the former back, or restart the agent, which judges the one that lies there", ErrMoved, path)
	}
	return nil
}
