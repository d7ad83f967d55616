package shim

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/millwright/agent/internal/child"
	"github.com/gpuaas/millwright/agent/internal/crash"
	"github.com/gpuaas/millwright/agent/internal/host/files"
	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/tasks/host"
)

// ErrRecord is wrapped by the error of a record that is there and cannot be
// understood.
var ErrRecord = errors.New("damaged record of a command")

// ID names one attempt at the command of a step.
type ID struct {
	TaskID  string
	Step    uint32
	Attempt uint32
}

// Unit is the name of the transient unit in which the command runs.
func (id ID) Unit() string {
	return fmt.Sprintf("millwright-task-%s-%d-%d.service", id.TaskID, id.Step, id.Attempt)
}

// Dir is the directory of the command below the agent's state directory. A task
// id that is not made of letters, digits and hyphens is an error.
func (id ID) Dir(stateDir string) (Dir, error) {
	if !validTaskID(id.TaskID) {
		return "", fmt.Errorf("directory of a command: task id %q: letters, digits and hyphens are allowed, at most 64", id.TaskID)
	}
	return Dir(filepath.Join(stateDir, "commands", id.TaskID, fmt.Sprintf("%d-%d", id.Step, id.Attempt))), nil
}

// ParseDir returns the id of a command by its directory.
func ParseDir(dir string) (ID, error) {
	step, attempt, ok := strings.Cut(filepath.Base(dir), "-")
	s, err1 := strconv.ParseUint(step, 10, 32)
	a, err2 := strconv.ParseUint(attempt, 10, 32)
	id := ID{TaskID: filepath.Base(filepath.Dir(dir)), Step: uint32(s), Attempt: uint32(a)}
	if !ok || err1 != nil || err2 != nil || !validTaskID(id.TaskID) {
		return ID{}, fmt.Errorf("directory of a command: %q: want .../TASK/STEP-ATTEMPT", dir)
	}
	return id, nil
}

func validTaskID(s string) bool {
	for _, c := range s {
		if !strings.ContainsRune("0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ-", c) {
			return false
		}
	}
	return s != "" && len(s) <= 64
}

// Dir is the directory of one command. Its files are
//
//	spec         the CommandStep, written by the agent before the unit starts
//	start        the marker, a CommandRecord: made once, and no program without it
//	stdout.head  the first bytes, written as they come; stderr.head likewise
//	totals       two numbers of 8 bytes: what stdout and stderr wrote until now
//	stdout.tail  the last bytes, written at the end; stderr.tail likewise
//	result       the CommandRecord with the outcome
//	death        how the shim itself ended, when it left no result
//
// A file is whole and durable once it has its name, except head and totals.
type Dir string

func (d Dir) path(name string) string { return filepath.Join(string(d), name) }

// WriteSpec makes the directory and the spec durable. The directory's parents
// are made too.
func (d Dir) WriteSpec(c *taskv1.CommandStep) error {
	b, err := proto.Marshal(c)
	if err != nil {
		return fmt.Errorf("write command spec in %s: %w", d, err)
	}
	if err := files.MakeDirs(string(d), 0o700); err != nil {
		return fmt.Errorf("write command spec in %s: %w", d, err)
	}
	return files.Replace(d.path("spec"), b, 0o600)
}

// Spec reads the spec.
func (d Dir) Spec() (*taskv1.CommandStep, error) {
	b, err := os.ReadFile(d.path("spec"))
	if err != nil {
		return nil, fmt.Errorf("read command spec: %w", err)
	}
	c := &taskv1.CommandStep{}
	if err := proto.Unmarshal(b, c); err != nil {
		return nil, fmt.Errorf("read command spec in %s: %w", d, err)
	}
	return c, nil
}

// Take makes the start marker with rec in it, durably. Of any number of racers
// one gets nil and the others an error that wraps fs.ErrExist.
func (d Dir) Take(rec *agentv1.CommandRecord) error {
	b, err := proto.Marshal(rec)
	if err != nil {
		return fmt.Errorf("take start marker in %s: %w", d, err)
	}
	if err := files.CreateExclusive(d.path("start"), b, 0o600); err != nil {
		return fmt.Errorf("take start marker: %w", err)
	}
	return nil
}

// Marker reads the start marker. One that is not there is fs.ErrNotExist; any
// other error means that it is there.
func (d Dir) Marker() (*agentv1.CommandRecord, error) { return d.record("start") }

