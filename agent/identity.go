package agent

import (
	"context"
	"errors"

	"github.com/gpuaas/millwright/agent/internal/enrol"
	"github.com/gpuaas/millwright/agent/internal/session"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
)

// identity is the enrolment as the session uses it.
type identity struct{ *enrol.Enrolment }

// Identity returns what the session proves itself with. One that has ended is
// an error that says what to do.
func (i identity) Identity(context.Context) (session.Identity, error) {
	replaced := i.Renewed()
	end := i.NotAfter()
	if ended := i.Ended(); ended != "" {
		return session.Identity{Server: i.Server(), Replaced: replaced}, errors.New(ended)
	}
	return session.Identity{Server: i.Server(), TLS: i.TLS(), NotAfter: end, Generation: i.Generation(), Replaced: replaced}, nil
}

// trust is the enrolment's trust root as the session uses it.
type trust struct{ *enrol.Enrolment }

// Version is the version of the root.
func (t trust) Version() uint64 { return t.Trust().Version() }

// Update verifies and stores newer roots.
func (t trust) Update(_ context.Context, updates []*taskv1.Envelope) error {
	_, err := t.ExtendTrust(updates)
	return err
}
