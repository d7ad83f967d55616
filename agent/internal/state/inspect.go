package state

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"runtime"
	"runtime/debug"
	"strconv"
	"time"

	bolt "go.etcd.io/bbolt"
	berrors "go.etcd.io/bbolt/errors"
	"golang.org/x/sys/unix"

	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
)

// judge opens the file, or says why a new journal must begin. In that case the
// old file, if there was one, has been set aside.
func (s *Store) judge(path string) (taskv1.JournalReason, error) {
	const use = taskv1.JournalReason_JOURNAL_REASON_UNSPECIFIED
	info, err := os.Lstat(path)
	switch {
	case errors.Is(err, os.ErrNotExist):
		if s.cfg.JustJoined && s.mark.last.GetGeneration() != s.cfg.Generation {
			return taskv1.JournalReason_JOURNAL_REASON_JOINED, nil
		}
		return taskv1.JournalReason_JOURNAL_REASON_MISSING, nil
	case err != nil:
		return use, fmt.Errorf("look at state file: %w", err)
	case !info.Mode().IsRegular() || info.Size() == 0:
		// bbolt would take an empty file for a fresh database.
		return taskv1.JournalReason_JOURNAL_REASON_CORRUPT, s.setAside(path, "corrupt")
	}
	reason, err := s.inspect(path)
	switch {
	case err != nil:
		return use, err
	case reason != use:
		return reason, s.setAside(path, asideNames[reason])
	}
	s.db, err = openBolt(path, s.cfg.LockTimeout, false)
	switch {
	case unavailable(err):
		return use, locked(path, err)
	case err != nil: // what bbolt finds when it looks for free pages
		s.cfg.Logger.Error("state file cannot be used", "path", path, "err", err)
		return taskv1.JournalReason_JOURNAL_REASON_CORRUPT, s.setAside(path, "corrupt")
	}
	if err := migrate(s.db, migrations); err != nil {
		return use, errors.Join(err, s.db.Close())
	}
	return use, nil
}

// unavailable reports whether err says nothing about the file's content: it is
// locked, or the process may not open it or lacks what that takes.
func unavailable(err error) bool {
	for _, e := range []error{
		berrors.ErrTimeout, os.ErrPermission, unix.EMFILE, unix.ENFILE, unix.ENOMEM, unix.ENOSPC, unix.EROFS, unix.EINTR,
	} {
		if errors.Is(err, e) {
			return true
		}
	}
	return false
}

func locked(path string, err error) error {
	if errors.Is(err, berrors.ErrTimeout) {
		return fmt.Errorf("open %s: %w; is another millwrightd running?", path, ErrLocked)
	}
	return err
}

var asideNames = map[taskv1.JournalReason]string{
	taskv1.JournalReason_JOURNAL_REASON_CORRUPT:     "corrupt",
	taskv1.JournalReason_JOURNAL_REASON_ROLLED_BACK: "rolled-back",
	taskv1.JournalReason_JOURNAL_REASON_JOINED:      "former-enrolment",
}

// openBolt turns a panic on a damaged file into an error.
func openBolt(path string, timeout time.Duration, readOnly bool) (db *bolt.DB, err error) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("open state file: %v", r)
		}
	}()
	db, err = bolt.Open(path, 0o600, &bolt.Options{
		Timeout:         timeout,
		ReadOnly:        readOnly,
		NoFreelistSync:  true,
		FreelistType:    bolt.FreelistMapType,
		InitialMmapSize: mmapSize,
	})
	if err != nil {
		return nil, fmt.Errorf("open state file: %w", err)
	}
	db.AllocSize = growBy
	return db, nil
}

