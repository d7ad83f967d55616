package shim

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// oomKills counts the processes of this control group that the kernel has
// killed for want of memory. Where it cannot be read it stays 0.
func oomKills() uint64 {
	b, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return 0
	}
	for _, path := range memoryEvents(string(b), "/sys/fs/cgroup") {
		if b, err := os.ReadFile(path); err == nil {
			return oomCount(string(b))
		}
	}
	return 0
}

// memoryEvents are the files in which the count may stand, by the lines of
// /proc/self/cgroup: of the memory controller of version 1, or of version 2.
func memoryEvents(cgroups, root string) []string {
	var paths []string
	for line := range strings.Lines(cgroups) {
		f := strings.SplitN(strings.TrimSpace(line), ":", 3)
		switch {
		case len(f) < 3:
		case f[1] == "memory":
			paths = append(paths, filepath.Join(root, "memory", f[2], "memory.oom_control"))
		case f[0] == "0" && f[1] == "":
			paths = append(paths, filepath.Join(root, f[2], "memory.events"))
		}
	}
	return paths
}

func oomCount(file string) uint64 {
	for line := range strings.Lines(file) {
		if v, ok := strings.CutPrefix(strings.TrimSpace(line), "oom_kill "); ok {
			n, err := strconv.ParseUint(v, 10, 64)
			if err == nil {
				return n
			}
		}
	}
	return 0
}
