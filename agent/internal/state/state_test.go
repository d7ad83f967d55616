package state_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/millwright/agent/internal/state"
	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
)

var t0 = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)

// fakeClock stands where it is put.
type fakeClock struct {
	mu  sync.Mutex
	now time.Time // guarded by mu
}

func (c *fakeClock) Now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.now
}

func (c *fakeClock) Boot() time.Duration { return c.Now().Sub(t0) + time.Hour }

func (c *fakeClock) set(t time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.now = t
}

func config(dir string, clock *fakeClock) state.Config {
	return state.Config{
		Dir: dir, Node: "gpu-001", Generation: 1, BootID: "boot-a", Clock: clock,
		Logger: slog.New(slog.DiscardHandler), JustJoined: true, JoinFloor: t0.Add(-time.Minute),
		LockTimeout: 50 * time.Millisecond,
	}
}

func open(t *testing.T, cfg state.Config) *state.Store {
	t.Helper()
	s, err := state.Open(t.Context(), cfg)
	if err != nil {
		t.Fatalf("Open: %v", err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Errorf("Close: %v", err)
		}
	})
	return s
}

func head(t *testing.T, s *state.Store) state.Head {
	t.Helper()
	var h state.Head
	if err := s.View(func(tx *state.Tx) (err error) {
		h, err = tx.Head()
		return err
	}); err != nil {
		t.Fatalf("Head: %v", err)
	}
	return h
}

func update(t *testing.T, s *state.Store, fn func(*state.Tx) error) {
	t.Helper()
	if err := s.Update(fn); err != nil {
		t.Fatalf("Update: %v", err)
	}
}

func started(id string) *taskv1.Event {
	return &taskv1.Event{Payload: &taskv1.Event_Started{Started: &taskv1.TaskStarted{TaskId: id}}}
}

func appendEvent(id string) func(*state.Tx) error {
	return func(tx *state.Tx) error {
		_, err := tx.Append(started(id))
		return err
	}
}

func openedEvent(t *testing.T, s *state.Store) *taskv1.Event {
	t.Helper()
	var ev taskv1.Event
	if err := s.View(func(tx *state.Tx) error {
		frames, _, err := tx.Frames(0, 1)
		if err != nil {
			return err
		}
		return proto.Unmarshal(frames[0], &ev)
	}); err != nil {
		t.Fatal(err)
	}
	return &ev
}

func TestFirstJournal(t *testing.T) {
	clock := &fakeClock{now: t0}
	s := open(t, config(t.TempDir(), clock))
	ev := openedEvent(t, s)
	if got := ev.GetJournalOpened().GetReason(); got != taskv1.JournalReason_JOURNAL_REASON_JOINED {
		t.Errorf("reason = %v, want JOINED", got)
	}
	if got := ev.GetJournalOpened().GetFloor().AsTime(); !got.Equal(t0.Add(-time.Minute)) {
		t.Errorf("floor = %v, want the join bundle's", got)
	}
	want := sha256.Sum256([]byte("gpu-001\x001\x00"))
	if string(ev.GetPrevHash()) != string(want[:]) {
		t.Errorf("prev_hash of the first frame = %x, want %x", ev.GetPrevHash(), want)
	}
	if err := s.Check(); err != nil {
		t.Errorf("Check: %v", err)
	}
}

func TestReopenKeepsJournal(t *testing.T) {
	clock := &fakeClock{now: t0}
	cfg := config(t.TempDir(), clock)
	s := open(t, cfg)
	before := head(t, s)
	update(t, s, appendEvent("a"))
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	cfg.JustJoined = false
	s = open(t, cfg)
	after := head(t, s)
	if after.JournalID != before.JournalID || after.InstanceID != before.InstanceID || after.LastSeq != 2 {
		t.Errorf("after reopening: %+v, want journal %s with two frames", after, before.JournalID)
	}
	if err := s.Check(); err != nil {
		t.Errorf("Check: %v", err)
	}
	info, err := os.Stat(filepath.Join(cfg.Dir, "state.db"))
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("state.db: mode %v, err %v, want 0600", info.Mode(), err)
	}
}

