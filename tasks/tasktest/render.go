package tasktest

import (
	"fmt"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/tasks"
)

// renderPlan prints a plan for a golden file.
func renderPlan(reg *tasks.Registry, p *taskv1.Plan) (string, error) {
	var b strings.Builder
	for _, d := range p.GetDifferences() {
		fmt.Fprintf(&b, "difference %s: have %q, want %q\n", d.GetSubject(), d.GetHave(), d.GetWant())
	}
	for _, w := range p.GetInTheWay() {
		fmt.Fprintf(&b, "in the way: %s node %s %s reason %q\n", w.GetManager(), w.GetNode(), w.GetState(), w.GetReason())
		for _, j := range w.GetWork() {
			fmt.Fprintf(&b, "    job %s of %s: %s", j.GetId(), j.GetOwner(), j.GetState())
			if j.GetEndTime() != nil {
				fmt.Fprintf(&b, ", until %s", j.GetEndTime().AsTime().Format(time.RFC3339))
			}
			b.WriteString("\n")
		}
	}
	for i, sealed := range p.GetSteps() {
		s, err := reg.Open(sealed)
		if err != nil {
			return "", err
		}
		effect := strings.ToLower(strings.TrimPrefix(sealed.GetEffect().String(), "EFFECT_"))
		fmt.Fprintf(&b, "step %d %s revision %d, %s, undoable %t", i, sealed.GetType(), sealed.GetRevision(), effect, sealed.GetUndoable())
		if t := sealed.GetTimeout(); t != nil {
			fmt.Fprintf(&b, ", timeout %v", t.AsDuration())
		}
		if d := sealed.GetStartDelay(); d != nil {
			fmt.Fprintf(&b, ", after %v", d.AsDuration())
		}
		if n := sealed.GetMaxAttempts(); n > 0 {
			fmt.Fprintf(&b, ", %d attempts, back-off %v", n, sealed.GetBackOff().AsDuration())
		}
		if d := sealed.GetWaitMost(); d != nil {
			fmt.Fprintf(&b, ", waits %v at most", d.AsDuration())
		}
		fmt.Fprintf(&b, ": %s\n", sealed.GetTitle())
		renderFields(&b, s.Args())
	}
	if b.Len() == 0 {
		return "nothing to do\n", nil
	}
	return b.String(), nil
}

func renderFields(b *strings.Builder, m proto.Message) {
	r := m.ProtoReflect()
	fields := r.Descriptor().Fields()
	for i := range fields.Len() {
		fd := fields.Get(i)
		if !r.Has(fd) {
			continue
		}
		v := r.Get(fd)
		switch {
		case fd.Kind() == protoreflect.BytesKind:
			fmt.Fprintf(b, "    %s:\n", fd.Name())
			for line := range strings.Lines(string(v.Bytes())) {
				fmt.Fprintf(b, "    | %s\n", strings.TrimSuffix(line, "\n"))
			}
		case fd.IsList():
			for j := range v.List().Len() {
				fmt.Fprintf(b, "    %s: %s\n", fd.Name(), renderItem(fd, v.List().Get(j)))
			}
		case fd.Kind() == protoreflect.EnumKind:
			fmt.Fprintf(b, "    %s: %s\n", fd.Name(), fd.Enum().Values().ByNumber(v.Enum()).Name())
		case fd.Message() != nil && fd.Message().FullName() == reference:
			fmt.Fprintf(b, "    %s: %s\n", fd.Name(), v.Message().Interface().(*taskv1.SecretRef).GetName())
		case fd.Kind() == protoreflect.MessageKind:
			// A step's own timeout is in its heading.
		case string(fd.Name()) == "mode":
			fmt.Fprintf(b, "    mode: %#o\n", v.Uint())
		default:
			fmt.Fprintf(b, "    %s: %v\n", fd.Name(), v)
		}
	}
}

// renderItem prints an element of a list on one line.
func renderItem(fd protoreflect.FieldDescriptor, v protoreflect.Value) string {
	if fd.Message() == nil {
		return v.String()
	}
	var parts []string
	fields := fd.Message().Fields()
	for i := range fields.Len() {
		if f := fields.Get(i); v.Message().Has(f) && f.Message() == nil { // as above
			parts = append(parts, fmt.Sprintf("%s=%v", f.Name(), v.Message().Get(f)))
		}
	}
	return strings.Join(parts, " ")
}

// renderOutcome prints how a task ended for a golden file.
func renderOutcome(o Outcome) string {
	s := strings.TrimPrefix(o.State.String(), "TASK_STATE_")
	if o.Undo == taskv1.UndoState_UNDO_STATE_COMPLETE || o.Undo == taskv1.UndoState_UNDO_STATE_NOT_POSSIBLE {
		s += " undo " + strings.TrimPrefix(o.Undo.String(), "UNDO_STATE_")
	}
	if o.Reason != "" {
		s += " " + o.Reason
	}
	return s + "\n"
}
