// Package host declares what a task may see and do on a node.
//
// The interfaces belong to the tasks, which are their only users. The agent
// implements them over systemd, the kernel and the shim; package fakehost in
// tasks/tasktest implements them in memory. Both pass the suite of package
// hosttest.
//
// A [Reader] cannot change the node, so the compiler keeps Validate, Plan and
// Observe honest. A [Prober] may also run bounded checks that clean up after
// themselves. Only a [Host] changes the node, and each of its methods may be
// repeated: done twice is the same as done once.
//
// All methods are safe for concurrent use and return when ctx ends, except
// where a comment says otherwise. Paths are absolute and clean.
package host

import (
	"context"
	"errors"
	"io/fs"
	"time"
)

var (
	// ErrOutcomeUnknown is returned by [Commander.RunCommand] when a command
	// was started and no record says how it ended. It must not be run again.
	ErrOutcomeUnknown = errors.New("outcome of the command is unknown")
	// ErrNotStarted is returned by [Commander.RunCommand] for a program that was
	// not started and never will be for this step and attempt: it changed nothing.
	ErrNotStarted = errors.New("the program was not started")
	// ErrBusy is returned by [UnitController.StopUnit] when a mount point is in
	// use. The message names who uses it.
	ErrBusy = errors.New("in use")
	// ErrNoUnit is returned for a unit that systemd does not know.
	ErrNoUnit = errors.New("no such unit")
	// ErrNotOurs is wrapped by the error of a change to a container that Millwright
	// did not make, or to a drain of somebody else: nothing was changed.
	ErrNotOurs = errors.New("not made by Millwright")
	// ErrJob is wrapped by the error of a unit that did not reach the state that
	// was asked for. The message has the unit's Result and last log lines.
	ErrJob = errors.New("unit did not reach the state")
	// ErrNoAnswer is wrapped by the error of [Network.DialPort] when the port was
	// not reached.
	ErrNoAnswer = errors.New("no answer")
	// ErrDisconnected is wrapped by the error of a probe when the client that
	// serves the file system has died.
	ErrDisconnected = errors.New("transport endpoint is not connected")
	// ErrStale is wrapped by the error of a probe when the server has another file
	// system than the one that was mounted.
	ErrStale = errors.New("stale file handle")
)

// File is a file's content with its permission bits.
type File struct {
	Data []byte
	Mode fs.FileMode
}

// FileInfo describes a path without following a symbolic link at its end.
type FileInfo struct {
	Mode   fs.FileMode // type and permission bits
	Size   int64
	Target string // of a symbolic link
}

// FileReader reads files.
type FileReader interface {
	// ReadFile returns the regular file at path, at most 4 MiB of it; a larger
	// one is an error. A missing file is fs.ErrNotExist. It must not be used
	// below a mount that may hang: see [Prober].
	ReadFile(ctx context.Context, path string) (File, error)
	// Lstat describes path. A missing one is fs.ErrNotExist.
	Lstat(ctx context.Context, path string) (FileInfo, error)
	// DirEmpty reports whether the directory at path has no entries.
	DirEmpty(ctx context.Context, path string) (bool, error)
	// ReadDir returns the names of the entries of the directory at path, sorted.
	// A missing one is fs.ErrNotExist; one with more than 10,000 entries is an
	// error.
	ReadDir(ctx context.Context, path string) ([]string, error)
}

// UnitStatus is the state of a systemd unit.
type UnitStatus struct {
	Load         string // loaded, not-found, bad-setting, masked, error
	Active       string // active, activating, deactivating, inactive, failed
	Sub          string // mounted, running, dead ...
	Result       string // success, exit-code, timeout, protocol ...
	Enabled      string // enabled, disabled, static, transient, or empty
	Fragment     string // the unit file
	DropIns      []string
	NeedReload   bool
	Invocation   string // InvocationID in hexadecimal, or empty
	ConditionMet bool
}

// UnitReader reads the states of units.
type UnitReader interface {
	// Unit returns the state of a unit. One that systemd does not know has Load
	// not-found, and no error.
	Unit(ctx context.Context, name string) (UnitStatus, error)
}