// TestLostJournal damages the state in each way that is told apart, and wants a
// new journal with the right reason, a raised floor, and the old file aside.
func TestLostJournal(t *testing.T) {
	for _, tc := range []struct {
		name   string
		damage func(t *testing.T, cfg *state.Config, old []byte)
		reason taskv1.JournalReason
		aside  bool
	}{
		{"deleted", func(t *testing.T, cfg *state.Config, _ []byte) {
			remove(t, filepath.Join(cfg.Dir, "state.db"))
		}, taskv1.JournalReason_JOURNAL_REASON_MISSING, false},
		{"deleted with its mark", func(t *testing.T, cfg *state.Config, _ []byte) {
			remove(t, filepath.Join(cfg.Dir, "state.db"))
			remove(t, filepath.Join(cfg.Dir, "state.mark"))
		}, taskv1.JournalReason_JOURNAL_REASON_MISSING, false},
		{"emptied", func(t *testing.T, cfg *state.Config, _ []byte) {
			write(t, filepath.Join(cfg.Dir, "state.db"), nil)
		}, taskv1.JournalReason_JOURNAL_REASON_CORRUPT, true},
		{"zeroed", func(t *testing.T, cfg *state.Config, old []byte) {
			write(t, filepath.Join(cfg.Dir, "state.db"), make([]byte, len(old)))
		}, taskv1.JournalReason_JOURNAL_REASON_CORRUPT, true},
		{"truncated", func(t *testing.T, cfg *state.Config, old []byte) {
			write(t, filepath.Join(cfg.Dir, "state.db"), old[:100])
		}, taskv1.JournalReason_JOURNAL_REASON_CORRUPT, true},
		{"rolled back", func(t *testing.T, cfg *state.Config, old []byte) {
			write(t, filepath.Join(cfg.Dir, "state.db"), old)
		}, taskv1.JournalReason_JOURNAL_REASON_ROLLED_BACK, true},
		{"last commit lost by a damaged meta page", func(t *testing.T, cfg *state.Config, _ []byte) {
			damageNewestMeta(t, filepath.Join(cfg.Dir, "state.db"))
		}, taskv1.JournalReason_JOURNAL_REASON_ROLLED_BACK, true},
		{"enrolled anew", func(t *testing.T, cfg *state.Config, _ []byte) {
			cfg.Generation = 2
		}, taskv1.JournalReason_JOURNAL_REASON_JOINED, true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			clock := &fakeClock{now: t0.Add(time.Hour)}
			cfg := config(t.TempDir(), clock)
			s := open(t, cfg)
			before := head(t, s)
			old := read(t, filepath.Join(cfg.Dir, "state.db"))
			update(t, s, appendEvent("a"))
			update(t, s, func(tx *state.Tx) error {
				tx.Issued(issuedLast) // by a signer whose clock is ahead
				return appendEvent("b")(tx)
			})
			if err := s.Close(); err != nil {
				t.Fatal(err)
			}
			cfg.JustJoined = false
			clock.set(t0) // the wall went back: the mark still knows better
			cfg.IdentityNotBefore = t0.Add(30 * time.Minute)
			tc.damage(t, &cfg, old)
			s = open(t, cfg)
			after := head(t, s)
			if after.JournalID == before.JournalID || after.LastSeq != 1 {
				t.Errorf("journal %s with %d frames after %s, want a new one", after.JournalID, after.LastSeq, before.JournalID)
			}
			ev := openedEvent(t, s).GetJournalOpened()
			if ev.GetReason() != tc.reason {
				t.Errorf("reason = %v, want %v", ev.GetReason(), tc.reason)
			}
			checkFloor(t, tc.name, ev)
			if got := asides(t, cfg.Dir); (got > 0) != tc.aside {
				t.Errorf("%d files set aside, want some: %v", got, tc.aside)
			}
			if err := s.Check(); err != nil {
				t.Errorf("Check: %v", err)
			}
		})
	}
}

