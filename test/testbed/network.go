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
	return n.replug(ctx)
}

func (n *Node) hardwareAddr() string {
	ip := n.addr.As4()
	return fmt.Sprintf("02:4d:%02x:%02x:%02x:%02x", ip[0], ip[1], ip[2], ip[3])
}

func deleteNodeLink(ctx context.Context, s state, node string) error {
	for _, link := range s.worseLinks(node) {
		if err := deleteLink(ctx, link); err != nil {
			return err
		}
	}
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

// Direction is a way of packets, as the node sees it.
type Direction string

// The directions that can be cut.
const (
	Both Direction = ""    // from and to the node
	In   Direction = "in"  // to the node
	Out  Direction = "out" // from the node
)

// plug puts the node's cable into the testbed's network, or where every packet
// is dropped, or drops those of one direction. The node's own link does not
// change.
func (n *Node) plug(ctx context.Context, cut bool, d Direction) error {
	s := n.testbed.state
	bridge, link := s.bridge(), s.nodeLink(n.name)
	if cut && d == Both {
		bridge = s.deadBridge()
	}
	if _, err := run(ctx, "ip", "link", "set", link, "master", bridge); err != nil {
		return err
	}
	// There is one always, so that it can be taken away, with its filters.
	for _, verb := range []string{"replace", "del"} {
		if _, err := run(ctx, "tc", "qdisc", verb, "dev", link, "clsact"); err != nil {
			return err
		}
	}
	hook := map[Direction]string{In: "egress", Out: "ingress"}[d] // the machine's end sees it the other way round
	if !cut || hook == "" {
		return nil
	}
	if _, err := run(ctx, "tc", "qdisc", "add", "dev", link, "clsact"); err != nil {
		return err
	}
	_, err := run(ctx, "tc", "filter", "add", "dev", link, hook, "protocol", "ip", "prio", "1",
		"u32", "match", "u32", "0", "0", "action", "mirred", "egress", "redirect", "dev", s.deadBridge())
	return err
}

func (n *Node) cutFile() string {
	return filepath.Join(n.testbed.state.dir(), n.name+".cut")
}

// IsCut says whether the node is cut off, in one direction at least.
func (n *Node) IsCut() bool {
	_, cut := n.cut()
	return cut
}

func (n *Node) cut() (Direction, bool) {
	b, err := os.ReadFile(n.cutFile())
	return Direction(b), err == nil
}

// Cut drops every packet from and to the node, without a word to either side:
// the node's link stays up. It lasts until Heal, over reboots and power cuts.
func (n *Node) Cut(ctx context.Context) error { return n.CutOneWay(ctx, Both) }

// CutOneWay is Cut for the IP packets of one direction, as when it fails beyond
// the first switch: neighbours still find each other's hardware addresses.
func (n *Node) CutOneWay(ctx context.Context, d Direction) error {
	if err := os.WriteFile(n.cutFile(), []byte(d), 0o600); err != nil {
		return err
	}
	return n.replug(ctx)
}

// Heal ends a Cut.
func (n *Node) Heal(ctx context.Context) error {
	if err := os.Remove(n.cutFile()); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return n.replug(ctx)
}

// replug does nothing while the node is off: Start looks at the file.
func (n *Node) replug(ctx context.Context) error {
	if !linkExists(n.testbed.state.nodeLink(n.name)) {
		return nil
	}
	d, cut := n.cut()
	if err := n.plug(ctx, cut, d); err != nil {
		return fmt.Errorf("node %s: %w", n.name, err)
	}
	return nil
}
