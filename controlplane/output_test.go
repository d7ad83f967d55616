package controlplane_test

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"io"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
)

// upload sends a part in pieces and returns the last answer.
func (h *host) upload(id string, part agentv1.OutputPart, from uint64, data []byte) *agentv1.UploadOutputResponse {
	h.w.t.Helper()
	stream, err := agentv1.NewAgentServiceClient(h.conn).UploadOutput(h.w.ctx())
	if err != nil {
		h.w.t.Fatal(err)
	}
	var last *agentv1.UploadOutputResponse
	for len(data) > 0 {
		n := min(len(data), 16<<10)
		if err := stream.Send(&agentv1.UploadOutputRequest{TaskId: id, Stream: taskv1.Stream_STREAM_STDOUT, Part: part,
			Offset: from, Data: data[:n], Last: n == len(data)}); err != nil {
			h.w.t.Fatalf("upload: %v", err)
		}
		if last, err = stream.Recv(); err != nil {
			h.w.t.Fatalf("upload: %v", err)
		}
		from, data = from+uint64(n), data[n:]
	}
	if err := stream.CloseSend(); err != nil {
		h.w.t.Fatal(err)
	}
	return last
}

// stepEnded reports a command that wrote total bytes, of which head and tail
// are kept.
func (h *host) stepEnded(id string, total uint64, head, tail []byte) {
	h.w.t.Helper()
	headSum, tailSum := sha256.Sum256(head), sha256.Sum256(tail)
	h.report(&taskv1.Event{Payload: &taskv1.Event_StepEnded{StepEnded: &taskv1.StepEnded{TaskId: id, Outcome: &taskv1.StepOutcome{
		Phase: taskv1.StepPhase_STEP_PHASE_VERIFIED,
		Command: &taskv1.CommandOutcome{Stdout: &taskv1.OutputSummary{TotalBytes: total, HeadBytes: uint64(len(head)), TailBytes: uint64(len(tail)),
			HeadSha256: headSum[:], TailSha256: tailSum[:]}},
	}}}})
}

func (h *host) startCommand(id string) {
	h.w.t.Helper()
	h.report(&taskv1.Event{Payload: &taskv1.Event_Planned{Planned: &taskv1.TaskPlanned{TaskId: id, Plan: &taskv1.Plan{
		Steps: []*taskv1.PlannedStep{{Type: "command.run"}}}}}})
	h.report(&taskv1.Event{Payload: &taskv1.Event_Started{Started: &taskv1.TaskStarted{TaskId: id}}})
}

func (w *world) outputState(id string) taskv1.OutputState {
	w.t.Helper()
	outputs := w.task(id).GetOutputs()
	if len(outputs) != 1 {
		w.t.Fatalf("outputs = %v, want one", outputs)
	}
	return outputs[0].GetState()
}

func TestOutput(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	h := w.join("n1")
	h.connect()
	id := w.create(w.leaf("n1"))[0].GetId()
	h.accept(h.assignment(id))
	h.startCommand(id)
	head, tail := bytes.Repeat([]byte("0123456789"), 10_000), []byte("the end\xff\n")
	const total = 1_000_000

	follow, err := w.tasks.ReadOutput(w.ctx(), &taskv1.ReadOutputRequest{Id: id, Follow: true})
	if err != nil {
		t.Fatal(err)
	}
	h.next("a wish for the output", func(m *agentv1.SessionResponse) bool { return m.GetOutputWanted().GetTaskId() == id })
	h.upload(id, agentv1.OutputPart_OUTPUT_PART_HEAD, 0, head[:50_000])
	if got := recvBytes(t, follow, 50_000); !bytes.Equal(got, head[:50_000]) {
		t.Error("what was followed is not what was uploaded")
	}
	if got := w.outputState(id); got != taskv1.OutputState_OUTPUT_STATE_OPEN {
		t.Errorf("while the command runs the output is %s", got)
	}
	w.restart()
	h.connect()
	h.stepEnded(id, total, head, tail)
	if got := w.outputState(id); got != taskv1.OutputState_OUTPUT_STATE_PARTIAL {
		t.Errorf("before all has come the output is %s", got)
	}
	// What came before is not taken twice, and a hole is not made.
	if got := h.upload(id, agentv1.OutputPart_OUTPUT_PART_HEAD, 90_000, head[90_000:]).GetReceivedBytes(); got != 50_000 {
		t.Errorf("after a piece beyond the end %d bytes are durable, want 50000", got)
	}
	if last := h.upload(id, agentv1.OutputPart_OUTPUT_PART_HEAD, 40_000, head[40_000:]); last.GetReceivedBytes() != uint64(len(head)) || !last.GetComplete() {
		t.Errorf("last answer = %v", last)
	}
	h.upload(id, agentv1.OutputPart_OUTPUT_PART_TAIL, 0, tail)
	h.finish(id, taskv1.TaskState_TASK_STATE_SUCCEEDED)
	if got := w.outputState(id); got != taskv1.OutputState_OUTPUT_STATE_TRUNCATED {
		t.Errorf("the output is %s, want TRUNCATED", got)
	}
	checkRead(t, w, id, head, tail, total)
}

