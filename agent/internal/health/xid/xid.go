// Package xid says what an XID of NVIDIA's driver asks for. The table is data,
// with a version and the source of each row; an operator can override rows by
// number.
package xid

import (
	"bytes"
	_ "embed"
	"fmt"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"
)

// Severity is how bad it is for the GPU.
type Severity string

// The severities, in order.
const (
	Info     Severity = "info"     // for the record
	Warning  Severity = "warning"  // a program is hurt, the GPU is not
	Degraded Severity = "degraded" // goes on, with less
	Fatal    Severity = "fatal"    // no new work should come to it
)

// Action is what is recommended. Nothing does it by itself: a reset or a reboot
// takes a signed task.
type Action string

// The actions, from the least on.
const (
	None           Action = "none"
	RestartApp     Action = "restart_app"
	UpdateSoftware Action = "update_software"
	ResetGPU       Action = "reset_gpu"
	Reboot         Action = "reboot"
	CheckPower     Action = "check_power"
	ContactSupport Action = "contact_support"
)

// Row is what an XID means.
type Row struct {
	Number   int
	Severity Severity
	Action   Action
	Title    string
	Meaning  string
	Source   string
	Judged   bool  // the source names no action: severity and action are Millwright's
	Clears   []int // the numbers that it ends, on the same GPU
	// LineDecides: the line says fatal or not. DriverDecides: it tells a
	// recovery action, and that is what counts.
	LineDecides   bool
	DriverDecides bool
	Overridden    bool // by the operator
	Listed        bool
}

// Table is an immutable table of rows.
type Table struct {
	// Version names the data, by date.
	Version  string
	rows     map[int]Row
	fallback Row
}

// maxNumber is the largest number that a table may name; drivers print at most
// three digits today.
const maxNumber = 9999

//go:embed table.yaml
var builtin []byte

type fileRow struct {
	XID           string   `yaml:"xid"`
	Severity      Severity `yaml:"severity"`
	Action        Action   `yaml:"action"`
	Title         string   `yaml:"title"`
	Meaning       string   `yaml:"meaning"`
	Source        string   `yaml:"source"`
	Judged        bool     `yaml:"judged"`
	Clears        []int    `yaml:"clears"`
	LineDecides   bool     `yaml:"line_decides"`
	DriverDecides bool     `yaml:"driver_decides"`
}

// Builtin reads the table that is compiled in.
func Builtin() (*Table, error) {
	var f struct {
		Version  string    `yaml:"version"`
		Defaults fileRow   `yaml:"defaults"`
		Rows     []fileRow `yaml:"rows"`
	}
	dec := yaml.NewDecoder(bytes.NewReader(builtin))
	dec.KnownFields(true)
	if err := dec.Decode(&f); err != nil {
		return nil, fmt.Errorf("read the table of XIDs: %w", err)
	}
	t := &Table{Version: f.Version, rows: map[int]Row{}}
	var err error
	if t.fallback, err = f.Defaults.row(0); err != nil {
		return nil, fmt.Errorf("read the table of XIDs: defaults: %w", err)
	}
	for _, r := range f.Rows {
		numbers, err := Numbers(r.XID)
		if err != nil {
			return nil, fmt.Errorf("read the table of XIDs: %w", err)
		}
		for _, n := range numbers {
			if _, twice := t.rows[n]; twice {
				return nil, fmt.Errorf("read the table of XIDs: %d is there twice", n)
			}
			row, err := r.row(n)
			if err != nil {
				return nil, fmt.Errorf("read the table of XIDs: %d: %w", n, err)
			}
			row.Listed = true
			t.rows[n] = row
		}
	}
	return t, nil
}

func (r fileRow) row(n int) (Row, error) {
	if !r.Severity.Valid() {
		return Row{}, fmt.Errorf("severity %q is none of info, warning, degraded, fatal", r.Severity)
	}
	if !r.Action.Valid() {
		return Row{}, fmt.Errorf("action %q is none of none, restart_app, update_software, reset_gpu, reboot, check_power, contact_support", r.Action)
	}
	return Row{
		Number: n, Severity: r.Severity, Action: r.Action, Title: r.Title, Meaning: r.Meaning, Source: r.Source,
		Judged: r.Judged, Clears: r.Clears, LineDecides: r.LineDecides, DriverDecides: r.DriverDecides,
	}, nil
}

