package boltstore

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"

	bolt "go.etcd.io/bbolt"
)

// bbolt finds a page that leads nowhere, but not one that says that it has fewer
// records than it has: those behind are gone without a word. It writes the first
// record right behind the table of all, and that tells how many there were.

const (
	pageHead  = 16 // id 8, flags 2, count 2, overflow 4
	pageEntry = 16 // branch: pos 4, ksize 4, page 8; leaf: flags 4, pos 4, ksize 4, vsize 4
	branch    = 0x01
	leaf      = 0x02
	nested    = 0x01
)

// counted follows the pages of a transaction, which tx.Check has found in order.
type counted struct {
	file io.ReaderAt
	size int
}

func countRecords(tx *bolt.Tx, file io.ReaderAt) error {
	c := counted{file, tx.DB().Info().PageSize}
	return c.page(uint64(tx.Cursor().Bucket().RootPage()), 0)
}

func (c counted) page(id uint64, depth int) error {
	b := make([]byte, c.size)
	if _, err := c.file.ReadAt(b, int64(id)*int64(c.size)); err != nil { // within the file
		return c.unread(id, err)
	}
	if more := int(binary.LittleEndian.Uint32(b[12:])); more > 0 {
		rest := make([]byte, more*c.size)
		if _, err := c.file.ReadAt(rest, (int64(id)+1)*int64(c.size)); err != nil { // within the file
			return c.unread(id, err)
		}
		b = append(b, rest...)
	}
	if depth > 64 {
		return fmt.Errorf("%w: page %d is %d pages deep", ErrDamaged, id, depth)
	}
	return c.records(b, fmt.Sprintf("page %d", id), depth)
}

func (c counted) unread(id uint64, err error) error {
	if errors.Is(err, io.EOF) {
		return fmt.Errorf("%w: page %d goes on beyond the end of the file", ErrDamaged, id)
	}
	return fmt.Errorf("read page %d: %w", id, err)
}

// records looks at a page, or at a bucket that lies within another's record.
func (c counted) records(b []byte, where string, depth int) error {
	le := binary.LittleEndian
	flags, count := le.Uint16(b[8:]), int(le.Uint16(b[10:]))
	switch {
	case count == 0 && depth == 0: // an empty bucket, which may hold anything behind
		return nil
	case count == 0:
		return fmt.Errorf("%w: %s says that it is empty", ErrDamaged, where)
	}
	at := le.Uint32(b[pageHead:])
	if flags == leaf {
		at = le.Uint32(b[pageHead+4:])
	}
	if int(at) != count*pageEntry {
		return fmt.Errorf("%w: %s says that it has %d records, and has room for %d", ErrDamaged, where, count, at/pageEntry)
	}
	for i := range count {
		from := pageHead + i*pageEntry
		e := b[from:]
		switch {
		case flags == branch:
			if err := c.page(le.Uint64(e[8:]), depth+1); err != nil {
				return err
			}
		case le.Uint32(e) == nested:
			v := b[from+int(le.Uint32(e[4:]))+int(le.Uint32(e[8:])):]
			if root := le.Uint64(v); root != 0 {
				if err := c.page(root, 0); err != nil {
					return err
				}
			} else if err := c.records(v[16:], where, 0); err != nil {
				return err
			}
		}
	}
	return nil
}
