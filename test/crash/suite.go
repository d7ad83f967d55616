package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/gpuaas/millwright/test/cluster"
	"github.com/gpuaas/millwright/test/cluster/clustertest"
	"github.com/gpuaas/millwright/test/testbed"
)

// suite is one run.
type suite struct {
	options
	log    *slog.Logger
	points []point
	report *report

	mu     sync.Mutex
	serial int
	wanted map[string]string // facts after a run without injury, by story; the label is taken out
}

// job is a case.
type job struct {
	story  story
	injury injury
}

func (j job) same(other job) bool {
	return j.injury == other.injury && j.story.title() == other.story.title()
}

const downWithin = time.Minute

func (s *suite) run(ctx context.Context) (err error) {
	s.wanted = map[string]string{}
	var worlds []*world
	defer func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), downWithin)
		defer cancel()
		for _, w := range worlds {
			if w.store != nil {
				w.store()
			}
			if w.bed != nil {
				err = errors.Join(err, w.bed.Down(ctx))
			}
		}
	}()
	worlds = append(worlds, &world{name: "crash-a", nodes: s.nodes, log: s.log})
	for i := range s.servers {
		worlds = append(worlds, &world{name: fmt.Sprintf("crash-s%d", i+1), nodes: 1, log: s.log})
	}
	if err := each(worlds, func(w *world) error { return w.up(ctx) }); err != nil {
		return err
	}
	fmt.Printf("%d nodes and %d servers are up\n", s.nodes+s.servers, len(worlds))
	nodeJobs, serverJobs, err := s.rehearse(ctx, worlds)
	if err != nil {
		return err
	}
	fmt.Printf("%d cases of agent and shim, %d of the server\n", len(nodeJobs), len(serverJobs))
	return s.work(ctx, worlds, nodeJobs, serverJobs)
}

func each[T any](list []T, do func(T) error) error {
	errs := make([]error, len(list))
	var group sync.WaitGroup
	for i, one := range list {
		group.Go(func() { errs[i] = do(one) })
	}
	group.Wait()
	return errors.Join(errs...)
}

// world is a server with its nodes.
type world struct {
	name  string
	nodes int
	log   *slog.Logger
	bed   *testbed.Testbed
	c     *cluster.Cluster
	// store ends the object store; nil before there is one.
	store func()
}

func (w *world) up(ctx context.Context) error {
	root, err := os.Getwd()
	if err != nil {
		return err
	}
	name := fmt.Sprintf("%s-%d", w.name, os.Getpid())
	if w.bed, err = testbed.Up(ctx, testbed.Config{Name: name, Nodes: w.nodes, Owned: true, Log: w.log}); err != nil {
		return err
	}
	if w.store, err = serveStore(ctx, w.bed.Address().String()); err != nil {
		return err
	}
	w.c = cluster.New(w.bed, cluster.Config{Root: root, Agent: cluster.Crash, Server: cluster.Crash, Policy: clustertest.AllowAll, Log: w.log})
	if err := w.c.Found(ctx); err != nil {
		return err
	}
	return each(w.bed.Nodes(), func(n *testbed.Node) error {
		const dropin = "[Service]\nRestartSec=50ms\n"
		if err := n.WriteFile(ctx, "/etc/systemd/system/millwrightd.service.d/soon.conf", []byte(dropin), 0o644); err != nil {
			return err
		}
		return w.c.Join(ctx, n)
	})
}

func (s *suite) trial(w *world, n *testbed.Node, one story, i *injury) *trial {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.serial++
	return &trial{c: w.c, node: n, story: one, injury: i, label: fmt.Sprintf("c%04d", s.serial)}
}

// rehearse tells each story once without an injury. What it came by is what the
// cases are made of.
func (s *suite) rehearse(ctx context.Context, worlds []*world) (onNodes, onServers []job, err error) {
	var mu sync.Mutex
	queue := make(chan story, 100)
	for _, one := range stories() {
		if s.kind == "" || s.kind == one.kind || s.kind == one.title() {
			queue <- one
		}
	}
	close(queue)
	err = each(worlds, func(w *world) error {
		n := w.bed.Nodes()[0]
		for one := range queue {
			t := s.trial(w, n, one, nil)
			res, err := t.run(ctx, true)
			if err == nil {
				err = judge(one, nil, nil, res.sight, res.after)
			}
			if err != nil {
				return fmt.Errorf("%s without a kill: %w", one.title(), err)
			}
			s.mu.Lock()
			s.wanted[one.title()] = strings.ReplaceAll(res.after, t.label, "LABEL")
			s.mu.Unlock()
			a, b := s.cases(one, res.trace)
			mu.Lock()
			onNodes, onServers = append(onNodes, a...), append(onServers, b...)
			mu.Unlock()
		}
		return nil
	})
	if s.kind != "" {
		return onNodes, onServers, err
	}
	all := append(slices.Clone(onNodes), onServers...)
	slices.SortStableFunc(all, func(a, b job) int { return strings.Compare(a.story.title(), b.story.title()) })
	kept := spare(all)
	left := func(j job) bool { return !slices.ContainsFunc(kept, j.same) }
	return slices.DeleteFunc(onNodes, left), slices.DeleteFunc(onServers, left), err
}

