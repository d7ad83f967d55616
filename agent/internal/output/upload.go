package output

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"slices"
	"time"

	"google.golang.org/grpc"

	"github.com/gpuaas/millwright/agent/internal/crash"
	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/proto/rpcerr"
)

const (
	// turnChunks is how much one part may send before the next has its turn,
	// so that a long backlog does not hold up what someone follows live.
	turnChunks = 4
	// skipFor is how long a command is left out with which a stream broke.
	skipFor = time.Minute
)

var streams = []taskv1.Stream{taskv1.Stream_STREAM_STDOUT, taskv1.Stream_STREAM_STDERR}

// place is one part of one stream of one command.
type place struct {
	id     ID
	stream taskv1.Stream
	part   agentv1.OutputPart
}

// position is what the server has of a place, as far as it has said. It
// outlives a stream; the next answer corrects it.
type position struct {
	known    bool
	received uint64
	complete bool
	total    uint64 // the total it was last told
	told     bool   // whether it was told that the part is complete
}

// upload is one stream.
type upload struct {
	*Uploader
	conn     grpc.ClientConnInterface
	rpc      agentv1.AgentService_UploadOutputClient
	places   map[place]*position
	skip     map[ID]time.Duration
	current  ID
	progress bool
	buf      [ChunkBytes]byte
}

// run sends what there is, and waits for more, until the stream breaks.
func (up *upload) run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel() // ends the stream
	ticker := time.NewTicker(poll)
	defer ticker.Stop()
	for {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		busy, err := up.pass(ctx)
		if err != nil {
			return err
		}
		if busy {
			continue
		}
		select {
		case <-ctx.Done():
		case <-up.wake:
		case <-ticker.C:
		}
	}
}

// pass gives each command one turn. It reports whether anyone has more to send.
func (up *upload) pass(ctx context.Context) (busy bool, err error) {
	unsent, err := up.cfg.Ledger.Unsent(ctx)
	if err != nil {
		return false, fmt.Errorf("list outputs to send: %w", err)
	}
	asked, err := up.asked()
	if err != nil {
		return false, err
	}
	others := slices.DeleteFunc(slices.Clone(unsent), func(id ID) bool { return slices.Contains(asked, id) })
	for _, id := range append(asked, others...) {
		if until, ok := up.skip[id]; ok && up.cfg.Clock.Boot() < until {
			continue
		}
		delete(up.skip, id)
		up.current = id
		more, ended, err := up.turn(ctx, id)
		if err != nil {
			return false, err
		}
		busy = busy || more
		if more || !ended {
			continue
		}
		if slices.Contains(unsent, id) {
			crash.Point("output.sent.before")
			if err := up.cfg.Ledger.Sent(ctx, id); err != nil {
				return false, fmt.Errorf("record output as sent: %w", err)
			}
			crash.Point("output.sent.committed")
		}
		up.finished(id)
	}
	return busy, nil
}

// asked returns the commands of the tasks that the server asked for. What is
// known of them is forgotten: the server has said that it is not so.
func (up *upload) asked() ([]ID, error) {
	up.mu.Lock()
	defer up.mu.Unlock()
	if len(up.wanted) > 0 {
		commands, err := up.cfg.Files.Commands()
		if err != nil {
			return nil, fmt.Errorf("list command files: %w", err)
		}
		for _, id := range commands {
			if up.wanted[id.TaskID] {
				up.again[id] = true
				up.forget(id)
			}
		}
		clear(up.wanted)
	}
	return slices.SortedFunc(maps.Keys(up.again), func(a, b ID) int {
		return cmp.Or(cmp.Compare(a.TaskID, b.TaskID), cmp.Compare(a.Step, b.Step))
	}), nil
}

func (up *upload) finished(id ID) {
	up.forget(id)
	up.mu.Lock()
	delete(up.again, id)
	up.mu.Unlock()
	notify(up.swept)
}

func (up *upload) forget(id ID) {
	maps.DeleteFunc(up.places, func(p place, _ *position) bool { return p.id == id })
}

// turn sends a few pieces of a command. more says that there are others at
// hand, ended that the command writes nothing any more.
func (up *upload) turn(ctx context.Context, id ID) (more, ended bool, err error) {
	ended = true
	for _, s := range streams {
		st, err := up.cfg.Files.State(id, s)
		if errors.Is(err, fs.ErrNotExist) {
			return up.nothing(ctx, id)
		}
		if err != nil {
			up.cfg.Logger.WarnContext(ctx, "output not read", "task_id", id.TaskID, "step", id.Step, "err", err)
			up.skip[id] = up.cfg.Clock.Boot() + skipFor
			return false, false, nil
		}
		ended = ended && st.Ended
		m, err := up.parts(ctx, id, s, st)
		if err != nil {
			return false, false, err
		}
		more = more || m
	}
	return more, ended, nil
}

