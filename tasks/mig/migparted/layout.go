package migparted

import (
	"fmt"
	"regexp"
	"slices"
	"strconv"

	"go.yaml.in/yaml/v3"

	migv1 "github.com/gpuaas/millwright/proto/millwright/mig/v1"
	"github.com/gpuaas/millwright/tasks/mig/profile"
)

const (
	maxEntries = 64  // layouts of a spec
	maxIndex   = 255 // as in a spec
	maxCount   = 64
)

// The keys.
const (
	keyVersion = "version"
	keyConfigs = "mig-configs"
	keyFilter  = "device-filter"
	keyDevices = "devices"
	keyEnabled = "mig-enabled"
	keyMIG     = "mig-devices"
)

var (
	deviceForm    = regexp.MustCompile(`^0[xX][0-9a-fA-F]{8}$`)
	subsystemForm = regexp.MustCompile(`^0[xX][0-9a-fA-F]{8}:0[xX][0-9a-fA-F]{8}$`)
)

// top reads the whole file.
func (r *reader) top(n *yaml.Node) map[string]*migv1.ConfigureSpec {
	out := map[string]*migv1.ConfigureSpec{}
	m, ok := r.mapping(n, "", keyVersion, keyConfigs)
	if !ok {
		return nil
	}
	if v, ok := m[keyVersion]; !ok {
		r.add(n, keyVersion, "", "is missing; write version: %s", version)
	} else if v.node.Kind != yaml.ScalarNode || v.node.Value != version {
		r.add(v.node, keyVersion, v.node.Value, "must be %s", version)
	}
	v, ok := m[keyConfigs]
	if !ok {
		r.add(n, keyConfigs, "", "is missing; it has the configurations, by name")
		return nil
	}
	configs, ok := r.mapping(v.node, keyConfigs)
	if ok && len(v.node.Content) == 0 {
		r.add(v.key, keyConfigs, "", "must have one configuration at least")
	}
	for name, c := range configs {
		out[name] = r.config(c, keyConfigs+"."+name)
	}
	return out
}

// config reads the entries of one configuration.
func (r *reader) config(c value, at string) *migv1.ConfigureSpec {
	if !r.is(c.node, yaml.SequenceNode, at, "must be a list of entries, each after a dash") {
		return nil
	}
	if n := len(c.node.Content); n == 0 || n > maxEntries {
		r.add(c.key, at, "", "has %d entries, and must have 1 to %d", n, maxEntries)
		return nil
	}
	s := &migv1.ConfigureSpec{}
	for i, n := range c.node.Content {
		l := r.entry(n, fmt.Sprintf("%s[%d]", at, i))
		if len(l.GetSelect().GetPciDeviceIds()) > 0 {
			s.SkipAbsent = true
		}
		s.Layouts = append(s.Layouts, l)
	}
	return s
}

// entry reads one entry: which GPUs are to have what.
func (r *reader) entry(n *yaml.Node, at string) *migv1.GpuLayout {
	l := &migv1.GpuLayout{Select: &migv1.GpuSelector{}}
	m, ok := r.mapping(n, at, keyFilter, keyDevices, keyEnabled, keyMIG)
	if !ok {
		return l
	}
	if v, ok := m[keyFilter]; ok {
		l.Select.PciDeviceIds = r.filter(v, join(at, keyFilter))
	}
	if v, ok := m[keyDevices]; ok {
		l.Select.All, l.Select.DriverIndices = r.devices(v, join(at, keyDevices))
	} else {
		r.add(n, join(at, keyDevices), "", "is missing; write devices: all, or a list of indices such as [0, 2]")
	}
	v, ok := m[keyEnabled]
	if !ok {
		r.add(n, join(at, keyEnabled), "", "is missing; write mig-enabled: true or false")
		return l
	}
	on := v.node.Value == "true"
	if v.node.Kind != yaml.ScalarNode || v.node.Style != 0 || !on && v.node.Value != "false" {
		r.add(v.node, join(at, keyEnabled), v.node.Value, "must be true or false")
		return l
	}
	devices, given := m[keyMIG]
	at = join(at, keyMIG)
	switch {
	case on && !given:
		r.add(n, at, "", "is missing, and mig-enabled is true; write mig-devices: {} for none")
	case on:
		l.Instances = r.instances(devices, at)
		l.Empty = len(l.Instances) == 0
	case given && (devices.node.Kind != yaml.MappingNode || len(devices.node.Content) > 0):
		r.add(devices.key, at, "", "must be empty where mig-enabled is false; leave it out")
	}
	l.Off = !on
	return l
}

