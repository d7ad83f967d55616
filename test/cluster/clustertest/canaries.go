package clustertest

import (
	"context"
	"encoding/base64"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/test/canary"
)

// Put gives a value to the server under a name, as an operator does, and returns
// it as a canary.
func (c *Cluster) Put(name string, value []byte) canary.Canary {
	c.t.Helper()
	if _, err := c.MillctlInput(c.t.Context(), string(value), "secret", "put", name, "-f", "-"); err != nil {
		c.t.Fatal(err)
	}
	return canary.Canary{Name: name, Value: value}
}

// Searched looks for secrets in all of the nodes that has changed since a time,
// in the files, the memory file systems, the arguments and the log of the server,
// and in what it answers and prints about every task. Each must be in the files
// that are meant to hold it, as "NAME in NODE:PATH" says, and nowhere else.
//
// A control goes the same way as a command's argument and output: wherever it is
// not found, the search would have found nothing either.
func (c *Cluster) Searched(since time.Time, nodes []string, secrets []canary.Canary, meant ...string) {
	c.t.Helper()
	control := canary.New("control")
	task := c.Do("system.command", nodes[0], "argv: [/bin/echo, "+string(control.Value)+"]")
	if task.GetState() != taskv1.TaskState_TASK_STATE_SUCCEEDED {
		c.t.Fatalf("the control is %s: %s", task.GetState(), task.GetMessage())
	}
	if err := os.WriteFile(filepath.Join(c.ServerDir(), "control"), control.Value, 0o600); err != nil {
		c.t.Fatal(err)
	}
	answers := c.answers(task.GetId())
	places := append(c.ofServer(), answers...)
	for _, n := range nodes {
		places = append(places, canary.Node(c.Machine(n), since)...)
		places = append(places, canary.Command(c.Machine(n), "journal of tasks", "millwrightd", "journal", "export"))
	}
	found, err := canary.Search(c.t.Context(), places, append(slices.Clone(secrets), control))
	if err != nil {
		c.t.Fatal(err)
	}
	c.controlled(found, nodes[0], answers)
	left := slices.Clone(meant)
	for _, f := range found {
		if f.Canary == control.Name {
			continue
		}
		where := f.Canary + " in " + strings.TrimPrefix(f.Place, "files of ") + ":" + f.Thing
		if i := slices.Index(left, where); i >= 0 {
			left = slices.Delete(left, i, i+1)
			continue
		}
		c.t.Errorf("a secret got out: %s", f)
	}
	for _, m := range left {
		c.t.Errorf("%s: it is not there, so that the search proves nothing", m)
	}
}

// controlled asks that the control was found wherever a command's argument and
// output go.
func (c *Cluster) controlled(found []canary.Finding, node string, answers []canary.Place) {
	c.t.Helper()
	wants := []string{"files of the server", "journal of tasks of " + node, "the log of the server, as exported"}
	for _, a := range answers {
		wants = append(wants, a.Name)
	}
	for _, want := range wants {
		if !slices.ContainsFunc(found, func(f canary.Finding) bool { return f.Canary == "control" && f.Place == want }) {
			c.t.Errorf("%s: the control is not found there, so that the search proves nothing", want)
		}
	}
	for _, want := range []string{"/var/lib/millwright/state.db", "/control", "/store.db"} {
		if !slices.ContainsFunc(found, func(f canary.Finding) bool { return f.Canary == "control" && strings.HasSuffix(f.Thing, want) }) {
			c.t.Errorf("%s: the control is not found there, so that the search proves nothing", want)
		}
	}
}

// ofServer are the places of the server. Its configuration, the operator's own
// directory and its log lie beside its data.
func (c *Cluster) ofServer() []canary.Place {
	pid, err := c.ServerPID()
	if err != nil {
		c.t.Fatal(err)
	}
	return []canary.Place{
		canary.Directory("files of the server", c.ServerDir()),
		canary.Process("process of the server", pid),
		canary.File("log of the server", c.ServerLog()),
		canary.Answer("the log of the server, as exported", c.ExportLog),
	}
}

// answers are what the API and millctl say about all tasks, of which one is the
// control.
func (c *Cluster) answers(control string) []canary.Place {
	ask := func(args ...string) canary.Place {
		return canary.Answer("millctl "+strings.Join(args[:min(2, len(args))], " "), func(ctx context.Context) (string, error) {
			out, err := c.Millctl(ctx, args...)
			return out.Stdout + out.Stderr, err
		})
	}
	each := func(name string, args ...string) canary.Place {
		return canary.Answer(name, func(ctx context.Context) (string, error) {
			list, err := c.Millctl(ctx, "task", "list", "-o", "name")
			if err != nil {
				return "", err
			}
			var all strings.Builder
			for _, id := range append(strings.Fields(list.Stdout), control) {
				out, err := c.Millctl(ctx, append([]string{"task", args[0], strings.TrimPrefix(id, "tasks/")}, args[1:]...)...)
				if err != nil && args[0] != "logs" { // not every task has output
					return "", fmt.Errorf("%s: %w", id, err)
				}
				all.WriteString(decoded(out.Stdout) + out.Stderr)
			}
			return all.String(), nil
		})
	}
	return []canary.Place{
		ask("task", "list", "-o", "json"), each("each task", "get", "-o", "json"), each("each history", "history", "-o", "json"),
		each("each output", "logs"),
	}
}

// decoded adds to a JSON text what its strings hold in base64: specs and plans
// are bytes there, in which a value may begin anywhere.
func decoded(text string) string {
	var all strings.Builder
	all.WriteString(text)
	for _, word := range strings.Split(text, `"`) {
		if b, err := base64.StdEncoding.DecodeString(word); err == nil && len(b) > 0 {
			all.WriteString("\n" + string(b))
		}
	}
	return all.String()
}
