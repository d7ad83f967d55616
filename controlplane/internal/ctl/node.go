package ctl

import (
	"context"
	"fmt"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"google.golang.org/protobuf/types/known/timestamppb"

	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
	nodev1 "github.com/gpuaas/millwright/proto/millwright/node/v1"
)

func (a *app) nodeCmd() *cobra.Command {
	return group("node", "Admit nodes and see how they are",
		a.nodeListCmd(), a.nodeGetCmd(), a.nodeEvictCmd(),
		group("token", "Make the tokens by which nodes join", a.tokenCreateCmd()))
}

func (a *app) nodeListCmd() *cobra.Command {
	var states []string
	cmd := &cobra.Command{
		Use:   "list",
		Short: "List all nodes, by name",
		Args:  none(),
		RunE: func(cmd *cobra.Command, args []string) error {
			req := &nodev1.ListNodesRequest{PageSize: maxPage}
			for _, s := range states {
				n, err := enumFlag("state", s, nodev1.NodeState(0).Descriptor())
				if err != nil {
					return err
				}
				req.States = append(req.States, nodev1.NodeState(n))
			}
			return a.online(func(ctx context.Context, c *client, _ []string) error {
				return a.listNodes(ctx, c, req)
			})(cmd, args)
		},
	}
	cmd.Flags().StringSliceVar(&states, "state", nil, "only in these states: expected, connected, disconnected, evicted")
	a.outputFlag(cmd, formatName)
	return cmd
}

func (a *app) listNodes(ctx context.Context, c *client, req *nodev1.ListNodesRequest) error {
	whole := &nodev1.ListNodesResponse{}
	for {
		page, err := c.nodes.ListNodes(ctx, req)
		if err != nil {
			return c.explain(ctx, "list nodes", err)
		}
		whole.Nodes = append(whole.Nodes, page.GetNodes()...)
		if req.PageToken = page.GetNextPageToken(); req.PageToken == "" {
			break
		}
	}
	switch a.format {
	case formatJSON:
		return a.printJSON(whole)
	case formatName:
		for _, n := range whole.GetNodes() {
			if err := a.write([]byte(n.GetName() + "\n")); err != nil {
				return err
			}
		}
		return nil
	}
	rows := [][]string{{"NAME", "STATE", "LAST SEEN", "AGENT", "UNFINISHED", "HELD", "CONDITIONS"}}
	for _, n := range whole.GetNodes() {
		rows = append(rows, []string{
			n.GetName(), word(n.GetState()), stamp(n.GetLastSeenTime()), n.GetAgentVersion(),
			strconv.FormatUint(uint64(n.GetUnfinishedTasks()), 10), strconv.FormatUint(uint64(n.GetHeldTasks()), 10), concerns(n),
		})
	}
	return table(a.out, rows)
}

// concerns names what is true of a node.
func concerns(n *nodev1.Node) string {
	var names []string
	for _, c := range append(n.GetConditions(), n.GetFacts().GetConditions()...) {
		if conditionWord(c.GetStatus()) == "true" {
			names = append(names, c.GetType())
		}
	}
	return strings.Join(names, ", ")
}

func (a *app) nodeGetCmd() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "get NODE",
		Short: "Show one node",
		Args:  exactly("NODE"),
		RunE: a.online(func(ctx context.Context, c *client, args []string) error {
			resp, err := c.nodes.GetNode(ctx, &nodev1.GetNodeRequest{Name: args[0]})
			if err != nil {
				return c.explain(ctx, "get node "+args[0], err)
			}
			return a.printNode(resp.GetNode())
		}),
	}
	a.outputFlag(cmd, formatName)
	return cmd
}

func (a *app) printNode(n *nodev1.Node) error {
	switch a.format {
	case formatJSON:
		return a.printJSON(n)
	case formatName:
		return a.write([]byte(n.GetName() + "\n"))
	}
	var b strings.Builder
	must(table(&b, nodeRows(n)))
	if list := append(n.GetConditions(), n.GetFacts().GetConditions()...); len(list) > 0 {
		section(&b, "Conditions")
		must(table(&b, conditionRows(list)))
	}
	if lines := nodeNext(n); len(lines) > 0 {
		section(&b, "What to do next")
		for _, line := range lines {
			fmt.Fprintf(&b, "  %s\n", line)
		}
	}
	return a.write([]byte(b.String()))
}

