// Package journal_lost shows on a real node what becomes of tasks when the
// journal that held them is gone.
package journal_lost

import (
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/protobuf/encoding/protojson"

	"github.com/gpuaas/millwright/pki"
	"github.com/gpuaas/millwright/pki/ca"
	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/test/cluster"
	"github.com/gpuaas/millwright/test/cluster/clustertest"
	"github.com/gpuaas/millwright/test/hostile"
	"github.com/gpuaas/millwright/test/relisten"
)

const (
	stateDB   = "/var/lib/millwright/state.db"
	stateMark = "/var/lib/millwright/state.mark"

	accepted  = taskv1.TaskState_TASK_STATE_ACCEPTED
	waiting   = taskv1.TaskState_TASK_STATE_WAITING
	held      = taskv1.TaskState_TASK_STATE_HELD
	succeeded = taskv1.TaskState_TASK_STATE_SUCCEEDED
)

// quick notes that it ran, and ends.
func quick(name string) string {
	return `argv: [/bin/sh, -c, "echo ` + name + ` >> /root/runs"]`
}

// slow notes that it ran, and ends when it is told to.
func slow(name string) string {
	return `argv: [/bin/sh, -c, "echo ` + name + ` >> /root/runs; until test -e /root/go; do sleep 0.1; done"]`
}

// lost is the node and what it was given before its journal was lost.
type lost struct {
	t *testing.T
	c *clustertest.Cluster

	before                             *agentv1.GetStatusResponse
	finished, running, waiting, queued string
	delivered                          []*taskv1.GetTaskResponse // what the node was sent
}

func TestJournalLost(t *testing.T) {
	l := &lost{t: t, c: clustertest.Up(t, clustertest.Config{Nodes: 1})}
	l.prepare()
	l.c.Sh("n1", "rm "+stateDB+" && systemctl start millwrightd.service")
	t.Run("a new journal", func(t *testing.T) { l.with(t).newJournal("JOURNAL_REASON_MISSING") })
	t.Run("every task is told truly", func(t *testing.T) { l.with(t).fates() })
	t.Run("what was delivered once is refused", func(t *testing.T) { l.with(t).deliverAgain() })
	t.Run("millctl says what to do, and it works", func(t *testing.T) { l.with(t).settle() })
	t.Run("an older copy of the journal", func(t *testing.T) { rolledBack(t, l.c.With(t), stateDB) })
	t.Run("an older copy of all of the state", func(t *testing.T) { rolledBack(t, l.c.With(t), stateDB+" "+stateMark) })
}

func (l *lost) with(t *testing.T) *lost {
	sub := *l
	sub.t, sub.c = t, l.c.With(t)
	return &sub
}

// prepare leaves the node without its agent, with one task of each kind.
func (l *lost) prepare() {
	l.t.Helper()
	l.before = status(l.t, l.c)
	if got := l.c.Do("system.command", "n1", quick("finished")); got.GetState() != succeeded {
		l.t.Fatalf("state %s: %s", got.GetState(), got.GetMessage())
	} else {
		l.finished = got.GetId()
	}
	l.running = l.c.Start("system.command", "n1", slow("running"))
	l.waiting = l.c.Start("system.command", "n1", quick("waiting"), "--not-before", "1h")
	l.c.Await(l.running, taskv1.TaskState_TASK_STATE_RUNNING)
	l.c.Await(l.waiting, accepted, waiting)
	l.c.Sh("n1", "until grep -q running /root/runs; do sleep 0.1; done")
	l.capture()
	l.c.Sh("n1", "systemctl stop millwrightd.service")
	l.queued = l.c.Start("system.command", "n1", quick("queued"))
}

func status(t *testing.T, c *clustertest.Cluster) *agentv1.GetStatusResponse {
	t.Helper()
	if err := c.WaitConnected(t.Context(), "n1"); err != nil {
		t.Fatal(err)
	}
	var s agentv1.GetStatusResponse
	out := c.Sh("n1", "until millwrightd status -o json; do sleep 0.1; done")
	if err := protojson.Unmarshal([]byte(out), &s); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return &s
}

// newJournal checks that the node began anew, and takes nothing that is older.
func (l *lost) newJournal(reason string) {
	now := status(l.t, l.c)
	if now.GetJournalId() == l.before.GetJournalId() {
		l.t.Errorf("the journal is still %s", now.GetJournalId())
	}
	for _, r := range l.delivered {
		if at := r.GetTask().GetAcceptTime().AsTime(); !now.GetFloor().AsTime().After(at) {
			l.t.Errorf("the floor is %s, and a task was accepted at %s", now.GetFloor().AsTime(), at)
		}
	}
	if now.GetUnfinishedTasks() != 0 {
		l.t.Errorf("the new journal has %d unfinished tasks", now.GetUnfinishedTasks())
	}
	if log := l.c.Sh("n1", "journalctl -u millwrightd.service"); !strings.Contains(log, reason) {
		l.t.Errorf("the agent's log does not say %s", reason)
	}
}

