package main

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
	"text/tabwriter"
	"time"
)

// report counts what was seen.
type report struct {
	points []point

	mu    sync.Mutex
	rows  map[[2]string]*row // by program and story
	hits  map[string]bool    // points at which a process died or a call failed
	came  map[string]bool    // points that some story came by
	bad   []string           // cases that are not as they must be
	count map[string]int     // by verdict
	cases int
	spent time.Duration
}

// row is a line of the table.
type row struct {
	order                          int
	reached, hit                   map[string]bool
	cases, finished, undone, helds int
	missed                         int // a time that did not come again
}

func newReport(points []point) *report {
	return &report{points: points, rows: map[[2]string]*row{}, hits: map[string]bool{}, came: map[string]bool{}, count: map[string]int{}}
}

// at returns the row of a program in a story. mu must be held.
func (r *report) at(program string, s story) *row {
	key := [2]string{program, s.title()}
	if r.rows[key] == nil {
		r.rows[key] = &row{order: len(r.rows), reached: map[string]bool{}, hit: map[string]bool{}}
	}
	return r.rows[key]
}

// reached notes that a story comes by a point.
func (r *report) reached(s story, p point) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.came[p.Name] = true
	r.at(p.Program, s).reached[p.Name] = true
}

// add notes a case.
func (r *report) add(j job, res *result, hit bool, err error, took time.Duration) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.cases++
	if r.cases%100 == 0 {
		fmt.Printf("%d cases done\n", r.cases)
	}
	r.spent += took
	line := r.at(j.injury.point.Program, j.story)
	line.cases++
	if hit {
		line.hit[j.injury.point.Name], r.hits[j.injury.point.Name] = true, true
	}
	if err != nil {
		sort := "wrong"
		var v *verdict
		if errors.As(err, &v) {
			sort = v.sort
		}
		r.count[sort]++
		r.bad = append(r.bad, fmt.Sprintf("%s, %s: %v", j.story.title(), j.injury, err))
		return
	}
	if !hit {
		line.missed++
		return
	}
	switch {
	case res.task.GetState() == held:
		line.helds++
	case res.task.GetUndo() == complete || res.task.GetUndo() == notNeeded || res.task.GetState() == cancelled:
		line.undone++
	default:
		line.finished++
	}
}

// show prints the table and reports whether all is as it must be.
func (r *report) show(w io.Writer, took time.Duration, o options) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	tw := tabwriter.NewWriter(w, 0, 4, 2, ' ', 0)
	fmt.Fprintln(tw, "\nPROGRAM\tKIND\tPOINTS\tCOME BY\tHIT\tCASES\tFINISHED\tUNDONE\tHELD\tMISSED")
	enumerated := map[string]int{}
	for _, p := range r.points {
		enumerated[p.Program]++
	}
	keys := make([][2]string, 0, len(r.rows))
	for key := range r.rows {
		keys = append(keys, key)
	}
	slices.SortFunc(keys, func(a, b [2]string) int { return cmp.Or(strings.Compare(a[0], b[0]), strings.Compare(a[1], b[1])) })
	for _, key := range keys {
		l := r.rows[key]
		fmt.Fprintf(tw, "%s\t%s\t%d\t%d\t%d\t%d\t%d\t%d\t%d\t%d\n", key[0], key[1], enumerated[key[0]], len(l.reached), len(l.hit), l.cases, l.finished, l.undone, l.helds, l.missed)
	}
	if err := tw.Flush(); err != nil {
		return false
	}
	whole := o.point == "" && o.kind == "" && o.program == ""
	never := r.never()
	fmt.Fprintf(w, "\n%d points enumerated, %d hit; %d cases in %s, %.1f s of a node each\n", len(r.points), len(r.hits), r.cases,
		took.Round(time.Second), r.spent.Seconds()/float64(max(r.cases, 1)))
	fmt.Fprintf(w, "%d duplicated, %d lost, %d wrong\n", r.count["duplicated"], r.count["lost"], r.count["wrong"])
	for _, b := range r.bad {
		fmt.Fprintln(w, "BAD", b)
	}
	after := r.afterAll()
	for _, name := range after {
		fmt.Fprintln(w, "REACHED AFTER ALL, take it off the list of elsewhere.go:", name)
	}
	if whole {
		for _, e := range unreached() {
			fmt.Fprintf(w, "SHOWN ELSEWHERE %s*: %s\n", e.points, e.why)
		}
		for _, name := range never {
			fmt.Fprintln(w, "NEVER REACHED", name)
		}
	}
	return r.cases > 0 && len(r.bad) == 0 && len(after) == 0 && (!whole || len(never) == 0)
}

// afterAll are the points that some story came by although they are listed as
// ones that none can.
func (r *report) afterAll() (out []string) {
	for _, p := range r.points {
		if (r.came[p.Name] || r.hits[p.Name]) && excused(p.Name) != nil {
			out = append(out, p.Name)
		}
	}
	return out
}

// never are the points at which nothing died or failed, and should have.
func (r *report) never() []string {
	var out []string
	for _, p := range r.points {
		if !r.hits[p.Name] && excused(p.Name) == nil {
			out = append(out, fmt.Sprintf("%s (%s): %s", p.Name, p.Program, p.What))
		}
	}
	return out
}
