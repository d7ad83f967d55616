package testbed

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
)

// A node has a network namespace of its own that outlives a reboot, as a
// machine's switch port does. Its interface is called host0.

func (t *Testbed) makeBridge(ctx context.Context) error {
	bridge := t.state.bridge()
	for _, args := range [][]string{
		{"link", "add", bridge, "type", "bridge"},
		{"addr", "add", t.state.bridgeAddr().String() + "/24", "dev", bridge},
		{"link", "set", bridge, "up"},
		{"link", "add", t.state.deadBridge(), "type", "bridge"},
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
		// The same address after a power cut, as others remember it.
		{"link", "add", link, "type", "veth", "peer", "name", "host0", "address", n.hardwareAddr(), "netns", netns},
		{"-n", netns, "link", "set", "lo", "up"},
		{"-n", netns, "addr", "add", n.addr.String() + "/24", "dev", "host0"},
		{"-n", netns, "link", "set", "host0", "up"},
		{"link", "set", link, "up"},
	} {
		if _, err := run(ctx, "ip", args...); err != nil {
			return err
		}
	}
	return n.plug(ctx, n.IsCut())
}

func (n *Node) hardwareAddr() string {
	ip := n.addr.As4()
	return fmt.Sprintf("02:4d:%02x:%02x:%02x:%02x", ip[0], ip[1], ip[2], ip[3])
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
	if !linkExists(link) {
		return nil
	}
	return err
}

func linkExists(link string) bool {
	_, err := net.InterfaceByName(link)
	return err == nil
}

// deadBridge is never up, so it drops what comes into its ports.
func (s state) deadBridge() string { return s.bridge() + "x" }

// plug puts the node's cable into the testbed's network, or where every packet
// is dropped. The node's own link does not change.
func (n *Node) plug(ctx context.Context, cut bool) error {
	s := n.testbed.state
	bridge := s.bridge()
	if cut {
		bridge = s.deadBridge()
	}
	_, err := run(ctx, "ip", "link", "set", s.nodeLink(n.name), "master", bridge)
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
	return n.replug(ctx, true)
}

// Heal ends a Cut.
func (n *Node) Heal(ctx context.Context) error {
	if err := os.Remove(n.cutFile()); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return n.replug(ctx, false)
}

// replug does nothing while the node is off: Start looks at the file.
func (n *Node) replug(ctx context.Context, cut bool) error {
	if !linkExists(n.testbed.state.nodeLink(n.name)) {
		return nil
	}
	if err := n.plug(ctx, cut); err != nil {
		return fmt.Errorf("node %s: %w", n.name, err)
	}
	return nil
}
