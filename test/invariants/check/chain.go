package check

import (
	"bytes"
	"crypto/sha256"
	"fmt"
)

// chain recomputes each hash.
func (c *run) chain() {
	for i, e := range c.h.Server.Entries {
		switch {
		case e.GetIndex() != uint64(i)+1 || e.GetEntry().GetIndex() != e.GetIndex():
			c.fail(Chain, "", "", "entry %d of the log has the index %d, and says that it has %d", i+1, e.GetIndex(), e.GetEntry().GetIndex())
		case !same(e.GetHash(), e.GetBytes()):
			c.fail(Chain, "", "", "entry %d is not what its hash is of", e.GetIndex())
		}
	}
	gaps := c.gaps()
	for _, j := range sortedKeys(c.sent) {
		c.links(j, c.sent[j], gaps)
	}
	for _, n := range c.h.Nodes {
		var frames []frame
		for _, f := range n.Frames {
			frames = append(frames, frame{event: f.GetEvent(), bytes: f.GetBytes(), generation: n.Head.GetMeta().GetGeneration()})
			if !same(f.GetHash(), f.GetBytes()) || f.GetSeq() != f.GetEvent().GetSeq() || !bytes.Equal(f.GetPrevHash(), f.GetEvent().GetPrevHash()) {
				c.fail(Chain, n.Name, "", "frame %d is not what its line says", f.GetSeq())
			}
		}
		first, last := n.Head.GetFirstSeq(), n.Head.GetLastSeq()
		switch {
		case len(frames) == 0 && first <= last:
			c.fail(Chain, n.Name, "", "its head names frames %d to %d, and there are none", first, last)
		case len(frames) > 0 && (frames[0].event.GetSeq() != first || frames[len(frames)-1].event.GetSeq() < last):
			c.fail(Chain, n.Name, "", "its head names frames %d to %d, and there are %d to %d", first, last, frames[0].event.GetSeq(), frames[len(frames)-1].event.GetSeq())
		}
		c.links(journal{n.Name, n.Head.GetMeta().GetJournalId()}, frames, nil)
	}
}

// gap is a stretch of a journal that nobody has any more.
type gap struct {
	journal
	to uint64
}

func (c *run) gaps() map[gap]bool {
	out := map[gap]bool{}
	for _, e := range c.h.Server.Entries {
		if g := e.GetEntry().GetJournalGap(); g != nil {
			out[gap{journal{g.GetNode(), g.GetJournalId()}, g.GetToSeq()}] = true
		}
	}
	return out
}

// links follows the frames of one journal from one to the next.
func (c *run) links(j journal, frames []frame, gaps map[gap]bool) {
	for i, f := range frames {
		seq := f.event.GetSeq()
		if f.event.GetJournalId() != j.id {
			c.fail(Chain, j.node, "", "frame %d of journal %s says that it is of journal %s", seq, j.id, f.event.GetJournalId())
		}
		switch {
		case seq == 1:
			o := f.event.GetJournalOpened()
			if want := firstHash(j.node, o.GetGeneration(), o.GetPreviousJournalId()); o == nil || i != 0 || !bytes.Equal(f.event.GetPrevHash(), want) {
				c.fail(Chain, j.node, "", "frame 1 of journal %s does not begin it", j.id)
			}
		case gaps[gap{j, seq}]:
		case i == 0 && gaps != nil:
			c.fail(Chain, j.node, "", "the first frame of journal %s in the log is %d", j.id, seq)
		case i == 0: // what was before it was acknowledged, and is not kept
		case seq != frames[i-1].event.GetSeq()+1:
			c.fail(Chain, j.node, "", "frame %d of journal %s follows frame %d", seq, j.id, frames[i-1].event.GetSeq())
		case !same(f.event.GetPrevHash(), frames[i-1].bytes):
			c.fail(Chain, j.node, "", "frame %d of journal %s does not name the frame before it", seq, j.id)
		}
	}
}

// firstHash is what the first frame of a journal chains to.
func firstHash(node string, generation uint64, previous string) []byte {
	sum := sha256.Sum256(fmt.Appendf(nil, "%s\x00%d\x00%s", node, generation, previous))
	return sum[:]
}

// kept compares each node's journal with what the server has of it.
func (c *run) kept() {
	for _, n := range c.h.Nodes {
		j := journal{n.Name, n.Head.GetMeta().GetJournalId()}
		_, gone := c.h.Gone[n.Name]
		sent := map[uint64]frame{}
		for _, f := range c.sent[j] {
			sent[f.event.GetSeq()] = f
		}
		own := map[uint64]bool{}
		for _, f := range n.Frames {
			own[f.GetSeq()] = true
			has, there := sent[f.GetSeq()]
			switch {
			case there && !bytes.Equal(has.bytes, f.GetBytes()):
				c.fail(Kept, n.Name, taskOf(f.GetEvent()), "frame %d is another one in the server's log", f.GetSeq())
			case !there && f.GetSeq() <= n.Head.GetAcknowledgedSeq():
				c.fail(Kept, n.Name, taskOf(f.GetEvent()), "frame %d was acknowledged, and is not in the server's log", f.GetSeq())
			case !there && !gone && f.GetEvent().GetFinished() != nil:
				c.fail(Kept, n.Name, taskOf(f.GetEvent()), "the end of the task, frame %d, is not in the server's log", f.GetSeq())
			}
		}
		for seq, f := range sent {
			if !own[seq] && seq >= n.Head.GetFirstSeq() {
				c.fail(Kept, n.Name, taskOf(f.event), "the server has frame %d, and the node does not", seq)
			}
		}
		row := c.h.Server.Journals[n.Name]
		if row.GetJournalId() == j.id && len(c.sent[j]) > 0 {
			last := c.sent[j][len(c.sent[j])-1]
			if row.GetLastSeq() != last.event.GetSeq() || !same(row.GetLastSha256(), last.bytes) {
				c.fail(Kept, n.Name, "", "the server counts %d frames of journal %s, and the last in its log is %d", row.GetLastSeq(), j.id, last.event.GetSeq())
			}
		}
	}
}
