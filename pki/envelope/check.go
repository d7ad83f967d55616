package envelope

import (
	"cmp"
	"fmt"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/google/uuid"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/millwright/pki"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/proto/strict"
)

// Limits of a task set and its leaves.
const (
	// MaxSetSize is the largest number of leaves in a set.
	MaxSetSize = 1_000_000
	// MaxLife is the longest time between issued_at and not_after.
	MaxLife = 7 * 24 * time.Hour
	// MaxLeaf is the largest leaf, in bytes.
	MaxLeaf = 256 << 10
	// MaxReason is the longest reason of a leaf, in bytes.
	MaxReason = 1 << 10
	// MaxDeadline is the longest deadline of a leaf.
	MaxDeadline = 30 * 24 * time.Hour

	maxList   = 64  // labels, secret digests
	maxPath   = 64  // hashes of a proof
	maxText   = 256 // a reference, a resource or a correlation id, in bytes
	maxWord   = 63  // a kind, a label's key or value, in bytes
	saltBytes = 16
)

// Problem is one rule that a task set or leaf breaks: the field by its path,
// the value, and the rule with the way out.
type Problem struct {
	Field, Value, Rule string
}

// Malformed is every problem of a task set or leaf. It is an error that wraps
// [ErrMalformed].
type Malformed []Problem

// Error lists the problems.
func (m Malformed) Error() string {
	words := make([]string, len(m))
	for i, p := range m {
		words[i] = p.Field + ": "
		if p.Value != "" {
			words[i] += fmt.Sprintf("%q: ", p.Value)
		}
		words[i] += p.Rule
	}
	return ErrMalformed.Error() + ": " + strings.Join(words, "; ")
}

// Unwrap returns [ErrMalformed].
func (m Malformed) Unwrap() error { return ErrMalformed }

func (m *Malformed) add(ok bool, field, value, rule string) {
	if !ok {
		*m = append(*m, Problem{Field: field, Value: clip(value), Rule: rule})
	}
}

func (m Malformed) err() error {
	if len(m) == 0 {
		return nil
	}
	return m
}

// CheckTaskSet checks the form of set, not who signed it or what time it is:
// sizes, times in order and the window of at most [MaxLife]. The error is
// [Malformed] or wraps [ErrMalformed].
func CheckTaskSet(set *taskv1.TaskSet) error {
	if err := strict.Check(set); err != nil {
		return fmt.Errorf("%w: task set: %w", ErrMalformed, err)
	}
	var m Malformed
	m.add(len(set.GetCluster()) == HashSize, "cluster", "", fmt.Sprintf("it has %d bytes: want %d", len(set.GetCluster()), HashSize))
	m.add(set.GetTrustRootVersion() > 0, "trust_root_version", "0", "versions begin at 1")
	m.add(set.GetSize() >= 1 && set.GetSize() <= MaxSetSize, "size", fmt.Sprint(set.GetSize()), fmt.Sprintf("a set has 1 to %d leaves", MaxSetSize))
	m.add(len(set.GetRoot()) == HashSize, "root", "", fmt.Sprintf("it has %d bytes: want %d", len(set.GetRoot()), HashSize))
	issued, ok1 := m.time("issued_at", set.GetIssuedAt())
	from, ok2 := m.time("not_before", set.GetNotBefore())
	until, ok3 := m.time("not_after", set.GetNotAfter())
	if ok1 && ok2 && ok3 {
		text := until.Format(time.RFC3339Nano)
		m.add(until.After(from), "not_after", text, "it must be later than not_before")
		m.add(until.After(issued), "not_after", text, "it must be later than issued_at")
		m.add(!until.After(issued.Add(MaxLife)), "not_after", text, fmt.Sprintf("it may be at most %s later than issued_at", MaxLife))
	}
	return m.err()
}

func (m *Malformed) time(field string, t *timestamppb.Timestamp) (time.Time, bool) {
	ok := t != nil && t.IsValid()
	m.add(ok, field, "", "it must be set to a valid time")
	return t.AsTime(), ok
}

