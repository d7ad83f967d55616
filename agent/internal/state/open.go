package state

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/google/uuid"
	bolt "go.etcd.io/bbolt"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/millwright/agent/internal/clock"
	"github.com/gpuaas/millwright/agent/internal/crash"
	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
)

const (
	dbName   = "state.db"
	markName = "state.mark"

	defaultLockTimeout = 3 * time.Second
	// mmapSize is address space, not memory: a remap would wait for readers.
	mmapSize = 512 << 20
	// growBy is how much the file grows at a time.
	growBy = 1 << 20
)

// Config is what a store needs. Fields without "optional" must be set.
type Config struct {
	// Dir is the directory of the files. It is made, 0700, when missing.
	Dir string
	// Node is the node's name.
	Node string
	// Generation is the enrolment generation.
	Generation uint64
	// BootID is the kernel's boot id.
	BootID string
	// Clock tells the time.
	Clock clock.Clock
	// HighWater is kept in the mark, and takes what the mark holds of it;
	// optional.
	HighWater *clock.HighWater
	// Logger is told when a journal begins anew.
	Logger *slog.Logger
	// JustJoined says that the node joined in this start, so that there cannot
	// be a journal yet. Otherwise a missing file is a lost journal.
	JustJoined bool
	// JoinFloor is the floor of the join bundle.
	JoinFloor time.Time
	// IdentityNotBefore is the NotBefore of the node's SVID: a journal that was
	// lost gets a floor no lower than it. Optional.
	IdentityNotBefore time.Time
	// Inspect reads the file at a path without changing it: the whole of it, as
	// [InspectFile] does, or what the agent goes on with, as [GlanceFile] does,
	// which is what it is when unset. A damaged file can end the process
	// that reads it, so that an agent has it done by another process. Its error
	// wraps [ErrDamaged] when the file is to be set aside; with any other error
	// nothing is touched.
	Inspect func(ctx context.Context, path string, whole bool) (Facts, error)
	// LockTimeout is how long to wait for another process; optional, 3 s.
	LockTimeout time.Duration
	// Reserve is how many bytes must be free for one more task; optional,
	// 64 MiB.
	Reserve uint64
	// Results is how many bytes of the disk are kept for the results of what runs;
	// optional, 16 MiB; negative: none.
	Results int64
	// Guard is asked before a commit is written, and again when it is durable and
	// nobody has heard of it; optional. An error fails the commit.
	Guard func(written bool) error
}

// Store is the open state. Its methods are safe for concurrent use.
type Store struct {
	cfg  Config
	db   *bolt.DB
	raw  *os.File // the same file, without a map
	mark *markFile
	soundness

	condemned  bool      // touched only by the one who commits
	issued     time.Time // see [Tx.Issued]; touched only by the one who commits
	reserved   int64     // up to where the disk keeps room; touched only by the one who commits
	clockReset bool      // the mark's times may be lowered; touched only by the one who commits

	mu     sync.Mutex // guards queue, busy and closed
	queue  []*change
	busy   bool
	closed bool

	news    sync.Mutex    // guards changed, sizes and durable
	changed chan struct{} // closed, and made anew, when frames were appended
	sizes   sizes
	durable uint64 // the last frame that is on the disk
}

// Open opens the state in cfg.Dir and begins a new journal where there is none
// that can be trusted. It wraps [ErrLocked] or [ErrNewerSchema] when the file
// must not be touched.
func Open(ctx context.Context, cfg Config) (*Store, error) {
	if cfg.LockTimeout == 0 {
		cfg.LockTimeout = defaultLockTimeout
	}
	if cfg.Inspect == nil {
		cfg.Inspect = func(_ context.Context, path string, whole bool) (Facts, error) {
			if whole {
				return InspectFile(path, cfg.LockTimeout)
			}
			return GlanceFile(path)
		}
	}
	if cfg.Reserve == 0 {
		cfg.Reserve = defaultReserve
	}
	if cfg.Results == 0 {
		cfg.Results = defaultResults
	}
	if cfg.Guard == nil {
		cfg.Guard = func(bool) error { return nil }
	}
	if cfg.HighWater == nil {
		cfg.HighWater = clock.NewHighWater(cfg.Clock, func() bool { return false })
	}
	if err := os.MkdirAll(cfg.Dir, 0o700); err != nil {
		return nil, fmt.Errorf("make state directory: %w", err)
	}
	mark, err := openMark(filepath.Join(cfg.Dir, markName))
	if err != nil {
		return nil, err
	}
	cfg.HighWater.Load(moment(mark.last.GetHighWater()), moment(mark.last.GetSureTime()))
	s := &Store{cfg: cfg, mark: mark, changed: make(chan struct{})}
	if err := s.open(ctx); err != nil {
		return nil, errors.Join(err, mark.close())
	}
	return s, nil
}

func (s *Store) open(ctx context.Context) error {
	path := filepath.Join(s.cfg.Dir, dbName)
	reason, err := s.judge(ctx, path)
	if err != nil {
		return err
	}
	if reason != taskv1.JournalReason_JOURNAL_REASON_UNSPECIFIED {
		if err := s.begin(ctx, path, reason); err != nil {
			return err
		}
	}
	if s.raw, err = os.OpenFile(path, os.O_RDWR, 0); err != nil {
		return errors.Join(fmt.Errorf("open state file: %w", err), s.db.Close())
	}
	if err := s.load(); err != nil {
		return errors.Join(err, s.db.Close(), s.raw.Close())
	}
	return nil
}

