package powerloss

import (
	"fmt"
	"hash/maphash"
	"maps"
	"math/rand/v2"
	"os"
	"path"
	"path/filepath"
	"slices"
)

// Mode says what of that which is not durable has reached the disk.
type Mode int

// The modes.
const (
	// Nothing: only what is durable.
	Nothing Mode = iota
	// Everything: as if the power had not failed.
	Everything
	// Some: any part of it.
	Some
	// Torn: any part of it, and of the last write of each file a part that
	// ends at a sector.
	Torn
	// Names: every change of a directory, and of no file.
	Names
	// Data: every change of a file, and of no directory.
	Data
)

// sector is the most that a disk writes whole.
const sector = 512

// Image is what a disk holds after a power cut: the content of each file by its
// path, and nil for a directory.
type Image map[string][]byte

// Image makes one image. rng decides what has reached the disk.
func (d *Disk) Image(mode Mode, rng *rand.Rand) Image {
	im := Image{}
	for _, r := range d.roots {
		im[r.Path] = nil
		d.top[r.Path].into(im, r.Path, mode, rng)
	}
	return im
}

func (n *node) into(im Image, at string, mode Mode, rng *rand.Rand) {
	c := n.remains(mode, rng)
	for _, name := range slices.Sorted(maps.Keys(c.names)) {
		p, child := path.Join(at, name), c.names[name]
		if child.dir {
			im[p] = nil
			child.into(im, p, mode, rng)
			continue
		}
		im[p] = child.remains(mode, rng).data
		if im[p] == nil {
			im[p] = []byte{}
		}
	}
}

// remains is a copy of what is on the disk of one file or directory.
func (n *node) remains(mode Mode, rng *rand.Rand) content {
	c := content{data: slices.Clone(n.durable.data), names: maps.Clone(n.durable.names)}
	last := len(n.pending) - 1
	for i, ch := range n.pending {
		switch {
		case mode == Nothing, mode == Names && !n.dir, mode == Data && n.dir:
			continue
		case mode == Torn && i == last && len(ch.data) > sector:
			ch.data = ch.data[:sector*(1+rng.IntN(len(ch.data)/sector))]
		case (mode == Some || mode == Torn) && rng.IntN(2) == 0:
			continue
		}
		c.apply(ch)
	}
	return c
}

// Sum tells images apart.
func (im Image) Sum(seed maphash.Seed) uint64 {
	var h maphash.Hash
	h.SetSeed(seed)
	for _, p := range slices.Sorted(maps.Keys(im)) {
		fmt.Fprintf(&h, "%s\x00%d\x00", p, len(im[p]))
		_, _ = h.Write(im[p]) // it never fails
	}
	return h.Sum64()
}

// WriteTo makes the files of the image that are below root in an empty
// directory, as what they were below root.
func (im Image) WriteTo(dir, root string) error {
	for _, p := range slices.Sorted(maps.Keys(im)) {
		rel, err := filepath.Rel(root, p)
		if err != nil || !filepath.IsLocal(rel) {
			continue
		}
		to := filepath.Join(dir, rel)
		if im[p] == nil {
			err = os.MkdirAll(to, 0o700)
		} else {
			err = os.WriteFile(to, im[p], 0o600)
		}
		if err != nil {
			return fmt.Errorf("write image: %w", err)
		}
	}
	return nil
}
