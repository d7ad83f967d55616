package output_test

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"math"
	"sync"
	"testing"

	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"

	"github.com/gpuaas/millwright/controlplane/internal/output"
)

const (
	headPart = agentv1.OutputPart_OUTPUT_PART_HEAD
	tailPart = agentv1.OutputPart_OUTPUT_PART_TAIL
)

func open(t *testing.T, dir string) *output.Store {
	t.Helper()
	s, err := output.Open(dir, 0)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func TestPut(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	s := open(t, dir)
	key := output.Key{TaskID: "t", Step: 2, Stream: taskv1.Stream_STREAM_STDOUT}
	for _, c := range []struct {
		name     string
		offset   uint64
		data     string
		received uint64
	}{
		{"first", 0, "abc", 3},
		{"beyond the end", 5, "x", 3},
		{"again", 0, "abc", 3},
		{"overlapping", 2, "cde", 5},
		{"nothing", 5, "", 5},
		{"within", 1, "b", 5},
		{"on", 5, "fg", 7},
	} {
		got, err := s.Put(key, headPart, c.offset, []byte(c.data))
		if err != nil || got != c.received {
			t.Errorf("%s: Put = %d, %v; want %d", c.name, got, err, c.received)
		}
	}
	s = open(t, dir)
	buf := make([]byte, 4)
	n, err := s.Read(key, headPart, 3, buf)
	if err != nil || string(buf[:n]) != "defg" {
		t.Errorf("Read = %q, %v", buf[:n], err)
	}
	if n, err := s.Read(key, headPart, 7, buf); n != 0 || err != nil {
		t.Errorf("Read at the end = %d, %v", n, err)
	}
	if n, err := s.Read(key, tailPart, 0, buf); n != 0 || err != nil {
		t.Errorf("Read of a part that is not there = %d, %v", n, err)
	}
	if head, tail, err := s.Received(key); head != 7 || tail != 0 || err != nil {
		t.Errorf("Received = %d, %d, %v", head, tail, err)
	}
	for name, err := range map[string]error{
		"piece": second(s.Put(key, headPart, 0, make([]byte, output.MaxPiece+1))),
		"head":  second(s.Put(key, headPart, output.MaxHead-1, make([]byte, 2))),
		"tail":  second(s.Put(key, tailPart, output.MaxTail, make([]byte, 1))),
		"huge":  second(s.Put(key, tailPart, ^uint64(0), make([]byte, 2))),
	} {
		if !errors.Is(err, output.ErrTooLarge) {
			t.Errorf("%s: Put = %v, want ErrTooLarge", name, err)
		}
	}
}

func second(_ uint64, err error) error { return err }

func TestPutRaces(t *testing.T) {
	t.Parallel()
	s := open(t, t.TempDir())
	key := output.Key{TaskID: "t", Stream: taskv1.Stream_STREAM_STDERR}
	want := bytes.Repeat([]byte("0123456789abcdef"), 64)
	var wg sync.WaitGroup
	for range 4 { // two streams of one node may overlap after a broken connection
		wg.Go(func() {
			for at := uint64(0); at < uint64(len(want)); {
				n, err := s.Put(key, headPart, at, want[at:min(at+16, uint64(len(want)))])
				if err != nil {
					t.Errorf("Put: %v", err)
					return
				}
				at = n
			}
		})
	}
	wg.Wait()
	got := make([]byte, 2*len(want))
	n, err := s.Read(key, headPart, 0, got)
	if err != nil || !bytes.Equal(got[:n], want) {
		t.Errorf("%d bytes came out, %v", n, err)
	}
}

func TestStates(t *testing.T) {
	t.Parallel()
	const (
		open      = taskv1.OutputState_OUTPUT_STATE_OPEN
		partial   = taskv1.OutputState_OUTPUT_STATE_PARTIAL
		complete  = taskv1.OutputState_OUTPUT_STATE_COMPLETE
		truncated = taskv1.OutputState_OUTPUT_STATE_TRUNCATED
		lost      = taskv1.OutputState_OUTPUT_STATE_LOST

		running   = taskv1.TaskState_TASK_STATE_RUNNING
		failed    = taskv1.TaskState_TASK_STATE_FAILED
		abandoned = taskv1.TaskState_TASK_STATE_ABANDONED
	)
	sum := func(total uint64, head, tail string) *taskv1.OutputSummary {
		h, l := sha256.Sum256([]byte(head)), sha256.Sum256([]byte(tail))
		return &taskv1.OutputSummary{TotalBytes: total, HeadBytes: uint64(len(head)), TailBytes: uint64(len(tail)), HeadSha256: h[:], TailSha256: l[:]}
	}
	for _, c := range []struct {
		name       string
		state      taskv1.TaskState
		sum        *taskv1.OutputSummary
		head, tail string
		want       taskv1.OutputState // 0: no output at all
	}{
		{"nothing known", running, nil, "", "", 0},
		{"running", running, nil, "ab", "", open},
		{"ended without a record", failed, nil, "ab", "", lost},
		{"empty", running, sum(0, "", ""), "", "", complete},
		{"all", running, sum(2, "ab", ""), "ab", "", complete},
		{"head and tail are all", failed, sum(4, "ab", "cd"), "ab", "cd", complete},
		{"not all kept", failed, sum(9, "ab", "cd"), "ab", "cd", truncated},
		{"tail missing", failed, sum(9, "ab", "cd"), "ab", "", partial},
		{"head missing", running, sum(2, "ab", ""), "a", "", partial},
		{"will not come", abandoned, sum(2, "ab", ""), "a", "", lost},
		{"altered", failed, sum(2, "ab", ""), "xy", "", lost},
		{"altered tail", failed, sum(4, "ab", "cd"), "ab", "xy", lost},
		{"too much", failed, sum(2, "ab", ""), "abc", "", lost},
	} {
		s := open1(t)
		key := output.Key{TaskID: "t", Stream: taskv1.Stream_STREAM_STDOUT}
		for part, data := range map[agentv1.OutputPart]string{headPart: c.head, tailPart: c.tail} {
			if data == "" {
				continue
			}
			if _, err := s.Put(key, part, 0, []byte(data)); err != nil {
				t.Fatal(err)
			}
		}
		step := &taskv1.StepOutcome{}
		if c.sum != nil {
			step.Command = &taskv1.CommandOutcome{Stdout: c.sum}
		}
		got, err := s.Describe(&taskv1.Task{Id: "t", State: c.state, Steps: []*taskv1.StepOutcome{step}})
		switch {
		case err != nil:
			t.Errorf("%s: %v", c.name, err)
		case c.want == 0 && len(got) != 0, c.want != 0 && (len(got) != 1 || got[0].GetState() != c.want):
			t.Errorf("%s: outputs = %v, want %s", c.name, got, c.want)
		}
	}
}

func open1(t *testing.T) *output.Store {
	t.Helper()
	return open(t, t.TempDir())
}

// Outputs must not take the room that the database needs.
func TestRoomForTheDatabase(t *testing.T) {
	t.Parallel()
	s, err := output.Open(t.TempDir(), math.MaxUint64)
	if err != nil {
		t.Fatal(err)
	}
	key := output.Key{TaskID: "t", Stream: taskv1.Stream_STREAM_STDOUT}
	if _, err := s.Put(key, agentv1.OutputPart_OUTPUT_PART_HEAD, 0, []byte("x")); !errors.Is(err, output.ErrNoRoom) {
		t.Errorf("Put = %v", err)
	}
	if head, _, err := s.Received(key); err != nil || head != 0 {
		t.Errorf("Received = %d, %v", head, err)
	}
}