// TestDamagedPages truncates the file at each page and zeroes each page. Each
// time the store opens: with the old journal where nothing of it was hurt, and
// otherwise with a new one.
func TestDamagedPages(t *testing.T) {
	clock := &fakeClock{now: t0}
	cfg := config(t.TempDir(), clock)
	s := open(t, cfg)
	for i := range 60 {
		id := fmt.Sprintf("task-%02d", i)
		update(t, s, func(tx *state.Tx) error {
			if err := tx.PutSeen(id, &agentv1.SeenRecord{LeafHash: make([]byte, 3000)}); err != nil {
				return err
			}
			_, err := tx.Append(started(id))
			return err
		})
	}
	before := head(t, s)
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	db, mark := read(t, filepath.Join(cfg.Dir, "state.db")), read(t, filepath.Join(cfg.Dir, "state.mark"))
	size, outcomes := os.Getpagesize(), map[string]int{}
	for page := range len(db) / size {
		if page > 3 && bytes.Count(db[page*size:(page+1)*size], []byte{0}) == size {
			continue // never used
		}
		for _, how := range []string{"truncated", "zeroed"} {
			damaged := append([]byte(nil), db...)
			if how == "truncated" {
				damaged = damaged[:page*size]
			} else {
				clear(damaged[page*size : (page+1)*size])
			}
			c := config(filepath.Join(cfg.Dir, "damaged"), clock)
			c.JustJoined = false
			if err := os.Mkdir(c.Dir, 0o700); err != nil {
				t.Fatal(err)
			}
			write(t, filepath.Join(c.Dir, "state.db"), damaged)
			write(t, filepath.Join(c.Dir, "state.mark"), mark)
			s, err := state.Open(t.Context(), c)
			if err != nil {
				t.Fatalf("page %d %s: Open = %v", page, how, err)
			}
			h := head(t, s)
			switch {
			case h.JournalID == before.JournalID && h.LastSeq != before.LastSeq:
				t.Errorf("page %d %s: the journal goes on at frame %d of %d", page, how, h.LastSeq, before.LastSeq)
			case h.JournalID == before.JournalID:
				outcomes["kept"]++
				err = s.Check()
			default:
				outcomes["anew"]++
			}
			if err == nil {
				err = s.Update(appendEvent("x"))
			}
			if err != nil {
				t.Errorf("page %d %s: %v", page, how, err)
			}
			if err := s.Close(); err != nil {
				t.Errorf("page %d %s: Close = %v", page, how, err)
			}
			if err := os.RemoveAll(c.Dir); err != nil {
				t.Fatal(err)
			}
		}
	}
	t.Logf("%d pages: %v", len(db)/size, outcomes)
	if outcomes["anew"] < 4 || outcomes["kept"] == 0 {
		t.Errorf("outcomes = %v, want some of each", outcomes)
	}
}

// issuedLast is when the last task that a lost journal accepted was issued.
var issuedLast = t0.Add(time.Hour + 3*time.Minute)

// checkFloor wants a floor below which nothing that the lost journal accepted
// passes, also when the node has enrolled anew with a bundle made before.
func checkFloor(t *testing.T, name string, ev *taskv1.JournalOpened) {
	t.Helper()
	want := issuedLast
	if name == "deleted with its mark" {
		want = t0.Add(30 * time.Minute) // only the identity knows
	}
	if got := ev.GetFloor().AsTime(); !got.Equal(want) {
		t.Errorf("floor = %v, want %v", got, want)
	}
}

func asides(t *testing.T, dir string) int {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), "state.db.") {
			n++
		}
	}
	return n
}

func remove(t *testing.T, path string) {
	t.Helper()
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
}

