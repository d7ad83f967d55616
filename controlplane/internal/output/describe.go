package output

import (
	"bytes"

	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"

	"github.com/gpuaas/millwright/controlplane/internal/store"
)

// Describe says what is here of the outputs of a task, by step, the standard
// output first. A step without a command has none.
func (s *Store) Describe(task *taskv1.Task) ([]*taskv1.Output, error) {
	var out []*taskv1.Output
	for step := range uint32(max(len(task.GetSteps()), len(task.GetPlan().GetSteps()))) {
		for _, stream := range []taskv1.Stream{taskv1.Stream_STREAM_STDOUT, taskv1.Stream_STREAM_STDERR} {
			o, err := s.describe(task, Key{TaskID: task.GetId(), Step: step, Stream: stream})
			if err != nil {
				return nil, err
			}
			if o != nil {
				out = append(out, o)
			}
		}
	}
	return out, nil
}

// describe returns nil when nothing is known of the output.
func (s *Store) describe(task *taskv1.Task, key Key) (*taskv1.Output, error) {
	head, tail, err := s.Received(key)
	if err != nil {
		return nil, err
	}
	sum := Summary(task, key)
	if sum == nil && head == 0 && tail == 0 {
		return nil, nil
	}
	o := &taskv1.Output{Step: key.Step, Stream: key.Stream, Summary: sum, ReceivedHeadBytes: head, ReceivedTailBytes: tail}
	o.State, err = s.state(task, key, o)
	return o, err
}

// Summary is what the node said of a stream once its command had ended; nil
// before.
func Summary(task *taskv1.Task, key Key) *taskv1.OutputSummary {
	if int(key.Step) >= len(task.GetSteps()) {
		return nil
	}
	command := task.GetSteps()[key.Step].GetCommand()
	if key.Stream == taskv1.Stream_STREAM_STDERR {
		return command.GetStderr()
	}
	return command.GetStdout()
}

func (s *Store) state(task *taskv1.Task, key Key, o *taskv1.Output) (taskv1.OutputState, error) {
	sum := o.GetSummary()
	switch {
	case sum == nil && store.Terminal(task.GetState()):
		// The command has left no record, so no one knows what it wrote.
		return taskv1.OutputState_OUTPUT_STATE_LOST, nil
	case sum == nil:
		return taskv1.OutputState_OUTPUT_STATE_OPEN, nil
	case o.GetReceivedHeadBytes() < sum.GetHeadBytes() || o.GetReceivedTailBytes() < sum.GetTailBytes():
		if task.GetState() == taskv1.TaskState_TASK_STATE_ABANDONED {
			return taskv1.OutputState_OUTPUT_STATE_LOST, nil
		}
		return taskv1.OutputState_OUTPUT_STATE_PARTIAL, nil
	}
	same, err := s.matches(key, sum)
	switch {
	case err != nil:
		return taskv1.OutputState_OUTPUT_STATE_UNSPECIFIED, err
	case !same:
		return taskv1.OutputState_OUTPUT_STATE_LOST, nil
	case sum.GetTotalBytes() > sum.GetHeadBytes()+sum.GetTailBytes():
		return taskv1.OutputState_OUTPUT_STATE_TRUNCATED, nil
	}
	return taskv1.OutputState_OUTPUT_STATE_COMPLETE, nil
}

// matches reports whether what is here is what the node kept.
func (s *Store) matches(key Key, sum *taskv1.OutputSummary) (bool, error) {
	for _, p := range []struct {
		part  agentv1.OutputPart
		bytes uint64
		want  []byte
	}{
		{agentv1.OutputPart_OUTPUT_PART_HEAD, sum.GetHeadBytes(), sum.GetHeadSha256()},
		{agentv1.OutputPart_OUTPUT_PART_TAIL, sum.GetTailBytes(), sum.GetTailSha256()},
	} {
		if p.bytes == 0 {
			continue
		}
		got, err := s.sum(key, p.part)
		if err != nil || !bytes.Equal(got, p.want) {
			return false, err
		}
	}
	return true, nil
}
