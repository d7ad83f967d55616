package state

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"runtime"
	"runtime/debug"
	"time"

	bolt "go.etcd.io/bbolt"

	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
)

// Facts are what a state file says of itself.
type Facts struct {
	JournalID         string `json:"journal_id"`
	PreviousJournalID string `json:"previous_journal_id,omitempty"`
	Node              string `json:"node"`
	Generation        uint64 `json:"generation"`
	// Seq is the last frame.
	Seq uint64 `json:"seq"`
	// Transaction is bbolt's number of the last commit.
	Transaction uint64 `json:"transaction"`
	// Tasks is how many tasks are in it, and Unfinished those that have not
	// ended; only [CheckFile] counts them.
	Tasks      int `json:"tasks,omitempty"`
	Unfinished int `json:"unfinished,omitempty"`
	// Pages says whether every page was looked at, see pagesLimit.
	Pages bool `json:"pages"`
	// FreePagesSum is the sum of the pages that note the free ones, when there are
	// some, and Fetched how many pages were read; only [GlanceFile] tells them.
	FreePagesSum *uint32 `json:"free_pages_sum,omitempty"`
	Fetched      int     `json:"fetched,omitempty"`
}

// pagesLimit is the size up to which bbolt, too, accounts for each page, and
// each record is decoded, when the agent starts: that costs more than all the
// rest. The structure is followed, and all of it read, at any size: a page that
// is gone must not be found by a task.
const pagesLimit = 64 << 20

// InspectFile reads a state file without changing it. It decodes what the agent
// goes on with and touches the rest; up to 64 MiB it accounts for each page and
// decodes each record. It waits so long for another process that holds the file.
// Its error wraps [ErrLocked], [ErrNewerSchema] or [ErrDamaged], or is the
// system's. A damaged file may end the process.
func InspectFile(path string, wait time.Duration) (Facts, error) {
	return inspectFile(path, wait, func(tx *Tx, f *Facts) error {
		if f.Pages = fileSize(path) <= pagesLimit; f.Pages {
			return errors.Join(walk(tx.bolt), checkPages(tx.bolt), decodeAll(tx))
		}
		return nil
	})
}

// CheckFile is [InspectFile] with all pages, whatever it costs, and with all
// that [Store.Check] asks. What it finds is in its error, which then wraps
// [ErrInvariant], or [ErrDamaged] when the file cannot be used.
func CheckFile(path string, wait time.Duration) (Facts, error) {
	var found []error
	f, err := inspectFile(path, wait, func(tx *Tx, f *Facts) error {
		f.Pages = true
		if err := errors.Join(walk(tx.bolt), checkPages(tx.bolt)); err != nil {
			return err
		}
		if err := decodeAll(tx); err != nil {
			return err
		}
		var err error
		if found, err = check(tx); err != nil {
			return err
		}
		f.Tasks, f.Unfinished = tx.bolt.Bucket(bucketTasks).Stats().KeyN, tx.bolt.Bucket(bucketOpen).Stats().KeyN
		return nil
	})
	return f, errors.Join(append(found, err)...)
}

func fileSize(path string) int64 {
	info, err := os.Stat(path)
	if err != nil {
		return 0
	}
	return info.Size()
}

// inspectFile opens the file for reading only: to write, bbolt looks for free
// pages in a goroutine of its own, in which the fault of a damaged page could
// not be survived.
func inspectFile(path string, wait time.Duration, more func(*Tx, *Facts) error) (f Facts, err error) {
	if err := checkStructure(path); err != nil {
		return f, err
	}
	db, err := openBolt(path, wait, true)
	switch {
	case unavailable(err):
		return f, locked(path, err)
	case err != nil:
		return f, fmt.Errorf("%w: %w", ErrDamaged, err)
	}
	f, err = readFacts(db, more)
	if cerr := db.Close(); cerr != nil && err == nil {
		err = fmt.Errorf("close state file: %w", cerr)
	}
	return f, err
}

func readFacts(db *bolt.DB, more func(*Tx, *Facts) error) (f Facts, err error) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("%w: %v", ErrDamaged, r)
		}
	}()
	err = view(db, func(tx *Tx) error {
		if err := checkVersion(tx.bolt, len(migrations)); err != nil {
			return err
		}
		meta, err := tx.Journal()
		if err != nil {
			return fmt.Errorf("%w: %w", ErrDamaged, err)
		}
		head, err := tx.head()
		if err != nil {
			return fmt.Errorf("%w: %w", ErrDamaged, err)
		}
		f = Facts{
			JournalID: meta.GetJournalId(), PreviousJournalID: meta.GetPreviousJournalId(),
			Node: meta.GetNode(), Generation: meta.GetGeneration(), Seq: head.seq, Transaction: uint64(tx.bolt.ID()),
		}
		for _, check := range []func() error{
			func() error { return present(tx.bolt) }, func() error { return decodable(tx) }, func() error { return more(tx, &f) },
		} {
			if err := check(); err != nil && !errors.Is(err, ErrDamaged) {
				return fmt.Errorf("%w: %w", ErrDamaged, err)
			} else if err != nil {
				return err
			}
		}
		return nil
	})
	return f, err
}

