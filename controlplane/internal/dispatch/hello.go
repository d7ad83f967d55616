package dispatch

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
	auditv1 "github.com/gpuaas/millwright/proto/millwright/audit/v1"
	serverv1 "github.com/gpuaas/millwright/proto/millwright/server/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"

	"github.com/gpuaas/millwright/controlplane/internal/crash"
	"github.com/gpuaas/millwright/controlplane/internal/eventlog"
	"github.com/gpuaas/millwright/controlplane/internal/store"
)

const (
	// maxCredits is how many accepted and unfinished tasks a node may have.
	maxCredits = 32
	// keptInstances is how many earlier pairs of instance and boot are
	// remembered of a node.
	keptInstances = 16
	// page is how many tasks are read at a time.
	page = 500
	// maxHello is the size of a Hello, in bytes: it names all tasks that have
	// not ended.
	maxHello = 1 << 20
	// maxSaid is how much is kept of what a node says of itself, in bytes.
	maxSaid = 64 << 10
	// maxWords is how much is kept of the reason of an answer and of its
	// message, in bytes.
	maxWords = 4 << 10
)

// refusedHello is a Hello that is answered by a Goodbye.
type refusedHello struct{ last *agentv1.SessionResponse }

func (r *refusedHello) Error() string { return r.last.GetGoodbye().GetMessage() }

// open commits a session. It returns the last word instead of a Welcome when
// there is to be none.
func (d *Dispatcher) open(ctx context.Context, peer Peer, h *agentv1.Hello) (s *session, welcome, last *agentv1.SessionResponse, err error) {
	if err := checkHello(h); err != nil {
		return nil, nil, nil, err
	}
	if h.GetMinProtocol() > protocol || h.GetMaxProtocol() < protocol {
		return nil, nil, protocolError("this server speaks revision %d of the session protocol, the agent %d to %d; update the older one",
			protocol, h.GetMinProtocol(), h.GetMaxProtocol()), nil
	}
	if h.GetSafeMode() != nil && d.works(peer.Node) {
		return nil, nil, goodbye("NODE_WORKS", worksMessage, worksAgain), nil
	}
	o := &opening{peer: peer, hello: h, actor: d.cfg.Actor}
	crash.Point("server.hello.before")
	err = d.cfg.Log.Commit(ctx, o.decide)
	var refused *refusedHello
	if errors.As(err, &refused) {
		return nil, nil, refused.last, nil
	}
	logger := d.cfg.Logger.With("node", peer.Node, "epoch", o.epoch)
	s = &session{peer: peer, epoch: o.epoch, journalID: h.GetJournalId(), generation: o.generation, lastSeq: h.GetLastSeq(), log: logger}
	if err != nil {
		return nil, nil, nil, unavailable(s, "open the session", err)
	}
	if o.late {
		logger.Info("a host speaks whose place another has taken", "instance_id", h.GetInstanceId(), "boot_id", h.GetBootId())
		return s, nil, superseded(), nil
	}
	if o.duplicate {
		logger.Warn("two hosts use one identity", "instance_id", h.GetInstanceId(), "boot_id", h.GetBootId())
		d.Cut(peer.Node, "DUPLICATE_IDENTITY", duplicateMessage)
		return s, nil, goodbye("DUPLICATE_IDENTITY", duplicateMessage, time.Minute), nil
	}
	if o.wentBack {
		logger.Warn("this log is older than what the node knows: the server was restored, and watches begin anew",
			"acked_seq", h.GetAckedSeq(), "stored_seq", o.stored)
	}
	now := d.cfg.Now()
	s.wake = make(chan struct{}, 1)
	s.safe = h.GetSafeMode() != nil
	s.behind, s.unfinished = h.GetLastSeq() < o.stored, h.GetUnfinished()
	s.credits, s.acked, s.eager = min(h.GetCredits(), maxCredits), o.stored, o.changed
	s.cancels, s.outputs, s.sent = map[string]struct{}{}, map[string]struct{}{}, map[string]string{}
	s.contact, s.heardAt, s.lastSent = Contact{LastSeen: now}, d.cfg.Boot(), d.cfg.Boot()
	if h.GetWallTime() != nil {
		s.contact.ClockOffset, s.offsetAt = h.GetWallTime().AsTime().Sub(now), d.cfg.Boot()
	}
	return s, &agentv1.SessionResponse{Message: &agentv1.SessionResponse_Welcome{Welcome: &agentv1.Welcome{
		Protocol: protocol, SessionEpoch: o.epoch, ResendFrom: o.stored + 1, ServerTime: timestamppb.New(now),
		HeartbeatInterval: durationpb.New(d.cfg.Heartbeat), TrustUpdates: d.cfg.TrustUpdates(h.GetTrustRootVersion()),
		ServerVersion: d.cfg.Version, JournalId: s.journalID,
	}}}, nil, nil
}

