// Package testbed runs real nodes on one Linux machine: each is a Debian with
// its own systemd, dbus and containerd, booted by systemd-nspawn, with its own
// root (an overlay), address, control groups and boot id. Nothing in a node is
// imitated but the hardware under it: nodes share the machine's kernel, page
// cache and clock. The clock is therefore out of their reach.
//
// It needs root on a Debian 12 machine, and installs what it lacks.
//
// What a testbed owns is written to /run before it is made, and everything it
// runs is in control groups of its own, so that Down takes away all of it, also
// from another process and after any kill.
package testbed

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
)

// StorageNode is the name of the node that serves the GlusterFS volume.
const StorageNode = "storage"

// MaxNodes is the largest number of nodes of one testbed, besides storage.
const MaxNodes = 64

const (
	stateRoot = "/run/millwright-testbed"
	dataRoot  = "/var/lib/millwright-testbed"
	cacheRoot = "/var/cache/millwright-testbed"
)

// downTimeout bounds the cleaning up after an Up that did not succeed.
const downTimeout = time.Minute

var validName = regexp.MustCompile(`^[a-z][a-z0-9-]{0,19}$`)

// ErrNotUp is returned for a testbed that does not exist.
var ErrNotUp = errors.New("no such testbed")

// ErrUp is returned by Up when a testbed of that name exists.
var ErrUp = errors.New("testbed is up already")

// Config says what testbed to make.
type Config struct {
	// Name tells testbeds apart that stand side by side: a letter, then at
	// most 19 lower-case letters, digits and hyphens.
	Name string
	// Nodes is the number of nodes, from 0 to MaxNodes; they are called n1,
	// n2, and so on.
	Nodes int
	// Storage adds the node StorageNode, which serves the volume Volume.
	Storage bool
	// Slurm adds the node SlurmNode, which runs the controller of a Slurm cluster.
	Slurm bool
	// StateMiB gives each node a disk of its own, an ext4 of so many MiB at
	// StateDir; 0: it is on the node's root.
	StateMiB int
	// Owned ends the nodes' processes when the calling process ends, however
	// it ends; the next Up of any testbed takes the rest away. Without it the
	// testbed stays until Down.
	Owned bool
	// Log is told what is done to the machine. It must be set.
	Log *slog.Logger
}

func (c Config) validate() error {
	var errs []error
	if !validName.MatchString(c.Name) {
		errs = append(errs, fmt.Errorf("name: %q does not match %s", c.Name, validName))
	}
	if c.Nodes < 0 || c.Nodes > MaxNodes {
		errs = append(errs, fmt.Errorf("nodes: %d is not between 0 and %d", c.Nodes, MaxNodes))
	}
	if c.StateMiB != 0 && (c.StateMiB < 16 || c.StateMiB > 4096) {
		errs = append(errs, fmt.Errorf("state size: %d MiB is not between 16 and 4096", c.StateMiB))
	}
	if c.Nodes == 0 && !c.Storage && !c.Slurm {
		errs = append(errs, errors.New("nodes: 0 without storage and slurm would be an empty testbed; ask for at least one node"))
	}
	return errors.Join(errs...)
}

// Testbed is one set of nodes in one network. Its methods may be called
// concurrently, but not while Down runs.
type Testbed struct {
	log     *slog.Logger
	state   state
	cgroups []string // where the machine mounts its cgroup hierarchies
	nodes   []*Node
	keepers sync.WaitGroup // of an owned testbed: ends with its processes
}

// Up makes the testbed and returns when systemd reports every node as running
// and the volume, if asked for, is served. When it fails, or ctx ends, it takes
// away what it made before it returns. The first Up on a machine builds the
// nodes' image, which takes minutes.
//
// It returns ErrUp when a testbed of that name exists.
func Up(ctx context.Context, cfg Config) (*Testbed, error) {
	if err := cfg.validate(); err != nil {
		return nil, fmt.Errorf("testbed config: %w", err)
	}
	if err := prepareMachine(ctx, cfg.Log); err != nil {
		return nil, err
	}
	image, err := ensureImage(ctx, cfg.Log)
	if err != nil {
		return nil, fmt.Errorf("image of the nodes: %w", err)
	}
	st, err := reserve(ctx, cfg, image)
	if err != nil {
		return nil, err
	}
	t, err := fromState(st, cfg.Log)
	if err == nil {
		err = t.up(ctx)
	}
	if err != nil {
		cleanup, cancel := context.WithTimeout(context.WithoutCancel(ctx), downTimeout)
		defer cancel()
		return nil, errors.Join(fmt.Errorf("testbed %s: %w", cfg.Name, err), down(cleanup, st, cfg.Log))
	}
	return t, nil
}

