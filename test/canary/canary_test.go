package canary_test

import (
	"context"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/gpuaas/millwright/test/canary"
	"github.com/gpuaas/millwright/test/testbed"
	"github.com/gpuaas/millwright/test/testbed/testbedtest"
)

func place(text string) canary.Place {
	return canary.Place{Name: "a text", Read: func(_ context.Context, visit canary.Visit) error { return visit("it", strings.NewReader(text)) }}
}

// TestForms hides a canary in every way that is looked for, also over the border
// of what is read at once.
func TestForms(t *testing.T) {
	c := canary.New("key")
	v := string(c.Value)
	hidden := []string{v, v[:30], hex.EncodeToString(c.Value), strings.ToUpper(hex.EncodeToString(c.Value))}
	for shift := range 7 {
		hidden = append(hidden, base64.StdEncoding.EncodeToString([]byte(strings.Repeat("x", shift)+v+"yz")))
	}
	for i, h := range hidden {
		for _, before := range []int{0, 1, 1<<20 + 4<<10 - 20, 1<<20 - 10} {
			found, err := canary.Search(t.Context(), []canary.Place{place(strings.Repeat("-", before) + h + "--")}, []canary.Canary{canary.New("other"), c})
			if err != nil || len(found) != 1 || found[0].Canary != "key" {
				t.Errorf("form %d after %d bytes: %v, %v", i, before, found, err)
			}
			if strings.Contains(fmt.Sprint(found), v[:8]) {
				t.Error("a finding prints the value")
			}
		}
	}
	if found, err := canary.Search(t.Context(), []canary.Place{place(v[:20] + "-" + v[24:])}, []canary.Canary{c}); err != nil || len(found) > 0 {
		t.Errorf("what is not a canary: %v, %v", found, err)
	}
}

// TestNoProof checks that a place which cannot be read, or has nothing, is an
// error.
func TestNoProof(t *testing.T) {
	broken := errors.New("broken")
	for name, read := range map[string]func(context.Context, canary.Visit) error{
		"nothing":  func(context.Context, canary.Visit) error { return nil },
		"empty":    func(_ context.Context, visit canary.Visit) error { return visit("it", strings.NewReader("")) },
		"broken":   func(context.Context, canary.Visit) error { return broken },
		"half way": func(_ context.Context, visit canary.Visit) error { return visit("it", &half{err: broken}) },
	} {
		if _, err := canary.Search(t.Context(), []canary.Place{{Name: name, Read: read}}, nil); err == nil {
			t.Errorf("%s is taken for a proof", name)
		}
	}
}

// half is a text that breaks off.
type half struct{ err error }

func (h *half) Read(p []byte) (int, error) { return copy(p, "text"), h.err }

var _ io.Reader = (*half)(nil)

// TestNode plants a canary in each place of a real node, and it is found there
// and nowhere else; what was not planted is found nowhere.
func TestNode(t *testing.T) {
	testbedtest.NeedRoot(t)
	begin := time.Now()
	n, err := testbedtest.Up(t, testbed.Config{Nodes: 1}).Node("n1")
	if err != nil {
		t.Fatal(err)
	}
	plant := func(name, script string) canary.Canary {
		c := canary.New(name)
		var out strings.Builder
		if err := n.Stream(t.Context(), strings.NewReader(string(c.Value)), &out, &out, "sh", "-c", script); err != nil {
			t.Fatalf("plant in %s: %v\n%s", name, err, out.String())
		}
		return c
	}
	canaries := []canary.Canary{
		plant("disk", "printf '\\0\\1\\2%s\\377' \"$(cat)\" >/var/lib/planted; chmod 0400 /var/lib/planted"),
		plant("memory", "cat >/run/planted"),
		plant("base64", "base64 -w0 >/etc/planted"),
		plant("argv", "v=$(cat); bash -c 'exec -a \"$0\" sleep 300' \"$v\" >/dev/null 2>&1 </dev/null &"),
		plant("environ", "V=$(cat); export V; setsid sleep 300 >/dev/null 2>&1 </dev/null &"),
		plant("property", "busctl call org.freedesktop.systemd1 /org/freedesktop/systemd1 org.freedesktop.systemd1.Manager SetEnvironment as 1 V=$(cat)"),
		plant("log", "systemd-cat -t planted && journalctl --sync"),
		canary.New("none"),
	}
	found, err := canary.Search(t.Context(), canary.Node(n, begin), canaries)
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range found {
		t.Log(f)
	}
	for name, want := range map[string]string{
		"disk": "files of n1, /var/lib/planted", "memory": "files of n1, /run/planted", "base64": "files of n1, /etc/planted",
		"argv": "processes of n1, /proc/", "environ": "processes of n1, /proc/", "property": "properties of systemd of n1", "log": "journal of n1",
	} {
		if !slices.ContainsFunc(found, func(f canary.Finding) bool {
			return f.Canary == name && strings.Contains(f.String(), want)
		}) {
			t.Errorf("the canary in %s was not found in %s", name, want)
		}
	}
	if slices.ContainsFunc(found, func(f canary.Finding) bool { return f.Canary == "none" }) {
		t.Error("a canary that was not planted is found")
	}
}