// Mount is one line of the kernel's mount table.
type Mount struct {
	ID      int
	Parent  int
	Dev     string // major:minor
	Root    string // the part of the file system that is mounted
	Target  string
	Options []string // of the mount point
	FSType  string
	Source  string
	Super   []string // options of the file system
}

// ReadOnly reports whether nothing can be written through m.
func (m Mount) ReadOnly() bool {
	for _, o := range m.Options {
		if o == "ro" {
			return true
		}
	}
	for _, o := range m.Super {
		if o == "ro" {
			return true
		}
	}
	return false
}

// Use is a process that keeps a mount busy.
type Use struct {
	PID     int
	Command string
	How     string // cwd, root, exe, fd 3, map
}

// MountHealth is what can be known of a mount without asking it.
type MountHealth string

// The states. A mount of which nothing bad is known is none of them.
const (
	// MountHung is a mount whose server or daemon does not answer.
	MountHung MountHealth = "hung"
	// MountDisconnected is a FUSE mount whose daemon has died.
	MountDisconnected MountHealth = "disconnected"
	// MountStale is a mount whose server has another file system now. It is known
	// from a probe alone.
	MountStale MountHealth = "stale"
)

// MountReader reads the mount table. It never touches a mounted file system,
// so that it answers while one hangs.
type MountReader interface {
	// Mounts returns the mount table of the node's first process, in order.
	Mounts(ctx context.Context) ([]Mount, error)
	// Users returns the processes that keep the mount at target busy, in any
	// mount namespace, at most 100 of them.
	Users(ctx context.Context, target string) ([]Use, error)
	// MountHealth returns what the kernel tells of the mount at target, from its
	// processes and its own counts; empty when that is nothing bad.
	MountHealth(ctx context.Context, target string) (MountHealth, error)
}

// Network looks at other machines, with a deadline of a few seconds.
type Network interface {
	// ResolveHost returns the addresses of a host name, as the node's programs
	// find them. A name that has none is fs.ErrNotExist.
	ResolveHost(ctx context.Context, name string) ([]string, error)
	// DialPort connects to a TCP port and leaves again. One that is not reached is
	// an error that wraps [ErrNoAnswer].
	DialPort(ctx context.Context, address string, port uint32) error
}

// ContainerStatus is what is known of a container by its name.
type ContainerStatus struct {
	Exists bool // there is one, or the rest of one
	Ours   bool // Millwright made it
	// Running says that its first process runs. One that was made and not
	// started does not, nor one that is paused.
	Running bool
	// State is how the runtime names it: running, created, stopped, paused ...;
	// none when it was made and never started, or not since the node booted.
	State string
	// Record is what [ContainerController.CreateContainer] was given, or nothing
	// when it cannot be read.
	Record []byte
	// Image is the digest of its image.
	Image string
	// Process tells one run of it from all others: two runs differ.
	Process string
	PID     int
	// ControlGroup is where its process runs.
	ControlGroup string
	// ExitCode is how it ended, when it has; from 128 on mostly 128 and a signal.
	ExitCode int
	// OOMKilled says that the kernel ended it for want of memory. It is only
	// known of one that ended while somebody looked.
	OOMKilled bool
	// LastLines are the last lines that it wrote, when it does not run.
	LastLines []string
}

// ImageStatus is what is known of an image by its digest.
type ImageStatus struct {
	Present bool
	// Users are the containers made from it, sorted.
	Users []string
}

// ContainerReader looks at the containers and images of Millwright's own
// namespace. Its methods wait a while for a runtime that does not answer.
type ContainerReader interface {
	// Container returns the status of a container. One that is not there has
	// Exists false, and no error.
	Container(ctx context.Context, name string) (ContainerStatus, error)
	// Image returns the status of an image.
	Image(ctx context.Context, digest string) (ImageStatus, error)
	// ImageArchive returns the digests of the images in an OCI archive, sorted. A
	// missing file is fs.ErrNotExist; one that is no OCI archive is another error
	// that wraps [fs.ErrInvalid].
	ImageArchive(ctx context.Context, path string) ([]string, error)
}

