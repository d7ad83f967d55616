package fakenvml

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// Node is a fake node: a state file, and the fault script beside it.
type Node struct {
	lib  *Library
	path string
}

// State is what a node's file holds.
type State struct {
	Driver  string            `json:"driver"`
	NVML    string            `json:"nvml"`
	Values  map[string]int64  `json:"values"`
	GPUs    []GPU             `json:"gpus"`
	Clients []Client          `json:"clients"`
	Calls   map[string]uint64 `json:"calls"` // of NVML's functions, since ClearCalls
}

// GPU is one GPU of a node. Values has every number that Set can change.
type GPU struct {
	Product   string           `json:"product"`
	UUID      string           `json:"uuid"`
	Serial    string           `json:"serial"`
	Bus       string           `json:"bus"`
	Values    map[string]int64 `json:"values"`
	Instances []GPUInstance    `json:"instances"`
}

// GPUInstance is an instance in a MIG layout.
type GPUInstance struct {
	ID      uint32            `json:"id"`
	Profile string            `json:"profile"`
	Start   uint32            `json:"start"`
	Size    uint32            `json:"size"`
	Compute []ComputeInstance `json:"compute"`
}

// ComputeInstance is a part of a GPU instance that can compute.
type ComputeInstance struct {
	ID    uint32 `json:"id"`
	Start uint32 `json:"start"`
	Size  uint32 `json:"size"`
	UUID  string `json:"uuid"`
}

// Client is a living process that has initialized the library.
type Client struct {
	PID     int64  `json:"pid"`
	Opened  uint32 `json:"opened"`  // the GPUs that it holds, as bits
	Compute uint32 `json:"compute"` // the GPUs that it computes on, as bits
}

// NewNode makes a node with a GPU of each of the products, which are A30,
// A100-40, A100-80, H100, H200, B200 and GH200, in a new file.
func (l *Library) NewNode(ctx context.Context, path string, products ...string) (*Node, error) {
	n := &Node{lib: l, path: path}
	_, err := n.control(ctx, append([]string{"create"}, products...)...)
	return n, err
}

// OpenNode is a node that NewNode made.
func (l *Library) OpenNode(path string) *Node {
	return &Node{lib: l, path: path}
}

// Env is what a program needs to find the library and the node.
func (n *Node) Env() []string {
	return []string{"LD_LIBRARY_PATH=" + n.lib.Dir, "FAKENVML_STATE=" + n.path}
}

// Command is one of the programs beside the library, on this node.
func (n *Node) Command(ctx context.Context, program string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, filepath.Join(n.lib.Dir, program), args...)
	cmd.Env = append(os.Environ(), n.Env()...)
	return cmd
}

func (n *Node) control(ctx context.Context, args ...string) ([]byte, error) {
	var said strings.Builder
	cmd := n.Command(ctx, "fakenvml-state", args...)
	cmd.Stderr = &said
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("fakenvml-state %s: %w: %s", strings.Join(args, " "), err, strings.TrimSpace(said.String()))
	}
	return out, nil
}

// Set changes values of a GPU, all at once: "temperature=95", or by a
// difference, "dbe_volatile=+1".
func (n *Node) Set(ctx context.Context, gpu int, values ...string) error {
	_, err := n.control(ctx, append([]string{"set", strconv.Itoa(gpu)}, values...)...)
	return err
}

// SetNode changes values of the node: "driver_loaded=0", "driver=570.1".
func (n *Node) SetNode(ctx context.Context, values ...string) error {
	_, err := n.control(ctx, append([]string{"set", "node"}, values...)...)
	return err
}

// Event lets an event of an NVML type happen on a GPU.
func (n *Node) Event(ctx context.Context, gpu int, kind, data uint64) error {
	_, err := n.control(ctx, "event", strconv.Itoa(gpu), strconv.FormatUint(kind, 10), strconv.FormatUint(data, 10))
	return err
}

