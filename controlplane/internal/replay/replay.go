// Package replay holds the rows of a store against its event log: it projects
// the log once more, into an empty store, and compares. Rows that were changed
// in another way than through the log are found, and so is a projection that
// depends on more than the log.
package replay

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	auditv1 "github.com/gpuaas/millwright/proto/millwright/audit/v1"
	serverv1 "github.com/gpuaas/millwright/proto/millwright/server/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"

	"github.com/gpuaas/millwright/controlplane/internal/eventlog"
	"github.com/gpuaas/millwright/controlplane/internal/store"
)

// A page of the log.
const (
	pageEntries = 512
	pageBytes   = 4 << 20
)

// Store is what the log is read into.
type Store interface {
	store.Reader
	store.Writer
}

// Rows projects the log of from into the empty store into, as how says but for
// its writer and its clock, and returns what differs, a line for each row:
// entries that come out with other bytes, tasks with their envelopes, conditions
// of GPUs, and of nodes what follows from the log. What a node says of itself
// when it connects, how far its journals are read, requests and join tokens are
// in no entry and are not compared.
func Rows(ctx context.Context, from store.Reader, into Store, how eventlog.Config) (differ []string, err error) {
	if err := again(ctx, from, into, how); err != nil {
		return nil, err
	}
	err = from.View(ctx, func(was store.View) error {
		return into.View(ctx, func(is store.View) error {
			c := &comparison{was: was, is: is}
			err := errors.Join(c.entries(), c.tasks(), c.nodes())
			differ = c.differ
			return err
		})
	})
	return differ, err
}

// again appends the entries of a log to another one, at their own times.
func again(ctx context.Context, from store.Reader, into Store, how eventlog.Config) error {
	var now time.Time
	how.Writer, how.Now = into, func() time.Time { return now }
	log := eventlog.New(how)
	for next := uint64(1); ; {
		var page []store.Entry
		err := from.View(ctx, func(v store.View) (err error) {
			page, err = v.Entries(next, pageEntries, pageBytes)
			return err
		})
		if err != nil || len(page) == 0 {
			return err
		}
		for _, e := range page {
			next = e.Index + 1
			entry, err := e.Decode()
			if err != nil {
				return fmt.Errorf("read log entry %d: %w", e.Index, err)
			}
			now = entry.GetRecordTime().AsTime()
			if err := appendAgain(ctx, log, e.Index, entry); err != nil {
				return err
			}
		}
	}
}

// appendAgain appends an entry, unless the one before it has brought it about.
func appendAgain(ctx context.Context, log *eventlog.Log, index uint64, entry *auditv1.LogEntry) error {
	err := log.Commit(ctx, func(tx *eventlog.Tx) error {
		if tx.LastIndex() >= index {
			return nil
		}
		if f := entry.GetNodeFrame(); f != nil {
			f.NotApplied = "" // is said again
		}
		return tx.Append(entry.GetActor(), entry)
	})
	if err != nil {
		return fmt.Errorf("project log entry %d again: %w", index, err)
	}
	return nil
}

// comparison holds two stores against each other.
type comparison struct {
	was, is store.View
	differ  []string
}

func (c *comparison) say(format string, args ...any) {
	c.differ = append(c.differ, fmt.Sprintf(format, args...))
}

func (c *comparison) entries() error {
	if was, is := c.was.LastIndex(), c.is.LastIndex(); was != is {
		c.say("the log has %d entries, and comes out with %d", was, is)
	}
	for next := uint64(1); ; {
		was, err := c.was.Entries(next, pageEntries, pageBytes)
		if err != nil || len(was) == 0 {
			return err
		}
		is, err := c.is.Entries(next, len(was), math.MaxInt)
		if err != nil {
			return err
		}
		for i, e := range was {
			next = e.Index + 1
			if i < len(is) && !bytes.Equal(e.Bytes, is[i].Bytes) {
				c.say("log entry %d comes out with other bytes", e.Index)
			}
		}
	}
}

