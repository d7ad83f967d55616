// Package profile reads the names of MIG profiles and finds them on a GPU. A
// name says compute slices, memory slices, memory and attributes:
//
//	[Nc.]Ng.Mgb[+attribute[,attribute]][-attribute]
//
// such as 1g.10gb, 1c.3g.40gb, 1g.10gb+me or 2g.48gb-me (NVIDIA MIG user guide,
// "Device Names"). The memory in a name is rounded, and one profile has been
// named differently by driver and by product, so a name is never compared as
// text: the GPU's own profiles are asked which of them is meant.
package profile

import (
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// The attributes that are known.
const (
	Media    = "me"     // with the media engines, of which a GPU has one set
	AllMedia = "me.all" // with all of several sets
	Graphics = "gfx"    // with graphics
)

// Name is what a profile's name says.
type Name struct {
	Compute int // compute slices of the compute instance; 0: all that the GPU instance has
	Slices  int
	GB      int
	With    []string // sorted
	Without []string // sorted
}

// ErrName is what errors wrap that say why a text is no name of a profile.
var ErrName = errors.New("name of a MIG profile")

// ErrNoMatch is what errors wrap that say why a GPU has no such profile.
var ErrNoMatch = errors.New("no such profile on this GPU")

var form = regexp.MustCompile(`^(?:([1-9][0-9]?)c\.)?([1-9][0-9]?)g\.([1-9][0-9]{0,3})gb(?:\+([a-z][a-z.,]*))?(?:-([a-z][a-z.,]*))?$`)

// Parse reads a name.
func Parse(s string) (Name, error) {
	m := form.FindStringSubmatch(s)
	if m == nil {
		return Name{}, fmt.Errorf("%w: %q is not of the form 1g.10gb, 1c.3g.40gb, 1g.10gb+me or 2g.48gb-me", ErrName, s)
	}
	n := Name{Slices: number(m[2]), GB: number(m[3]), Compute: number(m[1])}
	if n.Compute > n.Slices {
		return Name{}, fmt.Errorf("%w: %q has %d compute slices in an instance of %d", ErrName, s, n.Compute, n.Slices)
	}
	if n.Compute == n.Slices {
		n.Compute = 0
	}
	if m[4] != "" && m[5] != "" {
		return Name{}, fmt.Errorf("%w: %q has attributes both with + and with -", ErrName, s)
	}
	var err error
	if n.With, err = attributes(s, m[4], Media, AllMedia, Graphics); err != nil {
		return Name{}, err
	}
	n.Without, err = attributes(s, m[5], Media)
	return n, err
}

func number(s string) int {
	n, _ := strconv.Atoi(s) // digits by the form, or nothing
	return n
}

func attributes(name, list string, known ...string) ([]string, error) {
	if list == "" {
		return nil, nil
	}
	out := strings.Split(list, ",")
	for _, a := range out {
		if !slices.Contains(known, a) {
			return nil, fmt.Errorf("%w: %q has the attribute %q, which is none of %s", ErrName, name, a, strings.Join(known, ", "))
		}
	}
	slices.Sort(out)
	if len(slices.Compact(slices.Clone(out))) != len(out) {
		return nil, fmt.Errorf("%w: %q has an attribute twice", ErrName, name)
	}
	return out, nil
}

// String writes the name in the one form that means it.
func (n Name) String() string {
	var b strings.Builder
	if n.Compute > 0 {
		fmt.Fprintf(&b, "%dc.", n.Compute)
	}
	fmt.Fprintf(&b, "%dg.%dgb", n.Slices, n.GB)
	if len(n.With) > 0 {
		b.WriteString("+" + strings.Join(n.With, ","))
	}
	if len(n.Without) > 0 {
		b.WriteString("-" + strings.Join(n.Without, ","))
	}
	return b.String()
}

// Offered is a profile as a GPU describes it.
type Offered struct {
	ID       int // the driver's profile id
	Slices   int
	MemoryMB uint64
	With     []string // sorted
	Without  []string // sorted
}

// tolerance is how far the memory of a profile may be from its name's, in
// percent. Names have differed by up to 5 % for one profile (gpu-operator#351:
// 79 and 80 GB; mig-parted#227: 45 and 47), while profiles of equal slices
// differ by a factor of two.
const tolerance = 12

// Match finds the one profile of a GPU that a name means: equal slices, equal
// attributes, and memory of the same class. An error wraps [ErrNoMatch] and says
// what the GPU has instead.
func Match(n Name, offered []Offered) (Offered, error) {
	var best *Offered
	var near []string
	for i, o := range offered {
		if o.Slices != n.Slices {
			continue
		}
		near = append(near, o.describe())
		if !slices.Equal(o.With, n.With) || !slices.Equal(o.Without, n.Without) {
			continue
		}
		d := o.distance(n.GB)
		if d > tolerance || best != nil && d >= best.distance(n.GB) {
			continue
		}
		best = &offered[i]
	}
	if best != nil {
		return *best, nil
	}
	if near == nil {
		return Offered{}, fmt.Errorf("%w: %s: it has none of %d slices", ErrNoMatch, n, n.Slices)
	}
	return Offered{}, fmt.Errorf("%w: %s: of %d slices it has %s", ErrNoMatch, n, n.Slices, strings.Join(near, ", "))
}

// distance is how far the memory is from gb gigabytes, in percent of gb.
func (o Offered) distance(gb int) int {
	want := uint64(gb) << 10 // at most four digits, and positive
	d := max(o.MemoryMB, want) - min(o.MemoryMB, want)
	return int(min(d*100/max(want, 1), 1000)) // bounded
}

func (o Offered) describe() string {
	return Name{Slices: o.Slices, GB: int(min((o.MemoryMB+512)>>10, 9999)), With: o.With, Without: o.Without}.String() // bounded
}
