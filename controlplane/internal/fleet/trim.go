package fleet

import (
	"context"
	"time"

	"github.com/gpuaas/millwright/controlplane/internal/eventlog"
	"github.com/gpuaas/millwright/controlplane/internal/store"
)

const (
	// trimEvery is how often the histories are looked at.
	trimEvery = 10 * time.Minute
	// trimPage bounds what is taken out of one at a time.
	trimPage      = 1000
	trimPageBytes = 1 << 20
	// The history of the conditions of a node that is kept when nothing else is
	// said.
	defaultHistoryAge   = 90 * 24 * time.Hour
	defaultHistoryCount = 10_000
)

// trim takes out of the history of each node what is older, or more, than is
// kept. What the conditions are now, and the log, are not touched.
func (f *Fleet) trim(ctx context.Context) error {
	for after, more := "", true; more; {
		var names []string
		err := f.cfg.Reader.View(ctx, func(v store.View) error {
			rows, err := v.Nodes(after, page)
			for _, row := range rows {
				names = append(names, row.GetName())
			}
			return err
		})
		if err != nil {
			return err
		}
		for _, name := range names {
			if err := f.trimNode(ctx, name); err != nil {
				return err
			}
			after = name
		}
		more = len(names) == page
	}
	return nil
}

func (f *Fleet) trimNode(ctx context.Context, node string) error {
	for more := true; more; {
		var through uint64
		err := f.cfg.Reader.View(ctx, func(v store.View) (err error) {
			through, more, err = f.overdue(v, node)
			return err
		})
		if err != nil || through == 0 {
			return err
		}
		// The place is that of entries which never change, and only grows.
		if err := f.cfg.Log.Commit(ctx, func(tx *eventlog.Tx) error { tx.TrimHealth(node, through); return nil }); err != nil {
			return err
		}
	}
	return nil
}

// overdue is through which entry the history of a node is too old or too long,
// as far as one page goes; 0 for nothing. More says that there may be another.
func (f *Fleet) overdue(v store.View, node string) (through uint64, more bool, err error) {
	beyond, err := v.HealthBeyond(node, f.cfg.HistoryCount)
	if err != nil {
		return 0, false, err
	}
	entries, err := v.HealthEntries(node, 0, trimPage, trimPageBytes)
	if err != nil {
		return 0, false, err
	}
	oldest := f.cfg.Now().Add(-f.cfg.HistoryAge)
	for _, e := range entries {
		if e.Index > beyond {
			entry, err := e.Decode()
			if err != nil {
				return 0, false, err
			}
			if !entry.GetRecordTime().AsTime().Before(oldest) {
				return through, false, nil
			}
		}
		through = e.Index
	}
	return through, len(entries) > 0, nil
}
