package ctl

import (
	"context"
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/types/known/anypb"

	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
)

func (a *app) taskGetCmd() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "get ID",
		Short: "Show one task: what it is, how it went, why, and what to do next",
		Long: `Show one task: what it is, how it went, why, and what to do next.

ID may be a prefix that fits no other task. -o json prints the Task; its history
is printed by: millctl task history ID -o json`,
		Args: exactly("ID"),
		RunE: a.online(func(ctx context.Context, c *client, args []string) error {
			resp, err := c.getTask(ctx, args[0])
			if err != nil {
				return err
			}
			t := resp.GetTask()
			switch a.format {
			case formatJSON:
				return a.printJSON(t)
			case formatName:
				return a.write([]byte(t.GetId() + "\n"))
			}
			events, err := c.history(ctx, t.GetId())
			if err != nil {
				return err
			}
			return a.write([]byte(taskText(t, events)))
		}),
	}
	a.outputFlag(cmd, formatName)
	return cmd
}

func (a *app) taskHistoryCmd() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "history ID",
		Short: "Show all that happened to one task, the oldest first",
		Args:  exactly("ID"),
		RunE: a.online(func(ctx context.Context, c *client, args []string) error {
			id, err := c.wholeID(ctx, args[0])
			if err != nil {
				return err
			}
			events, err := c.history(ctx, id)
			if err != nil {
				return err
			}
			if a.format == formatJSON {
				return a.printJSON(&taskv1.ListTaskEventsResponse{Events: events})
			}
			return table(a.out, historyRows(events))
		}),
	}
	a.outputFlag(cmd)
	return cmd
}

// history returns all events of a task.
func (c *client) history(ctx context.Context, id string) ([]*taskv1.TaskEvent, error) {
	var events []*taskv1.TaskEvent
	req := &taskv1.ListTaskEventsRequest{Id: id, PageSize: maxPage}
	for {
		page, err := c.tasks.ListTaskEvents(ctx, req)
		if err != nil {
			return nil, c.explain(ctx, "list events of task "+id, err)
		}
		events = append(events, page.GetEvents()...)
		if req.PageToken = page.GetNextPageToken(); req.PageToken == "" {
			return events, nil
		}
	}
}

func historyRows(events []*taskv1.TaskEvent) [][]string {
	rows := [][]string{{"TIME", "EVENT", "STATE", "BY", "REASON", "MESSAGE"}}
	for _, e := range events {
		at := e.GetEventTime()
		if at == nil {
			at = e.GetRecordTime()
		}
		state := word(e.GetState())
		if e.GetLate() {
			state += " (late)"
		}
		rows = append(rows, []string{stamp(at), e.GetType(), state, e.GetActor(), e.GetReason(), e.GetMessage()})
	}
	return rows
}

// taskText is a task on one screen.
func taskText(t *taskv1.Task, events []*taskv1.TaskEvent) string {
	var b strings.Builder
	must(table(&b, headRows(t)))
	typed(&b, "Spec", t.GetSpec())
	if t.GetMode() == taskv1.Mode_MODE_PLAN {
		section(&b, "Plan")
		b.WriteString(planText(t))
	} else {
		typed(&b, "Result", t.GetResult())
	}
	if len(t.GetConditions()) > 0 {
		section(&b, "Conditions")
		must(table(&b, conditionRows(t.GetConditions())))
	}
	if rows := stepRows(t); len(rows) > 1 {
		section(&b, "Steps")
		must(table(&b, rows))
		stepErrors(&b, t)
	}
	if len(t.GetOutputs()) > 0 {
		section(&b, "Output")
		must(table(&b, outputRows(t.GetOutputs())))
	}
	section(&b, "History")
	must(table(&b, historyRows(events)))
	if lines := next(t); len(lines) > 0 {
		section(&b, "What to do next")
		for _, line := range lines {
			fmt.Fprintf(&b, "  %s\n", line)
		}
	}
	return b.String()
}

// must panics on an error of writing to memory, which has none.
func must(err error) {
	if err != nil {
		panic(err)
	}
}

func section(w io.Writer, title string) {
	fmt.Fprintf(w, "\n%s\n", title)
}

// headRows are the task's facts, without those that are not there.
func headRows(t *taskv1.Task) [][]string {
	mode := ""
	if t.GetMode() == taskv1.Mode_MODE_PLAN {
		mode = ", plan only"
	}
	state := word(t.GetState())
	if t.GetCancelRequested() && !terminal(t.GetState()) {
		state += ", and is asked to stop"
	}
	rows := [][]string{
		{"Task", t.GetId()},
		{"Node", t.GetNode()},
		{"Kind", fmt.Sprintf("%s, revision %d%s", t.GetKind(), t.GetRevision(), mode)},
		{"State", state},
		{"Why", strings.TrimPrefix(because(t), ": ")},
		{"Undo", undoText(t)},
		{"Settled by", t.GetAssertedBy()},
		{"Asked for", t.GetRequestReason()},
		{"Created", join(" by ", stamp(t.GetCreateTime()), t.GetCreatedBy())},
		{"Signed", join(" by ", stamp(t.GetIssuedAt()), signers(t))},
		{"May start", join(" until ", stamp(t.GetNotBefore()), stamp(t.GetNotAfter()))},
		{"Accepted", stamp(t.GetAcceptTime())},
		{"Started", stamp(t.GetStartTime())},
		{"Ended", join(" after ", stamp(t.GetEndTime()), took(t.GetStartTime(), t.GetEndTime()))},
		{"Retry of", t.GetRetryOf()},
		{"Project", t.GetProject()},
		{"Labels", labelText(t.GetLabels())},
		{"On behalf of", t.GetCause().GetResource()},
	}
	var given [][]string
	for _, r := range rows {
		if r[1] != "" {
			given = append(given, r)
		}
	}
	return given
}

