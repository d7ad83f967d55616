package metrics

import (
	"strings"
	"sync"
)

// mostNames is how many different texts of one node become values of labels, from
// its first scrape until it is evicted or the server is started again: 64 GPUs
// with their codes have fewer, and a node that makes up new ones at each report
// adds no series for ever.
const mostNames = 1024

// names are the texts of nodes that were used as values of labels. It is safe for
// concurrent use.
type names struct {
	mu   sync.Mutex
	seen map[string]map[string]bool // by node; guarded by mu
}

// of is the text, or otherwise when the node has used up what it may say.
func (n *names) of(node, text, otherwise string) string {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.seen == nil {
		n.seen = map[string]map[string]bool{}
	}
	said := n.seen[node]
	if said == nil {
		said = map[string]bool{}
		n.seen[node] = said
	}
	switch {
	case text == "", said[text]:
		return text
	case len(said) >= mostNames:
		return otherwise
	}
	said[text] = true
	return text
}

// keep forgets the nodes that are not members any more.
func (n *names) keep(members map[string]bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for node := range n.seen {
		if !members[node] {
			delete(n.seen, node)
		}
	}
}

// label bounds what a node said.
func label(s string) string {
	if len(s) <= maxLabel {
		return s
	}
	return strings.ToValidUTF8(s[:maxLabel], "")
}
