// Package dcgm reads what dcgmi diag -j writes, of DCGM 3 and 4. What it does not
// understand is an error: it never takes an answer for better than it is.
package dcgm

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
	"unicode/utf8"
)

// Status is what a test came to.
type Status int

// The statuses.
const (
	// Pass: it is well.
	Pass Status = iota + 1
	// Skip: it was not run, on purpose.
	Skip
	// Warn: it ran, and somebody should look.
	Warn
	// Error: it could not be run.
	Error
	// Fail: it is not well.
	Fail
)

// Test is what one test came to on one GPU.
type Test struct {
	// Name is the test's.
	Name string
	// GPU is DCGM's number of the GPU; -1: it is about no GPU, or about all.
	GPU int
	// Status is what it came to.
	Status Status
	// Message is what DCGM said about it, or empty.
	Message string
}

// Report is a whole answer.
type Report struct {
	// Version is DCGM's, or empty.
	Version string
	// Tests are in DCGM's order.
	Tests []Test
}

// ErrMalformed is wrapped by every error of [Parse].
var ErrMalformed = errors.New("no answer of dcgmi that is understood")

const (
	maxBytes   = 1 << 20
	maxResults = 4096
	maxMessage = 400
)

// document is an answer: DCGM 3 has the one key and DCGM 4 the other.
type document struct {
	Three    *diagnostic `json:"DCGM GPU Diagnostic"`
	Four     *diagnostic `json:"DCGM Diagnostic"`
	Metadata struct {
		Version string `json:"version"`
	} `json:"metadata"`
}

type diagnostic struct {
	Version      string     `json:"version"`
	RuntimeError string     `json:"runtime_error"`
	Categories   []category `json:"test_categories"`
}

type category struct {
	Tests []*test `json:"tests"` // old ones have null between them
}

type test struct {
	Name    string   `json:"name"`
	Results []result `json:"results"`
	Summary *result  `json:"test_summary"`
}

type result struct {
	// DCGM 3: numbers in a text, 0 or 0,1,2, under one of two names.
	GPU  *number `json:"gpu_id"`
	GPUs *number `json:"gpu_ids"`
	// DCGM 4.
	Group    *string         `json:"entity_group"`
	Entity   *int            `json:"entity_id"`
	Status   string          `json:"status"`
	Warnings json.RawMessage `json:"warnings"`
	Info     json.RawMessage `json:"info"`
}

// number is a text or a number.
type number string

// UnmarshalJSON implements [json.Unmarshaler].
func (n *number) UnmarshalJSON(b []byte) error {
	var s string
	if err := json.Unmarshal(b, &s); err == nil {
		*n = number(s)
		return nil
	}
	var i int
	if err := json.Unmarshal(b, &i); err != nil {
		return err
	}
	*n = number(strconv.Itoa(i))
	return nil
}

// Parse reads an answer. Before it there may be lines of warnings, and nothing
// after it. A test without a result, a status that is not known, a result of
// something unknown, and an answer without any test are errors.
func Parse(b []byte) (Report, error) {
	if len(b) > maxBytes {
		return Report{}, fmt.Errorf("it has more than %d bytes: %w", maxBytes, ErrMalformed)
	}
	start := bytes.IndexByte(b, '{')
	if start < 0 {
		return Report{}, fmt.Errorf("it is no JSON: %w", ErrMalformed)
	}
	dec := json.NewDecoder(bytes.NewReader(b[start:]))
	var d document
	if err := dec.Decode(&d); err != nil {
		return Report{}, fmt.Errorf("%w: %w", ErrMalformed, err)
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return Report{}, fmt.Errorf("more follows it: %w", ErrMalformed)
	}
	root := d.Four
	switch {
	case d.Three != nil && d.Four != nil:
		return Report{}, fmt.Errorf("it has the answers of two versions: %w", ErrMalformed)
	case d.Three != nil:
		root = d.Three
	case d.Four == nil:
		return Report{}, fmt.Errorf("it has no diagnostic: %w", ErrMalformed)
	}
	return root.report(d.Metadata.Version)
}

