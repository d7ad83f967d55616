package fakehost

import (
	"context"
	"errors"
	"io/fs"
	"slices"

	"github.com/gpuaas/millwright/tasks/host"
)

// Phase says where in a call a [Hook] is.
type Phase int

// The phases.
const (
	// Before the call has done anything.
	Before Phase = iota + 1
	// During a command: it was started, and has not ended.
	During
	// After the change was made, and before the caller hears of it.
	After
)

// Op is one call of a host's method.
type Op struct {
	Name   string // the method
	Object string // its path, unit or program
	Change bool   // whether it can change the node
	Phase  Phase
}

// Hook is called before and after each call. When it returns an error the call
// ends with it: before, nothing is changed; after, the change stands.
type Hook func(ctx context.Context, op Op) error

// Hosts are the node as one process of the agent sees it.
type Hosts struct {
	node *Node
	hook Hook
}

// Hosts returns the node's hosts. hook may be nil.
func (n *Node) Hosts(hook Hook) Hosts {
	if hook == nil {
		hook = func(ctx context.Context, _ Op) error { return ctx.Err() }
	}
	return Hosts{n, hook}
}

// ForStep returns the host of a step.
func (h Hosts) ForStep(taskID string, step uint32) host.Host {
	return &view{n: h.node, hook: h.hook, key: commandKey{taskID, step}}
}

// Prober returns a host for plans and checks.
func (h Hosts) Prober() host.Prober { return &view{n: h.node, hook: h.hook} }

// view is a node through a hook.
type view struct {
	n    *Node
	hook Hook
	key  commandKey
}

var _ host.Host = (*view)(nil)

// call runs f between the hook's two calls, with the node locked.
func call[T any](ctx context.Context, v *view, op Op, f func() (T, error)) (T, error) {
	var zero T
	op.Phase = Before
	if err := v.hook(ctx, op); err != nil {
		return zero, err
	}
	v.n.mu.Lock()
	out, err := f()
	v.n.mu.Unlock()
	if err != nil {
		return out, err
	}
	op.Phase = After
	if err := v.hook(ctx, op); err != nil {
		return zero, err
	}
	return out, nil
}

// change is call for a method that changes the node.
func change(ctx context.Context, v *view, name, object string, f func() error) error {
	_, err := call(ctx, v, Op{Name: name, Object: object, Change: true}, func() (struct{}, error) { return struct{}{}, f() })
	return err
}

func (v *view) ReadFile(ctx context.Context, path string) (host.File, error) {
	return call(ctx, v, Op{Name: "ReadFile", Object: path}, func() (host.File, error) { return v.n.readFile(path) })
}

func (v *view) Lstat(ctx context.Context, path string) (host.FileInfo, error) {
	return call(ctx, v, Op{Name: "Lstat", Object: path}, func() (host.FileInfo, error) { return v.n.lstat(path) })
}

func (v *view) DirEmpty(ctx context.Context, path string) (bool, error) {
	return call(ctx, v, Op{Name: "DirEmpty", Object: path}, func() (bool, error) {
		names, err := v.n.readDir(path)
		return len(names) == 0, err
	})
}

func (v *view) ReadDir(ctx context.Context, path string) ([]string, error) {
	return call(ctx, v, Op{Name: "ReadDir", Object: path}, func() ([]string, error) { return v.n.readDir(path) })
}

func (v *view) Unit(ctx context.Context, name string) (host.UnitStatus, error) {
	return call(ctx, v, Op{Name: "Unit", Object: name}, func() (host.UnitStatus, error) { return v.n.unitStatus(name), nil })
}

func (v *view) Mounts(ctx context.Context) ([]host.Mount, error) {
	return call(ctx, v, Op{Name: "Mounts"}, func() ([]host.Mount, error) { return slices.Clone(v.n.mounts), nil })
}

func (v *view) Users(ctx context.Context, target string) ([]host.Use, error) {
	return call(ctx, v, Op{Name: "Users", Object: target}, func() ([]host.Use, error) { return v.n.usersOf(target), nil })
}

func (v *view) MountHealth(ctx context.Context, target string) (host.MountHealth, error) {
	return call(ctx, v, Op{Name: "MountHealth", Object: target}, func() (host.MountHealth, error) { return v.n.mountHealth(target), nil })
}

func (v *view) ResolveHost(ctx context.Context, name string) ([]string, error) {
	return call(ctx, v, Op{Name: "ResolveHost", Object: name}, func() ([]string, error) { return v.n.resolve(name) })
}

func (v *view) DialPort(ctx context.Context, address string, port uint32) error {
	_, err := call(ctx, v, Op{Name: "DialPort", Object: address}, func() (struct{}, error) { return struct{}{}, v.n.dial(address, port) })
	return err
}

func (v *view) ModuleKnown(ctx context.Context, name string) (bool, error) {
	return call(ctx, v, Op{Name: "ModuleKnown", Object: name}, func() (bool, error) { return !v.n.absent[name], nil })
}

