package tasks

import (
	"fmt"
	"path"
	"regexp"

	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
)

// MaxPackages is how many packages a spec may name.
const MaxPackages = 32

// Names and versions as dpkg and rpm have them: words that no package manager
// takes for an option, a file, a pattern or a removal.
var (
	packageName    = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9+._-]{0,126}[A-Za-z0-9+_]$`)
	packageVersion = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9.+~:^_-]{0,127}$`)
	packagePath    = regexp.MustCompile(`^/[A-Za-z0-9._+~/=,@:-]{1,254}$`)
	packageDigest  = regexp.MustCompile(`^[0-9a-f]{64}$`)
)

// CheckPackages adds the problems of packages that a spec names to p.
func CheckPackages(p *Problems, field string, list []*taskv1.NodePackage) {
	if len(list) > MaxPackages {
		p.Add(field, fmt.Sprint(len(list)), fmt.Sprintf("must be %d at most", MaxPackages))
	}
	seen := map[string]bool{}
	for i, pkg := range list {
		at := fmt.Sprintf("%s[%d]", field, i)
		switch {
		case !packageName.MatchString(pkg.GetName()):
			p.Add(at+".name", pkg.GetName(), "must be the name of a package: for example slurmd")
		case seen[pkg.GetName()]:
			p.Add(at+".name", pkg.GetName(), "is named twice")
		}
		seen[pkg.GetName()] = true
		switch v := pkg.GetVersion(); {
		case v == "" && pkg.GetFile() == "":
			p.Add(at+".version", v, "is required: give the version as the node's package manager writes it, such as 22.05.8-4+deb12u3, or a file with its sha256")
		case v != "" && !packageVersion.MatchString(v):
			p.Add(at+".version", v, "must be one version, as the node's package manager writes it: for example 22.05.8-4+deb12u3")
		}
		checkPackageFile(p, at, pkg)
	}
}

func checkPackageFile(p *Problems, at string, pkg *taskv1.NodePackage) {
	file, sum := pkg.GetFile(), pkg.GetSha256()
	switch {
	case file == "" && sum != "":
		p.Add(at+".sha256", sum, "is that of a file: give file too, or leave it out")
	case file != "" && (!packagePath.MatchString(file) || path.Clean(file) != file):
		p.Add(at+".file", file, "must be an absolute, clean path of a file on the node: for example /opt/slurm/slurmd_22.05.8-4_amd64.deb")
	case file != "" && !packageDigest.MatchString(sum):
		p.Add(at+".sha256", sum, "must be the file's SHA-256, 64 hexadecimal digits in lower case, as sha256sum prints it")
	}
}
