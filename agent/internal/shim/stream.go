package shim

import (
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"hash"
	"io"
	"os"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpuaas/millwright/agent/internal/host/files"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
)

const (
	headLimit = 1 << 20
	tailLimit = 256 << 10
	chunkSize = 32 << 10
)

// stream takes what the command writes to one of its outputs. The head goes to
// its file as it comes; the last bytes go round in a ring.
type stream struct {
	read, write *os.File
	head        *os.File
	tailPath    string

	total    atomic.Uint64
	headLen  uint64
	headHash hash.Hash
	headBad  bool // the head's file took no more
	ring     []byte
	past     uint64 // bytes that went into the ring
	open     bool   // it was still open at the end
}

func openStream(dir Dir, id taskv1.Stream) (*stream, error) {
	s := &stream{tailPath: dir.TailPath(id), headHash: sha256.New()}
	var err error
	s.head, err = os.OpenFile(dir.HeadPath(id), os.O_WRONLY|os.O_CREATE|os.O_TRUNC|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open output: %w", err)
	}
	if s.read, s.write, err = os.Pipe(); err != nil {
		return nil, fmt.Errorf("open output: %w", err)
	}
	return s, nil
}

// copy takes everything until the stream ends or is given up. It never stops
// reading for want of room: a command must not hang on its own output.
func (s *stream) copy() {
	buf := make([]byte, chunkSize)
	for {
		n, err := s.read.Read(buf)
		s.take(buf[:n])
		if err != nil {
			s.open = !errors.Is(err, io.EOF)
			return
		}
	}
}

func (s *stream) take(p []byte) {
	s.total.Add(uint64(len(p)))
	if s.headLen < headLimit && !s.headBad && len(p) > 0 {
		n, err := s.head.Write(p[:min(uint64(len(p)), headLimit-s.headLen)])
		s.headHash.Write(p[:n])
		s.headLen += uint64(n)
		s.headBad = err != nil
		p = p[n:]
	}
	if len(p) > 0 && s.ring == nil {
		s.ring = make([]byte, tailLimit)
	}
	for len(p) > 0 {
		n := copy(s.ring[s.past%tailLimit:], p)
		s.past += uint64(n)
		p = p[n:]
	}
}

// giveUp makes copy return though the stream has not ended.
func (s *stream) giveUp() {
	_ = s.read.SetReadDeadline(time.Unix(1, 0)) // a pipe takes deadlines
}

// finish makes head and tail durable and describes the stream. What could not be
// written is not counted as kept.
func (s *stream) finish() *taskv1.OutputSummary {
	_ = s.read.Close() // nothing more is wanted
	o := &taskv1.OutputSummary{TotalBytes: s.total.Load(), OpenAtEnd: s.open}
	if err := errors.Join(s.head.Sync(), s.head.Close()); err == nil {
		o.HeadBytes, o.HeadSha256 = s.headLen, s.headHash.Sum(nil)
	}
	tail := s.tail()
	if err := files.Fill(s.tailPath, tail, 0o600); err == nil {
		sum := sha256.Sum256(tail)
		o.TailBytes, o.TailSha256 = uint64(len(tail)), sum[:]
	}
	return o
}

func (s *stream) tail() []byte {
	if s.past <= tailLimit {
		return s.ring[:s.past]
	}
	at := s.past % tailLimit
	return append(append(make([]byte, 0, tailLimit), s.ring[at:]...), s.ring[:at]...)
}

// totals is the file with the numbers of bytes until now, which is not durable:
// the result has the final ones.
type totals struct {
	file    *os.File
	streams [2]*stream
	last    [16]byte
}

func openTotals(path string, out, err *stream) (*totals, error) {
	f, e := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|unix.O_NOFOLLOW, 0o600)
	if e != nil {
		return nil, fmt.Errorf("open output: %w", e)
	}
	return &totals{file: f, streams: [2]*stream{out, err}}, nil
}

func (t *totals) write() {
	var b [16]byte
	for i, s := range t.streams {
		binary.BigEndian.PutUint64(b[8*i:], s.total.Load())
	}
	if b == t.last {
		return
	}
	if _, err := t.file.WriteAt(b[:], 0); err == nil { // it is only for followers
		t.last = b
	}
}

func (t *totals) finish() {
	t.write()
	_ = t.file.Close() // it is only for followers
}
