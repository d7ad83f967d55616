// Package gpu shows GPU health on real nodes, over a stand-in for the driver's
// library.
package gpu

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	gpuv1 "github.com/gpuaas/millwright/proto/millwright/gpu/v1"
	healthv1 "github.com/gpuaas/millwright/proto/millwright/health/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/test/cluster/clustertest"
	"github.com/gpuaas/millwright/test/fakenvml"
)

const (
	raised = healthv1.State_STATE_RAISED
	ok     = healthv1.State_STATE_OK
	// patience is longer than the minute that the driver has for its start, which
	// may be long without persistence mode.
	patience = 2 * time.Minute
	// period is that of the node whose driver fails, and promised how long it may
	// take from what is done to the driver until an operator reads of it.
	period   = 5 * time.Second
	promised = 2 * period
	kmsg     = "/run/fakenvml/kmsg"
	library  = "/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1"
)

func TestGPU(t *testing.T) {
	c := clustertest.Up(t, clustertest.Config{Nodes: 4})
	lib, err := fakenvml.Build(t.Context(), fakenvml.Variant{})
	if err != nil {
		t.Fatal(err)
	}
	for _, n := range []string{"n1", "n3", "n4"} {
		equip(t, c, n, lib, "1s", "2s")
	}
	equip(t, c, "n2", lib, period.String(), period.String())
	t.Run("cluster", func(t *testing.T) {
		for on, story := range map[string]func(*testing.T, *node){"n1": faults, "n2": drivers, "n4": cut} {
			t.Run(map[string]string{"n1": "faults", "n2": "driver", "n4": "cut"}[on], func(t *testing.T) {
				t.Parallel()
				story(t, &node{t: t, Cluster: c.With(t), name: on})
			})
		}
	})
	// It kills the server, on which the others stand.
	t.Run("killed", func(t *testing.T) { killed(t, &node{t: t, Cluster: c.With(t), name: "n3"}) })
}

