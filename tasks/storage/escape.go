package storage

import (
	"fmt"
	"path"
	"strings"
)

// MountUnit returns the name of the mount unit that systemd ties to a mount
// point, as systemd-escape --path --suffix=mount prints it.
func MountUnit(target string) string { return escapePath(target) + ".mount" }

func escapePath(p string) string {
	p = strings.Trim(path.Clean(p), "/")
	if p == "" {
		return "-"
	}
	var b strings.Builder
	for i := range len(p) {
		switch c := p[i]; {
		case c == '/':
			b.WriteByte('-')
		case c == '.' && i == 0, !plain(c):
			fmt.Fprintf(&b, `\x%02x`, c)
		default:
			b.WriteByte(c)
		}
	}
	return b.String()
}

// plain reports whether systemd leaves a byte of a unit name as it is.
func plain(c byte) bool {
	return c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || c == ':' || c == '_' || c == '.'
}
