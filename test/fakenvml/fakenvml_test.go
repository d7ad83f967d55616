package fakenvml_test

import (
	"strings"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpuaas/millwright/test/fakenvml"
)

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func TestValuesAreTheNodes(t *testing.T) {
	n := newNode(t, "H100", "A100-80")
	c := startClient(t, n)
	c.want("init", 0, nil, nvml.SUCCESS)
	c.want("count", 0, nil, nvml.SUCCESS, 2)
	c.want("temperature", 1, nil, nvml.SUCCESS, 34)
	must(t, n.Set(t.Context(), 1, "temperature=91", "dbe_volatile=+2"))
	c.want("temperature", 1, nil, nvml.SUCCESS, 91)
	c.want("temperature", 0, nil, nvml.SUCCESS, 34)
	c.want("field", 1, []uint32{nvml.FI_DEV_ECC_DBE_VOL_TOTAL}, nvml.SUCCESS, 2)
	c.want("field", 1, []uint32{nvml.FI_DEV_TEMPERATURE_SLOWDOWN_TLIMIT}, nvml.ERROR_NOT_SUPPORTED)
	s, err := n.State(t.Context())
	must(t, err)
	if got := c.ask("uuid", 0).Text; got != s.GPUs[0].UUID || !strings.HasPrefix(got, "GPU-") {
		t.Errorf("UUID %q, the state says %q", got, s.GPUs[0].UUID)
	}
	if err := n.Set(t.Context(), 0, "temperature=1", "no_such_key=1"); err == nil {
		t.Error("a key that does not exist was set")
	}
	c.want("temperature", 0, nil, nvml.SUCCESS, 34)
}

func TestLostAndDroppedGPUs(t *testing.T) {
	n := newNode(t, "H100", "H100", "H100")
	c := startClient(t, n)
	c.want("init", 0, nil, nvml.SUCCESS)
	c.want("open", 1, nil, nvml.SUCCESS)
	must(t, n.Set(t.Context(), 1, "lost=1"))
	c.want("temperature", 1, nil, nvml.ERROR_GPU_IS_LOST)
	c.want("count", 0, nil, nvml.SUCCESS, 3)
	second := c.ask("uuid", 2).Text
	must(t, n.Set(t.Context(), 1, "lost=0", "present=0"))
	c.want("count", 0, nil, nvml.SUCCESS, 2)
	if got := c.ask("uuid", 1).Text; got != second {
		t.Errorf("index 1 is %s after the GPU before it went, want %s", got, second)
	}
}

func TestEventsReachThoseWhoAsked(t *testing.T) {
	n := newNode(t, "H100", "H100")
	a, b := startClient(t, n), startClient(t, n)
	for _, c := range []*client{a, b} {
		c.want("init", 0, nil, nvml.SUCCESS)
	}
	must(t, n.XID(t.Context(), 0, 13)) // before anyone asked: told to no one
	a.want("register", 0, []uint32{nvml.EventTypeXidCriticalError}, nvml.SUCCESS)
	b.want("register", 1, []uint32{nvml.EventTypeXidCriticalError}, nvml.SUCCESS)
	must(t, n.Event(t.Context(), 0, nvml.EventTypeClock, 1)) // not asked for
	must(t, n.XID(t.Context(), 0, 79))
	a.want("wait", 0, []uint32{5000}, nvml.SUCCESS, 0, nvml.EventTypeXidCriticalError, 79)
	a.want("wait", 0, []uint32{1}, nvml.ERROR_TIMEOUT)
	b.want("wait", 0, []uint32{1}, nvml.ERROR_TIMEOUT)
	answered := make(chan reply, 1)
	must(t, b.in.Encode(question{Op: "wait", Args: []uint32{30000}}))
	go func() {
		var r reply
		if b.out.Decode(&r) == nil {
			answered <- r
		}
		close(answered)
	}()
	must(t, n.XID(t.Context(), 1, 48))
	if r := <-answered; r.Ret != 0 || r.Numbers[0] != 1 || r.Numbers[2] != 48 {
		t.Errorf("a client that waited got %+v, want XID 48 of GPU 1", r)
	}
}

func TestFaultScript(t *testing.T) {
	n := newNode(t, "H100", "H100")
	c := startClient(t, n)
	c.want("init", 0, nil, nvml.SUCCESS)
	one := 1
	must(t, n.Faults(fakenvml.Fault{Call: "nvmlDeviceGetTemperature", GPU: &one, Return: int(nvml.ERROR_UNKNOWN), After: 2, Times: 1}))
	for i, want := range []nvml.Return{nvml.SUCCESS, nvml.SUCCESS, nvml.ERROR_UNKNOWN, nvml.SUCCESS} {
		if got := c.ask("temperature", 1).Ret; got != int(want) {
			t.Errorf("call %d answered %d, want %d", i, got, want)
		}
		c.want("temperature", 0, nil, nvml.SUCCESS, 34)
	}
	must(t, n.Faults(fakenvml.Fault{Call: "nvmlDeviceGetRemapped*", Exit: 127}))
	if _, err := c.try("remapped", 0); err == nil {
		t.Error("a call that ends the process was answered")
	}
	if err := c.cmd.Wait(); c.cmd.ProcessState.ExitCode() != 127 {
		t.Errorf("the client ended with %v, want status 127", err)
	}
}

