package storage

import (
	"fmt"
	"path"
	"strings"
	"unicode/utf8"

	"github.com/gpuaas/millwright/tasks"
	"github.com/gpuaas/millwright/tasks/step"
)

// maxUnitName bounds the name of a mount unit. A file name holds 255 bytes, and
// systemd, its drop-in directories and an atomic write add to it.
const maxUnitName = 200

// closed are directories that the system itself needs: nothing may be mounted
// on them, above them or below them.
var closed = []string{
	"/bin", "/boot", "/dev", "/etc", "/lib", "/lib32", "/lib64", "/libx32", "/proc", "/run", "/sbin", "/sys",
	"/var/lib/dbus", "/var/lib/dpkg", "/var/lib/rpm", "/var/lib/systemd", "/var/run", "/var/lock",
	"/var/lib/millwright", "/var/lib/millwright-server",
}

// shared are directories on which nothing may be mounted, but below which there
// is room.
var shared = []string{"/", "/root", "/tmp", "/usr", "/usr/local", "/var", "/var/cache", "/var/lib", "/var/log", "/var/spool", "/var/tmp"}

// secret are directories that must not be shown elsewhere.
var secret = []string{"/dev", "/proc", "/sys", "/etc/millwright", keyDir, "/run/millwright", "/var/lib/millwright", "/var/lib/millwright-server"}

// checkPath reports what is wrong with a path, whatever it is used for.
func checkPath(p *tasks.Problems, field, value string) bool {
	n := len(*p)
	switch {
	case value == "":
		p.Add(field, value, "is required: give an absolute path such as /mnt/data")
		return false
	case !strings.HasPrefix(value, "/"):
		p.Add(field, value, "must be an absolute path: begin it with /")
	case path.Clean(value) != value:
		p.Add(field, value, fmt.Sprintf("must be a clean path, without //, /./, /../ or a slash at its end: write %q", path.Clean(value)))
	}
	if c, bad := firstBad(value, "._-+@:=,~/"); bad {
		p.Add(field, value, fmt.Sprintf("may hold ASCII letters, digits and ._-+@:=,~/ only: take out %q", c))
	}
	for part := range strings.SplitSeq(value, "/") {
		if len(part) > 255 {
			p.Add(field, value, "has a part longer than 255 bytes: shorten it")
			break
		}
	}
	if len(value) > 4095 {
		p.Add(field, value[:64]+"...", "is longer than 4095 bytes: shorten it")
	}
	return len(*p) == n
}

// firstBad returns the first character that is neither an ASCII letter nor a
// digit nor in extra.
func firstBad(s, extra string) (string, bool) {
	for i := range len(s) {
		c := s[i]
		if c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || strings.IndexByte(extra, c) >= 0 {
			continue
		}
		if r, size := utf8.DecodeRuneInString(s[i:]); r != utf8.RuneError {
			return s[i : i+size], true
		}
		return s[i : i+1], true
	}
	return "", false
}

// checkTarget reports what is wrong with a mount point.
func checkTarget(p *tasks.Problems, field, value string) bool {
	if !checkPath(p, field, value) {
		return false
	}
	n := len(*p)
	if why := forbidden(value); why != "" {
		p.Add(field, value, why)
	}
	if l := len(MountUnit(value)); l > maxUnitName {
		p.Add(field, value, fmt.Sprintf("makes a unit name of %d bytes, and %d is the most: choose a shorter path", l, maxUnitName))
	}
	return len(*p) == n
}

func forbidden(target string) string {
	const wayOut = "choose a directory of its own, for example below /mnt or /srv"
	for _, dir := range closed {
		switch {
		case target == dir:
			return "is a directory that the system itself needs: " + wayOut
		case step.Within(target, dir):
			return "is below " + dir + ", which the system itself needs: " + wayOut
		}
	}
	for _, dir := range shared {
		if target == dir {
			return "is a directory that the system itself needs: " + wayOut
		}
	}
	for _, dir := range closed {
		if step.Within(dir, target) {
			return "would hide " + dir + ", which the system itself needs: " + wayOut
		}
	}
	if step.Within(target, "/usr") && !step.Within(target, "/usr/local") {
		return "is below /usr, which belongs to the packages: " + wayOut
	}
	return ""
}
