package slurm

import (
	"bytes"
	"strings"
	"testing"

	slurmv1 "github.com/gpuaas/millwright/proto/millwright/slurm/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/tasks"
)

func withKey(ref *taskv1.SecretRef) *slurmv1.JoinSpec {
	return &slurmv1.JoinSpec{
		Controllers: []string{"ctl"}, Membership: &slurmv1.JoinSpec_Dynamic{Dynamic: &slurmv1.DynamicNode{}}, MungeKey: ref,
	}
}

// TestMungeKey checks what is said of a reference that is wrong, where it stands
// in each kind.
func TestMungeKey(t *testing.T) {
	good := &taskv1.SecretRef{Name: "munge-key", Salt: bytes.Repeat([]byte{1}, tasks.SaltBytes), Sha256: bytes.Repeat([]byte{2}, tasks.DigestBytes)}
	for _, tc := range []struct {
		ref  *taskv1.SecretRef
		want string
	}{
		{nil, ""},
		{good, ""},
		{&taskv1.SecretRef{}, "munge_key.name: is required"},
		{&taskv1.SecretRef{Name: "/etc/munge/munge.key"}, "munge_key.name"},
		{&taskv1.SecretRef{Name: "munge-key"}, "--secret munge-key=FILE"},
	} {
		for at, err := range map[string]error{
			"":      Join{}.Validate(withKey(tc.ref)),
			"node.": Reconfigure{}.Validate(&slurmv1.ReconfigureSpec{Node: withKey(tc.ref)}),
		} {
			switch {
			case tc.want == "" && err != nil:
				t.Errorf("%v: %v", tc.ref, err)
			case tc.want != "" && (err == nil || !strings.Contains(err.Error(), tc.want) || !strings.Contains(err.Error(), at+"munge_key")):
				t.Errorf("%v: %v, want %q at %q", tc.ref, err, tc.want, at)
			}
		}
	}
}

// TestRevision checks that only a spec with a key, or with packages, asks for a
// newer revision, so that older nodes still join.
func TestRevision(t *testing.T) {
	r := tasks.NewRegistry()
	tasks.Add(r, JoinInfo(), Join{})
	tasks.Add(r, ReconfigureInfo(), Reconfigure{})
	join, err := r.Kind("slurm.join")
	if err != nil {
		t.Fatal(err)
	}
	re, err := r.Kind("slurm.reconfigure")
	if err != nil {
		t.Fatal(err)
	}
	ref := &taskv1.SecretRef{Name: "k"}
	if a, b := join.Needs(withKey(nil)), join.Needs(withKey(ref)); a != 1 || b != 2 {
		t.Errorf("slurm.join needs revision %d without a key and %d with one", a, b)
	}
	packaged := withKey(ref)
	packaged.Packages = []*taskv1.NodePackage{{Name: "slurmd", Version: "1"}}
	if n, m := join.Needs(packaged), re.Needs(&slurmv1.ReconfigureSpec{Node: packaged}); n != 3 || m != 3 {
		t.Errorf("with packages slurm.join needs revision %d and slurm.reconfigure %d", n, m)
	}
	node := func(ref *taskv1.SecretRef) *slurmv1.ReconfigureSpec {
		return &slurmv1.ReconfigureSpec{Node: withKey(ref)}
	}
	if a, b := re.Needs(node(nil)), re.Needs(node(ref)); a != 1 || b != 2 {
		t.Errorf("slurm.reconfigure needs revision %d without a key and %d with one", a, b)
	}
}

// TestPackages checks that packages are looked at where they stand in each kind,
// and that Slurm's are of one version.
func TestPackages(t *testing.T) {
	with := func(list ...*taskv1.NodePackage) *slurmv1.JoinSpec {
		s := withKey(nil)
		s.Packages = list
		return s
	}
	for _, tc := range []struct {
		spec *slurmv1.JoinSpec
		want string
	}{
		{with(&taskv1.NodePackage{Name: "slurmd", Version: "22.05.8-4"}, &taskv1.NodePackage{Name: "munge", Version: "0.5.15-2"}, &taskv1.NodePackage{Name: "slurm-client", Version: "22.05.8-4"}), ""},
		{with(&taskv1.NodePackage{Name: "slurmd", Version: "22.05.8-4"}, &taskv1.NodePackage{Name: "slurm-drmaa1", Version: "1.1.3-1"}), ""},
		{with(&taskv1.NodePackage{Name: "slurmd"}), "packages[0].version"},
		{with(&taskv1.NodePackage{Name: "slurmd", Version: "22.05.8-4"}, &taskv1.NodePackage{Name: "slurm-client", Version: "22.05.9-1"}), "packages[1].version"},
	} {
		for at, err := range map[string]error{
			"":      Join{}.Validate(tc.spec),
			"node.": Reconfigure{}.Validate(&slurmv1.ReconfigureSpec{Node: tc.spec}),
		} {
			if tc.want == "" && err != nil || tc.want != "" && (err == nil || !strings.Contains(err.Error(), at+tc.want)) {
				t.Errorf("%v: %v, want %q", tc.spec, err, at+tc.want)
			}
		}
	}
}
