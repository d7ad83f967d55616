package profile

import (
	"errors"
	"reflect"
	"strings"
	"testing"
)

func TestParse(t *testing.T) {
	for s, want := range map[string]Name{
		"1g.10gb":        {Slices: 1, GB: 10},
		"7g.141gb":       {Slices: 7, GB: 141},
		"1c.3g.40gb":     {Compute: 1, Slices: 3, GB: 40},
		"1g.10gb+me":     {Slices: 1, GB: 10, With: []string{"me"}},
		"1g.24gb+me.all": {Slices: 1, GB: 24, With: []string{"me.all"}},
		"4g.96gb+gfx":    {Slices: 4, GB: 96, With: []string{"gfx"}},
		"1g.24gb+me,gfx": {Slices: 1, GB: 24, With: []string{"gfx", "me"}},
		"2g.48gb-me":     {Slices: 2, GB: 48, Without: []string{"me"}},
	} {
		got, err := Parse(s)
		if err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("%s: %+v, %v; want %+v", s, got, err, want)
		}
		if again, err := Parse(got.String()); err != nil || !reflect.DeepEqual(again, got) {
			t.Errorf("%s is written %s, which is read as %+v, %v", s, got, again, err)
		}
	}
	if n, err := Parse("3c.3g.40gb"); err != nil || n.String() != "3g.40gb" {
		t.Errorf("3c.3g.40gb is %s, %v", n, err)
	}
	for s, want := range map[string]string{
		"": "is not of the form", "1g": "is not of the form", "1g.10GB": "is not of the form", "0g.10gb": "is not of the form", " 1g.10gb": "is not of the form",
		"1g.5gb+": "is not of the form", "4c.3g.40gb": "4 compute slices in an instance of 3", "1g.5gb+foo": `the attribute "foo"`,
		"1g.5gb-gfx": `the attribute "gfx"`, "1g.5gb+me,me": "twice", "1g.5gb+me-me": "both", "100g.5gb": "is not of the form",
	} {
		if n, err := Parse(s); !errors.Is(err, ErrName) || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %+v, %v; want %q", s, n, err, want)
		}
	}
}

// TestMatch: profiles are found by what they are.
func TestMatch(t *testing.T) {
	h100 := []Offered{
		{ID: 19, Slices: 1, MemoryMB: 9984}, {ID: 20, Slices: 1, MemoryMB: 9984, With: []string{"me"}},
		{ID: 15, Slices: 1, MemoryMB: 20096}, {ID: 14, Slices: 2, MemoryMB: 20096},
		{ID: 9, Slices: 3, MemoryMB: 40448}, {ID: 5, Slices: 4, MemoryMB: 40448}, {ID: 0, Slices: 7, MemoryMB: 81152},
	}
	rtx := []Offered{
		{ID: 14, Slices: 1, MemoryMB: 24192}, {ID: 21, Slices: 1, MemoryMB: 24192, With: []string{"me"}},
		{ID: 65, Slices: 1, MemoryMB: 24192, With: []string{"me.all"}}, {ID: 67, Slices: 1, MemoryMB: 24192, Without: []string{"me"}},
		{ID: 47, Slices: 1, MemoryMB: 24192, With: []string{"gfx"}},
	}
	for _, test := range []struct {
		on   []Offered
		name string
		id   int
	}{
		{h100, "1g.10gb", 19}, {h100, "1g.10gb+me", 20}, {h100, "1g.20gb", 15}, {h100, "2g.20gb", 14}, {h100, "3g.40gb", 9},
		{h100, "4g.40gb", 5}, {h100, "7g.80gb", 0}, {h100, "7g.79gb", 0}, {h100, "1c.3g.40gb", 9},
		{rtx, "1g.24gb", 14}, {rtx, "1g.24gb-me", 67}, {rtx, "1g.24gb+me.all", 65}, {rtx, "1g.24gb+gfx", 47},
	} {
		n, err := Parse(test.name)
		if err != nil {
			t.Fatal(err)
		}
		if got, err := Match(n, test.on); err != nil || got.ID != test.id {
			t.Errorf("%s: %+v, %v; want %d", test.name, got, err, test.id)
		}
	}
	for name, want := range map[string]string{
		"1g.5gb":      "of 1 slices it has 1g.10gb, 1g.10gb+me, 1g.20gb",
		"5g.40gb":     "it has none of 5 slices",
		"3g.20gb":     "it has 3g.40gb",
		"2g.20gb+gfx": "it has 2g.20gb",
		"1g.15gb":     "of 1 slices it has",
	} {
		n, err := Parse(name)
		if err != nil {
			t.Fatal(err)
		}
		if got, err := Match(n, h100); !errors.Is(err, ErrNoMatch) || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %+v, %v; want %q", name, got, err, want)
		}
	}
}

func FuzzParse(f *testing.F) {
	f.Add("1g.10gb+me")
	f.Add("1c.3g.40gb-me")
	f.Fuzz(func(t *testing.T, s string) {
		n, err := Parse(s)
		if err != nil {
			return
		}
		if again, err := Parse(n.String()); err != nil || !reflect.DeepEqual(again, n) {
			t.Errorf("%q is written %q, which is read as %+v, %v", s, n, again, err)
		}
	})
}
