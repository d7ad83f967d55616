package step

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"regexp"
	"strconv"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"

	slurmv1 "github.com/gpuaas/millwright/proto/millwright/slurm/v1"
	"github.com/gpuaas/millwright/tasks"
	"github.com/gpuaas/millwright/tasks/host"
)

// gresConf is where slurmd has the controller's gres.conf while it runs.
const gresConf = "/run/slurm/conf/gres.conf"

const (
	// patience is when a wait of slurmd has gone on too long to be chance, in polls.
	patience = int(6 * time.Second / slurmPause)
	// startsApart is how far two starts of slurmd are from each other at least.
	startsApart = 1100 * time.Millisecond
)

type startSlurmd struct{ args *slurmv1.SlurmdStartStep }

// StartSlurmd returns the step that starts slurmd and waits until the controller
// has the node as it should be. What its programs say of a failure is vague, so
// it looks for the cause itself and says it in plain words.
func StartSlurmd(args *slurmv1.SlurmdStartStep) tasks.Step { return startSlurmd{args} }

func (s startSlurmd) Args() proto.Message { return s.args }

// Timeout implements [tasks.Limiter].
func (s startSlurmd) Timeout() time.Duration { return slurmTime }

func (s startSlurmd) Title() string {
	return "start slurmd and wait until Slurm's controller has node " + s.args.GetNode()
}

func (s startSlurmd) ref() host.SlurmRef { return slurmRef(s.args.GetNode(), s.args.GetControllers()) }

func (s startSlurmd) Observe(ctx context.Context, h host.Reader) ([]byte, error) {
	return observeSlurmd(ctx, h, s.ref(), s.args.GetResumeOwners())
}

func (s startSlurmd) Apply(ctx context.Context, h host.Host) ([]byte, error) {
	if err := CheckMunge(ctx, h); err != nil {
		return nil, err
	}
	if err := CheckController(ctx, h, s.args.GetControllers()); err != nil {
		return nil, err
	}
	was, err := h.SlurmNode(ctx, s.ref())
	if err != nil {
		return nil, err
	}
	if s.args.GetDynamic() && was.Known && !was.Is("DYNAMIC_NORM") {
		return nil, reasonError(tasks.ReasonSlurmNotRegistered, "node %s stands in the controller's slurm.conf, and slurmd ends as a dynamic one of that name: join it as a static one: %w", was.Name, tasks.ErrNotSatisfied)
	}
	if err := reload(ctx, h, SlurmdUnit); err != nil {
		return nil, err
	}
	if err := h.SetUnitEnabled(ctx, SlurmdUnit, true); err != nil {
		return nil, err
	}
	old, err := s.stop(ctx, h)
	if err != nil {
		return nil, err
	}
	if err := h.StartUnit(ctx, SlurmdUnit); err != nil {
		if skipped := s.skipped(ctx, h); skipped != nil {
			return nil, skipped
		}
		return nil, reasonError(tasks.ReasonSlurmNotRegistered, "slurmd does not start: %w", err)
	}
	if err := s.register(ctx, h, old); err != nil {
		return nil, err
	}
	for _, owner := range s.args.GetResumeOwners() {
		if err := s.resume(ctx, h, owner); err != nil {
			return nil, err
		}
	}
	return nil, nil
}

// stop stops slurmd, and returns when the one that the controller knows was
// started. The controller keeps that by the second, and can hear of a slurmd
// just after that has gone: the next one must be a second younger to be told
// from it, as when an agent died after it had started it.
func (s startSlurmd) stop(ctx context.Context, h host.Host) (time.Time, error) {
	if err := h.StopUnit(ctx, SlurmdUnit); err != nil {
		return time.Time{}, err
	}
	if !pause(ctx, startsApart) {
		return time.Time{}, context.Cause(ctx)
	}
	n, err := h.SlurmNode(ctx, s.ref())
	return n.SlurmdStart, err
}

func (s startSlurmd) resume(ctx context.Context, h host.Host, owner string) error {
	n, err := h.SlurmNode(ctx, s.ref())
	if err != nil || !n.DrainedBy(owner) {
		return err
	}
	return h.ResumeSlurmNode(ctx, s.ref(), owner)
}

