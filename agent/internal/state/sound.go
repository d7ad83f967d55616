package state

import (
	"context"
	"errors"
	"fmt"
	"os"
	"syscall"

	bolt "go.etcd.io/bbolt"

	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
)

// soundness is what is known of the file as a whole. Only the one who commits
// touches it.
type soundness struct {
	// sound: all of it was looked at, by this agent or by one before it, and
	// nobody else has changed it since.
	sound bool
	// unseen: the agent before was killed, and all of it was not looked at since.
	unseen bool
	// glanced: it was opened without a look at all of it.
	glanced bool
	// closing: the mark that is written next is the last one.
	closing bool
	// growing is what the commit under way adds to the sizes.
	growing sizes
}

// mostFreePages is up to how many bytes the free pages are noted at each commit.
// A file in which they are not noted is read whole by bbolt when it is opened.
const mostFreePages = 16 << 10

// noteFreePages decides whether the commit under way notes the free pages.
func (s *Store) noteFreePages() {
	s.db.NoFreelistSync = s.db.Stats().FreelistInuse > mostFreePages
}

// look looks at the file. A file that is as this node's agent has left it, and
// that was whole then, is not read again from end to end: only what the agent
// goes on with is. Whatever that finds is for the look at all of it to judge.
func (s *Store) look(ctx context.Context, path string) (Facts, error) {
	s.soundness = soundness{}
	if s.trusted(path) {
		was := s.mark.last.GetSound()
		f, err := s.cfg.Inspect(ctx, path, false)
		switch {
		case err == nil && f.FreePagesSum != nil && *f.FreePagesSum == was.GetFreePagesSum() &&
			f.Transaction == s.mark.last.GetTransaction() && s.verdict(f) == 0:
			s.soundness = soundness{sound: true, unseen: was.GetUnseen() || !was.GetClosed(), glanced: true}
			return f, nil
		case err != nil && !errors.Is(err, ErrDamaged):
			return f, err
		}
		s.cfg.Logger.WarnContext(ctx, "state file has changed although nobody wrote to it: all of it is looked at", "path", path, "file", f, "err", err)
	}
	f, err := s.cfg.Inspect(ctx, path, true)
	s.sound = err == nil
	return f, err
}

// trusted reports whether the file at path is the one that the mark describes.
// The kernel notes each change of a file in its inode. After a kill in this boot
// that is all it takes, once; after a boot the agent must have closed the file,
// since a loss of power can leave an old inode with new pages, or the other way
// round.
func (s *Store) trusted(path string) bool {
	was := s.mark.last.GetSound()
	sameBoot := was.GetBootId() == s.cfg.BootID && s.cfg.BootID != ""
	if was == nil || was.FreePagesSum == nil || !was.GetClosed() && (!sameBoot || was.GetUnseen()) {
		return false
	}
	info, err := os.Lstat(path)
	if err != nil {
		return false
	}
	now, ok := stamped(info)
	return ok && now.Inode == was.GetInode() && now.SizeBytes == was.GetSizeBytes() &&
		now.ChangeTimeNanos == was.GetChangeTimeNanos() && (now.Device == was.GetDevice() || !sameBoot)
}

// stamped is what the kernel says of a file.
func stamped(info os.FileInfo) (*agentv1.SoundFile, bool) {
	st, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return nil, false
	}
	return &agentv1.SoundFile{Device: st.Dev, Inode: st.Ino, SizeBytes: st.Size, ChangeTimeNanos: st.Ctim.Nano()}, true
}

// describe describes the file after the transaction for the mark; nil when it is
// not known to be sound, or the start would not be quicker.
func (s *Store) describe(transaction uint64) *agentv1.SoundFile {
	if !s.sound {
		return nil
	}
	metas, _ := openPages(s.raw)
	info, err := s.raw.Stat()
	if err != nil || len(metas) == 0 || metas[0].transaction != transaction {
		return nil
	}
	d, ok := stamped(info)
	sum, err := (&pageReader{file: s.raw, meta: metas[0]}).freePagesSum()
	if !ok || err != nil || sum == nil {
		return nil
	}
	d.BootId, d.FreePagesSum, d.Closed, d.Unseen = s.cfg.BootID, sum, s.closing, s.unseen
	s.news.Lock()
	defer s.news.Unlock()
	d.UnacknowledgedBytes, d.KeptBytes = s.sizes.unacked+s.growing.unacked, s.sizes.kept+s.growing.kept
	return d
}

// seal leaves the file so that the next start need not read all of it.
func (s *Store) seal() error {
	if !s.sound {
		return nil
	}
	if s.mark.last.GetSound() == nil {
		s.db.NoFreelistSync = false
		if err := s.db.Update(func(*bolt.Tx) error { return nil }); err != nil {
			return fmt.Errorf("note the free pages of the state file: %w", err)
		}
	}
	if err := s.raw.Sync(); err != nil { // with its inode, which commits leave out
		return fmt.Errorf("sync state file: %w", err)
	}
	s.closing = true
	return s.raiseMark()
}
