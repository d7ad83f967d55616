package storage

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"strings"

	"github.com/gpuaas/millwright/tasks"
	"github.com/gpuaas/millwright/tasks/host"
	"github.com/gpuaas/millwright/tasks/step"
)

// needs is what a node has to have before a source can be mounted.
type needs struct {
	programs []program
	kernel   []string // file systems
	modules  []string
	servers  []endpoint // one of them has to answer
	secrets  []secretFile
	beegfs   string // the configuration file of a BeeGFS client
	device   string
	holds    string // the file system that the device must hold
}

type program struct{ name, pkg string }

// endpoint is a server; port 0 is one that TCP does not reach.
type endpoint struct {
	host string
	port uint32
}

type secretFile struct{ field, path string }

// check refuses what is missing, by its name and with the way out.
func (n needs) check(ctx context.Context, h host.Reader, table []host.Mount) error {
	for _, p := range n.programs {
		if _, err := h.FindProgram(ctx, p.name); errors.Is(err, fs.ErrNotExist) {
			return unfit("program %s is missing: install package %s", p.name, p.pkg)
		} else if err != nil {
			return err
		}
	}
	for _, f := range n.kernel {
		if err := checkKernel(ctx, h, f); err != nil {
			return err
		}
	}
	for _, m := range n.modules {
		known, err := h.ModuleKnown(ctx, m)
		if err != nil {
			return err
		}
		if !known {
			return unfit("kernel module %s is missing: install the one for the kernel that runs", m)
		}
	}
	for _, s := range n.secrets {
		if err := checkSecretFile(ctx, h, table, s); err != nil {
			return err
		}
	}
	if n.device != "" {
		if err := checkHolds(ctx, h, n.device, n.holds); err != nil {
			return err
		}
	}
	if n.beegfs != "" {
		return checkBeegfsConfig(ctx, h, table, n.beegfs)
	}
	return nil
}

// checkSecretFile refuses a file with a secret that others than root may read.
func checkSecretFile(ctx context.Context, h host.Reader, table []host.Mount, s secretFile) error {
	if m, bad := step.MayHang(table, s.path); bad {
		return unfit("%s: %s lies on %s of type %s, which may stop answering: keep it on a local file system", s.field, s.path, m.Source, m.FSType)
	}
	info, err := h.Lstat(ctx, s.path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return unfit("%s: file %s does not exist: make it, with mode 0400", s.field, s.path)
	case err != nil:
		return err
	case !info.Mode.IsRegular():
		return unfit("%s: %s is not a regular file: name the file itself", s.field, s.path)
	case info.Mode.Perm()&0o077 != 0:
		return unfit("%s: file %s has mode %#o, so that others than its owner may read the secret: chmod 0400 %s", s.field, s.path, info.Mode.Perm(), s.path)
	case info.Size == 0:
		return unfit("%s: file %s is empty: put the secret into it", s.field, s.path)
	}
	return nil
}

// checkServers refuses when no server can be reached. What can be known without
// the file system's own protocol is its name and, mostly, its port.
func (n needs) checkServers(ctx context.Context, h host.Reader) error {
	var why []string
	for _, e := range n.servers {
		reason, err := unreachable(ctx, h, e)
		if err != nil {
			return err
		}
		if reason == "" {
			return nil
		}
		why = append(why, reason)
	}
	if len(why) == 0 {
		return nil
	}
	return unfit("%s: mend it, or set wait when the server comes later", strings.Join(why, "; "))
}

func unreachable(ctx context.Context, h host.Reader, e endpoint) (string, error) {
	addresses, err := h.ResolveHost(ctx, e.host)
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Sprintf("host name %s does not resolve", e.host), nil
	}
	if err != nil || e.port == 0 {
		return "", err
	}
	err = h.DialPort(ctx, addresses[0], e.port)
	if errors.Is(err, host.ErrNoAnswer) {
		return fmt.Sprintf("port %d of %s does not answer (%v)", e.port, e.host, err), nil
	}
	return "", err
}

// checkBeegfsConfig looks for what the client's configuration names.
func checkBeegfsConfig(ctx context.Context, h host.Reader, table []host.Mount, file string) error {
	if m, bad := step.MayHang(table, file); bad {
		return unfit("beegfs.config_file: %s lies on %s of type %s, which may stop answering: keep it on a local file system", file, m.Source, m.FSType)
	}
	f, err := h.ReadFile(ctx, file)
	if errors.Is(err, fs.ErrNotExist) {
		return unfit("beegfs.config_file: file %s does not exist: install package beegfs-client, or name the file", file)
	}
	if err != nil {
		return err
	}
	conf := settings(string(f.Data))
	if conf.setting(".sysMgmtdHost") == "" {
		return unfit("beegfs.config_file: %s names no sysMgmtdHost: set it to the management server", file)
	}
	if auth := conf.setting(".connAuthFile"); auth != "" {
		return checkSecretFile(ctx, h, table, secretFile{"connAuthFile of " + file, auth})
	}
	if conf.setting(".connDisableAuthentication") != "true" {
		return unfit("beegfs.config_file: %s names no connAuthFile: name the file with the shared secret, with mode 0400", file)
	}
	return nil
}

// checkTransport refuses what an earlier mount from the same NFS server has
// settled otherwise: the kernel has one transport for all of them, and says
// nothing.
func checkTransport(table []host.Mount, target string, s source) error {
	server, _, _ := strings.Cut(s.shown, ":")
	for _, m := range table {
		other, _, _ := strings.Cut(m.Source, ":")
		if m.Target == target || other != server || m.FSType != s.fstype {
			continue
		}
		for _, key := range []string{"nconnect", "proto"} {
			have, _ := option(m.Super, key)
			want := ""
			for _, o := range s.inForce {
				if o.key == key {
					want = o.value
				}
			}
			if have != want {
				return unfit("%s is mounted from server %s on %s with %s=%s, and the first mount from a server settles that for all: take the same, or unmount it first",
					m.Source, server, m.Target, key, have)
			}
		}
	}
	return nil
}

// checkSecretPath reports what is wrong with the path of a file with a secret.
func checkSecretPath(p *tasks.Problems, field, value string) {
	if !checkPath(p, field, value) {
		return
	}
	if c, bad := firstBad(value, "._-+@/"); bad {
		p.Add(field, value, fmt.Sprintf("is given to the client among its options, where %q would mean something else: choose another path", c))
	}
}
