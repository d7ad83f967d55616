//go:build cgo

// Package nvml asks NVIDIA's driver through its library, libnvidia-ml.so.1. It
// is linked into millwright-gpu alone.
//
// go-nvml binds the library's functions when they are called first, and one that
// the installed driver lacks ends the process there, with exit code 127. So no
// function is called but through call, by a name that the table in symbols.go
// has with all that it needs; what the library lacks was found out before. The
// library is initialised once and never shut down: the process ends instead.
package nvml

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/NVIDIA/go-nvml/pkg/dl"
	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpuaas/millwright/agent/internal/clock"
	"github.com/gpuaas/millwright/agent/internal/gpu/serve"
	gpuv1 "github.com/gpuaas/millwright/proto/millwright/gpu/v1"
)

// Library is the driver's library. It implements [serve.Driver].
type Library struct {
	clock clock.Clock
	api   gonvml.Interface
	has   map[string]bool
	calls atomic.Uint64

	mu      sync.Mutex
	devices []*device // as last enumerated; replaced, not changed; guarded by mu
	watch   watch     // used by Wait alone
}

var _ serve.Driver = (*Library)(nil)

// device is one GPU.
type device struct {
	handle gonvml.Device // nil without one
	ret    gonvml.Return // why it has none
	index  int
	uuid   string
	pci    string
	links  []int // the NVLinks that it has
}

// New returns a Library that is not loaded.
func New(c clock.Clock) *Library { return &Library{clock: c} }

// Calls is how many functions of the library were called.
func (l *Library) Calls() uint64 { return l.calls.Load() }

// systemLibrary is the name under which the dynamic loader finds the library.
const systemLibrary = "libnvidia-ml.so.1"

// without these nothing can be asked.
var essential = []string{"Init", "DeviceGetCount", "DeviceGetHandleByIndex", "DeviceGetUUID", "DeviceGetPciInfo"}

// Start loads the library, looks for every function of the table, initialises
// the driver and enumerates the GPUs.
func (l *Library) Start(path string) (int, error) {
	if err := l.open(path); err != nil {
		return 0, err
	}
	if err := l.enumerate(); err != nil {
		return 0, err
	}
	return len(l.all()), nil
}

// open loads the library, looks for every function of the table and initialises
// the driver.
func (l *Library) open(path string) error {
	if path == "" {
		path = systemLibrary
	}
	// It stays open: go-nvml's own handle is another to the same library.
	lib := dl.New(path, dl.RTLD_LAZY|dl.RTLD_GLOBAL)
	if err := lib.Open(); err != nil {
		return &serve.Failure{
			State:   gpuv1.DriverState_DRIVER_STATE_LIBRARY_MISSING,
			Message: fmt.Sprintf("the driver's library cannot be loaded: %v; install the NVIDIA driver's libraries", err),
		}
	}
	l.has = map[string]bool{}
	for name, groups := range symbols {
		l.has[name] = !slices.ContainsFunc(groups, func(any []string) bool {
			return !slices.ContainsFunc(any, func(symbol string) bool { return lib.Lookup(symbol) == nil })
		})
	}
	for _, name := range essential {
		if !l.has[name] {
			return &serve.Failure{
				State:   gpuv1.DriverState_DRIVER_STATE_SYMBOL_MISSING,
				Message: fmt.Sprintf("%s has no function %s, without which no GPU can be asked: it is no NVML library, or one that is too old", path, strings.Join(symbols[name][0], " or ")),
			}
		}
	}
	l.api = gonvml.New(gonvml.WithLibraryPath(path))
	if _, ret := call(l, "Init", func() (none, gonvml.Return) { return none{}, l.api.Init() }); ret != gonvml.SUCCESS {
		return unstarted(ret)
	}
	return nil
}

// none is the result of a function that has none.
type none struct{}

// call calls a function of the library, unless the library lacks what it needs:
// then it returns ERROR_FUNCTION_NOT_FOUND.
func call[T any](l *Library, name string, fn func() (T, gonvml.Return)) (T, gonvml.Return) {
	if !l.has[name] {
		var zero T
		return zero, gonvml.ERROR_FUNCTION_NOT_FOUND
	}
	l.calls.Add(1)
	return fn()
}

// lacks are the functions of the table that the library has not, sorted.
func (l *Library) lacks() []string {
	var out []string
	for name, has := range l.has {
		if !has {
			out = append(out, "nvml"+name)
		}
	}
	slices.Sort(out)
	return out
}

// unstarted says why the driver could not be initialised.
func unstarted(ret gonvml.Return) error {
	f := &serve.Failure{State: gpuv1.DriverState_DRIVER_STATE_ERROR, Code: int32(ret), Message: "the driver cannot be initialised: " + word(ret)}
	switch ret {
	case gonvml.ERROR_LIB_RM_VERSION_MISMATCH:
		f.State = gpuv1.DriverState_DRIVER_STATE_VERSION_MISMATCH
		f.Message = "the kernel's driver and the library are of two versions" + kernelVersion() + ", as after an upgrade of the packages: load the driver again or reboot; programs that use GPUs fail until then"
	case gonvml.ERROR_DRIVER_NOT_LOADED:
		f.State = gpuv1.DriverState_DRIVER_STATE_DRIVER_NOT_LOADED
		f.Message = "the kernel's driver is not loaded: modprobe nvidia, and see the kernel's log if that fails"
	case gonvml.ERROR_NO_PERMISSION:
		f.Message += ": the agent may not open /dev/nvidiactl; see DeviceAllow= of its unit"
	default: // the driver's own words are all that is known
	}
	return f
}