// spare leaves out what another case says as well. Of stories of nodes and
// servers, which are slow, those at points that a kind, or another such story,
// comes by. At points that say nothing about the task all but those of one story
// of each kind, and of no slow story where a quick one comes by the point; nor at
// the server's, to which a kind is a name. At the others, all but those of one slow story of each kind that goes on, and of one
// that turns back: each further one is there for what only it comes by.
func spare(jobs []job) (out []job) {
	taken, quick, first := map[string]string{}, map[string]bool{}, map[string]string{}
	toldBy := func(at, title string) string {
		first[at] = cmp.Or(first[at], title)
		return first[at]
	}
	for _, j := range jobs {
		// What comes after a boot may come too late for a case to wait for it.
		if !j.story.own && (!j.story.boots || j.injury.point.Spot != "apart") {
			taken[j.injury.point.Name] = "a kind"
			quick[j.injury.point.Name] = quick[j.injury.point.Name] || !j.story.slow
		}
	}
	for _, j := range jobs {
		name, title := j.injury.point.Name, j.story.title()
		if j.story.own && taken[name] == "" {
			taken[name] = title
		}
		mine := j.story.strikes != "" && strings.HasPrefix(name, j.story.strikes)
		if !j.story.own && j.injury.point.mute() {
			if toldBy(j.story.kind+" "+name, title) != title || j.story.slow && quick[name] {
				continue
			}
		}
		if j.story.slow && quick[name] && j.injury.point.Program == server {
			continue
		}
		if j.story.slow && !j.story.own && !mine && toldBy(fmt.Sprint(j.story.kind, j.story.state, name, j.injury.mode), title) != title {
			continue
		}
		if !j.story.own || taken[name] == title || mine {
			out = append(out, j)
		}
	}
	return out
}

// cases are the injuries of a story: each point that it came by, the first and
// the last time, and of the journal each time; and each change of the host that
// can fail.
func (s *suite) cases(one story, trace map[string]map[string]int) (onNodes, onServers []job) {
	for _, p := range s.points {
		where := "node"
		if p.Program == server {
			where = server
		}
		n := trace[where][p.Name]
		if n == 0 {
			continue
		}
		s.report.reached(one, p)
		if s.point != "" && !strings.HasPrefix(p.Name, s.point) || s.program != "" && s.program != p.Program || p.Name == one.first {
			continue
		}
		var jobs []job
		for _, nth := range times(p, n) {
			jobs = append(jobs, job{one, injury{p, nth, "kill"}})
			if p.Spot == "before" && p.Program == agent || p.Spot == "after" {
				jobs = append(jobs, job{one, injury{p, nth, "fail"}})
			}
		}
		if p.Program == server || one.own {
			onServers = append(onServers, jobs...)
		} else {
			onNodes = append(onNodes, jobs...)
		}
	}
	return onNodes, onServers
}

func times(p point, n int) []int {
	if n == 1 || p.Program == server || p.Spot == "apart" && !strings.HasPrefix(p.Name, "state.commit") {
		return []int{1}
	}
	return []int{1, n}
}

// work does the cases: those of agents and shims on the nodes of the first
// world, those of servers in the others.
func (s *suite) work(ctx context.Context, worlds []*world, onNodes, onServers []job) error {
	// In the order of the stories, so that a node that has come to one never goes
	// back to an earlier one.
	at := map[string]int{}
	for i, one := range stories() {
		at[one.title()] = i
	}
	slices.SortStableFunc(onNodes, func(a, b job) int { return cmp.Compare(at[a.story.title()], at[b.story.title()]) })
	// The slow ones first, so that none is left alone at the end.
	slices.SortStableFunc(onServers, func(a, b job) int { return strings.Compare(a.story.title(), b.story.title()) })
	nodeQueue, serverQueue := fill(onNodes), fill(onServers)
	type place struct {
		w     *world
		n     *testbed.Node
		queue chan job
	}
	var places []place
	for i, w := range worlds {
		for _, n := range w.bed.Nodes() {
			q := serverQueue
			if i == 0 {
				q = nodeQueue
			}
			places = append(places, place{w, n, q})
		}
	}
	return each(places, func(p place) error {
		for j := range p.queue {
			if ctx.Err() != nil {
				return ctx.Err()
			}
			s.one(ctx, p.w, p.n, j)
		}
		return nil
	})
}

func fill(jobs []job) chan job {
	q := make(chan job, len(jobs))
	for _, j := range jobs {
		q <- j
	}
	close(q)
	return q
}

// tries is how often a case is begun whose point does not come by, and firstTries
// where it is the first time that the point comes by: there is none before it.
const (
	tries      = 4
	firstTries = 2
)

// one does a case and reports it. Messages and commits bunch together in another
// way each time, so that the last time at which a point came by may be one that
// does not come again: then it is the one before.
func (s *suite) one(ctx context.Context, w *world, n *testbed.Node, j job) {
	begin := time.Now()
	for try := 1; ; try++ {
		last := try >= tries || try >= firstTries && j.injury.nth == 1
		t := s.trial(w, n, j.story, &j.injury)
		res, err := t.run(ctx, false)
		if ctx.Err() != nil {
			return
		}
		hit := res != nil && res.hit
		if err == nil && hit {
			s.mu.Lock()
			wanted := strings.ReplaceAll(s.wanted[j.story.title()], "LABEL", t.label)
			s.mu.Unlock()
			err = judge(j.story, &j.injury, s.order(), res.sight, wanted)
		}
		if s.verbose || err != nil {
			fmt.Printf("%s %s on %s (%s): hit %t, %v, %s\n", j.story.title(), j.injury, n.Name(), t.id, hit, err, time.Since(begin).Round(10*time.Millisecond))
		}
		if err != nil || hit || last {
			s.report.add(j, res, hit, err, time.Since(begin))
			return
		}
		j.injury.nth = max(1, j.injury.nth-1)
	}
}

func (s *suite) order() map[string]int {
	out := map[string]int{}
	for i, p := range s.points {
		out[p.Name] = i
	}
	return out
}
