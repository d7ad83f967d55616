package state

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"

	"google.golang.org/protobuf/proto"

	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
)

// glance is a look at what an agent goes on with.
type glance struct {
	pages   *pageReader
	meta    map[string][]byte
	open    []string
	journal *agentv1.JournalMeta
	head    head
	frames  *chain
	wrong   error
}

// GlanceFile reads of a state file what an agent goes on with: the tasks that
// have not ended with their steps, the intents, and the frames that the server
// does not have. What it costs does not grow with the history. It follows no page
// that it has not looked at, so that a damaged file does not end the process. Its
// error wraps [ErrDamaged] when anything is not as an agent leaves it.
func GlanceFile(path string) (f Facts, err error) {
	file, err := os.Open(path)
	if err != nil {
		return f, fmt.Errorf("open state file: %w", err)
	}
	defer file.Close() // it was only read
	metas, problems := openPages(file)
	if err := errors.Join(problems...); err != nil {
		return f, damage("", err)
	}
	g := &glance{pages: &pageReader{file: file, meta: metas[0], strict: true, bad: damage}, meta: map[string][]byte{}}
	for _, part := range []func() error{g.start, g.rest} {
		if err := errors.Join(part(), g.wrong); err != nil && (errors.Is(err, ErrDamaged) || unavailable(err)) {
			return f, err
		} else if err != nil {
			return f, fmt.Errorf("%w: %w", ErrDamaged, err)
		}
	}
	sum, err := g.pages.freePagesSum()
	if err != nil {
		return f, damage("", err)
	}
	return Facts{
		JournalID: g.journal.GetJournalId(), PreviousJournalID: g.journal.GetPreviousJournalId(),
		Node: g.journal.GetNode(), Generation: g.journal.GetGeneration(), Seq: g.head.seq, Transaction: metas[0].transaction,
		FreePagesSum: sum, Fetched: g.pages.fetched,
	}, nil
}

// start reads what says where the rest is.
func (g *glance) start() error {
	all := []span{{}}
	g.pages.want = map[string][]span{string(bucketMeta): all, string(bucketOpen): all, string(bucketIntents): all}
	g.pages.record = func(bucket string, k, v []byte) {
		switch bucket {
		case string(bucketMeta):
			g.meta[string(k)] = bytes.Clone(v)
		case string(bucketOpen):
			g.open = append(g.open, string(k))
		default:
			g.plausible(bucket, k, v)
		}
	}
	if err := g.pages.walk(); err != nil {
		return err
	}
	for _, name := range buckets {
		if !slices.Contains(g.pages.buckets, string(name)) {
			return wrong("bucket %s is not there", name)
		}
	}
	if v := g.meta[string(keyVersion)]; string(v) != strconv.Itoa(len(migrations)) {
		return wrong("its schema version is %q", v)
	}
	g.journal = new(agentv1.JournalMeta)
	if err := proto.Unmarshal(g.meta[string(keyJournal)], g.journal); err != nil {
		return fmt.Errorf("decode the journal's record: %w", err)
	}
	var err error
	g.head, err = decodeHead(g.meta[string(keyHead)])
	return err
}

// rest reads the tasks that have not ended and the frames to be sent.
func (g *glance) rest() error {
	acked := decodeNumber(g.meta[string(keyAcked)])
	g.pages.want = map[string][]span{string(bucketFrames): {{from: number(acked)}}}
	missing := map[string]bool{}
	for _, id := range g.open {
		missing[id] = true
		tasks, steps := string(bucketTasks), string(bucketSteps)
		g.pages.want[tasks] = append(g.pages.want[tasks], span{[]byte(id), []byte(id + "\x00")})
		g.pages.want[steps] = append(g.pages.want[steps], span{[]byte(id + "/"), []byte(id + "0")})
	}
	g.frames = &chain{meta: g.journal}
	g.pages.record = func(bucket string, k, v []byte) {
		switch bucket {
		case string(bucketFrames):
			g.frames.frame(k, v)
		case string(bucketTasks):
			delete(missing, string(k))
			g.plausible(bucket, k, v)
		default:
			g.plausible(bucket, k, v)
		}
	}
	if err := g.pages.walk(); err != nil {
		return err
	}
	for id := range missing {
		return wrong("task %s has not ended and is not there", id)
	}
	if acked < g.head.seq && g.frames.last.seq == 0 {
		return wrong("the frames from %d to %d are not there", acked+1, g.head.seq)
	}
	return errors.Join(g.frames.end(g.head)...)
}

func (g *glance) plausible(bucket string, k, v []byte) {
	if !plausible(bucket, k, v) && g.wrong == nil {
		g.wrong = wrong("record %s/%x cannot be what was written", bucket, k)
	}
}
