package state

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"os"
	"path/filepath"
	"time"

	bolt "go.etcd.io/bbolt"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
)

const (
	slotSize   = 512
	slotHeader = 6 // CRC-32C and length
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// markFile is the high-water mark. Only the one who commits touches it.
type markFile struct {
	file *os.File
	last *agentv1.JournalMark // nil: there is none
}

// openMark reads the mark, and makes the file when it is missing. A file in
// which neither slot is whole counts as one without a mark.
func openMark(path string) (*markFile, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open high-water mark: %w", err)
	}
	m := &markFile{file: f}
	if err := m.prepare(); err != nil {
		f.Close()
		return nil, err
	}
	for slot := range int64(2) {
		if got := m.read(slot); got != nil && got.GetCounter() > m.last.GetCounter() {
			m.last = got
		}
	}
	return m, nil
}

// prepare gives the file its size once, so that later writes change no
// metadata and cost one flush.
func (m *markFile) prepare() error {
	info, err := m.file.Stat()
	if err != nil {
		return fmt.Errorf("look at high-water mark: %w", err)
	}
	if info.Size() >= 2*slotSize {
		return nil
	}
	if _, err := m.file.WriteAt(make([]byte, 2*slotSize-info.Size()), info.Size()); err != nil {
		return fmt.Errorf("make high-water mark: %w", err)
	}
	if err := m.file.Sync(); err != nil {
		return fmt.Errorf("sync high-water mark: %w", err)
	}
	return syncDir(filepath.Dir(m.file.Name()))
}

func (m *markFile) read(slot int64) *agentv1.JournalMark {
	b := make([]byte, slotSize)
	if _, err := m.file.ReadAt(b, slot*slotSize); err != nil {
		return nil
	}
	n := int(binary.BigEndian.Uint16(b[4:]))
	if n == 0 || n > slotSize-slotHeader || binary.BigEndian.Uint32(b) != crc32.Checksum(b[4:slotHeader+n], castagnoli) {
		return nil
	}
	out := new(agentv1.JournalMark)
	if err := proto.Unmarshal(b[slotHeader:slotHeader+n], out); err != nil {
		return nil
	}
	return out
}

// write makes next the mark. The slot that is not in use is overwritten, so
// that a torn write leaves the mark before.
func (m *markFile) write(next *agentv1.JournalMark) error {
	next.Counter = m.last.GetCounter() + 1
	p, err := proto.Marshal(next)
	if err != nil {
		return fmt.Errorf("encode high-water mark: %w", err)
	}
	if len(p) > slotSize-slotHeader {
		return fmt.Errorf("encode high-water mark: %d bytes do not fit into %d", len(p), slotSize-slotHeader)
	}
	b := make([]byte, slotSize)
	binary.BigEndian.PutUint16(b[4:], uint16(len(p)))
	copy(b[slotHeader:], p)
	binary.BigEndian.PutUint32(b, crc32.Checksum(b[4:slotHeader+len(p)], castagnoli))
	if _, err := m.file.WriteAt(b, int64(next.GetCounter()%2)*slotSize); err != nil {
		return fmt.Errorf("write high-water mark: %w", err)
	}
	if err := unix.Fdatasync(int(m.file.Fd())); err != nil {
		return fmt.Errorf("sync high-water mark: %w", err)
	}
	m.last = next
	return nil
}

func (m *markFile) close() error {
	if err := m.file.Close(); err != nil && !errors.Is(err, os.ErrClosed) {
		return fmt.Errorf("close high-water mark: %w", err)
	}
	return nil
}

// raiseMark writes what is now durable into the mark. Only the one who commits
// calls it.
func (s *Store) raiseMark() error {
	used := int64(0)
	next := &agentv1.JournalMark{Node: s.cfg.Node, Generation: s.cfg.Generation, Condemned: s.condemned}
	err := s.db.View(func(btx *bolt.Tx) error {
		tx := newTx(btx, s.cfg)
		h, err := tx.head()
		if err != nil {
			return err
		}
		meta, err := tx.Journal()
		if err != nil {
			return err
		}
		next.JournalId, next.Seq, next.Transaction = meta.GetJournalId(), h.seq, uint64(btx.ID())
		used = btx.Size()
		return s.behind(next.GetJournalId(), next.GetSeq(), next.GetTransaction())
	})
	if err != nil {
		return err
	}
	s.reserve(used)
	high, sure := s.cfg.HighWater.Kept()
	next.HighWater, next.SureTime = timestamp(high), timestamp(sure)
	next.WallTime = timestamp(latest(high, s.issued, s.mark.last.GetWallTime().AsTime()))
	if s.clockReset {
		next.WallTime = next.HighWater
	}
	if next.Sound = s.describe(next.GetTransaction()); proto.Size(next) > slotSize-slotHeader-8 {
		next.Sound = nil // the start that it would make quicker looks at all of the file
	}
	if err := s.mark.write(next); err != nil {
		return err
	}
	s.clockReset = false
	return nil
}

func timestamp(t time.Time) *timestamppb.Timestamp {
	if t.IsZero() {
		return nil
	}
	return timestamppb.New(t)
}

func moment(t *timestamppb.Timestamp) time.Time {
	if t == nil {
		return time.Time{}
	}
	return t.AsTime()
}
