package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/testing/protocmp"

	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
)

// ending waits on the node until the injury has struck and the agent is up
// again, the task has ended in its journal and the server is known to have it,
// and no unit of a task is left. It prints what can be seen then.
const ending = `dir=/var/lib/millwright-crash; hit='%[1]s'; id='%[2]s'; want=%[3]d; late=0; o=
up() { test -e $dir/hit-'%[6]s' && set -- 1; want=$((%[3]d + ${1:-0}))
 test $(systemctl show -P NRestarts millwrightd.service) -ge $want && systemctl is-active --quiet millwrightd.service; }
for i in $(seq 200); do
  struck=no; { test -z "$hit" || test -e $dir/hit-$hit; } && struck=yes
  { test $struck = no || up; } && o=$(millwrightd journal list $id -o json 2>/dev/null) || { test -z "$id" && test $struck = yes && break; sleep 0.2; continue; }
  case "$o" in *'"acknowledged": true'*|*'"acknowledged":true'*|*TASK_STATE_HELD*) ;; *) sleep 0.2; continue;; esac
  test $struck = yes && break
  late=$((late+1)); test $late -gt %[4]d && break; sleep 0.5
done
for i in $(seq 200); do u=$(systemctl list-units --all --no-legend --plain 'millwright-task-*'); test -z "$u" && break; sleep 0.1; done
systemctl reset-failed 'broken-*' 2>/dev/null
echo HIT $(test -n "$hit" && test -e $dir/hit-$hit && echo yes); echo LEFT $u $(systemctl --failed --no-legend --plain)
echo JOURNAL $o; echo FACTS $(%[5]s)
`

// lateBy is how long a point may come after the end of the task, in halves of a
// second: heartbeats, and what is stored now and then.
func (t *trial) lateBy() int {
	if t.injury == nil || t.injury.nth > 1 {
		return 2
	}
	if strings.Contains(t.injury.point.Name, "heartbeat") || strings.Contains(t.injury.point.Name, "seen") {
		return 36
	}
	return 8
}

// firstPoint is the point at which the agent is killed before. Where the injury is a
// failure, the task may turn back before it comes there.
func (t *trial) firstPoint() string {
	if t.story.first == "" || strings.HasPrefix(t.story.first, shim+".") {
		return "none"
	}
	return t.story.first
}

func (t *trial) finish(ctx context.Context, tracing bool) (*result, error) {
	hit, kills := "", 0
	if t.injury != nil && !t.onServer() {
		hit = t.injury.point.Name
		if t.injury.point.Program == agent && t.injury.mode == "kill" {
			kills = 1
		}
	}
	if t.story.custom != nil || t.story.boots {
		t.restarts, kills = 0, 0 // another count has begun
	}
	id := t.id
	if t.story.state == refused {
		id = "" // the node keeps nothing of it
		if _, err := t.c.WaitEnd(ctx, t.id, patience); err != nil {
			return nil, errors.Join(errNotEnded, err)
		}
	}
	if t.onServer() {
		t.awaitServer(ctx)
	}
	if tracing {
		pause(ctx, 2500*time.Millisecond) // for a heartbeat
	}
	text, err := t.sh(ctx, fmt.Sprintf(ending, hit, id, t.restarts+kills, t.lateBy(), t.story.facts(t.label), t.firstPoint()))
	if err != nil {
		return nil, err
	}
	out := &result{hit: strings.Contains(text, "HIT yes"), sight: sight{before: t.before}}
	out.after = strings.TrimSpace(line(text, "FACTS"))
	if left := strings.TrimSpace(line(text, "LEFT")); left != "" {
		return out, wrong("units are left: %s", left)
	}
	if id != "" {
		var list agentv1.ListJournalResponse
		if err := protojson.Unmarshal([]byte(line(text, "JOURNAL")), &list); err != nil || len(list.GetTasks()) != 1 {
			return out, lostWork("the node's journal does not have it (%v): %s", err, line(text, "JOURNAL"))
		}
		out.journal = list.GetTasks()[0]
	}
	if tracing {
		out.trace, err = t.traced(ctx)
	}
	return out, err
}