func (l *lost) fates() {
	l.t.Helper()
	for _, id := range []string{l.running, l.waiting} {
		task := l.c.Await(id, held)
		if task.GetReason() != "JOURNAL_LOST" || !strings.Contains(task.GetMessage(), "millctl task resolve "+id) {
			l.t.Errorf("task is held with %s %q, want JOURNAL_LOST and the way out", task.GetReason(), task.GetMessage())
		}
		events := l.c.Events(id)
		if last := events[len(events)-1]; last.GetState() != held || last.GetReason() != "JOURNAL_LOST" {
			l.t.Errorf("the last event is %v", last)
		}
	}
	if task := l.c.End(l.finished); task.GetState() != succeeded {
		l.t.Errorf("the task that had ended is %s", task.GetState())
	}
	// It was signed before the floor, so that the node cannot know that it
	// never had it.
	if task := l.c.End(l.queued); task.GetState() != taskv1.TaskState_TASK_STATE_REFUSED || task.GetReason() != "BELOW_FLOOR" {
		l.t.Errorf("the task that was never sent is %s %s", task.GetState(), task.GetReason())
	}
	l.ran("finished", 1, "running", 1, "waiting", 0, "queued", 0)
}

// ran checks how often commands ran: names and numbers in turn.
func (l *lost) ran(want ...any) {
	l.t.Helper()
	checkRuns(l.t, l.c, want...)
}

func checkRuns(t *testing.T, c *clustertest.Cluster, want ...any) {
	t.Helper()
	lines := strings.Fields(c.Sh("n1", "cat /root/runs"))
	for i := 0; i < len(want); i += 2 {
		n := 0
		for _, l := range lines {
			if l == want[i] {
				n++
			}
		}
		if n != want[i+1] {
			t.Errorf("%s ran %d times, want %d", want[i], n, want[i+1])
		}
	}
}

// identity is anyone's, as who has stolen the server's files can make it.
func (l *lost) identity(role pki.Role, name string) *pki.Identity {
	l.t.Helper()
	authority, err := ca.Load(filepath.Join(l.c.ServerDir(), "ca"), ca.Config{TrustDomain: cluster.TrustDomain})
	if err != nil {
		l.t.Fatal(err)
	}
	id, err := pki.NewID(cluster.TrustDomain, role, name)
	if err != nil {
		l.t.Fatal(err)
	}
	key, err := pki.GenerateKey()
	if err != nil {
		l.t.Fatal(err)
	}
	identity, err := authority.Identity(ca.Request{ID: id, TTL: ca.DefaultNodeTTL}, key)
	if err != nil {
		l.t.Fatal(err)
	}
	return identity
}

// capture keeps what the node was sent.
func (l *lost) capture() {
	l.t.Helper()
	source := new(pki.Static)
	source.Set(l.identity(pki.RoleOperator, "alice"))
	conn, err := grpc.NewClient("passthrough:///"+l.c.Address(), grpc.WithTransportCredentials(
		credentials.NewTLS(pki.TLS{Source: source, TrustDomain: cluster.TrustDomain}.Client())))
	if err != nil {
		l.t.Fatal(err)
	}
	defer conn.Close() //nolint:errcheck // the answers are here
	for _, id := range []string{l.finished, l.running, l.waiting} {
		r, err := taskv1.NewTaskServiceClient(conn).GetTask(l.t.Context(), &taskv1.GetTaskRequest{Id: id})
		if err != nil {
			l.t.Fatal(err)
		}
		l.delivered = append(l.delivered, r)
	}
}

// deliverAgain puts a server in the place of the real one that has its keys and
// sends what the node had.
func (l *lost) deliverAgain() {
	if err := l.c.StopServer(l.t.Context()); err != nil {
		l.t.Fatal(err)
	}
	listener := relisten.Listen(l.t, l.c.Address())
	server := hostile.Serve(l.t, listener, l.identity(pki.RoleServer, "stolen"), cluster.TrustDomain, 1000)
	session := server.Next()
	for _, r := range l.delivered {
		a := session.Deliver(r.GetTask().GetId(), r.GetEnvelope(), r.GetSignedLeaf())
		if a.GetRefused().GetReason() != "BELOW_FLOOR" {
			l.t.Errorf("task %s, delivered again: answer %v, want it refused with BELOW_FLOOR", r.GetTask().GetId(), a)
		}
	}
	server.Stop()
	if err := l.c.StartServer(l.t.Context()); err != nil {
		l.t.Fatal(err)
	}
	status(l.t, l.c)
	l.ran("finished", 1, "running", 1, "waiting", 0, "queued", 0)
}

