package host

import (
	"context"
	"errors"
	"slices"
	"time"
)

// What the driver says of a GPU that it will not change or cannot be asked. The
// errors of this file wrap one of them where the driver said one of these, and
// have its own words and the name of the function that said so. None tells
// whether a change was made: who gets one reads the GPU again.
var (
	// ErrGPUInUse means that somebody holds the GPU or the instance.
	ErrGPUInUse = errors.New("GPU in use")
	// ErrGPUUnsupported means that this GPU, or this driver, does not do that: MIG
	// on one that has none, a reset in a virtual machine.
	ErrGPUUnsupported = errors.New("not supported by the GPU or its driver")
	// ErrGPUResources means that an instance has no place: what it would take is
	// taken.
	ErrGPUResources = errors.New("no room on the GPU")
	// ErrGPUUnknown means that no GPU, instance or device has that name now.
	ErrGPUUnknown = errors.New("no such GPU")
	// ErrGPUPermission means that the driver does not let us.
	ErrGPUPermission = errors.New("not permitted by the GPU's driver")
	// ErrGPUResetRequired means that the driver does nothing with the GPU before it
	// is reset.
	ErrGPUResetRequired = errors.New("the GPU has to be reset first")
	// ErrGPULost means that the GPU has fallen off the bus.
	ErrGPULost = errors.New("the GPU is lost")
	// ErrGPUUnresponsive means that a call into the driver did not end, or ended
	// the process that made it. The change may have been made, or be made yet.
	ErrGPUUnresponsive = errors.New("the GPU's driver does not answer")
	// ErrGPUDriver means that the driver cannot be asked at all: it is not
	// installed, not loaded, or of another version than its library.
	ErrGPUDriver = errors.New("the GPU's driver cannot be asked")
)

// GPU is a GPU as the driver counts them.
type GPU struct {
	// Index is the driver's, which changes when a GPU is lost or reset.
	Index uint32
	// UUID is such as GPU-..., and names the GPU from boot to boot. It is empty
	// for one that the driver cannot be asked for.
	UUID string
	// PCI is its place, such as 0000:17:00.0.
	PCI string
	// Name is its product's, such as NVIDIA H100 80GB HBM3.
	Name string
	// Device is the PCI device's number over its vendor's, such as 0x233010de; 0: not
	// known.
	Device uint32
	// Minor is the number of its device node, /dev/nvidia<Minor>; -1: not known.
	Minor int
	// Problem is why the driver does not answer for it, or nothing.
	Problem string
}

// GPURecovery is what the driver says that a GPU needs.
type GPURecovery string

// The recovery actions. A driver that does not say is GPURecoveryUnknown, which
// is not none.
const (
	GPURecoveryUnknown       GPURecovery = "unknown"
	GPURecoveryNone          GPURecovery = "none"
	GPURecoveryReset         GPURecovery = "gpu_reset"
	GPURecoveryReboot        GPURecovery = "node_reboot"
	GPURecoveryDrain         GPURecovery = "drain_p2p"
	GPURecoveryDrainAndReset GPURecovery = "drain_and_reset"
	// GPURecoveryOther is one that this version does not know.
	GPURecoveryOther GPURecovery = "other"
)

// GPUState is one GPU with its MIG mode and all that is on it.
type GPUState struct {
	GPU
	// Capable says that the GPU knows MIG. If not, all below but Recovery,
	// Persistence and Linked is unset.
	Capable bool
	// Enabled is the MIG mode that is; Pending the one after the next reset.
	Enabled, Pending bool
	// Resetless says that the mode changes without a reset, and is lost with the
	// driver, a reset or a reboot. Without it a change takes a reset and stays.
	Resetless bool
	// Persistence says that persistence mode is on: the driver holds the GPU.
	Persistence bool
	// Virtual says that the machine sees the GPU through a hypervisor, where a
	// reset is mostly not to be had.
	Virtual bool
	// Recovery is what the driver says that the GPU needs.
	Recovery GPURecovery
	// Linked are the UUIDs of the other GPUs that NVLink joins with it, itself or
	// through switches, sorted.
	Linked []string
	// Profiles are the kinds of GPU instance that it offers, by ID. A GPU whose MIG
	// mode is off offers them too.
	Profiles []MIGProfile
	// Instances are its GPU instances by placement, also those without a compute
	// instance. A layout that could not be read whole is an error, never less.
	Instances []MIGInstance
}

