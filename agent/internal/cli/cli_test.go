package cli_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/coreos/go-systemd/v22/journal"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/millwright/agent/internal/cli"
	"github.com/gpuaas/millwright/agent/internal/local"
	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
	gpuv1 "github.com/gpuaas/millwright/proto/millwright/gpu/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
)

// node is what the running agent would answer.
type node struct{}

func (node) Status(context.Context) (*agentv1.GetStatusResponse, error) {
	return &agentv1.GetStatusResponse{
		Version: "1", Node: "gpu-001", Server: "mw:7443", Connected: true, SessionEpoch: 7, ClockOffset: durationpb.New(-1500 * time.Millisecond),
		JournalId: "j1", LastSeq: 12, AcknowledgedSeq: 11, UnfinishedTasks: 2, HeldTasks: 1, TrustRootVersion: 3, Cluster: "abcd",
		Conditions: []*taskv1.Condition{{Type: "PolicyInvalid", Status: taskv1.ConditionStatus_CONDITION_STATUS_TRUE, Reason: "POLICY_INVALID", Message: "line 3\x1b[2J"}},
		Intents:    []*agentv1.IntentRecord{{Key: "mount:/data", State: taskv1.IntentState_INTENT_STATE_ACTIVE, TaskId: "t1"}},
	}, nil
}

func (node) Journal(_ context.Context, r *agentv1.ListJournalRequest) (*agentv1.ListJournalResponse, error) {
	t := &agentv1.JournalTask{Kind: "storage.mount", Record: &agentv1.TaskRecord{
		TaskId: "t1", State: taskv1.TaskState_TASK_STATE_HELD, Reason: "UNDO_FAILED", AcceptTime: timestamppb.New(time.Unix(0, 0)),
	}}
	switch {
	case r.GetTaskId() == "missing":
		return nil, fmt.Errorf("task missing is not in the journal: %w", local.ErrNotFound)
	case r.GetTaskId() != "":
		t.Steps = []*agentv1.JournalStep{{
			Planned: &taskv1.PlannedStep{Title: "write the unit"}, Outcome: &taskv1.StepOutcome{Phase: taskv1.StepPhase_STEP_PHASE_VERIFIED, Attempts: 1},
		}}
	case r.GetUnfinishedOnly() && r.GetLimit() != 5:
		return nil, errors.New("the limit was not handed on")
	}
	return &agentv1.ListJournalResponse{Tasks: []*agentv1.JournalTask{t}}, nil
}

func (node) Resolve(_ context.Context, r *agentv1.ResolveTaskRequest) (taskv1.TaskState, error) {
	switch r.GetTaskId() {
	case "missing":
		return 0, local.ErrNotFound
	case "undone":
		return taskv1.TaskState_TASK_STATE_RUNNING, nil
	case "running":
		return 0, local.ErrNotHeld
	}
	return taskv1.TaskState_TASK_STATE_ABANDONED, nil
}

func (node) Export(_ context.Context, emit func(*agentv1.JournalLine) error) error {
	for seq := range uint64(3) {
		if err := emit(&agentv1.JournalLine{Line: &agentv1.JournalLine_Frame{Frame: &agentv1.JournalFrame{Seq: seq + 1, Bytes: bytes.Repeat([]byte("x"), 200<<10)}}}); err != nil {
			return err
		}
	}
	return nil
}

// configured writes a configuration whose agent is in dir.
func configured(t *testing.T) (dir, config string) {
	t.Helper()
	dir = t.TempDir()
	config = filepath.Join(dir, "agent.yaml")
	write(t, config, fmt.Sprintf("version: 1\nrun_dir: %s/run\nstate_dir: %s/state\npolicy_file: %s/policy.yaml\njoin_file: %s/join.json\n", dir, dir, dir, dir))
	return dir, config
}