// CheckController returns nil when a controller answers, trusts the node and is
// not older than its slurmd. Otherwise the error says what is wrong.
func CheckController(ctx context.Context, h host.Prober, controllers []string) error {
	var unreachable []error
	for _, c := range controllers {
		if err := h.ProbeSlurmServer(ctx, c); err != nil {
			unreachable = append(unreachable, err)
		}
	}
	if len(unreachable) == len(controllers) {
		return reasonError(tasks.ReasonSlurmControllerDown, "no controller of Slurm answers: %w", errors.Join(unreachable...))
	}
	c, err := h.SlurmController(ctx, controllers)
	switch {
	case err != nil && strings.Contains(err.Error(), "Incompatible versions"):
		return reasonError(tasks.ReasonSlurmVersion, "the controller does not speak the language of this node's Slurm, which is another release: %w", err)
	case SlurmDistrusts(err):
		return reasonError(tasks.ReasonMungeKeyRefused, "the controller answers and does not trust this node: its munge key is not the cluster's, or their clocks are more than 5 minutes apart: %w", err)
	case err != nil:
		return reasonError(tasks.ReasonSlurmControllerDown, "Slurm's controller does not answer: %w", err)
	}
	m, err := h.SlurmMachine(ctx)
	if err != nil {
		return err
	}
	if SlurmNewer(m.Version, c.Version) {
		return reasonError(tasks.ReasonSlurmVersion, "slurmd is %s and the controller %s: a node must not be newer than its controller; install slurmd %s, or upgrade the controller first: %w",
			m.Version, c.Version, c.Version, tasks.ErrNotSatisfied)
	}
	return nil
}

// SlurmDistrusts reports whether an error is a controller's that answers, and
// does not take the node's credentials.
func SlurmDistrusts(err error) bool {
	return err != nil && (strings.Contains(err.Error(), "Zero Bytes") || strings.Contains(err.Error(), "authentication"))
}

var release = regexp.MustCompile(`^(\d+)\.(\d+)`)

// SlurmNewer reports whether release a comes after b, by year and month alone: what
// is behind them does not change the protocol.
func SlurmNewer(a, b string) bool {
	x, y := release.FindStringSubmatch(a), release.FindStringSubmatch(b)
	if x == nil || y == nil {
		return false
	}
	number := func(m []string) int {
		year, _ := strconv.Atoi(m[1])  // it is digits
		month, _ := strconv.Atoi(m[2]) // it is digits
		return year*100 + month
	}
	return number(x) > number(y)
}

// register waits until the controller has the node, by a slurmd that was started
// at another time than the one before.
func (s startSlurmd) register(ctx context.Context, h host.Host, old time.Time) error {
	var last error
	var devices string
	polls := 0
	done, err := waitFor(ctx, registerTime, func() (bool, error) {
		polls++
		if d := missingDevices(ctx, h); d != "" {
			devices = d
		}
		if last = s.checkNew(ctx, h, old); last == nil {
			return true, nil
		}
		return false, s.hopeless(ctx, h, polls, devices, last)
	})
	if err == nil && !done {
		err = reasonError(tasks.ReasonSlurmNotRegistered, "slurmd runs, and after %v: %w", registerTime, last)
	}
	return err
}

// hopeless says why waiting on is of no use, or nil.
func (s startSlurmd) hopeless(ctx context.Context, h host.Reader, polls int, devices string, last error) error {
	st, err := h.Unit(ctx, SlurmdUnit)
	if err != nil {
		return err
	}
	if err := s.skipped(ctx, h); err != nil {
		return err
	}
	if devices != "" && polls > patience {
		return reasonError(tasks.ReasonSlurmDevice, "slurmd waits for a device that the controller's gres.conf names and this node does not have: %s: %w", devices, last)
	}
	var r *tasks.ReasonError
	if errors.As(last, &r) && polls > patience {
		return last
	}
	if st.Active == "failed" || st.Sub == "auto-restart" && polls > patience {
		return reasonError(tasks.ReasonSlurmNotRegistered, "slurmd ended (%s): its own log says why: %w", describe(st), last)
	}
	return nil
}