// checkPages accounts for every page: each is used once or free.
func checkPages(tx *bolt.Tx) error {
	var first error
	for err := range tx.Check() { // to its end, or its goroutine would stay
		if first == nil {
			first = err
		}
	}
	return first
}

// present wants every bucket to be there.
func present(tx *bolt.Tx) error {
	for _, name := range buckets {
		if tx.Bucket(name) == nil {
			return fmt.Errorf("bucket %s is not there: %w", name, ErrInvariant)
		}
	}
	return nil
}

// walk touches all that is in the file, as the agent will: through a map.
func walk(tx *bolt.Tx) error {
	sum := byte(0)
	defer func() { runtime.KeepAlive(sum) }()
	return tx.ForEach(func(_ []byte, b *bolt.Bucket) error {
		var last []byte
		return b.ForEach(func(k, v []byte) error {
			if bytes.Compare(k, last) <= 0 {
				return fmt.Errorf("key %x after %x: %w", k, last, ErrInvariant)
			}
			last = k
			for i := 0; i < len(v); i += 512 {
				sum ^= v[i]
			}
			return nil
		})
	})
}

// decodable reads what the agent goes on with: each task that has not ended
// with its steps, the intents, and the frames that the server may still ask
// for. What a flipped bit made of another record hurts nobody but its reader.
func decodable(tx *Tx) error {
	err := tx.Open(func(id string, _ taskv1.TaskState) error {
		if _, err := tx.Task(id); err != nil {
			return err
		}
		return tx.Steps(id, func(uint32, *agentv1.StepRecord) error { return nil })
	})
	if err != nil {
		return err
	}
	if err := tx.Intents(func(*agentv1.IntentRecord) error { return nil }); err != nil {
		return err
	}
	bad, err := checkChain(tx)
	return errors.Join(append(bad, err)...)
}

// decodeAll decodes each record that names itself or has a form.
func decodeAll(tx *Tx) error {
	for _, name := range buckets {
		if err := tx.scan(name, nil, nil, func(k, v []byte) (bool, error) {
			ok := plausible(string(name), k, v)
			switch {
			case ok && bytes.Equal(name, bucketForget):
				ok = tx.get(bucketSeen, k[8:]) != nil
			case ok && bytes.Equal(name, bucketOrder):
				ok = tx.get(bucketTasks, v) != nil
			}
			if !ok {
				return false, wrong("record %s/%x cannot be what was written", name, k)
			}
			return true, nil
		}); err != nil {
			return err
		}
	}
	return nil
}

// plausible reports whether a record can be what was written.
func plausible(bucket string, k, v []byte) bool {
	switch bucket {
	case string(bucketTasks):
		rec := new(agentv1.TaskRecord)
		return readable(v, rec) && rec.GetTaskId() == string(k)
	case string(bucketSteps):
		id, step, ok := bytes.Cut(k, []byte("/"))
		return ok && len(id) > 0 && len(step) == 4 && readable(v, new(agentv1.StepRecord))
	case string(bucketSeen):
		return len(k) > 0 && readable(v, new(agentv1.SeenRecord))
	case string(bucketIntents):
		return readable(v, new(agentv1.IntentRecord))
	case string(bucketForget):
		return len(k) > 8 && len(v) == 0
	case string(bucketOrder):
		return len(k) == 8
	case string(bucketClosing):
		return len(k) == 8 && len(v) > 0
	case string(bucketOutputs):
		return len(k) > 5 && len(v) == 0
	}
	return true
}

// AgainstMark says in words how a file with the facts f stands to the mark beside
// it, which is nil when there is none, and whether it is older than that.
func AgainstMark(f Facts, m *agentv1.JournalMark, sound bool) (string, bool) {
	switch {
	case m == nil:
		return "there is none beside the file", sound && f.Seq > 1
	case !sound:
		return fmt.Sprintf("frame %d of journal %s", m.GetSeq(), m.GetJournalId()), false
	case m.GetJournalId() != f.JournalID:
		return fmt.Sprintf("it is of another journal, %s", m.GetJournalId()), true
	case f.Seq < m.GetSeq() || f.Transaction < m.GetTransaction():
		return fmt.Sprintf("frame %d, commit %d: the file is older", m.GetSeq(), m.GetTransaction()), true
	}
	return fmt.Sprintf("frame %d: the file is not older", m.GetSeq()), false
}
