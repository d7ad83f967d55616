package agentv1

import (
	"context"
	"errors"
	"slices"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
	serverv1 "github.com/gpuaas/millwright/proto/millwright/server/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"

	"github.com/gpuaas/millwright/controlplane/internal/rpc/intercept"
	"github.com/gpuaas/millwright/controlplane/internal/store"
	"github.com/gpuaas/millwright/controlplane/internal/vault"
)

// Secrets keeps the values of secrets; see [vault.Vault].
type Secrets interface {
	// Value returns the value of the version of a name that has the digest.
	Value(name string, salt, sum []byte) ([]byte, error)
}

// mayHave are the states of a task in which its node may get what it names. A
// task that has succeeded is among them: its intent may have to be restored.
var mayHave = []taskv1.TaskState{
	taskv1.TaskState_TASK_STATE_ASSIGNED, taskv1.TaskState_TASK_STATE_ACCEPTED, taskv1.TaskState_TASK_STATE_WAITING,
	taskv1.TaskState_TASK_STATE_RUNNING, taskv1.TaskState_TASK_STATE_HELD, taskv1.TaskState_TASK_STATE_SUCCEEDED,
}

// FetchSecret gives a node the value of a secret that the leaf of one of its own
// tasks names. Which version that is, the digest in the leaf says: a signature
// from before a rotation gets the value from before, or none.
func (s *Service) FetchSecret(ctx context.Context, req *agentv1.FetchSecretRequest) (*agentv1.FetchSecretResponse, error) {
	caller := intercept.CallerFrom(ctx)
	digest, err := s.named(ctx, caller.ID.Name, req)
	if err != nil {
		return nil, err
	}
	value, err := s.cfg.Secrets.Value(digest.GetReference(), digest.GetSalt(), digest.GetSha256())
	switch {
	case errors.Is(err, vault.ErrNone):
		return nil, status.Errorf(codes.FailedPrecondition,
			"the control plane has no secret %s with the value that was signed: it was removed or rotated since; put it, and sign the task again", digest.GetReference())
	case err != nil:
		s.cfg.Logger.ErrorContext(ctx, "secret not given", "node", caller.ID.Name, "task_id", req.GetTaskId(), "secret", digest.GetReference(), "err", err)
		return nil, status.Error(codes.Unavailable, "the control plane cannot open the secret now; its log says why")
	}
	return &agentv1.FetchSecretResponse{Value: value}, nil
}

// named returns the digest of the secret in the leaf of the node's own task.
func (s *Service) named(ctx context.Context, node string, req *agentv1.FetchSecretRequest) (*taskv1.SecretDigest, error) {
	if err := s.belongs(ctx, node, req.GetTaskId()); err != nil {
		return nil, err
	}
	var row *serverv1.TaskRow
	err := s.cfg.Reader.View(ctx, func(v store.View) (err error) {
		row, err = v.Task(req.GetTaskId())
		return err
	})
	if err != nil {
		return nil, err
	}
	if !slices.Contains(mayHave, row.GetTask().GetState()) {
		return nil, status.Errorf(codes.FailedPrecondition, "task %s is %s, and gets no secret", clip(req.GetTaskId()), row.GetTask().GetState())
	}
	leaf := new(taskv1.TaskLeaf)
	if err := proto.Unmarshal(row.GetSignedLeaf().GetLeaf(), leaf); err != nil {
		return nil, err
	}
	for _, d := range leaf.GetSecretDigests() {
		if d.GetReference() == req.GetReference() {
			return d, nil
		}
	}
	return nil, status.Errorf(codes.NotFound, "task %s names no secret %s", clip(req.GetTaskId()), clip(req.GetReference()))
}
