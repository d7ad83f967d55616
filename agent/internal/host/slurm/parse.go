package slurm

import (
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/gpuaas/millwright/tasks/host"
)

// signature is what scontrol puts behind a reason: who gave it, and when.
var signature = regexp.MustCompile(`^\s*(.*?) \[[^][]*@[^][]*\]$`)

// stamp is how Slurm writes times, by the machine's own clock.
const stamp = "2006-01-02T15:04:05"

// parseNode reads what scontrol shows of one node. Of a key that comes twice the
// first counts, so that words in a reason cannot stand for a state.
func parseNode(out string) (host.SlurmNode, error) {
	k := map[string]string{}
	for line := range strings.Lines(out) {
		parseLine(strings.TrimSpace(line), k)
	}
	n := host.SlurmNode{
		Name: k["NodeName"], Known: true, Reason: k["Reason"], Gres: noNull(k["Gres"]),
		Version: k["Version"], Address: k["NodeAddr"],
		Features: list(k["ActiveFeatures"]), Partitions: list(k["Partitions"]),
	}
	if m := signature.FindStringSubmatch(n.Reason); m != nil {
		n.Reason = m[1]
	}
	n.States = states(k["State"])
	if n.Name == "" || len(n.States) == 0 {
		return host.SlurmNode{}, fmt.Errorf("no name or no state in it")
	}
	if mem := k["RealMemory"]; mem != "" {
		v, err := strconv.ParseUint(mem, 10, 63)
		if err != nil {
			return host.SlurmNode{}, fmt.Errorf("memory %q is no number", mem)
		}
		n.RealMemoryMiB = v
	}
	if t, err := time.ParseInLocation(stamp, k["SlurmdStartTime"], time.Local); err == nil {
		n.SlurmdStart = t
	}
	return n, nil
}

// parseLine reads the KEY=VALUE pairs of a line. Some values have blanks: they
// have the rest of the line to themselves.
func parseLine(line string, k map[string]string) {
	put := func(key, value string) {
		if _, ok := k[key]; !ok && key != "" {
			k[key] = value
		}
	}
	for _, key := range []string{"OS", "Reason", "Comment", "Extra", "ResvComment"} {
		if v, ok := strings.CutPrefix(line, key+"="); ok {
			put(key, v)
			return
		}
	}
	for f := range strings.FieldsSeq(line) {
		if key, value, ok := strings.Cut(f, "="); ok {
			put(key, value)
		}
	}
}

// states splits a state and its flags. A mark behind the state says in one
// letter what newer releases have as a flag.
func states(s string) []string {
	var out []string
	for part := range strings.SplitSeq(s, "+") {
		bare := strings.TrimRight(part, "*~#!%$@^-")
		if bare != "" {
			out = append(out, strings.ToUpper(bare))
		}
		if strings.Contains(part, "*") {
			out = append(out, "NOT_RESPONDING")
		}
	}
	return out
}

func noNull(s string) string {
	if s == "(null)" {
		return ""
	}
	return s
}

func list(s string) []string {
	if s = noNull(s); s == "" {
		return nil
	}
	return strings.Split(s, ",")
}

// jobLine is how a line begins that is of a job of its own.
var jobLine = regexp.MustCompile(`^[0-9][^| ]*\|[^|]*\|[A-Z_]+\|[^|]*\|`)

// parseJobs reads the lines of squeue: the name of a job, which can be anything,
// comes last. It can have several lines: whoever runs a job must not keep the node
// from being asked for its jobs.
func parseJobs(out string) ([]host.SlurmJob, error) {
	var jobs []host.SlurmJob
	for line := range strings.Lines(out) {
		if line = strings.TrimSpace(line); line == "" {
			continue
		}
		if !jobLine.MatchString(line) && len(jobs) > 0 {
			jobs[len(jobs)-1].Name += " " + line
			continue
		}
		f := strings.SplitN(line, "|", 5)
		if len(f) != 5 || f[0] == "" {
			return nil, fmt.Errorf("squeue wrote %q: %w", line, host.ErrSlurm)
		}
		j := host.SlurmJob{ID: f[0], User: f[1], State: f[2], Name: f[4]}
		if t, err := time.ParseInLocation(stamp, f[3], time.Local); err == nil { // a word otherwise
			j.End = t
		}
		jobs = append(jobs, j)
	}
	return jobs, nil
}

// parseConfig reads the lines KEY = VALUE of scontrol show config.
func parseConfig(out string) map[string]string {
	k := map[string]string{}
	for line := range strings.Lines(out) {
		if key, value, ok := strings.Cut(line, "="); ok {
			k[strings.TrimSpace(key)] = strings.TrimSpace(value)
		}
	}
	return k
}

func controllerName(k map[string]string) string {
	name, _, _ := strings.Cut(k["SlurmctldHost[0]"], "(")
	return name
}

// parseMachine reads the line that slurmd -C writes.
func parseMachine(out string, m *host.SlurmMachine) error {
	k := map[string]string{}
	for line := range strings.Lines(out) {
		parseLine(strings.TrimSpace(line), k)
	}
	mem, err := strconv.ParseUint(k["RealMemory"], 10, 63)
	if err != nil || k["NodeName"] == "" {
		return fmt.Errorf("ask slurmd for the machine: it said %q: %w", lastWords(out), host.ErrSlurm)
	}
	m.RealMemoryMiB, m.HostName = mem, k["NodeName"]
	return nil
}