func write(t *testing.T, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

// running answers on the socket in dir for the length of the test.
func running(t *testing.T, dir string) {
	t.Helper()
	ready := make(chan struct{})
	s := local.New(local.Config{Node: node{}, RunDir: filepath.Join(dir, "run"), Logger: slog.New(slog.DiscardHandler), Ready: func() { close(ready) }})
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := s.Run(ctx); err != nil {
			t.Errorf("Run() = %v, want nil", err)
		}
	})
	t.Cleanup(func() { cancel(); wg.Wait() })
	<-ready
}

func run(t *testing.T, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	var out, errs bytes.Buffer
	code = cli.Main(t.Context(), "v1.2.3", args, &out, &errs)
	return code, out.String(), errs.String()
}

func TestExport(t *testing.T) {
	dir, config := configured(t)
	running(t, dir)
	code, out, errs := run(t, "journal", "export", "--config", config)
	if lines := strings.Split(strings.TrimSpace(out), "\n"); code != 0 || len(lines) != 3 || !strings.Contains(lines[2], `"seq":"3"`) || errs != "" {
		t.Errorf("journal export = %d, %d lines, %q; want 3 frames", code, len(lines), errs)
	}
	dir, config = configured(t) // no agent, and no journal
	if code, _, errs := run(t, "journal", "export", "--config", config); code != 1 || !strings.Contains(errs, dir+"/state/state.db") {
		t.Errorf("journal export of nothing = %d, %q; want 1 and the path", code, errs)
	}
}

