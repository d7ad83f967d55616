// Package fakenvml is a stand-in for the NVIDIA driver's management library: a
// real libnvidia-ml.so.1, written for this repository, that a program loads as
// it loads the driver's, over a node whose GPUs lie in a file.
package fakenvml

import (
	"context"
	"crypto/sha256"
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
)

//go:embed lib/*.c lib/*.h symbols/*.txt
var sources embed.FS

// Variant says what a library lacks, as one of an older driver does.
type Variant struct {
	Header  string   // leave out what this release of go-nvml's header does not declare, as "v0.12.4-1"
	Without []string // leave out these functions
}

// Library is a built stand-in.
type Library struct {
	// Dir holds libnvidia-ml.so.1, and beside it fakenvml-state and nvidia-smi.
	Dir string
}

// Build compiles the stand-in with gcc against the header that go-nvml's module
// carries, or finds it as an earlier call, of any process, has left it.
func Build(ctx context.Context, v Variant) (*Library, error) {
	header, err := headerDir(ctx)
	if err != nil {
		return nil, err
	}
	script, err := v.script()
	if err != nil {
		return nil, err
	}
	sum, err := fingerprint(header, script)
	if err != nil {
		return nil, err
	}
	cache, err := os.UserCacheDir()
	if err != nil {
		cache = os.TempDir()
	}
	root := filepath.Join(cache, "millwright-fakenvml")
	lib := &Library{Dir: filepath.Join(root, sum)}
	if _, err := os.Stat(lib.Dir); err == nil {
		return lib, nil
	}
	if err := os.MkdirAll(root, 0o755); err != nil {
		return nil, err
	}
	tmp, err := os.MkdirTemp(root, "building-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(tmp) //nolint:errcheck // what stays is in the cache, under a name that no one asks for
	if err := compile(ctx, tmp, header, script); err != nil {
		return nil, err
	}
	if err := os.Rename(filepath.Join(tmp, "out"), lib.Dir); err != nil && !errors.Is(err, fs.ErrExist) {
		return nil, fmt.Errorf("keep the built library: %w", err)
	}
	return lib, nil
}

// headerDir is where the module cache has go-nvml's nvml.h.
func headerDir(ctx context.Context) (string, error) {
	out, err := exec.CommandContext(ctx, "go", "list", "-m", "-f", "{{.Dir}}", "github.com/NVIDIA/go-nvml").Output()
	if err != nil {
		return "", fmt.Errorf("find the header of go-nvml: %w", err)
	}
	return filepath.Join(strings.TrimSpace(string(out)), "pkg", "nvml"), nil
}

// Symbols lists the functions that a release of go-nvml's header declares.
func Symbols(header string) ([]string, error) {
	b, err := sources.ReadFile("symbols/" + header + ".txt")
	if err != nil {
		return nil, fmt.Errorf("symbols of header %q: %w", header, err)
	}
	return strings.Fields(string(b)), nil
}

// script is the linker's: it exports NVML's functions and nothing else. A name
// that is listed as local wins over the pattern.
func (v Variant) script() (string, error) {
	hidden := slices.Clone(v.Without)
	if v.Header != "" {
		declared, err := Symbols(v.Header)
		if err != nil {
			return "", err
		}
		for _, name := range defined() {
			if !slices.Contains(declared, name) {
				hidden = append(hidden, name)
			}
		}
	}
	slices.Sort(hidden)
	var b strings.Builder
	b.WriteString("{ global: nvml*; local:")
	for _, name := range slices.Compact(hidden) {
		b.WriteString(" " + name + ";")
	}
	b.WriteString(" *; };\n")
	return b.String(), nil
}

// defined are the functions that any header declares; the linker does not mind
// names that the stand-in does not define.
func defined() []string {
	var all []string
	for _, v := range Headers() {
		names, err := Symbols(v)
		if err == nil {
			all = append(all, names...)
		}
	}
	slices.Sort(all)
	return slices.Compact(all)
}

// Headers lists the releases of go-nvml whose symbols are known, oldest first.
func Headers() []string {
	return []string{"v0.12.4-1", "v0.12.9-0", "v0.13.0-1", "v0.13.4-1"}
}

func fingerprint(header, script string) (string, error) {
	h := sha256.New()
	for _, name := range sourceNames() {
		b, err := sources.ReadFile(name)
		if err != nil {
			return "", err
		}
		fmt.Fprintf(h, "%s %d\n%s", name, len(b), b)
	}
	b, err := os.ReadFile(filepath.Join(header, "nvml.h"))
	if err != nil {
		return "", err
	}
	fmt.Fprintf(h, "%s%s", b, script)
	return fmt.Sprintf("%x", h.Sum(nil)[:12]), nil
}

func sourceNames() []string {
	entries, _ := sources.ReadDir("lib") // embedded: it is there
	var names []string
	for _, e := range entries {
		names = append(names, "lib/"+e.Name())
	}
	return names
}

// programs have a main of their own; all the rest is the library.
func programs() map[string]string {
	return map[string]string{"ctl.c": "fakenvml-state", "smi.c": "nvidia-smi"}
}

func compile(ctx context.Context, tmp, header, script string) error {
	var common, mains []string
	for _, name := range sourceNames() {
		b, err := sources.ReadFile(name)
		if err != nil {
			return err
		}
		base := filepath.Base(name)
		if err := os.WriteFile(filepath.Join(tmp, base), b, 0o644); err != nil {
			return err
		}
		switch _, isMain := programs()[base]; {
		case isMain:
			mains = append(mains, base)
		case strings.HasSuffix(base, ".c"):
			common = append(common, base)
		}
	}
	if err := os.WriteFile(filepath.Join(tmp, "exports"), []byte(script), 0o644); err != nil {
		return err
	}
	if err := os.Mkdir(filepath.Join(tmp, "out"), 0o755); err != nil {
		return err
	}
	flags := []string{"-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror", "-Wno-deprecated-declarations", "-isystem", header, "-fPIC", "-pthread"}
	if err := gcc(ctx, tmp, slices.Concat(flags, []string{"-c"}, common)); err != nil {
		return err
	}
	var objects []string
	for _, c := range common {
		objects = append(objects, strings.TrimSuffix(c, ".c")+".o")
	}
	link := []string{"-shared", "-pthread", "-Wl,-soname,libnvidia-ml.so.1", "-Wl,--version-script=exports", "-o", "out/libnvidia-ml.so.1"}
	if err := gcc(ctx, tmp, slices.Concat(link, objects)); err != nil {
		return err
	}
	for _, m := range mains {
		if err := gcc(ctx, tmp, slices.Concat(flags, []string{m}, objects, []string{"-o", "out/" + programs()[m]})); err != nil {
			return err
		}
	}
	return nil
}

func gcc(ctx context.Context, dir string, args []string) error {
	cmd := exec.CommandContext(ctx, "gcc", args...)
	cmd.Dir = dir
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("compile the stand-in: %w\n%s", err, out)
	}
	return nil
}
