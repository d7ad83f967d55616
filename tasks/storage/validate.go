package storage

import (
	"fmt"
	"path"
	"strconv"
	"strings"
	"time"

	"google.golang.org/protobuf/reflect/protoreflect"

	storagev1 "github.com/gpuaas/millwright/proto/millwright/storage/v1"
	"github.com/gpuaas/millwright/tasks"
	"github.com/gpuaas/millwright/tasks/step"
)

const (
	minTmpfs   = 4096
	maxTmpfs   = 1 << 50
	maxServers = 16

	maxAttempts = 20
	maxBackOff  = 5 * time.Minute
)

// Validate implements [tasks.Task].
func (Mount) Validate(s *storagev1.MountSpec) error {
	var p tasks.Problems
	target := checkTarget(&p, "target", s.GetTarget())
	tasks.CheckJobWait(&p, s.GetWaitForJobs())
	switch src := s.GetSource().(type) {
	case *storagev1.MountSpec_Bind:
		checkBind(&p, src.Bind, s.GetTarget(), target)
	case *storagev1.MountSpec_Tmpfs:
		checkTmpfs(&p, src.Tmpfs)
	case *storagev1.MountSpec_Glusterfs:
		checkGluster(&p, src.Glusterfs)
	case *storagev1.MountSpec_Nfs:
		checkNFS(&p, src.Nfs, s.GetReadOnly())
	case *storagev1.MountSpec_Lustre:
		checkLustre(&p, src.Lustre)
	case *storagev1.MountSpec_Weka:
		checkWeka(&p, src.Weka)
	case *storagev1.MountSpec_Beegfs:
		if f := src.Beegfs.GetConfigFile(); f != "" {
			checkSecretPath(&p, "beegfs.config_file", f)
		}
	case *storagev1.MountSpec_Cephfs:
		checkCeph(&p, src.Cephfs)
	case *storagev1.MountSpec_S3:
		checkS3(&p, src.S3, s)
	case *storagev1.MountSpec_Device:
		checkDevice(&p, src.Device)
	default:
		p.Add("source", "", "is required: give one of bind, tmpfs, glusterfs, nfs, lustre, weka, beegfs, cephfs, s3 and device")
	}
	checkWait(&p, s)
	if f := s.GetSentinel(); f != "" {
		checkSentinel(&p, f)
	}
	return p.Err()
}

// checkWait reports what is wrong with how long a server is waited for.
func checkWait(p *tasks.Problems, s *storagev1.MountSpec) {
	w := s.GetWait()
	if w == nil {
		return
	}
	if !sourceOf(s).network && s.GetSource() != nil {
		p.Add("wait", "set", "is for sources on the network: leave it out")
	}
	if n := w.GetAttempts(); n < 2 || n > maxAttempts {
		p.Add("wait.attempts", fmt.Sprint(n), fmt.Sprintf("must be 2 to %d: leave wait out for one attempt", maxAttempts))
	}
	if d := w.GetBackOff().AsDuration(); w.GetBackOff().CheckValid() != nil || d < time.Second || d > maxBackOff {
		p.Add("wait.back_off", fmt.Sprint(d), fmt.Sprintf("must be 1s to %v: it doubles before each further attempt", maxBackOff))
	}
}

func checkSentinel(p *tasks.Problems, f string) {
	if _, bad := firstBad(f, "._-/"); bad || path.Clean("/"+f) != "/"+f || len(f) > 1024 {
		p.Add("sentinel", f, "must be a clean path within the mount, of letters, digits, . _ - and /, that does not begin with /: name a file")
	}
}

// checkEnum reports a number that the enum does not have.
func checkEnum(p *tasks.Problems, field string, v protoreflect.Enum) bool {
	if v.Descriptor().Values().ByNumber(v.Number()) != nil {
		return true
	}
	p.Add(field, fmt.Sprint(v.Number()), fmt.Sprintf("is not one of the %d values that there are: millctl explain storage.mount shows them", v.Descriptor().Values().Len()))
	return false
}

// checkName reports what is wrong with a name that becomes part of an option.
func checkName(p *tasks.Problems, field, value, wayOut string) {
	if _, bad := firstBad(value, "._-"); bad || value == "" || len(value) > 255 || value[0] == '-' {
		p.Add(field, value, "must be letters, digits, . _ and -, not begin with -, and have 1 to 255 bytes: "+wayOut)
	}
}

