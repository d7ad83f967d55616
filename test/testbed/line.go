package testbed

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// Line is what a bad line does to each frame, in both directions.
type Line struct {
	// Delay is how long a frame takes, give or take Jitter. Frames overtake
	// each other.
	Delay, Jitter time.Duration
	// Loss is the share of frames that never arrive.
	Loss float64
}

// maxFrame is the largest frame: no TAP device here has a larger MTU.
const maxFrame = 2048

// worseLinks are the devices of a bad line: a bridge for the node, and a TAP
// device in it and in the testbed's bridge each.
func (s state) worseLinks(node string) []string {
	link := s.nodeLink(node)
	return []string{link + "i", link + "a", link + "b"}
}

// Worsen makes the node's line a bad one until the function that it returns is
// called, or this process or the node ends. Frames that are on their way then
// are lost.
func (n *Node) Worsen(ctx context.Context, line Line) (mend func() error, err error) {
	s := n.testbed.state
	names := s.worseLinks(n.name)
	var taps []*os.File
	var group sync.WaitGroup
	mend = func() error {
		var errs []error
		for _, f := range taps {
			errs = append(errs, f.Close())
		}
		group.Wait()
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), downTimeout)
		defer cancel()
		return errors.Join(append(errs, n.replug(ctx), deleteLink(ctx, names[0]))...)
	}
	for _, name := range names[1:] {
		f, err := tap(name)
		if err != nil {
			return nil, errors.Join(fmt.Errorf("make device %s: %w", name, err), mend())
		}
		taps = append(taps, f)
	}
	for _, args := range [][]string{
		{"link", "add", names[0], "type", "bridge"},
		{"link", "set", names[0], "up"},
		{"link", "set", names[1], "master", names[0], "up"},
		{"link", "set", names[2], "master", s.bridge(), "up"},
		{"link", "set", s.nodeLink(n.name), "master", names[0]},
	} {
		if _, err := run(ctx, "ip", args...); err != nil {
			return nil, errors.Join(err, mend())
		}
	}
	group.Go(func() { line.carry(taps[0], taps[1]) })
	group.Go(func() { line.carry(taps[1], taps[0]) })
	return mend, nil
}

// carry takes frames from one device to the other until one is closed.
func (l Line) carry(from, to *os.File) {
	for {
		frame := make([]byte, maxFrame)
		size, err := from.Read(frame)
		if err != nil {
			return
		}
		if rand.Float64() < l.Loss {
			continue
		}
		// A device that was closed, or is full, loses the frame: it is a bad line.
		time.AfterFunc(l.takes(), func() { _, _ = to.Write(frame[:size]) })
	}
}

func (l Line) takes() time.Duration {
	if l.Jitter <= 0 {
		return l.Delay
	}
	return l.Delay - l.Jitter + rand.N(2*l.Jitter)
}

// tap makes a TAP device, which goes when the file is closed.
func tap(name string) (*os.File, error) {
	fd, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	req, err := unix.NewIfreq(name)
	if err == nil {
		req.SetUint16(unix.IFF_TAP | unix.IFF_NO_PI)
		err = unix.IoctlIfreq(fd, unix.TUNSETIFF, req)
	}
	if err != nil {
		return nil, errors.Join(err, unix.Close(fd))
	}
	return os.NewFile(uintptr(fd), name), nil
}