// checkRead reads a whole output: head, what was skipped, tail, remark.
func checkRead(t *testing.T, w *world, id string, head, tail []byte, total uint64) {
	t.Helper()
	for _, follow := range []bool{false, true} {
		stream, err := w.tasks.ReadOutput(w.ctx(), &taskv1.ReadOutputRequest{Id: id, Follow: follow})
		if err != nil {
			t.Fatal(err)
		}
		var got []byte
		var skipped uint64
		var remark *taskv1.Output
		for {
			m, err := stream.Recv()
			if errors.Is(err, io.EOF) {
				break
			}
			if err != nil {
				t.Fatal(err)
			}
			skipped += m.GetSkippedBytes()
			if len(m.GetData()) > 0 && m.GetOffset() != uint64(len(got))+skipped {
				t.Errorf("a piece at %d after %d bytes and %d skipped", m.GetOffset(), len(got), skipped)
			}
			got = append(got, m.GetData()...)
			if m.GetOutput() != nil {
				remark = m.GetOutput()
			}
		}
		if !bytes.Equal(got, append(bytes.Clone(head), tail...)) || skipped != total-uint64(len(head)+len(tail)) {
			t.Errorf("read %d bytes and %d skipped", len(got), skipped)
		}
		if remark.GetSummary().GetTotalBytes() != total {
			t.Errorf("remark = %v", remark)
		}
	}
}

func recvBytes(t *testing.T, stream grpc.ServerStreamingClient[taskv1.ReadOutputResponse], n int) []byte {
	t.Helper()
	var got []byte
	for len(got) < n {
		m, err := stream.Recv()
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, m.GetData()...)
	}
	return got
}

func TestOutputThatIsNotWhatTheNodeKept(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	h := w.join("n1")
	h.connect()
	id := w.create(w.leaf("n1"))[0].GetId()
	h.accept(h.assignment(id))
	h.startCommand(id)
	h.upload(id, agentv1.OutputPart_OUTPUT_PART_HEAD, 0, []byte("altered"))
	h.stepEnded(id, 7, []byte("genuine"), nil)
	h.finish(id, taskv1.TaskState_TASK_STATE_SUCCEEDED)
	if got := w.outputState(id); got != taskv1.OutputState_OUTPUT_STATE_LOST {
		t.Errorf("the output is %s, want LOST", got)
	}
}

func TestOutputLimits(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	h := w.join("n1")
	h.connect()
	id := w.create(w.leaf("n1"))[0].GetId()
	h.accept(h.assignment(id))
	good := func() *agentv1.UploadOutputRequest {
		return &agentv1.UploadOutputRequest{TaskId: id, Stream: taskv1.Stream_STREAM_STDERR, Part: agentv1.OutputPart_OUTPUT_PART_TAIL, Data: []byte("x")}
	}
	for name, change := range map[string]func(*agentv1.UploadOutputRequest){
		"piece":       func(m *agentv1.UploadOutputRequest) { m.Data = make([]byte, 16<<10+1) },
		"beyond head": func(m *agentv1.UploadOutputRequest) { m.Part, m.Offset = agentv1.OutputPart_OUTPUT_PART_HEAD, 1<<20 },
		"beyond tail": func(m *agentv1.UploadOutputRequest) { m.Offset = 256 << 10 },
		"overflow":    func(m *agentv1.UploadOutputRequest) { m.Offset = ^uint64(0) },
		"stream":      func(m *agentv1.UploadOutputRequest) { m.Stream = 7 },
		"part":        func(m *agentv1.UploadOutputRequest) { m.Part = 0 },
		"step":        func(m *agentv1.UploadOutputRequest) { m.Step = 1000 },
		"task":        func(m *agentv1.UploadOutputRequest) { m.TaskId = "../../etc" },
	} {
		stream, err := agentv1.NewAgentServiceClient(h.conn).UploadOutput(w.ctx())
		if err != nil {
			t.Fatal(err)
		}
		m := good()
		change(m)
		_ = stream.Send(m)
		_, err = stream.Recv()
		if code := status.Code(err); code != codes.InvalidArgument && (name != "task" || code != codes.NotFound) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
