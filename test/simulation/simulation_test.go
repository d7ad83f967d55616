package simulation

import (
	"bufio"
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
)

var (
	seeds   = flag.Int("seeds", 10_000, "how many schedules to play")
	from    = flag.Uint64("from", 1, "the first seed")
	seed    = flag.Uint64("seed", 0, "play this schedule alone, and show its history with -v")
	workers = flag.Int("workers", runtime.NumCPU(), "how many processes play")
	worker  = flag.Bool("worker", false, "play in this process, and print outcomes; used by the test itself")
)

// shm makes a directory in memory, where a sync costs nothing.
func shm(t *testing.T) string {
	dir, err := os.MkdirTemp("/dev/shm", "millwright-simulation-") //nolint:usetesting // in memory
	if err != nil {
		dir = t.TempDir()
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

// TestSchedules plays many schedules, or the one of -seed. In one process only
// one goroutine runs at a time, so that the seed decides alone.
func TestSchedules(t *testing.T) {
	switch {
	case *seed != 0:
		restore, err := undisturbed()
		defer restore()
		if err != nil {
			t.Logf("it may be another history than before: %v", err)
		}
		out := play(t, newTemplate(t, shm(t)), *seed, func(s string) { t.Log(s) })
		t.Logf("history %s", out.Hash)
		report(t, out)
	case *worker:
		work(t)
	default:
		playAll(t)
	}
}

// work plays its share and prints one outcome a line.
func work(t *testing.T) {
	_, disturbed := undisturbed()
	tp := newTemplate(t, shm(t))
	for i := range *seeds {
		out := play(t, tp, *from+uint64(i), nil)
		out.Disturbed = disturbed != nil
		b, err := json.Marshal(out)
		must(t, err)
		fmt.Printf("%s%s\n", linePrefix, b)
		collect(i)
	}
}

const linePrefix = "outcome: "

func playAll(t *testing.T) {
	begin := time.Now()
	var mu sync.Mutex
	var all []outcome
	var wg sync.WaitGroup
	share := (*seeds + *workers - 1) / *workers
	for i := range *workers {
		n := min(share, *seeds-i*share)
		if n <= 0 {
			break
		}
		wg.Go(func() {
			outs := playShare(t, *from+uint64(i*share), n)
			mu.Lock()
			defer mu.Unlock()
			all = append(all, outs...)
		})
	}
	wg.Wait()
	if len(all) != *seeds {
		t.Errorf("%d schedules were played, want %d", len(all), *seeds)
	}
	faults, states, steps := map[string]int{}, map[string]int{}, 0
	for _, out := range all {
		report(t, out)
		steps += out.Steps
		add(faults, out.Faults)
		add(states, out.States)
	}
	t.Logf("%d schedules, %d steps, %s; faults: %s; tasks: %s", len(all), steps, time.Since(begin).Round(time.Second), figures(faults), figures(states))
	if *seeds < 1000 {
		return
	}
	for _, name := range faultNames() {
		if faults[name] == 0 {
			t.Errorf("no schedule had the fault %q", name)
		}
	}
	for _, state := range []string{"SUCCEEDED", "FAILED", "CANCELLED", "REFUSED", "EXPIRED", "ABANDONED", "HELD"} {
		if states[state] == 0 {
			t.Errorf("no task ended as %s: the schedules do not reach all there is", state)
		}
	}
}

func add(to, from map[string]int) {
	for k, v := range from {
		to[k] += v
	}
}

func figures(m map[string]int) string {
	var out []string
	for _, k := range slices.Sorted(maps.Keys(m)) {
		out = append(out, fmt.Sprintf("%s %d", k, m[k]))
	}
	return strings.Join(out, ", ")
}

func report(t *testing.T, out outcome) {
	t.Helper()
	for _, b := range out.Broken {
		t.Errorf("seed %d: %s", out.Seed, b)
	}
	if len(out.Broken) > 0 {
		t.Errorf("to see it: go test ./test/simulation -run TestSchedules -seed %d -v; it is the same schedule if it says: history %s", out.Seed, out.Hash)
	}
}

// playShare plays n seeds in a process of its own.
func playShare(t *testing.T, first uint64, n int) (out []outcome) {
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run", "^TestSchedules$", "-test.timeout", "0", "-worker",
		"-from", strconv.FormatUint(first, 10), "-seeds", strconv.Itoa(n))
	cmd.Env = append(os.Environ(), "GOMAXPROCS=1", "GODEBUG=asyncpreemptoff=1")
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	err := cmd.Run()
	for lines := bufio.NewScanner(&stdout); lines.Scan(); {
		line, ok := strings.CutPrefix(lines.Text(), linePrefix)
		if !ok {
			if err != nil {
				t.Log(lines.Text())
			}
			continue
		}
		var o outcome
		if err := json.Unmarshal([]byte(line), &o); err != nil {
			t.Errorf("outcome: %v", err)
		}
		out = append(out, o)
	}
	if err != nil {
		t.Errorf("seeds from %d: after seed %d the process ended: %v\n%s", first, first+uint64(len(out))-1, err, stderr.String())
		t.Errorf("to see it: go test ./test/simulation -run TestSchedules -seed %d -v", first+uint64(len(out)))
	}
	return out
}

// TestSameSeedSameHistory plays seeds twice, in processes that begin at another
// seed, and compares all that happened.
func TestSameSeedSameHistory(t *testing.T) {
	if *seed != 0 || *worker {
		t.Skip("schedules were asked for")
	}
	const n, half = 200, 100
	var one, two []outcome
	var wg sync.WaitGroup
	wg.Go(func() { one = playShare(t, 1, n) })
	wg.Go(func() {
		two = playShare(t, 1, half)
		two = append(two, playShare(t, 1+half, n-half)...)
	})
	wg.Wait()
	if len(one) != n || len(two) != n {
		t.Fatalf("%d and %d schedules were played, want %d", len(one), len(two), n)
	}
	hashes, differ := map[string]bool{}, 0
	for i := range one {
		hashes[one[i].Hash] = true
		if one[i].Hash != two[i].Hash {
			t.Logf("seed %d has two histories, of %d and %d steps", one[i].Seed, one[i].Steps, two[i].Steps)
			differ++
		}
	}
	// What is left is the runtime's own dice, for selects with two ready cases and
	// timers of one moment: see README.md.
	most := 1
	if one[0].Disturbed {
		t.Log("the runtime's monitor could not be put to sleep")
		most = n / 20
	}
	if differ > most {
		t.Errorf("%d of %d seeds have two histories, at most %d are allowed", differ, n, most)
	}
	if len(hashes) != n {
		t.Errorf("%d seeds have %d histories: the seed decides too little", n, len(hashes))
	}
}
