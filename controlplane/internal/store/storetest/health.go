package storetest

import (
	"testing"

	healthv1 "github.com/gpuaas/millwright/proto/millwright/health/v1"
	serverv1 "github.com/gpuaas/millwright/proto/millwright/server/v1"

	"github.com/gpuaas/millwright/controlplane/internal/store"
)

func healthRow(node, key string, index uint64) *serverv1.HealthRow {
	return &serverv1.HealthRow{Node: node, Index: index, Condition: &healthv1.Condition{Key: key}}
}

func testHealth(t *testing.T, open Opener) {
	s, reopen := open(t)
	var entries []store.Entry
	for i, node := range []string{"n", "nn", "", "n"} {
		e := entry(uint64(i+1), "")
		e.HealthOf = node
		entries = append(entries, e)
	}
	update(t, s, &store.Change{Entries: entries, Health: []*serverv1.HealthRow{
		healthRow("n", "b/1", 1), healthRow("nn", "a", 2), healthRow("n", "a", 4), healthRow("n", "b", 4),
	}})
	s = reopen()
	update(t, s, &store.Change{
		HealthGone: []store.HealthKey{{Node: "n", Key: "b"}, {Node: "n", Key: "not there"}, {Node: "nn", Key: "a"}},
		Health:     []*serverv1.HealthRow{healthRow("n", "a", 5), healthRow("nn", "a", 6)},
	})
	view(t, s, func(v store.View) {
		got, err := v.Health("n", 10)
		check(t, "Health", got, err, []*serverv1.HealthRow{healthRow("n", "a", 5), healthRow("n", "b/1", 1)})
		got, err = v.Health("n", 1)
		check(t, "Health with a limit", got, err, []*serverv1.HealthRow{healthRow("n", "a", 5)})
		got, err = v.Health("x", 10)
		check(t, "Health(x)", got, err, nil)
		beyond, err := v.HealthBeyond("n", 1)
		check(t, "HealthBeyond the newest", beyond, err, 1)
		beyond, err = v.HealthBeyond("n", 2)
		check(t, "HealthBeyond all", beyond, err, 0)
		beyond, err = v.HealthBeyond("nn", 0)
		check(t, "HealthBeyond nothing, at the end", beyond, err, 2)
		row, err := v.Condition(store.HealthKey{Node: "nn", Key: "a"})
		check(t, "a condition that was removed and written in one change", row, err, healthRow("nn", "a", 6))
		_, err = v.Condition(store.HealthKey{Node: "n", Key: "b"})
		notFound(t, "a condition that was removed", err)
		for _, c := range []struct {
			node  string
			from  uint64
			limit int
			bytes int
			want  []uint64
		}{
			{"n", 0, 10, 1 << 20, []uint64{1, 4}},
			{"n", 2, 10, 1 << 20, []uint64{4}},
			{"n", 0, 1, 1 << 20, []uint64{1}},
			{"n", 0, 10, 1, []uint64{1}},
			{"nn", 0, 10, 1 << 20, []uint64{2}},
			{"x", 0, 10, 1 << 20, nil},
		} {
			entries, err := v.HealthEntries(c.node, c.from, c.limit, c.bytes)
			var got []uint64
			for _, e := range entries {
				got = append(got, e.Index)
			}
			check(t, "HealthEntries of "+c.node, got, err, c.want)
		}
	})
	update(t, s, &store.Change{HealthTrims: []store.HealthTrim{{Node: "n", Through: 3}, {Node: "x", Through: 9}}})
	s = reopen()
	view(t, s, func(v store.View) {
		for node, want := range map[string]struct {
			entries []uint64
			through uint64
		}{"n": {[]uint64{4}, 3}, "nn": {[]uint64{2}, 0}, "x": {nil, 9}} {
			entries, err := v.HealthEntries(node, 0, 10, 1<<20)
			var got []uint64
			for _, e := range entries {
				got = append(got, e.Index)
			}
			check(t, "HealthEntries after a trim of "+node, got, err, want.entries)
			through, err := v.HealthTrimmed(node)
			check(t, "HealthTrimmed of "+node, through, err, want.through)
		}
		all, err := v.Entries(1, 10, 1<<20)
		check(t, "entries of the log after a trim", len(all), err, 4)
	})
}