func TestCommands(t *testing.T) {
	dir, config := configured(t)
	running(t, dir)
	bad := filepath.Join(dir, "bad.yaml")
	write(t, bad, "version: 1\nlog_leval: info\n")
	write(t, filepath.Join(dir, "run", "restored"), "boot\n")
	_, waiting := configured(t)
	policy := filepath.Join(dir, "policy.yaml")
	write(t, policy, "version: 1\nrules:\n  - allow: storage.mount\n")
	badPolicy := filepath.Join(dir, "bad-policy.yaml")
	write(t, badPolicy, "version: 1\nrules:\n  - alow: storage.mount\n")
	for _, tc := range []struct {
		name   string
		args   []string
		code   int
		stdout string // all or, with *, a part of it
		stderr string // a part
	}{
		{"version", []string{"version"}, 0, "millwrightd v1.2.3\n", ""},
		{"unknown command", []string{"begin"}, 2, "", `unknown command "begin" for millwrightd; known commands:`},
		{"unknown subcommand", []string{"journal", "x"}, 2, "", `unknown command "x" for millwrightd journal`},
		{"unknown flag", []string{"status", "--colour"}, 2, "", "--colour"},
		{"unexpected argument", []string{"status", "x"}, 2, "", `unexpected argument "x"`},
		{"config", []string{"config", "check", config}, 0, config + " is valid\n", ""},
		{"default config", []string{"--config", config, "config", "check"}, 0, config + " is valid\n", ""},
		{"bad config", []string{"config", "check", bad}, 1, "", `line 2: unknown key "log_leval"; the keys are version, server`},
		{"missing config", []string{"config", "check", dir + "/none"}, 1, "", dir + "/none"},
		{"run with bad config", []string{"run", "--config", bad}, 1, "", `line 2: unknown key "log_leval"`},
		{"policy", []string{"policy", "check", policy}, 0, policy + " is valid\n", ""},
		{"default policy", []string{"policy", "check", "--config", config}, 0, policy + " is valid\n", ""},
		{"bad policy", []string{"policy", "check", badPolicy}, 1, "", "alow"},
		{"status", []string{"status", "--config", config}, 0, "*condition   PolicyInvalid is true: POLICY_INVALID: line 3 [2J\n", ""},
		{"status session", []string{"status", "--config", config}, 0, "*connected, epoch 7, its clock is 1.5s ahead\n", ""},
		{"status format", []string{"status", "-o", "xml", "--config", config}, 2, "", `"xml": must be table or json`},
		{"journal", []string{"journal", "list", "--config", config}, 0, "TASK  KIND           STATE  REASON       ACCEPTED              ENDED\nt1    storage.mount  held   UNDO_FAILED  1970-01-01T00:00:00Z  -\n", ""},
		{"journal flags", []string{"journal", "list", "--unfinished", "--limit", "5", "--config", config}, 0, "*t1", ""},
		{"journal limit", []string{"journal", "list", "--limit", "1001", "--config", config}, 2, "", "limit: 1001: want 1 to 1000"},
		{"one task", []string{"journal", "list", "t1", "--config", config}, 0, "*0     write the unit  verified  1", ""},
		{"missing task", []string{"journal", "list", "missing", "--config", config}, 5, "", "task missing is not in the journal"},
		{"resolve", []string{"task", "resolve", "t1", "--as", "abandon", "--reason", "gone", "--config", config}, 0, "task t1 is abandoned\n", ""},
		{"resolve without reason", []string{"task", "resolve", "t1", "--as", "abandon", "--config", config}, 2, "", "--reason: missing"},
		{"resolve as undo", []string{"task", "resolve", "undone", "--as", "undo", "--reason", "x", "--config", config}, 0,
			"task undone is being undone; see it with: millwrightd journal list undone\n", ""},
		{"resolve as nothing known", []string{"task", "resolve", "t1", "--as", "drop", "--reason", "x", "--config", config}, 2, "", `--as: "drop": want undo`},
		{"resolve nothing", []string{"task", "resolve", "--as", "accept", "--reason", "x", "--config", config}, 2, "", "an argument is missing; usage: millwrightd task resolve TASK"},
		{"resolve missing", []string{"task", "resolve", "missing", "--as", "accept", "--reason", "x", "--config", config}, 5, "", "not found"},
		{"resolve running", []string{"task", "resolve", "running", "--as", "accept", "--reason", "x", "--config", config}, 6, "", "the task cannot be settled so"},
		{"GPUs", []string{"gpu", "list", "--config", config}, 0,
			"*0    GPU-1  NVIDIA H100  unknown  unknown: gpu lost  on 3g.40gb,1g.10gb\ndriver 580.95.05, CUDA unknown; 0 GPUs on the PCI bus\n", ""},
		{"join without bundle", []string{"join", "--config", config}, 1, "", "join.json"},
		{"await what is restored", []string{"await-restored", "--config", config}, 0, "", ""},
		{"await in vain", []string{"await-restored", "--at-most", "200ms", "--config", waiting}, 0, "", "after 200ms it is not known that the GPUs have the layouts"},
		{"shim without directory", []string{"shim"}, 2, "", "usage: millwrightd shim"},
		{"probe without arguments", []string{"probe"}, 1, "", "usage: probe"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			code, stdout, stderr := run(t, tc.args...)
			if code != tc.code || !strings.Contains(stderr, tc.stderr) {
				t.Errorf("exit code %d, stderr %q; want %d and %q", code, stderr, tc.code, tc.stderr)
			}
			if part, ok := strings.CutPrefix(tc.stdout, "*"); ok && !strings.Contains(stdout, part) || !ok && stdout != tc.stdout {
				t.Errorf("stdout = %q, want %q", stdout, tc.stdout)
			}
		})
	}
}

func TestJSON(t *testing.T) {
	dir, config := configured(t)
	running(t, dir)
	code, stdout, stderr := run(t, "status", "-o", "json", "--config", config)
	var st struct {
		Node    string `json:"node"`
		LastSeq string `json:"lastSeq"`
	}
	if err := json.Unmarshal([]byte(stdout), &st); err != nil || code != 0 || st.Node != "gpu-001" || st.LastSeq != "12" {
		t.Errorf("status -o json = %d, %q, %q: %v", code, stdout, stderr, err)
	}
	code, stdout, stderr = run(t, "journal", "list", "-o", "json", "--config", config)
	var j struct {
		Tasks []struct {
			Kind string `json:"kind"`
		} `json:"tasks"`
	}
	if err := json.Unmarshal([]byte(stdout), &j); err != nil || code != 0 || len(j.Tasks) != 1 || j.Tasks[0].Kind != "storage.mount" {
		t.Errorf("journal list -o json = %d, %q, %q: %v", code, stdout, stderr, err)
	}
}

