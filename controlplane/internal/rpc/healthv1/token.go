package healthv1

import (
	"bytes"
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/millwright/pki"
	"github.com/gpuaas/millwright/proto/rpcerr"

	"github.com/gpuaas/millwright/controlplane/internal/store"
)

// Tokens are opaque to callers: a letter for the sort, a version, and what
// follows. Those of lists are bound to the filter that they were made for.
const (
	watchPrefix = "h1"
	gpuPrefix   = "g1"
	indexPrefix = "c1"
	filterBytes = 8
)

// watchToken is a place in the event log.
type watchToken struct {
	generation uint64
	index      uint64 // the last entry that was seen
}

func (t watchToken) format() string {
	b := binary.BigEndian.AppendUint64([]byte(watchPrefix), t.generation)
	return base64.RawURLEncoding.EncodeToString(binary.BigEndian.AppendUint64(b, t.index))
}

func parseWatchToken(s string) (watchToken, error) {
	b, err := base64.RawURLEncoding.DecodeString(s)
	if err != nil || len(b) != len(watchPrefix)+16 || !bytes.HasPrefix(b, []byte(watchPrefix)) {
		return watchToken{}, badToken("resume_token", s)
	}
	b = b[len(watchPrefix):]
	return watchToken{binary.BigEndian.Uint64(b), binary.BigEndian.Uint64(b[8:])}, nil
}

// check returns an error when a watch cannot go on from t.
func (t watchToken) check(v store.View) error {
	switch {
	case t.generation != v.Generation():
		return outOfRange("the token is from before the server's log was restored")
	case t.index > v.LastIndex():
		return outOfRange("the token is ahead of the server's log")
	}
	return nil
}

func outOfRange(why string) error {
	return rpcerr.New(codes.OutOfRange, "RESUME_TOKEN", "%s; watch again without a token, which begins with the health as it is now", why)
}

func badToken(field, value string) error {
	return rpcerr.Invalid("MALFORMED", rpcerr.Violation{Field: field, Value: clip(value), Rule: "it must be a token from an earlier answer, unchanged"})
}

func formatToken(prefix string, place []byte, filter proto.Message) string {
	return base64.RawURLEncoding.EncodeToString(append(append([]byte(prefix), filterSum(filter)...), place...))
}

// parseToken returns the place in a token; nil for an empty token.
func parseToken(prefix, s string, filter proto.Message) ([]byte, error) {
	if s == "" {
		return nil, nil
	}
	b, err := base64.RawURLEncoding.DecodeString(s)
	if err != nil || len(b) <= len(prefix)+filterBytes || !bytes.HasPrefix(b, []byte(prefix)) {
		return nil, badToken("page_token", s)
	}
	b = b[len(prefix):]
	if !bytes.Equal(b[:filterBytes], filterSum(filter)) {
		return nil, rpcerr.Invalid("MALFORMED", rpcerr.Violation{Field: "page_token", Value: clip(s),
			Rule: "it is from a list with another filter; repeat that filter, or begin anew without a token"})
	}
	return b[filterBytes:], nil
}

// formatPageToken says after which node the next page begins.
func formatPageToken(after string, filter proto.Message) string {
	return formatToken(gpuPrefix, []byte(after), filter)
}

func parsePageToken(s string, filter proto.Message) (after string, err error) {
	b, err := parseToken(gpuPrefix, s, filter)
	if err != nil || b == nil {
		return "", err
	}
	if pki.CheckName(string(b)) != nil {
		return "", badToken("page_token", s)
	}
	return string(b), nil
}

// formatIndexToken says with which log entry the next page begins.
func formatIndexToken(index uint64, filter proto.Message) string {
	return formatToken(indexPrefix, binary.BigEndian.AppendUint64(nil, index), filter)
}

func parseIndexToken(s string, filter proto.Message) (uint64, error) {
	b, err := parseToken(indexPrefix, s, filter)
	if err != nil || b == nil {
		return 0, err
	}
	if len(b) != 8 {
		return 0, badToken("page_token", s)
	}
	return binary.BigEndian.Uint64(b), nil
}

// filterSum is a short hash over a filter. It keeps apart what a caller mixes
// up; it is no protection.
func filterSum(filter proto.Message) []byte {
	b, err := proto.MarshalOptions{Deterministic: true}.Marshal(filter)
	if err != nil {
		b = nil // a text that is not UTF-8 came through no decoder
	}
	sum := sha256.Sum256(b)
	return sum[:filterBytes]
}