// awaitServer waits a while for a point of the server that comes after the end.
func (t *trial) awaitServer(ctx context.Context) {
	if _, err := t.c.WaitEnd(ctx, t.id, patience); err != nil {
		return // look finds out
	}
	for range t.lateBy() {
		if t.c.Hit(ctx, nil, t.injury.point.Name) {
			return
		}
		pause(ctx, 500*time.Millisecond)
	}
}

func line(text, name string) string {
	for l := range strings.Lines(text) {
		if rest, ok := strings.CutPrefix(l, name+" "); ok {
			return strings.TrimSuffix(rest, "\n")
		}
	}
	return ""
}

// traced reads and ends the traces of the node and of the server.
func (t *trial) traced(ctx context.Context) (map[string]map[string]int, error) {
	text, err := t.sh(ctx, "cat "+crashDir+"/trace; rm -f "+crashDir+"/trace")
	if err != nil {
		return nil, err
	}
	file := filepath.Join(t.c.CrashDir(), "trace")
	b, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	return map[string]map[string]int{"node": tally(text), server: tally(string(b))}, os.Remove(file)
}

func tally(text string) map[string]int {
	out := map[string]int{}
	for _, name := range strings.Fields(text) {
		out[name]++
	}
	return out
}

// look asks the server for the task and its history, and compares them with the
// node's journal.
func (t *trial) look(ctx context.Context, out *result) (err error) {
	if out.task, err = t.c.WaitEnd(ctx, t.id, patience); err != nil {
		return lostWork("it has not ended on the server: %v", err)
	}
	if out.events, err = t.c.History(ctx, t.id); err != nil {
		return err
	}
	if out.journal == nil {
		return nil
	}
	record := out.journal.GetRecord()
	mine := []any{record.GetState(), record.GetReason(), record.GetMessage(), record.GetUndo(), out.journal.GetKind()}
	theirs := []any{out.task.GetState(), out.task.GetReason(), out.task.GetMessage(), out.task.GetUndo(), out.task.GetKind()}
	for _, s := range out.journal.GetSteps() {
		mine = append(mine, s.GetOutcome())
	}
	for _, s := range out.task.GetSteps() {
		theirs = append(theirs, s)
	}
	if diff := cmp.Diff(theirs, mine, protocmp.Transform()); diff != "" {
		return wrong("the node's journal (+) does not say what the server does (-):\n%s", diff)
	}
	if err := chained(out); err != nil {
		return err
	}
	return t.settle(ctx, out)
}

// chained asks that the server has every event that the node made, in order.
func chained(out *result) error {
	var seq uint64
	var told uint32
	for _, e := range out.events {
		ev := e.GetNodeEvent()
		if ev == nil {
			continue
		}
		told++
		if ev.GetSeq() <= seq || ev.GetJournalId() != out.task.GetJournalId() {
			return wrong("%s is frame %d of journal %s, after frame %d", e.GetType(), ev.GetSeq(), ev.GetJournalId(), seq)
		}
		seq = ev.GetSeq()
	}
	if n := out.journal.GetRecord().GetEvents(); told != n {
		return lostWork("the server has %d events of the node, which made %d", told, n)
	}
	return nil
}

// settle gives up what is held, and looks at the task that was settled.
func (t *trial) settle(ctx context.Context, out *result) error {
	if out.task.GetState() == held {
		_, err := t.resolve(ctx, t.id)
		return err
	}
	if t.held == "" {
		return nil
	}
	task, err := t.c.Task(ctx, t.held)
	if err != nil {
		return err
	}
	if task.GetState() != taskv1.TaskState_TASK_STATE_ABANDONED {
		return wrong("the task that was settled is %s", task.GetState())
	}
	return nil
}
