package gpu_test

import (
	"fmt"
	"os"
	"slices"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/millwright/agent/internal/gpu/serve"
	gpuv1 "github.com/gpuaas/millwright/proto/millwright/gpu/v1"
)

// TestMain makes the test binary a stand-in for millwright-gpu: the real server
// before a driver that misbehaves as its argument says.
func TestMain(m *testing.M) {
	if len(os.Args) > 2 && os.Args[1] == "stand-in" {
		d := &standIn{faults: os.Args[2]}
		if d.has("exit127") {
			fmt.Fprintln(os.Stderr, "millwright-gpu: symbol lookup error: millwright-gpu: undefined symbol: nvmlDeviceGetName")
			os.Exit(127)
		}
		held := d.has("held")
		if err := serve.Serve(os.NewFile(3, "agent"), d); err != nil {
			os.Exit(1)
		}
		if held {
			<-time.After(time.Hour)
		}
		os.Exit(0)
	}
	os.Exit(withDir(m))
}

// built names the directory of what the tests build.
const built = "MILLWRIGHT_GPU_BUILT"

func withDir(m *testing.M) int {
	dir, err := os.MkdirTemp("", "millwright-gpu")
	if err != nil {
		panic(err)
	}
	defer func() { _ = os.RemoveAll(dir) }()
	if err := os.Setenv(built, dir); err != nil {
		panic(err)
	}
	return m.Run()
}

// standIn is a driver whose faults are named in a file, so that they can go.
type standIn struct {
	faults string
	calls  atomic.Uint64
}

func (d *standIn) has(fault string) bool {
	b, err := os.ReadFile(d.faults)
	return err == nil && slices.Contains(splitWords(string(b)), fault)
}

func (d *standIn) fault(at string) {
	d.calls.Add(1)
	switch {
	case d.has("hang-" + at):
		select {}
	case d.has("segv-" + at):
		syscall.Kill(os.Getpid(), syscall.SIGSEGV) //nolint:errcheck // it is the end
		select {}
	case d.has("undefined-" + at):
		fmt.Fprintln(os.Stderr, "millwright-gpu: symbol lookup error: millwright-gpu: undefined symbol: nvmlDeviceGetName")
		os.Exit(127)
	}
}

func (d *standIn) Start(string) (int, error) {
	d.fault("init")
	if d.has("mismatch") {
		return 0, &serve.Failure{State: gpuv1.DriverState_DRIVER_STATE_VERSION_MISMATCH, Code: 18, Message: "two versions"}
	}
	if d.has("none") {
		return 0, nil
	}
	return 8, nil
}

func (d *standIn) Inventory() (*gpuv1.Inventory, error) {
	d.fault("inventory")
	return &gpuv1.Inventory{DriverVersion: proto.String("1.2"), Gpus: []*gpuv1.Gpu{{Index: 0}}}, nil
}

func (d *standIn) Sample(tier gpuv1.Tier) (*gpuv1.Sample, error) {
	d.fault("sample")
	return &gpuv1.Sample{Tier: tier, Count: proto.Uint32(8)}, nil
}

func (d *standIn) Wait(most time.Duration) ([]*gpuv1.GpuEvent, error) {
	if d.has("event") {
		return []*gpuv1.GpuEvent{{Type: 8, Data: 79}}, nil
	}
	d.fault("wait")
	timer := time.NewTimer(most)
	defer timer.Stop()
	<-timer.C
	return nil, nil
}

func (d *standIn) Calls() uint64 { return d.calls.Load() }
