package ctl

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	healthv1 "github.com/gpuaas/millwright/proto/millwright/health/v1"
)

func (a *app) healthCmd() *cobra.Command {
	return group("health", "See and follow what is wrong with GPUs", a.healthGetCmd(), a.healthHistoryCmd(), a.healthWatchCmd())
}

func (a *app) healthGetCmd() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "get NODE",
		Short: "Show all conditions of a node and its GPUs",
		Args:  exactly("NODE"),
		RunE: a.online(func(ctx context.Context, c *client, args []string) error {
			resp, err := c.health.GetNodeHealth(ctx, &healthv1.GetNodeHealthRequest{Node: args[0]})
			if err != nil {
				return c.explain(ctx, "get the health of node "+args[0], err)
			}
			return a.printHealth(resp.GetHealth())
		}),
	}
	a.outputFlag(cmd)
	return cmd
}

func (a *app) printHealth(h *healthv1.NodeHealth) error {
	if a.format == formatJSON {
		return a.printJSON(h)
	}
	var b strings.Builder
	rows := [][]string{
		{"Node", h.GetNode()},
		{"Known", join(": ", word(h.GetFreshness()), join(", ", h.GetReason(), h.GetMessage()))},
		{"Driver", driverText(h)},
		{"GPUs", fmt.Sprint(h.GetGpus())},
		{"Heard", stamp(h.GetReportTime())},
	}
	must(table(&b, rows))
	if len(h.GetConditions()) > 0 {
		section(&b, "Conditions")
		rows := [][]string{{"CODE", "ABOUT", "STATE", "SEVERITY", "SINCE", "REASON", "MESSAGE"}}
		for _, c := range h.GetConditions() {
			rows = append(rows, []string{c.GetCondition().GetCode(), about(c.GetCondition()), stateText(c), severityText(c.GetCondition().GetSeverity()),
				stamp(c.GetCondition().GetSince()), c.GetCondition().GetReason(), c.GetCondition().GetMessage()})
		}
		must(table(&b, rows))
	}
	return a.write([]byte(b.String()))
}

func driverText(h *healthv1.NodeHealth) string {
	if h.GetDriver() == nil {
		return ""
	}
	return join(": ", join(", ", word(h.GetDriver().GetState()), h.GetDriverVersion()), h.GetDriver().GetMessage())
}

// about is what a condition is about.
func about(c *healthv1.Condition) string {
	switch {
	case c.GetGpuUuid() != "":
		return c.GetGpuUuid()
	case c.GetPciBusId() != "":
		return c.GetPciBusId()
	}
	return "the node"
}

// stateText is the state of a condition, and what it was before it was stale.
func stateText(c *healthv1.NodeCondition) string {
	now := word(c.GetCondition().GetState())
	if c.GetCondition().GetState() != c.GetLastState() {
		return now + ", was " + word(c.GetLastState())
	}
	return now
}

// conditionsText tells of each condition that is not ok what it is, what it
// means and what to do.
func conditionsText(b *strings.Builder, list []*healthv1.NodeCondition) {
	first := true
	for _, n := range list {
		c := n.GetCondition()
		if n.GetLastState() != healthv1.State_STATE_RAISED {
			continue
		}
		if first {
			section(b, "What is wrong")
			first = false
		}
		since := stamp(c.GetSince())
		if c.GetFlapping() {
			since += ", it comes and goes"
		}
		if c.GetCount() > 1 {
			since += fmt.Sprintf(", %d times", c.GetCount())
		}
		for _, line := range []struct{ head, text string }{
			{c.GetCode(), join(": ", word(c.GetSeverity()), c.GetTitle())},
			{"  state", stateText(n)}, {"  about", about(c)}, {"  since", since}, {"  seen", c.GetMessage()},
			{"  means", c.GetMeaning()}, {"  do", actionText(c)},
		} {
			if line.text != "" {
				fmt.Fprintf(b, "  %s: %s\n", printable(line.head), printable(line.text))
			}
		}
	}
}

