package crash

import (
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/testing/protocmp"

	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/test/cluster"
	"github.com/gpuaas/millwright/test/cluster/clustertest"
)

// check waits for the end of a task and holds all that is told of it against
// what is expected: task, history, the node's journal, and the node itself. It
// returns the outcome in one line.
func check(t testing.TB, c *clustertest.Cluster, k kind, id, label string, want expectation) string {
	t.Helper()
	task := c.End(id)
	outcome := word(task)
	state, reason, tail := k.state, k.reason, slices.Clone(k.events)
	switch {
	case want.held:
		state, reason, tail = taskv1.TaskState_TASK_STATE_HELD, "OUTCOME_UNKNOWN", []string{"HELD"}
	case want.failed != "":
		state, reason, tail = taskv1.TaskState_TASK_STATE_FAILED, want.failed, nil
	}
	if task.GetState() != state || task.GetReason() != reason {
		t.Fatalf("it is %s: %s, want %s %s", outcome, task.GetMessage(), state, reason)
	}
	undo := k.undo
	switch {
	case want.held:
		undo = taskv1.UndoState_UNDO_STATE_UNSPECIFIED
	case want.failed != "":
		undo = taskv1.UndoState_UNDO_STATE_NOT_NEEDED // nothing had changed
	}
	if task.GetUndo() != undo {
		t.Errorf("undo is %s, want %s", task.GetUndo(), undo)
	}
	if want.held {
		if _, err := c.Millctl(t.Context(), "task", "resolve", id, "--as", "abandon", "--reason", "test", "--wait"); err != nil {
			t.Fatal(err)
		}
		task = c.Await(id, taskv1.TaskState_TASK_STATE_ABANDONED)
		outcome += ", then abandoned"
	}
	tail = append(tail, strings.TrimPrefix(task.GetState().String(), "TASK_STATE_"))
	events := c.Events(id)
	checkHistory(t, events, tail, want)
	checkJournal(t, c, task, events)
	k.effect(t, c, k, task, label, want)
	c.Sh(task.GetNode(), `for i in $(seq 300); do u=$(systemctl list-units --all --no-legend --plain 'millwright-task-*'); test -z "$u" && break; sleep 0.1; done
test -z "$u$(systemctl --failed --no-legend --plain)" || { systemctl --failed; echo "left: $u" >&2; exit 1; }`)
	return outcome + ": " + strings.Join(types(events), " ")
}

func word(task *taskv1.Task) string {
	return strings.TrimSpace(strings.ToLower(strings.TrimPrefix(task.GetState().String(), "TASK_STATE_")) + " " + task.GetReason())
}

func types(events []*taskv1.TaskEvent) []string {
	var out []string
	for _, e := range events {
		out = append(out, e.GetType())
	}
	return out
}

// checkHistory holds a whole history against its one right form.
func checkHistory(t testing.TB, events []*taskv1.TaskEvent, tail []string, want expectation) {
	t.Helper()
	told := strings.Join(types(events), " ")
	form := regexp.MustCompile(`^CREATED ASSIGNED( REQUEUED ASSIGNED)* ACCEPTED PLANNED STARTED( STEP_ENDED| RESUMED)* ` +
		strings.Join(tail, "( RESUMED)* ") + `$`)
	if !form.MatchString(told) {
		t.Errorf("history is\n%s, which is not of the form\n%s", told, form)
	}
	counted(t, events, "REQUEUED", want.requeued)
	counted(t, events, "RESUMED", want.resumed)
	ends := 0
	for i, e := range events {
		if e.GetLate() {
			t.Errorf("%s came after the end", e.GetType())
		}
		if cluster.Terminal(e.GetState()) {
			ends++
		}
		if i > 0 && e.GetIndex() <= events[i-1].GetIndex() {
			t.Errorf("%s has the index %d after %d", e.GetType(), e.GetIndex(), events[i-1].GetIndex())
		}
		if r := e.GetNodeEvent().GetResumed(); r != nil && (r.GetRebooted() != want.rebooted || want.found != anyFinding && r.GetFound() != want.found) {
			t.Errorf("resumed with %q, rebooted %t; want %q, %t", r.GetFound(), r.GetRebooted(), want.found, want.rebooted)
		}
	}
	if ends != 1 || !cluster.Terminal(events[len(events)-1].GetState()) {
		t.Errorf("%d events end the task, want one, the last", ends)
	}
}

func counted(t testing.TB, events []*taskv1.TaskEvent, kind string, want int) {
	t.Helper()
	n := 0
	for _, e := range events {
		if e.GetType() == kind {
			n++
		}
	}
	if want == either && n > 1 || want != either && n != want {
		t.Errorf("%s stands %d times in the history, want %d", kind, n, want)
	}
}

// checkJournal compares the node's journal with what the server tells, once the
// node knows that the server has it all.
func checkJournal(t testing.TB, c *clustertest.Cluster, task *taskv1.Task, events []*taskv1.TaskEvent) {
	t.Helper()
	got := journal(t, c, task)
	var want, mine []any
	record := got.GetRecord()
	mine = append(mine, record.GetState(), record.GetReason(), record.GetMessage(), record.GetUndo(), record.GetAssertedBy(), got.GetKind())
	want = append(want, task.GetState(), task.GetReason(), task.GetMessage(), task.GetUndo(), task.GetAssertedBy(), task.GetKind())
	for _, s := range got.GetSteps() {
		mine = append(mine, s.GetOutcome())
	}
	for _, s := range task.GetSteps() {
		want = append(want, s)
	}
	if diff := cmp.Diff(want, mine, protocmp.Transform()); diff != "" {
		t.Errorf("the node's journal (+) does not say what the server does (-):\n%s", diff)
	}
	var seq uint64
	var told uint32
	for _, e := range events {
		ev := e.GetNodeEvent()
		if ev == nil {
			continue
		}
		told++
		if ev.GetSeq() <= seq || ev.GetJournalId() != task.GetJournalId() {
			t.Errorf("%s is frame %d of journal %s, after frame %d of %s", e.GetType(), ev.GetSeq(), ev.GetJournalId(), seq, task.GetJournalId())
		}
		seq = ev.GetSeq()
	}
	if told != record.GetEvents() {
		t.Errorf("the server has %d events of the node, which made %d", told, record.GetEvents())
	}
}

// journal returns the task as the node has it, once the server's word about its
// last event is there.
func journal(t testing.TB, c *clustertest.Cluster, task *taskv1.Task) *agentv1.JournalTask {
	t.Helper()
	deadline := time.Now().Add(30 * time.Second)
	for {
		res, err := c.Machine(task.GetNode()).Exec(t.Context(), "sh", "-c",
			`for i in $(seq 50); do o=$(millwrightd journal list "$1" -o json) && printf '%s' "$o" | grep -q '"acknowledged": *true' && break; sleep 0.1; done; printf '%s' "$o"`, "sh", task.GetId())
		var list agentv1.ListJournalResponse
		if err == nil {
			err = protojson.Unmarshal(res.Stdout, &list)
		}
		if err == nil && len(list.GetTasks()) == 1 && list.GetTasks()[0].GetRecord().GetAcknowledged() {
			return list.GetTasks()[0]
		}
		if time.Now().After(deadline) {
			t.Fatalf("the node's journal has no acknowledged task %s: %v\n%s", task.GetId(), err, res.Stdout)
		}
	}
}
