package powerloss

import (
	"bytes"
	"context"
	"fmt"
	"hash/maphash"
	"math"
	"math/rand/v2"
	"os"
	"strings"
	"sync"

	"golang.org/x/sync/errgroup"
)

// Promise is something that was told, so that no power cut may take it back.
type Promise struct {
	// What says what was promised.
	What string
	// From and Until are the events between which it holds: it was told when
	// the first began, and withdrawn when the other did.
	From, Until int
	// Kept returns an error when an image breaks the promise.
	Kept func(Image, *Verdict) error
}

// Forever is the Until of a promise that is never withdrawn.
const Forever = math.MaxInt

// Replay is one program's run, to be cut at every event.
type Replay struct {
	Events   []Event
	Roots    []Root
	Promises []Promise
	// Judge is the program that says what an image holds, and State the
	// directory that it is given.
	Judge, State string
	// Seed makes a run repeatable.
	Seed uint64
	// Modes are the images after each event; empty: all modes, and Some twice.
	Modes []Mode
	// Enough ends the replay once so many images are bad; 0: at the last event.
	Enough int
	// IgnoreFileSync and IgnoreDirSync are as in [Disk].
	IgnoreFileSync, IgnoreDirSync bool
}

// Report counts what a replay saw.
type Report struct {
	// Changes are the events that changed what may be on the disk, Syncs those
	// that made something durable.
	Changes, Syncs int
	// Images were made; Distinct of them were looked at, since no other was
	// the same under the same promises.
	Images, Distinct int
	// Bad could not be opened, contradicted themselves or broke a promise.
	Bad int
	// First says what was wrong with the first ones.
	First []string
}

// String is the report as one line.
func (r *Report) String() string {
	return fmt.Sprintf("changes=%d syncs=%d images=%d distinct=%d bad=%d", r.Changes, r.Syncs, r.Images, r.Distinct, r.Bad)
}

// job is an image to be judged.
type job struct {
	image    Image
	promises []Promise
	event    int
	mode     Mode
}

// workers judge at the same time.
const workers = 3

// Run cuts the power after every event. Directories for images are made below
// dir, which should be in memory.
func (r *Replay) Run(ctx context.Context, dir string) (*Report, error) {
	if len(r.Modes) == 0 {
		r.Modes = []Mode{Nothing, Everything, Some, Some, Torn, Names, Data}
	}
	report := &Report{}
	var mu sync.Mutex // guards report
	jobs := make(chan job)
	g, ctx := errgroup.WithContext(ctx)
	for range workers {
		g.Go(func() error {
			j, err := startJudge(ctx, r.Judge, dir)
			if err != nil {
				return err
			}
			for work := range jobs {
				wrong, err := r.look(ctx, j, work)
				if err != nil {
					return err
				}
				mu.Lock()
				report.Distinct++
				if wrong != nil {
					report.Bad++
					if len(report.First) < 5 {
						report.First = append(report.First, r.describe(work, wrong))
					}
				}
				mu.Unlock()
			}
			return j.close()
		})
	}
	g.Go(func() error {
		defer close(jobs)
		return r.feed(ctx, report, jobs, func() bool {
			mu.Lock()
			defer mu.Unlock()
			return r.Enough > 0 && report.Bad >= r.Enough
		})
	})
	return report, g.Wait()
}

// feed makes the images.
func (r *Replay) feed(ctx context.Context, report *Report, jobs chan<- job, enough func() bool) error {
	disk := NewDisk(r.Roots...)
	disk.IgnoreFileSync, disk.IgnoreDirSync = r.IgnoreFileSync, r.IgnoreDirSync
	rng := rand.New(rand.NewPCG(r.Seed, 1))
	seed, seen := maphash.MakeSeed(), map[[2]uint64]bool{}
	for i, e := range r.Events {
		if enough() {
			return nil
		}
		changed, err := disk.Apply(e)
		if err != nil {
			return err
		}
		promises := r.at(i)
		if changed && strings.Contains(e.Name, "sync") {
			report.Syncs++
		}
		if changed {
			report.Changes++
		} else if !r.begins(i) {
			continue
		}
		for _, mode := range r.Modes {
			im := disk.Image(mode, rng)
			report.Images++
			key := [2]uint64{im.Sum(seed), promised(promises)}
			if seen[key] {
				continue
			}
			seen[key] = true
			select {
			case jobs <- job{im, promises, i, mode}:
			case <-ctx.Done():
				return ctx.Err()
			}
		}
	}
	return nil
}

