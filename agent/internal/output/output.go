// Package output brings the output of commands to the control plane, on a
// stream of its own and slower than the session, so that it never stands in
// the way of work.
//
// Nothing is queued: the files that the shim wrote are read piece by piece, and
// the server's answer to each piece says where to go on. Memory is constant,
// whatever the commands write.
package output

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"golang.org/x/time/rate"
	"google.golang.org/grpc"

	"github.com/gpuaas/millwright/agent/internal/clock"
	"github.com/gpuaas/millwright/agent/internal/crash"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
)

const (
	// DefaultBytesPerSecond is how fast output is sent unless configured.
	DefaultBytesPerSecond = 256 << 10
	// ChunkBytes is what is sent at once; the next piece waits for the answer,
	// so it is also all that is in flight.
	ChunkBytes = 16 << 10
	// Retention is how long a command's files are kept that the server never
	// acknowledged.
	Retention = 7 * 24 * time.Hour

	poll       = time.Second
	sweepEvery = time.Minute
)

// ID names the command of a step.
type ID struct {
	TaskID string
	Step   uint32
}

// State describes what a stream of a command has written until now.
type State struct {
	// Total is all that was written.
	Total uint64
	// Head is how much of the head is kept; it grows while the command runs.
	Head uint64
	// Tail is how much of the tail is kept, once the command has ended.
	Tail uint64
	// Ended says that nothing more will be written.
	Ended bool
}

// Files are the commands' files on the node.
type Files interface {
	// Commands returns the commands that have files, in any order.
	Commands() ([]ID, error)
	// State describes a stream. It is fs.ErrNotExist when there are no files.
	State(id ID, s taskv1.Stream) (State, error)
	// ReadHead and ReadTail read like io.ReaderAt.
	ReadHead(id ID, s taskv1.Stream, p []byte, offset int64) (int, error)
	ReadTail(id ID, s taskv1.Stream, p []byte, offset int64) (int, error)
	// Delete deletes the files of all commands of a task.
	Delete(taskID string) error
}

// Ledger remembers what was sent.
type Ledger interface {
	// Unsent returns the commands whose output is not all on the server, the
	// oldest first.
	Unsent(ctx context.Context) ([]ID, error)
	// Sent records that the output of a command is all on the server.
	Sent(ctx context.Context, id ID) error
	// Ended reports whether a task has ended, so that no command of it starts
	// any more.
	Ended(ctx context.Context, taskID string) (bool, error)
	// Disposable reports whether the files of a task's commands may go: the
	// task has ended, and the server has its events and outputs, or it ended
	// before the given time, or nothing is known of it any more.
	Disposable(ctx context.Context, taskID string, endedBefore time.Time) (bool, error)
}

// Config is what an uploader needs. All fields without "optional" must be set.
type Config struct {
	Files  Files
	Ledger Ledger
	Clock  clock.Clock
	Logger *slog.Logger
	// BytesPerSecond is the pace; optional, DefaultBytesPerSecond.
	BytesPerSecond int
	// Retention is optional, [Retention].
	Retention time.Duration
}

// Uploader sends outputs and deletes the files that are no longer needed. Its
// methods are safe for concurrent use.
type Uploader struct {
	cfg   Config
	pace  *rate.Limiter
	wake  chan struct{} // holds a token when there may be something to send
	swept chan struct{} // holds a token when there may be something to delete

	mu     sync.Mutex
	wanted map[string]bool // tasks that the server asked for; guarded by mu
	again  map[ID]bool     // their commands, until they are sent; guarded by mu
}

// New returns an uploader that does nothing until Run and Serve.
func New(cfg Config) *Uploader {
	if cfg.BytesPerSecond <= 0 {
		cfg.BytesPerSecond = DefaultBytesPerSecond
	}
	if cfg.Retention <= 0 {
		cfg.Retention = Retention
	}
	return &Uploader{
		cfg: cfg, pace: rate.NewLimiter(rate.Limit(cfg.BytesPerSecond), ChunkBytes),
		wake: make(chan struct{}, 1), swept: make(chan struct{}, 1), wanted: map[string]bool{}, again: map[ID]bool{},
	}
}

// maxWanted bounds what a server may ask for at a time.
const maxWanted = 1000

// Want says that the server lacks output of a task: it is sent before others,
// and again if it was sent before. It does not block.
func (u *Uploader) Want(taskID string) {
	u.mu.Lock()
	if len(u.wanted) < maxWanted {
		u.wanted[taskID] = true
	}
	u.mu.Unlock()
	notify(u.wake)
}

// Run deletes files that are no longer needed until ctx ends, and returns nil
// then.
func (u *Uploader) Run(ctx context.Context) error {
	ticker := time.NewTicker(sweepEvery)
	defer ticker.Stop()
	for {
		u.sweep(ctx)
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
		case <-u.swept:
		}
	}
}

func (u *Uploader) sweep(ctx context.Context) {
	commands, err := u.cfg.Files.Commands()
	if err != nil {
		u.cfg.Logger.WarnContext(ctx, "command files not listed", "err", err)
		return
	}
	seen := map[string]bool{}
	before := u.cfg.Clock.Now().Add(-u.cfg.Retention)
	for _, id := range commands {
		if seen[id.TaskID] {
			continue
		}
		seen[id.TaskID] = true
		ok, err := u.cfg.Ledger.Disposable(ctx, id.TaskID, before)
		if err == nil && ok {
			crash.Point("output.delete.before")
			err = u.cfg.Files.Delete(id.TaskID)
			crash.Point("output.delete.after")
		}
		if err != nil && ctx.Err() == nil {
			u.cfg.Logger.WarnContext(ctx, "command files not deleted", "task_id", id.TaskID, "err", err)
		}
	}
}

// Serve uploads over conn until ctx ends and returns nil then. When the stream
// breaks it begins another; where to go on, the server knows.
func (u *Uploader) Serve(ctx context.Context, conn grpc.ClientConnInterface) error {
	skip, places := map[ID]time.Duration{}, map[place]*position{}
	pause := time.Second
	for {
		up := &upload{Uploader: u, conn: conn, places: places, skip: skip}
		err := up.run(ctx)
		if ctx.Err() != nil {
			return nil //nolint:nilerr // it was asked to end
		}
		if up.progress {
			pause = time.Second
		}
		u.cfg.Logger.WarnContext(ctx, "output stream broken", "task_id", up.current.TaskID, "step", up.current.Step, "err", err, "retry_in", pause)
		// The next stream begins with the others, in case the server refuses
		// just this one.
		skip[up.current] = u.cfg.Clock.Boot() + skipFor
		clock.Sleep(ctx, pause)
		pause = min(2*pause, time.Minute)
	}
}

func notify(c chan<- struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}
