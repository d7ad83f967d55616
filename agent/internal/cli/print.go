package cli

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strings"
	"text/tabwriter"
	"time"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
)

func (a *app) printJSON(m proto.Message) error {
	b, err := protojson.Marshal(m)
	if err != nil {
		return fmt.Errorf("format output: %w", err)
	}
	var out bytes.Buffer
	if err := json.Indent(&out, b, "", "  "); err != nil { // protojson's own spaces vary on purpose
		return fmt.Errorf("format output: %w", err)
	}
	return a.say("%s\n", out.Bytes())
}

// table writes rows in columns. A cell is one line of printable text.
func (a *app) table(rows [][]string) error {
	var out bytes.Buffer
	w := tabwriter.NewWriter(&out, 0, 8, 2, ' ', 0)
	for _, row := range rows {
		for i := range row {
			row[i] = clean(row[i])
		}
		fmt.Fprintln(w, strings.TrimRight(strings.Join(row, "\t"), "\t"))
	}
	if err := w.Flush(); err != nil {
		return fmt.Errorf("format output: %w", err)
	}
	return a.say("%s", out.Bytes())
}

// clean takes away what could move the cursor or break the line.
func clean(s string) string {
	return strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f || r >= 0x80 && r < 0xa0 {
			return ' '
		}
		return r
	}, s)
}

func (a *app) printStatus(st *agentv1.GetStatusResponse) error {
	connection := "not connected: " + st.GetConnectionError()
	if st.GetConnected() {
		connection = fmt.Sprintf("connected, epoch %d, its clock is %v ahead", st.GetSessionEpoch(), -st.GetClockOffset().AsDuration())
	}
	rows := [][]string{{"version", st.GetVersion()}, {"session", connection}}
	if m := st.GetSafeMode(); m != nil {
		rows = append(rows, []string{"safe mode", fmt.Sprintf("no task is taken: %s: %s", m.GetReason(), m.GetMessage())})
	}
	if st.GetNode() == "" {
		return a.table(rows) // it has not joined
	}
	rows = append(rows, [][]string{{"node", st.GetNode()}, {"server", st.GetServer()}}...)
	if st.GetSafeMode() == nil {
		rows = append(rows, journalRows(st)...)
	}
	rows = append(rows, [][]string{
		{"identity", "ends " + clock(st.GetSvidNotAfter())},
		{"trust root", fmt.Sprintf("version %d of cluster %s", st.GetTrustRootVersion(), st.GetCluster())},
	}...)
	for _, c := range st.GetConditions() {
		if c.GetStatus() == taskv1.ConditionStatus_CONDITION_STATUS_FALSE {
			continue // nothing is wrong; the JSON lists it
		}
		rows = append(rows, []string{"condition", fmt.Sprintf("%s is %s: %s: %s", c.GetType(), truth(c.GetStatus()), c.GetReason(), c.GetMessage())})
	}
	for _, i := range st.GetIntents() {
		rows = append(rows, []string{"intent", fmt.Sprintf("%s is %s since %s, by task %s", i.GetKey(), enumName(i.GetState().String(), "INTENT_STATE_"), clock(i.GetSince()), i.GetTaskId())})
	}
	for _, l := range st.GetLocks() {
		rows = append(rows, []string{"lock", claim(l)})
	}
	return a.table(rows)
}

func journalRows(st *agentv1.GetStatusResponse) [][]string {
	return [][]string{
		{"journal", fmt.Sprintf("%s, frame %d, %d acknowledged", st.GetJournalId(), st.GetLastSeq(), st.GetAcknowledgedSeq())},
		{"floor", clock(st.GetFloor())},
		{"tasks", fmt.Sprintf("%d unfinished, of them %d held", st.GetUnfinishedTasks(), st.GetHeldTasks())},
	}
}

// claim says who has a lock, or waits for it behind whom.
func claim(l *agentv1.LockClaim) string {
	names, whose := strings.Join(l.GetNames(), ", "), fmt.Sprintf("task %s (%s)", l.GetTaskId(), l.GetKind())
	switch {
	case !l.GetGranted():
		return fmt.Sprintf("%s: %s waits since %s behind %s", names, whose, clock(l.GetSince()), strings.Join(l.GetBehind(), ", "))
	case l.GetHeld():
		return fmt.Sprintf("%s: %s has it since %s, and is held for a person", names, whose, clock(l.GetSince()))
	}
	return fmt.Sprintf("%s: %s has it since %s", names, whose, clock(l.GetSince()))
}

func (a *app) printTasks(j *agentv1.ListJournalResponse) error {
	rows := [][]string{{"TASK", "KIND", "STATE", "REASON", "ACCEPTED", "ENDED"}}
	for _, t := range j.GetTasks() {
		r := t.GetRecord()
		rows = append(rows, []string{r.GetTaskId(), t.GetKind(), stateName(r.GetState()), r.GetReason(), clock(r.GetAcceptTime()), clock(r.GetEndTime())})
	}
	return a.table(rows)
}

func (a *app) printTask(j *agentv1.ListJournalResponse) error {
	for _, t := range j.GetTasks() {
		r := t.GetRecord()
		rows := [][]string{
			{"task", r.GetTaskId()}, {"kind", t.GetKind()}, {"state", stateName(r.GetState())},
			{"reason", r.GetReason()}, {"message", r.GetMessage()}, {"undo", enumName(r.GetUndo().String(), "UNDO_STATE_")},
			{"accepted", clock(r.GetAcceptTime())}, {"started", clock(r.GetStartTime())}, {"ended", clock(r.GetEndTime())},
			{"boot", r.GetBootId()}, {"events", fmt.Sprint(r.GetEvents())},
		}
		if err := a.table(rows); err != nil {
			return err
		}
		steps := [][]string{{"STEP", "TITLE", "PHASE", "ATTEMPTS", "ERROR"}}
		for i, s := range t.GetSteps() {
			o := s.GetOutcome()
			steps = append(steps, []string{
				fmt.Sprint(i), s.GetPlanned().GetTitle(), enumName(o.GetPhase().String(), "STEP_PHASE_"), fmt.Sprint(o.GetAttempts()), o.GetError(),
			})
		}
		if len(steps) > 1 {
			if err := a.say("\n"); err != nil {
				return err
			}
			if err := a.table(steps); err != nil {
				return err
			}
		}
	}
	return nil
}

func clock(t *timestamppb.Timestamp) string {
	if t == nil || t.CheckValid() != nil {
		return "-"
	}
	return t.AsTime().UTC().Format(time.RFC3339)
}

func stateName(s taskv1.TaskState) string { return enumName(s.String(), "TASK_STATE_") }

// enumName is the name of a number without its prefix, in lower case.
func enumName(name, prefix string) string {
	name = strings.ToLower(strings.TrimPrefix(name, prefix))
	if name == "unspecified" {
		return "-"
	}
	return name
}

func truth(s taskv1.ConditionStatus) string {
	switch s {
	case taskv1.ConditionStatus_CONDITION_STATUS_TRUE:
		return "true"
	case taskv1.ConditionStatus_CONDITION_STATUS_FALSE:
		return "false"
	case taskv1.ConditionStatus_CONDITION_STATUS_UNSPECIFIED:
	}
	return "unknown"
}
