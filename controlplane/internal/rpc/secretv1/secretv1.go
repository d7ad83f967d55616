// Package secretv1 serves SecretService: how operators bring the values of
// secrets to the server. No call gives one back.
package secretv1

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/types/known/timestamppb"

	auditv1 "github.com/gpuaas/millwright/proto/millwright/audit/v1"
	secretv1 "github.com/gpuaas/millwright/proto/millwright/secret/v1"
	"github.com/gpuaas/millwright/proto/rpcerr"
	"github.com/gpuaas/millwright/tasks"
	"github.com/gpuaas/millwright/tasks/host"

	"github.com/gpuaas/millwright/controlplane/internal/clock"
	"github.com/gpuaas/millwright/controlplane/internal/crash"
	"github.com/gpuaas/millwright/controlplane/internal/eventlog"
	"github.com/gpuaas/millwright/controlplane/internal/rpc/intercept"
	"github.com/gpuaas/millwright/controlplane/internal/vault"
)

// Vault keeps the values; see [vault.Vault].
type Vault interface {
	Put(what *secretv1.Secret, value []byte, rotate bool) (*secretv1.Secret, error)
	List() []*secretv1.Secret
	Remove(name string, oldOnly bool) ([]*secretv1.Secret, error)
}

// Log records who changed what; see [eventlog.Log].
type Log interface {
	Commit(ctx context.Context, decide func(*eventlog.Tx) error) error
}

// Config is what the service needs.
type Config struct {
	Vault Vault
	Log   Log
	// Now is the wall clock; nil means the machine's.
	Now func() time.Time
}

// Service serves SecretService. It is safe for concurrent use.
type Service struct {
	secretv1.UnimplementedSecretServiceServer
	cfg Config
}

// New returns the service.
func New(cfg Config) *Service {
	if cfg.Now == nil {
		cfg.Now = clock.Now
	}
	return &Service{cfg: cfg}
}

// PutSecret keeps a value. The digest must be the value's: a caller that has the
// wrong one would sign tasks that no node can carry out.
func (s *Service) PutSecret(ctx context.Context, req *secretv1.PutSecretRequest) (*secretv1.PutSecretResponse, error) {
	defer clear(req.GetValue())
	if err := checkPut(req); err != nil {
		return nil, err
	}
	actor := intercept.CallerFrom(ctx).Name()
	kept, err := s.cfg.Vault.Put(&secretv1.Secret{
		Name: req.GetName(), Salt: req.GetSalt(), Sha256: req.GetSha256(), CreatedBy: actor, CreateTime: timestamppb.New(s.cfg.Now()),
	}, req.GetValue(), req.GetRotate())
	switch {
	case errors.Is(err, vault.ErrExists):
		return nil, rpcerr.New(codes.AlreadyExists, "SECRET_EXISTS", "%s (millctl secret rotate)", err.Error())
	case errors.Is(err, vault.ErrNone):
		return nil, rpcerr.New(codes.NotFound, "NO_SECRET", "%s (millctl secret put)", err.Error())
	case err != nil:
		return nil, err
	}
	crash.Point("server.secret.kept")
	err = s.record(ctx, actor, &auditv1.SecretChanged{Name: kept.GetName(), Version: kept.GetVersion(), Salt: kept.GetSalt(), Sha256: kept.GetSha256()})
	if err != nil {
		return nil, err
	}
	return &secretv1.PutSecretResponse{Secret: kept}, nil
}

func checkPut(req *secretv1.PutSecretRequest) error {
	var bad []rpcerr.Violation
	add := func(field, value, rule string) {
		bad = append(bad, rpcerr.Violation{Field: field, Value: value, Rule: rule})
	}
	if !tasks.SecretName(req.GetName()) {
		add("name", clip(req.GetName()), "it must be lower-case letters, digits, - . and _ , at most 63 bytes, and begin with a letter or digit")
	}
	if n := len(req.GetValue()); n == 0 || n > host.MaxSecret {
		add("value", "", fmt.Sprintf("it has %d bytes, and must have 1 to %d", n, host.MaxSecret))
	}
	if len(req.GetSalt()) != tasks.SaltBytes {
		add("salt", "", fmt.Sprintf("it has %d bytes, not %d", len(req.GetSalt()), tasks.SaltBytes))
	}
	h := sha256.New()
	h.Write(req.GetSalt())
	h.Write(req.GetValue())
	if !bytes.Equal(h.Sum(nil), req.GetSha256()) {
		add("sha256", "", "it is not the SHA-256 over salt and value")
	}
	if len(bad) > 0 {
		return rpcerr.Invalid("SECRET_INVALID", bad...)
	}
	return nil
}

// ListSecrets lists all versions.
func (s *Service) ListSecrets(context.Context, *secretv1.ListSecretsRequest) (*secretv1.ListSecretsResponse, error) {
	return &secretv1.ListSecretsResponse{Secrets: s.cfg.Vault.List()}, nil
}

// RemoveSecret removes a secret.
func (s *Service) RemoveSecret(ctx context.Context, req *secretv1.RemoveSecretRequest) (*secretv1.RemoveSecretResponse, error) {
	if !tasks.SecretName(req.GetName()) {
		return nil, rpcerr.Invalid("SECRET_INVALID", rpcerr.Violation{Field: "name", Value: clip(req.GetName()), Rule: "it is no name of a secret"})
	}
	gone, err := s.cfg.Vault.Remove(req.GetName(), req.GetOldVersionsOnly())
	if errors.Is(err, vault.ErrNone) {
		return nil, rpcerr.New(codes.NotFound, "NO_SECRET", "%s", err.Error())
	}
	actor := intercept.CallerFrom(ctx).Name()
	for _, one := range gone {
		err = errors.Join(err, s.record(ctx, actor, &auditv1.SecretChanged{Name: one.GetName(), Version: one.GetVersion(), Removed: true}))
	}
	if err != nil {
		return nil, err
	}
	return &secretv1.RemoveSecretResponse{Removed: gone}, nil
}

func (s *Service) record(ctx context.Context, actor string, what *auditv1.SecretChanged) error {
	err := s.cfg.Log.Commit(ctx, func(tx *eventlog.Tx) error {
		return tx.Append(actor, &auditv1.LogEntry{Entry: &auditv1.LogEntry_SecretChanged{SecretChanged: what}})
	})
	if err == nil {
		crash.Point("server.secret.recorded")
	}
	return err
}

func clip(s string) string { return s[:min(len(s), 64)] }
