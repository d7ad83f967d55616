package testbed

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// Testbed number k has the subnet 10.213.k.0/24: the machine is .1, storage and
// slurm are .2 and .3, and n1 is .11.
const (
	subnetCount   = 256
	firstNodeAddr = 11
)

// unsavedPrefix begins the names of folders that a killed save left.
const unsavedPrefix = ".new-"

// state is what must be known of a testbed to take it away.
type state struct {
	Name    string `json:"name"`
	Number  int    `json:"number"`
	Nodes   int    `json:"nodes"`
	Storage bool   `json:"storage"`
	Slurm   bool   `json:"slurm,omitempty"`
	Image   string `json:"image"`
	// StateMiB is the size of each node's own disk; 0 when they have none.
	StateMiB int `json:"state_mib,omitempty"`
	// OwnerPID and OwnerStart are of the process without which the testbed is
	// left over; 0 when it stands by itself.
	OwnerPID   int    `json:"owner_pid"`
	OwnerStart string `json:"owner_start"`
}

func (s state) bridgeAddr() netip.Addr {
	return netip.AddrFrom4([4]byte{10, 213, byte(s.Number), 1})
}

func (s state) nodeAddr(index int) netip.Addr {
	host := byte(firstNodeAddr + index)
	if index >= s.Nodes {
		host = byte(2 + index - s.Nodes)
	}
	return netip.AddrFrom4([4]byte{10, 213, byte(s.Number), host})
}

func (s state) nodeNames() []string {
	var names []string
	for i := range s.Nodes {
		names = append(names, "n"+strconv.Itoa(i+1))
	}
	if s.Storage {
		names = append(names, StorageNode)
	}
	if s.Slurm {
		names = append(names, SlurmNode)
	}
	return names
}

func (s state) dir() string { return filepath.Join(stateRoot, s.Name) }

func (s state) bridge() string { return "mwt" + strconv.Itoa(s.Number) }

// ownerGone says whether the process that the testbed belonged to has ended.
func (s state) ownerGone() bool {
	return s.OwnerPID != 0 && processStart(s.OwnerPID) != s.OwnerStart
}

func loadState(name string) (state, error) {
	if !validName.MatchString(name) {
		return state{}, fmt.Errorf("testbed name: %q does not match %s", name, validName)
	}
	data, err := os.ReadFile(filepath.Join(stateRoot, name, "state.json"))
	if errors.Is(err, os.ErrNotExist) {
		return state{}, fmt.Errorf("testbed %s: %w", name, ErrNotUp)
	}
	if err != nil {
		return state{}, err
	}
	var s state
	if err := json.Unmarshal(data, &s); err != nil {
		return state{}, fmt.Errorf("state of testbed %s: %w", name, err)
	}
	return s, nil
}

// save writes the file in one rename, so that no reader finds half of it.
func (s state) save() error {
	data, err := json.MarshalIndent(s, "", "  ")
	if err != nil {
		return err
	}
	tmp, err := os.MkdirTemp(stateRoot, unsavedPrefix+"*")
	if err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(tmp, "state.json"), data, 0o600); err != nil {
		return errors.Join(err, os.RemoveAll(tmp))
	}
	if err := os.Rename(tmp, s.dir()); err != nil {
		return errors.Join(err, os.RemoveAll(tmp))
	}
	return nil
}

// reserve takes away testbeds whose owner has died, then gives the new one a
// number that nothing on the machine uses, and writes its state.
func reserve(ctx context.Context, cfg Config, image string) (state, error) {
	if err := os.MkdirAll(stateRoot, 0o755); err != nil {
		return state{}, err
	}
	unlock, err := lockFile(ctx, filepath.Join(stateRoot, ".lock"))
	if err != nil {
		return state{}, err
	}
	defer unlock()
	used, err := sweep(ctx, cfg.Log)
	if err != nil {
		return state{}, err
	}
	s := state{Name: cfg.Name, Nodes: cfg.Nodes, Storage: cfg.Storage, Slurm: cfg.Slurm, StateMiB: cfg.StateMiB, Image: image}
	if _, up := used[cfg.Name]; up {
		return state{}, fmt.Errorf("%w: %s; take it away with testbed down --name %s, or choose another name", ErrUp, cfg.Name, cfg.Name)
	}
	if s.Number, err = freeNumber(used); err != nil {
		return state{}, err
	}
	if cfg.Owned {
		s.OwnerPID, s.OwnerStart = os.Getpid(), processStart(os.Getpid())
	}
	return s, s.save()
}

// Sweep takes away the testbeds whose process has died.
func Sweep(ctx context.Context, log *slog.Logger) error {
	if _, err := os.Stat(stateRoot); err != nil {
		return ignoreNotExist(err)
	}
	unlock, err := lockFile(ctx, filepath.Join(stateRoot, ".lock"))
	if err != nil {
		return err
	}
	defer unlock()
	_, err = sweep(ctx, log)
	return err
}

// sweep does the work of Sweep under the lock, and returns the numbers of the
// testbeds that stand, by their names.
func sweep(ctx context.Context, log *slog.Logger) (map[string]int, error) {
	unsaved, err := filepath.Glob(filepath.Join(stateRoot, unsavedPrefix+"*"))
	if err != nil {
		return nil, err
	}
	for _, dir := range unsaved { // under the lock, so of a process that died
		if err := os.RemoveAll(dir); err != nil {
			return nil, err
		}
	}
	names, err := List()
	if err != nil {
		return nil, err
	}
	used := map[string]int{}
	for _, name := range names {
		s, err := loadState(name)
		if err != nil {
			return nil, err
		}
		if s.ownerGone() {
			log.Info("taking away a testbed whose process has died", "testbed", name)
			if err := down(ctx, s, log); err != nil {
				return nil, err
			}
			continue
		}
		used[name] = s.Number
	}
	return used, nil
}

func freeNumber(used map[string]int) (int, error) {
	taken := map[int]bool{}
	for _, number := range used {
		taken[number] = true
	}
	addrs, err := net.InterfaceAddrs()
	if err != nil {
		return 0, err
	}
	for number := range subnetCount {
		subnet := netip.PrefixFrom(state{Number: number}.bridgeAddr(), 24).Masked()
		if taken[number] || overlaps(subnet, addrs) {
			continue
		}
		return number, nil
	}
	return 0, fmt.Errorf("no unused subnet is left in 10.213.0.0/16")
}

func overlaps(subnet netip.Prefix, addrs []net.Addr) bool {
	for _, a := range addrs {
		if p, err := netip.ParsePrefix(a.String()); err == nil && p.Masked().Overlaps(subnet) {
			return true
		}
	}
	return false
}

// processStart returns the start time of a process in the kernel's own terms,
// or "" when there is none: with the id it names the process for good.
func processStart(pid int) string {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return ""
	}
	// The second field is in parentheses and may hold anything.
	rest := string(data[strings.LastIndexByte(string(data), ')')+1:])
	fields := strings.Fields(rest)
	const startTime = 19 // field 22, counted from the third
	if len(fields) <= startTime || fields[0] == "Z" {
		return ""
	}
	return fields[startTime]
}

// lockFile waits for an exclusive lock; the kernel ends it with the process.
func lockFile(ctx context.Context, path string) (unlock func(), err error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	err = poll(ctx, 50*time.Millisecond, func() (bool, error) {
		err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		if errors.Is(err, syscall.EWOULDBLOCK) {
			return false, nil
		}
		return err == nil, err
	})
	if err != nil {
		return nil, errors.Join(fmt.Errorf("lock %s: %w", path, err), f.Close())
	}
	return func() { _ = f.Close() }, nil
}