// nothing judges a command without files: it has not started yet, or it never
// did, or a person has deleted them.
func (up *upload) nothing(ctx context.Context, id ID) (more, ended bool, err error) {
	ended, err = up.cfg.Ledger.Ended(ctx, id.TaskID)
	if err != nil {
		return false, false, fmt.Errorf("look at task of an output: %w", err)
	}
	if ended {
		up.cfg.Logger.InfoContext(ctx, "command has no output", "task_id", id.TaskID, "step", id.Step)
	}
	return false, ended, nil
}

func (up *upload) parts(ctx context.Context, id ID, s taskv1.Stream, st State) (more bool, err error) {
	head := place{id, s, agentv1.OutputPart_OUTPUT_PART_HEAD}
	// The head has all its bytes once something was written that it lacks.
	more, err = up.part(ctx, head, st.Head, st.Total, st.Ended || st.Total > st.Head)
	if err != nil || more || !st.Ended || st.Tail == 0 {
		return more, err
	}
	return up.part(ctx, place{id, s, agentv1.OutputPart_OUTPUT_PART_TAIL}, st.Tail, st.Total, true)
}

// part sends at most a turn's pieces of one part that has size bytes now and,
// when whole, will have no more.
func (up *upload) part(ctx context.Context, p place, size, total uint64, whole bool) (more bool, err error) {
	pos := up.places[p]
	if pos == nil {
		pos = &position{}
		up.places[p] = pos
	}
	for range turnChunks {
		var data []byte
		switch {
		case !pos.known: // an empty piece asks where to go on
		case pos.received < size:
			if data, err = up.read(p, pos.received, size); err != nil {
				return false, err
			}
		case pos.total == total && (pos.told || !whole):
			return false, nil
		case pos.complete && pos.total == total:
			return false, nil
		}
		if err := up.exchange(ctx, p, pos, data, size, total, whole); err != nil {
			return false, err
		}
	}
	return pos.received < size || (whole && !pos.told), nil
}

func (up *upload) read(p place, offset, size uint64) ([]byte, error) {
	read := up.cfg.Files.ReadHead
	if p.part == agentv1.OutputPart_OUTPUT_PART_TAIL {
		read = up.cfg.Files.ReadTail
	}
	want := up.buf[:min(uint64(ChunkBytes), size-offset)]
	n, err := read(p.id, p.stream, want, int64(offset))
	if n == 0 && err != nil {
		return nil, fmt.Errorf("read output of task %s step %d at %d: %w", p.id.TaskID, p.id.Step, offset, err)
	}
	return want[:n], nil
}

// exchange sends one piece and takes the answer.
func (up *upload) exchange(ctx context.Context, p place, pos *position, data []byte, size, total uint64, whole bool) error {
	if err := up.pace.WaitN(ctx, max(len(data), 1)); err != nil {
		return err
	}
	if up.rpc == nil {
		rpc, err := agentv1.NewAgentServiceClient(up.conn).UploadOutput(ctx)
		if err != nil {
			return fmt.Errorf("open output stream: %w", err)
		}
		up.rpc = rpc
	}
	last := whole && pos.known && pos.received+uint64(len(data)) == size
	err := up.rpc.Send(&agentv1.UploadOutputRequest{
		TaskId: p.id.TaskID, Step: p.id.Step, Stream: p.stream, Part: p.part,
		Offset: pos.received, Data: data, TotalBytes: total, Last: last,
	})
	if err != nil && !errors.Is(err, io.EOF) {
		return fmt.Errorf("send output: %w", rpcerr.Plain(err))
	}
	crash.Point("output.piece.sent")
	r, err := up.rpc.Recv()
	if err != nil {
		return fmt.Errorf("send output: %w", rpcerr.Plain(err))
	}
	crash.Point("output.piece.answered")
	if r.GetTaskId() != p.id.TaskID || r.GetStep() != p.id.Step || r.GetStream() != p.stream || r.GetPart() != p.part {
		return fmt.Errorf("send output: the server answered for task %q step %d, not for what was sent", r.GetTaskId(), r.GetStep())
	}
	got := r.GetReceivedBytes()
	switch {
	case got > size:
		return fmt.Errorf("send output: the server has %d bytes of a part of %d", got, size)
	case len(data) > 0 && got == pos.received:
		return fmt.Errorf("send output: the server took nothing of the piece at %d", got)
	case len(data) > 0:
		up.progress = true
	}
	pos.known, pos.received, pos.complete, pos.total = true, got, r.GetComplete(), total
	pos.told = last && got == size
	return nil
}