// Result reads the result, or the marker of a command that was burnt. One that
// is not there is fs.ErrNotExist; one that does not say how the command ended
// wraps [ErrRecord].
func (d Dir) Result() (*agentv1.CommandRecord, error) {
	rec, err := d.record("result")
	if errors.Is(err, fs.ErrNotExist) {
		if marker, e := d.Marker(); e == nil && marker.GetStartError() != "" {
			return marker, nil
		}
	}
	if err == nil && rec.GetOutcome() == nil && rec.GetStartError() == "" {
		return nil, fmt.Errorf("%s: %w: it has no outcome", d.path("result"), ErrRecord)
	}
	return rec, err
}

func (d Dir) record(name string) (*agentv1.CommandRecord, error) {
	b, err := os.ReadFile(d.path(name))
	if err != nil {
		return nil, fmt.Errorf("read record of a command: %w", err)
	}
	rec := &agentv1.CommandRecord{}
	if err := proto.Unmarshal(b, rec); err != nil {
		return nil, fmt.Errorf("%s: %w: %w", d.path(name), ErrRecord, err)
	}
	return rec, nil
}

// Burn sees to it that the program is never started, if it was not yet: it takes
// the marker itself, with the reason in it. When someone else has the marker the
// error wraps fs.ErrExist, and the program may run or have run.
func (d Dir) Burn(rec *agentv1.CommandRecord, why error) error {
	if err := files.MakeDirs(string(d), 0o700); err != nil {
		return err
	}
	rec.StartError = child.FormatError(why)
	return d.Take(rec)
}

// writeResult uses the room that reserve kept.
func (d Dir) writeResult(rec *agentv1.CommandRecord) error {
	b, err := proto.Marshal(rec)
	if err != nil {
		return fmt.Errorf("write result in %s: %w", d, err)
	}
	if err := files.Fill(d.path(reserveName), b, 0o600); err != nil {
		return fmt.Errorf("write result: %w", err)
	}
	crash.Point("shim.result.filled")
	if err := files.Rename(d.path(reserveName), d.path("result")); err != nil {
		return fmt.Errorf("write result: %w", err)
	}
	return nil
}

// Death says how the shim ended that left no result, or is empty.
func (d Dir) Death() string {
	b, err := os.ReadFile(d.path("death"))
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
}

// HeadPath is the file with the first bytes of a stream.
func (d Dir) HeadPath(s taskv1.Stream) string { return d.path(streamName(s) + ".head") }

// TailPath is the file with the last bytes of a stream.
func (d Dir) TailPath(s taskv1.Stream) string { return d.path(streamName(s) + ".tail") }

// TotalsPath is the file with the running totals.
func (d Dir) TotalsPath() string { return d.path("totals") }

func streamName(s taskv1.Stream) string {
	if s == taskv1.Stream_STREAM_STDERR {
		return "stderr"
	}
	return "stdout"
}

const reserveName = "result.reserve"

// reserve keeps room on the disk for the result and the tails, so that a disk
// that fills up while the program runs does not cost its outcome.
func (d Dir) reserve() error {
	for _, f := range []struct {
		name string
		size int64
	}{{reserveName, 4096}, {"stdout.tail", tailLimit}, {"stderr.tail", tailLimit}} {
		file, err := os.OpenFile(d.path(f.name), os.O_CREATE|os.O_WRONLY|unix.O_NOFOLLOW, 0o600)
		if err != nil {
			return fmt.Errorf("reserve room for the result: %w", err)
		}
		err = unix.Fallocate(int(file.Fd()), unix.FALLOC_FL_KEEP_SIZE, 0, f.size)
		if err = errors.Join(ignoreUnsupported(err), file.Close()); err != nil {
			return fmt.Errorf("reserve room for the result: %s: %w", f.name, err)
		}
	}
	return nil
}

func ignoreUnsupported(err error) error {
	if errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.ENOSYS) {
		return nil
	}
	return err
}

// Outcome returns the outcome of a record as the contract of tasks has it, or
// the error for which the program could not be started.
func Outcome(rec *agentv1.CommandRecord) (host.Outcome, error) {
	if e := rec.GetStartError(); e != "" {
		return host.Outcome{}, child.ParseError(e)
	}
	o := rec.GetOutcome()
	return host.Outcome{
		ExitCode: int(o.GetExitCode()), Signal: int(o.GetSignal()),
		Invocation: o.GetInvocationId(), BootID: o.GetBootId(), Duration: o.GetDuration().AsDuration(),
		Stdout: output(o.GetStdout()), Stderr: output(o.GetStderr()),
		TimedOut: o.GetTimedOut(), OOMKilled: o.GetOomKilled(),
	}, nil
}

func output(s *taskv1.OutputSummary) host.Output {
	return host.Output{
		Total: s.GetTotalBytes(), Head: s.GetHeadBytes(), Tail: s.GetTailBytes(),
		HeadSHA256: s.GetHeadSha256(), TailSHA256: s.GetTailSha256(), OpenAtEnd: s.GetOpenAtEnd(),
	}
}