// inspect reads the whole file and holds it against its mark and the enrolment.
// It is opened for reading only: to write, bbolt looks for free pages in a
// goroutine of its own, in which the fault of a damaged page could not be
// survived.
func (s *Store) inspect(path string) (reason taskv1.JournalReason, err error) {
	const corrupt = taskv1.JournalReason_JOURNAL_REASON_CORRUPT
	db, err := openBolt(path, s.cfg.LockTimeout, true)
	switch {
	case unavailable(err):
		return 0, locked(path, err)
	case err != nil:
		s.cfg.Logger.Error("state file cannot be read", "path", path, "err", err)
		return corrupt, nil
	}
	reason, err = s.compare(db)
	if cerr := db.Close(); cerr != nil && err == nil {
		err = fmt.Errorf("close state file: %w", cerr)
	}
	if errors.Is(err, errDamaged) {
		s.cfg.Logger.Error("state file cannot be read", "path", path, "err", err)
		return corrupt, nil
	}
	return reason, err
}

// errDamaged is wrapped by what a damaged file makes of a read.
var errDamaged = errors.New("the file is damaged")

func (s *Store) compare(db *bolt.DB) (reason taskv1.JournalReason, err error) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("%w: %v", errDamaged, r)
		}
	}()
	err = view(db, func(tx *Tx) error {
		if err := checkVersion(tx.bolt, len(migrations)); err != nil {
			return err
		}
		meta, err := tx.Journal()
		if err != nil {
			return fmt.Errorf("%w: %w", errDamaged, err)
		}
		head, err := tx.head()
		if err != nil {
			return fmt.Errorf("%w: %w", errDamaged, err)
		}
		if err := walk(tx.bolt); err != nil {
			return fmt.Errorf("%w: %w", errDamaged, err)
		}
		reason = s.verdict(meta, head.seq, uint64(tx.bolt.ID()))
		return nil
	})
	return reason, err
}

// walk touches all that is in the file, so that a page that is damaged or gone
// is found here, and not while tasks run. It costs one read of the file.
func walk(tx *bolt.Tx) error {
	sum := byte(0)
	defer func() { runtime.KeepAlive(sum) }()
	return tx.ForEach(func(_ []byte, b *bolt.Bucket) error {
		var last []byte
		return b.ForEach(func(k, v []byte) error {
			if bytes.Compare(k, last) <= 0 {
				return fmt.Errorf("key %x after %x: %w", k, last, ErrInvariant)
			}
			last = k
			for i := 0; i < len(v); i += 512 {
				sum ^= v[i]
			}
			return nil
		})
	})
}

func (s *Store) verdict(meta *agentv1.JournalMeta, seq, transaction uint64) taskv1.JournalReason {
	m := s.mark.last
	switch {
	case m.GetCondemned():
		return taskv1.JournalReason_JOURNAL_REASON_ROLLED_BACK
	case meta.GetNode() != s.cfg.Node || meta.GetGeneration() != s.cfg.Generation:
		return taskv1.JournalReason_JOURNAL_REASON_JOINED
	case m == nil:
		return 0 // it was made, and the agent died before its first mark
	case meta.GetJournalId() != m.GetJournalId():
		// The same, after another journal: it holds nothing but its opening.
		if meta.GetPreviousJournalId() == m.GetJournalId() && seq == 1 {
			return 0
		}
		return taskv1.JournalReason_JOURNAL_REASON_ROLLED_BACK
	case seq < m.GetSeq() || transaction < m.GetTransaction():
		return taskv1.JournalReason_JOURNAL_REASON_ROLLED_BACK
	}
	return 0
}

// setAside renames a file that is not used any more; nothing is ever deleted.
func (s *Store) setAside(path, why string) error {
	base := fmt.Sprintf("%s.%s.%d", path, why, s.cfg.Clock.Now().Unix())
	for i := 0; ; i++ {
		to := base
		if i > 0 {
			to += "." + strconv.Itoa(i)
		}
		if _, err := os.Lstat(to); err == nil {
			continue
		}
		if err := os.Rename(path, to); err != nil {
			return fmt.Errorf("set state file aside: %w", err)
		}
		s.cfg.Logger.Error("state file set aside", "path", to, "why", why)
		return syncDir(s.cfg.Dir)
	}
}