func checkHello(h *agentv1.Hello) error {
	needed := []struct{ field, value string }{
		{"boot_id", h.GetBootId()}, {"journal_id", h.GetJournalId()}, {"instance_id", h.GetInstanceId()},
	}
	if h.GetSafeMode() != nil {
		if h.GetJournalId() != "" || h.GetInstanceId() != "" || h.GetLastSeq() != 0 || len(h.GetUnfinished()) > 0 {
			return status.Error(codes.InvalidArgument, "hello: a node in safe mode has no journal, and this Hello speaks of one")
		}
		needed = needed[:1]
	}
	for _, f := range needed {
		if f.value == "" || len(f.value) > 128 || strings.ContainsRune(f.value, 0) {
			return status.Errorf(codes.InvalidArgument, "hello.%s must have 1 to 128 bytes, none of them zero; it has %d", f.field, len(f.value))
		}
	}
	if n := proto.Size(h); n > maxHello {
		return status.Errorf(codes.InvalidArgument, "hello has %d bytes; at most %d are allowed", n, maxHello)
	}
	return checkSaid("hello", &agentv1.Hello{AgentVersion: h.GetAgentVersion(), Kinds: h.GetKinds(), Facts: h.GetFacts(), SafeMode: h.GetSafeMode()})
}

// checkSaid bounds what is kept of what a node says of itself.
func checkSaid(what string, said proto.Message) error {
	if n := proto.Size(said); n > maxSaid {
		return status.Errorf(codes.InvalidArgument, "%s: what the node says of itself has %d bytes; at most %d are kept", what, n, maxSaid)
	}
	return nil
}

const duplicateMessage = "two hosts use the identity of this node in turn, so neither is given work; stop the wrong one, then let the right one join again"

// opening is the decision about a Hello.
type opening struct {
	peer  Peer
	hello *agentv1.Hello
	actor string

	epoch      uint64
	generation uint64
	stored     uint64 // the last frame of the journal that is stored
	duplicate  bool
	late       bool // of a host whose place another has taken, for the first time since
	wentBack   bool // the server has less of the journal than it had acknowledged
	changed    bool // what the node said of itself before was another
}

func (o *opening) decide(tx *eventlog.Tx) error {
	node, err := o.node(tx)
	if err != nil {
		return err
	}
	tx.PutNode(node) // from here on the entries change this row
	if o.hello.GetSafeMode() != nil {
		o.safe(tx, node)
		return nil
	}
	if o.late, o.duplicate = o.instance(tx, node); o.late {
		return nil
	}
	eventlog.ClearConditions(&node.Found, conditionSafeMode)
	node.SessionEpoch++
	o.epoch = node.GetSessionEpoch()
	if o.duplicate {
		return nil
	}
	if node.GetJournalId() != o.hello.GetJournalId() && node.GetJournalId() != "" {
		if err := tx.Append(o.peer.ID, &auditv1.LogEntry{Entry: &auditv1.LogEntry_JournalChanged{JournalChanged: &auditv1.JournalChanged{
			Node: o.peer.Node, OldJournalId: node.GetJournalId(), NewJournalId: o.hello.GetJournalId(), Generation: o.generation,
		}}}); err != nil {
			return err
		}
	}
	o.fill(tx, node)
	if err := o.holdLost(tx); err != nil {
		return err
	}
	journal, err := tx.Journal(o.peer.Node, o.hello.GetJournalId())
	switch {
	case err == nil:
		o.stored = journal.GetLastSeq()
	case !errors.Is(err, store.ErrNotFound):
		return err
	}
	if o.hello.GetAckedSeq() > o.stored {
		// What was acknowledged was stored: this log is an older one, and what was
		// watched of the other may not be in it.
		tx.RaiseGeneration()
		o.wentBack = true
	}
	o.judge(tx, node)
	return nil
}

