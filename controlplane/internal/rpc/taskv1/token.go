package taskv1

import (
	"bytes"
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"

	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/millwright/proto/rpcerr"

	"github.com/gpuaas/millwright/controlplane/internal/store"
)

// Tokens are opaque to callers: a letter for the sort, a version, and numbers.
const (
	pagePrefix  = "p1"
	watchPrefix = "w1"
	filterBytes = 8
)

// watchToken is a place in the event log.
type watchToken struct {
	generation uint64
	index      uint64 // the last entry that was seen
}

func (t watchToken) format() string {
	b := []byte(watchPrefix)
	b = binary.BigEndian.AppendUint64(b, t.generation)
	b = binary.BigEndian.AppendUint64(b, t.index)
	return base64.RawURLEncoding.EncodeToString(b)
}

func parseWatchToken(s string) (watchToken, error) {
	b, err := base64.RawURLEncoding.DecodeString(s)
	if err != nil || len(b) != len(watchPrefix)+16 || !bytes.HasPrefix(b, []byte(watchPrefix)) {
		return watchToken{}, rpcerr.Invalid("MALFORMED", rpcerr.Violation{Field: "resume_token", Value: clip(s),
			Rule: "it must be a token from an earlier answer, unchanged"})
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

// pageToken is where the next page of a list begins.
type pageToken struct {
	before uint64 // or from, where the oldest come first
	watch  watchToken
}

// format binds the token to the filter that it was made for.
func (t pageToken) format(filter proto.Message) string {
	b := append([]byte(pagePrefix), filterSum(filter)...)
	b = binary.BigEndian.AppendUint64(b, t.before)
	b = binary.BigEndian.AppendUint64(b, t.watch.generation)
	b = binary.BigEndian.AppendUint64(b, t.watch.index)
	return base64.RawURLEncoding.EncodeToString(b)
}

// parsePageToken returns the zero token for an empty string.
func parsePageToken(s string, filter proto.Message) (pageToken, error) {
	if s == "" {
		return pageToken{}, nil
	}
	b, err := base64.RawURLEncoding.DecodeString(s)
	if err != nil || len(b) != len(pagePrefix)+filterBytes+24 || !bytes.HasPrefix(b, []byte(pagePrefix)) {
		return pageToken{}, badPageToken(s, "it must be a token from an earlier answer, unchanged")
	}
	b = b[len(pagePrefix):]
	if !bytes.Equal(b[:filterBytes], filterSum(filter)) {
		return pageToken{}, badPageToken(s, "it is from a list with another filter; repeat that filter, or begin anew without a token")
	}
	b = b[filterBytes:]
	return pageToken{
		before: binary.BigEndian.Uint64(b),
		watch:  watchToken{binary.BigEndian.Uint64(b[8:]), binary.BigEndian.Uint64(b[16:])},
	}, nil
}

func badPageToken(s, rule string) error {
	return rpcerr.Invalid("MALFORMED", rpcerr.Violation{Field: "page_token", Value: clip(s), Rule: rule})
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
