package step

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"

	gpuv1 "github.com/gpuaas/millwright/proto/millwright/gpu/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/tasks"
	"github.com/gpuaas/millwright/tasks/gpu/dcgm"
	"github.com/gpuaas/millwright/tasks/host"
)

// The verdicts under short names.
const (
	pass    = gpuv1.Verdict_VERDICT_PASS
	skipped = gpuv1.Verdict_VERDICT_SKIPPED
	warn    = gpuv1.Verdict_VERDICT_WARN
	unasked = gpuv1.Verdict_VERDICT_ERROR
	fail    = gpuv1.Verdict_VERDICT_FAIL
)

// findings collects what is found.
type findings struct {
	list   []*gpuv1.GpuFinding
	source gpuv1.CheckSource
}

// add notes a check of a GPU, by its place in the step's list, or of the node: -1.
func (f *findings) add(gpu int, name string, v gpuv1.Verdict, reason, message, action string) {
	one := &gpuv1.GpuFinding{Check: &gpuv1.GpuCheck{Name: name, Source: f.source, Verdict: v}}
	if gpu >= 0 {
		n := uint32(gpu)
		one.Gpu = &n
	}
	if v != pass {
		one.Check.Reason, one.Check.Message, one.Check.Action = reason, message, action
	}
	f.list = append(f.list, one)
}

type checkGPUs struct{ args *gpuv1.GpuCheckStep }

// CheckGPUs returns the step that looks at GPUs and changes nothing. What it finds
// is its out; that something is not well, or cannot be asked, is no error of it.
func CheckGPUs(args *gpuv1.GpuCheckStep) tasks.Step { return checkGPUs{args} }

func (s checkGPUs) Args() proto.Message { return s.args }

func (s checkGPUs) Title() string {
	if s.args.GetWhole() {
		return "look at all GPUs"
	}
	return "look at " + targetNames(s.args.GetGpus())
}

// Observe returns nothing: there is nothing to undo.
func (s checkGPUs) Observe(context.Context, host.Reader) ([]byte, error) { return nil, nil }

func (s checkGPUs) Apply(ctx context.Context, h host.Host) ([]byte, error) {
	f := &findings{source: gpuv1.CheckSource_CHECK_SOURCE_AGENT}
	list, err := h.GPUs(ctx)
	switch {
	case ctx.Err() != nil:
		return nil, context.Cause(ctx)
	case err != nil:
		f.add(-1, "node.driver", fail, "DRIVER", err.Error(), "")
	default:
		f.add(-1, "node.driver", pass, "", "", "")
	}
	if err == nil {
		for i, g := range s.args.GetGpus() {
			s.one(ctx, h, f, i, g, list)
		}
	}
	s.conditions(ctx, h, f)
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	return encode(&gpuv1.GpuFindings{Findings: f.list, Gpus: s.args.GetGpus()})
}

// one asks a GPU what the health rules do not ask.
func (s checkGPUs) one(ctx context.Context, h host.Host, f *findings, i int, g *gpuv1.GpuTarget, list []host.GPU) {
	at := slices.IndexFunc(list, func(o host.GPU) bool { return o.UUID == g.GetUuid() && o.PCI == g.GetPciBusId() })
	switch {
	case at < 0:
		f.add(i, "gpu.answers", fail, "GONE", "the driver does not have it any more", "reboot")
		return
	case list[at].Problem != "" || g.GetUuid() == "":
		f.add(i, "gpu.answers", fail, "NO_ANSWER", "it does not answer: "+list[at].Problem, "reboot")
		return
	}
	st, err := h.GPUState(ctx, g.GetUuid())
	switch {
	case errors.Is(err, host.ErrGPULost), errors.Is(err, host.ErrGPUUnknown), errors.Is(err, host.ErrGPUResetRequired), errors.Is(err, host.ErrGPUUnresponsive):
		f.add(i, "gpu.answers", fail, "NO_ANSWER", err.Error(), "")
		return
	case err != nil:
		f.add(i, "gpu.answers", unasked, "ERROR", err.Error(), "")
		return
	}
	f.add(i, "gpu.answers", pass, "", "", "")
	if st.Persistence {
		f.add(i, "gpu.persistence", pass, "", "", "")
	} else {
		f.add(i, "gpu.persistence", warn, "OFF", "persistence mode is off: each program that is the first to use the GPU waits until the driver has initialised it", "mend_configuration")
	}
	s.layout(ctx, h, f, i, st)
}