// actions say in words what an action is.
func actionText(c *healthv1.Condition) string {
	text := map[healthv1.Action]string{
		healthv1.Action_ACTION_RESTART_APP:         "look at the program that ran on the GPU, and start it again",
		healthv1.Action_ACTION_UPDATE_SOFTWARE:     "update the driver, the firmware or the program",
		healthv1.Action_ACTION_RESET_WHEN_IDLE:     "reset the GPU once nothing runs on it; what runs is not hurt",
		healthv1.Action_ACTION_DRAIN_PEERS:         "take the work off the GPU's peers",
		healthv1.Action_ACTION_RESET_GPU:           "take the work off the GPU, then reset it",
		healthv1.Action_ACTION_RECOVER_IMEX_DOMAIN: "recover the IMEX domain of the NVLink fabric",
		healthv1.Action_ACTION_RESET_BUS:           "reset the bus of the GPU",
		healthv1.Action_ACTION_RELOAD_DRIVER:       "load the driver again, or reboot the node",
		healthv1.Action_ACTION_REBOOT:              "reboot the node",
		healthv1.Action_ACTION_POWER_CYCLE:         "switch the whole machine off and on",
		healthv1.Action_ACTION_CHECK_POWER:         "look at the power supply and its plugs",
		healthv1.Action_ACTION_CHECK_COOLING:       "look at the cooling",
		healthv1.Action_ACTION_CHECK_HARDWARE:      "look at how the GPU sits in its slot, and at its links",
		healthv1.Action_ACTION_CONTACT_SUPPORT:     "ask NVIDIA's support, or the maker's",
		healthv1.Action_ACTION_REPLACE:             "have the GPU replaced",
		healthv1.Action_ACTION_HOLD:                "take the node out of use until a person has looked: what was done before did not help",
		healthv1.Action_ACTION_MEND_CONFIGURATION:  "mend the configuration of the agent or the installation of the driver",
	}[c.GetAction()]
	if text != "" && c.GetAttempts() > 0 {
		text += fmt.Sprintf(" (done %d times before, without a lasting effect)", c.GetAttempts())
	}
	return text
}

// gpuNext says what a person can type next about a GPU.
func gpuNext(g *healthv1.GpuHealth) []string {
	node := g.GetNode()
	switch g.GetState() {
	case healthv1.State_STATE_STALE:
		return []string{"see why nothing is heard: millctl node get " + node, "see what was known: millctl health get " + node}
	case healthv1.State_STATE_UNKNOWN:
		return []string{"see what the node can say: millctl health get " + node, "on the node: nvidia-smi; journalctl -u millwrightd"}
	case healthv1.State_STATE_RAISED:
		lines := []string{"see what runs there: millctl task list -n " + node + " --state running"}
		if g.GetAction() == healthv1.Action_ACTION_REBOOT {
			lines = append(lines, "reboot it by a signed task: millctl task run system.reboot -n "+node)
		}
		return append(lines, "see how it came to this: millctl health history "+node, "follow it: millctl health watch -n "+node)
	default:
		return nil
	}
}

func (a *app) healthHistoryCmd() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "history NODE",
		Short: "Show each change of the conditions of a node, the oldest first",
		Args:  exactly("NODE"),
		RunE: a.online(func(ctx context.Context, c *client, args []string) error {
			whole := &healthv1.ListHealthChangesResponse{}
			req := &healthv1.ListHealthChangesRequest{Node: args[0], PageSize: maxPage}
			for {
				page, err := c.health.ListHealthChanges(ctx, req)
				if err != nil {
					return c.explain(ctx, "list the health changes of node "+args[0], err)
				}
				whole.Changes, whole.TrimmedIndex = append(whole.Changes, page.GetChanges()...), page.GetTrimmedIndex()
				if req.PageToken = page.GetNextPageToken(); req.PageToken == "" {
					break
				}
			}
			if a.format == formatJSON {
				return a.printJSON(whole)
			}
			if whole.GetTrimmedIndex() > 0 {
				a.remark("what is older is not in the history any more; the server's log has it: millwright-server log export")
			}
			for _, change := range whole.GetChanges() {
				if err := a.write([]byte(changeLine(change) + "\n")); err != nil {
					return err
				}
			}
			return nil
		}),
	}
	a.outputFlag(cmd)
	return cmd
}