func nodeRows(n *nodev1.Node) [][]string {
	f := n.GetFacts()
	offset := ""
	if n.GetClockOffset() != nil {
		offset = n.GetClockOffset().AsDuration().String() + " against the server's"
	}
	rows := [][]string{
		{"Node", n.GetName()},
		{"State", word(n.GetState())},
		{"Last seen", stamp(n.GetLastSeenTime())},
		{"Joined", stamp(n.GetJoinTime())},
		{"Enrolment", strconv.FormatUint(n.GetGeneration(), 10)},
		{"Host name", f.GetHostname()},
		{"Addresses", strings.Join(f.GetAddresses(), ", ")},
		{"System", join(", Linux ", f.GetOs(), f.GetKernel())},
		{"Labels", labelText(f.GetLabels())},
		{"Agent", n.GetAgentVersion()},
		{"Kinds", kindNames(n.GetKinds())},
		{"Boot", n.GetBootId()},
		{"Journal", journalText(n)},
		{"Clock", offset},
		{"Tasks", fmt.Sprintf("%d unfinished, %d held", n.GetUnfinishedTasks(), n.GetHeldTasks())},
		{"Certificate", untilText(n.GetSvidNotAfter())},
		{"Trust root", versionText(n.GetTrustRootVersion())},
	}
	var given [][]string
	for _, r := range rows {
		if r[1] != "" {
			given = append(given, r)
		}
	}
	return given
}

func kindNames(kinds []*agentv1.KindSupport) string {
	var names []string
	for _, k := range kinds {
		names = append(names, k.GetKind())
	}
	return strings.Join(names, ", ")
}

func journalText(n *nodev1.Node) string {
	if n.GetJournalId() == "" {
		return ""
	}
	return fmt.Sprintf("%s, %d events acknowledged", n.GetJournalId(), n.GetAcknowledgedSeq())
}

func versionText(v uint64) string {
	if v == 0 {
		return ""
	}
	return fmt.Sprintf("version %d", v)
}

// nodeNext says what a person can do about a node.
func nodeNext(n *nodev1.Node) []string {
	name := n.GetName()
	switch n.GetState() {
	case nodev1.NodeState_NODE_STATE_EXPECTED:
		return []string{
			"put its join bundle at /etc/millwright/join.json on the host and start millwrightd there",
			"when the bundle is lost or too old: millctl node token create " + name + " --out join.json",
		}
	case nodev1.NodeState_NODE_STATE_DISCONNECTED:
		return []string{
			"on the node: systemctl status millwrightd; journalctl -u millwrightd",
			"when the host was made anew, or its certificate ended more than 30 days ago: millctl node token create " + name + " --rejoin --out join.json",
		}
	case nodev1.NodeState_NODE_STATE_EVICTED:
		return []string{"to admit it again: millctl node token create " + name + " --out join.json"}
	default:
		if n.GetHeldTasks() > 0 {
			return []string{"see what waits for you: millctl task list -n " + name + " --state held"}
		}
		return nil
	}
}

func (a *app) nodeEvictCmd() *cobra.Command {
	var reason string
	var yes bool
	cmd := &cobra.Command{
		Use:   "evict NODE --yes",
		Short: "End a node's membership",
		Long: `End a node's membership: its session is cut, its identity is refused, tasks that
were never sent to it are cancelled, and its other unfinished tasks are
abandoned. What runs on the node goes on there. It can join again with a new
token.`,
		Args: exactly("NODE"),
		RunE: func(cmd *cobra.Command, args []string) error {
			if !yes {
				return usagef("evict node %s: its unfinished tasks would be given up; if that is meant, say so with --yes", args[0])
			}
			return a.online(func(ctx context.Context, c *client, args []string) error {
				resp, err := c.nodes.EvictNode(ctx, &nodev1.EvictNodeRequest{Name: args[0], Reason: reason})
				if err != nil {
					return c.explain(ctx, "evict node "+args[0], err)
				}
				return a.printNode(resp.GetNode())
			})(cmd, args)
		},
	}
	cmd.Flags().StringVar(&reason, "reason", "", "why, for the history")
	cmd.Flags().BoolVar(&yes, "yes", false, "yes, give its unfinished tasks up")
	a.outputFlag(cmd, formatName)
	return cmd
}

func untilText(t *timestamppb.Timestamp) string {
	if t == nil {
		return ""
	}
	return "until " + stamp(t)
}
