package dispatch_test

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/gpuaas/millwright/pki/pkitest"
	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
	auditv1 "github.com/gpuaas/millwright/proto/millwright/audit/v1"
	serverv1 "github.com/gpuaas/millwright/proto/millwright/server/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"

	"github.com/gpuaas/millwright/controlplane/internal/dispatch"
	"github.com/gpuaas/millwright/controlplane/internal/eventlog"
	"github.com/gpuaas/millwright/controlplane/internal/store"
	"github.com/gpuaas/millwright/controlplane/internal/store/boltstore"
)

// rig is a dispatcher over a real store, with one enrolled node.
type rig struct {
	*dispatch.Dispatcher
	db     *boltstore.Store
	reader *countingReader
	log    *eventlog.Log
	ahead  time.Duration // of the log's clock before the dispatcher's
	// committed, when set, is called after each commit of the dispatcher.
	committed func()
	// full makes the next commit fail, as a full disk does.
	full atomic.Bool
}

// Commit implements [dispatch.Log].
func (r *rig) Commit(ctx context.Context, decide func(*eventlog.Tx) error) error {
	if r.full.Swap(false) {
		return errors.New("no space left on device")
	}
	err := r.log.Commit(ctx, decide)
	if r.committed != nil {
		r.committed()
	}
	return err
}

func newRig(t *testing.T) *rig {
	t.Helper()
	db, err := boltstore.Create(filepath.Join(t.TempDir(), "store.db"))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { _ = db.Run(ctx) })
	t.Cleanup(func() {
		cancel()
		wg.Wait()
		_ = db.Close()
	})
	r := &rig{db: db, reader: &countingReader{Reader: db}}
	r.log = eventlog.New(eventlog.Config{Writer: db, Spec: func(*taskv1.TaskLeaf) *anypb.Any { return nil },
		Now: func() time.Time { return time.Now().Add(r.ahead) }})
	r.Dispatcher = dispatch.New(dispatch.Config{
		Log: r, Reader: r.reader, TrustUpdates: func(uint64) []*taskv1.Envelope { return nil },
		Logger: slog.New(slog.DiscardHandler), Actor: "server", Heartbeat: time.Hour,
	})
	r.append(t, &auditv1.LogEntry{Entry: &auditv1.LogEntry_NodeJoined{NodeJoined: &auditv1.NodeJoined{Node: "n1", Generation: 1}}})
	return r
}

func (r *rig) append(t *testing.T, e *auditv1.LogEntry) {
	t.Helper()
	if err := r.log.Commit(t.Context(), func(tx *eventlog.Tx) error { return tx.Append("alice", e) }); err != nil {
		t.Fatal(err)
	}
}

// pipe is the stream of a session, seen from the node.
type pipe struct {
	context func() context.Context
	in      chan *agentv1.SessionRequest  // to the server
	out     chan *agentv1.SessionResponse // from it
}

func newPipe(ctx context.Context) *pipe {
	return &pipe{context: func() context.Context { return ctx }, in: make(chan *agentv1.SessionRequest), out: make(chan *agentv1.SessionResponse)}
}

func (p *pipe) Context() context.Context { return p.context() }

func (p *pipe) Send(m *agentv1.SessionResponse) error {
	select {
	case p.out <- m:
		return nil
	case <-p.context().Done():
		return p.context().Err()
	}
}

func (p *pipe) Recv() (*agentv1.SessionRequest, error) {
	select {
	case m := <-p.in:
		return m, nil
	case <-p.context().Done():
		return nil, io.EOF
	}
}

