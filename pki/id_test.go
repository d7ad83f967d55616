package pki_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/gpuaas/millwright/pki"
)

func TestID(t *testing.T) {
	for _, role := range pki.Roles() {
		id, err := pki.NewID("td.test", role, "gpu-001.rack")
		if err != nil {
			t.Fatal(err)
		}
		if want := "spiffe://td.test/" + string(role) + "/gpu-001.rack"; id.String() != want || id.URL().String() != want {
			t.Errorf("got %s and %s, want %s", id, id.URL(), want)
		}
		if again, err := pki.ParseID(id.String()); err != nil || again != id {
			t.Errorf("parse %s: %v, %v", id, again, err)
		}
	}
	if s := (pki.ID{}).String(); s != "" {
		t.Errorf("zero id prints %q", s)
	}
}

func TestParseIDRefuses(t *testing.T) {
	for _, s := range []string{
		"", "node/a", "spiffe://", "spiffe://td", "spiffe://td/node", "spiffe://td/node/", "spiffe://td/node/a/",
		"spiffe:///node/a", "spiffe://td/NODE/a", "spiffe://td/root/a", "SPIFFE://td/node/a", "spiffe://Td/node/a",
		"spiffe://td/node/a b", "spiffe://td/node/a..b", "spiffe://td/node/.a", "spiffe://td/node/a-",
		"spiffe://td:1/node/a", "spiffe://td/node/a?x", "spiffe://td/node/a#x", "spiffe://td/node/%61",
		"spiffe://td/node/" + strings.Repeat("a", 64), "spiffe://" + strings.Repeat("a", 256) + "/node/a",
		"spiffe://td/node/a\x00", "spiffe://td/node/ä",
	} {
		if id, err := pki.ParseID(s); !errors.Is(err, pki.ErrID) {
			t.Errorf("%q: %v, %v", s, id, err)
		}
	}
}

func FuzzParseID(f *testing.F) {
	f.Add("spiffe://td.test/node/a")
	f.Add("spiffe://td.test/node/%61")
	f.Fuzz(func(t *testing.T, s string) {
		id, err := pki.ParseID(s)
		if err == nil && id.String() != s {
			t.Errorf("%q is taken for %q", s, id)
		}
	})
}
