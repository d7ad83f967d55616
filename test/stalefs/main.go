// Command stalefs mounts a FUSE file system that answers every request with one
// error, as a mount does whose server has another file system now (ESTALE), or
// whose client the server has put out (EIO, ESHUTDOWN):
//
//	stalefs TARGET SOURCE ERROR
//
// It serves until it is killed or the mount goes.
package main

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"strconv"

	"golang.org/x/sys/unix"
)

// The parts of the kernel's protocol, from linux/fuse.h, that are needed to
// refuse.
const (
	headerSize = 40 // of a request
	opForget   = 2
	opInit     = 26
	opDestroy  = 38
	opForgets  = 42
	bufferSize = 1<<20 + 4096
)

// kinds are the errors that it gives.
var kinds = map[string]unix.Errno{"ESTALE": unix.ESTALE, "EIO": unix.EIO, "ESHUTDOWN": unix.ESHUTDOWN, "ENOTCONN": unix.ENOTCONN}

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "stalefs:", err)
		os.Exit(1)
	}
}

var errUsage = errors.New("want a target, a source and ESTALE, EIO, ESHUTDOWN or ENOTCONN")

func run(args []string) error {
	if len(args) != 3 || kinds[args[2]] == 0 {
		return errUsage
	}
	fd, err := unix.Open("/dev/fuse", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open /dev/fuse: %w", err)
	}
	options := "fd=" + strconv.Itoa(fd) + ",rootmode=40000,user_id=0,group_id=0,allow_other"
	if err := unix.Mount(args[1], args[0], "fuse", unix.MS_NOSUID|unix.MS_NODEV, options); err != nil {
		return fmt.Errorf("mount on %s: %w", args[0], err)
	}
	return serve(fd, kinds[args[2]])
}

// serve answers until the mount goes.
func serve(fd int, kind unix.Errno) error {
	buf := make([]byte, bufferSize)
	for {
		n, err := unix.Read(fd, buf)
		switch {
		case errors.Is(err, unix.EINTR), errors.Is(err, unix.ENOENT), errors.Is(err, unix.EAGAIN):
			continue // the request was taken back
		case errors.Is(err, unix.ENODEV):
			return nil
		case err != nil:
			return fmt.Errorf("read a request: %w", err)
		}
		reply := answer(buf[:n], kind)
		if reply == nil {
			continue
		}
		if _, err := unix.Write(fd, reply); err != nil && !errors.Is(err, unix.ENOENT) {
			return fmt.Errorf("answer a request: %w", err)
		}
	}
}

// answer is the reply to a request; some want none.
func answer(request []byte, kind unix.Errno) []byte {
	if len(request) < headerSize {
		return nil
	}
	opcode, unique := binary.NativeEndian.Uint32(request[4:]), binary.NativeEndian.Uint64(request[8:])
	reply := make([]byte, 16)
	switch opcode {
	case opForget, opForgets, opDestroy:
		return nil
	case opInit:
		// Version 7.12, of which the answer has 24 bytes, and 4 KiB at a time.
		reply = append(reply, make([]byte, 24)...)
		for at, v := range map[int]uint32{16: 7, 20: 12, 36: 4096} {
			binary.NativeEndian.PutUint32(reply[at:], v)
		}
	default:
		binary.NativeEndian.PutUint32(reply[4:], uint32(-int32(kind)))
	}
	binary.NativeEndian.PutUint32(reply, uint32(len(reply)))
	binary.NativeEndian.PutUint64(reply[8:], unique)
	return reply
}
