package secret

import (
	"fmt"
	"path"
	"regexp"
	"strings"

	"github.com/gpuaas/millwright/tasks"
	"github.com/gpuaas/millwright/tasks/step"
)

// closed are directories and files in which no secret belongs: the kernel's,
// programs, Millwright's own, and what says who may do what on the node or is run
// as root there: a secret's value is no way to bring that, and secret.remove none
// to take it away.
var closed = []string{
	"/etc/passwd", "/etc/shadow", "/etc/group", "/etc/gshadow", "/etc/sudoers", "/etc/sudoers.d", "/etc/pam.d", "/etc/security",
	"/etc/crontab", "/etc/cron.d", "/etc/cron.hourly", "/etc/cron.daily", "/etc/cron.weekly", "/etc/cron.monthly", "/var/spool/cron",
	"/etc/profile.d", "/etc/init.d", "/etc/udev", "/etc/ld.so.preload", "/etc/ld.so.conf.d", "/etc/modprobe.d", "/etc/apt", "/etc/yum.repos.d", "/etc/dnf",
	"/bin", "/boot", "/dev", "/lib", "/lib32", "/lib64", "/libx32", "/proc", "/sbin", "/sys", "/usr",
	"/etc/millwright", "/etc/millwright-keys", "/etc/systemd", "/run", "/var/run", "/var/lib/dpkg", "/var/lib/rpm", "/var/lib/systemd",
	"/var/lib/millwright", "/var/lib/millwright-server", "/tmp", "/var/tmp",
}

var pathForm = regexp.MustCompile(`^/[A-Za-z0-9._\-+@:=,~/]+$`)

func checkPath(p *tasks.Problems, field, value string) {
	switch {
	case value == "":
		p.Add(field, value, "is required: give the absolute path of a file, such as /etc/munge/munge.key")
		return
	case !pathForm.MatchString(value), len(value) > 1024:
		p.Add(field, value, "must be an absolute path of ASCII letters, digits and ._-+@:=,~/ , at most 1024 bytes")
		return
	case path.Clean(value) != value:
		p.Add(field, value, fmt.Sprintf("must be a clean path, without //, /./, /../ or a slash at its end: write %q", path.Clean(value)))
		return
	}
	for part := range strings.SplitSeq(value, "/") {
		if len(part) > 200 {
			p.Add(field, value, "has a part longer than 200 bytes: shorten it")
		}
	}
	for _, dir := range closed {
		if step.Within(value, dir) {
			p.Add(field, value, "is in "+dir+", where no secret is kept: choose another directory, such as one of its own below /etc")
			return
		}
	}
}

var nameForm = regexp.MustCompile(`^[a-z_][a-z0-9_-]{0,31}$`)

func checkName(p *tasks.Problems, field, value string) {
	if value != "" && !nameForm.MatchString(value) {
		p.Add(field, value, "must be a name of lower-case letters, digits, _ and -, at most 32 bytes, and no number")
	}
}