func read(t *testing.T, path string) []byte {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func write(t *testing.T, path string, b []byte) {
	t.Helper()
	if err := os.WriteFile(path, b, 0o600); err != nil {
		t.Fatal(err)
	}
}

// damageNewestMeta flips a byte in the meta page with the higher transaction
// number, so that bbolt silently uses the other one.
func damageNewestMeta(t *testing.T, path string) {
	t.Helper()
	b := read(t, path)
	size := os.Getpagesize()
	newest, at := uint64(0), 0
	for _, page := range []int{0, 1} {
		const txid = 16 + 48 // page header, then txid within the meta
		n := uint64(0)
		for i := range 8 {
			n |= uint64(b[page*size+txid+i]) << (8 * i)
		}
		if n > newest {
			newest, at = n, page
		}
	}
	b[at*size+16+56] ^= 0xff // its checksum
	write(t, path, b)
}

func TestLocked(t *testing.T) {
	cfg := config(t.TempDir(), &fakeClock{now: t0})
	open(t, cfg)
	_, err := state.Open(t.Context(), cfg)
	if !errors.Is(err, state.ErrLocked) || !strings.Contains(err.Error(), "another millwrightd") {
		t.Errorf("second Open = %v, want ErrLocked with a hint", err)
	}
}

// TestShortOfFiles opens the state while the process may open no more files:
// that says nothing about the journal, which is there later.
func TestShortOfFiles(t *testing.T) {
	cfg := config(t.TempDir(), &fakeClock{now: t0})
	s := open(t, cfg)
	before := head(t, s)
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	free, err := unix.Open(cfg.Dir, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.Close(free); err != nil {
		t.Fatal(err)
	}
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		t.Fatal(err)
	}
	// One more, for the mark.
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: uint64(free) + 1, Max: limit.Max}); err != nil {
		t.Fatal(err)
	}
	_, err = state.Open(t.Context(), cfg)
	if err2 := unix.Setrlimit(unix.RLIMIT_NOFILE, &limit); err2 != nil {
		t.Fatal(err2)
	}
	if !errors.Is(err, unix.EMFILE) {
		t.Errorf("Open = %v, want EMFILE", err)
	}
	if after := head(t, open(t, cfg)); after.JournalID != before.JournalID {
		t.Errorf("journal %s became %s", before.JournalID, after.JournalID)
	}
}

// TestCrashBeforeMark takes the mark of before the last commit: the file is
// newer, and that is fine.
func TestCrashBeforeMark(t *testing.T) {
	cfg := config(t.TempDir(), &fakeClock{now: t0})
	s := open(t, cfg)
	mark := read(t, filepath.Join(cfg.Dir, "state.mark"))
	update(t, s, appendEvent("a"))
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	write(t, filepath.Join(cfg.Dir, "state.mark"), mark)
	cfg.JustJoined = false
	if h := head(t, open(t, cfg)); h.LastSeq != 2 {
		t.Errorf("last frame = %d, want 2", h.LastSeq)
	}
}

// TestTornMark tears the newer slot: the older one is used.
func TestTornMark(t *testing.T) {
	for slot := range 2 {
		cfg := config(t.TempDir(), &fakeClock{now: t0})
		s := open(t, cfg)
		update(t, s, appendEvent("a"))
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
		path := filepath.Join(cfg.Dir, "state.mark")
		mark := read(t, path)
		for i := range 100 {
			mark[slot*512+i+20] ^= 0x55
		}
		write(t, path, mark)
		cfg.JustJoined = false
		if h := head(t, open(t, cfg)); h.LastSeq != 2 {
			t.Errorf("slot %d torn: last frame = %d, want 2", slot, h.LastSeq)
		}
	}
}

