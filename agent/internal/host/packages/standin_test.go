package packages

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
)

// The test binary stands in for rpm, dnf and dnf's Python: each of them is a file
// whose first line names it. It keeps a database in the directory that the line
// names, and takes no other options than those that it knows.
func TestMain(m *testing.M) {
	args := strings.Fields(strings.Join(os.Args[1:min(len(os.Args), 3)], " "))
	if len(args) < 2 || args[0] != "standin" {
		os.Exit(m.Run())
	}
	// The kernel gives the interpreter all of its line as one word.
	rest := os.Args[2:]
	if os.Args[1] == "standin" {
		rest = os.Args[3:]
	}
	os.Exit(standIn{dir: args[1]}.main(rest))
}

// fake is a package of the stand-in.
type fake struct {
	Name, Version, Arch string
	Needs, Drives       []string
}

// fakes is its database.
type fakes struct {
	Offered   []fake
	Installed []fake
}

type standIn struct{ dir string }

// plant makes the stand-ins in a directory.
func plant(dir string, f fakes) error {
	exe, err := os.Executable()
	if err != nil {
		return err
	}
	for _, name := range []string{"rpm", "dnf"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte("#!"+exe+" standin "+dir+"\n"), 0o755); err != nil {
			return err
		}
	}
	if err := os.Symlink("/bin/rm", filepath.Join(dir, "rm")); err != nil {
		return err
	}
	return standIn{dir}.save(f)
}

func (s standIn) save(f fakes) error {
	b, err := json.Marshal(f)
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(s.dir, "db.json"), b, 0o600)
}

func (s standIn) load() fakes {
	var f fakes
	b, err := os.ReadFile(filepath.Join(s.dir, "db.json"))
	if err == nil {
		err = json.Unmarshal(b, &f)
	}
	if err != nil {
		panic(err)
	}
	return f
}

// do is what a test has told it: fail, die, lie.
func (s standIn) do() string {
	b, _ := os.ReadFile(filepath.Join(s.dir, "do")) // mostly there is none
	return strings.TrimSpace(string(b))
}

func (s standIn) main(args []string) int {
	switch {
	case len(args) == 3 && args[0] == "-c" && args[1] == solver:
		return s.solve(args[2])
	case len(args) > 0 && filepath.Base(args[0]) == "rpm":
		return s.rpm(args[1:])
	case len(args) > 0 && filepath.Base(args[0]) == "dnf":
		return s.dnf(args[1:])
	}
	fmt.Fprintf(os.Stderr, "not for a stand-in: %q\n", args)
	return 64
}

// cut takes the options off the front of args.
func cut(args []string, options ...string) ([]string, bool) {
	if len(args) < len(options) || !slices.Equal(args[:len(options)], options) {
		return nil, false
	}
	return args[len(options):], true
}

func (s standIn) rpm(args []string) int {
	if _, ok := cut(args, "--eval", "%{_dbpath}"); ok {
		fmt.Println(s.dir)
		return 0
	}
	if files, ok := cut(args, "--query", "--nosignature", "--queryformat", rpmFormat, "--package", "--"); ok {
		f, err := readFake(files[0])
		if err != nil {
			fmt.Fprintln(os.Stderr, "error: not an rpm package")
			return 1
		}
		fmt.Printf("%s\t%s\t%s\n", f.Name, f.Version, f.Arch)
		return 0
	}
	if names, ok := cut(args, "--query", "--configfiles", "--"); ok {
		for _, n := range names {
			fmt.Println(filepath.Join(s.dir, n+".conf"))
		}
		return 0
	}
	names, ok := cut(args, "--query", "--queryformat", rpmFormat, "--")
	if !ok {
		fmt.Fprintf(os.Stderr, "not for rpm: %q\n", args)
		return 64
	}
	missing := 0
	for _, n := range names {
		found := false
		for _, f := range s.load().Installed {
			if found = found || f.Name == n; f.Name == n {
				fmt.Printf("%s\t%s\t%s\n", f.Name, f.Version, f.Arch)
			}
		}
		if !found {
			fmt.Printf("package %s is not installed\n", n)
			missing++
		}
	}
	return missing
}

// readFake reads a package file: RPM, its name, its version and what it needs.
func readFake(path string) (fake, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return fake{}, err
	}
	w := strings.Fields(string(b))
	if len(w) < 3 || w[0] != "RPM" {
		return fake{}, errQuery
	}
	return fake{Name: w[1], Version: w[2], Arch: "noarch", Needs: w[3:]}, nil
}

