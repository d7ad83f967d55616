package storage

import (
	"fmt"
	"path"
	"strconv"
	"strings"

	storagev1 "github.com/gpuaas/millwright/proto/millwright/storage/v1"
	"github.com/gpuaas/millwright/tasks"
	"github.com/gpuaas/millwright/tasks/step"
)

const (
	minTmpfs   = 4096
	maxTmpfs   = 1 << 50
	maxServers = 16
)

// Validate implements [tasks.Task].
func (Mount) Validate(s *storagev1.MountSpec) error {
	var p tasks.Problems
	target := checkTarget(&p, "target", s.GetTarget())
	switch src := s.GetSource().(type) {
	case *storagev1.MountSpec_Bind:
		checkBind(&p, src.Bind, s.GetTarget(), target)
	case *storagev1.MountSpec_Tmpfs:
		checkTmpfs(&p, src.Tmpfs)
	case *storagev1.MountSpec_Glusterfs:
		checkGluster(&p, src.Glusterfs)
	default:
		p.Add("source", "", "is required: give one of bind, tmpfs and glusterfs")
	}
	return p.Err()
}

func checkBind(p *tasks.Problems, b *storagev1.BindSource, target string, targetOK bool) {
	const field = "bind.path"
	if !checkPath(p, field, b.GetPath()) {
		return
	}
	for _, dir := range secret {
		if step.Within(b.GetPath(), dir) {
			p.Add(field, b.GetPath(), "is in "+dir+", which must not be shown elsewhere: choose another directory")
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
		checkSubdirectory(p, sub)
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

func checkSubdirectory(p *tasks.Problems, sub string) {
	const field = "glusterfs.subdirectory"
	_, bad := firstBad(sub, "._-/")
	if bad || !strings.HasPrefix(sub, "/") || path.Clean(sub) != sub || sub == "/" || len(sub) > 1024 {
		p.Add(field, sub, "must be a clean path that begins with /, of letters, digits, . _ and -, with at most 1024 bytes: leave it out for the whole volume")
	}
}