// skipped says that a condition of the unit keeps slurmd from being started.
func (s startSlurmd) skipped(ctx context.Context, h host.Reader) error {
	st, err := h.Unit(ctx, SlurmdUnit)
	if err != nil || st.ConditionMet || st.Active == "active" {
		return err
	}
	return reasonError(tasks.ReasonSlurmSkipped, "systemd skipped slurmd, since a condition of its unit is not met: see ConditionPathExists= and the like in %s",
		strings.Join(append([]string{st.Fragment}, st.DropIns...), ", "))
}

// missingDevices returns what the controller's gres.conf names and is not there.
// Slurm's ranges in brackets are read.
func missingDevices(ctx context.Context, h host.Reader) string {
	f, err := h.ReadFile(ctx, gresConf)
	if err != nil {
		return ""
	}
	var missing []string
	for line := range strings.Lines(string(f.Data)) {
		for word := range strings.FieldsSeq(line) {
			files, ok := strings.CutPrefix(word, "File=")
			if !ok || strings.HasPrefix(word, "#") {
				continue
			}
			for _, file := range expand(files) {
				if _, err := h.Lstat(ctx, file); errors.Is(err, fs.ErrNotExist) {
					missing = append(missing, file)
				}
			}
		}
	}
	return strings.Join(missing, ", ")
}

var bracket = regexp.MustCompile(`^(.*)\[(\d+)-(\d+)\](.*)$`)

// expand returns the paths of one range. What is written otherwise is left out:
// it must not be called missing.
func expand(files string) []string {
	if !path.IsAbs(files) {
		return nil
	}
	m := bracket.FindStringSubmatch(files)
	if m == nil {
		if strings.ContainsAny(files, "[],") {
			return nil
		}
		return []string{files}
	}
	first, err1 := strconv.Atoi(m[2])
	last, err2 := strconv.Atoi(m[3])
	if err1 != nil || err2 != nil || last-first > 1024 || strings.ContainsAny(m[1]+m[4], "[],") {
		return nil
	}
	var out []string
	for i := first; i <= last; i++ {
		out = append(out, fmt.Sprintf("%s%0*d%s", m[1], len(m[2]), i, m[4]))
	}
	return out
}

func (s startSlurmd) checkNew(ctx context.Context, h host.Reader, old time.Time) error {
	n, err := h.SlurmNode(ctx, s.ref())
	if err == nil && n.Known && !old.IsZero() && n.SlurmdStart.Equal(old) {
		err = fmt.Errorf("node %s has not registered since slurmd was started: %w", n.Name, tasks.ErrNotSatisfied)
	}
	if err != nil {
		return err
	}
	return s.check(ctx, h)
}

func (s startSlurmd) check(ctx context.Context, h host.Reader) error {
	return CheckSlurmNode(ctx, h, s.args)
}

// CheckSlurmNode returns nil when the controller has the node as the arguments
// say: registered, answering, fit for jobs, with the resources. A drain with a
// tag of Millwright is not held against it.
func CheckSlurmNode(ctx context.Context, h host.Reader, args *slurmv1.SlurmdStartStep) error {
	n, err := h.SlurmNode(ctx, slurmRef(args.GetNode(), args.GetControllers()))
	if err != nil {
		return err
	}
	state := strings.Join(n.States, "+")
	bad := func(reason, format string, a ...any) error {
		return reasonError(reason, "node %s is %s: "+format+": %w", append(append([]any{n.Name, state}, a...), tasks.ErrNotSatisfied)...)
	}
	switch {
	case !n.Known && args.GetDynamic():
		return fmt.Errorf("the controller does not know node %s: %w", n.Name, tasks.ErrNotSatisfied)
	case !n.Known:
		return bad(tasks.ReasonSlurmNotRegistered, "the controller's slurm.conf has no such node: add it there, or join as a dynamic node")
	case n.Is("INVAL") || n.Is("INVALID_REG") || n.Drained() && slurmGres.MatchString(n.Reason):
		return bad(tasks.ReasonSlurmGres, "the controller does not accept what slurmd reports: %s", n.Reason)
	case n.Gres != args.GetGres() && plainGres(n.Gres) != args.GetGres():
		return bad(tasks.ReasonSlurmGres, "the controller has the resources %q for it, and not %q", n.Gres, args.GetGres())
	case n.Version == "" || n.SlurmdStart.IsZero() || n.Is("UNKNOWN") || n.Is("NOT_RESPONDING") || n.Is("FUTURE"):
		return fmt.Errorf("node %s is %s and has not registered: %w", n.Name, state, tasks.ErrNotSatisfied)
	case n.Is("DOWN") || n.Is("FAIL") || n.Is("ERROR"):
		return fmt.Errorf("node %s is %s (%s): %w", n.Name, state, n.Reason, tasks.ErrNotSatisfied)
	case n.Drained() && !strings.HasPrefix(n.Reason, "mw:"):
		return bad(tasks.ReasonSlurmForeignDrain, "it is drained, and not by Millwright: %q", n.Reason)
	}
	return nil
}