// node returns the row of the node, if it may open a session.
func (o *opening) node(tx *eventlog.Tx) (*serverv1.NodeRow, error) {
	node, err := tx.Node(o.peer.Node)
	if errors.Is(err, store.ErrNotFound) {
		node, err = &serverv1.NodeRow{Name: o.peer.Node}, nil
	}
	if err != nil {
		return nil, err
	}
	o.generation = o.peer.Generation
	if o.generation == 0 {
		o.generation = o.hello.GetGeneration()
	}
	if last := excluded(node, o.generation); last != nil {
		return nil, &refusedHello{last}
	}
	node.Generation = o.generation
	return node, nil
}

// excluded returns the last word for a host that is no longer the node.
func excluded(node *serverv1.NodeRow, generation uint64) *agentv1.SessionResponse {
	switch {
	case node.GetEvicted():
		return goodbye("EVICTED", "this node was evicted; let it join again with a new token", time.Minute)
	case generation < node.GetGeneration():
		return goodbye("EVICTED", fmt.Sprintf(
			"a host has joined under this name since (enrolment %d, this one has %d)", node.GetGeneration(), generation), time.Minute)
	}
	return nil
}

// outdated returns the last word for a session that was overtaken while it was
// opened: whoever evicts a node, enrols it anew or finds it double cuts the
// session that it finds, which this one was not yet.
func (d *Dispatcher) outdated(ctx context.Context, s *session) (*agentv1.SessionResponse, error) {
	var node *serverv1.NodeRow
	err := d.cfg.Reader.View(ctx, func(v store.View) (err error) {
		node, err = v.Node(s.peer.Node)
		return err
	})
	if err != nil {
		return nil, unavailable(s, "open the session", err)
	}
	if last := excluded(node, s.generation); last != nil {
		return last, nil
	}
	if node.GetSessionEpoch() != s.epoch {
		return superseded(), nil
	}
	return nil, nil
}

// instance remembers which host speaks, and reports whether one came back that
// another had taken the place of: a host that was restarted never does. Its last
// Hello may come late, when the host has said Hello again after a boot. So the
// first one is late, and turned away without a trace but its mark: the host is
// named once more among the earlier ones. Who comes a second time lives.
func (o *opening) instance(tx *eventlog.Tx, node *serverv1.NodeRow) (late, duplicate bool) {
	now := o.hello.GetInstanceId() + "/" + o.hello.GetBootId()
	before := node.GetInstanceId() + "/" + node.GetBootId()
	if i := slices.Index(node.GetEarlierInstances(), now); i >= 0 {
		if !slices.Contains(node.GetEarlierInstances()[i+1:], now) {
			node.EarlierInstances = append(node.EarlierInstances, now)
			return true, false
		}
		eventlog.SetCondition(&node.Found, tx.Now(), &taskv1.Condition{
			Type: "DuplicateIdentity", Status: taskv1.ConditionStatus_CONDITION_STATUS_TRUE,
			Reason: "ALTERNATING", Message: duplicateMessage,
		})
		return false, true
	}
	if node.GetInstanceId() != "" && now != before {
		node.EarlierInstances = append(node.EarlierInstances, before)
		node.EarlierInstances = node.EarlierInstances[max(0, len(node.EarlierInstances)-keptInstances):]
	}
	node.InstanceId, node.BootId = o.hello.GetInstanceId(), o.hello.GetBootId()
	return false, slices.ContainsFunc(node.GetFound(), func(c *taskv1.Condition) bool { return c.GetType() == "DuplicateIdentity" })
}

