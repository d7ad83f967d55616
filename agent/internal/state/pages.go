package state

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"hash/fnv"
	"io"
	"os"
)

// This is a reader of bbolt's pages that trusts none of them. bbolt itself
// follows whatever a damaged page says: it runs in circles, counts to two
// thousand million, or reads where there is nothing. So each page is looked at
// here before bbolt opens the file, and records are saved from here when bbolt
// cannot open it.

const (
	pageHeader  = 16 // id 8, flags 2, count 2, overflow 4
	elementSize = 16 // branch: pos 4, ksize 4, page 8; leaf: flags 4, pos 4, ksize 4, vsize 4
	metaSize    = 64 // magic 4, version 4, page size 4, flags 4, root 8, sequence 8, freelist 8, pages 8, transaction 8, sum 8

	branchPage = 0x01
	leafPage   = 0x02
	metaPage   = 0x04
	freePage   = 0x10
	bucketLeaf = 0x01

	noFreePages = ^uint64(0) // in a meta page: the free pages are not noted

	boltMagic   = 0xED0CDAED
	boltVersion = 2
	maxDepth    = 64
)

// boltMeta is one of the two pages that say where everything is.
type boltMeta struct {
	pageSize    uint64
	root        uint64
	free        uint64 // the page on which the free pages are noted, or noFreePages
	pages       uint64 // the first page that is not in use
	transaction uint64
}

// readMeta reads a meta page, or says what is wrong with it.
func readMeta(b []byte) (m boltMeta, err error) {
	if len(b) < pageHeader+metaSize {
		return m, errors.New("it is cut")
	}
	p, le := b[pageHeader:], binary.LittleEndian
	sum := fnv.New64a()
	_, _ = sum.Write(p[:metaSize-8]) // it never fails
	switch {
	case le.Uint32(p) != boltMagic || le.Uint32(p[4:]) != boltVersion:
		return m, errors.New("it is not a page of bbolt")
	case le.Uint64(p[56:]) != sum.Sum64():
		return m, errors.New("its checksum is wrong")
	}
	m = boltMeta{pageSize: uint64(le.Uint32(p[8:])), root: le.Uint64(p[16:]), free: le.Uint64(p[32:]), pages: le.Uint64(p[40:]), transaction: le.Uint64(p[48:])}
	if m.pageSize < 1024 || m.pageSize > 1<<16 || m.pageSize&(m.pageSize-1) != 0 {
		return m, fmt.Errorf("its page size is %d", m.pageSize)
	}
	return m, nil
}

// pageReader walks the pages of one file from one meta page.
type pageReader struct {
	file io.ReaderAt
	meta boltMeta
	used map[uint64]bool
	// record is called with each record; its slices are valid during the call.
	record func(bucket string, k, v []byte)
	// bad is called with each thing that is wrong and was left out. An error
	// that it returns ends the walk.
	bad func(bucket string, err error) error
	// strict: a record that the keys above it do not lead to is wrong, too.
	strict bool
	// stop is asked at each page, and its error ends the walk; optional.
	stop func() error
	// want are the parts to walk, by bucket; nil: all there is. Its map without a
	// bucket leaves that one out.
	want map[string][]span
	// buckets are those that were found, and fetched how many pages were read.
	buckets []string
	fetched int
}

// span is a range of keys: from the first on, and below the second; nil is open.
type span struct{ from, to []byte }

func (s span) holds(k []byte) bool {
	return bytes.Compare(s.from, k) <= 0 && (s.to == nil || bytes.Compare(k, s.to) < 0)
}

// wanted reports whether a page of the bucket whose keys are within s has to be
// walked.
func (p *pageReader) wanted(bucket string, s span) bool {
	if p.want == nil || bucket == "" {
		return true
	}
	for _, w := range p.want[bucket] {
		if (s.to == nil || bytes.Compare(w.from, s.to) < 0) && (w.to == nil || bytes.Compare(s.from, w.to) < 0) {
			return true
		}
	}
	return false
}

// openPages reads the meta pages; the error of each that is of no use is told.
func openPages(f io.ReaderAt) (metas []boltMeta, problems []error) {
	size := uint64(os.Getpagesize())
	for i := range uint64(2) {
		b := make([]byte, pageHeader+metaSize)
		_, err := f.ReadAt(b, int64(i*size))
		var m boltMeta
		if err == nil || errors.Is(err, io.EOF) {
			m, err = readMeta(b)
		}
		if err != nil {
			problems = append(problems, fmt.Errorf("meta page %d: %w", i, err))
			continue
		}
		metas = append(metas, m)
		if i == 0 {
			size = m.pageSize
		}
	}
	if len(metas) == 2 && metas[1].transaction > metas[0].transaction {
		metas[0], metas[1] = metas[1], metas[0]
	}
	return metas, problems
}

