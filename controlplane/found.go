package controlplane

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"

	"github.com/google/uuid"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/millwright/pki"
	"github.com/gpuaas/millwright/pki/ca"
	"github.com/gpuaas/millwright/pki/trustroot"
	nodev1 "github.com/gpuaas/millwright/proto/millwright/node/v1"
	serverv1 "github.com/gpuaas/millwright/proto/millwright/server/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"

	"github.com/gpuaas/millwright/controlplane/internal/clock"
	"github.com/gpuaas/millwright/controlplane/internal/store"
	"github.com/gpuaas/millwright/controlplane/internal/store/boltstore"
)

// bundleVersion is the version of the founding bundle and the context file.
const bundleVersion = 1

// ErrFounded is wrapped by [Found] when the state directory belongs to another
// cluster already.
var ErrFounded = errors.New("state directory belongs to another cluster")

// Found makes the state of a server for the cluster of bundle, and returns the
// context file for its first operator. Repeated with the same bundle it changes
// nothing and issues the operator's certificate again, so that a lost file
// loses no cluster.
func Found(ctx context.Context, cfg Config, bundle *nodev1.FoundingBundle, trustDomain string) (*nodev1.ContextFile, error) {
	if cfg.Now == nil {
		cfg.Now = clock.Now
	}
	root, operator, err := checkBundle(bundle, trustDomain)
	if err != nil {
		return nil, err
	}
	key, err := pki.RequestKey(bundle.GetOperatorCsr())
	if err != nil {
		return nil, fmt.Errorf("operator_csr: %w", err)
	}
	if err := os.MkdirAll(cfg.StateDir, 0o700); err != nil {
		return nil, fmt.Errorf("make state directory: %w", err)
	}
	if hint := otherOwner(cfg.StateDir); hint != "" {
		return nil, fmt.Errorf("what is made there could not be read by the server%s", hint)
	}
	if err := foundStore(ctx, cfg, root); err != nil {
		return nil, err
	}
	authority, err := ca.Create(cfg.caDir(), ca.Config{TrustDomain: trustDomain, Now: cfg.Now})
	if errors.Is(err, fs.ErrExist) {
		authority, err = ca.Load(cfg.caDir(), ca.Config{TrustDomain: trustDomain, Now: cfg.Now})
	}
	if err != nil {
		return nil, err
	}
	chain, err := authority.Issue(ca.Request{ID: operator, PublicKey: key, TTL: ca.DefaultOperatorTTL})
	if err != nil {
		return nil, err
	}
	sum, cluster := authority.SHA256(), root.Cluster()
	return &nodev1.ContextFile{
		Version: bundleVersion, Name: trustDomain, Server: cfg.AdvertiseAddress, TrustDomain: trustDomain,
		CaCertificates: pki.DERs(authority.Roots()), CaSha256: fmt.Sprintf("%x", sum), Cluster: fmt.Sprintf("%x", cluster),
		OperatorCertificates: pki.DERs(chain),
	}, nil
}

func checkBundle(bundle *nodev1.FoundingBundle, trustDomain string) (*trustroot.Root, pki.ID, error) {
	if v := bundle.GetVersion(); v != bundleVersion {
		return nil, pki.ID{}, fmt.Errorf("founding bundle: version %d: this server knows version %d; make it with the millctl of the same release", v, bundleVersion)
	}
	root, err := trustroot.OpenGenesis(bundle.GetGenesis())
	if err != nil {
		return nil, pki.ID{}, fmt.Errorf("founding bundle: genesis: %w", err)
	}
	if d := root.TrustDomain(); d != trustDomain {
		return nil, pki.ID{}, fmt.Errorf("founding bundle: it is for the trust domain %q, not %q; give that one, or make the bundle again with millctl operator init", d, trustDomain)
	}
	operator, err := pki.NewID(trustDomain, pki.RoleOperator, bundle.GetOperator())
	if err != nil {
		return nil, pki.ID{}, fmt.Errorf("founding bundle: operator: %w", err)
	}
	return root, operator, nil
}

// foundStore makes the store, or checks that the one which is there is of the
// same cluster.
func foundStore(ctx context.Context, cfg Config, root *trustroot.Root) (err error) {
	db, err := boltstore.Create(cfg.storePath())
	if errors.Is(err, boltstore.ErrExists) {
		db, err = boltstore.Open(cfg.storePath(), cfg.look(ctx))
	}
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	ended := make(chan error, 1)
	runWriter(ctx, db, ended)
	defer func() {
		cancel()
		err = errors.Join(err, <-ended, db.Close())
	}()
	cluster := root.Cluster()
	return db.Update(ctx, func(v store.View) (*store.Change, error) {
		row, err := v.Cluster()
		switch {
		case err == nil && bytes.Equal(row.GetCluster(), cluster[:]):
			return nil, nil
		case err == nil:
			return nil, fmt.Errorf("%s holds the cluster %x, and the bundle founds %x: %w; give an empty state_dir, or move this one away",
				cfg.StateDir, row.GetCluster(), cluster, ErrFounded)
		case !errors.Is(err, store.ErrNotFound):
			return nil, err
		}
		return &store.Change{Cluster: &serverv1.ClusterRow{
			TrustDomain: root.TrustDomain(), Cluster: cluster[:], TrustChain: root.Chain(),
			ServerId: uuid.NewString()[:8], CreateTime: timestamppb.New(cfg.Now()),
		}}, nil
	})
}

// readCluster returns what the server was founded with.
func readCluster(ctx context.Context, db *boltstore.Store) (*serverv1.ClusterRow, *trustroot.Root, error) {
	var row *serverv1.ClusterRow
	err := db.View(ctx, func(v store.View) (err error) {
		row, err = v.Cluster()
		return err
	})
	if errors.Is(err, store.ErrNotFound) {
		return nil, nil, errors.New("the server was not founded; run millwright-server init again")
	}
	if err != nil {
		return nil, nil, err
	}
	root, err := trustroot.Open(row.GetTrustChain(), row.GetCluster())
	return row, root, err
}

// authorizer returns who holds a key of root.
func authorizer(root *trustroot.Root) func(string) *taskv1.Authorizer {
	return func(id string) *taskv1.Authorizer {
		out := &taskv1.Authorizer{KeyId: id}
		if key, ok := root.Key(id); ok {
			out.Name = key.GetName()
			if roles := key.GetRoles(); len(roles) > 0 {
				out.Role = roles[0]
			}
		}
		return out
	}
}
