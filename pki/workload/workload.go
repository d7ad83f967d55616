// Package workload is a [pki.Source] whose identity comes from the SPIFFE
// Workload API, for example of a SPIRE agent.
package workload

import (
	"context"
	"crypto/x509"
	"fmt"
	"log/slog"

	"github.com/spiffe/go-spiffe/v2/workloadapi"

	"github.com/gpuaas/millwright/pki"
)

// Config is what a [Source] needs.
type Config struct {
	// Addr is the address of the Workload API, for example
	// unix:///run/spire/agent/public/api.sock.
	Addr string
	// Log gets a line for each identity that cannot be used.
	Log *slog.Logger
}

// Source follows the Workload API. It has no identity until the first one has
// come, and keeps the last good one while the API is away.
type Source struct {
	addr    string
	log     *slog.Logger
	current pki.Static
}

// New returns a source. [Source.Run] must run for it to get an identity.
func New(cfg Config) *Source {
	return &Source{addr: cfg.Addr, log: cfg.Log}
}

// Identity returns the newest identity.
func (s *Source) Identity() (*pki.Identity, error) { return s.current.Identity() }

// Run follows the Workload API, over any number of its restarts, until ctx
// ends. It returns an error when the address cannot be used at all.
func (s *Source) Run(ctx context.Context) error {
	err := workloadapi.WatchX509Context(ctx, watcher{s}, workloadapi.WithAddr(s.addr))
	if ctx.Err() != nil {
		return nil //nolint:nilerr // it was told to end
	}
	if err != nil {
		return fmt.Errorf("follow Workload API at %s: %w", s.addr, err)
	}
	return nil
}

type watcher struct{ source *Source }

// OnX509ContextUpdate takes a new identity, if it is one.
func (w watcher) OnX509ContextUpdate(update *workloadapi.X509Context) {
	id, err := identity(update)
	if err != nil {
		w.source.log.Error("identity of the workload api cannot be used", "addr", w.source.addr, "err", err)
		return
	}
	w.source.current.Set(id)
	w.source.log.Info("identity of the workload api taken", "spiffe_id", id.ID.String(), "not_after", id.NotAfter())
}

// OnX509ContextWatchError tells of a try that failed; the next follows by
// itself.
func (w watcher) OnX509ContextWatchError(err error) {
	w.source.log.Warn("workload api does not answer", "addr", w.source.addr, "err", err)
}

func identity(update *workloadapi.X509Context) (*pki.Identity, error) {
	svid := update.DefaultSVID()
	bundle, err := update.Bundles.GetX509BundleForTrustDomain(svid.ID.TrustDomain())
	if err != nil {
		return nil, fmt.Errorf("bundle of %s: %w", svid.ID.TrustDomain(), err)
	}
	roots := append([]*x509.Certificate(nil), bundle.X509Authorities()...)
	return pki.NewIdentity(svid.Certificates, svid.PrivateKey, roots)
}