// Profile returns the profile with an id.
func (s GPUState) Profile(id uint32) (MIGProfile, bool) {
	i := slices.IndexFunc(s.Profiles, func(p MIGProfile) bool { return p.ID == id })
	if i < 0 {
		return MIGProfile{}, false
	}
	return s.Profiles[i], true
}

// Instance returns the GPU instance of a profile that begins at a memory slice.
func (s GPUState) Instance(at MIGPlace) (MIGInstance, bool) {
	i := slices.IndexFunc(s.Instances, func(m MIGInstance) bool { return m.MIGPlace == at })
	if i < 0 {
		return MIGInstance{}, false
	}
	return s.Instances[i], true
}

// MIGProfile is a kind of GPU instance.
type MIGProfile struct {
	// ID is the driver's (19: 1g), not NVML's enumeration.
	ID uint32
	// Name is the driver's, such as 1g.10gb+me, or empty when it tells none.
	Name string
	// Slices are its compute slices, MemoryMB its memory.
	Slices   uint32
	MemoryMB uint64
	// Max is how many an empty GPU can have.
	Max uint32
	// With and Without are its attributes as names write them (me, me.all, gfx),
	// sorted.
	With, Without []string
	// Starts are the memory slices at which one may begin, rising, and Size how
	// many it takes.
	Starts []uint32
	Size   uint32
	// Assumed says that Starts and Size are what such a product is known to have:
	// the driver tells them only while MIG mode is on.
	Assumed bool
}

// MIGPlace names a GPU instance on its GPU: no two stand at one place, and the
// driver gives its ids again.
type MIGPlace struct {
	// Profile is the profile's ID, Start the first memory slice.
	Profile, Start uint32
}

// MIGInstance is a GPU instance.
type MIGInstance struct {
	MIGPlace
	// ID is the driver's; another instance may have it next.
	ID uint32
	// Size is how many memory slices it takes.
	Size uint32
	// Compute are its compute instances by placement; none is half an instance.
	Compute []MIGCompute
	// Busy says that a process computes on it, by the driver's word. One that only
	// has its device open is not seen so.
	Busy bool
}

// MIGComputePlace names a compute instance in its GPU instance.
type MIGComputePlace struct {
	// Slices is how many compute slices it takes, Start the first of them, counted
	// in its GPU instance.
	Slices, Start uint32
}

// MIGCompute is a compute instance: a MIG device.
type MIGCompute struct {
	MIGComputePlace
	// ID is the driver's in the GPU instance.
	ID uint32
	// Profile is the compute profile's ID.
	Profile uint32
	// UUID is such as MIG-..., and empty while the driver does not tell.
	UUID string
	// Name is the device's, such as MIG 1c.3g.40gb, or empty.
	Name string
}

// GPUHolder is a process that holds a GPU.
type GPUHolder struct {
	PID     int
	Command string
	// How is by what: a device node that it has open or mapped, or the driver's
	// word.
	How string
}

// GPUReader asks the driver, in a child process with a deadline. It holds a GPU
// open only while it asks.
type GPUReader interface {
	// GPUs returns the GPUs by index. Without any it is none, and no error.
	GPUs(ctx context.Context) ([]GPU, error)
	// GPUState reads one GPU by its UUID. One that the driver does not have is
	// [ErrGPUUnknown].
	GPUState(ctx context.Context, uuid string) (GPUState, error)
	// GPUHolders returns the processes that hold a GPU or one of its MIG devices, by
	// process id, without the agent's own, at most 100 of them. That persistence
	// mode holds it is not among them: see [GPUState].
	GPUHolders(ctx context.Context, uuid string) ([]GPUHolder, error)
}

// MIGActivation is what came of a change of MIG mode that the driver took.
type MIGActivation string

// The activations.
const (
	// MIGActive means that the mode is on, or off, now.
	MIGActive MIGActivation = "active"
	// MIGWaitsForClients means that somebody holds the GPU: the mode is pending,
	// and becomes active when it is set again with nobody there.
	MIGWaitsForClients MIGActivation = "waits_for_clients"
	// MIGWaitsForReset means that the mode is pending until a reset or reboot.
	MIGWaitsForReset MIGActivation = "waits_for_reset"
)