// Facts are what a node is.
type Facts interface {
	// BootID returns the kernel's boot id.
	BootID(ctx context.Context) (string, error)
	// FindProgram returns the path of a program in the system's directories. A
	// missing one is fs.ErrNotExist.
	FindProgram(ctx context.Context, name string) (string, error)
	// FilesystemKnown reports whether the kernel can mount the type, or could
	// after it has loaded a module.
	FilesystemKnown(ctx context.Context, fstype string) (bool, error)
	// ModuleKnown reports whether the kernel has a module, loaded or built in, or
	// could load it.
	ModuleKnown(ctx context.Context, name string) (bool, error)
	// UserExists reports whether the node knows the user.
	UserExists(ctx context.Context, name string) (bool, error)
}

// Reader observes a node and never changes it.
type Reader interface {
	FileReader
	StorageReader
	ProgramReader
	SecretReader
	DeviceReader
	Facts
	Network
}

// ProgramReader observes what other programs of the node look after.
type ProgramReader interface {
	UnitReader
	ContainerReader
	PackageReader
	SlurmReader
}

// Capacity is what statfs says of a file system.
type Capacity struct {
	TotalBytes uint64
	FreeBytes  uint64
}

// Prober is a Reader that may also run bounded checks. Each runs in a child
// process with a deadline; one that does not end is killed and abandoned, and
// the caller gets an error that wraps context.DeadlineExceeded.
type Prober interface {
	Reader
	SlurmProber
	// ProbeWrite makes a file below dir, writes and syncs it, reads it back and
	// removes it.
	ProbeWrite(ctx context.Context, dir string) error
	// ProbeRead lists dir.
	ProbeRead(ctx context.Context, dir string) error
	// ProbeFile reads the beginning of the regular file at path. A missing one is
	// fs.ErrNotExist.
	ProbeFile(ctx context.Context, path string) error
	// ProbeCapacity asks the file system at dir for its size.
	ProbeCapacity(ctx context.Context, dir string) (Capacity, error)
	// ProbeContainer looks at a container twice, a short time apart. When one and
	// the same process runs both times, and in the container's own control group,
	// it returns that it runs; otherwise what became of it.
	ProbeContainer(ctx context.Context, name string) (ContainerStatus, error)
}

// FileWriter changes files. What it did is durable when it returns: it syncs
// the file and the directory.
type FileWriter interface {
	// WriteFile replaces the file at path atomically.
	WriteFile(ctx context.Context, path string, f File) error
	// RemoveFile removes the file at path, if it is there.
	RemoveFile(ctx context.Context, path string) error
	// MakeDir makes one directory. One that exists is no error.
	MakeDir(ctx context.Context, path string, mode fs.FileMode) error
	// RemoveDir removes an empty directory, if it is there. It never removes
	// through a mount.
	RemoveDir(ctx context.Context, path string) error
}

// UnitController changes the states of units. StartUnit, StopUnit and
// RestartUnit reset a failed unit first, wait until the job has ended, and
// return an error that wraps [ErrJob] when the unit did not get there.
type UnitController interface {
	Unmounter
	// Reload makes systemd read its unit files again.
	Reload(ctx context.Context) error
	// StartUnit starts a unit.
	StartUnit(ctx context.Context, name string) error
	// StopUnit stops a unit. One that is not there is no error. For a mount that
	// is in use the error wraps [ErrBusy], and nothing was stopped: neither the
	// mount nor a service that requires it.
	StopUnit(ctx context.Context, name string) error
	// SetUnitEnabled enables or disables a unit for the next boot.
	SetUnitEnabled(ctx context.Context, name string, enabled bool) error
}

// Unmounter unmounts what stopping a unit does not. Each ends within half a
// minute. A target where nothing is mounted is no error.
type Unmounter interface {
	// ForceUnmount unmounts what is seen at target, and breaks off what waits for
	// its server.
	ForceUnmount(ctx context.Context, target string) error
	// AbortFuse ends the connection of the FUSE mount at target to its daemon: all
	// that waits for it fails. One of another type is left as it is.
	AbortFuse(ctx context.Context, target string) error
	// LazyUnmount takes the mount at target out of the directory tree. For those
	// who use it, it lives on.
	LazyUnmount(ctx context.Context, target string) error
}

// ContainerMount shows a path of the node in a container.
type ContainerMount struct {
	Source, Target string
	ReadOnly       bool
}

