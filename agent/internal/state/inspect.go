package state

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime/debug"
	"strconv"
	"strings"
	"time"

	bolt "go.etcd.io/bbolt"
	berrors "go.etcd.io/bbolt/errors"
	"golang.org/x/sys/unix"

	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
)

// judge opens the file, or says why a new journal must begin. In that case the
// old file, if there was one, has been set aside.
func (s *Store) judge(ctx context.Context, path string) (taskv1.JournalReason, error) {
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
	facts, err := s.look(ctx, path)
	switch {
	case errors.Is(err, ErrDamaged):
		s.cfg.Logger.ErrorContext(ctx, "state file is damaged", "path", path, "err", err)
		return taskv1.JournalReason_JOURNAL_REASON_CORRUPT, s.setAside(path, "corrupt")
	case err != nil:
		return use, err
	}
	if reason := s.verdict(facts); reason != use {
		s.cfg.Logger.ErrorContext(ctx, "state file is not the newest of this node", "path", path, "file", facts,
			"mark", s.mark.last, "reason", reason.String())
		return reason, s.setAside(path, asideNames[reason])
	}
	s.db, err = openBolt(path, s.cfg.LockTimeout, false)
	switch {
	case unavailable(err):
		return use, locked(path, err)
	case err != nil: // what bbolt finds when it looks for free pages
		s.cfg.Logger.Error("state file cannot be used", "path", path, "err", err)
		return taskv1.JournalReason_JOURNAL_REASON_CORRUPT, s.setAside(path, "corrupt")
	case s.glanced && !s.trusted(path): // someone has just changed it
		if err := s.db.Close(); err != nil {
			return use, fmt.Errorf("close state file: %w", err)
		}
		return s.judge(ctx, path)
	}
	if err := migrate(s.db, migrations); err != nil {
		return use, errors.Join(err, s.db.Close())
	}
	return use, nil
}

// unavailable reports whether err says nothing about the file's content: it is
// locked, or the process may not open it, cannot read it or lacks what that
// takes.
func unavailable(err error) bool {
	for _, e := range []error{
		berrors.ErrTimeout, os.ErrPermission, unix.EMFILE, unix.ENFILE, unix.ENOMEM, unix.ENOSPC, unix.EROFS, unix.EINTR,
		unix.EIO, unix.ESTALE, unix.EAGAIN,
	} {
		if errors.Is(err, e) {
			return true
		}
	}
	return false
}

func locked(path string, err error) error {
	if errors.Is(err, berrors.ErrTimeout) {
		who := "a process that cannot be named"
		if pids := Holders(path); len(pids) > 0 {
			who = "process " + strings.Join(pids, ", ")
		}
		return fmt.Errorf("open %s: %w: %s; is another millwrightd running? Once it has ended, this agent goes on by itself", path, ErrLocked, who)
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

// verdict holds what a file says of itself against its mark and the enrolment.
func (s *Store) verdict(f Facts) taskv1.JournalReason {
	m := s.mark.last
	switch {
	case m.GetCondemned():
		return taskv1.JournalReason_JOURNAL_REASON_ROLLED_BACK
	case f.Node != s.cfg.Node || f.Generation != s.cfg.Generation:
		return taskv1.JournalReason_JOURNAL_REASON_JOINED
	case m == nil && f.Seq <= 1:
		return 0 // it was made, and the agent died before its first mark
	case m == nil:
		// Without a mark nobody can say that it is the newest.
		return taskv1.JournalReason_JOURNAL_REASON_ROLLED_BACK
	case f.JournalID != m.GetJournalId():
		// The same, after another journal: it holds nothing but its opening.
		if f.PreviousJournalID == m.GetJournalId() && f.Seq == 1 {
			return 0
		}
		return taskv1.JournalReason_JOURNAL_REASON_ROLLED_BACK
	case f.Seq < m.GetSeq() || f.Transaction < m.GetTransaction():
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
