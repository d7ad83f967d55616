package pki

import (
	"errors"
	"fmt"
	"net/url"
	"strings"
)

// Role is what a holder of a certificate is; it is the first segment of the
// path of its SPIFFE id.
type Role string

// The roles.
const (
	// RoleNode is a node's agent.
	RoleNode Role = "node"
	// RoleOperator is a person.
	RoleOperator Role = "operator"
	// RoleController is a program that creates tasks.
	RoleController Role = "controller"
	// RoleServer is a control plane.
	RoleServer Role = "server"
)

// Roles returns all roles.
func Roles() []Role {
	return []Role{RoleNode, RoleOperator, RoleController, RoleServer}
}

// Limits of names and ids, in bytes.
const (
	maxName        = 63
	maxTrustDomain = 255
)

// ErrID is wrapped by every error about the form of an id or of a part of it.
var ErrID = errors.New("not a Millwright SPIFFE id")

// ID is a SPIFFE id of Millwright's layout. The zero ID is nobody's. IDs are
// comparable with ==.
type ID struct {
	// TrustDomain is the SPIFFE trust domain, for example example.org.
	TrustDomain string
	// Role is what the holder is.
	Role Role
	// Name is the holder's name within its role.
	Name string
}

// NewID returns the id made of the parts, or an error that wraps [ErrID] and
// names the part that breaks a rule.
func NewID(trustDomain string, role Role, name string) (ID, error) {
	if err := CheckTrustDomain(trustDomain); err != nil {
		return ID{}, err
	}
	if err := checkRole(role); err != nil {
		return ID{}, err
	}
	if err := CheckName(name); err != nil {
		return ID{}, err
	}
	return ID{TrustDomain: trustDomain, Role: role, Name: name}, nil
}

// ParseID parses the one form that [ID.String] writes and refuses every other
// spelling, also those that a URL parser would take for the same. The error
// wraps [ErrID].
func ParseID(s string) (ID, error) {
	const scheme = "spiffe://"
	rest, ok := strings.CutPrefix(s, scheme)
	if !ok {
		return ID{}, fmt.Errorf("%w: %q does not begin with %s", ErrID, clip(s), scheme)
	}
	parts := strings.Split(rest, "/")
	if len(parts) != 3 {
		return ID{}, fmt.Errorf("%w: %q is not %s<trust-domain>/<role>/<name>", ErrID, clip(s), scheme)
	}
	return NewID(parts[0], Role(parts[1]), parts[2])
}

// String returns the id as a URI; the zero ID gives "".
func (id ID) String() string {
	if id == (ID{}) {
		return ""
	}
	return "spiffe://" + id.TrustDomain + "/" + string(id.Role) + "/" + id.Name
}

// URL returns the id as a URL, for a certificate template.
func (id ID) URL() *url.URL {
	return &url.URL{Scheme: "spiffe", Host: id.TrustDomain, Path: "/" + string(id.Role) + "/" + id.Name}
}

// CheckTrustDomain returns an error that wraps [ErrID] unless s is a SPIFFE
// trust domain: 1 to 255 bytes of lower-case letters, digits, dots, dashes and
// underscores.
func CheckTrustDomain(s string) error {
	if s == "" || len(s) > maxTrustDomain {
		return fmt.Errorf("%w: trust domain %q: it has 1 to %d bytes", ErrID, clip(s), maxTrustDomain)
	}
	for _, c := range []byte(s) {
		if !lowerOrDigit(c) && c != '.' && c != '-' && c != '_' {
			return fmt.Errorf("%w: trust domain %q: use lower-case letters, digits, '.', '-' and '_' only", ErrID, clip(s))
		}
	}
	return nil
}

// CheckName returns an error that wraps [ErrID] unless s is a name as nodes,
// operators, controllers and servers have them: 1 to 63 bytes of lower-case
// letters, digits, dashes and dots that begin and end with a letter or a digit
// and hold no two dots in a row.
func CheckName(s string) error {
	if s == "" || len(s) > maxName {
		return fmt.Errorf("%w: name %q: it has 1 to %d bytes", ErrID, clip(s), maxName)
	}
	for _, c := range []byte(s) {
		if !lowerOrDigit(c) && c != '-' && c != '.' {
			return fmt.Errorf("%w: name %q: use lower-case letters, digits, '-' and '.' only", ErrID, clip(s))
		}
	}
	if !lowerOrDigit(s[0]) || !lowerOrDigit(s[len(s)-1]) {
		return fmt.Errorf("%w: name %q: begin and end it with a letter or a digit", ErrID, clip(s))
	}
	if strings.Contains(s, "..") {
		return fmt.Errorf("%w: name %q: put no two dots in a row", ErrID, clip(s))
	}
	return nil
}

func checkRole(r Role) error {
	switch r {
	case RoleNode, RoleOperator, RoleController, RoleServer:
		return nil
	}
	return fmt.Errorf("%w: role %q: it is one of node, operator, controller and server", ErrID, clip(string(r)))
}

func lowerOrDigit(c byte) bool {
	return 'a' <= c && c <= 'z' || '0' <= c && c <= '9'
}

// clip keeps a hostile value from filling an error message or a log line.
func clip(s string) string {
	const limit = 96
	if len(s) <= limit {
		return s
	}
	return s[:limit] + "..."
}
