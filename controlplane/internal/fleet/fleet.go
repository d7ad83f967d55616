// Package fleet is the nodes: who belongs to the cluster, how a host joins and
// how a node leaves, and what is known of each.
package fleet

import (
	"cmp"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	auditv1 "github.com/gpuaas/millwright/proto/millwright/audit/v1"
	serverv1 "github.com/gpuaas/millwright/proto/millwright/server/v1"

	"github.com/gpuaas/millwright/controlplane/internal/clock"
	"github.com/gpuaas/millwright/controlplane/internal/crash"
	"github.com/gpuaas/millwright/controlplane/internal/dispatch"
	"github.com/gpuaas/millwright/controlplane/internal/eventlog"
	"github.com/gpuaas/millwright/controlplane/internal/rpc/enrolv1"
	"github.com/gpuaas/millwright/controlplane/internal/rpc/intercept"
	"github.com/gpuaas/millwright/controlplane/internal/rpc/nodev1"
	"github.com/gpuaas/millwright/controlplane/internal/store"
)

// tokenBytes is the size of the random part of a join token.
const tokenBytes = 32

// Log is where decisions are committed.
type Log interface {
	// Commit is [eventlog.Log.Commit].
	Commit(ctx context.Context, decide func(*eventlog.Tx) error) error
}

// Sessions are the streams of nodes.
type Sessions interface {
	// Cut ends a node's session.
	Cut(node, reason, message string)
	// Contact returns when a node was last heard, zero when that is stored or
	// never was, and whether it has a session.
	Contact(node string) (dispatch.Contact, bool)
}

// Board knows how fresh the word of nodes about their GPUs is.
type Board interface {
	// Overdue returns why what is known of a node's GPUs is not of now; empty
	// when it is.
	Overdue(node string) (reason, message string)
	// Forget drops what is known of a node.
	Forget(node string)
}

// Config is what a fleet needs.
type Config struct {
	// Log commits decisions.
	Log Log
	// Reader reads the store.
	Reader store.Reader
	// Sessions are the streams of nodes.
	Sessions Sessions
	// Board knows how fresh the word of nodes about their GPUs is; nil means that
	// it counts for as long as it is not taken back.
	Board Board
	// Logger gets what an operator of the server should know.
	Logger *slog.Logger
	// Actor is the server's own SPIFFE id.
	Actor string
	// NodeID returns the SPIFFE id of a node.
	NodeID func(name string) string
	// Now is the wall clock; nil means the machine's.
	Now func() time.Time
	// HistoryAge and HistoryCount bound the history of a node's conditions; 0
	// means 90 days and 10,000 changes.
	HistoryAge   time.Duration
	HistoryCount int
}

// Fleet is the nodes. It is safe for concurrent use.
type Fleet struct {
	cfg Config

	mu      sync.RWMutex
	members map[string]member // guarded by mu; by node

	deniedMu sync.Mutex
	denied   map[denial]uint32 // guarded by deniedMu; not yet in the log
}

// member is what membership is judged by.
type member struct {
	generation uint64
	evicted    bool
}

// New returns a fleet that knows no node until [Fleet.Load].
func New(cfg Config) *Fleet {
	if cfg.Now == nil {
		cfg.Now = clock.Now
	}
	cfg.HistoryAge = cmp.Or(cfg.HistoryAge, defaultHistoryAge)
	cfg.HistoryCount = cmp.Or(cfg.HistoryCount, defaultHistoryCount)
	return &Fleet{cfg: cfg, members: map[string]member{}, denied: map[denial]uint32{}}
}

// Load reads who belongs to the cluster. Call it before the first RPC.
func (f *Fleet) Load(ctx context.Context) error {
	for after, more := "", true; more; {
		var rows []*serverv1.NodeRow
		err := f.cfg.Reader.View(ctx, func(v store.View) (err error) {
			rows, err = v.Nodes(after, page)
			return err
		})
		if err != nil {
			return fmt.Errorf("load nodes: %w", err)
		}
		more = len(rows) == page
		f.mu.Lock()
		for _, r := range rows {
			after = r.GetName()
			f.members[after] = member{r.GetGeneration(), r.GetEvicted()}
		}
		f.mu.Unlock()
	}
	return nil
}

// CheckMember implements [intercept.Members].
func (f *Fleet) CheckMember(_ context.Context, node string, generation uint64) error {
	f.mu.RLock()
	m, known := f.members[node]
	f.mu.RUnlock()
	switch {
	case !known || m.generation == 0:
		return fmt.Errorf("node %s is %w: this server does not know it; let it join with: millctl node token create %s", node, intercept.ErrNotMember, node)
	case m.evicted:
		return fmt.Errorf("node %s is %w: it was evicted; let it join again with: millctl node token create %s", node, intercept.ErrNotMember, node)
	case generation != 0 && generation != m.generation:
		return fmt.Errorf("node %s is %w: a host has joined under this name since (enrolment %d, this one has %d)", node, intercept.ErrNotMember, m.generation, generation)
	}
	return nil
}

// CheckKey implements [enrolv1.Keys].
func (f *Fleet) CheckKey(ctx context.Context, node string, generation uint64, keySHA256 [sha256.Size]byte) error {
	if err := f.CheckMember(ctx, node, generation); err != nil {
		return err
	}
	return f.cfg.Reader.View(ctx, func(v store.View) error {
		row, err := v.Node(node)
		if err != nil {
			return fmt.Errorf("read node %s: %w", node, err)
		}
		// A certificate without a generation fits any; here that would let a key
		// of long ago in.
		if generation != row.GetGeneration() || row.GetEvicted() || string(row.GetKeySha256()) != string(keySHA256[:]) {
			return fmt.Errorf("node %s joined with another key: let it join again with: millctl node token create %s --rejoin", node, node)
		}
		return nil
	})
}