func checkBind(p *tasks.Problems, b *storagev1.BindSource, target string, targetOK bool) {
	const field = "bind.path"
	if !checkPath(p, field, b.GetPath()) {
		return
	}
	for _, dir := range secret {
		switch {
		case step.Within(b.GetPath(), dir):
			p.Add(field, b.GetPath(), "is in "+dir+", which must not be shown elsewhere: choose another directory")
			return
		case step.Within(dir, b.GetPath()):
			p.Add(field, b.GetPath(), "holds "+dir+", which must not be shown elsewhere: choose a directory of its own")
			return
		}
	}
	if targetOK && (step.Within(b.GetPath(), target) || step.Within(target, b.GetPath())) {
		p.Add(field, b.GetPath(), fmt.Sprintf("must be neither target (%s) nor above or below it: choose directories beside each other", target))
	}
}

func checkTmpfs(p *tasks.Problems, t *storagev1.TmpfsSource) {
	switch size := t.GetSizeBytes(); {
	case size < minTmpfs:
		p.Add("tmpfs.size_bytes", fmt.Sprint(size), fmt.Sprintf("must be at least %d: give the most that it may hold, in bytes", minTmpfs))
	case size > maxTmpfs:
		p.Add("tmpfs.size_bytes", fmt.Sprint(size), fmt.Sprintf("must be at most %d (1 PiB): give a size that the node's memory can hold", int64(maxTmpfs)))
	}
	if t.GetMode() == "" {
		return
	}
	if _, err := strconv.ParseUint(t.GetMode(), 8, 32); err != nil || len(t.GetMode()) != 4 {
		p.Add("tmpfs.mode", t.GetMode(), "must be four octal digits: for example 0755 or 1777")
	}
}

func checkGluster(p *tasks.Problems, g *storagev1.GlusterfsSource) {
	switch n := len(g.GetServers()); {
	case n == 0:
		p.Add("glusterfs.servers", "", "is required: name at least one server")
	case n > maxServers:
		p.Add("glusterfs.servers", fmt.Sprintf("%d servers", n), fmt.Sprintf("must be at most %d: name a few, the client learns of the others", maxServers))
	}
	seen := map[string]bool{}
	for i, server := range g.GetServers() {
		field := fmt.Sprintf("glusterfs.servers[%d]", i)
		if rule := checkHost(server); rule != "" {
			p.Add(field, server, rule)
		} else if seen[server] {
			p.Add(field, server, "is named twice: name each server once")
		}
		seen[server] = true
	}
	checkVolume(p, g.GetVolume())
	if sub := g.GetSubdirectory(); sub != "" {
		checkSubdirectory(p, "glusterfs.subdirectory", sub)
	}
}

// checkHost returns the rule that a server's name breaks.
func checkHost(s string) string {
	const rule = "must be a host name or an IPv4 address: letters, digits, - and ., at most 253 bytes"
	if s == "" || len(s) > 253 {
		return rule
	}
	for label := range strings.SplitSeq(s, ".") {
		if _, bad := firstBad(label, "-"); bad || label == "" || len(label) > 63 ||
			strings.HasPrefix(label, "-") || strings.HasSuffix(label, "-") {
			return rule
		}
	}
	return ""
}

func checkVolume(p *tasks.Problems, v string) {
	const field = "glusterfs.volume"
	_, bad := firstBad(v, "_-")
	switch {
	case v == "":
		p.Add(field, v, "is required: give the name that gluster volume list shows")
	case bad || len(v) > 255 || v[0] == '-':
		p.Add(field, v, "must be letters, digits, _ and -, not begin with -, and have at most 255 bytes: give the name that gluster volume list shows")
	case v == "snaps":
		p.Add(field, v, "means snapshots to GlusterFS: give the name of a volume")
	}
}

func checkSubdirectory(p *tasks.Problems, field, sub string) {
	_, bad := firstBad(sub, "._-/")
	if bad || !strings.HasPrefix(sub, "/") || path.Clean(sub) != sub || sub == "/" || len(sub) > 1024 {
		p.Add(field, sub, "must be a clean path that begins with /, of letters, digits, . _ and -, with at most 1024 bytes: leave it out for the whole volume")
	}
}