// Container is what a container is made from.
type Container struct {
	Name         string
	Image        string // digest
	Argv         []string
	Environment  []string // KEY=VALUE, over the image's
	Dir          string   // unset: the image's
	User         string   // UID or UID:GID; unset: the image's
	Mounts       []ContainerMount
	ReadOnlyRoot bool
	HostNetwork  bool
	MemoryBytes  uint64        // 0: no limit
	CPUMillis    uint32        // 0: no limit
	StopGrace    time.Duration // from its stop signal until it is killed
	// Devices are GPUs and MIG devices by their CDI names, which are looked up when
	// the container is made: one that is not there is [ErrGPUUnknown].
	Devices []string
	// Record is kept with the container and given back with its status.
	Record []byte
}

// ContainerController changes the containers and images of Millwright's own
// namespace, and nothing else of the runtime. A change to a container that
// Millwright did not make is an error that wraps [ErrNotOurs].
type ContainerController interface {
	// ImportImage brings the image with the digest from an OCI archive into the
	// store, ready to be run. One that is there stays as it is. What does not
	// match its digest is an error.
	ImportImage(ctx context.Context, archive, digest string) error
	// RemoveImage removes an image, if it is there and no container uses it.
	RemoveImage(ctx context.Context, digest string) error
	// CreateContainer makes a container and does not start it. Whatever was left
	// of an earlier one with the name is cleared away first, but one that is
	// there already with another record is fs.ErrExist. An image that is not in
	// the store is fs.ErrNotExist.
	CreateContainer(ctx context.Context, c Container) error
	// StartContainer starts a container that was made. One that runs stays as it
	// is.
	StartContainer(ctx context.Context, name string) error
	// RemoveContainer stops a container, with its grace, and removes it with all
	// that it wrote, if it is there.
	RemoveContainer(ctx context.Context, name string) error
}

// Command is a program to run under the shim.
type Command struct {
	Argv        []string
	Dir         string
	Environment []string
	User        string
	Timeout     time.Duration // 0: none
	StopGrace   time.Duration // between SIGTERM and SIGKILL when it is stopped; 0: 10 s
}

// Output describes one stream of a command that has ended.
type Output struct {
	Total      uint64
	Head, Tail uint64
	HeadSHA256 []byte
	TailSHA256 []byte
	OpenAtEnd  bool // something that the command left behind still held it open
}

// Outcome is how a command ended.
type Outcome struct {
	ExitCode   int
	Signal     int
	Invocation string
	BootID     string
	Duration   time.Duration
	Stdout     Output
	Stderr     Output
	TimedOut   bool
	OOMKilled  bool
}

// Commander runs the one command that belongs to the step for which the
// executor made this host.
type Commander interface {
	// RunCommand starts the step's command if it never was, or finds it again,
	// and waits for its end. At most one process is ever started for a step and
	// attempt, whatever crashes. When the record of a started command has no
	// end and nothing runs, the error wraps [ErrOutcomeUnknown]; when the
	// program was not started and never will be, it wraps [ErrNotStarted] and
	// why: fs.ErrNotExist, fs.ErrPermission or the like. When ctx ends with
	// [ErrStop] as its cause, the command is stopped and its outcome returned;
	// when ctx ends otherwise it is left running, to be found again.
	RunCommand(ctx context.Context, c Command) (Outcome, error)
	// CommandOutput returns what the step's command wrote to its standard output, at
	// most 1 MiB from its beginning. It is asked for once RunCommand has returned an
	// outcome.
	CommandOutput(ctx context.Context) ([]byte, error)
}

// ErrStop is the cause of a context that ends because the command in it is to
// be stopped: the task was cancelled or its time is over.
var ErrStop = errors.New("stop the command")

// Rebooter reboots the node.
type Rebooter interface {
	// Reboot asks for an orderly reboot and returns once that is on its way. The
	// agent is stopped by it like all else. Asked for again it stays one reboot.
	Reboot(ctx context.Context, reason string) error
}

// Controllers change what other programs of the node look after.
type Controllers interface {
	UnitController
	ContainerController
	PackageController
	SlurmChanger
}

// Once does what belongs to one step and must not be done twice.
type Once interface {
	Commander
	GPUResetter
}

// Host changes a node.
type Host interface {
	Prober
	StorageWriter
	Controllers
	SecretWriter
	DeviceWriter
	Once
	Rebooter
}
