package storage

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"slices"
	"strings"

	"google.golang.org/protobuf/proto"

	storagev1 "github.com/gpuaas/millwright/proto/millwright/storage/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/tasks"
	"github.com/gpuaas/millwright/tasks/step"
)

const (
	unitDir  = "/etc/systemd/system/"
	unitMode = 0o644
	// specKey marks a unit file as ours. Systemd ignores keys that begin with X-.
	specKey = "X-Millwright-Spec"
	// mountTimeout bounds each mount and each unmount. It is also the longest
	// that a boot waits for a dead server.
	mountTimeout = "30"
	typeGluster  = "fuse.glusterfs"
	typeTmpfs    = "tmpfs"
)

// unitPath returns where the unit file of a mount point stands.
func unitPath(target string) string { return unitDir + MountUnit(target) }

// specDigest is the SHA-256 of a spec, as the unit file has it.
func specDigest(s *storagev1.MountSpec) (string, error) {
	b, err := proto.MarshalOptions{Deterministic: true}.Marshal(s)
	if err != nil {
		return "", fmt.Errorf("serialise spec: %w", err)
	}
	sum := sha256.Sum256(b)
	return "sha256:" + hex.EncodeToString(sum[:]), nil
}

// wanted returns the step that mounts what a spec asks for, and how the mount
// table will name it.
func wanted(s *storagev1.MountSpec) *taskv1.MountUnitStep {
	m := &taskv1.MountUnitStep{
		Unit: MountUnit(s.GetTarget()), Where: s.GetTarget(), ReadOnly: s.GetReadOnly(),
		Action: taskv1.UnitAction_UNIT_ACTION_START,
	}
	switch src := s.GetSource().(type) {
	case *storagev1.MountSpec_Bind:
		m.Source, m.Fstype = src.Bind.GetPath(), step.FSTypeBind
	case *storagev1.MountSpec_Tmpfs:
		m.Source, m.Fstype = typeTmpfs, typeTmpfs
	case *storagev1.MountSpec_Glusterfs:
		m.Fstype = typeGluster
		// The client names the server that answered it.
		for i, server := range src.Glusterfs.GetServers() {
			name := server + ":/" + src.Glusterfs.GetVolume() + src.Glusterfs.GetSubdirectory()
			if i == 0 {
				m.Source = name
			} else {
				m.OtherSources = append(m.OtherSources, name)
			}
		}
	}
	return m
}

// unitFile returns the content of the mount unit of a spec.
//
// All types are wanted by remote-fs.target and come before it, so that a
// service that waits for remote file systems finds the mount. Wanted, not
// required: a mount that does not come up delays a boot by its timeout at most,
// and never fails it. nofail keeps the local ones out of local-fs.target, which
// comes before the network: a bind mount may have its source on a network file
// system, and systemd would break the cycle by dropping jobs.
func unitFile(s *storagev1.MountSpec) (string, error) {
	digest, err := specDigest(s)
	if err != nil {
		return "", err
	}
	w := wanted(s)
	var b strings.Builder
	line := func(key, value string) { b.WriteString(key + "=" + value + "\n") }
	b.WriteString("# Made by Millwright (storage.mount). What is changed here by hand is found and undone.\n[Unit]\n")
	line("Description", "Millwright mount "+s.GetTarget())
	if w.GetFstype() == typeGluster {
		line("Wants", "network-online.target")
		line("After", "network-online.target")
	}
	if w.GetFstype() == step.FSTypeBind {
		line("RequiresMountsFor", w.GetSource())
	}
	line("Before", "remote-fs.target")
	line(specKey, digest)
	b.WriteString("\n[Mount]\n")
	line("What", w.GetSource())
	line("Where", s.GetTarget())
	line("Type", unitType(w))
	line("Options", strings.Join(options(s), ","))
	line("TimeoutSec", mountTimeout)
	line("DirectoryMode", "0755")
	b.WriteString("\n[Install]\n")
	line("WantedBy", "remote-fs.target")
	return b.String(), nil
}

func unitType(w *taskv1.MountUnitStep) string {
	switch w.GetFstype() {
	case step.FSTypeBind:
		return "none"
	case typeGluster:
		return "glusterfs"
	default:
		return w.GetFstype()
	}
}

func options(s *storagev1.MountSpec) []string {
	var o []string
	switch src := s.GetSource().(type) {
	case *storagev1.MountSpec_Bind:
		o = []string{"bind", "nofail"}
	case *storagev1.MountSpec_Tmpfs:
		o = []string{"nofail", fmt.Sprintf("size=%d", src.Tmpfs.GetSizeBytes()), "mode=" + tmpfsMode(src.Tmpfs)}
	case *storagev1.MountSpec_Glusterfs:
		o = []string{"_netdev", "log-level=WARNING"}
		if others := src.Glusterfs.GetServers()[1:]; len(others) > 0 {
			o = append(o, "backup-volfile-servers="+strings.Join(others, ":"))
		}
	}
	if s.GetReadOnly() {
		o = append(o, "ro")
	}
	return o
}

func tmpfsMode(t *storagev1.TmpfsSource) string {
	if t.GetMode() == "" {
		return "0755"
	}
	return t.GetMode()
}

// owned reports whether a unit file was made by this package.
func owned(content string) bool {
	for line := range strings.Lines(content) {
		if strings.HasPrefix(line, specKey+"=sha256:") {
			return true
		}
	}
	return false
}

// compareUnits names the lines in which a unit file is not as it should be.
func compareUnits(unit, have, want string) []tasks.Difference {
	if have == want {
		return nil
	}
	var diffs []tasks.Difference
	h, w := settings(have), settings(want)
	for _, key := range slices.Concat(w.keys, h.keys) {
		hv, wv := strings.Join(h.values[key], " "), strings.Join(w.values[key], " ")
		d := tasks.Difference{Subject: "unit " + unit + " " + key, Have: hv, Want: wv}
		if hv != wv && !slices.Contains(diffs, d) {
			diffs = append(diffs, d)
		}
	}
	if len(diffs) == 0 {
		diffs = []tasks.Difference{{Subject: "unit " + unit + " comments and layout", Have: "edited", Want: "as written"}}
	}
	return diffs
}

// unitSettings are the settings of a unit file, by section and key.
type unitSettings struct {
	keys   []string
	values map[string][]string
}

// setting returns the last value of a key.
func (u unitSettings) setting(key string) string {
	if v := u.values[key]; len(v) > 0 {
		return v[len(v)-1]
	}
	return ""
}

func settings(content string) unitSettings {
	u := unitSettings{values: map[string][]string{}}
	section := ""
	for line := range strings.Lines(content) {
		line = strings.TrimSpace(line)
		if line == "" || line[0] == '#' || line[0] == ';' {
			continue
		}
		if line[0] == '[' {
			section = strings.Trim(line, "[]")
			continue
		}
		key, value, _ := strings.Cut(line, "=")
		key = section + "." + strings.TrimSpace(key)
		if _, known := u.values[key]; !known {
			u.keys = append(u.keys, key)
		}
		u.values[key] = append(u.values[key], strings.TrimSpace(value))
	}
	return u
}