func TestCondemn(t *testing.T) {
	cfg := config(t.TempDir(), &fakeClock{now: t0})
	s := open(t, cfg)
	before := head(t, s)
	if err := s.Condemn(); err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	cfg.JustJoined = false
	s = open(t, cfg)
	ev := openedEvent(t, s)
	if ev.GetJournalOpened().GetReason() != taskv1.JournalReason_JOURNAL_REASON_ROLLED_BACK || ev.GetJournalOpened().GetPreviousJournalId() != before.JournalID {
		t.Errorf("opened = %v, want ROLLED_BACK after %s", ev.GetJournalOpened(), before.JournalID)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if again := head(t, open(t, cfg)); again.JournalID != ev.GetJournalId() {
		t.Errorf("the new journal was set aside too")
	}
}

// TestGroupCommit runs many writers at once, some of which fail: each
// successful one is durable when it returns, no failing one leaves anything,
// and the frames form one chain.
func TestGroupCommit(t *testing.T) {
	cfg := config(t.TempDir(), &fakeClock{now: t0})
	s := open(t, cfg)
	boom := errors.New("boom")
	var wg sync.WaitGroup
	for i := range 200 {
		wg.Go(func() {
			id := fmt.Sprintf("task-%03d", i)
			err := s.Update(func(tx *state.Tx) error {
				if err := tx.PutSeen(id, &agentv1.SeenRecord{LeafHash: []byte(id)}); err != nil {
					return err
				}
				if _, err := tx.Append(started(id)); err != nil {
					return err
				}
				if i%7 == 0 {
					return boom
				}
				if i%31 == 0 {
					panic("a change that panics")
				}
				return nil
			})
			ok := i%7 != 0 && i%31 != 0
			if (err == nil) != ok {
				t.Errorf("Update %d = %v, want success %v", i, err, ok)
			}
			seen := s.View(func(tx *state.Tx) error {
				_, err := tx.Seen(id)
				return err
			})
			if (seen == nil) != ok {
				t.Errorf("after Update %d: Seen = %v, want there %v", i, seen, ok)
			}
		})
	}
	wg.Wait()
	want := uint64(1)
	for i := range 200 {
		if i%7 != 0 && i%31 != 0 {
			want++
		}
	}
	if h := head(t, s); h.LastSeq != want {
		t.Errorf("last frame = %d, want %d", h.LastSeq, want)
	}
	if err := s.Check(); err != nil {
		t.Errorf("Check: %v", err)
	}
}

func TestUpdateReadsItsOwnWrites(t *testing.T) {
	s := open(t, config(t.TempDir(), &fakeClock{now: t0}))
	update(t, s, func(tx *state.Tx) error { return tx.PutIntent(&agentv1.IntentRecord{Key: "mount:/b"}) })
	update(t, s, func(tx *state.Tx) error {
		for _, k := range []string{"mount:/a", "mount:/c"} {
			if err := tx.PutIntent(&agentv1.IntentRecord{Key: k}); err != nil {
				return err
			}
		}
		tx.DeleteIntent("mount:/b")
		var got []string
		if err := tx.Intents(func(r *agentv1.IntentRecord) error {
			got = append(got, r.GetKey())
			return nil
		}); err != nil {
			return err
		}
		if fmt.Sprint(got) != "[mount:/a mount:/c]" {
			t.Errorf("intents = %v, want a and c", got)
		}
		return nil
	})
}

func TestTerminalStateNeverChanges(t *testing.T) {
	s := open(t, config(t.TempDir(), &fakeClock{now: t0}))
	rec := &agentv1.TaskRecord{TaskId: "a", State: taskv1.TaskState_TASK_STATE_SUCCEEDED, Origin: state.OriginTask}
	update(t, s, func(tx *state.Tx) error { return tx.PutTask(rec) })
	rec.State = taskv1.TaskState_TASK_STATE_FAILED
	if err := s.Update(func(tx *state.Tx) error { return tx.PutTask(rec) }); !errors.Is(err, state.ErrInvariant) {
		t.Errorf("PutTask = %v, want ErrInvariant", err)
	}
}

func TestNextFramesWaits(t *testing.T) {
	s := open(t, config(t.TempDir(), &fakeClock{now: t0}))
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, _, _, err := s.NextFrames(ctx, 1, 10); !errors.Is(err, context.Canceled) {
		t.Errorf("NextFrames with nothing to return = %v, want context.Canceled", err)
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		_, frames, gap, err := s.NextFrames(t.Context(), 1, 10)
		if err != nil || gap || len(frames) != 1 {
			t.Errorf("NextFrames = %d frames, gap %v, %v, want one", len(frames), gap, err)
		}
	})
	update(t, s, appendEvent("a"))
	wg.Wait()
}