// XID lets a critical XID happen on a GPU.
func (n *Node) XID(ctx context.Context, gpu int, xid uint64) error {
	return n.Event(ctx, gpu, 8, xid)
}

// Reset resets a GPU, as nvidia-smi would; it fails while others hold it.
func (n *Node) Reset(ctx context.Context, gpu int) error {
	_, err := n.control(ctx, "reset", strconv.Itoa(gpu))
	return err
}

// Reload unloads the driver and loads it again; it fails while it is in use.
func (n *Node) Reload(ctx context.Context) error {
	_, err := n.control(ctx, "reload")
	return err
}

// Reboot is a boot of the node. Clients of the boot before find their GPUs lost.
func (n *Node) Reboot(ctx context.Context) error {
	_, err := n.control(ctx, "reboot")
	return err
}

// ClearCalls begins the count of calls anew.
func (n *Node) ClearCalls(ctx context.Context) error {
	_, err := n.control(ctx, "clear-calls")
	return err
}

// State reads the node.
func (n *Node) State(ctx context.Context) (*State, error) {
	out, err := n.control(ctx, "dump")
	if err != nil {
		return nil, err
	}
	s := new(State)
	if err := json.Unmarshal(out, s); err != nil {
		return nil, fmt.Errorf("read the state of %s: %w", n.path, err)
	}
	return s, nil
}

// Hold starts a process that has a GPU open until it is killed; with compute
// it computes there, on the whole GPU or on the instance of two ids.
func (n *Node) Hold(ctx context.Context, gpu int, compute ...string) (*exec.Cmd, error) {
	cmd := n.Command(ctx, "fakenvml-state", append([]string{"hold", strconv.Itoa(gpu)}, compute...)...)
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	if line, err := bufio.NewReader(out).ReadString('\n'); err != nil {
		return nil, fmt.Errorf("hold GPU %d: said %q: %w", gpu, line, err)
	}
	return cmd, nil
}

// Fault is a line of the fault script. Without Return, Exit and Signal a call
// is only slow.
type Fault struct {
	Call    string // an NVML function, or a prefix and "*"; empty is any
	GPU     *int   // nil is any, and calls that have none
	Return  int    // NVML's code; 0 lets the call go on
	After   int    // calls that pass first
	Times   int    // 0 is from then on
	Latency time.Duration
	Hang    bool // for ever
	Exit    int  // the process ends with this status, as it does for a missing symbol (127)
	Signal  int  // the process dies of this signal
}

func (f Fault) line() string {
	words := []string{"call=" + f.Call}
	if f.Call == "" {
		words[0] = "call=*"
	}
	add := func(ok bool, format string, value any) {
		if ok {
			words = append(words, fmt.Sprintf(format, value))
		}
	}
	if f.GPU != nil {
		add(true, "gpu=%d", *f.GPU)
	}
	add(f.Return != 0, "ret=%d", f.Return)
	add(f.After != 0, "after=%d", f.After)
	add(f.Times != 0, "times=%d", f.Times)
	add(f.Latency != 0, "latency=%dus", f.Latency.Microseconds())
	add(f.Hang, "sleep=%s", "inf")
	add(f.Exit != 0, "exit=%d", f.Exit)
	add(f.Signal != 0, "signal=%d", f.Signal)
	return strings.Join(words, " ") + "\n"
}

// Faults replaces the fault script, at once, and counts from the start.
func (n *Node) Faults(faults ...Fault) error {
	var b strings.Builder
	for _, f := range faults {
		b.WriteString(f.line())
	}
	tmp, err := os.CreateTemp(filepath.Dir(n.path), ".faults-")
	if err != nil {
		return err
	}
	defer tmp.Close()
	if _, err := tmp.WriteString(b.String()); err != nil {
		return err
	}
	if err := tmp.Chmod(0o644); err != nil {
		return err
	}
	return os.Rename(tmp.Name(), n.path+".faults")
}
