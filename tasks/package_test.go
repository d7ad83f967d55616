package tasks_test

import (
	"strings"
	"testing"

	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/tasks"
)

// TestCheckPackages checks what is refused of packages that a spec names, and
// which field the words name.
func TestCheckPackages(t *testing.T) {
	sum := strings.Repeat("0a", 32)
	for _, tc := range []struct {
		list []*taskv1.NodePackage
		want string
	}{
		{nil, ""},
		{[]*taskv1.NodePackage{{Name: "slurmd", Version: "22.05.8-4+deb12u3"}, {Name: "libmunge2", Version: "1:0.5~rc1"}}, ""},
		{[]*taskv1.NodePackage{{Name: "slurm-slurmd", Version: "22.05.9-1.el9"}, {Name: "munge", File: "/opt/munge.deb", Sha256: sum, NoHold: true}}, ""},
		{[]*taskv1.NodePackage{{Version: "1"}}, "p[0].name"},
		{[]*taskv1.NodePackage{{Name: "-y", Version: "1"}}, "p[0].name"},
		{[]*taskv1.NodePackage{{Name: "munge-", Version: "1"}}, "p[0].name"},
		{[]*taskv1.NodePackage{{Name: "munge*", Version: "1"}}, "p[0].name"},
		{[]*taskv1.NodePackage{{Name: "munge", Version: "1"}, {Name: "munge", Version: "2"}}, "p[1].name: is named twice"},
		{[]*taskv1.NodePackage{{Name: "munge"}}, "p[0].version: is required"},
		{[]*taskv1.NodePackage{{Name: "munge", Version: "1 -y"}}, "p[0].version"},
		{[]*taskv1.NodePackage{{Name: "munge", Version: "-1"}}, "p[0].version"},
		{[]*taskv1.NodePackage{{Name: "munge", Version: "1", Sha256: sum}}, "p[0].sha256"},
		{[]*taskv1.NodePackage{{Name: "munge", File: "/opt/munge.deb"}}, "p[0].sha256"},
		{[]*taskv1.NodePackage{{Name: "munge", File: "/opt/munge.deb", Sha256: strings.ToUpper(sum)}}, "p[0].sha256"},
		{[]*taskv1.NodePackage{{Name: "munge", File: "opt/munge.deb", Sha256: sum}}, "p[0].file"},
		{[]*taskv1.NodePackage{{Name: "munge", File: "/opt/../munge.deb", Sha256: sum}}, "p[0].file"},
		{[]*taskv1.NodePackage{{Name: "munge", File: "/opt/a\nb", Sha256: sum}}, "p[0].file"},
		{make([]*taskv1.NodePackage, tasks.MaxPackages+1), "must be 32 at most"},
	} {
		var p tasks.Problems
		tasks.CheckPackages(&p, "p", tc.list)
		err := p.Err()
		switch field, words, _ := strings.Cut(tc.want, ": "); {
		case tc.want == "" && err != nil:
			t.Errorf("%v: %v", tc.list, err)
		case tc.want != "" && (err == nil || !strings.Contains(err.Error(), field) || !strings.Contains(err.Error(), words)):
			t.Errorf("%v: %v, want %q", tc.list, err, tc.want)
		}
	}
}
