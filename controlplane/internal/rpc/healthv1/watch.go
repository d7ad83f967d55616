package healthv1

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	healthv1 "github.com/gpuaas/millwright/proto/millwright/health/v1"
	serverv1 "github.com/gpuaas/millwright/proto/millwright/server/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/proto/rpcerr"

	"github.com/gpuaas/millwright/controlplane/internal/eventlog"
	"github.com/gpuaas/millwright/controlplane/internal/store"
)

const (
	watchPage  = 256
	watchBytes = 1 << 20
	// moveEvery is after how many entries that concern someone else a watcher is
	// given a newer token.
	moveEvery = 1000
	// lookEvery is how often a watch looks whether nodes are still heard.
	lookEvery = time.Second
)

// WatchHealth streams the health of nodes as it is, and then each change.
func (s *Service) WatchHealth(req *healthv1.WatchHealthRequest, stream grpc.ServerStreamingServer[healthv1.WatchHealthResponse]) error {
	if err := checkFilter(req.GetNodes(), nil); err != nil {
		return err
	}
	w := &watch{s: s, req: req, stream: stream, told: map[string]string{}}
	if err := w.begin(); err != nil {
		return err
	}
	look := time.NewTicker(lookEvery)
	defer look.Stop()
	for {
		changed := s.cfg.Changed()
		n, err := w.changes()
		if err != nil {
			return err
		}
		if n > 0 {
			continue
		}
		select {
		case <-changed:
		case <-look.C:
			if err := w.look(); err != nil {
				return err
			}
		case <-s.cfg.Stopping:
			return rpcerr.New(codes.Unavailable, "STOPPING", "the server is stopping; go on with the last token")
		case <-stream.Context().Done():
			return stream.Context().Err()
		}
	}
}

// watch is one watcher.
type watch struct {
	s      *Service
	req    *healthv1.WatchHealthRequest
	stream grpc.ServerStreamingServer[healthv1.WatchHealthResponse]
	at     watchToken        // the last entry that was looked at
	moved  uint64            // the index in the last token that was sent
	told   map[string]string // how each node was said to be heard
}

// begin finds where the watch begins, and tells how everything is now: what the
// watcher cannot learn from the changes after its token, and without a token
// all.
func (w *watch) begin() error {
	if token := w.req.GetResumeToken(); token != "" {
		at, err := parseWatchToken(token)
		if err != nil {
			return err
		}
		w.at, w.moved = at, at.index
		// A token that is no good is told before anything else.
		if err := w.s.cfg.Reader.View(w.stream.Context(), at.check); err != nil {
			return err
		}
		return w.each(w.tell, w.status)
	}
	// The place is taken before the conditions are read: a change between the two
	// is in both.
	err := w.s.cfg.Reader.View(w.stream.Context(), func(v store.View) error {
		w.at = watchToken{v.Generation(), v.LastIndex()}
		w.moved = w.at.index
		return nil
	})
	if err != nil {
		return err
	}
	n := uint32(0)
	err = w.each(func(health *healthv1.NodeHealth) error {
		n++
		w.told[health.GetNode()] = heard(health)
		return w.stream.Send(&healthv1.WatchHealthResponse{What: &healthv1.WatchHealthResponse_Node{Node: health}})
	}, w.whole)
	if err != nil {
		return err
	}
	return w.stream.Send(&healthv1.WatchHealthResponse{ResumeToken: w.at.format(),
		What: &healthv1.WatchHealthResponse_SnapshotEnd{SnapshotEnd: &healthv1.SnapshotEnd{Nodes: n}}})
}

// look tells of nodes that are heard again, or no longer. A node that the board
// does not know has not been heard, and stays so.
func (w *watch) look() error {
	for _, node := range w.s.cfg.Board.Known() {
		if w.wants(node) {
			if err := w.tell(w.s.cfg.Board.Status(node)); err != nil {
				return err
			}
		}
	}
	return nil
}

// tell sends how a node is heard, if that is news.
func (w *watch) tell(health *healthv1.NodeHealth) error {
	now := heard(health)
	if w.told[health.GetNode()] == now {
		return nil
	}
	w.told[health.GetNode()] = now
	return w.stream.Send(&healthv1.WatchHealthResponse{ResumeToken: w.at.format(), What: &healthv1.WatchHealthResponse_Status{Status: health}})
}

