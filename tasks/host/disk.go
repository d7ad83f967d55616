package host

import "context"

// Disk is a whole disk of the node, or a loop device that has a file.
type Disk struct {
	Name       string // the kernel's name in this boot
	Dev        string // major:minor
	Serial     string // empty: it tells none
	File       string // behind a loop device
	SizeBytes  uint64
	ReadOnly   bool
	Partitions []DiskPartition
	// Holders are the devices that stand on it or on one of its partitions: an
	// array, a volume group, an encrypted device.
	Holders []string
	// Swap says that the node swaps to it or to one of its partitions.
	Swap bool
	// Array is set for an array of other disks.
	Array *DiskArray
}

// DiskArray is what the kernel says of an array (md).
type DiskArray struct {
	Level   string   // as raid0; empty while the array is not active
	Members []string // the kernel's names of what it stands on, sorted
	Active  bool     // it can be read and written
}

// DiskPartition is a partition that the kernel knows.
type DiskPartition struct{ Name, Dev string }

// Signature is one thing that a disk is seen to hold: a file system, a partition
// table, a member of an array or of a volume group.
type Signature struct{ Type, UUID, Label string }

// DiskReader looks at disks and never opens one for writing.
type DiskReader interface {
	// Disks returns the node's disks by name, as the kernel knows them. It does no
	// I/O to a disk.
	Disks(ctx context.Context) ([]Disk, error)
	// Signatures reads what a disk is seen to hold, in a child process with a
	// deadline. An empty disk has none.
	Signatures(ctx context.Context, name string) ([]Signature, error)
}

// Filesystem is a file system to be made.
type Filesystem struct{ Type, UUID, Label string }

// DiskWriter changes what disks hold. A disk that is in use, by a mount, a
// holder or as swap, is an error that wraps [ErrBusy], and nothing was changed.
type DiskWriter interface {
	// WipeDisk erases all signatures of a disk.
	WipeDisk(ctx context.Context, name string) error
	// MakeFilesystem makes a file system on a whole disk, over whatever it holds.
	// What it made is durable when it returns.
	MakeFilesystem(ctx context.Context, name string, f Filesystem) error
}

// StripedArray is an array to be made or assembled: RAID0 over whole disks.
type StripedArray struct {
	Device string   // the kernel's name that it is to have, as md127
	UUID   string   // of its members
	Disks  []string // the kernel's names, in their order
}

// ArrayWriter makes and ends arrays. A disk or array that is in use is an error
// that wraps [ErrBusy], and nothing was changed.
type ArrayWriter interface {
	// MakeArray makes an array over whatever the disks hold. What was seen on an
	// earlier array of the same disks is erased.
	MakeArray(ctx context.Context, a StripedArray) error
	// AssembleArray brings back an array that is on its disks.
	AssembleArray(ctx context.Context, a StripedArray) error
	// StopArray stops an array, by the kernel's name. Its disks keep what they
	// hold.
	StopArray(ctx context.Context, device string) error
}

// StorageReader looks at mounts and disks.
type StorageReader interface {
	MountReader
	DiskReader
}

// StorageWriter changes what the node stores: files, mounts and disks.
type StorageWriter interface {
	FileWriter
	Unmounter
	DiskWriter
	ArrayWriter
}
