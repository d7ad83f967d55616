package gpu

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"strings"
	"syscall"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	gpuv1 "github.com/gpuaas/millwright/proto/millwright/gpu/v1"
)

// StateError is the error of a question while the driver cannot be asked.
type StateError struct {
	Status *gpuv1.DriverStatus
}

// Error is the state and its message.
func (e *StateError) Error() string {
	name := strings.TrimPrefix(e.Status.GetState().String(), "DRIVER_STATE_")
	return fmt.Sprintf("the GPU driver cannot be asked: %s: %s", strings.ToLower(name), e.Status.GetMessage())
}

// verdict is a state and why.
type verdict struct {
	state   gpuv1.DriverState
	message string
}

// Status is whether the driver can be asked. The caller may keep it.
func (s *Supervisor) Status() *gpuv1.DriverStatus {
	s.mu.Lock()
	defer s.mu.Unlock()
	return proto.CloneOf(s.status)
}

// Changed returns a channel that is closed at the next change of the status or
// of the program that asks the driver.
func (s *Supervisor) Changed() <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.changed
}

// become changes the status. No answer is waited for at such a time.
func (s *Supervisor) become(v verdict) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.base, s.waits = v, [2]string{}
	s.show(v)
}

// silent takes that the question of a lane has no answer yet, or has one. A new
// program that answers is not well by that alone: its beginning decides.
func (s *Supervisor) silent(lane int, text string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if text == "" && s.link == nil {
		return
	}
	s.waits[lane] = text
	text = cmp.Or(s.waits[queries], s.waits[events])
	switch {
	case s.base.state == gpuv1.DriverState_DRIVER_STATE_UNRESPONSIVE: // it says more
	case text != "":
		s.show(verdict{gpuv1.DriverState_DRIVER_STATE_NO_ANSWER_YET, text})
	default:
		s.show(s.base)
	}
}

// show makes the status what it says; s.mu is held.
func (s *Supervisor) show(v verdict) {
	v.message = words(v.message)
	pid := int32(0)
	if s.stuck != nil {
		pid = int32(s.stuck.Pid())
	}
	if s.status.GetState() == v.state && s.status.GetMessage() == v.message && s.status.GetStuckPid() == pid && s.status.GetStarts() == s.starts {
		return
	}
	if s.status.GetState() != v.state {
		s.cfg.Logger.Info("GPU driver", "state", v.state.String(), "message", v.message)
		s.status.Since = timestamppb.New(s.cfg.Clock.Now())
	}
	s.status.State, s.status.Message, s.status.StuckPid, s.status.Starts = v.state, v.message, pid, s.starts
	close(s.changed)
	s.changed = make(chan struct{})
}

// refused is the verdict on an answer that the child gave in words.
func refused(f *gpuv1.ChildFailure) verdict { return verdict{f.GetState(), f.GetMessage()} }

// unstartable is the verdict on a program that could not be started.
func (s *Supervisor) unstartable(err error) verdict {
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, fs.ErrPermission) {
		return verdict{
			gpuv1.DriverState_DRIVER_STATE_PROGRAM_UNUSABLE,
			fmt.Sprintf("%s cannot be run (%v): install millwright-agent again, or set gpu.mode to off", s.cfg.Program, err),
		}
	}
	return verdict{gpuv1.DriverState_DRIVER_STATE_PROGRAM_UNUSABLE, err.Error()}
}

// after is the verdict on a child whose link ended with cause while what was
// asked. It is gone, unless the kernel holds it.
func (s *Supervisor) after(p Process, gone bool, what string, cause error) verdict {
	var slow *late
	if errors.As(cause, &slow) {
		v := verdict{gpuv1.DriverState_DRIVER_STATE_UNRESPONSIVE, fmt.Sprintf("%v; millwright-gpu was killed", slow)}
		if !gone {
			v.message = fmt.Sprintf("%v; millwright-gpu (process %d) was killed and the kernel holds it: no other is started until it is gone; reboot the node if that lasts", slow, p.Pid())
		}
		return v
	}
	if !gone {
		return verdict{
			gpuv1.DriverState_DRIVER_STATE_UNRESPONSIVE,
			fmt.Sprintf("millwright-gpu (process %d) was killed (%v) and the kernel holds it: no other is started until it is gone", p.Pid(), cause),
		}
	}
	var odd *nonsense
	if errors.As(cause, &odd) {
		return verdict{gpuv1.DriverState_DRIVER_STATE_PROGRAM_UNUSABLE, fmt.Sprintf("%v; it was killed. If that lasts: install millwright-agent again, or another driver", odd)}
	}
	code, signal, said := p.End()
	return ended(code, signal, said, what)
}

// exitNoSymbol is how the dynamic loader ends a program.
const exitNoSymbol = 127

// ended is the verdict on a child that ended by itself while what was asked.
func ended(code int, signal syscall.Signal, said, what string) verdict {
	if what == "" {
		what = "nothing"
	}
	if _, symbol, ok := strings.Cut(said, "undefined symbol: "); ok || code == exitNoSymbol {
		symbol, _, _ = strings.Cut(symbol, "\n")
		if symbol == "" {
			symbol = "which it did not name"
		}
		return verdict{
			gpuv1.DriverState_DRIVER_STATE_SYMBOL_MISSING,
			fmt.Sprintf("millwright-gpu ended with exit code %d for want of a symbol of the driver's library, %s, while %s was asked: "+
				"either it was made to bind all symbols at its start (LD_BIND_NOW, or a build with -z now), which no driver satisfies, "+
				"or the driver is too old", code, symbol, what),
		}
	}
	how := fmt.Sprintf("with exit code %d", code)
	if code < 0 {
		how = "by signal " + signal.String()
	}
	first, _, _ := strings.Cut(strings.TrimSpace(said), "\n")
	if first != "" {
		first = ": " + first
	}
	return verdict{gpuv1.DriverState_DRIVER_STATE_CRASHED, fmt.Sprintf("millwright-gpu ended %s while %s was asked%s", how, what, first)}
}