// opened is the first frame of the journal j of the node.
func opened(t *testing.T) []byte {
	t.Helper()
	b, err := proto.Marshal(&taskv1.Event{JournalId: "j", Seq: 1, PrevHash: dispatch.FirstPrevHash("n1", 1, ""),
		Payload: &taskv1.Event_JournalOpened{JournalOpened: &taskv1.JournalOpened{Generation: 1, Reason: taskv1.JournalReason_JOURNAL_REASON_JOINED}}})
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func hello() *agentv1.SessionRequest {
	return &agentv1.SessionRequest{Message: &agentv1.SessionRequest_Hello{Hello: &agentv1.Hello{
		MinProtocol: 1, MaxProtocol: 1, BootId: "b", InstanceId: "i", JournalId: "j", LastSeq: 1, Generation: 1}}}
}

func peer() dispatch.Peer {
	return dispatch.Peer{Node: "n1", ID: "spiffe://test/node/n1", Generation: 1, NotAfter: time.Now().Add(time.Hour)}
}

// Whoever evicts a node cuts the session that is there. One whose Hello is
// stored and that is not there yet must find out by itself.
func TestSessionThatWasOvertakenWhileItWasOpened(t *testing.T) {
	t.Parallel()
	for name, overtake := range map[string]*auditv1.LogEntry{
		"evicted":       {Entry: &auditv1.LogEntry_NodeEvicted{NodeEvicted: &auditv1.NodeEvicted{Node: "n1"}}},
		"enrolled anew": {Entry: &auditv1.LogEntry_NodeJoined{NodeJoined: &auditv1.NodeJoined{Node: "n1", Generation: 2}}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t)
			r.committed = func() {
				r.committed = nil
				r.append(t, overtake)
				r.Cut("n1", "EVICTED", "")
			}
			p := newPipe(t.Context())
			ended := make(chan error, 1)
			var wg sync.WaitGroup
			wg.Go(func() { ended <- r.Serve(peer(), p) })
			p.in <- hello()
			if m := <-p.out; m.GetGoodbye().GetReason() != "EVICTED" {
				t.Errorf("got %v, want a Goodbye", m)
			}
			if err := <-ended; err != nil {
				t.Errorf("Serve = %v", err)
			}
			wg.Wait()
		})
	}
}

// What the disk did not take is not acknowledged.
func TestFramesThatWereNotStoredAreNotAcknowledged(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	ctx, hangUp := context.WithCancel(t.Context())
	p := newPipe(ctx)
	ended := make(chan error, 1)
	var wg sync.WaitGroup
	wg.Go(func() { ended <- r.Serve(peer(), p) })
	p.in <- hello()
	epoch := (<-p.out).GetSessionEpoch()
	r.full.Store(true)
	p.in <- &agentv1.SessionRequest{SessionEpoch: epoch, Message: &agentv1.SessionRequest_Events{
		Events: &agentv1.EventBatch{JournalId: "j", Frames: [][]byte{opened(t)}}}}
	for open := true; open; {
		select {
		case m := <-p.out:
			if m.GetAck() != nil {
				t.Errorf("got %v, and nothing was stored", m)
				open = false
			}
		case err := <-ended:
			if err == nil {
				t.Error("Serve = nil, want the error of the store")
			}
			open = false
		}
	}
	hangUp()
	wg.Wait()
}

// A node that reads nothing keeps the sender waiting, and with it the stream.
func TestCutNodeThatReadsNothingIsNotHeard(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		ctx, hangUp := context.WithCancel(t.Context())
		p := newPipe(ctx)
		ended := make(chan error, 1)
		var wg sync.WaitGroup
		wg.Go(func() { ended <- r.Serve(peer(), p) })
		p.in <- hello()
		epoch := (<-p.out).GetSessionEpoch()
		r.append(t, &auditv1.LogEntry{Entry: &auditv1.LogEntry_NodeEvicted{NodeEvicted: &auditv1.NodeEvicted{Node: "n1"}}})
		r.Cut("n1", "EVICTED", "")
		p.in <- &agentv1.SessionRequest{SessionEpoch: epoch, Message: &agentv1.SessionRequest_Events{
			Events: &agentv1.EventBatch{JournalId: "j", Frames: [][]byte{opened(t)}}}}
		synctest.Wait() // all that comes of it has come
		err := r.db.View(t.Context(), func(v store.View) error {
			_, err := v.Frame(store.FrameKey{Node: "n1", JournalID: "j", Seq: 1})
			return err
		})
		if !errors.Is(err, store.ErrNotFound) {
			t.Errorf("a frame of a node that was cut: %v, want it not stored", err)
		}
		hangUp()
		if err := <-ended; !hungUp(err) {
			t.Errorf("Serve = %v", err)
		}
		if err := r.Run(ctx); err != nil { // waits for the receiver
			t.Errorf("Run = %v", err)
		}
		wg.Wait()
	})
}

// hungUp reports whether a session ended since its node hung up: its receiver
// sees that, or its sender, or a commit that was under way.
func hungUp(err error) bool {
	return err == nil || errors.Is(err, context.Canceled) || status.Code(err) == codes.Canceled
}