// Valid reports whether it is one of the severities.
func (s Severity) Valid() bool {
	return s == Info || s == Warning || s == Degraded || s == Fatal
}

// Valid reports whether it is one of the actions.
func (a Action) Valid() bool {
	switch a {
	case None, RestartApp, UpdateSoftware, ResetGPU, Reboot, CheckPower, ContactSupport:
		return true
	}
	return false
}

// Override is an operator's own word on some numbers.
type Override struct {
	XID      string   `yaml:"xid"` // as in [Numbers]
	Severity Severity `yaml:"severity"`
	Action   Action   `yaml:"action"`
	Reason   string   `yaml:"reason"` // why, for whoever reads it later
}

// With returns a table in which the overrides count. An override says severity,
// action or both; the error names the one that does not, or is not understood.
func (t *Table) With(overrides []Override) (*Table, error) {
	out := &Table{Version: t.Version, fallback: t.fallback, rows: make(map[int]Row, len(t.rows))}
	for n, r := range t.rows {
		out.rows[n] = r
	}
	seen := map[int]bool{}
	for i, o := range overrides {
		numbers, err := Numbers(o.XID)
		if err != nil {
			return nil, fmt.Errorf("xids[%d].xid: %w", i, err)
		}
		if o.Severity == "" && o.Action == "" {
			return nil, fmt.Errorf("xids[%d]: neither severity nor action is given for %s", i, o.XID)
		}
		if o.Severity != "" && !o.Severity.Valid() {
			return nil, fmt.Errorf("xids[%d].severity: %q is none of info, warning, degraded, fatal", i, o.Severity)
		}
		if o.Action != "" && !o.Action.Valid() {
			return nil, fmt.Errorf("xids[%d].action: %q is none of none, restart_app, update_software, reset_gpu, reboot, check_power, contact_support", i, o.Action)
		}
		for _, n := range numbers {
			if seen[n] {
				return nil, fmt.Errorf("xids[%d].xid: %d is overridden twice", i, n)
			}
			seen[n] = true
			out.rows[n] = out.Row(n).overridden(o)
		}
	}
	return out, nil
}

// overridden takes what the operator said. It also takes the decision from the
// line or the driver: the operator's word is meant.
func (r Row) overridden(o Override) Row {
	r.Overridden, r.LineDecides, r.DriverDecides = true, false, false
	if o.Severity != "" {
		r.Severity = o.Severity
	}
	if o.Action != "" {
		r.Action = o.Action
	}
	if o.Reason != "" {
		r.Source = o.Reason
	}
	return r
}

// Row returns what the number means. One that no row names is fatal and one for
// NVIDIA's support, as their table says of unused numbers.
func (t *Table) Row(n int) Row {
	if r, ok := t.rows[n]; ok {
		return r
	}
	r := t.fallback
	r.Number = n
	return r
}

// All returns the numbers that have a row of their own, in order.
func (t *Table) All() []int {
	var out []int
	for n := range maxNumber + 1 {
		if _, ok := t.rows[n]; ok {
			out = append(out, n)
		}
	}
	return out
}

// Numbers reads a list such as "13", "39-41" or "86,88,89".
func Numbers(s string) ([]int, error) {
	var out []int
	for part := range strings.SplitSeq(s, ",") {
		from, to, isRange := strings.Cut(part, "-")
		if !isRange {
			to = from
		}
		a, errA := strconv.Atoi(from)
		b, errB := strconv.Atoi(to)
		if errA != nil || errB != nil || a < 1 || b > maxNumber || b < a {
			return nil, fmt.Errorf("%q is no number, range or list of them from 1 to %d, such as 13, 39-41 or 86,88", s, maxNumber)
		}
		for n := a; n <= b; n++ {
			out = append(out, n)
		}
	}
	return out, nil
}