// layout checks what is on a GPU against what the intent wants that its layout
// belongs to.
func (s checkGPUs) layout(ctx context.Context, h host.Reader, f *findings, i int, st host.GPUState) {
	const name = "gpu.mig_layout"
	mark, err := h.ReadFile(ctx, QuarantineMark+st.UUID)
	owner, problem := intentOf(ctx, h, st.UUID)
	half := slices.ContainsFunc(st.Instances, func(in host.MIGInstance) bool { return len(in.Compute) == 0 })
	switch {
	case err == nil:
		f.add(i, name, fail, "QUARANTINE", strings.TrimSpace(string(mark.Data)), "hold")
	case !st.Capable:
		f.add(i, name, skipped, "NOT_SUPPORTED", "the GPU has no MIG", "")
	case problem != "" && strings.Contains(problem, st.UUID):
		f.add(i, name, fail, "NOT_AS_WANTED", fmt.Sprintf("intent %s: %s", owner, problem), "mend_configuration")
	case problem != "": // it wants something of other GPUs
		f.add(i, name, unasked, "NOT_VERIFIED", fmt.Sprintf("intent %s: %s", owner, problem), "")
	case half:
		f.add(i, name, warn, "HALF_MADE", "it has "+DescribeMIGLayout(MIGLayout(st))+": what has no compute instance is of no use to anybody", "mend_configuration")
	default:
		f.add(i, name, pass, "", "", "")
	}
}

// intentOf returns the intent to which a GPU's layout belongs, and why it does not
// hold; empty where there is none in force.
func intentOf(ctx context.Context, h host.Reader, uuid string) (key, problem string) {
	file, err := h.ReadFile(ctx, MIGOwnerDir+"/"+uuid)
	if err != nil {
		return "", ""
	}
	key = strings.TrimSpace(string(file.Data))
	all, err := h.GPUIntents(ctx)
	if err != nil {
		return key, "it is not known whether it holds: " + err.Error()
	}
	for _, in := range all {
		if in.Key == key {
			return key, in.Problem
		}
	}
	return key, ""
}

// conditions takes what the health rules say of the GPUs, and of the node.
func (s checkGPUs) conditions(ctx context.Context, h host.Reader, f *findings) {
	all, err := h.GPUConditions(ctx)
	if err != nil {
		f.add(-1, "node.health", unasked, "NOT_LOOKED_AFTER", err.Error(), "")
		return
	}
	happened, deaf := make([]bool, len(s.args.GetGpus())), ""
	for _, c := range all {
		i := slices.IndexFunc(s.args.GetGpus(), func(g *gpuv1.GpuTarget) bool {
			return c.UUID != "" && c.UUID == g.GetUuid() || c.UUID == "" && c.PCI != "" && c.PCI == g.GetPciBusId()
		})
		if i < 0 && (c.UUID != "" || c.PCI != "") && !strings.HasPrefix(c.Code, "switch.") {
			continue // of a GPU that nobody asked for
		}
		switch {
		case i >= 0 && strings.HasPrefix(c.Code, "gpu.xid.") && c.State == host.GPUConditionRaised:
			happened[i] = true
		case c.Code == "node.kernel_log" && c.State != host.GPUConditionOK:
			deaf = c.Message
		}
		v, reason := verdictOf(c)
		f.add(i, c.Code, v, reason, conditionText(c), c.Action)
	}
	for i, yes := range happened {
		switch {
		case yes:
		case deaf != "":
			f.add(i, "gpu.xid", unasked, "NO_KERNEL_LOG", "the kernel's log cannot be read: "+deaf, "")
		default:
			f.add(i, "gpu.xid", pass, "", "", "")
		}
	}
}

func conditionText(c host.GPUCondition) string {
	if c.State == host.GPUConditionRaised && c.Message != "" {
		return c.Title + ": " + c.Message
	}
	return c.Message
}

