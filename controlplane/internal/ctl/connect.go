package ctl

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"time"

	"github.com/spf13/cobra"

	"github.com/gpuaas/millwright/controlplane/internal/ctl/home"
)

// openHome opens the operator's directory.
func (a *app) openHome() (*home.Home, error) {
	dir, err := home.Dir(a.getenv)
	if err != nil {
		return nil, usagef("%w", err)
	}
	h, err := home.Open(dir)
	return h, homeError(err)
}

// homeError gives an error of package home its exit code.
func homeError(err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, home.ErrNone):
		return &failure{code: exitDenied, err: err}
	case errors.Is(err, home.ErrNoContext), errors.Is(err, fs.ErrNotExist):
		return &failure{code: exitNotFound, err: err}
	case errors.Is(err, home.ErrExists), errors.Is(err, fs.ErrExist), errors.Is(err, home.ErrForeign):
		return &failure{code: exitConflict, err: err}
	case errors.Is(err, home.ErrInvalid):
		return &failure{code: exitUsage, err: err}
	}
	return err
}

// currentContext is the context to use: --context, $MILLWRIGHT_CONTEXT or the
// current one.
func (a *app) currentContext(h *home.Home) (*home.Context, error) {
	name := a.context
	if name == "" {
		name = a.getenv("MILLWRIGHT_CONTEXT")
	}
	c, err := h.Context(name)
	return c, homeError(err)
}

// connect makes the client of the context to use.
func (a *app) connect() (*client, error) {
	h, err := a.openHome()
	if err != nil {
		return nil, err
	}
	at, err := a.currentContext(h)
	if err != nil {
		return nil, err
	}
	id := at.Identity
	if now := a.now(); now.After(id.NotAfter()) {
		return nil, &failure{code: exitDenied, err: fmt.Errorf(
			"the certificate of %s for context %s ended at %s; get a new context file from whoever runs the server, then: millctl context add FILE",
			id.ID, at.File.GetName(), id.NotAfter().Local().Format(time.RFC3339))}
	} else if now.Before(id.NotBefore()) {
		return nil, &failure{code: exitDenied, err: fmt.Errorf(
			"the certificate of %s for context %s begins at %s, and this clock says %s; check the clock",
			id.ID, at.File.GetName(), id.NotBefore().Local().Format(time.RFC3339), now.Local().Format(time.RFC3339))}
	}
	return dial(h, at, a.now)
}

// online runs a command that needs the server.
func (a *app) online(run func(ctx context.Context, c *client, args []string) error) func(*cobra.Command, []string) error {
	return func(cmd *cobra.Command, args []string) error {
		c, err := a.connect()
		if err != nil {
			return err
		}
		return errors.Join(run(cmd.Context(), c, args), c.conn.Close())
	}
}
