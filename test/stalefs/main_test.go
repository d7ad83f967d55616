package main

import (
	"errors"
	"os"
	"testing"

	"golang.org/x/sys/unix"
)

// TestAnswers mounts it, and asks the kernel what it says.
func TestAnswers(t *testing.T) {
	if os.Getuid() != 0 {
		t.Fatal("it takes root to mount")
	}
	for name, want := range kinds {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			ended := make(chan error, 1)
			go func() { ended <- run([]string{dir, "standin;x;y", name}) }()
			var st unix.Statfs_t
			for err := error(nil); !errors.Is(err, want); err = unix.Statfs(dir, &st) {
				select {
				case err := <-ended:
					t.Fatalf("it has ended: %v", err)
				default:
				}
			}
			if _, err := os.Create(dir + "/file"); !errors.Is(err, want) {
				t.Errorf("a file is made: %v, want %v", err, want)
			}
			if err := unix.Unmount(dir, 0); err != nil {
				t.Error(err)
			}
			if err := <-ended; err != nil {
				t.Error(err)
			}
		})
	}
	for _, args := range [][]string{nil, {"/mnt", "x", "ENOENT"}, {"/mnt", "x"}} {
		if err := run(args); !errors.Is(err, errUsage) {
			t.Errorf("%q: %v", args, err)
		}
	}
}