// walk calls record for each record of each bucket that can be reached.
func (p *pageReader) walk() error {
	p.used, p.buckets = map[uint64]bool{0: true, 1: true}, nil
	return p.page("", p.meta.root, 0, nil, span{})
}

// fetch reads a page with those that belong to it, and marks them used.
func (p *pageReader) fetch(id uint64) ([]byte, error) {
	if id < 2 || id >= p.meta.pages {
		return nil, fmt.Errorf("page %d: the file ends at page %d", id, p.meta.pages)
	}
	b := make([]byte, p.meta.pageSize)
	if err := p.read(b, id); err != nil {
		return nil, err
	}
	p.fetched++
	le := binary.LittleEndian
	more := uint64(le.Uint32(b[12:]))
	switch {
	case le.Uint64(b) != id:
		return nil, fmt.Errorf("page %d says that it is page %d", id, le.Uint64(b))
	case id+more >= p.meta.pages:
		return nil, fmt.Errorf("page %d goes on for %d pages, and the file ends at page %d", id, more, p.meta.pages)
	}
	for i := id; i <= id+more; i++ {
		if p.used[i] {
			return nil, fmt.Errorf("page %d is used twice", i)
		}
		p.used[i] = true
	}
	if more > 0 {
		b = append(b, make([]byte, more*p.meta.pageSize)...)
		return b, p.read(b[p.meta.pageSize:], id+1)
	}
	return b, nil
}

func (p *pageReader) read(b []byte, id uint64) error {
	_, err := p.file.ReadAt(b, int64(id*p.meta.pageSize))
	if errors.Is(err, io.EOF) {
		return fmt.Errorf("page %d is beyond the end of the file", id)
	}
	if err != nil {
		return fmt.Errorf("read page %d: %w", id, err)
	}
	return nil
}

// page walks a page whose keys are within s, if those that led to it are right.
func (p *pageReader) page(bucket string, id uint64, depth int, before *[]byte, s span) error {
	if p.stop != nil {
		if err := p.stop(); err != nil {
			return err
		}
	}
	if depth > maxDepth {
		return p.bad(bucket, fmt.Errorf("page %d is %d pages deep", id, depth))
	}
	b, err := p.fetch(id)
	if err != nil {
		return p.bad(bucket, err)
	}
	if before == nil {
		before = new([]byte)
	}
	switch flags := binary.LittleEndian.Uint16(b[8:]); flags {
	case leafPage:
		if p.strict && depth > 0 && binary.LittleEndian.Uint16(b[10:]) == 0 {
			return p.bad(bucket, fmt.Errorf("page %d says that it is empty", id))
		}
		return p.leaf(bucket, b, fmt.Sprintf("page %d", id), before, s)
	case branchPage:
		return p.branch(bucket, b, id, depth, before, s)
	default:
		return p.bad(bucket, fmt.Errorf("page %d is of no known kind: %#x", id, flags))
	}
}

func (p *pageReader) branch(bucket string, b []byte, id uint64, depth int, before *[]byte, s span) error {
	le, count := binary.LittleEndian, int(binary.LittleEndian.Uint16(b[10:]))
	if count == 0 || pageHeader+count*elementSize > len(b) {
		return p.bad(bucket, fmt.Errorf("page %d cannot have %d branches", id, count))
	}
	if first := le.Uint32(b[pageHeader:]); p.strict && int(first) != count*elementSize {
		return p.bad(bucket, fmt.Errorf("page %d says that it has %d branches, and has room for %d", id, count, first/elementSize))
	}
	key := func(i int) ([]byte, bool) {
		at := pageHeader + i*elementSize
		return cut(b, at, le.Uint32(b[at:]), le.Uint32(b[at+4:]))
	}
	for i := range count {
		e := b[pageHeader+i*elementSize:]
		lo, ok := key(i)
		if !ok {
			if err := p.bad(bucket, fmt.Errorf("branch %d of page %d lies outside of it", i, id)); err != nil {
				return err
			}
			continue
		}
		below := s
		if i > 0 {
			below.from = lo
		}
		if i+1 < count {
			below.to, _ = key(i + 1) // one that lies outside is told when it is its turn
		}
		if !p.wanted(bucket, below) {
			continue
		}
		if err := p.page(bucket, le.Uint64(e[8:]), depth+1, before, below); err != nil {
			return err
		}
	}
	return nil
}

