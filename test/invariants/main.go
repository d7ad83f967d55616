// Command invariants holds the exports of a server and its nodes against what
// Millwright promises: see package check. It exits with 0 when nothing was
// broken, 1 when something was, and 2 when it could not tell.
//
//	go run ./test/invariants -server log.jsonl -node n1=journal.jsonl -effects n1=marks.txt
package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/gpuaas/millwright/test/invariants/check"
)

func main() {
	found, err := run(os.Args[1:], os.Stdout)
	switch {
	case err != nil:
		fmt.Fprintln(os.Stderr, "invariants:", err)
		os.Exit(2)
	case found > 0:
		os.Exit(1)
	}
}

// pairs are flags of the form NAME=FILE, which may be given again.
type pairs map[string]string

// String implements flag.Value.
func (p pairs) String() string { return fmt.Sprint(map[string]string(p)) }

// Set implements flag.Value.
func (p pairs) Set(s string) error {
	name, value, ok := strings.Cut(s, "=")
	if !ok || name == "" || value == "" {
		return errors.New("want NODE=VALUE")
	}
	p[name] = value
	return nil
}

func run(args []string, out io.Writer) (found int, err error) {
	server, nodes, effects, gone := "", pairs{}, pairs{}, pairs{}
	flags := flag.NewFlagSet("invariants", flag.ContinueOnError)
	flags.StringVar(&server, "server", "", "what millwright-server log export wrote")
	flags.Var(nodes, "node", "NODE=FILE: what millwrightd journal export wrote on a node")
	flags.Var(effects, "effects", "NODE=FILE: marks that commands left on a node, one key a line")
	flags.Var(gone, "gone", "NODE=WHY: a node whose journal cannot be had")
	if err := flags.Parse(args); err != nil {
		return 0, err
	}
	h := &check.History{Gone: gone}
	if h.Server, err = read(server, check.ReadServer); err != nil {
		return 0, err
	}
	for name, path := range nodes {
		n, err := read(path, check.ReadNode)
		if err != nil {
			return 0, err
		}
		if n.Name != name {
			return 0, fmt.Errorf("%s is the journal of node %q, not of %q", path, n.Name, name)
		}
		h.Nodes = append(h.Nodes, n)
	}
	for name, path := range effects {
		marks, err := read(path, func(r io.Reader) ([]check.Effect, error) { return check.ReadEffects(name, r) })
		if err != nil {
			return 0, err
		}
		h.Effects = append(h.Effects, marks...)
	}
	violations := check.Check(h)
	for _, v := range violations {
		fmt.Fprintln(out, v)
	}
	fmt.Fprintf(out, "%d log entries, %d tasks, %d nodes: %d violations\n", len(h.Server.Entries), len(h.Server.Tasks), len(h.Nodes), len(violations))
	return len(violations), nil
}

func read[T any](path string, from func(io.Reader) (T, error)) (out T, err error) {
	f, err := os.Open(path)
	if err != nil {
		return out, err
	}
	defer f.Close()
	out, err = from(f)
	if err != nil {
		return out, fmt.Errorf("%s: %w", path, err)
	}
	return out, nil
}