// tasks adds n tasks to the queue of the node, signed as one set.
func (r *rig) tasks(t *testing.T, n int) (ids []string) {
	t.Helper()
	leaves := make([]*taskv1.TaskLeaf, n)
	for i := range leaves {
		ids = append(ids, pkitest.NewTaskID(t))
		leaves[i] = &taskv1.TaskLeaf{TaskId: ids[i], Node: "n1", Mode: taskv1.Mode_MODE_EXECUTE, Kind: "system.command", Revision: 1}
	}
	env, signed := pkitest.New(t).Sign(t, leaves...)
	if err := r.log.Commit(t.Context(), func(tx *eventlog.Tx) error {
		sum := tx.PutEnvelope(env)
		for i, leaf := range leaves {
			if err := tx.Append("alice", &auditv1.LogEntry{Entry: &auditv1.LogEntry_TaskCreated{TaskCreated: &auditv1.TaskCreated{
				TaskId: leaf.GetTaskId(), Node: "n1", RequestId: "r", EnvelopeSha256: sum, SignedLeaf: signed[i]}}}); err != nil {
				return err
			}
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	return ids
}

// countingReader counts the tasks that are read from queues.
type countingReader struct {
	store.Reader
	read atomic.Int64
}

// View implements [store.Reader].
func (c *countingReader) View(ctx context.Context, read func(store.View) error) error {
	return c.Reader.View(ctx, func(v store.View) error { return read(countingView{v, c}) })
}

type countingView struct {
	store.View
	c *countingReader
}

// OpenTasks implements [store.TaskView].
func (v countingView) OpenTasks(node string, which store.Open, after uint64, limit int) ([]*serverv1.TaskRow, error) {
	rows, err := v.View.OpenTasks(node, which, after, limit)
	if which == store.Queued {
		v.c.read.Add(int64(len(rows)))
	}
	return rows, err
}

// A long queue is not read through at each turn.
func TestLongQueueIsReadAsFarAsTheCreditsReach(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.tasks(t, 500)
	ctx, hangUp := context.WithCancel(t.Context())
	p := newPipe(ctx)
	ended := make(chan error, 1)
	var wg sync.WaitGroup
	wg.Go(func() { ended <- r.Serve(peer(), p) })
	first := hello()
	first.GetHello().LastSeq, first.GetHello().Credits = 0, 1
	p.in <- first
	epoch := (<-p.out).GetSessionEpoch()
	for turn := range 3 {
		if m := <-p.out; m.GetAssignment() == nil {
			t.Fatalf("turn %d: got %v, want an assignment", turn, m)
		}
		p.in <- &agentv1.SessionRequest{SessionEpoch: epoch, Message: &agentv1.SessionRequest_Credits{
			Credits: &agentv1.Credits{Credits: uint32(turn) + 2}}}
	}
	hangUp()
	if err := <-ended; !hungUp(err) {
		t.Errorf("Serve = %v", err)
	}
	if err := r.Run(ctx); err != nil {
		t.Errorf("Run = %v", err)
	}
	wg.Wait()
	if n := r.reader.read.Load(); n == 0 || n > 4*64 {
		t.Errorf("%d tasks were read for 4 credits", n)
	}
}

// A clock that is set back must not keep a deferred task waiting until it has
// caught up.
func TestDeferredBeforeTheClockWasSetBack(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	id := r.tasks(t, 1)[0]
	r.ahead = 48 * time.Hour
	r.append(t, &auditv1.LogEntry{Entry: &auditv1.LogEntry_TaskAssigned{TaskAssigned: &auditv1.TaskAssigned{TaskId: id}}})
	r.append(t, &auditv1.LogEntry{Entry: &auditv1.LogEntry_TaskDeferred{TaskDeferred: &auditv1.TaskDeferred{TaskId: id, Answer: &agentv1.Deferred{Reason: "X"}}}})
	r.ahead = 0
	r.tasks(t, 1) // must not be sent first
	ctx, hangUp := context.WithCancel(t.Context())
	p := newPipe(ctx)
	ended := make(chan error, 1)
	var wg sync.WaitGroup
	wg.Go(func() { ended <- r.Serve(peer(), p) })
	first := hello()
	first.GetHello().LastSeq, first.GetHello().Credits = 0, 1
	p.in <- first
	<-p.out
	leaf := &taskv1.TaskLeaf{}
	if err := proto.Unmarshal((<-p.out).GetAssignment().GetSignedLeaf().GetLeaf(), leaf); err != nil || leaf.GetTaskId() != id {
		t.Errorf("the task %s was sent, %v; want %s", leaf.GetTaskId(), err, id)
	}
	hangUp()
	if err := <-ended; !hungUp(err) {
		t.Errorf("Serve = %v", err)
	}
	if err := r.Run(ctx); err != nil {
		t.Errorf("Run = %v", err)
	}
	wg.Wait()
}
