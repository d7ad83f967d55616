package fleet

import (
	"context"
	"errors"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	nodev1 "github.com/gpuaas/millwright/proto/millwright/node/v1"
	serverv1 "github.com/gpuaas/millwright/proto/millwright/server/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"

	"github.com/gpuaas/millwright/controlplane/internal/store"
)

const (
	// maxCount is up to where the tasks of a node are counted.
	maxCount = 10_000
	// maxPageBytes bounds the nodes of one page, so that it fits an answer.
	maxPageBytes = 2 << 20
)

// Get returns a node, or an error that wraps [store.ErrNotFound].
func (f *Fleet) Get(ctx context.Context, name string) (*nodev1.Node, error) {
	var out *nodev1.Node
	err := f.cfg.Reader.View(ctx, func(v store.View) error {
		row, err := v.Node(name)
		if err != nil {
			return err
		}
		out, err = f.node(v, row)
		return err
	})
	return out, err
}

// List returns up to limit nodes after a name, by name, fewer where they are
// large, and the name after which the next page begins; empty when there is none. Only nodes in one of
// the states are returned; all when there is none given.
func (f *Fleet) List(ctx context.Context, after string, limit int, states []nodev1.NodeState) (nodes []*nodev1.Node, next string, err error) {
	for size := 0; ; {
		more := false
		err := f.cfg.Reader.View(ctx, func(v store.View) error {
			rows, err := v.Nodes(after, page)
			if err != nil {
				return err
			}
			more = len(rows) == page
			for _, row := range rows {
				if len(nodes) == limit || size >= maxPageBytes {
					next = after
					return nil
				}
				after = row.GetName()
				if len(states) > 0 && !slices.Contains(states, f.state(row)) {
					continue
				}
				n, err := f.node(v, row)
				if err != nil {
					return err
				}
				nodes, size = append(nodes, n), size+proto.Size(n)
			}
			return nil
		})
		if err != nil || next != "" || !more {
			return nodes, next, err
		}
	}
}

func (f *Fleet) state(row *serverv1.NodeRow) nodev1.NodeState {
	_, connected := f.cfg.Sessions.Contact(row.GetName())
	switch {
	case row.GetEvicted():
		return nodev1.NodeState_NODE_STATE_EVICTED
	case connected:
		return nodev1.NodeState_NODE_STATE_CONNECTED
	case row.GetGeneration() == 0:
		return nodev1.NodeState_NODE_STATE_EXPECTED
	}
	return nodev1.NodeState_NODE_STATE_DISCONNECTED
}

func (f *Fleet) node(v store.View, row *serverv1.NodeRow) (*nodev1.Node, error) {
	n := &nodev1.Node{
		Name: row.GetName(), State: f.state(row), Conditions: slices.Concat(f.reported(row), row.GetFound()),
		Facts: row.GetFacts(), AgentVersion: row.GetAgentVersion(), Kinds: row.GetKinds(),
		Generation: row.GetGeneration(), JoinTime: row.GetJoinTime(), BootId: row.GetBootId(),
		JournalId: row.GetJournalId(), SessionEpoch: row.GetSessionEpoch(),
		SvidNotAfter: row.GetSvidNotAfter(), TrustRootVersion: row.GetTrustRootVersion(),
	}
	if err := f.contact(v, n); err != nil {
		return nil, err
	}
	journal, err := v.Journal(n.GetName(), n.GetJournalId())
	if err != nil && !errors.Is(err, store.ErrNotFound) {
		return nil, err
	}
	n.AcknowledgedSeq = journal.GetLastSeq()
	queued, err := v.CountOpen(n.GetName(), store.Queued, maxCount)
	if err != nil {
		return nil, err
	}
	sent, err := v.OpenTasks(n.GetName(), store.Sent, 0, page)
	if err != nil {
		return nil, err
	}
	n.UnfinishedTasks = uint32(queued + len(sent))
	for _, t := range sent {
		if t.GetTask().GetState() == taskv1.TaskState_TASK_STATE_HELD {
			n.HeldTasks++
		}
	}
	return n, nil
}

// gpuReady is the type of the condition by which a node says that its GPUs can be
// given work.
const gpuReady = "GPUReady"

// reported is what a node says of itself. That its GPUs are ready counts for as
// long as it says how they are: it is unknown of a node that is away.
func (f *Fleet) reported(row *serverv1.NodeRow) []*taskv1.Condition {
	list := row.GetReported()
	i := slices.IndexFunc(list, func(c *taskv1.Condition) bool { return c.GetType() == gpuReady })
	if i < 0 || f.cfg.Board == nil {
		return list
	}
	reason, message := f.cfg.Board.Overdue(row.GetName())
	if reason == "" {
		return list
	}
	list = slices.Clone(list)
	list[i] = proto.CloneOf(list[i])
	was := strings.ToLower(strings.TrimPrefix(list[i].GetStatus().String(), "CONDITION_STATUS_"))
	list[i].Status = taskv1.ConditionStatus_CONDITION_STATUS_UNSPECIFIED
	list[i].Reason, list[i].Message = reason, "it was "+was+" when the node last spoke; "+message
	return list
}

// contact fills in when the node was last heard: by its session, or else by
// what was stored of its last one.
func (f *Fleet) contact(v store.View, n *nodev1.Node) error {
	if c, _ := f.cfg.Sessions.Contact(n.GetName()); !c.LastSeen.IsZero() {
		n.LastSeenTime, n.ClockOffset = timestamppb.New(c.LastSeen), durationpb.New(c.ClockOffset)
		return nil
	}
	seen, err := v.Seen(n.GetName())
	if errors.Is(err, store.ErrNotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	n.LastSeenTime = seen.GetTime()
	n.ClockOffset = durationpb.New(time.Duration(seen.GetClockOffsetMs()) * time.Millisecond)
	return nil
}
