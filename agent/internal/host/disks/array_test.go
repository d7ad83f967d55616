package disks

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/gpuaas/millwright/tasks/host"
)

// mdadmStandIn is a stand-in for mdadm, since few kernels of test machines have
// md: it notes its arguments, makes and removes the array's device file, and fails
// when it is told to. What the kernel makes of it is not shown.
const mdadmStandIn = `#!/bin/sh
echo "mdadm $*" >> $LOG
test -e $FAIL && { echo "mdadm: $2 is odd" >&2; exit 1; }
case $1 in
--create|--assemble) : > $2;;
--stop) rm $3;;
esac
`

// arraySet is a set whose programs are stand-ins that note what they are asked.
func arraySet(t *testing.T) (s *Set, said func() []string, dir string) {
	t.Helper()
	dir = t.TempDir()
	log := filepath.Join(dir, "log")
	script := strings.NewReplacer("$LOG", log, "$FAIL", filepath.Join(dir, "fail")).Replace(mdadmStandIn)
	tree(t, dir, map[string]string{"bin/mdadm": script, "bin/wipefs": "#!/bin/sh\necho \"wipefs $*\" >> " + log + "\n", "dev/nvme0n1": "", "dev/nvme1n1": ""})
	for _, name := range []string{"mdadm", "wipefs"} {
		if err := os.Chmod(filepath.Join(dir, "bin", name), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	s = newSet(Config{Sys: filepath.Join(dir, "sys"), Proc: dir, Dev: filepath.Join(dir, "dev")})
	s.cfg.Find = inDir(filepath.Join(dir, "bin"))
	return s, func() []string {
		b, err := os.ReadFile(log)
		if err != nil {
			t.Fatal(err)
		}
		return strings.Split(strings.TrimSpace(strings.ReplaceAll(string(b), dir, "")), "\n")
	}, dir
}

func TestArray(t *testing.T) {
	s, said, dir := arraySet(t)
	a := host.StripedArray{Device: "md127", UUID: "b2065a66-b4c3-5b09-ac9e-e35cdd4da0c9", Disks: []string{"nvme0n1", "nvme1n1"}}
	if err := s.MakeArray(t.Context(), a); err != nil {
		t.Fatal(err)
	}
	if err := s.StopArray(t.Context(), "md127"); err != nil {
		t.Fatal(err)
	}
	if err := s.AssembleArray(t.Context(), a); err != nil {
		t.Fatal(err)
	}
	want := []string{
		"mdadm --create /dev/md127 --run --quiet --level=0 --raid-devices=2 --metadata=1.2 --homehost=any --name=md127 --uuid=" + a.UUID + " /dev/nvme0n1 /dev/nvme1n1",
		"wipefs --all --quiet /dev/md127",
		"mdadm --stop --quiet /dev/md127",
		"mdadm --assemble /dev/md127 --run --quiet --uuid=" + a.UUID + " /dev/nvme0n1 /dev/nvme1n1",
	}
	if got := said(); !slices.Equal(got, want) {
		t.Errorf("the programs were asked\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	tree(t, dir, map[string]string{"fail": ""})
	for what, err := range map[string]error{
		"make":     s.MakeArray(t.Context(), a),
		"assemble": s.AssembleArray(t.Context(), a),
		"stop":     s.StopArray(t.Context(), "md127"),
	} {
		if !errors.Is(err, errProgram) || !strings.Contains(err.Error(), "is odd") {
			t.Errorf("%s, refused by mdadm: %v", what, err)
		}
	}
}

// TestArraysOfTheKernel reads what the kernel says of arrays that run, that lack a
// disk, and that are stopped.
func TestArraysOfTheKernel(t *testing.T) {
	sys := t.TempDir()
	md := func(name, size, state, level string, members ...string) map[string]string {
		dir := "block/" + name + "/"
		files := map[string]string{dir + "dev": "9:" + name[2:] + "\n", dir + "size": size, dir + "ro": "0\n", dir + "md/array_state": state + "\n", dir + "md/level": level + "\n"}
		for _, m := range members {
			files[dir+"slaves/"+m] = ""
		}
		return files
	}
	tree(t, sys, md("md127", "4096", "clean", "raid0", "nvme1n1", "nvme0n1"))
	tree(t, sys, md("md126", "0", "inactive", "", "nvme2n1"))
	tree(t, sys, md("md125", "0", "clear", ""))
	got, err := newSet(Config{Sys: sys, Proc: t.TempDir()}).Disks(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	want := []host.Disk{
		{Name: "md126", Dev: "9:126", Array: &host.DiskArray{Members: []string{"nvme2n1"}}},
		{Name: "md127", Dev: "9:127", SizeBytes: 2 << 20, Array: &host.DiskArray{Level: "raid0", Members: []string{"nvme0n1", "nvme1n1"}, Active: true}},
	}
	same := func(a, b host.Disk) bool {
		return a.Name == b.Name && a.Dev == b.Dev && a.SizeBytes == b.SizeBytes && a.Array != nil &&
			a.Array.Level == b.Array.Level && a.Array.Active == b.Array.Active && slices.Equal(a.Array.Members, b.Array.Members)
	}
	if !slices.EqualFunc(got, want, same) {
		t.Errorf("Disks = %+v\nwant    %+v", got, want)
	}
}