// equip gives a node the stand-in where a driver's library is, with eight GPUs,
// and has its agent look after them.
func equip(t *testing.T, c *clustertest.Cluster, name string, lib *fakenvml.Library, period, slow string) {
	t.Helper()
	for from, to := range map[string]string{"libnvidia-ml.so.1": library, "fakenvml-state": "/usr/local/bin/fakenvml-state"} {
		b, err := os.ReadFile(filepath.Join(lib.Dir, from))
		if err != nil {
			t.Fatal(err)
		}
		if err := c.Machine(name).WriteFile(t.Context(), to, b, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	c.Sh(name, `mkdir -p /run/fakenvml; : > `+kmsg+`; fakenvml-state create `+strings.Repeat("H100 ", 8)+`
printf 'gpu:\n  mode: on\n  period: `+period+`\n  slow_period: `+slow+`\n  kernel_log: `+kmsg+`\n' >> /etc/millwright/agent.yaml
systemctl restart millwrightd`)
}

// node is a node with GPUs.
type node struct {
	*clustertest.Cluster
	t    *testing.T
	name string
	line int // of the log
}

func (n *node) sh(line string) string { n.t.Helper(); return n.Sh(n.name, line) }

// set changes values of a GPU, or of the node.
func (n *node) set(of, values string) { n.t.Helper(); n.sh("fakenvml-state set " + of + " " + values) }

// logs writes lines of the kernel's log about a GPU, numbered and with the time
// since the boot, as the kernel does.
func (n *node) logs(gpu string, xids ...int) {
	n.t.Helper()
	for _, xid := range xids {
		n.line++
		n.sh(fmt.Sprintf(`echo "4,%d,$(awk '{printf "%%d", $1*1000000}' /proc/uptime),-;NVRM: Xid (PCI:%s): %d, pid=7, name=train, words" >> %s`, n.line, gpu, xid, kmsg))
	}
}

func (n *node) millctl(args ...string) string {
	n.t.Helper()
	out, err := n.Millctl(n.t.Context(), args...)
	if err != nil {
		n.t.Fatal(err)
	}
	return out.Stdout
}

// read reads what millctl says as JSON.
func (n *node) read(m proto.Message, args ...string) {
	n.t.Helper()
	if err := protojson.Unmarshal([]byte(n.millctl(append(args, "-o", "json")...)), m); err != nil {
		n.t.Fatalf("%v: %v", args, err)
	}
}

// gpus are those of the node, as the server has them.
func (n *node) gpus() []*healthv1.GpuHealth {
	n.t.Helper()
	var list healthv1.ListGpusResponse
	n.read(&list, "gpu", "list", "-n", n.name)
	return list.GetGpus()
}

// well reports whether all eight are.
func (n *node) well() bool {
	n.t.Helper()
	gpus := n.gpus()
	for _, g := range gpus {
		if g.GetState() != ok {
			return false
		}
	}
	return len(gpus) == 8
}

// await polls until the node's health is as it should be.
func (n *node) await(what string, is func() bool) {
	n.t.Helper()
	n.within(patience, what, is)
}

func (n *node) within(most time.Duration, what string, is func() bool) {
	n.t.Helper()
	ctx, cancel := context.WithTimeout(n.t.Context(), most)
	defer cancel()
	tick := time.NewTicker(200 * time.Millisecond)
	defer tick.Stop()
	for !is() {
		select {
		case <-ctx.Done():
			n.t.Fatalf("%s: not within %v:\n%s", what, most, n.wrong())
		case <-tick.C:
		}
	}
}

// wrong is the node's health without what is well.
func (n *node) wrong() string {
	var lines []string
	for line := range strings.Lines(n.millctl("health", "get", n.name)) {
		if !strings.Contains(line, "WITHIN_LIMITS") {
			lines = append(lines, line)
		}
	}
	return strings.Join(lines, "")
}

// state is that of a condition of a GPU.
func (n *node) state(gpu int, code string) healthv1.State {
	n.t.Helper()
	for _, g := range n.gpus() {
		if int(g.GetIndex()) != gpu || g.Index == nil {
			continue
		}
		for _, c := range g.GetConditions() {
			if c.GetCondition().GetCode() == code {
				return c.GetCondition().GetState()
			}
		}
		return ok
	}
	return healthv1.State_STATE_UNSPECIFIED
}

// place is where a GPU is, as the driver's lines name it.
func (n *node) place(gpu int) string {
	n.t.Helper()
	return strings.TrimSuffix(n.gpus()[gpu].GetPciBusId(), ".0")
}

// faults: what breaks shows, is explained, and clears.
func faults(t *testing.T, n *node) {
	n.await("eight GPUs are well", n.well)
	for i, g := range n.gpus() {
		if int(g.GetIndex()) != i || g.GetModel() == "" || !strings.HasPrefix(g.GetUuid(), "GPU-") {
			t.Errorf("GPU %d is %v", i, g)
		}
	}
	n.await("each GPU has a sample", func() bool {
		return !slices.ContainsFunc(n.gpus(), func(g *healthv1.GpuHealth) bool { return g.GetSample().GetGpuCelsius() == 0 })
	})
	if kib := strings.TrimSpace(n.sh(`cat /proc/$(pgrep -x millwrightd)/status /proc/$(pgrep -x millwright-gpu)/status | awk '/^VmRSS/ {s += $2} END {print s}'`)); !atMost(kib, 64<<10) {
		t.Errorf("millwrightd and millwright-gpu have %s KiB together, with eight GPUs; at most 64 MiB are promised", kib)
	} else {
		t.Logf("millwrightd and millwright-gpu have %s KiB together", kib)
	}
	n.set("3", "temperature=99")
	n.await("GPU 3 is too hot", func() bool { return n.state(3, "gpu.temperature") == raised })
	n.says("3", "GPU is too hot", "99 C", "means:", "do: look at the cooling")
	n.set("3", "temperature=40")
	n.await("GPU 3 is well again", n.well)
	n.logs(n.place(5), 79)
	n.await("GPU 5 is off the bus", func() bool { return n.state(5, "gpu.xid.79") == raised })
	n.says("5", "gpu.xid.79", "millctl task run system.reboot -n "+n.name)
	n.await("the node says that its GPUs are not ready", func() bool {
		return slices.ContainsFunc(strings.Split(n.millctl("node", "get", n.name), "\n"), func(line string) bool {
			f := strings.Fields(line)
			return len(f) > 1 && f[0] == "GPUReady" && f[1] == "false"
		})
	})
}

// atMost reports whether a text is a number that is not 0, and not more than most.
func atMost(text string, most int) bool {
	n, err := strconv.Atoi(text)
	return err == nil && n > 0 && n <= most
}

// says waits until gpu get says all of the words: the change of a condition, and
// the report with its values, come one after the other.
func (n *node) says(gpu string, words ...string) {
	n.t.Helper()
	n.await("gpu get explains GPU "+gpu, func() bool {
		said := n.millctl("gpu", "get", n.name+"/"+gpu)
		return !slices.ContainsFunc(words, func(w string) bool { return !strings.Contains(said, w) })
	})
}

// drivers: each way in which the driver fails is told by its condition within two
// periods, the agent is the same process, and a task runs meanwhile.
func drivers(t *testing.T, n *node) {
	n.await("eight GPUs are well", n.well)
	pid := n.sh("systemctl show -P MainPID millwrightd")
	uuid := n.gpus()[6].GetUuid()
	const child, hang = "kill $(pgrep -x millwright-gpu)", "printf 'call=%s sleep=inf\\n' > /run/fakenvml/state.faults"
	const fault, faultless = "printf 'call=nvmlDeviceGetTemperature %s\\n' > /run/fakenvml/state.faults", "rm /run/fakenvml/state.faults"
	for _, tc := range []struct{ name, code, later, words, damage, mend string }{
		{"a query hangs", "node.driver_no_answer", "node.driver_unresponsive", "sample", fmt.Sprintf(hang, "nvmlDeviceGetTemperature"), faultless},
		{"Init hangs", "node.driver_no_answer", "node.driver_unresponsive", "initialisation", fmt.Sprintf(hang, "nvmlInit_v2") + "; " + child, faultless},
		{"a crash", "node.driver_crashed", "", "segmentation fault", fmt.Sprintf(fault, "signal=11"), faultless},
		{"a symbol is missing", "node.symbol_missing", "", "exit code 127", fmt.Sprintf(fault, "exit=127"), faultless},
		{"library and driver differ", "node.driver_mismatch", "", "", "fakenvml-state set node library_mismatch=1; " + child, "fakenvml-state set node library_mismatch=0"},
		{"no library", "node.library_missing", "", "libnvidia-ml.so.1", "mv " + library + " /root/lib; ldconfig; " + child, "mv /root/lib " + library + "; ldconfig"},
		{"a GPU is lost", "gpu.lost", "", "", "fakenvml-state set 6 lost=1", "fakenvml-state set 6 lost=0"},
		{"the count drops", "node.gpu_count", "", "missing: " + uuid, "fakenvml-state set 6 present=0", "fakenvml-state set 6 present=1"},
	} {
		begin := time.Now()
		n.sh(tc.damage)
		n.within(promised-time.Since(begin), tc.name+" is told", func() bool {
			said := n.raised()[tc.code]
			return said != "" && strings.Contains(said, tc.words)
		})
		t.Logf("%s: %s after %v", tc.name, tc.code, time.Since(begin).Round(100*time.Millisecond))
		if task := n.Do("system.command", n.name, "argv: [/bin/true]\n"); task.GetState() != taskv1.TaskState_TASK_STATE_SUCCEEDED {
			t.Errorf("%s: a task meanwhile is %s: %s", tc.name, task.GetState(), task.GetMessage())
		}
		if tc.later != "" {
			n.await(tc.name+" is "+tc.later+" at the deadline", func() bool { return n.raised()[tc.later] != "" })
		}
		n.sh(tc.mend)
		n.await(tc.name+", mended, all is well", n.mended)
	}
	if got := n.sh("systemctl show -P MainPID millwrightd"); got != pid {
		t.Errorf("the agent is process %s, and was %s", got, pid)
	}
}

// raised are the titles and words of the conditions that are raised, by code.
func (n *node) raised() map[string]string {
	n.t.Helper()
	words := make(map[string]string)
	var h healthv1.NodeHealth
	n.read(&h, "health", "get", n.name)
	for _, c := range h.GetConditions() {
		if c := c.GetCondition(); c.GetState() == raised {
			words[c.GetCode()] += c.GetTitle() + ": " + c.GetMessage() + "\n"
		}
	}
	return words
}

// mended reports whether nothing is wrong but a millwright-gpu that ended too
// often to be taken for well at once: this story ends it in most cases.
func (n *node) mended() bool {
	n.t.Helper()
	var h healthv1.NodeHealth
	n.read(&h, "health", "get", n.name)
	for _, c := range h.GetConditions() {
		bad := c.GetCondition().GetState() == raised || c.GetCondition().GetState() == healthv1.State_STATE_STALE
		if bad && (c.GetCondition().GetCode() != "node.driver_crashed" || !c.GetCondition().GetFlapping()) {
			return false
		}
	}
	return h.GetFreshness() == healthv1.Freshness_FRESHNESS_FRESH && h.GetDriver().GetState() == gpuv1.DriverState_DRIVER_STATE_OK
}

// once asks that each XID was raised exactly once, and counted as often as it was
// logged, in the server's history of the node.
func (n *node) once(xids ...int) {
	n.t.Helper()
	for _, xid := range xids {
		code := fmt.Sprintf("gpu.xid.%d", xid)
		n.await(code+" is raised", func() bool { return n.raised()[code] != "" })
	}
	times := make(map[string]int)
	var history healthv1.ListHealthChangesResponse
	n.read(&history, "health", "history", n.name)
	for _, change := range history.GetChanges() {
		if c := change.GetEdge().GetCondition(); c.GetState() == raised {
			times[c.GetCode()]++
			if c.GetCount() != 1 {
				n.t.Errorf("%s is counted %d times", c.GetCode(), c.GetCount())
			}
		}
	}
	for _, xid := range xids {
		if got := times[fmt.Sprintf("gpu.xid.%d", xid)]; got != 1 {
			n.t.Errorf("XID %d was raised %d times in the history", xid, got)
		}
	}
}

// killed: agent, millwright-gpu and server are killed while XIDs come.
func killed(t *testing.T, n *node) {
	n.await("eight GPUs are well", n.well)
	place := n.place(2)
	n.logs(place, 79)
	n.sh("systemctl kill -s KILL --kill-whom=main millwrightd")
	n.logs(place, 95)
	n.sh("pkill -KILL -x millwright-gpu || true")
	n.logs(place, 119)
	n.once(79, 95, 119)
	n.logs(place, 62)
	if err := n.KillServer(t.Context()); err != nil {
		t.Fatal(err)
	}
	n.logs(place, 64)
	if err := n.StartServer(t.Context()); err != nil {
		t.Fatal(err)
	}
	n.logs(place, 110)
	n.once(79, 95, 119, 62, 64, 110)
}

// cut: five minutes without a network.
func cut(t *testing.T, n *node) {
	n.await("eight GPUs are well", n.well)
	place := n.place(7)
	n.logs(place, 79)
	if err := n.Machine(n.name).Cut(t.Context()); err != nil {
		t.Fatal(err)
	}
	n.logs(place, 95, 119)
	n.await("the node is away", func() bool { return n.gpus()[0].GetReason() == "NODE_AWAY" })
	select {
	case <-t.Context().Done():
	case <-time.After(5 * time.Minute):
	}
	n.logs(place, 62)
	if err := n.Machine(n.name).Heal(t.Context()); err != nil {
		t.Fatal(err)
	}
	n.once(79, 95, 119, 62)
}
