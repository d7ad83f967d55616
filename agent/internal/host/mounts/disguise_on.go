//go:build millwright_crash

package mounts

import (
	"strings"

	"github.com/gpuaas/millwright/tasks/host"
)

// standIn begins the source of a tmpfs, or of a FUSE file system that answers with
// errors, that stands in for a file system that the kernel of a test does not
// have:
//
//	standin;TYPE;SOURCE;OPTION;OPTION...
const standIn = "standin;"

// disguised shows what a stand-in stands for: its type, its source and its
// options. All else is as the kernel tells it.
func disguised(table []host.Mount) []host.Mount {
	for i, m := range table {
		rest, ok := strings.CutPrefix(m.Source, standIn)
		parts := strings.Split(rest, ";")
		if !ok || m.FSType != "tmpfs" && m.FSType != "fuse" || len(parts) < 2 {
			continue
		}
		table[i].FSType, table[i].Source = parts[0], parts[1]
		table[i].Super = append([]string{"rw"}, parts[2:]...)
	}
	return table
}