// notThere are the reasons for which a condition does not apply to a GPU.
var notThere = []string{"NOT_SUPPORTED", "SYMBOL_MISSING", "NO_LINKS", "NO_LIMIT", "NONE_UP", "IDLE", "IN_PROGRESS"}

// verdictOf is a condition as a verdict. What makes a node not ready is a fail, and
// what cannot be said is never a pass.
func verdictOf(c host.GPUCondition) (gpuv1.Verdict, string) {
	switch {
	case c.State == host.GPUConditionOK, c.State == host.GPUConditionRaised && c.Severity == host.GPUSeverityInfo:
		return pass, ""
	case c.State == host.GPUConditionRaised && c.Severity == host.GPUSeverityFatal:
		return fail, c.Reason
	case c.State == host.GPUConditionRaised:
		return warn, c.Reason
	case c.State == host.GPUConditionUnknown && slices.Contains(notThere, c.Reason):
		return skipped, c.Reason
	case c.State == host.GPUConditionStale:
		return unasked, "STALE"
	}
	return unasked, c.Reason
}

// Verify returns nil: what was found is what there is.
func (s checkGPUs) Verify(context.Context, host.Prober) error { return nil }

// Undo does nothing.
func (s checkGPUs) Undo(context.Context, host.Host, []byte) error { return nil }

type runDCGM struct{ args *gpuv1.GpuDcgmStep }

var (
	_ tasks.CommandStep = runDCGM{}
	_ tasks.Limiter     = runDCGM{}
)

// RunDCGM returns the step that runs DCGM's diagnosis of GPUs once. What it finds
// is its out; a diagnosis that hangs, dies or says what is not understood is found
// as one that could not be made, and no error of the step.
func RunDCGM(args *gpuv1.GpuDcgmStep) tasks.Step { return runDCGM{args} }

func (s runDCGM) Args() proto.Message { return s.args }

// Timeout implements [tasks.Limiter].
func (s runDCGM) Timeout() time.Duration { return s.args.GetTimeout().AsDuration() + commandGrace }

func (s runDCGM) Title() string {
	return fmt.Sprintf("run DCGM's diagnosis of level %d on %s", s.args.GetLevel(), targetNames(s.args.GetGpus()))
}

// Observe returns nothing: there is nothing to undo.
func (s runDCGM) Observe(context.Context, host.Reader) ([]byte, error) { return nil, nil }

func (s runDCGM) Apply(ctx context.Context, h host.Host) ([]byte, error) {
	f := &findings{source: gpuv1.CheckSource_CHECK_SOURCE_DCGM}
	out := &gpuv1.GpuFindings{Dcgm: true, Gpus: s.args.GetGpus()}
	if why, err := s.renumbered(ctx, h); err != nil || why != "" {
		if err != nil {
			return nil, gpuError("DCGM's diagnosis", err)
		}
		f.add(-1, "dcgm", unasked, "RENUMBERED", why, "")
		out.Findings = f.list
		return encode(out)
	}
	o, err := h.RunCommand(ctx, host.Command{Argv: s.argv(), Timeout: s.args.GetTimeout().AsDuration()})
	switch {
	case errors.Is(err, host.ErrNotStarted):
		f.add(-1, "dcgm", unasked, "NOT_STARTED", err.Error(), "")
	case errors.Is(err, host.ErrOutcomeUnknown): // it changes nothing, and is not run again
		f.add(-1, "dcgm", unasked, "LOST", err.Error(), "")
	case err != nil:
		return nil, err
	default:
		if out.Command, err = encode(outcomeProto(o)); err != nil {
			return nil, err
		}
		said, err := h.CommandOutput(ctx)
		if err != nil {
			return nil, err
		}
		out.DcgmVersion = s.judge(f, o, said)
	}
	out.Findings = f.list
	return encode(out)
}

func (s runDCGM) argv() []string {
	var ids []string
	for _, g := range s.args.GetGpus() {
		ids = append(ids, strconv.Itoa(int(g.GetIndex())))
	}
	return []string{s.args.GetProgram(), "diag", "-r", strconv.Itoa(int(s.args.GetLevel())), "-j", "-i", strings.Join(ids, ",")}
}

