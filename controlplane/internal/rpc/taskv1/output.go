package taskv1

import (
	"cmp"
	"context"
	"slices"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"

	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
	serverv1 "github.com/gpuaas/millwright/proto/millwright/server/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/proto/rpcerr"

	"github.com/gpuaas/millwright/controlplane/internal/output"
	"github.com/gpuaas/millwright/controlplane/internal/store"
)

const (
	// pieceBytes is the size of the pieces in which an output is sent.
	pieceBytes = 64 << 10
	// stallAfter is how long a follower waits for output of an ended task that
	// does not come.
	stallAfter = 30 * time.Second
	// lookEvery is how often a follower looks at most: it is woken by whatever
	// comes, of other tasks too.
	lookEvery = 100 * time.Millisecond
)

// ReadOutput streams what a task's commands wrote: of each stream the head,
// then how much was not kept, then the tail, and last what is known of it.
func (s *Service) ReadOutput(req *taskv1.ReadOutputRequest, stream grpc.ServerStreamingServer[taskv1.ReadOutputResponse]) error {
	ctx := stream.Context()
	row, err := s.find(ctx, req.GetId())
	if err != nil {
		return err
	}
	r := &reading{service: s, req: req, stream: stream, taskID: row.GetTask().GetId(), parts: map[output.Key]*progress{}}
	asked := false
	stall := time.NewTimer(stallAfter)
	defer stall.Stop()
	look := time.NewTicker(lookEvery)
	defer look.Stop()
	for {
		logChanged, outputChanged := s.cfg.Log.Changed(), s.cfg.Outputs.Changed()
		done, moved, err := r.pass(ctx)
		if err != nil || done {
			return err
		}
		if moved {
			stall.Reset(stallAfter)
		}
		if !asked {
			asked = s.cfg.Sessions.WantOutput(row.GetTask().GetNode(), r.taskID)
		}
		if !req.GetFollow() {
			return r.remarks()
		}
		select {
		case <-logChanged:
		case <-outputChanged:
		case <-stall.C:
			if r.ended {
				return r.remarks()
			}
			asked = false
			stall.Reset(stallAfter)
		case <-s.cfg.Stopping:
			return rpcerr.New(codes.Unavailable, "STOPPING", "the server is stopping; follow again")
		case <-ctx.Done():
			return ctx.Err()
		}
		<-look.C
	}
}

// reading is one reader of one task's outputs.
type reading struct {
	service *Service
	req     *taskv1.ReadOutputRequest
	stream  grpc.ServerStreamingServer[taskv1.ReadOutputResponse]
	taskID  string

	ended   bool // the task has ended
	parts   map[output.Key]*progress
	outputs []*taskv1.Output // as last seen
}

// progress is how much of one stream was sent.
type progress struct {
	head, tail uint64
	told       bool // the last message was sent
}

// pass sends what is new. It is done once the task has ended and all that will
// ever be here was sent.
func (r *reading) pass(ctx context.Context) (done, moved bool, err error) {
	var row *serverv1.TaskRow
	err = r.service.cfg.Reader.View(ctx, func(v store.View) (err error) {
		row, err = v.Task(r.taskID)
		return err
	})
	if err != nil {
		return false, false, err
	}
	task := row.GetTask()
	r.ended = store.Terminal(task.GetState()) || task.GetState() == taskv1.TaskState_TASK_STATE_HELD
	outputs, err := r.service.cfg.Outputs.Describe(task)
	if err != nil {
		return false, false, err
	}
	r.outputs = slices.DeleteFunc(outputs, func(o *taskv1.Output) bool { return !r.wants(o) })
	slices.SortStableFunc(r.outputs, func(a, b *taskv1.Output) int { return cmp.Compare(a.GetStep(), b.GetStep()) })
	whole := true
	for _, o := range r.outputs {
		n, settled, err := r.one(o)
		if err != nil {
			return false, false, err
		}
		moved = moved || n
		whole = whole && settled
	}
	return r.ended && whole, moved, nil
}

func (r *reading) wants(o *taskv1.Output) bool {
	return (r.req.Step == nil || r.req.GetStep() == o.GetStep()) &&
		(r.req.GetStream() == taskv1.Stream_STREAM_UNSPECIFIED || r.req.GetStream() == o.GetStream())
}

// one sends what is new of one stream, and reports whether it was something,
// and whether all was sent that will ever be here.
func (r *reading) one(o *taskv1.Output) (moved, settled bool, err error) {
	key := output.Key{TaskID: r.taskID, Step: o.GetStep(), Stream: o.GetStream()}
	p := r.parts[key]
	if p == nil {
		p = &progress{}
		r.parts[key] = p
	}
	before := *p
	err = r.send(key, agentv1.OutputPart_OUTPUT_PART_HEAD, 0, &p.head)
	sum := o.GetSummary()
	if err == nil && sum != nil && p.head == sum.GetHeadBytes() {
		err = r.send(key, agentv1.OutputPart_OUTPUT_PART_TAIL, sum.GetTotalBytes()-min(sum.GetTotalBytes(), sum.GetTailBytes()), &p.tail)
	}
	if err != nil {
		return false, false, err
	}
	settled = o.GetState() != taskv1.OutputState_OUTPUT_STATE_OPEN && o.GetState() != taskv1.OutputState_OUTPUT_STATE_PARTIAL
	if settled && !p.told {
		p.told = true
		err = r.stream.Send(&taskv1.ReadOutputResponse{Step: key.Step, Stream: key.Stream, Offset: sum.GetTotalBytes(), Output: o})
	}
	return *p != before, settled, err
}

// send sends a part from *sent on; base is where the part stands in all that
// was written.
func (r *reading) send(key output.Key, part agentv1.OutputPart, base uint64, sent *uint64) error {
	buf := make([]byte, pieceBytes)
	for {
		n, err := r.service.cfg.Outputs.Read(key, part, *sent, buf)
		if err != nil || n == 0 {
			return err
		}
		m := &taskv1.ReadOutputResponse{Step: key.Step, Stream: key.Stream, Offset: base + *sent, Data: slices.Clone(buf[:n])}
		if head := r.parts[key].head; part == agentv1.OutputPart_OUTPUT_PART_TAIL && *sent == 0 {
			m.SkippedBytes = base - min(base, head)
		}
		if err := r.stream.Send(m); err != nil {
			return err
		}
		*sent += uint64(n)
	}
}

// remarks says of the streams that are not settled how much of them is here.
func (r *reading) remarks() error {
	for _, o := range r.outputs {
		if p := r.parts[output.Key{TaskID: r.taskID, Step: o.GetStep(), Stream: o.GetStream()}]; p != nil && !p.told {
			p.told = true
			if err := r.stream.Send(&taskv1.ReadOutputResponse{Step: o.GetStep(), Stream: o.GetStream(),
				Offset: p.head + p.tail, Output: o}); err != nil {
				return err
			}
		}
	}
	return nil
}
