package executor_test

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"testing"
)

// TestCrashPointsAreListed compares the crash points of this package and of
// package state with the list in doc.go.
func TestCrashPointsAreListed(t *testing.T) {
	var placed, listed []string
	for _, dir := range []string{".", "../state"} {
		files, err := filepath.Glob(dir + "/*.go")
		if err != nil {
			t.Fatal(err)
		}
		for _, file := range files {
			b, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			for _, m := range regexp.MustCompile(`crash\.Point\("([a-z._]+)"\)`).FindAllSubmatch(b, -1) {
				placed = append(placed, string(m[1]))
			}
		}
	}
	doc, err := os.ReadFile("doc.go")
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range regexp.MustCompile(`(?m)^//\t([a-z]+\.[a-z._]+) `).FindAllSubmatch(doc, -1) {
		listed = append(listed, string(m[1]))
	}
	slices.Sort(placed)
	slices.Sort(listed)
	if !slices.Equal(placed, listed) || len(placed) < 14 {
		t.Errorf("placed %v, listed %v", placed, listed)
	}
}