// fill stores what the node said of itself.
func (o *opening) fill(tx *eventlog.Tx, node *serverv1.NodeRow) {
	node.JournalId = o.hello.GetJournalId()
	o.said(tx, node)
}

func (o *opening) said(tx *eventlog.Tx, node *serverv1.NodeRow) {
	h := o.hello
	o.changed = node.GetAgentVersion() != h.GetAgentVersion() || node.GetTrustRootVersion() != h.GetTrustRootVersion() ||
		!sameConditions(node.GetReported(), h.GetFacts().GetConditions())
	node.AgentVersion = h.GetAgentVersion()
	node.Kinds = h.GetKinds()
	node.TrustRootVersion = h.GetTrustRootVersion()
	node.SvidNotAfter = timestamppb.New(o.peer.NotAfter)
	node.Reported = h.GetFacts().GetConditions()
	node.Facts = h.GetFacts()
	if node.Facts != nil {
		node.Facts.Conditions = nil
	}
	tx.PutSeen(&serverv1.SeenRow{Node: o.peer.Node, Time: timestamppb.New(tx.Now()),
		ClockOffsetMs: h.GetWallTime().AsTime().Sub(tx.Now()).Milliseconds()})
}

// holdLost holds the tasks that were sent to a journal which the node no longer
// has: they may have run.
func (o *opening) holdLost(tx *eventlog.Tx) error {
	for after := uint64(0); ; {
		rows, err := tx.OpenTasks(o.peer.Node, store.Sent, after, page)
		if err != nil {
			return err
		}
		for _, row := range rows {
			after = row.GetTask().GetCreateIndex()
			if o.isHere(row) {
				continue
			}
			if err := tx.Append(o.actor, &auditv1.LogEntry{Entry: &auditv1.LogEntry_TaskDecided{TaskDecided: &auditv1.TaskDecided{
				TaskId: row.GetTask().GetId(), Node: o.peer.Node,
				State: taskv1.TaskState_TASK_STATE_HELD, Reason: eventlog.ReasonJournalLost,
				Message: lostMessage(row.GetTask()),
			}}}); err != nil {
				return err
			}
		}
		if len(rows) < page {
			return nil
		}
	}
}

func (o *opening) isHere(row *serverv1.TaskRow) bool {
	task := row.GetTask()
	lost := task.GetState() == taskv1.TaskState_TASK_STATE_HELD && task.GetReason() == eventlog.ReasonJournalLost
	return lost || task.GetJournalId() == o.hello.GetJournalId() && row.GetGeneration() == o.generation
}

func lostMessage(task *taskv1.Task) string {
	return fmt.Sprintf("the node no longer has the journal %s that this task was sent to, so no one knows whether it ran; "+
		"look at node %s, then settle it: millctl task resolve %s --as abandon; if it is still wanted: millctl task retry %s",
		task.GetJournalId(), task.GetNode(), task.GetId(), task.GetId())
}

// judge tells of a journal that ends before what the server has of it.
func (o *opening) judge(tx *eventlog.Tx, node *serverv1.NodeRow) {
	if o.hello.GetLastSeq() >= o.stored {
		eventlog.ClearConditions(&node.Found, "JournalBehind")
		return
	}
	eventlog.SetCondition(&node.Found, tx.Now(), &taskv1.Condition{
		Type: "JournalBehind", Status: taskv1.ConditionStatus_CONDITION_STATUS_TRUE, Reason: "ROLLED_BACK",
		Message: fmt.Sprintf("journal %s ends at event %d, and %d are stored: the node's state was rolled back; it is given no work until it begins a new journal",
			o.hello.GetJournalId(), o.hello.GetLastSeq(), o.stored),
	})
}
