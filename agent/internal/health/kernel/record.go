// Package kernel reads the kernel's log and finds in it what NVIDIA's drivers
// say of a GPU: XIDs, SXids of NVSwitches, and a GPU that has fallen off the
// bus. It is the only source for some of them: NVML has no history, and gives
// the number of an XID without its text.
package kernel

import (
	"bytes"
	"fmt"
	"strconv"
	"time"
)

// Record is one record of /dev/kmsg, in the form that
// Documentation/ABI/testing/dev-kmsg of the kernel gives.
type Record struct {
	Facility uint8         // 0: the kernel itself. Whoever writes to /dev/kmsg cannot claim it
	Level    uint8         // 0 (emergency) to 7 (debug)
	Sequence uint64        // gap-free within a boot
	Boot     time.Duration // by the kernel's own clock, which stands still in suspend
	Text     string        // may have several lines
}

// maxText is how much of a record's text is kept. The kernel's own limit for a
// line is 1 KiB (CONSOLE_LOG_MAX); each byte of it may be written as four.
const maxText = 4096

// ParseRecord reads one record as read(2) on /dev/kmsg gives it. The lines of
// its dictionary are left out. What is no record is an error.
func ParseRecord(b []byte) (Record, error) {
	head, rest, ok := bytes.Cut(b, []byte(";"))
	if !ok {
		return Record{}, fmt.Errorf("read a record of the kernel's log: no %q in %.40q", ";", b)
	}
	fields := bytes.Split(head, []byte(","))
	if len(fields) < 4 { // later kernels add more
		return Record{}, fmt.Errorf("read a record of the kernel's log: %d fields in %.40q, not 4", len(fields), head)
	}
	var n [3]uint64
	for i := range n {
		v, err := strconv.ParseUint(string(fields[i]), 10, 63)
		if err != nil {
			return Record{}, fmt.Errorf("read a record of the kernel's log: field %d: %w", i+1, err)
		}
		n[i] = v
	}
	if n[2] > uint64((1<<63-1)/int64(time.Microsecond)) {
		return Record{}, fmt.Errorf("read a record of the kernel's log: a time of %d us", n[2])
	}
	text, _, _ := bytes.Cut(rest, []byte("\n"))
	return Record{
		Facility: uint8(min(n[0]>>3, 255)), // bounded
		Level:    uint8(n[0] & 7),
		Sequence: n[1],
		Boot:     time.Duration(n[2]) * time.Microsecond, // bounded above
		Text:     unescape(text),
	}, nil
}

// unescape undoes the kernel's \xHH, which stands for what cannot be printed,
// the line feed and the backslash among it.
func unescape(b []byte) string {
	out := make([]byte, 0, min(len(b), maxText))
	for i := 0; i < len(b) && len(out) < maxText; i++ {
		if b[i] == '\\' && i+3 < len(b) && b[i+1] == 'x' {
			if v, err := strconv.ParseUint(string(b[i+2:i+4]), 16, 8); err == nil {
				out = append(out, byte(v))
				i += 3
				continue
			}
		}
		out = append(out, b[i])
	}
	return string(out)
}