func (c *comparison) tasks() error {
	ids := map[string]bool{}
	for _, v := range []store.View{c.was, c.is} {
		list, err := v.TaskIDs("", math.MaxInt)
		if err != nil {
			return err
		}
		for _, id := range list {
			if !ids[id] {
				ids[id] = true
				if err := c.task(id); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

func (c *comparison) task(id string) error {
	var rows [2]*serverv1.TaskRow
	var envelopes [2]*taskv1.Envelope
	for i, v := range []store.View{c.was, c.is} {
		row, err := v.Task(id)
		if errors.Is(err, store.ErrNotFound) {
			continue
		}
		if err != nil {
			return err
		}
		rows[i] = row
		if envelopes[i], err = v.Envelope(row.GetEnvelopeSha256()); err != nil && !errors.Is(err, store.ErrNotFound) {
			return err
		}
	}
	switch {
	case rows[0] == nil:
		c.say("task %s is in the log and not in the store", id)
	case rows[1] == nil:
		c.say("task %s is in the store and not in the log", id)
	default:
		c.same("task "+id, rows[0].GetTask(), rows[1].GetTask())
		rows[0].Task, rows[1].Task = nil, nil
		c.same("delivery of task "+id, rows[0], rows[1])
		c.same("envelope of task "+id, envelopes[0], envelopes[1])
	}
	return nil
}

func (c *comparison) nodes() error {
	names := map[string]bool{}
	for _, v := range []store.View{c.was, c.is} {
		list, err := v.Nodes("", math.MaxInt)
		if err != nil {
			return err
		}
		for _, n := range list {
			if !names[n.GetName()] {
				names[n.GetName()] = true
				if err := errors.Join(c.node(n.GetName()), c.health(n.GetName())); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

func (c *comparison) node(name string) error {
	rows := [2]*serverv1.NodeRow{}
	for i, v := range []store.View{c.was, c.is} {
		row, err := v.Node(name)
		if err != nil && !errors.Is(err, store.ErrNotFound) {
			return err
		}
		rows[i] = fromLog(name, row)
	}
	c.same("node "+name, rows[0], rows[1])
	return nil
}

// fromLog is what of a node follows from the log. A node that only connected is
// not in it.
func fromLog(name string, n *serverv1.NodeRow) *serverv1.NodeRow {
	out := &serverv1.NodeRow{
		Name: name, Generation: n.GetGeneration(), JoinTime: n.GetJoinTime(), KeySha256: n.GetKeySha256(),
		Evicted: n.GetEvicted(), EvictReason: n.GetEvictReason(), EvictIndex: n.GetEvictIndex(),
		Intents: n.GetIntents(), LostIntents: n.GetLostIntents(),
	}
	for _, found := range n.GetFound() {
		switch found.GetType() {
		case "JournalGap", "JournalFork", "EventsNotApplied":
			out.Found = append(out.Found, found)
		}
	}
	return out
}

func (c *comparison) health(name string) error {
	was, err := c.was.Health(name, math.MaxInt)
	if err != nil {
		return err
	}
	is, err := c.is.Health(name, math.MaxInt)
	if err != nil {
		return err
	}
	if len(was) != len(is) {
		c.say("node %s has %d conditions of its GPUs, and %d from the log", name, len(was), len(is))
		return nil
	}
	for i := range was {
		c.same("a condition of the GPUs of node "+name, was[i], is[i])
	}
	return nil
}

// same names the fields in which two rows differ.
func (c *comparison) same(what string, was, is proto.Message) {
	if proto.Equal(was, is) {
		return
	}
	a, b := was.ProtoReflect(), is.ProtoReflect()
	fields := a.Descriptor().Fields()
	for i := range fields.Len() {
		if fd := fields.Get(i); a.Has(fd) != b.Has(fd) || !a.Get(fd).Equal(b.Get(fd)) {
			c.say("%s: %s is %s, and from the log alone %s", what, fd.Name(), show(a, fd), show(b, fd))
		}
	}
}

// show shows a field shortly, and no bytes of it.
func show(m protoreflect.Message, fd protoreflect.FieldDescriptor) string {
	switch {
	case !m.Has(fd):
		return "not set"
	case fd.IsList(), fd.IsMap(), fd.Kind() == protoreflect.BytesKind, fd.Kind() == protoreflect.MessageKind:
		return "another"
	case fd.Kind() == protoreflect.EnumKind:
		if v := fd.Enum().Values().ByNumber(m.Get(fd).Enum()); v != nil {
			return string(v.Name())
		}
	}
	return fmt.Sprint(m.Get(fd).Interface())
}
