package taskv1

import (
	"errors"
	"slices"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"

	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/proto/rpcerr"

	"github.com/gpuaas/millwright/controlplane/internal/store"
)

const (
	watchPage = 256
	// moveEvery is after how many entries that concern someone else a watcher
	// is given a newer token.
	moveEvery = 1000
)

// WatchTasks streams what happens to tasks, in the order of the event log.
func (s *Service) WatchTasks(req *taskv1.WatchTasksRequest, stream grpc.ServerStreamingServer[taskv1.WatchTasksResponse]) error {
	w := &watch{req: req, stream: stream}
	if err := s.begin(stream, w); err != nil {
		return err
	}
	for {
		changed := s.cfg.Log.Changed()
		entries, err := s.read(stream, w)
		if err != nil {
			return err
		}
		if err := w.pass(entries); err != nil {
			return err
		}
		if len(entries) > 0 {
			continue
		}
		select {
		case <-changed:
		case <-s.cfg.Stopping:
			return rpcerr.New(codes.Unavailable, "STOPPING", "the server is stopping; go on with the last token")
		case <-stream.Context().Done():
			return stream.Context().Err()
		}
	}
}

// watch is one watcher.
type watch struct {
	req    *taskv1.WatchTasksRequest
	stream grpc.ServerStreamingServer[taskv1.WatchTasksResponse]
	at     watchToken // the last entry that was looked at
	told   uint64     // the index in the last token that was sent
}

// begin finds where the watch begins. A watcher that begins now is told at once
// from where it can go on.
func (s *Service) begin(stream grpc.ServerStreamingServer[taskv1.WatchTasksResponse], w *watch) error {
	if len(w.req.GetTaskIds()) > maxFilter || len(w.req.GetNodes()) > maxFilter {
		return rpcerr.New(codes.InvalidArgument, "BAD_FILTER", "at most %d task_ids and nodes are allowed; watch all of them", maxFilter)
	}
	if token := w.req.GetResumeToken(); token != "" {
		at, err := parseWatchToken(token)
		w.at, w.told = at, at.index
		return err
	}
	err := s.cfg.Reader.View(stream.Context(), func(v store.View) error {
		w.at = watchToken{v.Generation(), v.LastIndex()}
		return nil
	})
	if err != nil {
		return err
	}
	return w.move()
}

// read returns the next entries; none when there are none yet.
func (s *Service) read(stream grpc.ServerStreamingServer[taskv1.WatchTasksResponse], w *watch) (entries []store.Entry, err error) {
	err = s.cfg.Reader.View(stream.Context(), func(v store.View) error {
		if err := w.at.check(v); err != nil {
			return err
		}
		entries, err = v.Entries(w.at.index+1, watchPage, maxEventBytes)
		return err
	})
	if errors.Is(err, store.ErrTooOld) {
		return nil, outOfRange("the log no longer reaches back to the token")
	}
	return entries, err
}

// pass sends those entries that the watcher asked for.
func (w *watch) pass(entries []store.Entry) error {
	for _, e := range entries {
		w.at.index = e.Index
		if !w.wants(e.Event) {
			continue
		}
		ev, err := eventOf(e)
		if err != nil {
			return err
		}
		w.told = e.Index
		if err := w.stream.Send(&taskv1.WatchTasksResponse{ResumeToken: w.at.format(), Event: ev}); err != nil {
			return err
		}
	}
	if w.at.index-w.told >= moveEvery {
		return w.move()
	}
	return nil
}

func (w *watch) move() error {
	w.told = w.at.index
	return w.stream.Send(&taskv1.WatchTasksResponse{ResumeToken: w.at.format()})
}

func (w *watch) wants(ev *taskv1.TaskEvent) bool {
	return ev != nil &&
		(len(w.req.GetTaskIds()) == 0 || slices.Contains(w.req.GetTaskIds(), ev.GetTaskId())) &&
		(len(w.req.GetNodes()) == 0 || slices.Contains(w.req.GetNodes(), ev.GetNode()))
}