func TestACallThatHangsKeepsNoOneElse(t *testing.T) {
	n := newNode(t, "H100")
	must(t, n.Faults(fakenvml.Fault{Call: "nvmlDeviceGetTemperature", Hang: true, Times: 1}))
	a, b := startClient(t, n), startClient(t, n)
	a.want("init", 0, nil, nvml.SUCCESS)
	must(t, a.in.Encode(question{Op: "temperature"}))
	b.want("init", 0, nil, nvml.SUCCESS)
	for asked := 0; ; asked++ { // until the first call has met its fault
		if asked == 5000 {
			t.Fatal("the call that is to hang never began")
		}
		s, err := n.State(t.Context())
		must(t, err)
		if s.Calls["nvmlDeviceGetTemperature"] == 1 {
			break
		}
	}
	b.want("temperature", 0, nil, nvml.SUCCESS, 34)
	a.kill()
	s, err := n.State(t.Context())
	must(t, err)
	if len(s.Clients) != 1 || s.Clients[0].PID != int64(b.cmd.Process.Pid) {
		t.Errorf("clients %+v after one was killed, want only %d", s.Clients, b.cmd.Process.Pid)
	}
}

func TestADriverThatIsNotThere(t *testing.T) {
	n := newNode(t, "H100")
	c := startClient(t, n)
	must(t, n.SetNode(t.Context(), "driver_loaded=0"))
	c.want("init", 0, nil, nvml.ERROR_DRIVER_NOT_LOADED)
	must(t, n.SetNode(t.Context(), "driver_loaded=1", "library_mismatch=1"))
	c.want("init", 0, nil, nvml.ERROR_LIB_RM_VERSION_MISMATCH)
	must(t, n.Reload(t.Context()))
	c.want("init", 0, nil, nvml.SUCCESS)
	c.want("open", 0, nil, nvml.SUCCESS)
	if err := n.Reload(t.Context()); err == nil || !strings.Contains(err.Error(), "in use by process") {
		t.Errorf("a driver in use was reloaded: %v", err)
	}
	must(t, n.Reboot(t.Context()))
	c.want("temperature", 0, nil, nvml.ERROR_GPU_IS_LOST)
}

func TestMIGModeFollowsTheGeneration(t *testing.T) {
	n := newNode(t, "A100-80", "H100")
	c := startClient(t, n)
	c.want("init", 0, nil, nvml.SUCCESS)
	on := []uint32{1}
	c.want("set-mig", 0, on, nvml.SUCCESS, int64(nvml.ERROR_RESET_REQUIRED))
	c.want("mig", 0, nil, nvml.SUCCESS, 0, 1)
	if err := n.Reset(t.Context(), 0); err == nil || !strings.Contains(err.Error(), "in use by another client") {
		t.Errorf("a GPU in use was reset: %v", err)
	}
	holder, err := n.Hold(t.Context(), 1)
	must(t, err)
	c.want("set-mig", 1, on, nvml.SUCCESS, int64(nvml.ERROR_IN_USE))
	must(t, holder.Process.Kill())
	holder.Wait() //nolint:errcheck // it was killed
	c.want("set-mig", 1, on, nvml.SUCCESS, int64(nvml.SUCCESS))
	c.want("mig", 1, nil, nvml.SUCCESS, 1, 1)
	c.want("shutdown", 0, nil, nvml.SUCCESS)
	must(t, n.Reset(t.Context(), 0))
	c.want("init", 0, nil, nvml.SUCCESS)
	c.want("mig", 0, nil, nvml.SUCCESS, 1, 1)
	c.want("shutdown", 0, nil, nvml.SUCCESS)
	must(t, n.Reboot(t.Context()))
	c.want("init", 0, nil, nvml.SUCCESS)
	c.want("mig", 0, nil, nvml.SUCCESS, 1, 1)
	c.want("mig", 1, nil, nvml.SUCCESS, 0, 0)
}

func TestVariantsLackWhatTheirHeaderLacks(t *testing.T) {
	for _, tc := range []struct {
		variant fakenvml.Variant
		lacks   string
	}{
		{fakenvml.Variant{Header: "v0.12.4-1"}, "nvmlDeviceGetMarginTemperature"},
		{fakenvml.Variant{Header: "v0.12.9-0"}, "nvmlDeviceGetRemappedRows_v2"},
		{fakenvml.Variant{Without: []string{"nvmlDeviceGetTemperature"}}, "nvmlDeviceGetTemperature"},
	} {
		c := startClient(t, newVariant(t, tc.variant, "H100"))
		c.want("init", 0, nil, nvml.SUCCESS)
		for name, want := range map[string]nvml.Return{tc.lacks: nvml.ERROR_FUNCTION_NOT_FOUND, "nvmlDeviceGetPowerUsage": nvml.SUCCESS} {
			must(t, c.in.Encode(question{Op: "symbol", Text: name}))
			var r reply
			must(t, c.out.Decode(&r))
			if r.Ret != int(want) {
				t.Errorf("%+v: looking up %s answered %d, want %d", tc.variant, name, r.Ret, want)
			}
		}
	}
}