// refresh reads the membership of one node again. Whoever comes last reads what
// is newest. It is done also for a caller that is gone: what it changed is
// stored, and must count.
func (f *Fleet) refresh(ctx context.Context, node string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.cfg.Reader.View(context.WithoutCancel(ctx), func(v store.View) error {
		row, err := v.Node(node)
		if err != nil {
			return err
		}
		f.members[node] = member{row.GetGeneration(), row.GetEvicted()}
		return nil
	})
}

// CreateToken implements [nodev1.Fleet]: only the hash of the token is kept.
func (f *Fleet) CreateToken(ctx context.Context, actor, node string, ttl time.Duration, rejoin bool) (token string, expires time.Time, err error) {
	secret := make([]byte, tokenBytes)
	if _, err := rand.Read(secret); err != nil {
		return "", time.Time{}, fmt.Errorf("make join token: %w", err)
	}
	token = base64.RawURLEncoding.EncodeToString(secret)
	hash := sha256.Sum256([]byte(token))
	expires = f.cfg.Now().Add(ttl).Truncate(time.Second)
	crash.Point("server.token.before")
	err = f.cfg.Log.Commit(ctx, func(tx *eventlog.Tx) error {
		if err := checkName(tx, node, rejoin); err != nil {
			return err
		}
		entry := &auditv1.LogEntry{Entry: &auditv1.LogEntry_TokenCreated{TokenCreated: &auditv1.TokenCreated{
			Node: node, ExpireTime: timestamppb.New(expires)}}}
		if err := tx.Append(actor, entry); err != nil {
			return err
		}
		tx.PutToken(&serverv1.TokenRow{TokenSha256: hash[:], Node: node, ExpireTime: timestamppb.New(expires), CreateIndex: entry.GetIndex(), Rejoin: rejoin})
		return nil
	})
	if err == nil {
		crash.Point("server.token.committed")
		err = f.refresh(ctx, node)
	}
	return token, expires, err
}

// checkName holds what a person says of a name against what is known of it.
func checkName(tx *eventlog.Tx, node string, rejoin bool) error {
	row, err := tx.Node(node)
	switch {
	case err != nil && !errors.Is(err, store.ErrNotFound):
		return err
	case rejoin && row.GetGeneration() == 0:
		return nodev1.ErrNeverJoined
	case !rejoin && isMember(row):
		return nodev1.ErrMember
	}
	return nil
}

func isMember(row *serverv1.NodeRow) bool { return row.GetGeneration() > 0 && !row.GetEvicted() }

// RedeemToken implements [enrolv1.Tokens].
func (f *Fleet) RedeemToken(ctx context.Context, r enrolv1.Redemption) (enrolv1.Enrolment, error) {
	var out enrolv1.Enrolment
	fresh, node := false, ""
	crash.Point("server.join.before")
	err := f.cfg.Log.Commit(ctx, func(tx *eventlog.Tx) (err error) {
		out, fresh, node, err = f.redeem(tx, r)
		return err
	})
	if err != nil {
		f.deny(node, err)
		return enrolv1.Enrolment{}, err
	}
	crash.Point("server.join.committed")
	if err := f.refresh(ctx, out.Node); err != nil {
		return enrolv1.Enrolment{}, err
	}
	if fresh {
		f.cfg.Sessions.Cut(out.Node, "EVICTED", "a host has joined under this name since")
	}
	return out, nil
}

// redeem decides about a token; see [enrolv1.Tokens]. It names the node also
// when the token is not good, once it is known.
func (f *Fleet) redeem(tx *eventlog.Tx, r enrolv1.Redemption) (out enrolv1.Enrolment, fresh bool, name string, err error) {
	token, err := tx.Token(r.TokenSHA256[:])
	if errors.Is(err, store.ErrNotFound) {
		return out, false, "", enrolv1.ErrTokenUnknown
	}
	if err != nil {
		return out, false, "", err
	}
	node, err := tx.Node(token.GetNode())
	if err != nil {
		return out, false, token.GetNode(), err
	}
	name = token.GetNode()
	switch {
	case !r.Now.Before(token.GetExpireTime().AsTime()):
		return out, false, name, enrolv1.ErrTokenExpired
	case len(token.GetKeySha256()) > 0:
		current := string(token.GetKeySha256()) == string(r.KeySHA256[:]) &&
			token.GetGeneration() == node.GetGeneration() && !node.GetEvicted()
		if !current {
			return out, false, name, enrolv1.ErrTokenUsed
		}
		return enrolv1.Enrolment{Node: name, Generation: token.GetGeneration()}, false, name, nil
	case token.GetCreateIndex() < node.GetEvictIndex():
		return out, false, name, enrolv1.ErrTokenVoid
	case isMember(node) && !token.GetRejoin():
		return out, false, name, enrolv1.ErrTokenTaken
	}
	token.KeySha256, token.Generation = r.KeySHA256[:], node.GetGeneration()+1
	tx.PutToken(token)
	err = tx.Append(f.cfg.NodeID(name), &auditv1.LogEntry{Entry: &auditv1.LogEntry_NodeJoined{NodeJoined: &auditv1.NodeJoined{
		Node: name, Generation: token.GetGeneration(), KeySha256: r.KeySHA256[:], Hostname: r.Hostname}}})
	return enrolv1.Enrolment{Node: name, Generation: token.GetGeneration()}, true, name, err
}