// join joins the parts that are there.
func join(sep string, parts ...string) string {
	var given []string
	for _, p := range parts {
		if p != "" {
			given = append(given, p)
		}
	}
	return strings.Join(given, sep)
}

func undoText(t *taskv1.Task) string {
	switch t.GetUndo() {
	case taskv1.UndoState_UNDO_STATE_NOT_NEEDED:
		return "not needed: nothing was changed"
	case taskv1.UndoState_UNDO_STATE_COMPLETE:
		return "complete: the node is as it was"
	case taskv1.UndoState_UNDO_STATE_NOT_POSSIBLE:
		return "not possible: at least one step stands"
	default:
		return ""
	}
}

func signers(t *taskv1.Task) string {
	var names []string
	for _, s := range t.GetAuthorizedBy() {
		names = append(names, fmt.Sprintf("%s (%s, key %s)", s.GetName(), word(s.GetRole()), s.GetKeyId()))
	}
	return strings.Join(names, ", ")
}

func labelText(labels []*taskv1.Label) string {
	var pairs []string
	for _, l := range labels {
		pairs = append(pairs, l.GetKey()+"="+l.GetValue())
	}
	return strings.Join(pairs, ", ")
}

// typed writes a spec or result for people.
func typed(b *strings.Builder, title string, a *anypb.Any) {
	if a == nil {
		return
	}
	section(b, title)
	m, err := a.UnmarshalNew()
	if err != nil {
		fmt.Fprintf(b, "  of type %s, which this millctl does not know\n", a.GetTypeUrl())
		return
	}
	text, err := asYAML(m)
	if err != nil {
		fmt.Fprintf(b, "  %v\n", err)
		return
	}
	for line := range strings.Lines(text + "\n") {
		fmt.Fprintf(b, "  %s\n", printable(strings.TrimSuffix(line, "\n")))
	}
}

func conditionRows(list []*taskv1.Condition) [][]string {
	rows := [][]string{{"CONDITION", "STATUS", "SINCE", "REASON", "MESSAGE"}}
	for _, c := range list {
		rows = append(rows, []string{c.GetType(), conditionWord(c.GetStatus()), stamp(c.GetTransitionTime()), c.GetReason(), c.GetMessage()})
	}
	return rows
}

func conditionWord(s taskv1.ConditionStatus) string {
	if s == taskv1.ConditionStatus_CONDITION_STATUS_UNSPECIFIED {
		return "unknown"
	}
	return word(s)
}

func stepRows(t *taskv1.Task) [][]string {
	rows := [][]string{{"STEP", "PHASE", "TRIES", "STARTED", "TOOK", "WHAT"}}
	for i := range max(len(t.GetSteps()), len(t.GetPlan().GetSteps())) {
		var s *taskv1.StepOutcome
		if i < len(t.GetSteps()) {
			s = t.GetSteps()[i]
		}
		var p *taskv1.PlannedStep
		if i < len(t.GetPlan().GetSteps()) {
			p = t.GetPlan().GetSteps()[i]
		}
		rows = append(rows, []string{
			strconv.Itoa(i), phaseWord(t, s.GetPhase()), strconv.FormatUint(uint64(s.GetAttempts()), 10),
			stamp(s.GetStartTime()), took(s.GetStartTime(), s.GetEndTime()), join(": ", p.GetTitle(), commandText(s.GetCommand())),
		})
	}
	return rows
}

// phaseWord is the phase of a step. The node tells of the steps when the task
// ends or is held by it; until then nobody here knows how far they are.
func phaseWord(t *taskv1.Task, p taskv1.StepPhase) string {
	switch {
	case p != taskv1.StepPhase_STEP_PHASE_UNSPECIFIED:
	case t.GetStartTime() != nil && len(t.GetSteps()) == 0:
		return "not told"
	default:
		return "not begun"
	}
	return strings.ReplaceAll(word(p), "_", " ")
}

func commandText(c *taskv1.CommandOutcome) string {
	switch {
	case c == nil:
		return ""
	case c.GetTimedOut():
		return "stopped after " + c.GetDuration().AsDuration().Round(time.Millisecond).String() + ", its time was over"
	case c.GetOomKilled():
		return "killed by the kernel for want of memory"
	case c.GetSignal() != 0:
		return fmt.Sprintf("ended by signal %d", c.GetSignal())
	}
	return fmt.Sprintf("exit code %d", c.GetExitCode())
}

// stepErrors writes what went wrong in steps.
func stepErrors(w io.Writer, t *taskv1.Task) {
	for i, s := range t.GetSteps() {
		what := printable(s.GetError())
		switch name := fmt.Sprintf("step %d", i); {
		case what == "":
		case strings.HasPrefix(what, name+" "):
			fmt.Fprintf(w, "  %s\n", what)
		default:
			fmt.Fprintf(w, "  %s: %s\n", name, what)
		}
	}
}

func outputRows(outputs []*taskv1.Output) [][]string {
	rows := [][]string{{"STEP", "STREAM", "STATE", "WRITTEN", "HERE"}}
	for _, o := range outputs {
		rows = append(rows, []string{
			strconv.FormatUint(uint64(o.GetStep()), 10), word(o.GetStream()), word(o.GetState()),
			fmt.Sprintf("%d bytes", o.GetSummary().GetTotalBytes()),
			fmt.Sprintf("%d bytes", o.GetReceivedHeadBytes()+o.GetReceivedTailBytes()),
		})
	}
	return rows
}