func (a *app) healthWatchCmd() *cobra.Command {
	req := &healthv1.WatchHealthRequest{}
	cmd := &cobra.Command{
		Use:   "watch",
		Short: "Follow the health of GPUs, one line per change",
		Long: `Follow the health of GPUs, one line per change, over lost connections and
restarts of the server, until it is interrupted, which harms nothing.

It begins with what is not ok now. With -o json each line is one
WatchHealthResponse. Its resumeToken, given to --resume, goes on right after it:
no change of a condition is left out and none comes twice.`,
		Args: none(),
		RunE: a.online(func(ctx context.Context, c *client, _ []string) error { return a.watchHealth(ctx, c, req) }),
	}
	cmd.Flags().StringSliceVarP(&req.Nodes, "node", "n", nil, "only these nodes")
	cmd.Flags().StringVar(&req.ResumeToken, "resume", "", "go on after this token, from a line with -o json")
	a.outputFlag(cmd)
	return cmd
}

func (a *app) watchHealth(ctx context.Context, c *client, req *healthv1.WatchHealthRequest) error {
	given := req.GetResumeToken()
	for {
		err := a.persist(ctx, c, "watch the health", func(heard func()) error { return a.watchHealthOnce(ctx, c, req, heard) })
		if !errors.Is(err, errTooOld) {
			return err
		}
		if given != "" && req.GetResumeToken() == given {
			return &failure{code: exitConflict, err: fmt.Errorf("--resume: %w: it is too old, or from before the server was restored; watch without it, which begins with the health as it is now", errTooOld)}
		}
		a.remark("the server can't go on from the last change; what happened in between is in: millctl health history NODE")
		req.ResumeToken = ""
	}
}

func (a *app) watchHealthOnce(ctx context.Context, c *client, req *healthv1.WatchHealthRequest, heard func()) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := c.health.WatchHealth(ctx, req)
	if err != nil {
		return &streamError{err}
	}
	for {
		m, err := stream.Recv()
		if err != nil {
			return &streamError{err}
		}
		heard()
		if m.GetResumeToken() != "" {
			req.ResumeToken = m.GetResumeToken()
		}
		if err := a.printHealthNews(m); err != nil {
			return err
		}
	}
}

func (a *app) printHealthNews(m *healthv1.WatchHealthResponse) error {
	if a.format == formatJSON {
		return a.printJSONLine(m)
	}
	var lines []string
	switch {
	case m.GetChange() != nil:
		lines = append(lines, changeLine(m.GetChange()))
	case m.GetStatus() != nil:
		lines = append(lines, statusLine(m.GetStatus()))
	case m.GetNode() != nil:
		lines = append(lines, statusLine(m.GetNode()))
		for _, c := range m.GetNode().GetConditions() {
			if c.GetLastState() == healthv1.State_STATE_RAISED {
				lines = append(lines, conditionLine(stamp(c.GetCondition().GetSince()), m.GetNode().GetNode(), stateText(c), c.GetCondition()))
			}
		}
	case m.GetSnapshotEnd() != nil:
		a.remark("this is how %d nodes are now; changes follow", m.GetSnapshotEnd().GetNodes())
	}
	for _, line := range lines {
		if err := a.write([]byte(line + "\n")); err != nil {
			return err
		}
	}
	return nil
}

// statusLine tells whether a node is heard.
func statusLine(h *healthv1.NodeHealth) string {
	text := join(": ", word(h.GetFreshness()), join(", ", h.GetReason(), h.GetMessage()))
	if h.GetDriver() != nil {
		text += "; driver " + word(h.GetDriver().GetState())
	}
	return printable(h.GetNode() + "  " + text)
}

// changeLine tells of one change.
func changeLine(m *healthv1.HealthChange) string {
	c := m.GetEdge().GetCondition()
	state := word(c.GetState())
	switch {
	case m.GetEdge().GetForgotten():
		state = "forgotten"
	case m.GetEdge().GetPrevious() == healthv1.State_STATE_RAISED && c.GetState() == healthv1.State_STATE_OK:
		state = "cleared"
	}
	return conditionLine(stamp(m.GetEventTime()), m.GetNode(), state, c)
}

func conditionLine(when, node, state string, c *healthv1.Condition) string {
	line := fmt.Sprintf("%s  %s  %s  %s  %s", when, node, state, c.GetCode(), about(c))
	if c.GetState() == healthv1.State_STATE_RAISED {
		line += "  " + join(": ", word(c.GetSeverity()), c.GetTitle())
	}
	line = join(": ", line, c.GetMessage())
	if text := actionText(c); text != "" && c.GetState() == healthv1.State_STATE_RAISED {
		line += "; do: " + text
	}
	return printable(line)
}
