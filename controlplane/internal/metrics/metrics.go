// Package metrics gives what the server knows of the nodes' GPUs to Prometheus.
// Labels are bounded: a node, its GPUs, the codes of its conditions.
package metrics

import (
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"regexp"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"google.golang.org/protobuf/reflect/protoreflect"

	gpuv1 "github.com/gpuaas/millwright/proto/millwright/gpu/v1"
	healthv1 "github.com/gpuaas/millwright/proto/millwright/health/v1"
	serverv1 "github.com/gpuaas/millwright/proto/millwright/server/v1"

	"github.com/gpuaas/millwright/controlplane/internal/eventlog"
	"github.com/gpuaas/millwright/controlplane/internal/store"
)

const (
	namespace = "millwright_gpu_"
	page      = 256
	// scrapeTimeout bounds one scrape.
	scrapeTimeout = 30 * time.Second
	maxLabel      = 128
	// other stands for what is not shown by its name.
	other = "other"
)

// Board is what nodes reported; see [board.Board].
type Board interface {
	Gpus(node string, rows []*serverv1.HealthRow, whole bool) []*healthv1.GpuHealth
	Node(node string, rows []*serverv1.HealthRow) *healthv1.NodeHealth
}

// Config is what the metrics are made of.
type Config struct {
	// Board is what nodes reported.
	Board Board
	// Reader reads the store.
	Reader store.Reader
	// Logger gets what went wrong with a scrape.
	Logger *slog.Logger
	// Now is the wall clock.
	Now func() time.Time
}

// Handler returns what a scrape is answered by.
func Handler(cfg Config) http.Handler {
	registry := prometheus.NewRegistry()
	registry.MustRegister(newCollector(cfg))
	return promhttp.HandlerFor(registry, promhttp.HandlerOpts{
		ErrorHandling: promhttp.ContinueOnError, MaxRequestsInFlight: 4, Timeout: scrapeTimeout,
	})
}

// collector makes the series anew at each scrape: nothing of a GPU that is gone
// stays behind.
type collector struct {
	cfg    Config
	values []value
	descs  map[string]*prometheus.Desc
	code   *regexp.Regexp
	names  names
}

func newCollector(cfg Config) *collector {
	c := &collector{cfg: cfg, values: values(), descs: map[string]*prometheus.Desc{}, code: regexp.MustCompile(`^[a-z0-9_.-]{1,64}$`)}
	for _, v := range c.values {
		labels := []string{"node", "gpu"}
		if v.label != "" {
			labels = append(labels, "kind")
		}
		c.describe(v.name, v.help, labels...)
	}
	c.describe("info", "What a GPU is; always 1.", "node", "gpu", "index", "model", "pci_bus_id", "driver_version")
	c.describe("state", "1 for the state that the GPU is in, 0 for the others.", "node", "gpu", "state")
	c.describe("condition", "1 for each condition that was raised when the node last spoke; gpu is empty for one of the whole node.", "node", "gpu", "code", "severity", "action")
	c.describe("report_age_seconds", "How long ago the node's last report came, by the server's clock.", "node")
	c.describe("report_fresh", "1 while what is known of the node's GPUs is of now.", "node")
	c.describe("driver_up", "1 while the driver answered in the node's last report.", "node")
	return c
}

func (c *collector) describe(name, help string, labels ...string) {
	c.descs[name] = prometheus.NewDesc(namespace+name, help, labels, nil)
}

// Describe implements [prometheus.Collector].
func (c *collector) Describe(out chan<- *prometheus.Desc) {
	for _, d := range c.descs {
		out <- d
	}
}

// Collect implements [prometheus.Collector].
func (c *collector) Collect(out chan<- prometheus.Metric) {
	ctx, cancel := context.WithTimeout(context.Background(), scrapeTimeout)
	defer cancel()
	here := map[string]bool{}
	for after, more := "", true; more; {
		var nodes []*node
		more = false
		err := c.cfg.Reader.View(ctx, func(v store.View) error {
			rows, err := v.Nodes(after, page)
			if err != nil {
				return err
			}
			more = len(rows) == page
			for _, row := range rows {
				after = row.GetName()
				if row.GetGeneration() == 0 || row.GetEvicted() {
					continue
				}
				health, err := v.Health(row.GetName(), eventlog.MaxConditions)
				if err != nil {
					return err
				}
				nodes = append(nodes, &node{row.GetName(), health})
			}
			return nil
		})
		if err != nil {
			c.cfg.Logger.Error("metrics not collected", "err", err)
			return
		}
		for _, n := range nodes { // outside of the store's view
			c.node(out, n)
			here[n.name] = true
		}
	}
	c.names.keep(here)
}

