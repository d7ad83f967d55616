package boltstore

import (
	"encoding/binary"
	"fmt"
	"strings"
	"time"

	"github.com/gpuaas/millwright/controlplane/internal/store"
)

// maxName bounds each part of a key; bbolt's own bound is far above it.
const maxName = 1024

func number(n uint64) []byte { return binary.BigEndian.AppendUint64(nil, n) }

func parseNumber(b []byte) (uint64, error) {
	if len(b) != 8 {
		return 0, fmt.Errorf("number of %d bytes, want 8", len(b))
	}
	return binary.BigEndian.Uint64(b), nil
}

// name joins parts to a key; each is followed by a zero byte, so that no part
// can run into the next.
func name(parts ...string) []byte {
	var k []byte
	for _, p := range parts {
		k = append(k, p...)
		k = append(k, 0)
	}
	return k
}

func nodeIndexKey(node string, createIndex uint64) []byte {
	return binary.BigEndian.AppendUint64(name(node), createIndex)
}

func frameKey(f store.FrameKey) []byte {
	return binary.BigEndian.AppendUint64(name(f.Node, f.JournalID), f.Seq)
}

func historyKey(taskID string, index uint64) []byte {
	return binary.BigEndian.AppendUint64(name(taskID), index)
}

func dueKey(notAfter time.Time, taskID string) []byte {
	return append(number(dueNumber(notAfter)), taskID...)
}

// dueNumber orders times as numbers; a time before 1970 counts as that.
func dueNumber(t time.Time) uint64 {
	return uint64(max(t.UnixNano(), 0))
}

func checkName(what, s string) error {
	switch {
	case s == "":
		return fmt.Errorf("%s is empty", what)
	case len(s) > maxName:
		return fmt.Errorf("%s has %d bytes; at most %d", what, len(s), maxName)
	case strings.IndexByte(s, 0) >= 0:
		return fmt.Errorf("%s %q holds a zero byte", what, s)
	}
	return nil
}