// begin makes a state file that holds a new journal. It appears under its name
// only when it is whole.
func (s *Store) begin(ctx context.Context, path string, reason taskv1.JournalReason) error {
	temp := path + ".new"
	if err := os.Remove(temp); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("remove unfinished state file: %w", err)
	}
	db, err := openBolt(temp, s.cfg.LockTimeout, false)
	if err != nil {
		return err
	}
	meta := s.newMeta(reason)
	crash.Point("state.created.before")
	err = db.Update(func(btx *bolt.Tx) error {
		for i, m := range migrations {
			if err := m(btx); err != nil {
				return fmt.Errorf("make schema version %d: %w", i+1, err)
			}
		}
		tx := newTx(btx, s.cfg)
		if err := writeVersion(btx, len(migrations)); err != nil {
			return err
		}
		if err := tx.putJournal(meta); err != nil {
			return err
		}
		if err := tx.putHead(head{hash: firstHash(meta)}); err != nil {
			return err
		}
		_, err := tx.Append(&taskv1.Event{Payload: &taskv1.Event_JournalOpened{JournalOpened: &taskv1.JournalOpened{
			PreviousJournalId: meta.GetPreviousJournalId(),
			Reason:            reason,
			Floor:             meta.GetFloor(),
			Generation:        meta.GetGeneration(),
		}}})
		if err != nil {
			return err
		}
		return tx.flush()
	})
	if cerr := db.Close(); err == nil {
		err = cerr
	}
	if err != nil {
		return fmt.Errorf("write new journal: %w", err)
	}
	if err := os.Rename(temp, path); err != nil {
		return fmt.Errorf("put new state file in place: %w", err)
	}
	if err := syncDir(s.cfg.Dir); err != nil {
		return err
	}
	crash.Point("state.created.after")
	s.cfg.Logger.InfoContext(ctx, "new journal", "journal_id", meta.GetJournalId(), "reason", reason.String(),
		"floor", meta.GetFloor().AsTime(), "previous_journal_id", meta.GetPreviousJournalId())
	s.soundness = soundness{sound: true}
	s.db, err = openBolt(path, s.cfg.LockTimeout, false)
	return locked(path, err)
}

func (s *Store) newMeta(reason taskv1.JournalReason) *agentv1.JournalMeta {
	now := s.cfg.HighWater.Believed() // a floor in a far future would bar every task
	// A node that has enrolled anew has a mark too: what its former journal
	// accepted until then is not remembered any more.
	floor := latest(s.cfg.JoinFloor, s.mark.last.GetWallTime().AsTime())
	if reason != taskv1.JournalReason_JOURNAL_REASON_JOINED {
		floor = latest(floor, now, s.cfg.IdentityNotBefore)
	}
	return &agentv1.JournalMeta{
		JournalId:         uuid.NewString(),
		Node:              s.cfg.Node,
		Generation:        s.cfg.Generation,
		Floor:             timestamppb.New(floor),
		CreateTime:        timestamppb.New(now),
		InstanceId:        uuid.NewString(),
		PreviousJournalId: s.mark.last.GetJournalId(),
	}
}

func latest(ts ...time.Time) time.Time {
	var out time.Time
	for _, t := range ts {
		if t.After(out) {
			out = t
		}
	}
	return out
}

// firstHash is what the first frame of a journal chains to.
func firstHash(m *agentv1.JournalMeta) []byte {
	h := sha256.New()
	fmt.Fprintf(h, "%s\x00%d\x00%s", m.GetNode(), m.GetGeneration(), m.GetPreviousJournalId())
	return h.Sum(nil)
}

// load reads what is kept in memory and brings the mark up to the file.
func (s *Store) load() error {
	err := view(s.db, func(tx *Tx) error {
		h, err := tx.head()
		if err != nil {
			return err
		}
		s.durable = h.seq
		if s.glanced {
			s.sizes = sizes{unacked: s.mark.last.GetSound().GetUnacknowledgedBytes(), kept: s.mark.last.GetSound().GetKeptBytes()}
			return nil
		}
		s.sizes, err = tx.sizes()
		return err
	})
	if err != nil {
		return fmt.Errorf("read state file: %w", err)
	}
	return s.raiseMark()
}

// Close ends the store after the changes under way. Later ones are refused
// with [ErrClosed].
func (s *Store) Close() error {
	s.mu.Lock()
	closed := s.closed
	s.mu.Unlock()
	if closed {
		return nil
	}
	// It waits in line behind all that were before it, and shares their commit:
	// what the disk says of that is theirs. The file must not stay open and locked.
	_ = s.enqueue(&change{apart: s.seal, turn: make(chan bool, 1)}, true)
	if err := errors.Join(s.db.Close(), s.raw.Close()); err != nil {
		return fmt.Errorf("close state file: %w", errors.Join(err, s.mark.close()))
	}
	return s.mark.close()
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return fmt.Errorf("open state directory: %w", err)
	}
	defer d.Close()
	if err := d.Sync(); err != nil {
		return fmt.Errorf("sync state directory: %w", err)
	}
	return nil
}
