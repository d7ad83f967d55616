// Package packages reads and changes the packages of a node, through dpkg and
// apt or through rpm and dnf, whichever the node has. What changes them runs in
// a unit of its own, so that it outlives the agent and is found again; there is
// one at a time. Everything else only reads, in child processes with a deadline.
package packages

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"regexp"
	"slices"
	"strings"
	"time"

	sd "github.com/coreos/go-systemd/v22/dbus"

	"github.com/gpuaas/millwright/agent/internal/child"
	"github.com/gpuaas/millwright/agent/internal/clock"
	"github.com/gpuaas/millwright/tasks/host"
)

// Units runs the unit in which packages are changed.
type Units interface {
	Unit(ctx context.Context, name string) (host.UnitStatus, error)
	ResetFailed(ctx context.Context, name string)
	RunTransient(ctx context.Context, name string, properties []sd.Property) error
}

// Config is what a [Native] needs.
type Config struct {
	// Dir is the directory for the record of what was brought, and for copies of
	// package files. It is made when it is first needed.
	Dir string
	// Children run what reads.
	Children *child.Runner
	// Units run what changes.
	Units Units
	// Clock measures waits.
	Clock clock.Clock
	// Logger is told of repairs.
	Logger *slog.Logger
	// LockWait is how long other programs may hold the package database; unset:
	// 2 minutes.
	LockWait time.Duration
	// Database is dpkg's directory; unset: /var/lib/dpkg.
	Database string
	// Bin is where rpm and dnf are; unset: /usr/bin.
	Bin string
	// Plugins is the directory with the configuration of dnf's plugins; unset:
	// /etc/dnf/plugins.
	Plugins string
}

// apt are the packages of a node with dpkg.
type apt struct{ *machine }

// readTime bounds one program that reads.
const readTime = time.Minute

// read runs a program that only reads.
func (a *apt) read(ctx context.Context, argv ...string) (child.Result, error) {
	if _, err := os.Stat(a.cfg.Database); errors.Is(err, fs.ErrNotExist) {
		return child.Result{}, fmt.Errorf("%s: %w", argv[0], host.ErrNoPackageManager)
	}
	res, err := a.cfg.Children.Run(ctx, child.Spec{Argv: argv, Timeout: readTime, MaxOutput: 4 << 20})
	if errors.Is(err, fs.ErrNotExist) {
		err = fmt.Errorf("%w: %w", host.ErrNoPackageManager, err)
	}
	return res, err
}

var (
	validName    = regexp.MustCompile(`^[a-z0-9][a-z0-9+.-]*[a-z0-9+]$`)
	validVersion = regexp.MustCompile(`^[0-9][A-Za-z0-9.+~:-]*$`)
)

// check refuses what apt could take for something else than a package.
func check(name, version string) error {
	if !validName.MatchString(name) {
		return fmt.Errorf("package %q: not a name of a package: %w", name, fs.ErrInvalid)
	}
	if version != "" && !validVersion.MatchString(version) {
		return fmt.Errorf("package %s: version %q: not a version: %w", name, version, fs.ErrInvalid)
	}
	return nil
}

func checkAll(names []string) error {
	for _, n := range names {
		if err := check(n, ""); err != nil {
			return err
		}
	}
	return nil
}

// PackageManager implements host.PackageReader.
func (a *apt) PackageManager(context.Context) (host.PackageManager, error) {
	return host.PackageManager{Name: host.Apt}, nil
}

// Packages implements host.PackageReader.
func (a *apt) Packages(ctx context.Context, names []string) ([]host.PackageStatus, error) {
	if len(names) == 0 {
		return nil, nil
	}
	if err := checkAll(names); err != nil {
		return nil, err
	}
	argv := []string{"/usr/bin/dpkg-query", "--show",
		"--showformat=${Package}\\t${Version}\\t${Architecture}\\t${db:Status-Want}\\t${db:Status-Status}\\n", "--"}
	res, err := a.read(ctx, append(argv, names...)...)
	if err != nil {
		return nil, fmt.Errorf("read packages: %w", err)
	}
	// It exits with 1 when it does not know one of them.
	if res.ExitCode > 1 {
		return nil, fmt.Errorf("read packages: dpkg-query exited with code %d: %s", res.ExitCode, oneLine(res.Stderr))
	}
	found, err := parseStatus(string(res.Stdout))
	if err != nil {
		return nil, err
	}
	brought, err := a.brought()
	if err != nil {
		return nil, err
	}
	out := make([]host.PackageStatus, 0, len(names))
	for _, n := range names {
		st := found[n]
		st.Name = n
		st.Ours = st.State == installed && brought[n] == st.Version
		out = append(out, st)
	}
	return out, nil
}

const installed = "installed"

// parseStatus reads lines of name, version, architecture, what is wanted and
// what there is, with tabs between. Of a package that is there for two
// architectures the one that is installed counts.
func parseStatus(text string) (map[string]host.PackageStatus, error) {
	found := map[string]host.PackageStatus{}
	for line := range strings.Lines(text) {
		f := strings.Split(strings.TrimSuffix(line, "\n"), "\t")
		if len(f) != 5 {
			return nil, fmt.Errorf("read packages: dpkg-query said %q", line)
		}
		if f[4] == "not-installed" || found[f[0]].State == installed {
			continue
		}
		found[f[0]] = host.PackageStatus{
			Package: host.Package{Name: f[0], Version: f[1], Architecture: f[2]}, State: f[4], Held: f[3] == "hold",
		}
	}
	return found, nil
}

// PackageVersions implements host.PackageReader.
func (a *apt) PackageVersions(ctx context.Context, name string) ([]string, error) {
	if err := check(name, ""); err != nil {
		return nil, err
	}
	res, err := a.read(ctx, "/usr/bin/apt-cache", noCache, "madison", name)
	if err != nil {
		return nil, fmt.Errorf("look for package %s: %w", name, err)
	}
	if res.ExitCode != 0 {
		return nil, fmt.Errorf("look for package %s: apt-cache exited with code %d: %s", name, res.ExitCode, oneLine(res.Stderr))
	}
	return parseMadison(string(res.Stdout), name), nil
}

// noCache keeps apt from writing its cache while something only reads.
const noCache = "-oDir::Cache::pkgcache="

// parseMadison reads lines of name, version and source, newest first.
func parseMadison(text, name string) []string {
	var out []string
	for line := range strings.Lines(text) {
		f := strings.Split(line, "|")
		if len(f) != 3 || strings.TrimSpace(f[0]) != name || !strings.HasSuffix(strings.TrimSpace(f[2]), "Packages") {
			continue
		}
		if v := strings.TrimSpace(f[1]); !slices.Contains(out, v) {
			out = append(out, v)
		}
	}
	return out
}

// oneLine makes what a program wrote fit into an error.
func oneLine(b []byte) string {
	const limit = 1500
	s := strings.Join(strings.Fields(strings.ToValidUTF8(string(b), "?")), " ")
	return s[:min(len(s), limit)]
}