func (p *pageReader) leaf(bucket string, b []byte, where string, before *[]byte, s span) error {
	le, count := binary.LittleEndian, int(binary.LittleEndian.Uint16(b[10:]))
	if pageHeader+count*elementSize > len(b) {
		return p.bad(bucket, fmt.Errorf("%s cannot have %d records", where, count))
	}
	// bbolt writes the first record behind the table of all: with a smaller count
	// those behind would be gone without a word.
	if count > 0 && p.strict && int(le.Uint32(b[pageHeader+4:])) != count*elementSize {
		return p.bad(bucket, fmt.Errorf("%s has room for another number of records than %d", where, count))
	}
	for i := range count {
		at := pageHeader + i*elementSize
		e := b[at:]
		flags, pos, ksize, vsize := le.Uint32(e), le.Uint32(e[4:]), le.Uint32(e[8:]), le.Uint32(e[12:])
		k, ok1 := cut(b, at, pos, ksize)
		v, ok2 := cut(b, at+int(pos)+int(ksize), 0, vsize)
		var err error
		switch {
		case !ok1 || !ok2 || flags > bucketLeaf || ksize == 0 || int(pos) < elementSize:
			err = p.bad(bucket, fmt.Errorf("record %d of %s lies outside of it", i, where))
		case bytes.Compare(k, *before) <= 0:
			err = p.bad(bucket, fmt.Errorf("record %d of %s is out of order", i, where))
		case p.strict && !s.holds(k):
			err = p.bad(bucket, fmt.Errorf("record %d of %s is not where one would look for it", i, where))
		case flags == bucketLeaf:
			*before = bytes.Clone(k)
			err = p.nested(bucket, string(k), v)
		case bucket == "":
			err = p.bad(bucket, fmt.Errorf("record %d of %s is in no bucket", i, where))
		default:
			*before = bytes.Clone(k)
			p.record(bucket, k, v)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// nested walks a bucket, which is below the root and nowhere else.
func (p *pageReader) nested(in, name string, v []byte) error {
	if in != "" || len(v) < 16 {
		return p.bad(in, fmt.Errorf("bucket %q cannot be where it is", name))
	}
	p.buckets = append(p.buckets, name)
	if p.want != nil && p.want[name] == nil {
		return nil
	}
	if root := binary.LittleEndian.Uint64(v); root != 0 {
		return p.page(name, root, 0, nil, span{})
	}
	if v = v[16:]; len(v) < pageHeader || binary.LittleEndian.Uint16(v[8:]) != leafPage {
		return p.bad(name, errors.New("its records, which lie within the root, cannot be read"))
	}
	return p.leaf(name, v, "the root", new([]byte), span{})
}

// cut returns size bytes that lie off bytes behind at, if they are within b.
func cut(b []byte, at int, off, size uint32) ([]byte, bool) {
	from := uint64(at) + uint64(off)
	if to := from + uint64(size); to <= uint64(len(b)) {
		return b[from:to], true
	}
	return nil, false
}

// checkStructure wants all that bbolt would follow to be within the file and
// used once. It reads the file in the usual way, in which a disk that cannot
// read is an error: through a map it would be a fault like that of a page that
// is not there.
func checkStructure(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return fmt.Errorf("open state file: %w", err)
	}
	defer f.Close() // it was only read
	metas, problems := openPages(f)
	if len(metas) == 0 {
		err := errors.Join(problems...)
		if unavailable(err) {
			return err
		}
		return fmt.Errorf("%w: %w", ErrDamaged, err)
	}
	p := &pageReader{file: f, meta: metas[0], strict: true, record: func(string, []byte, []byte) {}, bad: damage}
	if err := p.walk(); err != nil {
		return err
	}
	if _, err := p.freePagesSum(); err != nil {
		return damage("", err)
	}
	return nil
}

// damage ends a walk at the first thing that is wrong.
func damage(bucket string, err error) error {
	if unavailable(err) {
		return err
	}
	return fmt.Errorf("%w: bucket %q: %w", ErrDamaged, bucket, err)
}

// freePagesSum is the CRC-32C of the pages on which the free pages are noted; nil
// when they are not noted. bbolt writes to whatever is noted there: each must be a
// page of the file that the walk before has not come by.
func (p *pageReader) freePagesSum() (*uint32, error) {
	if p.meta.free == noFreePages {
		return nil, nil
	}
	if p.used == nil {
		p.used = map[uint64]bool{}
	}
	b, err := p.fetch(p.meta.free)
	if err != nil {
		return nil, err
	}
	le := binary.LittleEndian
	if flags := le.Uint16(b[8:]); flags != freePage {
		return nil, fmt.Errorf("page %d should note the free pages, and is of kind %#x", p.meta.free, flags)
	}
	ids, count := b[pageHeader:], uint64(le.Uint16(b[10:]))
	if count == 0xffff {
		count, ids = le.Uint64(ids), ids[8:]
	}
	if count > uint64(len(ids))/8 {
		return nil, fmt.Errorf("page %d notes %d free pages, and has no room for them", p.meta.free, count)
	}
	last := uint64(1)
	for i := range count {
		id := le.Uint64(ids[8*i:])
		if id <= last || id >= p.meta.pages || p.used[id] {
			return nil, fmt.Errorf("page %d is noted as free and cannot be", id)
		}
		last = id
	}
	sum := crc32.Checksum(b, castagnoli)
	return &sum, nil
}