func TestAcknowledgeAndSweep(t *testing.T) {
	clock := &fakeClock{now: t0}
	cfg := config(t.TempDir(), clock)
	s := open(t, cfg)
	for i := range 10 {
		update(t, s, appendEvent(fmt.Sprint(i)))
	}
	total := s.UnackedBytes()
	err := s.Update(func(tx *state.Tx) error { return tx.Acknowledge(12) })
	if !errors.Is(err, state.ErrAckAhead) {
		t.Errorf("Acknowledge(12) of 11 = %v, want ErrAckAhead", err)
	}
	update(t, s, func(tx *state.Tx) error { return tx.Acknowledge(6) })
	update(t, s, func(tx *state.Tx) error { return tx.Acknowledge(3) }) // late: no effect
	if h := head(t, s); h.AckedSeq != 6 || h.FirstSeq != 1 {
		t.Errorf("head = %+v, want 6 acknowledged and all kept", h)
	}
	if got := s.UnackedBytes(); got <= 0 || got >= total {
		t.Errorf("unacknowledged bytes = %d of %d, want fewer", got, total)
	}
	if err := s.Sweep(t0.Add(state.KeepFor - time.Minute)); err != nil {
		t.Fatal(err)
	}
	if h := head(t, s); h.FirstSeq != 1 {
		t.Errorf("first frame after an early sweep = %d, want 1", h.FirstSeq)
	}
	if err := s.Sweep(t0.Add(state.KeepFor + 24*time.Hour)); err != nil {
		t.Fatal(err)
	}
	if h := head(t, s); h.FirstSeq != 7 || h.LastSeq != 11 {
		t.Errorf("frames after the sweep = %d to %d, want 7 to 11: none that is not acknowledged may go", h.FirstSeq, h.LastSeq)
	}
	if err := s.View(func(tx *state.Tx) error {
		frames, gap, err := tx.Frames(2, 100)
		if len(frames) != 5 || !gap {
			t.Errorf("Frames(2) = %d frames, gap %v, want 5 behind a gap", len(frames), gap)
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
	if err := s.Check(); err != nil {
		t.Errorf("Check: %v", err)
	}
	want := s.UnackedBytes()
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	cfg.JustJoined = false
	if got := open(t, cfg).UnackedBytes(); got != want {
		t.Errorf("unacknowledged bytes after reopening = %d, want %d", got, want)
	}
}

// TestSweepBySize keeps at most 64 MiB of acknowledged frames.
func TestSweepBySize(t *testing.T) {
	s := open(t, config(t.TempDir(), &fakeClock{now: t0}))
	big := &taskv1.Event{Payload: &taskv1.Event_Waiting{Waiting: &taskv1.TaskWaiting{Message: strings.Repeat("x", 8<<20)}}}
	for range 10 {
		update(t, s, func(tx *state.Tx) error {
			_, err := tx.Append(proto.Clone(big).(*taskv1.Event))
			return err
		})
	}
	update(t, s, func(tx *state.Tx) error { return tx.Acknowledge(11) })
	if err := s.Sweep(t0); err != nil {
		t.Fatal(err)
	}
	if h := head(t, s); h.FirstSeq != 5 {
		t.Errorf("first frame = %d, want 5: seven frames of 8 MiB fit", h.FirstSeq)
	}
	if err := s.View(func(tx *state.Tx) error {
		frames, _, err := tx.Frames(0, 100)
		if len(frames) != 1 {
			t.Errorf("%d frames of 8 MiB at once, want 1", len(frames))
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
}

func TestSweepSeenAndTasks(t *testing.T) {
	s := open(t, config(t.TempDir(), &fakeClock{now: t0}))
	put := func(id string, seq uint64, acknowledged bool, forget time.Time) {
		update(t, s, func(tx *state.Tx) error {
			if err := tx.PutSeen(id, &agentv1.SeenRecord{ForgetAfter: timestamppb.New(forget)}); err != nil {
				return err
			}
			if err := tx.PutStep(id, 0, &agentv1.StepRecord{Out: []byte("x")}); err != nil {
				return err
			}
			return tx.PutTask(&agentv1.TaskRecord{
				TaskId: id, State: taskv1.TaskState_TASK_STATE_FAILED, AcceptSeq: seq,
				EndTime: timestamppb.New(t0), Acknowledged: acknowledged, Origin: state.OriginTask,
			})
		})
	}
	put("old", 2, true, t0.Add(time.Hour))
	put("unacknowledged", 3, false, t0.Add(time.Hour))
	put("remembered", 4, true, t0.Add(30*24*time.Hour))
	if err := s.Sweep(t0.Add(8 * 24 * time.Hour)); err != nil {
		t.Fatal(err)
	}
	var ids []string
	if err := s.View(func(tx *state.Tx) error {
		if _, err := tx.Seen("remembered"); err != nil {
			t.Errorf("Seen(remembered) = %v", err)
		}
		if _, err := tx.Seen("old"); !errors.Is(err, state.ErrNotFound) {
			t.Errorf("Seen(old) = %v, want ErrNotFound", err)
		}
		if got := tx.Forgotten(); !got.Equal(t0.Add(time.Hour)) {
			t.Errorf("Forgotten = %v, want an hour after the start", got)
		}
		if sr, err := tx.Step("old", 0); err != nil || sr.GetOut() != nil {
			t.Errorf("step of a swept task = %v, %v", sr, err)
		}
		return tx.Tasks(func(id string) (bool, error) {
			ids = append(ids, id)
			return true, nil
		})
	}); err != nil {
		t.Fatal(err)
	}
	if fmt.Sprint(ids) != "[remembered unacknowledged]" {
		t.Errorf("tasks = %v, want the newest first without the old one", ids)
	}
}

func TestCheckFinds(t *testing.T) {
	running := taskv1.TaskState_TASK_STATE_RUNNING
	plan, err := proto.Marshal(&taskv1.Plan{Steps: []*taskv1.PlannedStep{{}, {}}})
	if err != nil {
		t.Fatal(err)
	}
	digest := sha256.Sum256(plan)
	for _, tc := range []struct {
		name string
		rec  *agentv1.TaskRecord
		seen bool
		step map[uint32]taskv1.StepPhase
		want string
	}{
		{"fine", &agentv1.TaskRecord{State: running, Plan: plan, PlanDigest: digest[:]}, true,
			map[uint32]taskv1.StepPhase{0: taskv1.StepPhase_STEP_PHASE_VERIFIED, 1: taskv1.StepPhase_STEP_PHASE_OBSERVED}, ""},
		{"not seen", &agentv1.TaskRecord{State: running, Plan: plan, PlanDigest: digest[:]}, false, nil, "not remembered"},
		{"no plan", &agentv1.TaskRecord{State: running}, true, nil, "without a plan"},
		{"other plan", &agentv1.TaskRecord{State: running, Plan: plan, PlanDigest: make([]byte, 32)}, true, nil, "digest"},
		{"beyond predecessor", &agentv1.TaskRecord{State: running, Plan: plan, PlanDigest: digest[:]}, true,
			map[uint32]taskv1.StepPhase{0: taskv1.StepPhase_STEP_PHASE_APPLIED, 1: taskv1.StepPhase_STEP_PHASE_OBSERVED}, "the one before it"},
		{"without predecessor", &agentv1.TaskRecord{State: running, Plan: plan, PlanDigest: digest[:]}, true,
			map[uint32]taskv1.StepPhase{1: taskv1.StepPhase_STEP_PHASE_OBSERVED}, "none before it"},
		{"beyond the plan", &agentv1.TaskRecord{State: running, Plan: plan, PlanDigest: digest[:]}, true,
			map[uint32]taskv1.StepPhase{7: taskv1.StepPhase_STEP_PHASE_OBSERVED}, "its plan has 2"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s := open(t, config(t.TempDir(), &fakeClock{now: t0}))
			update(t, s, func(tx *state.Tx) error {
				tc.rec.TaskId, tc.rec.AcceptSeq, tc.rec.Origin = "a", 2, state.OriginTask
				if tc.seen {
					if err := tx.PutSeen("a", &agentv1.SeenRecord{}); err != nil {
						return err
					}
				}
				for i, p := range tc.step {
					if err := tx.PutStep("a", i, &agentv1.StepRecord{Phase: p}); err != nil {
						return err
					}
				}
				return tx.PutTask(tc.rec)
			})
			err := s.Check()
			if tc.want == "" {
				if err != nil {
					t.Errorf("Check = %v, want nil", err)
				}
			} else if !errors.Is(err, state.ErrInvariant) || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("Check = %v, want ErrInvariant with %q", err, tc.want)
			}
		})
	}
}

func TestClosed(t *testing.T) {
	s := open(t, config(t.TempDir(), &fakeClock{now: t0}))
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if err := s.Update(appendEvent("a")); !errors.Is(err, state.ErrClosed) {
		t.Errorf("Update after Close = %v, want ErrClosed", err)
	}
	if err := s.View(func(*state.Tx) error { return nil }); !errors.Is(err, state.ErrClosed) {
		t.Errorf("View after Close = %v, want ErrClosed", err)
	}
}

// TestCloseWhenTheLastCommitFails has the commit fail that Close shares with a
// change that was in line before it.
func TestCloseWhenTheLastCommitFails(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir, clock := t.TempDir(), &fakeClock{now: t0}
		guarded, full, commits := make(chan error), errors.New("the disk is full"), 0
		cfg := config(dir, clock)
		armed := false
		cfg.Guard = func(written bool) error {
			if written || !armed {
				return nil
			}
			commits++
			return <-guarded
		}
		s, err := state.Open(t.Context(), cfg)
		if err != nil {
			t.Fatal(err)
		}
		armed = true
		var wg sync.WaitGroup
		var shared, closed error
		for _, do := range []func(){
			func() { _ = s.Update(appendEvent("a")) },
			func() { shared = s.Update(appendEvent("b")) },
			func() { closed = s.Close() },
		} {
			wg.Go(do)
			synctest.Wait() // each is in line, or in its commit, before the next comes
		}
		guarded <- nil
		guarded <- full
		wg.Wait()
		if commits != 2 || !errors.Is(shared, full) {
			t.Errorf("%d commits, and the change that Close was behind has %v; want 2 and %v", commits, shared, full)
		}
		if closed != nil {
			t.Errorf("Close() = %v, want nil: the change was not its own", closed)
		}
		again := config(dir, clock)
		again.JustJoined = false
		open(t, again) // fails when the file is still locked
	})
}

func BenchmarkUpdate(b *testing.B) {
	for _, writers := range []int{1, 64} {
		b.Run(fmt.Sprintf("writers=%d", writers), func(b *testing.B) {
			s, err := state.Open(b.Context(), config(b.TempDir(), &fakeClock{now: t0}))
			if err != nil {
				b.Fatal(err)
			}
			defer func() {
				if err := s.Close(); err != nil {
					b.Error(err)
				}
			}()
			rec := &agentv1.StepRecord{Before: make([]byte, 400)}
			work := make(chan uint32, b.N)
			for i := range b.N {
				work <- uint32(i)
			}
			close(work)
			var wg sync.WaitGroup
			b.ResetTimer()
			for range writers {
				wg.Go(func() {
					for i := range work {
						if err := s.Update(func(tx *state.Tx) error { return tx.PutStep("task", i, rec) }); err != nil {
							b.Error(err)
						}
					}
				})
			}
			wg.Wait()
			b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "records/s")
		})
	}
}