var sockets = regexp.MustCompile(`\([^)]*\)`)

// plainGres leaves out what Slurm adds to a resource, as in gpu:h100:8(S:0-1).
func plainGres(s string) string { return sockets.ReplaceAllString(s, "") }

func (s startSlurmd) Verify(ctx context.Context, h host.Prober) error {
	st, err := h.Unit(ctx, SlurmdUnit)
	if err != nil {
		return err
	}
	if st.Active != "active" || !enabled(st) {
		return fmt.Errorf("unit %s is %s: %w", SlurmdUnit, describe(st), tasks.ErrNotSatisfied)
	}
	return AwaitSlurmNode(ctx, h, s.args)
}

// Undo stops slurmd, and has the controller forget a dynamic node that it did
// not know before.
func (s startSlurmd) Undo(ctx context.Context, h host.Host, before []byte) error {
	var was slurmv1.SlurmdObserved
	if err := decode(before, &was); err != nil {
		return err
	}
	if err := s.drainAgain(ctx, h, was.GetDrainReason()); err != nil {
		return err
	}
	if was.GetActive() { // it was restarted with the same configuration
		if err := h.StartUnit(ctx, SlurmdUnit); err != nil {
			return err
		}
	} else if err := h.StopUnit(ctx, SlurmdUnit); err != nil {
		return err
	}
	if err := h.SetUnitEnabled(ctx, SlurmdUnit, was.GetEnabled()); err != nil {
		return err
	}
	if !s.args.GetDynamic() || was.GetKnown() {
		return nil
	}
	if was.GetActive() && was.GetAnswered() { // it registers now, and then never again
		if _, err := waitFor(ctx, settleTime, func() (bool, error) {
			n, err := h.SlurmNode(ctx, s.ref())
			return err == nil && n.Known, nil
		}); err != nil {
			return err
		}
	}
	if was.GetAnswered() {
		return forget(ctx, h, s.ref())
	}
	if err := h.DeleteSlurmNode(ctx, s.ref()); !errors.Is(err, host.ErrSlurm) {
		return err
	}
	return nil // the controller never answered, so the node cannot have registered
}

// drainAgain drains the node as it was.
func (s startSlurmd) drainAgain(ctx context.Context, h host.Host, reason string) error {
	for _, owner := range s.args.GetResumeOwners() {
		if reason == "" || !host.SlurmOwned(reason, owner) {
			continue
		}
		text := strings.TrimPrefix(strings.TrimPrefix(reason, owner), ": ")
		if err := h.DrainSlurmNode(ctx, s.ref(), owner, text); !errors.Is(err, host.ErrNotOurs) {
			return err
		}
	}
	return nil
}

// AwaitSlurmNode is CheckSlurmNode, for a node that may still be settling: it
// does not respond for a moment after a drain has ended.
func AwaitSlurmNode(ctx context.Context, h host.Reader, args *slurmv1.SlurmdStartStep) error {
	var last error
	_, err := waitFor(ctx, settleTime, func() (bool, error) {
		last = CheckSlurmNode(ctx, h, args)
		return last == nil, nil
	})
	return errors.Join(err, last)
}