func (d *diagnostic) report(version string) (Report, error) {
	out := Report{Version: version}
	if out.Version == "" {
		out.Version = d.Version
	}
	if d.RuntimeError != "" {
		out.Tests = append(out.Tests, Test{Name: "runtime", GPU: -1, Status: Error, Message: cut(d.RuntimeError)})
	}
	for _, c := range d.Categories {
		for _, t := range c.Tests {
			if t == nil {
				continue
			}
			found, err := t.read()
			if err != nil {
				return Report{}, fmt.Errorf("test %q: %w", t.Name, err)
			}
			if out.Tests = append(out.Tests, found...); len(out.Tests) > maxResults {
				return Report{}, fmt.Errorf("it has more than %d results: %w", maxResults, ErrMalformed)
			}
		}
	}
	if len(out.Tests) == 0 {
		return Report{}, fmt.Errorf("it has no test: %w", ErrMalformed)
	}
	return out, nil
}

// read returns the results of a test. The summary counts only where it is worse
// than every result: it has no GPU.
func (t *test) read() ([]Test, error) {
	if t.Name == "" || len(t.Results) == 0 && t.Summary == nil {
		return nil, fmt.Errorf("it has no name or no result: %w", ErrMalformed)
	}
	var out []Test
	worst := Status(0)
	for _, r := range t.Results {
		one, err := r.read(t.Name)
		if err != nil {
			return nil, err
		}
		for _, o := range one {
			worst = max(worst, o.Status)
		}
		out = append(out, one...)
	}
	if t.Summary == nil {
		return out, nil
	}
	s, err := statusOf(t.Summary.Status)
	if err != nil {
		return nil, err
	}
	if s > worst {
		out = append(out, Test{Name: t.Name, GPU: -1, Status: s, Message: t.Summary.message()})
	}
	return out, nil
}

func (r *result) read(name string) ([]Test, error) {
	s, err := statusOf(r.Status)
	if err != nil {
		return nil, err
	}
	gpus, err := r.gpus()
	if err != nil {
		return nil, err
	}
	var out []Test
	for _, g := range gpus {
		out = append(out, Test{Name: name, GPU: g, Status: s, Message: r.message()})
	}
	return out, nil
}

// gpus are the GPUs that a result is about; -1: none, as of a CPU or the node.
func (r *result) gpus() ([]int, error) {
	text := r.GPU
	if text == nil {
		text = r.GPUs
	}
	switch {
	case text != nil && r.Entity != nil:
		return nil, fmt.Errorf("a result names what it is about in two ways: %w", ErrMalformed)
	case r.Entity != nil && r.Group != nil && *r.Group == "GPU":
		if *r.Entity < 0 {
			return nil, fmt.Errorf("there is no GPU %d: %w", *r.Entity, ErrMalformed)
		}
		return []int{*r.Entity}, nil
	case text == nil || *text == "":
		return []int{-1}, nil
	}
	var out []int
	for one := range strings.SplitSeq(string(*text), ",") {
		n, err := strconv.Atoi(strings.TrimSpace(one))
		if err != nil || n < 0 || len(out) > 256 {
			return nil, fmt.Errorf("there is no GPU %q: %w", one, ErrMalformed)
		}
		out = append(out, n)
	}
	return out, nil
}

// statusOf understands a status. Not run is not a pass, and neither is a word that
// is not known.
func statusOf(word string) (Status, error) {
	switch strings.ToLower(strings.TrimSpace(word)) {
	case "pass":
		return Pass, nil
	case "skip", "skipped", "not applicable":
		return Skip, nil
	case "warn", "warning":
		return Warn, nil
	case "error", "not run", "notrun":
		return Error, nil
	case "fail":
		return Fail, nil
	}
	return 0, fmt.Errorf("there is no status %q: %w", word, ErrMalformed)
}

// message is what a result says in words, which are a text, a list of texts, or a
// list of warnings.
func (r *result) message() string {
	var out []string
	for _, raw := range []json.RawMessage{r.Warnings, r.Info} {
		var one string
		var many []json.RawMessage
		if json.Unmarshal(raw, &one) == nil && one != "" {
			out = append(out, one)
		}
		if json.Unmarshal(raw, &many) != nil {
			continue
		}
		for _, m := range many {
			var w struct {
				Warning string `json:"warning"`
			}
			if json.Unmarshal(m, &one) == nil {
				out = append(out, one)
			} else if json.Unmarshal(m, &w) == nil && w.Warning != "" {
				out = append(out, w.Warning)
			}
		}
	}
	return cut(strings.Join(out, "; "))
}

// cut bounds a text and puts it on one line.
func cut(s string) string {
	s = strings.ToValidUTF8(strings.Join(strings.Fields(s), " "), "?")
	if len(s) <= maxMessage {
		return s
	}
	s = s[:maxMessage]
	for !utf8.ValidString(s) {
		s = s[:len(s)-1]
	}
	return s
}