// settle does what millctl says, in its words.
func (l *lost) settle() {
	out, err := l.c.Millctl(l.t.Context(), "task", "retry", l.running)
	if err == nil || out.Code != 6 {
		l.t.Errorf("retry of a held task: exit code %d, want 6: %s", out.Code, out.Stderr)
	}
	out, _ = l.c.Millctl(l.t.Context(), "task", "resolve", l.running, "--as", "accept", "--reason", "a guess", "--wait")
	if out.Code != 3 || !strings.Contains(out.Stderr, "abandon") {
		l.t.Errorf("resolve --as accept: exit code %d and %q, want 3 and the way out", out.Code, out.Stderr)
	}
	l.c.Await(l.running, held)

	l.follow(l.running, "task resolve "+l.running+" --as abandon --reason '...'")
	if task := l.c.Await(l.running, taskv1.TaskState_TASK_STATE_ABANDONED); task.GetUndo() == taskv1.UndoState_UNDO_STATE_COMPLETE {
		l.t.Errorf("undo is %s, and nothing was undone", task.GetUndo())
	}
	l.c.Sh("n1", "touch /root/go")
	again := l.follow(l.running, "task retry "+l.running)
	if task := l.c.End(again); task.GetState() != succeeded || task.GetRetryOf() != l.running {
		l.t.Errorf("the retry is %v, want it succeeded", task)
	}
	again = l.follow(l.queued, "task retry "+l.queued)
	if task := l.c.End(again); task.GetState() != succeeded {
		l.t.Errorf("the retry of what was queued is %v, want it succeeded", task)
	}
	l.follow(l.waiting, "task resolve "+l.waiting+" --as abandon --reason '...'")
	l.c.Await(l.waiting, taskv1.TaskState_TASK_STATE_ABANDONED)
	l.ran("finished", 1, "running", 2, "waiting", 0, "queued", 1)
}

// follow runs the millctl command that `task get` of a task names, and returns
// the word that it prints: the id of the task that it made.
func (l *lost) follow(id, want string) string {
	l.t.Helper()
	out, err := l.c.Millctl(l.t.Context(), "task", "get", id)
	if err != nil {
		l.t.Fatal(err)
	}
	if !strings.Contains(out.Stdout, "millctl "+want) {
		l.t.Fatalf("millctl does not name %q:\n%s", want, out.Stdout)
	}
	words, err := exec.CommandContext(l.t.Context(), "sh", "-c", `printf '%s\n' `+want).Output()
	if err != nil {
		l.t.Fatal(err)
	}
	out, err = l.c.Millctl(l.t.Context(), append(strings.Split(strings.TrimSpace(string(words)), "\n"), "--wait", "-o", "name")...)
	if err != nil {
		l.t.Fatal(err)
	}
	return strings.TrimSpace(out.Stdout)
}

// rolledBack puts an older copy of files back.
func rolledBack(t *testing.T, c *clustertest.Cluster, files string) {
	name := strings.NewReplacer("/", "_", " ", "_").Replace(files)
	l := &lost{t: t, c: c, before: status(t, c)}
	c.Sh("n1", "rm -rf /root/go /root/copy; mkdir /root/copy; systemctl stop millwrightd.service; cp -p "+files+" /root/copy; systemctl start millwrightd.service")
	status(t, c)
	finished := c.Do("system.command", "n1", quick("finished"+name))
	running := c.Start("system.command", "n1", slow("running"+name))
	c.Await(running, taskv1.TaskState_TASK_STATE_RUNNING)
	c.Sh("n1", "until grep -q running"+name+" /root/runs; do sleep 0.1; done")
	c.Sh("n1", "systemctl stop millwrightd.service; cp -p /root/copy/* /var/lib/millwright/; systemctl start millwrightd.service")
	if task := c.Await(running, held); task.GetReason() != "JOURNAL_LOST" {
		t.Errorf("the task that ran is held with %s %q", task.GetReason(), task.GetMessage())
	}
	if now := status(t, c); now.GetJournalId() == l.before.GetJournalId() {
		t.Errorf("the journal is still %s", now.GetJournalId())
	}
	if task := c.End(finished.GetId()); task.GetState() != succeeded {
		t.Errorf("the task that had ended is %s", task.GetState())
	}
	l.follow(running, "task resolve "+running+" --as abandon --reason '...'")
	c.Await(running, taskv1.TaskState_TASK_STATE_ABANDONED)
	if task := c.Do("system.command", "n1", quick("next"+name)); task.GetState() != succeeded {
		t.Errorf("the next task is %s %s", task.GetState(), task.GetMessage())
	}
	checkRuns(t, c, "finished"+name, 1, "running"+name, 1, "next"+name, 1)
	c.Sh("n1", "touch /root/go")
}