func TestAgentDoesNotRun(t *testing.T) {
	_, config := configured(t)
	for _, args := range [][]string{{"status"}, {"journal", "list"}, {"task", "resolve", "t", "--as", "accept", "--reason", "x"}} {
		code, stdout, stderr := run(t, append(args, "--config", config)...)
		if code != 1 || stdout != "" || !strings.Contains(stderr, "millwrightd does not run on this node") || !strings.Contains(stderr, "systemctl restart millwrightd") {
			t.Errorf("%v = %d, %q, %q; want 1 and the way out", args, code, stdout, stderr)
		}
	}
}

func TestInterrupted(t *testing.T) {
	dir, config := configured(t)
	running(t, dir)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	var out, errs bytes.Buffer
	if code := cli.Main(ctx, "v1", []string{"status", "--config", config}, &out, &errs); code != 130 {
		t.Errorf("exit code %d, %q; want 130", code, errs.String())
	}
}

func TestJournald(t *testing.T) {
	var message string
	var prio journal.Priority
	var fields map[string]string
	h := cli.NewJournald(slog.LevelInfo, func(m string, p journal.Priority, f map[string]string) error {
		message, prio, fields = m, p, f
		return nil
	})
	log := slog.New(h).With("component", "executor").With("task_id", "t1")
	log.Debug("nothing")
	if message != "" {
		t.Errorf("a debug line was sent: %q", message)
	}
	log.WithGroup("unit").Warn("command ended", "exit_code", 7, "err", errors.New("a b"), slog.Group("g", "x", 1))
	if want := `command ended component=executor task_id=t1 unit.exit_code=7 unit.err="a b" unit.g.x=1`; message != want {
		t.Errorf("message = %q, want %q", message, want)
	}
	if prio != journal.PriWarning {
		t.Errorf("priority = %v, want warning", prio)
	}
	for k, want := range map[string]string{"MILLWRIGHT_TASK_ID": "t1", "MILLWRIGHT_COMPONENT": "executor", "MILLWRIGHT_UNIT_EXIT_CODE": "7", "MILLWRIGHT_UNIT_ERR": "a b", "SYSLOG_IDENTIFIER": "millwrightd"} {
		if fields[k] != want {
			t.Errorf("field %s = %q, want %q", k, fields[k], want)
		}
	}
	// A logger's children do not share what they were given.
	slog.New(h).Info("other")
	if _, ok := fields["MILLWRIGHT_TASK_ID"]; ok {
		t.Errorf("fields of another logger = %v", fields)
	}
}

// GPUs answers with one GPU whose memory is not known.
func (node) GPUs(context.Context) (*agentv1.ListGpusResponse, error) {
	return &agentv1.ListGpusResponse{Inventory: &gpuv1.Inventory{
		DriverVersion: proto.String("580.95.05"), Gpus: []*gpuv1.Gpu{{
			Index: 0, Uuid: proto.String("GPU-1"), Model: proto.String("NVIDIA H100"), MigEnabled: proto.Bool(true), MigPending: proto.Bool(true),
			GpuInstances: []*gpuv1.GpuInstance{{Profile: proto.String("3g.40gb")}, {Profile: proto.String("1g.10gb")}},
			Unknown:      []*gpuv1.Unknown{{Field: "memory_bytes", Reason: gpuv1.UnknownReason_UNKNOWN_REASON_GPU_LOST}},
		}},
	}}, nil
}

func (node) ResetClock(context.Context) (before, now time.Time, err error) {
	return time.Unix(2000, 0), time.Unix(1000, 0), nil
}