// solve answers a question as solve.py does.
func (s standIn) solve(text string) int {
	var q question
	if err := json.Unmarshal([]byte(text), &q); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	b, err := json.Marshal(s.answer(q))
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	fmt.Printf("a plugin says something\n%s\n", b)
	return 0
}

func (s standIn) answer(q question) answer {
	db := s.load()
	if q.Name != "" {
		var a answer
		for _, f := range db.Offered {
			if f.Name == q.Name {
				a.Versions = append(a.Versions, f.Version)
			}
		}
		return a
	}
	if len(q.Remove) > 0 {
		var a answer
		for _, f := range db.Installed {
			if slices.Contains(q.Remove, f.Name) || slices.ContainsFunc(f.Needs, func(n string) bool { return slices.Contains(q.Remove, n) }) {
				a.Remove = append(a.Remove, wanted{f.Name, f.Version, f.Arch})
			}
		}
		return a
	}
	for _, path := range q.Files {
		f, err := readFake(path)
		if err != nil {
			return answer{Error: err.Error()}
		}
		db.Offered = append([]fake{f}, db.Offered...)
		q.Install = append(q.Install, wanted{Name: f.Name, Version: f.Version})
	}
	return db.change(q.Install)
}

func (db fakes) change(queue []wanted) answer {
	var a answer
	for i := 0; i < len(queue); i++ {
		w := queue[i]
		fits := func(f fake) bool { return f.Name == w.Name && (w.Version == "" || w.Version == f.Version) }
		if slices.ContainsFunc(db.Installed, fits) || slices.ContainsFunc(a.Install, func(p wanted) bool { return p.Name == w.Name }) {
			continue
		}
		at := slices.IndexFunc(db.Offered, fits)
		if at < 0 {
			return answer{Missing: "no repository has " + w.Name + " " + w.Version}
		}
		f := db.Offered[at]
		old := slices.IndexFunc(db.Installed, func(o fake) bool { return o.Name == f.Name })
		if old >= 0 {
			o := db.Installed[old]
			a.Replace = append(a.Replace, wanted{o.Name, o.Version, o.Arch})
			continue
		}
		for _, d := range f.Drives {
			if slices.ContainsFunc(db.Installed, func(o fake) bool { return o.Name == d }) {
				return answer{Problem: "package " + f.Name + " conflicts with " + d}
			}
		}
		a.Install = append(a.Install, wanted{f.Name, f.Version, f.Arch})
		for _, n := range f.Needs {
			queue = append(queue, wanted{Name: n})
		}
	}
	slices.SortFunc(a.Install, func(x, y wanted) int { return strings.Compare(x.Name, y.Name) })
	return a
}

// dnf changes the database as it is told. Before each package it does what the
// test wants.
func (s standIn) dnf(args []string) int {
	words, ok := cut(args, "--assumeyes", "--quiet", "--best", "--color=never", "--setopt=install_weak_deps=False",
		"--setopt=clean_requirements_on_remove=False", "--setopt=exit_on_lock=True", "--setopt=*.metadata_expire=never")
	if !ok || len(words) < 2 {
		fmt.Fprintf(os.Stderr, "not for dnf: %q\n", args)
		return 64
	}
	db, do := s.load(), s.do()
	switch do {
	case "lie":
		return 0
	case "locked":
		fmt.Fprintln(os.Stderr, "RPMDB already locked by 4711")
		return 200
	}
	for i, w := range words[1:] {
		if i == 1 && do == "fail" {
			fmt.Fprintln(os.Stderr, "Error: Transaction failed")
			return 1
		}
		if words[0] == "remove" {
			db.Installed = slices.DeleteFunc(db.Installed, func(f fake) bool { return f.Name == w })
		} else if err := db.install(w); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		if err := s.save(db); err != nil {
			panic(err)
		}
		if do == "die" {
			_ = syscall.Kill(os.Getpid(), syscall.SIGKILL) // this is its end
		}
	}
	return 0
}

// install installs one package: a file, or one that is offered by all of its
// name, epoch, version, release and, where the caller knows it, architecture.
func (db *fakes) install(word string) error {
	if strings.HasPrefix(word, "/") {
		f, err := readFake(word)
		db.Installed = append(db.Installed, f)
		return err
	}
	for _, f := range db.Offered {
		if name := f.Name + "-0:" + f.Version; word == name || word == name+"."+f.Arch {
			db.Installed = append(db.Installed, f)
			return nil
		}
	}
	return fmt.Errorf("no match for argument: %s", word)
}
