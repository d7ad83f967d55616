// Package powerloss rebuilds what a power cut leaves on a disk. It reads what
// strace saw of a program's system calls, keeps for each file and directory what
// was made durable apart from what was only written, and makes after each call
// the images that a disk may hold then: what is durable, with none, all or some
// of the rest, and the last write torn.
//
// The rules are those of POSIX and no kinder: a file's content is durable after
// its own fsync, a name after that of its directory, and what was not synced may
// reach the disk in any order, or never.
package powerloss

import (
	"bufio"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
)

// Call is one system call, or the end of a process, whose name is then "exit".
type Call struct {
	// Thread made the call.
	Thread int
	// Start is when it began, in microseconds since 1970.
	Start int64
	// Name is the name of the call.
	Name string
	// Args are its arguments as strace writes them.
	Args []string
	// Result is what it returned, -1 after an error.
	Result int64
}

// Event is the beginning or the end of a call.
type Event struct {
	*Call
	// End says that the call has returned.
	End bool
}

// Read reads a trace that strace wrote with -f -ttt -y -xx, in the order of its
// lines. A line that is not understood is an error: what it did is not known.
func Read(r io.Reader) ([]Event, error) {
	in := bufio.NewReaderSize(r, 1<<20)
	begun := map[int]*Call{}
	var events []Event
	for n := 1; ; n++ {
		line, err := in.ReadString('\n')
		if errors.Is(err, io.EOF) && line == "" {
			return events, nil
		}
		if err != nil && !errors.Is(err, io.EOF) {
			return nil, err
		}
		more, err := readLine(strings.TrimSuffix(line, "\n"), begun)
		if err != nil {
			return nil, fmt.Errorf("line %d of the trace: %w", n, err)
		}
		events = append(events, more...)
	}
}

func readLine(line string, begun map[int]*Call) ([]Event, error) {
	thread, rest, _ := strings.Cut(line, " ")
	id, err := strconv.Atoi(thread)
	if err != nil {
		return nil, fmt.Errorf("no thread id in %q", shorten(line))
	}
	stamp, rest, _ := strings.Cut(strings.TrimLeft(rest, " "), " ")
	start, err := strconv.ParseInt(strings.Replace(stamp, ".", "", 1), 10, 64)
	if err != nil {
		return nil, fmt.Errorf("no time in %q", shorten(line))
	}
	switch {
	case strings.HasPrefix(rest, "+++ "):
		delete(begun, id)
		return []Event{{&Call{Thread: id, Start: start, Name: "exit"}, true}}, nil
	case strings.HasPrefix(rest, "<... "):
		call := begun[id]
		delete(begun, id)
		if call == nil {
			return nil, nil // begun before the trace did
		}
		return []Event{{call, true}}, call.setResult(rest)
	case strings.HasPrefix(rest, "???"), strings.HasPrefix(rest, "--- "):
		return nil, nil // the thread was killed in a call that strace did not see
	}
	name, args, ok := strings.Cut(rest, "(")
	if !ok {
		return nil, fmt.Errorf("no call in %q", shorten(rest))
	}
	call := &Call{Thread: id, Start: start, Name: name}
	if unfinished, ok := strings.CutSuffix(args, " <unfinished ...>"); ok {
		call.Args = split(unfinished)
		begun[id] = call
		return []Event{{call, false}}, nil
	}
	end := strings.LastIndex(args, ") ")
	if end < 0 {
		return nil, fmt.Errorf("no result in %q", shorten(rest))
	}
	call.Args = split(args[:end])
	return []Event{{call, false}, {call, true}}, call.setResult(args[end:])
}

// setResult reads the end of a line.
func (c *Call) setResult(line string) error {
	i := strings.LastIndex(line, ") ")
	_, result, ok := strings.Cut(line[max(i, 0):], "= ")
	if !ok {
		return fmt.Errorf("no result of %s in %q", c.Name, shorten(line))
	}
	digits := strings.FieldsFunc(result, func(r rune) bool { return r == ' ' || r == '<' })
	if len(digits) > 0 && digits[0] == "?" {
		c.Result = -1 // it did not return
		return nil
	}
	var err error
	if c.Result, err = strconv.ParseInt(digits[0], 0, 64); err != nil {
		return fmt.Errorf("result of %s: %w", c.Name, err)
	}
	return nil
}

// split splits arguments. Strings are in hexadecimal, so that no comma and no
// bracket is part of one.
func split(s string) []string {
	var out []string
	depth, begin := 0, 0
	for i := range len(s) {
		switch s[i] {
		case '[', '{', '(':
			depth++
		case ']', '}', ')':
			depth--
		case ',':
			if depth == 0 {
				out = append(out, strings.TrimSpace(s[begin:i]))
				begin = i + 1
			}
		}
	}
	return append(out, strings.TrimSpace(s[begin:]))
}

// Has reports whether an argument holds text, such as one of a command line.
func (c *Call) Has(text string) bool {
	coded := quote(text)
	for _, a := range c.Args {
		if strings.Contains(a, coded) {
			return true
		}
	}
	return false
}

func quote(s string) string {
	var b strings.Builder
	for i := range len(s) {
		fmt.Fprintf(&b, `\x%02x`, s[i])
	}
	return b.String()
}

// fd is the number and the path of an argument that is a descriptor.
func (c *Call) fd(i int) (int, string) {
	if i >= len(c.Args) {
		return -1, ""
	}
	number, path, _ := strings.Cut(c.Args[i], "<")
	n, err := strconv.Atoi(number)
	if err != nil {
		n = -1
	}
	return n, decode(path)
}

// text is an argument that is a string, and whether strace wrote all of it.
func (c *Call) text(i int) (string, bool) {
	if i >= len(c.Args) || !strings.HasPrefix(c.Args[i], `"`) {
		return "", false
	}
	return decode(c.Args[i]), strings.HasSuffix(c.Args[i], `"`)
}

func (c *Call) number(i int) int64 {
	if i >= len(c.Args) {
		return -1
	}
	n, err := strconv.ParseInt(c.Args[i], 0, 64)
	if err != nil {
		return -1
	}
	return n
}

// decode reads the hexadecimal form of a string, with whatever is around it.
func decode(s string) string {
	s = strings.Trim(strings.TrimSuffix(s, "..."), `"<>`)
	b, err := hex.DecodeString(strings.ReplaceAll(s, `\x`, ""))
	if err != nil {
		return s
	}
	return string(b)
}

func shorten(s string) string { return s[:min(len(s), 120)] }
