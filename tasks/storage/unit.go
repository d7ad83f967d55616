package storage

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"slices"
	"strings"

	"google.golang.org/protobuf/proto"

	storagev1 "github.com/gpuaas/millwright/proto/millwright/storage/v1"
	"github.com/gpuaas/millwright/tasks"
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

// specDigest is the SHA-256 of a spec, as the unit file has it. How long jobs are
// waited for is about the task, and not about the mount.
func specDigest(s *storagev1.MountSpec) (string, error) {
	if s.GetWaitForJobs() != nil {
		s = proto.CloneOf(s)
		s.WaitForJobs = nil
	}
	b, err := proto.MarshalOptions{Deterministic: true}.Marshal(s)
	if err != nil {
		return "", fmt.Errorf("serialise spec: %w", err)
	}
	sum := sha256.Sum256(b)
	return "sha256:" + hex.EncodeToString(sum[:]), nil
}

// unitFile returns the content of the mount unit of a spec.
//
// All types are wanted by remote-fs.target and come before it, so that a
// service that waits for remote file systems finds the mount. Wanted, not
// required: a mount that does not come up delays a boot by its timeout at most,
// and never fails it. nofail keeps the local ones out of local-fs.target, which
// comes before the network: a bind mount may have its source on a network file
// system, and systemd would break the cycle by dropping jobs.
//
// A mount on the network waits for it and is given up after its timeout; one on
// a disk gives up a disk that does not come, by the timeout of its job.
func unitFile(spec *storagev1.MountSpec) (string, error) {
	digest, err := specDigest(spec)
	if err != nil {
		return "", err
	}
	s := sourceOf(spec)
	var b strings.Builder
	line := func(key, value string) { b.WriteString(key + "=" + value + "\n") }
	b.WriteString("# Made by Millwright (storage.mount). What is changed here by hand is found and undone.\n[Unit]\n")
	line("Description", "Millwright mount "+spec.GetTarget())
	if s.network {
		line("Wants", "network-online.target")
		line("After", strings.Join(slices.Concat([]string{"network-online.target"}, s.after), " "))
	}
	if s.requires != "" {
		line("RequiresMountsFor", s.requires)
	}
	line("Before", "remote-fs.target")
	if s.jobTimeout != "" {
		line("JobTimeoutSec", s.jobTimeout)
	}
	line(specKey, digest)
	b.WriteString("\n[Mount]\n")
	line("What", s.what)
	line("Where", spec.GetTarget())
	line("Type", s.unitType)
	options := s.options
	if spec.GetReadOnly() {
		options = append(slices.Clone(options), "ro")
	}
	line("Options", strings.Join(options, ","))
	for _, e := range s.environment {
		line("Environment", e)
	}
	line("TimeoutSec", mountTimeout)
	line("DirectoryMode", "0755")
	b.WriteString("\n[Install]\n")
	line("WantedBy", "remote-fs.target")
	return b.String(), nil
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
