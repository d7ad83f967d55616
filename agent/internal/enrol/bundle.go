package enrol

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"time"

	"google.golang.org/protobuf/encoding/protojson"

	"github.com/gpuaas/millwright/pki"
	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
)

const (
	bundleVersion = 1
	maxBundle     = 64 << 10
	maxToken      = 128
)

// ErrBundle is wrapped by every error about a join bundle that cannot be used.
var ErrBundle = errors.New("join bundle cannot be used")

// Bundle is a join bundle whose fields were checked.
type Bundle struct {
	// Server is the server's address, as host:port.
	Server string
	// ID is the SPIFFE id that the node will have.
	ID pki.ID
	// CASHA256 is the hash over the DER of the server's CA certificate.
	CASHA256 [sha256.Size]byte
	// Cluster is the cluster's id: the hash over the genesis of its trust root.
	Cluster [sha256.Size]byte
	// TrustRoot is the hash over the newest trust root that the operator knew.
	TrustRoot [sha256.Size]byte
	// Floor is the time up to which nothing that was issued is carried out.
	Floor time.Time
	// Exposed says that others than the file's owner can read it.
	Exposed bool

	token string
}

// ReadBundle reads the bundle at path. The error wraps [ErrBundle] or is that
// of opening the file, and never holds the token.
func ReadBundle(path string) (*Bundle, error) {
	// The open of a pipe would wait for a writer.
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, fmt.Errorf("read join bundle: %w", err)
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return nil, fmt.Errorf("read join bundle: %w", err)
	}
	if !st.Mode().IsRegular() {
		return nil, fmt.Errorf("%w: %s is not a regular file; put there what millctl node token create wrote", ErrBundle, path)
	}
	data, err := io.ReadAll(io.LimitReader(f, maxBundle+1))
	if err != nil {
		return nil, fmt.Errorf("read join bundle: %w", err)
	}
	b, err := ParseBundle(data)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	b.Exposed = st.Mode().Perm()&0o077 != 0
	return b, nil
}

// ParseBundle parses a bundle in its JSON form. An unknown field is an error.
// The error wraps [ErrBundle], and never holds the token.
func ParseBundle(data []byte) (*Bundle, error) {
	if len(data) > maxBundle {
		return nil, fmt.Errorf("%w: it has more than %d bytes", ErrBundle, maxBundle)
	}
	m := new(agentv1.JoinBundle)
	if err := protojson.Unmarshal(data, m); err != nil {
		return nil, fmt.Errorf("%w: %s; make a new one with: millctl node token create NODE --out join.json", ErrBundle, decodeProblem(err))
	}
	b := &Bundle{Server: m.GetServer(), token: m.GetToken()}
	if m.GetVersion() != bundleVersion {
		return nil, fmt.Errorf("%w: version %d: this agent reads version %d", ErrBundle, m.GetVersion(), bundleVersion)
	}
	if err := checkAddress(m.GetServer()); err != nil {
		return nil, fmt.Errorf("%w: server %q: %w", ErrBundle, m.GetServer(), err)
	}
	var err error
	if b.ID, err = pki.NewID(m.GetTrustDomain(), pki.RoleNode, m.GetNode()); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrBundle, err)
	}
	hashes := []struct {
		field, value string
		to           *[sha256.Size]byte
	}{
		{"ca_sha256", m.GetCaSha256(), &b.CASHA256},
		{"cluster", m.GetCluster(), &b.Cluster},
		{"trust_root", m.GetTrustRoot(), &b.TrustRoot},
	}
	for _, h := range hashes {
		raw, err := hex.DecodeString(h.value)
		if err != nil || len(raw) != sha256.Size {
			return nil, fmt.Errorf("%w: %s %q: it must be %d hexadecimal digits", ErrBundle, h.field, h.value, 2*sha256.Size)
		}
		copy(h.to[:], raw)
	}
	switch {
	case m.GetFloor() == nil || !m.GetFloor().IsValid():
		return nil, fmt.Errorf("%w: floor must be set to a valid time", ErrBundle)
	case m.GetExpires() == nil || !m.GetExpires().IsValid():
		return nil, fmt.Errorf("%w: expires must be set to a valid time", ErrBundle)
	case b.token == "" || len(b.token) > maxToken:
		return nil, fmt.Errorf("%w: token has %d bytes: 1 to %d are allowed", ErrBundle, len(b.token), maxToken)
	}
	b.Floor = m.GetFloor().AsTime()
	return b, nil
}

// decodeProblem says where a bundle cannot be read. Only of an unknown field is
// the decoder's own text kept: in others it quotes the bundle, which holds the
// token.
func decodeProblem(err error) string {
	if strings.Contains(err.Error(), "unknown field") {
		return err.Error()
	}
	where := regexp.MustCompile(`line \d+:\d+`).FindString(err.Error())
	return strings.TrimSpace("it is not the JSON of a join bundle " + where)
}

func (b *Bundle) tokenSHA256() string {
	sum := sha256.Sum256([]byte(b.token))
	return hex.EncodeToString(sum[:])
}

func checkAddress(s string) error {
	host, port, err := net.SplitHostPort(s)
	if err != nil {
		return errors.New("it must be host:port")
	}
	if n, err := strconv.ParseUint(port, 10, 16); err != nil || n == 0 || host == "" {
		return errors.New("it must be host:port with a port from 1 to 65535")
	}
	return nil
}