func (v *view) ProbeFile(ctx context.Context, path string) error {
	_, err := call(ctx, v, Op{Name: "ProbeFile", Object: path}, func() (host.File, error) {
		if _, err := v.n.probe("read", path); err != nil {
			return host.File{}, err
		}
		return v.n.readFile(path)
	})
	return err
}

func (v *view) ForceUnmount(ctx context.Context, target string) error {
	return change(ctx, v, "ForceUnmount", target, func() error { return v.n.letGo(target, "force") })
}

func (v *view) AbortFuse(ctx context.Context, target string) error {
	return change(ctx, v, "AbortFuse", target, func() error { return v.n.letGo(target, "abort") })
}

func (v *view) LazyUnmount(ctx context.Context, target string) error {
	return change(ctx, v, "LazyUnmount", target, func() error { return v.n.letGo(target, "lazy") })
}

func (v *view) BootID(ctx context.Context) (string, error) {
	return call(ctx, v, Op{Name: "BootID"}, func() (string, error) { return bootID(v.n.boot), nil })
}

func (v *view) FindProgram(ctx context.Context, name string) (string, error) {
	return call(ctx, v, Op{Name: "FindProgram", Object: name}, func() (string, error) { return v.n.findProgram(name) })
}

func (v *view) FilesystemKnown(ctx context.Context, fstype string) (bool, error) {
	return call(ctx, v, Op{Name: "FilesystemKnown", Object: fstype}, func() (bool, error) { return v.n.fstypes[fstype], nil })
}

func (v *view) UserExists(ctx context.Context, name string) (bool, error) {
	return call(ctx, v, Op{Name: "UserExists", Object: name}, func() (bool, error) { return v.n.users[name], nil })
}

func (v *view) ProbeWrite(ctx context.Context, dir string) error {
	_, err := call(ctx, v, Op{Name: "ProbeWrite", Object: dir}, func() (struct{}, error) { return struct{}{}, v.n.probeWrite(dir) })
	return err
}

func (v *view) ProbeRead(ctx context.Context, dir string) error {
	_, err := call(ctx, v, Op{Name: "ProbeRead", Object: dir}, func() (host.Mount, error) { return v.n.probe("read", dir) })
	return err
}

func (v *view) ProbeCapacity(ctx context.Context, dir string) (host.Capacity, error) {
	return call(ctx, v, Op{Name: "ProbeCapacity", Object: dir}, func() (host.Capacity, error) { return v.n.probeCapacity(dir) })
}

func (v *view) WriteFile(ctx context.Context, path string, f host.File) error {
	return change(ctx, v, "WriteFile", path, func() error { return v.n.writeFile(path, f) })
}

func (v *view) RemoveFile(ctx context.Context, path string) error {
	return change(ctx, v, "RemoveFile", path, func() error { return v.n.removeFile(path) })
}

func (v *view) MakeDir(ctx context.Context, path string, mode fs.FileMode) error {
	return change(ctx, v, "MakeDir", path, func() error { return v.n.makeDir(path, mode) })
}

func (v *view) RemoveDir(ctx context.Context, path string) error {
	return change(ctx, v, "RemoveDir", path, func() error { return v.n.removeDir(path) })
}

func (v *view) Reload(ctx context.Context) error {
	return change(ctx, v, "Reload", "", func() error { v.n.reload(); return nil })
}

func (v *view) StartUnit(ctx context.Context, name string) error {
	return change(ctx, v, "StartUnit", name, func() error { return v.n.start(name) })
}

func (v *view) StopUnit(ctx context.Context, name string) error {
	return change(ctx, v, "StopUnit", name, func() error { return v.n.stop(name) })
}

func (v *view) SetUnitEnabled(ctx context.Context, name string, enabled bool) error {
	return change(ctx, v, "SetUnitEnabled", name, func() error { return v.n.setEnabled(name, enabled) })
}

// Reboot reboots at once: whoever asked for it does not live to hear of it.
func (v *view) Reboot(ctx context.Context, _ string) error {
	op := Op{Name: "Reboot", Change: true, Phase: Before}
	if err := v.hook(ctx, op); err != nil {
		return err
	}
	v.n.mu.Lock()
	inhibited := v.n.inhibited
	if !inhibited {
		v.n.reboots++
		v.n.disturb("rebooted", "/")
	}
	v.n.mu.Unlock()
	if inhibited {
		return errors.New("reboot the node: Unit reboot.target is masked")
	}
	v.n.Reboot()
	op.Phase = After
	return v.hook(ctx, op)
}

func (v *view) RunCommand(ctx context.Context, c host.Command) (host.Outcome, error) {
	op := Op{Name: "RunCommand", Object: c.Argv[0], Change: true, Phase: Before}
	if err := v.hook(ctx, op); err != nil {
		return host.Outcome{}, err
	}
	rec := v.n.begin(v.key, c)
	op.Phase = During
	if err := v.hook(ctx, op); err != nil {
		return host.Outcome{}, err
	}
	o, err := v.n.finish(ctx, rec, c)
	if err != nil {
		return o, err
	}
	// A command that was stopped has ended all the same.
	op.Phase = After
	return o, v.hook(context.WithoutCancel(ctx), op)
}
