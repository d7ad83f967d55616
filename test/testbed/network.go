package testbed

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
)

// A node has a network namespace of its own that outlives a reboot, as a
// machine's switch port does. Its interface is called host0.

func (t *Testbed) makeBridge(ctx context.Context) error {
	bridge := t.state.bridge()
	for _, args := range [][]string{
		{"link", "add", bridge, "type", "bridge"},
		{"addr", "add", t.state.bridgeAddr().String() + "/24", "dev", bridge},
		{"link", "set", bridge, "up"},
	} {
		if _, err := run(ctx, "ip", args...); err != nil {
			return err
		}
	}
	return nil
}

// nodeLink is the machine's end of a node's cable. Interface names have at most
// 15 characters.
func (s state) nodeLink(node string) string {
	if node == StorageNode {
		return s.bridge() + "s"
	}
	return s.bridge() + node
}

func (s state) netns(node string) string { return s.bridge() + "-" + node }

func (s state) machine(node string) string { return s.bridge() + "-" + node }

func (n *Node) makeLink(ctx context.Context) error {
	s := n.testbed.state
	netns, link := s.netns(n.name), s.nodeLink(n.name)
	for _, args := range [][]string{
		{"netns", "add", netns},
		{"link", "add", link, "type", "veth", "peer", "name", "host0", "netns", netns},
		{"-n", netns, "link", "set", "lo", "up"},
		{"-n", netns, "addr", "add", n.addr.String() + "/24", "dev", "host0"},
		{"-n", netns, "link", "set", "host0", "up"},
		{"link", "set", link, "master", s.bridge(), "up"},
	} {
		if _, err := run(ctx, "ip", args...); err != nil {
			return err
		}
	}
	if n.IsCut() {
		return n.setPort(ctx, portDisabled)
	}
	return nil
}

func deleteNodeLink(ctx context.Context, s state, node string) error {
	if err := deleteLink(ctx, s.nodeLink(node)); err != nil {
		return err
	}
	netns := s.netns(node)
	if _, err := os.Stat(filepath.Join("/run/netns", netns)); err != nil {
		return ignoreNotExist(err)
	}
	_, err := run(ctx, "ip", "netns", "del", netns)
	return err
}

func deleteLink(ctx context.Context, link string) error {
	if _, err := os.Stat(filepath.Join("/sys/class/net", link)); err != nil {
		return ignoreNotExist(err)
	}
	_, err := run(ctx, "ip", "link", "del", link)
	// Deleting a namespace deletes its links too, a little later.
	if _, gone := net.InterfaceByName(link); gone != nil {
		return nil
	}
	return err
}

// The states of a bridge's port, as the kernel numbers them.
const (
	portDisabled   = 0
	portForwarding = 3
)

func (n *Node) setPort(ctx context.Context, portState int) error {
	_, err := run(ctx, "bridge", "link", "set", "dev", n.testbed.state.nodeLink(n.name), "state", strconv.Itoa(portState))
	return err
}

func (n *Node) cutFile() string {
	return filepath.Join(n.testbed.state.dir(), n.name+".cut")
}

// IsCut says whether the node is cut off.
func (n *Node) IsCut() bool {
	_, err := os.Stat(n.cutFile())
	return err == nil
}

// Cut drops every packet from and to the node, without a word to either side:
// the node's link stays up. It lasts until Heal, over reboots and power cuts.
func (n *Node) Cut(ctx context.Context) error {
	if err := os.WriteFile(n.cutFile(), nil, 0o600); err != nil {
		return err
	}
	return n.applyPort(ctx, portDisabled)
}

// Heal ends a Cut.
func (n *Node) Heal(ctx context.Context) error {
	if err := os.Remove(n.cutFile()); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return n.applyPort(ctx, portForwarding)
}

// applyPort does nothing while the node is off: Start looks at the file.
func (n *Node) applyPort(ctx context.Context, portState int) error {
	if _, err := net.InterfaceByName(n.testbed.state.nodeLink(n.name)); err != nil {
		return nil
	}
	if err := n.setPort(ctx, portState); err != nil {
		return fmt.Errorf("node %s: %w", n.name, err)
	}
	return nil
}