// CheckLeaf checks the form of leaf: everything but the kind's own rules about
// the spec, which it does not decode. The error is [Malformed], which names all
// problems, or wraps [ErrMalformed].
func CheckLeaf(leaf *taskv1.TaskLeaf) error {
	if err := strict.Check(leaf); err != nil {
		return fmt.Errorf("%w: leaf: %w", ErrMalformed, err)
	}
	var m Malformed
	m.add(isTaskID(leaf.GetTaskId()), "task_id", leaf.GetTaskId(), "it must be a UUID of version 7 in lower-case canonical form")
	err := pki.CheckName(leaf.GetNode())
	m.add(err == nil, "node", leaf.GetNode(), "it must be a node's name: 1 to 63 lower-case letters, digits, '-' and '.'")
	m.add(leaf.GetMode() != taskv1.Mode_MODE_UNSPECIFIED, "mode", "", "it must be MODE_EXECUTE or MODE_PLAN")
	m.add(isKind(leaf.GetKind()), "kind", leaf.GetKind(), "it must be <domain>.<verb> of lower-case letters, digits and '_'")
	m.add(leaf.GetRevision() > 0, "revision", "0", "revisions begin at 1")
	m.impacts(leaf.GetAllowedImpact())
	if d := leaf.GetDeadline(); d != nil {
		ok := d.IsValid() && d.AsDuration() > 0 && d.AsDuration() <= MaxDeadline
		m.add(ok, "deadline", d.AsDuration().String(), fmt.Sprintf("it must be longer than 0 and at most %s", MaxDeadline))
	}
	if n := len(leaf.GetPlanDigest()); n > 0 {
		m.add(n == HashSize, "plan_digest", "", fmt.Sprintf("it has %d bytes: want %d", n, HashSize))
		m.add(leaf.GetMode() == taskv1.Mode_MODE_EXECUTE, "plan_digest", "", "only MODE_EXECUTE can approve a plan")
	}
	if r := leaf.GetRetryOf(); r != "" {
		m.add(isTaskID(r) && r != leaf.GetTaskId(), "retry_of", r, "it must be the id of another task")
	}
	if p := leaf.GetProject(); p != "" {
		m.add(pki.CheckName(p) == nil, "project", p, "it must be 1 to 63 lower-case letters, digits, '-' and '.'")
	}
	m.labels(leaf.GetLabels())
	m.cause(leaf.GetCause())
	m.secrets(leaf.GetSecretDigests())
	m.add(len(leaf.GetReason()) <= MaxReason && utf8.ValidString(leaf.GetReason()), "reason", "", fmt.Sprintf("it must be at most %d bytes of UTF-8", MaxReason))
	return m.err()
}

func (m *Malformed) impacts(list []taskv1.Impact) {
	for i, v := range list {
		field := fmt.Sprintf("allowed_impact[%d]", i)
		m.add(v != taskv1.Impact_IMPACT_UNSPECIFIED, field, "", "it must name an impact")
		m.add(i == 0 || list[i-1] < v, field, v.String(), "sort the list by number and name each impact once")
	}
}

func (m *Malformed) labels(list []*taskv1.Label) {
	m.add(len(list) <= maxList, "labels", fmt.Sprint(len(list)), fmt.Sprintf("at most %d are allowed", maxList))
	for i, l := range list {
		field := fmt.Sprintf("labels[%d]", i)
		m.add(isLabelKey(l.GetKey()), field+".key", l.GetKey(), "it must be 1 to 63 lower-case letters, digits and -._/")
		m.add(len(l.GetValue()) <= maxWord && isPrintable(l.GetValue()), field+".value", l.GetValue(), "it must be at most 63 bytes of printable text")
		m.add(i == 0 || cmp.Less(list[i-1].GetKey(), l.GetKey()), field+".key", l.GetKey(), "sort the labels by key and give each key once")
	}
}