// renumbered says why the GPUs are not the ones that DCGM would take: it knows them
// by their index, which changes when one is lost.
func (s runDCGM) renumbered(ctx context.Context, h host.Reader) (string, error) {
	list, err := h.GPUs(ctx)
	if err != nil {
		return "", err
	}
	for _, g := range s.args.GetGpus() {
		i := slices.IndexFunc(list, func(o host.GPU) bool { return o.UUID == g.GetUuid() })
		if i < 0 || list[i].Index != g.GetIndex() {
			return fmt.Sprintf("%s had the index %d when this was planned, and has it no more: plan again", g.GetName(), g.GetIndex()), nil
		}
	}
	return "", nil
}

// judge reads what dcgmi has found, and returns DCGM's version.
func (s runDCGM) judge(f *findings, o host.Outcome, said []byte) string {
	const goesOn = "; what it began may go on in nv-hostengine"
	switch {
	case o.TimedOut:
		f.add(-1, "dcgm", unasked, "TIMED_OUT", fmt.Sprintf("dcgmi did not end within %v and was stopped%s", s.args.GetTimeout().AsDuration(), goesOn), "")
		return ""
	case o.Signal != 0:
		f.add(-1, "dcgm", unasked, "KILLED", fmt.Sprintf("dcgmi was ended by signal %d%s", o.Signal, goesOn), "")
		return ""
	}
	r, err := dcgm.Parse(said)
	if err != nil {
		f.add(-1, "dcgm", unasked, "MALFORMED", fmt.Sprintf("dcgmi exited with code %d and said %q: %v", o.ExitCode, cutText(said), err), "")
		return ""
	}
	covered := make([]bool, len(s.args.GetGpus()))
	for _, t := range r.Tests {
		i := -1
		if t.GPU >= 0 {
			if i = slices.IndexFunc(s.args.GetGpus(), func(g *gpuv1.GpuTarget) bool { return int(g.GetIndex()) == t.GPU }); i < 0 {
				f.add(-1, t.Name, unasked, "OTHER_GPU", fmt.Sprintf("DCGM tells of GPU %d, which was not asked for", t.GPU), "")
				continue
			}
			covered[i] = true
		}
		f.add(i, t.Name, dcgmVerdicts[t.Status], strings.ToUpper(dcgmWords[t.Status]), t.Message, "")
	}
	for i, yes := range covered {
		if !yes {
			f.add(i, "dcgm", unasked, "NOT_TESTED", "DCGM says nothing of this GPU", "")
		}
	}
	if o.ExitCode != 0 && !slices.ContainsFunc(f.list, func(g *gpuv1.GpuFinding) bool { return g.GetCheck().GetVerdict() >= warn }) {
		f.add(-1, "dcgm", unasked, "EXIT_CODE", fmt.Sprintf("dcgmi exited with code %d although no test failed", o.ExitCode), "")
	}
	return r.Version
}

var (
	dcgmVerdicts = map[dcgm.Status]gpuv1.Verdict{dcgm.Pass: pass, dcgm.Skip: skipped, dcgm.Warn: warn, dcgm.Error: unasked, dcgm.Fail: fail}
	dcgmWords    = map[dcgm.Status]string{dcgm.Pass: "pass", dcgm.Skip: "skipped", dcgm.Warn: "warn", dcgm.Error: "not_run", dcgm.Fail: "fail"}
)

// cutText is the beginning of a program's output, on one line.
func cutText(b []byte) string {
	const most = 200
	text := []rune(strings.Join(strings.Fields(strings.ToValidUTF8(string(b[:min(len(b), 4*most)]), "?")), " "))
	return string(text[:min(len(text), most)])
}

// Verify returns nil: what was found is what there is.
func (s runDCGM) Verify(context.Context, host.Prober) error { return nil }

// Undo does nothing: a diagnosis leaves nothing behind.
func (s runDCGM) Undo(context.Context, host.Host, []byte) error { return nil }

// Outcome implements [tasks.CommandStep].
func (s runDCGM) Outcome(out []byte) (*taskv1.CommandOutcome, error) {
	var f gpuv1.GpuFindings
	if err := decode(out, &f); err != nil {
		return nil, err
	}
	if len(f.GetCommand()) == 0 {
		return nil, nil // it was not run
	}
	var o taskv1.CommandOutcome
	return &o, decode(f.GetCommand(), &o)
}
