// Package selector finds the GPUs that a spec names, and says what is wrong with a
// selector. All kinds that name GPUs share it.
package selector

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"google.golang.org/protobuf/proto"

	migv1 "github.com/gpuaas/millwright/proto/millwright/mig/v1"
	"github.com/gpuaas/millwright/tasks"
	"github.com/gpuaas/millwright/tasks/host"
)

// ErrAbsent is found by errors.Is in the error of a selector that names no GPU of
// the node.
var ErrAbsent = errors.New("the selector names no GPU of the node")

type absent struct{ error }

func (a absent) Unwrap() error { return a.error }

func (a absent) Is(target error) bool { return target == ErrAbsent }

// Meant returns the GPUs that a selector names. One that it names and the node
// does not have is an error that refuses the task: it may have been replaced.
// Where it names none, that is [ErrAbsent].
func Meant(list []host.GPU, sel *migv1.GpuSelector) ([]host.GPU, error) {
	for _, u := range sel.GetUuids() {
		if !slices.ContainsFunc(list, func(g host.GPU) bool { return g.UUID == u }) {
			return nil, unfit("the node has no GPU %s (any more): it has %s", u, Names(list))
		}
	}
	for _, p := range sel.GetPciBusIds() {
		if !slices.ContainsFunc(list, func(g host.GPU) bool { return g.PCI == pci(p) }) {
			return nil, unfit("the node has no GPU at %s: it has %s", p, Names(list))
		}
	}
	for _, i := range sel.GetDriverIndices() {
		if !slices.ContainsFunc(list, func(g host.GPU) bool { return g.Index == i }) {
			return nil, absent{unfit("the node has no GPU %d: it has %s", i, Names(list))}
		}
	}
	var out []host.GPU
	for _, g := range list {
		if selected(g, sel) {
			out = append(out, g)
		}
	}
	if len(out) == 0 {
		return nil, absent{unfit("the selector names no GPU of the node, which has %s", Names(list))}
	}
	if len(sel.GetIndices()) > 0 {
		var by []host.GPU
		for _, i := range sel.GetIndices() {
			if int(i) >= len(out) {
				return nil, unfit("there is no GPU %d of those that the selector names, which are %d: the node has %s", i, len(out), Names(list))
			}
			by = append(by, out[i])
		}
		out = by
	}
	return out, nil
}

// There returns a selector without the UUIDs and places that the node does not
// have, and what is missing; nil: none of those that it names is there.
func There(list []host.GPU, sel *migv1.GpuSelector) (there *migv1.GpuSelector, missing error) {
	there = proto.CloneOf(sel)
	gone := func(what string, is func(host.GPU) bool) bool {
		if slices.ContainsFunc(list, is) {
			return false
		}
		// Nobody else is named: who reads it asks which GPUs it is about.
		missing = errors.Join(missing, unfit("the node has no GPU %s (any more)", what))
		return true
	}
	there.Uuids = slices.DeleteFunc(there.GetUuids(), func(u string) bool {
		return gone(u, func(g host.GPU) bool { return g.UUID == u })
	})
	there.PciBusIds = slices.DeleteFunc(there.GetPciBusIds(), func(p string) bool {
		return gone("at "+p, func(g host.GPU) bool { return g.PCI == pci(p) })
	})
	if len(there.GetUuids()) == 0 && len(sel.GetUuids()) > 0 || len(there.GetPciBusIds()) == 0 && len(sel.GetPciBusIds()) > 0 {
		return nil, missing
	}
	return there, missing
}

// ByIndex reports whether a selector counts GPUs.
func ByIndex(sel *migv1.GpuSelector) bool {
	return len(sel.GetIndices())+len(sel.GetDriverIndices()) > 0
}

func selected(g host.GPU, sel *migv1.GpuSelector) bool {
	if u := sel.GetUuids(); len(u) > 0 && !slices.Contains(u, g.UUID) {
		return false
	}
	if p := sel.GetPciBusIds(); len(p) > 0 && !slices.ContainsFunc(p, func(s string) bool { return pci(s) == g.PCI }) {
		return false
	}
	if m := sel.GetModels(); len(m) > 0 && !slices.ContainsFunc(m, func(s string) bool { return modelIs(g.Name, s) }) {
		return false
	}
	if d := sel.GetDriverIndices(); len(d) > 0 && !slices.Contains(d, g.Index) {
		return false
	}
	ids := sel.GetPciDeviceIds()
	return len(ids) == 0 || slices.ContainsFunc(ids, func(s string) bool {
		id, err := deviceID(s)
		return err == nil && id == g.Device
	})
}

// modelIs reports whether the words of want stand in a product's name in a row.
// A word is not a part of one: A100 does not mean A100X.
func modelIs(name, want string) bool {
	words := func(s string) []string {
		return strings.FieldsFunc(strings.ToLower(s), func(r rune) bool { return r == ' ' || r == '-' })
	}
	have, wanted := words(name), words(want)
	for i := 0; i+len(wanted) <= len(have); i++ {
		if slices.Equal(have[i:i+len(wanted)], wanted) {
			return len(wanted) > 0
		}
	}
	return false
}

// pci writes a place as the agent does: 0000:17:00.0, with more digits of the
// domain where it needs them.
func pci(s string) string {
	s = strings.ToLower(s)
	if strings.Count(s, ":") == 1 {
		return "0000:" + s
	}
	domain, rest, _ := strings.Cut(s, ":")
	n, err := strconv.ParseUint(domain, 16, 32)
	if err != nil {
		return s
	}
	return fmt.Sprintf("%04x:%s", n, rest)
}

// deviceID reads 0x20B210DE.
func deviceID(s string) (uint32, error) {
	hex, ok := strings.CutPrefix(strings.ToLower(s), "0x")
	if !ok || len(hex) != 8 {
		return 0, fmt.Errorf("%q is not of the form 0x20B210DE", s)
	}
	id, err := strconv.ParseUint(hex, 16, 32)
	return uint32(id), err
}

// Names lists GPUs for people.
func Names(list []host.GPU) string {
	if len(list) == 0 {
		return "none"
	}
	var out []string
	for _, g := range list {
		s := g.UUID
		if s == "" {
			s = "one at " + g.PCI
		}
		out = append(out, fmt.Sprintf("%s (%s, %s)", s, g.Name, g.PCI))
	}
	return strings.Join(out, "; ")
}

// unfit returns an error that refuses the task.
func unfit(format string, args ...any) error {
	return fmt.Errorf("%w: %w", fmt.Errorf(format, args...), tasks.ErrPrecondition)
}
