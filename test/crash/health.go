package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	healthv1 "github.com/gpuaas/millwright/proto/millwright/health/v1"
	"github.com/gpuaas/millwright/test/fakenvml"
)

// health is the story of a node whose GPUs fail one after the other. The
// driver's library is a stand-in, and so is the kernel's log.
func health() []story {
	s := members()[0]
	s.kind, s.strikes, s.setup, s.custom = "(XIDs are logged)", "health.tell.", equip, xids
	return []story{s}
}

const (
	kernelLog  = "/run/fakenvml/kmsg"
	configKept = "/root/agent.yaml.before-gpus"
	// withoutGPUs takes from a node what equip gave it.
	withoutGPUs = "mv " + configKept + " /etc/millwright/agent.yaml; systemctl restart millwrightd.service"
)

// equip gives the node eight GPUs, and waits until the server has them, all well.
func equip(ctx context.Context, t *trial) error {
	lib, err := fakenvml.Build(ctx, fakenvml.Variant{})
	if err != nil {
		return err
	}
	for from, to := range map[string]string{"libnvidia-ml.so.1": "/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1", "fakenvml-state": "/usr/local/bin/fakenvml-state"} {
		b, err := os.ReadFile(filepath.Join(lib.Dir, from))
		if err != nil {
			return err
		}
		if err := t.node.WriteFile(ctx, to, b, 0o755); err != nil {
			return err
		}
	}
	// The log goes on where an earlier trial on this node has left it.
	if _, err := t.sh(ctx, `set -e; mkdir -p /run/fakenvml; touch `+kernelLog+`; test -e `+configKept+` || cp /etc/millwright/agent.yaml `+configKept+`
cp `+configKept+` /etc/millwright/agent.yaml; test "$(fakenvml-state dump 2>/dev/null | grep -o '"product":"H100"' | wc -l)" = 8 || { rm -f /run/fakenvml/state; fakenvml-state create `+strings.Repeat("H100 ", 8)+`; }
printf 'gpu:\n  mode: on\n  period: 1s\n  slow_period: 2s\n  kernel_log: `+kernelLog+`\n' >> /etc/millwright/agent.yaml
systemctl restart millwrightd.service`); err != nil {
		return err
	}
	if err := t.connected(ctx); err != nil {
		return err
	}
	return t.until(ctx, "the server has eight GPUs", func() (bool, error) {
		gpus, err := t.gpus(ctx)
		return len(gpus) == 8, err
	})
}

// gpus are those of the node, as the server has them.
func (t *trial) gpus(ctx context.Context) ([]*healthv1.GpuHealth, error) {
	var list healthv1.ListGpusResponse
	err := t.ask(ctx, &list, "gpu", "list", "-n", t.node.Name())
	return list.GetGpus(), err
}

// raised is how often each condition was raised in the history that the server
// has of the node, and how often it was counted.
func (t *trial) raised(ctx context.Context) (map[string][]uint64, error) {
	var list healthv1.ListHealthChangesResponse
	err := t.ask(ctx, &list, "health", "history", t.node.Name())
	out := map[string][]uint64{}
	for _, change := range list.GetChanges() {
		if c := change.GetEdge().GetCondition(); c.GetState() == healthv1.State_STATE_RAISED {
			at := place(c.GetCode(), c.GetPciBusId())
			out[at] = append(out[at], c.GetCount())
		}
	}
	return out, err
}

func place(code, pci string) string { return code + " " + strings.TrimSuffix(pci, ".0") }

// xids logs two XIDs, the second when the first is raised. Each must be raised
// and counted once.
func xids(ctx context.Context, t *trial) error {
	gpus, err := t.gpus(ctx)
	if err != nil {
		return err
	}
	before, err := t.raised(ctx)
	if err != nil {
		return err
	}
	var want []string
	for _, xid := range []int{79, 95, 119, 62, 64, 110} { // those that no earlier trial on this node has had
		for _, g := range gpus {
			at := strings.TrimSuffix(g.GetPciBusId(), ".0")
			name := place(fmt.Sprintf("gpu.xid.%d", xid), at)
			if len(want) == 2 || before[name] != nil {
				continue
			}
			want = append(want, name)
			if _, err := t.sh(ctx, fmt.Sprintf(`echo "4,$(($(wc -l < %[1]s) + 1)),$(cut -d. -f1 /proc/uptime)000000,-;NVRM: Xid (PCI:%[2]s): %[3]d, pid=7, name=train, words" >> %[1]s`, kernelLog, at, xid)); err != nil {
				return err
			}
			if err := t.until(ctx, name+" is raised", func() (bool, error) {
				now, err := t.raised(ctx)
				return now[name] != nil, err
			}); err != nil {
				return lostWork("%v", err)
			}
		}
	}
	if len(want) != 2 {
		return fmt.Errorf("%d GPUs have no XID left that was not logged before", len(gpus))
	}
	// What is told twice would come with the next reports.
	pause(ctx, 3*time.Second)
	now, err := t.raised(ctx)
	if err != nil {
		return err
	}
	for _, name := range want {
		if got := now[name]; !slices.Equal(got, []uint64{1}) {
			return &verdict{"duplicated", fmt.Sprintf("%s was raised %d times, with the counts %d", name, len(got), got)}
		}
	}
	_, err = t.sh(ctx, withoutGPUs)
	return errors.Join(err, t.connected(ctx))
}

// ask reads what millctl says as JSON.
func (t *trial) ask(ctx context.Context, m proto.Message, args ...string) error {
	out, err := t.operator(ctx, "", append(args, "-o", "json")...)
	if err != nil {
		return err
	}
	if err := protojson.Unmarshal([]byte(out), m); err != nil {
		return fmt.Errorf("read millctl %s: %w", strings.Join(args, " "), err)
	}
	return nil
}

// until polls until something is so.
func (t *trial) until(ctx context.Context, what string, is func() (bool, error)) error {
	deadline := time.Now().Add(patience)
	for {
		ok, err := is()
		switch {
		case err != nil || ok:
			return err
		case time.Now().After(deadline) || ctx.Err() != nil:
			return errors.Join(fmt.Errorf("%s: not within %s", what, patience), ctx.Err())
		}
		pause(ctx, 100*time.Millisecond)
	}
}