func (m *Malformed) cause(c *taskv1.Cause) {
	if c == nil {
		return
	}
	m.add(c.GetResource() != "" && len(c.GetResource()) <= maxText && isPrintable(c.GetResource()), "cause.resource", c.GetResource(), fmt.Sprintf("it must be 1 to %d bytes of printable text", maxText))
	m.add(len(c.GetCorrelationId()) <= maxText && isPrintable(c.GetCorrelationId()), "cause.correlation_id", c.GetCorrelationId(), fmt.Sprintf("it must be at most %d bytes of printable text", maxText))
	m.add(c.GetGeneration() >= 0, "cause.generation", fmt.Sprint(c.GetGeneration()), "it must not be negative")
	m.add(c.GetEpoch() >= 0, "cause.epoch", fmt.Sprint(c.GetEpoch()), "it must not be negative")
}

func (m *Malformed) secrets(list []*taskv1.SecretDigest) {
	m.add(len(list) <= maxList, "secret_digests", fmt.Sprint(len(list)), fmt.Sprintf("at most %d are allowed", maxList))
	for i, d := range list {
		field := fmt.Sprintf("secret_digests[%d]", i)
		m.add(d.GetReference() != "" && len(d.GetReference()) <= maxText && isPrintable(d.GetReference()), field+".reference", d.GetReference(), fmt.Sprintf("it must be 1 to %d bytes of printable text", maxText))
		m.add(len(d.GetSalt()) == saltBytes, field+".salt", "", fmt.Sprintf("it has %d bytes: want %d", len(d.GetSalt()), saltBytes))
		m.add(len(d.GetSha256()) == HashSize, field+".sha256", "", fmt.Sprintf("it has %d bytes: want %d", len(d.GetSha256()), HashSize))
		m.add(i == 0 || cmp.Less(list[i-1].GetReference(), d.GetReference()), field+".reference", d.GetReference(), "sort the digests by reference and give each once")
	}
}

// checkSignedLeaf checks the wrapper of a leaf, before anything is hashed.
func checkSignedLeaf(signed *taskv1.SignedLeaf) error {
	switch {
	case signed == nil:
		return fmt.Errorf("%w: leaf is missing", ErrMalformed)
	case signed.GetProof() == nil:
		return fmt.Errorf("%w: proof is missing", ErrMalformed)
	}
	if err := strict.Check(signed); err != nil {
		return fmt.Errorf("%w: signed leaf: %w", ErrMalformed, err)
	}
	if n := len(signed.GetLeaf()); n == 0 || n > MaxLeaf {
		return fmt.Errorf("%w: leaf has %d bytes: 1 to %d are allowed", ErrMalformed, n, MaxLeaf)
	}
	if n := len(signed.GetProof().GetHashes()); n > maxPath {
		return fmt.Errorf("%w: proof has %d hashes: at most %d are allowed", ErrMalformed, n, maxPath)
	}
	return nil
}

func isTaskID(s string) bool {
	id, err := uuid.Parse(s)
	return err == nil && id.Version() == 7 && id.Variant() == uuid.RFC4122 && id.String() == s
}

func isKind(s string) bool {
	domain, verb, ok := strings.Cut(s, ".")
	return ok && len(s) <= maxWord && isWord(domain) && isWord(verb)
}

func isWord(s string) bool {
	if s == "" || s[0] < 'a' || s[0] > 'z' {
		return false
	}
	return strings.Trim(s, "abcdefghijklmnopqrstuvwxyz0123456789_") == ""
}

func isLabelKey(s string) bool {
	return s != "" && len(s) <= maxWord && strings.Trim(s, "abcdefghijklmnopqrstuvwxyz0123456789-._/") == ""
}

func isPrintable(s string) bool {
	return utf8.ValidString(s) && strings.IndexFunc(s, func(r rune) bool { return !unicode.IsPrint(r) }) < 0
}

func clip(s string) string {
	const limit = 96
	if len(s) <= limit {
		return s
	}
	return strings.ToValidUTF8(s[:limit], "") + "..."
}