// filter reads the device and vendor ids of the GPUs that are meant.
func (r *reader) filter(v value, at string) []string {
	list := []*yaml.Node{v.node}
	if v.node.Kind == yaml.SequenceNode {
		list = v.node.Content
	}
	var out []string
	for i, n := range list {
		field := at
		if v.node.Kind == yaml.SequenceNode {
			field = fmt.Sprintf("%s[%d]", at, i)
		}
		switch {
		case n.Kind != yaml.ScalarNode:
			r.add(n, field, "", "must be a text, or a list of them, such as \"0x20B210DE\"")
		case subsystemForm.MatchString(n.Value):
			r.add(n, field, n.Value, "names a subsystem, which is not served: leave out the colon and what follows, or name the GPUs by their UUIDs in a spec")
		case !deviceForm.MatchString(n.Value):
			r.add(n, field, n.Value, "must be a device and a vendor id in hexadecimal such as \"0x20B210DE\"")
		case slices.Contains(out, n.Value):
			r.add(n, field, n.Value, "is given twice")
		default:
			out = append(out, n.Value)
		}
	}
	if len(list) == 0 {
		r.add(v.key, at, "", "is empty, and so would mean every GPU: leave it out")
	}
	return out
}

// devices reads which GPUs are meant, of all that the node has.
func (r *reader) devices(v value, at string) (all bool, indices []uint32) {
	const rule = "must be all, or a list of indices such as [0, 2]"
	if v.node.Kind == yaml.ScalarNode && v.node.Value == "all" {
		return true, nil
	}
	if !r.is(v.node, yaml.SequenceNode, at, rule) {
		return false, nil
	}
	for i, n := range v.node.Content {
		field := fmt.Sprintf("%s[%d]", at, i)
		index, err := whole(n.Value)
		switch {
		case n.Kind != yaml.ScalarNode || n.Style != 0 || err != nil || index > maxIndex:
			r.add(n, field, n.Value, "must be a whole number from 0 to %d", maxIndex)
		case slices.Contains(indices, uint32(index)):
			r.add(n, field, n.Value, "is given twice")
		default:
			indices = append(indices, uint32(index))
		}
	}
	if len(v.node.Content) == 0 {
		r.add(v.key, at, "", "%s", rule)
	}
	return false, indices
}

// whole reads a number as it is written. One with a zero before it is none: to
// mig-parted, as to YAML 1.1, 010 is eight.
func whole(text string) (uint64, error) {
	if len(text) > 1 && text[0] == '0' {
		return 0, strconv.ErrSyntax
	}
	return strconv.ParseUint(text, 10, 32)
}

// instances reads the MIG devices of a GPU, in the order of the file.
func (r *reader) instances(v value, at string) []*migv1.Instances {
	m, ok := r.mapping(v.node, at)
	if !ok {
		return nil
	}
	var out []*migv1.Instances
	none := len(r.found)
	for i := 0; i+1 < len(v.node.Content); i += 2 {
		name := v.node.Content[i].Value
		one, ok := m[name]
		if !ok || one.key != v.node.Content[i] {
			continue // it is a mistake, and was told
		}
		count, err := whole(one.node.Value)
		if _, bad := profile.Parse(name); bad != nil {
			r.add(one.key, join(at, name), "", "%v", bad)
		}
		if one.node.Kind != yaml.ScalarNode || one.node.Style != 0 || err != nil || count > maxCount {
			r.add(one.node, join(at, name), one.node.Value, "must be how many, a whole number from 0 to %d", maxCount)
			continue
		}
		if count > 0 {
			out = append(out, &migv1.Instances{Profile: name, Count: uint32(count)})
		}
	}
	if len(out) == 0 && len(v.node.Content) > 0 && len(r.found) == none {
		r.add(v.key, at, "", "has no count above 0; write mig-devices: {} for none")
	}
	return out
}
