package systemd

import (
	"context"
	"crypto/sha256"
	"fmt"
	"time"

	sd "github.com/coreos/go-systemd/v22/dbus"
	"github.com/godbus/dbus/v5"

	"github.com/gpuaas/millwright/agent/internal/crash"
)

// unmountTimeout bounds one umount(8). One that hangs in the kernel outlives it.
const unmountTimeout = 20 * time.Second

// ForceUnmount implements host.Unmounter.
func (c *Conn) ForceUnmount(ctx context.Context, target string) error {
	return c.unmount(ctx, "--force", target)
}

// LazyUnmount implements host.Unmounter.
func (c *Conn) LazyUnmount(ctx context.Context, target string) error {
	return c.unmount(ctx, "--lazy", target)
}

// unmount runs umount(8) in a unit of its own: the agent may not unmount, and a
// forced unmount may hang. The path is not looked up, which would ask a server
// that does not answer, and no helper of the file system is asked either.
func (c *Conn) unmount(ctx context.Context, how, target string) error {
	if err := crash.Fault("host.unmount.before"); err != nil {
		return err
	}
	argv := []string{"/bin/umount", "--no-canonicalize", "--internal-only", how, target}
	sum := sha256.Sum256([]byte(target))
	name := fmt.Sprintf("millwright-umount-%x.service", sum[:8])
	limit := uint64(unmountTimeout.Microseconds())
	err := c.StartTransient(ctx, name, []sd.Property{
		{Name: "Description", Value: dbus.MakeVariant("Millwright unmounts " + target)},
		{Name: "Type", Value: dbus.MakeVariant("oneshot")},
		{Name: "CollectMode", Value: dbus.MakeVariant("inactive-or-failed")},
		{Name: "TimeoutStartUSec", Value: dbus.MakeVariant(limit)},
		{Name: "TimeoutStopUSec", Value: dbus.MakeVariant(uint64(time.Second.Microseconds()))},
		ExecStart(argv),
	})
	if err != nil {
		return fmt.Errorf("umount %s %s: %w", how, target, err)
	}
	return crash.Fault("host.unmount.after")
}