// kernelVersion is what the loaded module says of itself.
func kernelVersion() string {
	b, err := os.ReadFile("/sys/module/nvidia/version")
	if err != nil {
		return ""
	}
	return " (the kernel's is " + strings.TrimSpace(string(b)) + ")"
}

// enumerate finds the GPUs. One that was known and has no handle any more keeps
// its place and its name.
func (l *Library) enumerate() error {
	n, ret := call(l, "DeviceGetCount", func() (int, gonvml.Return) { return l.api.DeviceGetCount() })
	if ret != gonvml.SUCCESS {
		return failed("DeviceGetCount", ret)
	}
	old := l.all()
	var found []*device
	for i := range n {
		d := &device{index: i}
		if d.handle, d.ret = call(l, "DeviceGetHandleByIndex", func() (gonvml.Device, gonvml.Return) { return l.api.DeviceGetHandleByIndex(i) }); d.ret == gonvml.SUCCESS {
			d.uuid, _ = call(l, "DeviceGetUUID", func() (string, gonvml.Return) { return l.api.DeviceGetUUID(d.handle) })
			if p, ret := call(l, "DeviceGetPciInfo", func() (gonvml.PciInfo, gonvml.Return) { return l.api.DeviceGetPciInfo(d.handle) }); ret == gonvml.SUCCESS {
				d.pci = place(p)
			}
			d.links = l.linksOf(d)
		}
		if i < len(old) && d.uuid == "" {
			d.uuid, d.pci, d.links = old[i].uuid, old[i].pci, old[i].links
			if d.handle == nil && old[i].handle != nil {
				d.handle = old[i].handle // it will say itself what is wrong with it
			}
		}
		found = append(found, d)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.devices = found
	return nil
}

// all are the GPUs as last enumerated.
func (l *Library) all() []*device {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.devices
}

// linksOf finds the NVLinks that a GPU has: those whose state it can say.
func (l *Library) linksOf(d *device) []int {
	var out []int
	for link := range gonvml.NVLINK_MAX_LINKS {
		_, ret := call(l, "DeviceGetNvLinkState", func() (gonvml.EnableState, gonvml.Return) { return l.api.DeviceGetNvLinkState(d.handle, link) })
		switch {
		case ret == gonvml.SUCCESS:
			out = append(out, link)
		case link == 0:
			return nil
		}
	}
	return out
}

// place writes a PCI place as the kernel does.
func place(p gonvml.PciInfo) string {
	return fmt.Sprintf("%04x:%02x:%02x.0", p.Domain, p.Bus, p.Device)
}

// failed is the error of a question that has no answer at all.
func failed(name string, ret gonvml.Return) error {
	f := &serve.Failure{State: gpuv1.DriverState_DRIVER_STATE_ERROR, Code: int32(ret), Message: fmt.Sprintf("nvml%s: %s", name, word(ret))}
	var known *serve.Failure
	if err := unstarted(ret); errors.As(err, &known) && known.State != f.State {
		return err
	}
	return f
}

// words are the results that the driver may give, as the header names them.
// go-nvml's own words come from a function of the library that may be missing.
var words = map[gonvml.Return]string{
	gonvml.ERROR_UNINITIALIZED: "UNINITIALIZED", gonvml.ERROR_INVALID_ARGUMENT: "INVALID_ARGUMENT", gonvml.ERROR_NOT_SUPPORTED: "NOT_SUPPORTED",
	gonvml.ERROR_NO_PERMISSION: "NO_PERMISSION", gonvml.ERROR_NOT_FOUND: "NOT_FOUND", gonvml.ERROR_INSUFFICIENT_SIZE: "INSUFFICIENT_SIZE",
	gonvml.ERROR_INSUFFICIENT_POWER: "INSUFFICIENT_POWER", gonvml.ERROR_DRIVER_NOT_LOADED: "DRIVER_NOT_LOADED", gonvml.ERROR_TIMEOUT: "TIMEOUT",
	gonvml.ERROR_IRQ_ISSUE: "IRQ_ISSUE", gonvml.ERROR_LIBRARY_NOT_FOUND: "LIBRARY_NOT_FOUND", gonvml.ERROR_FUNCTION_NOT_FOUND: "FUNCTION_NOT_FOUND",
	gonvml.ERROR_CORRUPTED_INFOROM: "CORRUPTED_INFOROM", gonvml.ERROR_GPU_IS_LOST: "GPU_IS_LOST", gonvml.ERROR_RESET_REQUIRED: "RESET_REQUIRED",
	gonvml.ERROR_OPERATING_SYSTEM: "OPERATING_SYSTEM", gonvml.ERROR_LIB_RM_VERSION_MISMATCH: "LIB_RM_VERSION_MISMATCH", gonvml.ERROR_IN_USE: "IN_USE",
	gonvml.ERROR_MEMORY: "MEMORY", gonvml.ERROR_NO_DATA: "NO_DATA", gonvml.ERROR_INSUFFICIENT_RESOURCES: "INSUFFICIENT_RESOURCES",
	gonvml.ERROR_ARGUMENT_VERSION_MISMATCH: "ARGUMENT_VERSION_MISMATCH", gonvml.ERROR_NOT_READY: "NOT_READY", gonvml.ERROR_GPU_NOT_FOUND: "GPU_NOT_FOUND",
	gonvml.ERROR_UNKNOWN: "UNKNOWN",
}

func word(ret gonvml.Return) string {
	if w := words[ret]; w != "" {
		return fmt.Sprintf("NVML_ERROR_%s (%d)", w, int32(ret))
	}
	return fmt.Sprintf("NVML error %d", int32(ret))
}
