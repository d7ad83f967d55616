package packages

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	sd "github.com/coreos/go-systemd/v22/dbus"

	"github.com/gpuaas/millwright/agent/internal/crash"
	"github.com/gpuaas/millwright/agent/internal/host/files"
	"github.com/gpuaas/millwright/tasks/host"
)

// helperPath is where the scripts of packages ask whether a service may be
// started: see policy-rc.d(8) of Debian's invoke-rc.d.
const helperPath = "/usr/sbin/policy-rc.d"

// helper answers that question: a service may be stopped, by the package that is
// removed, and nothing else.
const helper = "#!/bin/sh\nfor word; do [ \"$word\" = stop ] && exit 0; done\nexit 101\n"

// run runs a program that changes packages, to its end.
func (a *apt) run(ctx context.Context, argv []string) error {
	policy := filepath.Join(a.cfg.Dir, "policy-rc.d")
	if err := files.MakeDirs(a.cfg.Dir, 0o700); err != nil {
		return fmt.Errorf("prepare %s: %w", argv[0], err)
	}
	if err := crash.Fault("host.packages.policy.before"); err != nil {
		return err
	}
	if err := files.Replace(policy, []byte(helper), 0o755); err != nil {
		return fmt.Errorf("prepare %s: %w", argv[0], err)
	}
	if err := crash.Fault("host.packages.policy.after"); err != nil {
		return err
	}
	defer removePlaceholder()
	err := a.inUnit(ctx, properties(argv, policy))
	if err != nil && strings.Contains(err.Error(), "Could not get lock") {
		return fmt.Errorf("%w: %w", host.ErrPackagesLocked, err)
	}
	return err
}

// removePlaceholder removes the empty file that systemd makes where it shows the
// helper, on a node that has none. It cannot be run, so that until then nobody
// asks it.
func removePlaceholder() {
	info, err := os.Lstat(helperPath)
	if err == nil && info.Mode().IsRegular() && info.Size() == 0 && info.Mode()&0o111 == 0 {
		_ = os.Remove(helperPath) // it does no harm
	}
}

type bindPath struct {
	Source, Target string
	IgnoreMissing  bool
	Flags          uint64
}

// properties are those of the unit. Only its own processes see the helper.
func properties(argv []string, policy string) []sd.Property {
	return append(unitProperties([][]string{argv},
		"DEBIAN_FRONTEND=noninteractive", "DEBIAN_PRIORITY=critical", "APT_LISTCHANGES_FRONTEND=none", "NEEDRESTART_SUSPEND=1", "UCF_FORCE_CONFFOLD=1"),
		property("BindReadOnlyPaths", []bindPath{{Source: policy, Target: helperPath}}))
}
