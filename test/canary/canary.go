// Package canary looks for secrets where none may be. A test gives a task values
// that stand nowhere else, lets it end, and reads everything that is there to
// read: whoever finds one of them outside the file that is meant to hold it has
// found a leak.
package canary

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
)

// Canary is a value that stands nowhere else.
type Canary struct {
	// Name is how a finding calls it.
	Name string
	// Value is what is looked for; it is never printed.
	Value []byte
}

// New returns a canary of 48 printable characters.
func New(name string) Canary {
	return Canary{Name: name, Value: []byte(rand.Text() + rand.Text())[:48]}
}

// forms are the values that give a canary away: itself, in hexadecimal, and in
// base64 wherever it may begin there. A part of it will do.
func (c Canary) forms() map[string][]byte {
	const part = 24
	v := c.Value[:min(part, len(c.Value))]
	out := map[string][]byte{
		"as it is":                 v,
		"in hexadecimal":           []byte(hex.EncodeToString(v)),
		"in capitals, hexadecimal": bytes.ToUpper([]byte(hex.EncodeToString(v))),
		"reversed":                 reversed(v),
	}
	for shift := range 3 {
		// What stands before and behind it changes the characters at both ends.
		enc := base64.StdEncoding.EncodeToString(append(make([]byte, shift), v...))
		out[fmt.Sprintf("in base64, %d bytes after a boundary", shift)] = []byte(enc[4 : len(enc)-4])
	}
	return out
}

func reversed(b []byte) []byte {
	out := make([]byte, len(b))
	for i := range b {
		out[len(b)-1-i] = b[i]
	}
	return out
}

// Visit is called with each thing that a place has, by its name.
type Visit func(name string, r io.Reader) error

// Place is somewhere that a secret could have got to.
type Place struct {
	// Name says what it is.
	Name string
	// Read shows all that is there. That there is nothing at all is an error of
	// the test: what cannot be read is no proof.
	Read func(ctx context.Context, visit Visit) error
}

// Finding is a canary that was found.
type Finding struct {
	Place, Thing string
	Canary       string
	Form         string
}

// String names the finding without the value.
func (f Finding) String() string {
	return fmt.Sprintf("%s is in %s, %s, %s", f.Canary, f.Place, f.Thing, f.Form)
}

// Search reads places and returns each finding once for a thing and canary. A
// place in which there is nothing to read is an error.
func Search(ctx context.Context, places []Place, canaries []Canary) ([]Finding, error) {
	var found []Finding
	var errs []error
	for _, p := range places {
		things := 0
		err := p.Read(ctx, func(name string, r io.Reader) error {
			n, some, err := scan(r, canaries)
			if n > 0 {
				things++
			}
			for _, f := range some {
				f.Place, f.Thing = p.Name, name
				found = append(found, f)
			}
			return err
		})
		if err == nil && things == 0 {
			err = errors.New("there is nothing to read")
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("search %s: %w", p.Name, err))
		}
	}
	return found, errors.Join(errs...)
}

// scan reads r to its end and returns how much there was, and what was found.
func scan(r io.Reader, canaries []Canary) (int, []Finding, error) {
	const chunk, overlap = 1 << 20, 4 << 10
	type form struct {
		Finding
		text []byte
	}
	var forms []form
	for _, c := range canaries {
		for name, text := range c.forms() {
			forms = append(forms, form{Finding{Canary: c.Name, Form: name}, text})
		}
	}
	var found []Finding
	seen := map[string]bool{}
	buf, kept, total := make([]byte, overlap+chunk), 0, 0
	for {
		n, err := io.ReadFull(r, buf[kept:])
		total += n
		window := buf[:kept+n]
		for _, f := range forms {
			if !seen[f.Canary] && bytes.Contains(window, f.text) {
				seen[f.Canary] = true
				found = append(found, f.Finding)
			}
		}
		if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
			return total, found, nil
		}
		if err != nil {
			return total, found, fmt.Errorf("read: %w", err)
		}
		kept = copy(buf, window[len(window)-overlap:])
	}
}