// MIGWriter changes what is on a GPU, in a process of its own with a deadline,
// while the agent's own holds on the GPUs are dropped. When that process is
// killed or does not answer, the error wraps [ErrGPUUnresponsive], and the next
// change waits until it is gone.
type MIGWriter interface {
	// SetMIGMode switches MIG mode on or off. Instances must be gone before it is
	// switched off. A mode that is already so, with none pending, is not touched.
	SetMIGMode(ctx context.Context, uuid string, on bool) (MIGActivation, error)
	// CreateGPUInstance makes a GPU instance at its place. One that is there stays
	// as it is; something else in the way is [ErrGPUResources].
	CreateGPUInstance(ctx context.Context, uuid string, at MIGPlace) error
	// DestroyGPUInstance removes a GPU instance, if it is there. One with compute
	// instances is [ErrGPUInUse].
	DestroyGPUInstance(ctx context.Context, uuid string, at MIGPlace) error
	// CreateComputeInstance makes a compute instance at its place in a GPU
	// instance. One that is there stays as it is.
	CreateComputeInstance(ctx context.Context, uuid string, in MIGPlace, at MIGComputePlace) error
	// DestroyComputeInstance removes a compute instance, if it is there. One that a
	// process uses is [ErrGPUInUse].
	DestroyComputeInstance(ctx context.Context, uuid string, in MIGPlace, at MIGComputePlace) error
}

// GPUWriter changes a GPU as a whole.
type GPUWriter interface {
	// SetGPUPersistence switches persistence mode.
	SetGPUPersistence(ctx context.Context, uuid string, on bool) error
	// ResetGPUs resets GPUs together, with nvidia-smi: the driver has no function
	// for it. It has been seen to say yes and do nothing, so that who resets reads
	// the GPU again. Instances are gone afterwards.
	ResetGPUs(ctx context.Context, uuids []string) error
	// WriteCDI writes the CDI specification of the GPUs and MIG devices that are
	// there now, and makes the device nodes that it names. What was there before is
	// replaced in one step.
	WriteCDI(ctx context.Context) error
}

// Where the CDI specification is, and of which kind its devices are. It is not
// NVIDIA's own, so that neither writes over the other.
const (
	CDIPath = "/var/run/cdi/millwright-gpu.json"
	CDIKind = "millwright.dev/gpu"
)

// CDISpec is the CDI specification that Millwright keeps.
type CDISpec struct {
	// Devices are the full names of its devices, such as
	// millwright.dev/gpu=MIG-..., sorted; none: there is no such file.
	Devices []string
	// Current says that it has what the driver has now.
	Current bool
	// Stale are the UUIDs of the GPUs of which it has other devices than the driver.
	Stale []string
}

// GPUReset is how the one run of nvidia-smi for a step ended.
type GPUReset struct {
	Outcome
	// Said is what it wrote, on one line.
	Said string
	// Some says that it has reset one GPU at least, by its own word.
	Some bool
}

// GPUResetter resets GPUs for the step for which the executor made this host.
type GPUResetter interface {
	// ResetGPUsOnce is ResetGPUs for a step that must not be carried out twice: it
	// starts nvidia-smi if it never was for this step, or finds it again, and waits
	// for its end; after timeout that is stopped. The error wraps
	// [ErrOutcomeUnknown] and [ErrNotStarted] as that of [Commander.RunCommand]
	// does, and one of this file where nvidia-smi said no. A ctx that ends with
	// [ErrStop] as its cause keeps it from its start and does not cut it off: half a
	// reset is nobody's wish.
	ResetGPUsOnce(ctx context.Context, uuids []string, timeout time.Duration) (GPUReset, error)
}

// CDIReader reads the CDI specification.
type CDIReader interface {
	// CDI compares the specification with the GPUs.
	CDI(ctx context.Context) (CDISpec, error)
	// ResolveCDI returns the device nodes of a device by its full name. One that is
	// not, or not any more, is [ErrGPUUnknown] with what became of it.
	ResolveCDI(ctx context.Context, name string) ([]string, error)
}

// DeviceReader looks at GPUs and at what containers can have of them.
type DeviceReader interface {
	GPUReader
	GPUHealthReader
	CDIReader
}

// DeviceWriter changes GPUs.
type DeviceWriter interface {
	MIGWriter
	GPUWriter
}