// Open returns the testbed of that name, which may have been made by another
// process, or ErrNotUp.
func Open(name string, log *slog.Logger) (*Testbed, error) {
	st, err := loadState(name)
	if err != nil {
		return nil, err
	}
	return fromState(st, log)
}

// List returns the names of all testbeds of the machine, sorted, those that
// were left by a process that died included.
func List() ([]string, error) {
	entries, err := os.ReadDir(stateRoot)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	var names []string
	for _, e := range entries {
		if e.IsDir() && !strings.HasPrefix(e.Name(), unsavedPrefix) {
			names = append(names, e.Name())
		}
	}
	return names, err
}

func fromState(st state, log *slog.Logger) (*Testbed, error) {
	mounts, err := cgroupMounts()
	if err != nil {
		return nil, err
	}
	t := &Testbed{log: log, state: st, cgroups: mounts}
	for i, name := range st.nodeNames() {
		t.nodes = append(t.nodes, &Node{testbed: t, name: name, addr: st.nodeAddr(i)})
	}
	return t, nil
}

func (t *Testbed) up(ctx context.Context) error {
	if err := t.makeBridge(ctx); err != nil {
		return err
	}
	if err := t.makeCgroup(keeperCgroup); err != nil {
		return err
	}
	if err := os.MkdirAll(t.HomeDir(), 0o700); err != nil {
		return err
	}
	group, ctx := errgroup.WithContext(ctx)
	for _, n := range t.nodes {
		group.Go(func() error {
			if err := n.create(ctx); err != nil {
				return fmt.Errorf("node %s: %w", n.name, err)
			}
			if err := n.Start(ctx); err != nil {
				return err
			}
			switch n.name {
			case StorageNode:
				return n.serveVolume(ctx)
			case SlurmNode:
				return n.serveSlurm(ctx)
			}
			return nil
		})
	}
	return group.Wait()
}

// Down ends all processes of the testbed and removes its mounts, links, control
// groups and files. It may be called again after an error, and by any process.
func (t *Testbed) Down(ctx context.Context) error {
	err := down(ctx, t.state, t.log)
	if err == nil {
		t.keepers.Wait()
	}
	return err
}

// Down removes the testbed of that name like the method, also one that was
// interrupted while it was made. It returns ErrNotUp when there is none.
func Down(ctx context.Context, name string, log *slog.Logger) error {
	st, err := loadState(name)
	if err != nil {
		return err
	}
	return down(ctx, st, log)
}

// Name returns the testbed's name.
func (t *Testbed) Name() string { return t.state.Name }

// Address returns the machine's own address in the testbed's network. Nodes
// reach what listens there, also by the name "server".
func (t *Testbed) Address() netip.Addr { return t.state.bridgeAddr() }

// Dir returns the testbed's folder on disk, which Down removes. The caller may
// keep files in it under names that are no node's.
func (t *Testbed) Dir() string { return filepath.Join(dataRoot, t.state.Name) }

// HomeDir returns a folder for the operator's files, MILLWRIGHT_HOME.
func (t *Testbed) HomeDir() string { return filepath.Join(t.Dir(), "home") }

// Nodes returns all nodes, those that serve something last.
func (t *Testbed) Nodes() []*Node { return t.nodes }

// Node returns the node of that name.
func (t *Testbed) Node(name string) (*Node, error) {
	for _, n := range t.nodes {
		if n.name == name {
			return n, nil
		}
	}
	return nil, fmt.Errorf("testbed %s has no node %q; it has %v", t.state.Name, name, t.state.nodeNames())
}
