package state

import (
	"bufio"
	"fmt"
	"os"
	"slices"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// Holders returns the ids of the processes that hold a lock on the file, with
// the names of their programs, as far as the kernel tells: "123 (millwrightd)".
func Holders(path string) []string {
	info, err := os.Stat(path)
	if err != nil {
		return nil
	}
	st, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return nil
	}
	locks, err := os.Open("/proc/locks")
	if err != nil {
		return nil
	}
	defer locks.Close() // it was only read
	// 1: FLOCK  ADVISORY  WRITE 708 08:01:656463 0 EOF
	// An overlay names another device there than stat does.
	inode := fmt.Sprintf(":%d", st.Ino)
	device := fmt.Sprintf("%02x:%02x", unix.Major(st.Dev), unix.Minor(st.Dev))
	var pids, elsewhere []string
	for lines := bufio.NewScanner(locks); lines.Scan(); {
		f := strings.Fields(lines.Text())
		switch {
		case len(f) < 6 || f[1] != "FLOCK" || !strings.HasSuffix(f[5], inode):
		case f[5] == device+inode:
			pids = append(pids, f[4])
		default:
			elsewhere = append(elsewhere, f[4])
		}
	}
	if len(pids) == 0 {
		pids = elsewhere
	}
	slices.Sort(pids)
	pids = slices.Compact(pids)
	for i, pid := range pids {
		if name, err := os.ReadFile("/proc/" + pid + "/comm"); err == nil {
			pids[i] += " (" + strings.TrimSpace(string(name)) + ")"
		}
	}
	return pids
}

func isFault(s syscall.Signal) bool {
	return s == unix.SIGBUS || s == unix.SIGSEGV || s == unix.SIGABRT || s == unix.SIGILL || s == unix.SIGFPE
}
