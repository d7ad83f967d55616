package testbed

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"strconv"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"
)

// StateDir is where a node has a disk of its own, if it was asked for.
const StateDir = "/var/lib/millwright"

// fillFile is what takes the room on a full disk.
const fillFile = ".testbed-fill"

// makeStateDisk makes the node's own disk: an ext4 in a file of that size, so
// that it can be full without the machine's disk being full.
func (n *Node) makeStateDisk(ctx context.Context) error {
	size := n.testbed.state.StateMiB
	if size == 0 {
		return nil
	}
	if err := os.MkdirAll(n.dir("state"), 0o700); err != nil {
		return err
	}
	for _, argv := range [][]string{
		{"truncate", "-s", strconv.Itoa(size) + "M", n.dir("state.img")},
		{"mkfs.ext4", "-q", "-m", "0", n.dir("state.img")},
	} {
		if _, err := run(ctx, argv[0], argv[1:]...); err != nil {
			return err
		}
	}
	return n.mountStateDisk(ctx)
}

func (n *Node) mountStateDisk(ctx context.Context) error {
	_, err := run(ctx, "mount", "-o", "loop,errors=remount-ro", n.dir("state.img"), n.dir("state"))
	return err
}

// stateDiskArgs are nspawn's for the node's own disk.
func (n *Node) stateDiskArgs() []string {
	if n.testbed.state.StateMiB == 0 {
		return nil
	}
	return []string{"--bind=" + n.dir("state") + ":" + StateDir}
}

// Fill fills the file system that holds a directory of the node, and leaves so
// many bytes. It refuses one that the node shares with the machine.
func (n *Node) Fill(ctx context.Context, dir string, leave uint64) error {
	shared, err := n.shared(ctx, dir)
	if err != nil {
		return err
	}
	if shared {
		return fmt.Errorf("fill %s of node %s: it is on the disk of the machine; bring the testbed up with --state-size, or mount something there", dir, n.name)
	}
	const script = `set -e
file="$1/$2"
for i in 1 2 3; do
	free=$(($(stat -f -c '%a * %S' "$1")))
	test $free -gt $3 || exit 0
	size=$(stat -c %s "$file" 2>/dev/null || echo 0)
	fallocate -l $((size + free - $3)) "$file" || break
done
# What metadata has taken of the rest, and the last block.
test $3 -gt 0 || dd if=/dev/zero of="$file.rest" bs=4096 2>/dev/null || true
sync -f "$1"
`
	_, err = n.Exec(ctx, "sh", "-c", script, "fill", dir, fillFile, strconv.FormatUint(leave, 10))
	return err
}

// Free gives back the room that Fill has taken.
func (n *Node) Free(ctx context.Context, dir string) error {
	file := path.Join(dir, fillFile)
	_, err := n.Exec(ctx, "rm", "-f", file, file+".rest")
	return err
}

// shared reports whether a directory is on the disk of the machine: on the
// node's root, or on what the machine lends it.
func (n *Node) shared(ctx context.Context, dir string) (bool, error) {
	res, err := n.Exec(ctx, "stat", "-c", "%d", dir)
	if err != nil {
		return false, err
	}
	device := strings.TrimSpace(string(res.Stdout))
	for _, root := range []string{n.dir("root"), n.testbed.Dir()} {
		var st unix.Stat_t
		if err := unix.Stat(root, &st); err != nil {
			return false, fmt.Errorf("look at %s: %w", root, err)
		}
		if device == strconv.FormatUint(st.Dev, 10) {
			return true, nil
		}
	}
	return false, nil
}

// FailDisk has the ext4 of the node's own disk find an error, as one of its
// blocks would be: it is read-only from now on, and every write fails with EROFS.
func (n *Node) FailDisk() error {
	var st unix.Stat_t
	if err := unix.Stat(n.dir("state"), &st); err != nil {
		return &os.PathError{Op: "stat", Path: n.dir("state"), Err: err}
	}
	device, err := filepath.EvalSymlinks(fmt.Sprintf("/sys/dev/block/%d:%d", unix.Major(st.Dev), unix.Minor(st.Dev)))
	if err != nil {
		return fmt.Errorf("find the disk of node %s: %w", n.name, err)
	}
	return os.WriteFile(filepath.Join("/sys/fs/ext4", filepath.Base(device), "trigger_fs_error"), []byte("an error that a test asked for"), 0)
}

// BreakDisk has every access to the node's own disk fail with EIO from now on,
// as a disk does that is gone. What was not synced is lost.
func (n *Node) BreakDisk() error {
	if n.testbed.state.StateMiB == 0 {
		return fmt.Errorf("node %s has no disk of its own; bring the testbed up with --state-size", n.name)
	}
	return Shutdown(n.dir("state"))
}

// ReplaceDisk puts another disk in the place of a broken one, with what was last
// synced to that. The node must be off. The broken one stays broken for as long
// as any namespace of the machine has it mounted.
func (n *Node) ReplaceDisk(ctx context.Context) error {
	if n.IsOn() {
		return fmt.Errorf("node %s is on: its disk is in use", n.name)
	}
	if err := unix.Unmount(n.dir("state"), 0); err != nil {
		return fmt.Errorf("unmount the disk of node %s: %w", n.name, err)
	}
	image := n.dir("state.img")
	if _, err := run(ctx, "cp", "--sparse=always", image, image+".new"); err != nil {
		return err
	}
	if err := os.Rename(image+".new", image); err != nil {
		return fmt.Errorf("replace the disk of node %s: %w", n.name, err)
	}
	return n.mountStateDisk(ctx)
}

// Shutdown has every access to the ext4 or XFS at a mount point of the machine
// fail with EIO until it is mounted again.
func Shutdown(mountPoint string) (err error) {
	const (
		shutdown = 0x8004587d // FS_IOC_SHUTDOWN
		noFlush  = 2          // nothing more reaches the disk, as in a power cut
	)
	dir, err := os.Open(mountPoint)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, dir.Close()) }()
	how := uint32(noFlush)
	if _, _, e := unix.Syscall(unix.SYS_IOCTL, dir.Fd(), shutdown, uintptr(unsafe.Pointer(&how))); e != 0 {
		return fmt.Errorf("shut down the file system at %s: %w", mountPoint, e)
	}
	return nil
}
