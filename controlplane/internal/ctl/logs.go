package ctl

import (
	"context"
	"errors"
	"io"

	"github.com/spf13/cobra"

	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
)

// logOptions are the flags of task logs.
type logOptions struct {
	follow bool
	step   int
	stream string
}

func (a *app) taskLogsCmd() *cobra.Command {
	o := &logOptions{}
	cmd := &cobra.Command{
		Use:   "logs ID",
		Short: "Print what a task's commands wrote",
		Long: `Print what a task's commands wrote.

The bytes of both streams go to standard output as they are. Remarks, such as
how many bytes were not kept, go to standard error.`,
		Args: exactly("ID"),
		RunE: a.online(func(ctx context.Context, c *client, args []string) error {
			id, err := c.wholeID(ctx, args[0])
			if err != nil {
				return err
			}
			req, err := o.request(id)
			if err != nil {
				return err
			}
			return a.logs(ctx, c, req)
		}),
	}
	cmd.Flags().BoolVarP(&o.follow, "follow", "f", false, "go on until the task has ended")
	cmd.Flags().IntVar(&o.step, "step", -1, "only of this step; -1: of all steps")
	cmd.Flags().StringVar(&o.stream, "stream", "", "only this stream: stdout or stderr")
	return cmd
}

func (o *logOptions) request(id string) (*taskv1.ReadOutputRequest, error) {
	req := &taskv1.ReadOutputRequest{Id: id, Follow: o.follow}
	if o.step < -1 {
		return nil, usagef("--step: %d: must be a step's number, from 0", o.step)
	}
	if o.step >= 0 {
		step := uint32(o.step)
		req.Step = &step
	}
	if o.stream != "" {
		n, err := enumFlag("stream", o.stream, taskv1.Stream(0).Descriptor())
		if err != nil {
			return nil, err
		}
		req.Stream = taskv1.Stream(n)
	}
	return req, nil
}

// place is one stream of one step.
type place struct {
	step   uint32
	stream taskv1.Stream
}

// logReader prints output, and knows how far it is, so that nothing is printed
// twice when it is read again after a lost connection.
type logReader struct {
	app   *app
	seen  map[place]uint64 // the offset after the last byte that was printed
	told  map[place]bool   // whose end was told
	last  place            // of the last byte that was printed
	any   bool
	lacks bool // something was said to be missing or to come
}

// logs prints the output, over lost connections when it follows.
func (a *app) logs(ctx context.Context, c *client, req *taskv1.ReadOutputRequest) error {
	r := &logReader{app: a, seen: map[place]uint64{}, told: map[place]bool{}}
	pause := firstPause
	for {
		err := r.read(ctx, c, req, func() { pause = firstPause })
		var stream *streamError
		switch {
		case err == nil:
			r.nothing()
			return nil
		case !errors.As(err, &stream):
			return err
		case !req.GetFollow() || ctx.Err() != nil || !temporary(stream.err):
			return c.explain(ctx, "read output of task "+req.GetId(), stream.err)
		}
		a.remark("connection to %s is lost (%v); trying again", c.server, why(c, stream.err))
		if !sleep(ctx, pause) {
			return ctx.Err()
		}
		pause = min(2*pause, lastPause)
	}
}

// read reads one stream to its end.
func (r *logReader) read(ctx context.Context, c *client, req *taskv1.ReadOutputRequest, alive func()) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := c.tasks.ReadOutput(ctx, req)
	if err != nil {
		return &streamError{err}
	}
	for {
		m, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return &streamError{err}
		}
		alive()
		if err := r.print(m); err != nil {
			return err
		}
	}
}

// print writes one piece, or a remark about it.
func (r *logReader) print(m *taskv1.ReadOutputResponse) error {
	at := place{m.GetStep(), m.GetStream()}
	data, offset := m.GetData(), m.GetOffset()
	if skip := r.seen[at]; offset < skip {
		data = data[min(skip-offset, uint64(len(data))):]
		offset = skip
	} else if m.GetSkippedBytes() > 0 {
		r.app.remark("[step %d %s: %d bytes were not kept]", at.step, word(at.stream), m.GetSkippedBytes())
	}
	if len(data) > 0 {
		if r.any && r.last != at {
			r.app.remark("[step %d %s]", at.step, word(at.stream))
		}
		r.any, r.last = true, at
		r.seen[at] = offset + uint64(len(data))
		if err := r.app.write(data); err != nil {
			return err
		}
	}
	if o := m.GetOutput(); o != nil && !r.told[at] {
		r.told[at] = true
		r.end(at, o)
	}
	return nil
}

// nothing tells that nothing was printed, unless it was told what is missing.
func (r *logReader) nothing() {
	switch {
	case r.any || r.lacks:
	case len(r.told) > 0:
		r.app.remark("there is no output")
	default:
		r.app.remark("there is no output (yet)")
	}
}

// end tells what is missing of a stream.
func (r *logReader) end(at place, o *taskv1.Output) {
	total := o.GetSummary().GetTotalBytes()
	r.lacks = r.lacks || o.GetState() != taskv1.OutputState_OUTPUT_STATE_COMPLETE
	switch o.GetState() {
	case taskv1.OutputState_OUTPUT_STATE_TRUNCATED:
		r.app.remark("[step %d %s: %d bytes in all, of which the first %d and the last %d were kept]",
			at.step, word(at.stream), total, o.GetSummary().GetHeadBytes(), o.GetSummary().GetTailBytes())
	case taskv1.OutputState_OUTPUT_STATE_LOST:
		r.app.remark("[step %d %s: %d bytes in all; something of it is lost for good]", at.step, word(at.stream), total)
	case taskv1.OutputState_OUTPUT_STATE_PARTIAL:
		r.app.remark("[step %d %s: the node has not sent all of it yet; try again, or follow it with -f]", at.step, word(at.stream))
	case taskv1.OutputState_OUTPUT_STATE_OPEN:
		r.app.remark("[step %d %s: it is still being written; follow it with -f]", at.step, word(at.stream))
	default: // all of it was printed
	}
}