type node struct {
	name string
	rows []*serverv1.HealthRow
}

func (c *collector) node(out chan<- prometheus.Metric, n *node) {
	status := c.cfg.Board.Node(n.name, n.rows)
	fresh := status.GetFreshness() == healthv1.Freshness_FRESHNESS_FRESH
	gpus := c.cfg.Board.Gpus(n.name, n.rows, true)
	if status.GetReportTime() == nil && len(gpus) == 0 && len(status.GetConditions()) == 0 {
		return // it never spoke of GPUs: it may have none
	}
	c.send(out, "report_fresh", gauge, truth(fresh), n.name)
	if at := status.GetReportTime(); at != nil {
		c.send(out, "report_age_seconds", gauge, c.cfg.Now().Sub(at.AsTime()).Seconds(), n.name)
		c.send(out, "driver_up", gauge, truth(status.GetDriver().GetState() == gpuv1.DriverState_DRIVER_STATE_OK), n.name)
	}
	said := map[string]bool{} // a series may be there once only
	for i, g := range gpus {
		name := c.names.of(n.name, label(g.GetUuid()), "")
		if name == "" {
			name = fmt.Sprintf("index-%d", i)
		}
		if said[name] {
			continue
		}
		said[name] = true
		c.gpu(out, n.name, name, status.GetDriverVersion(), g, fresh)
	}
	c.conditions(out, n.name, status.GetConditions())
}

func (c *collector) gpu(out chan<- prometheus.Metric, node, name, driver string, g *healthv1.GpuHealth, fresh bool) {
	index := ""
	if g.Index != nil {
		index = fmt.Sprint(g.GetIndex())
	}
	about := make([]string, 0, 3)
	for _, s := range []string{g.GetModel(), g.GetPciBusId(), driver} {
		about = append(about, c.names.of(node, label(s), other))
	}
	c.send(out, "info", gauge, 1, append([]string{node, name, index}, about...)...)
	for _, s := range []healthv1.State{healthv1.State_STATE_OK, healthv1.State_STATE_RAISED, healthv1.State_STATE_UNKNOWN, healthv1.State_STATE_STALE} {
		c.send(out, "state", gauge, truth(g.GetState() == s), node, name, word(s.String(), "STATE_"))
	}
	if g.GetSample() == nil || !fresh {
		return // an old value is no value
	}
	m := g.GetSample().ProtoReflect()
	for _, v := range c.values {
		fd := m.Descriptor().Fields().ByTextName(v.field)
		if fd == nil || !m.Has(fd) {
			continue
		}
		labels := []string{node, name}
		if v.label != "" {
			labels = append(labels, v.label)
		}
		c.send(out, v.name, v.kind, v.scale*float(m.Get(fd)), labels...)
	}
}

// conditions tells of what is raised, once for each GPU and code.
func (c *collector) conditions(out chan<- prometheus.Metric, node string, list []*healthv1.NodeCondition) {
	said := map[string]bool{}
	for _, n := range list {
		cond := n.GetCondition()
		if n.GetLastState() != healthv1.State_STATE_RAISED {
			continue
		}
		code := cond.GetCode()
		if !c.code.MatchString(code) {
			code = other
		}
		code = c.names.of(node, code, other)
		gpu, severity, action := c.names.of(node, label(cond.GetGpuUuid()), other), word(cond.GetSeverity().String(), "SEVERITY_"), word(cond.GetAction().String(), "ACTION_")
		key := strings.Join([]string{gpu, code, severity, action}, " ")
		if said[key] {
			continue
		}
		said[key] = true
		c.send(out, "condition", gauge, 1, node, gpu, code, severity, action)
	}
}

func (c *collector) send(out chan<- prometheus.Metric, name string, kind prometheus.ValueType, v float64, labels ...string) {
	m, err := prometheus.NewConstMetric(c.descs[name], kind, v, labels...)
	if err != nil {
		m = prometheus.NewInvalidMetric(c.descs[name], err)
	}
	out <- m
}

func float(v protoreflect.Value) float64 {
	switch x := v.Interface().(type) {
	case bool:
		return truth(x)
	case uint32:
		return float64(x)
	case uint64:
		return float64(x)
	}
	return 0
}

func truth(b bool) float64 {
	if b {
		return 1
	}
	return 0
}

func word(s, prefix string) string { return strings.ToLower(strings.TrimPrefix(s, prefix)) }