// at returns the promises that hold at an event.
func (r *Replay) at(i int) []Promise {
	var out []Promise
	for _, p := range r.Promises {
		if p.From <= i && i < p.Until {
			out = append(out, p)
		}
	}
	return out
}

func (r *Replay) begins(i int) bool {
	for _, p := range r.Promises {
		if p.From == i {
			return true
		}
	}
	return false
}

// promised tells sets of promises apart.
func promised(ps []Promise) uint64 {
	var sum uint64
	for _, p := range ps {
		sum = sum*31 + uint64(p.From) // an index is not negative
	}
	return sum
}

// look judges one image; wrong says what is wrong with it.
func (r *Replay) look(ctx context.Context, j *judge, work job) (wrong, err error) {
	if err := j.empty(); err != nil {
		return nil, err
	}
	if err := work.image.WriteTo(j.dir, r.State); err != nil {
		return nil, err
	}
	v, err := j.ask(ctx)
	if err != nil {
		return nil, err
	}
	if v.Error != "" {
		return fmt.Errorf("it cannot be used: %s", v.Error), nil
	}
	for _, p := range work.promises {
		if err := p.Kept(work.image, v); err != nil {
			return fmt.Errorf("%s: %w", p.What, err), nil
		}
	}
	return nil, nil
}

func (r *Replay) describe(work job, wrong error) string {
	e := r.Events[work.event]
	where := ""
	if len(e.Args) > 0 {
		where = decode(e.Args[0][strings.Index(e.Args[0], "<")+1:])
	}
	return fmt.Sprintf("after event %d (%s %s), mode %d: %v", work.event, e.Name, where, work.mode, wrong)
}

// Point is what programs saw on a disk at one moment.
type Point struct {
	// Event is the event after which they saw it, and Time when it began.
	Event int
	Time  int64
	*Verdict
}

// Timeline says what programs saw after each write to a file.
func (r *Replay) Timeline(ctx context.Context, dir, file string) ([]Point, error) {
	j, err := startJudge(ctx, r.Judge, dir)
	if err != nil {
		return nil, err
	}
	disk, rng := NewDisk(r.Roots...), rand.New(rand.NewPCG(r.Seed, 2))
	var out []Point
	for i, e := range r.Events {
		if _, err := disk.Apply(e); err != nil {
			return nil, err
		}
		if _, p := e.fd(0); e.Name != "pwrite64" || !e.End || p != file {
			continue
		}
		err := j.empty()
		if err == nil {
			err = disk.Image(Everything, rng).WriteTo(j.dir, r.State)
		}
		if err != nil {
			return nil, err
		}
		v, err := j.ask(ctx)
		if err != nil {
			return nil, err
		}
		out = append(out, Point{i, e.Start, v})
	}
	return out, j.close()
}

// LastTold returns the last event before a time at which the program wrote to an
// encrypted connection, or -1. What its peer knew at that time was told by then.
func LastTold(events []Event, before int64) int {
	last := -1
	for i, e := range events {
		if e.End || e.Start >= before || e.Name != "write" || len(e.Args) < 2 {
			continue
		}
		if strings.HasPrefix(e.Args[1], `"\x17\x03\x03`) {
			last = i
		}
	}
	return last
}

// FileKept is a promise about a file, as it was when an event had happened. It
// is withdrawn when the file is removed.
func (r *Replay) FileKept(what, file string, event int) (Promise, error) {
	disk := NewDisk(r.Roots...)
	for _, e := range r.Events[:event+1] {
		if _, err := disk.Apply(e); err != nil {
			return Promise{}, err
		}
	}
	n := disk.find(file)
	if n == nil {
		return Promise{}, fmt.Errorf("%s: %s was not there at event %d", what, file, event)
	}
	want := n.remains(Everything, nil).data
	p := Promise{What: what, From: event, Until: r.removed(file, event), Kept: func(im Image, _ *Verdict) error {
		if have, ok := im[file]; !ok || !bytes.Equal(have, want) {
			return fmt.Errorf("%s is there: %v, with %d bytes of %d", file, ok, len(have), len(want))
		}
		return nil
	}}
	return p, nil
}

func (r *Replay) removed(file string, after int) int {
	for i, e := range r.Events[after+1:] {
		if e.End || !strings.HasPrefix(e.Name, "unlink") {
			continue
		}
		if paths, err := e.paths(); err == nil && paths[0] == file {
			return after + 1 + i
		}
	}
	return Forever
}

// MemoryDir makes a directory in memory, and returns it and what removes it.
func MemoryDir() (dir string, remove func() error, err error) {
	dir, err = os.MkdirTemp("/dev/shm", "powerloss-")
	return dir, func() error { return os.RemoveAll(dir) }, err
}
