package state

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	bolt "go.etcd.io/bbolt"
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

// asLeft asks whether a transaction begins with what the last one has left.
func (s *Store) asLeft(btx *bolt.Tx) error {
	tx := newTx(btx, s.cfg)
	h, err := tx.head()
	if err != nil {
		return err
	}
	meta, err := tx.Journal()
	if err != nil {
		return err
	}
	return s.behind(meta.GetJournalId(), h.seq, uint64(btx.ID())-1)
}

// behind says that what lies in the file is older than what was made durable in
// it: someone has written a copy over the file while it was in use. What would be
// added has numbers that were given already, and the mark would be lowered to it.
func (s *Store) behind(journal string, seq, transaction uint64) error {
	last := s.mark.last
	if last.GetJournalId() != journal || seq >= last.GetSeq() && transaction >= last.GetTransaction() {
		return nil
	}
	return fmt.Errorf("%w: an older one was written over %s while it was in use; restart the agent, which sets that aside, begins a new journal and asks what became of its tasks",
		ErrMoved, filepath.Join(s.cfg.Dir, dbName))
}