func (w *watch) status(_ store.View, node string) (*healthv1.NodeHealth, error) {
	return w.s.cfg.Board.Status(node), nil
}

// heard is what makes two statuses differ.
func heard(h *healthv1.NodeHealth) string {
	return fmt.Sprint(h.GetFreshness(), " ", h.GetReason(), " ", h.GetDriver().GetState())
}

// whole is a node with its conditions that are not OK.
func (w *watch) whole(v store.View, node string) (*healthv1.NodeHealth, error) {
	rows, err := v.Health(node, eventlog.MaxConditions)
	if err != nil {
		return nil, err
	}
	health := w.s.cfg.Board.Node(node, rows)
	health.Conditions = slices.DeleteFunc(health.GetConditions(), func(c *healthv1.NodeCondition) bool {
		return c.GetCondition().GetState() == healthv1.State_STATE_OK
	})
	return health, nil
}

// each reads the nodes that are watched, and hands them on outside of the
// store's view, since a watcher may be slow.
func (w *watch) each(tell func(*healthv1.NodeHealth) error, read func(store.View, string) (*healthv1.NodeHealth, error)) error {
	for after, more := "", true; more; {
		var found []*healthv1.NodeHealth
		more = false
		err := w.s.eachNode(w.stream.Context(), after, watchPage, func(v store.View, row *serverv1.NodeRow) (bool, error) {
			after = row.GetName()
			if !member(row) || !w.wants(row.GetName()) {
				return true, nil
			}
			health, err := read(v, row.GetName())
			found = append(found, health)
			return true, err
		}, func() { more = true })
		if err != nil {
			return err
		}
		for _, health := range found {
			if err := tell(health); err != nil {
				return err
			}
		}
	}
	return nil
}

func (w *watch) wants(node string) bool {
	return len(w.req.GetNodes()) == 0 || slices.Contains(w.req.GetNodes(), node)
}

// changes sends the next changes from the log, and returns how many entries it
// looked at.
func (w *watch) changes() (int, error) {
	var entries []store.Entry
	err := w.s.cfg.Reader.View(w.stream.Context(), func(v store.View) (err error) {
		if err := w.at.check(v); err != nil {
			return err
		}
		entries, err = v.Entries(w.at.index+1, watchPage, watchBytes)
		return err
	})
	if errors.Is(err, store.ErrTooOld) {
		return 0, outOfRange("the log no longer reaches back to the token")
	}
	if err != nil {
		return 0, err
	}
	for _, e := range entries {
		w.at.index = e.Index
		if e.Event != nil { // it is of a task
			continue
		}
		change, err := changeOf(e)
		if err != nil {
			return 0, err
		}
		if change == nil || !w.wants(change.GetNode()) {
			continue
		}
		w.moved = e.Index
		if err := w.stream.Send(&healthv1.WatchHealthResponse{ResumeToken: w.at.format(), What: &healthv1.WatchHealthResponse_Change{Change: change}}); err != nil {
			return 0, err
		}
	}
	if w.at.index-w.moved >= moveEvery {
		w.moved = w.at.index
		return len(entries), w.stream.Send(&healthv1.WatchHealthResponse{ResumeToken: w.at.format()})
	}
	return len(entries), nil
}

// changeOf is the change of a condition that an entry holds; nil for none, and
// for one that is not as the format wants it.
func changeOf(e store.Entry) (*healthv1.HealthChange, error) {
	entry, err := e.Decode()
	if err != nil {
		return nil, err
	}
	frame := entry.GetNodeFrame()
	if frame == nil || frame.GetNotApplied() != "" {
		return nil, nil
	}
	event := &taskv1.Event{}
	if err := proto.Unmarshal(frame.GetFrame(), event); err != nil {
		return nil, fmt.Errorf("decode frame of log entry %d: %w", e.Index, err)
	}
	if event.GetHealth() == nil {
		return nil, nil
	}
	return &healthv1.HealthChange{
		Node: frame.GetNode(), Edge: event.GetHealth(), Index: e.Index, EventTime: event.GetWallTime(),
		RecordTime: entry.GetRecordTime(), JournalId: frame.GetJournalId(), Seq: frame.GetSeq(),
	}, nil
}
