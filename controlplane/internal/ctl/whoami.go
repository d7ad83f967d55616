package ctl

import (
	"bytes"
	"context"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/gpuaas/millwright/controlplane/internal/ctl/home"
	nodev1 "github.com/gpuaas/millwright/proto/millwright/node/v1"
)

// maxSkew is how far the clocks may be apart before signatures are refused.
const maxSkew = 5 * time.Minute

func (a *app) whoamiCmd() *cobra.Command {
	var offline bool
	cmd := &cobra.Command{
		Use:   "whoami",
		Short: "Show who you are, to yourself and to the server",
		Long: `Show who you are: your name, key and certificate, and what the server says of it.

-o json prints the server's GetClusterResponse.`,
		Args: none(),
		RunE: func(cmd *cobra.Command, args []string) error {
			if offline {
				return a.whoamiOffline()
			}
			return a.online(func(ctx context.Context, c *client, _ []string) error {
				return a.whoami(ctx, c)
			})(cmd, args)
		},
	}
	cmd.Flags().BoolVar(&offline, "offline", false, "do not ask the server")
	a.outputFlag(cmd)
	return cmd
}

func (a *app) whoamiOffline() error {
	if a.format == formatJSON {
		return usagef("--offline: there is nothing of the server to print with -o json; use one of them")
	}
	h, err := a.openHome()
	if err != nil {
		return err
	}
	at, err := a.currentContext(h)
	if err != nil {
		return err
	}
	rows, err := a.ownRows(h, at)
	if err != nil {
		return err
	}
	return table(a.out, rows)
}

// ownRows are what this side knows.
func (a *app) ownRows(h *home.Home, at *home.Context) ([][]string, error) {
	key, err := h.SigningKey()
	if err != nil {
		return nil, err
	}
	return [][]string{
		{"Operator", at.Identity.ID.String()},
		{"Signing key", key.KeyID()},
		{"Certificate", validity(at.Identity.NotBefore(), at.Identity.NotAfter(), a.now())},
		{"Cluster", fmt.Sprintf("%x", h.Cluster())},
		{"Trust root", versionText(h.Root().Version())},
		{"Context", at.File.GetName()},
		{"Server", at.File.GetServer()},
		{"Directory", h.Dir()},
	}, nil
}

func validity(from, until, now time.Time) string {
	text := from.Local().Format(time.RFC3339) + " until " + until.Local().Format(time.RFC3339)
	switch {
	case now.Before(from):
		return text + " (not yet)"
	case now.After(until):
		return text + " (over)"
	}
	return text
}

func (a *app) whoami(ctx context.Context, c *client) error {
	resp, err := c.nodes.GetCluster(ctx, &nodev1.GetClusterRequest{})
	if err != nil {
		return c.explain(ctx, "get cluster", err)
	}
	if !bytes.Equal(resp.GetCluster(), c.home.Cluster()) {
		return &failure{code: exitConflict, err: fmt.Errorf("the server says that its cluster is %x, and yours is %x; nodes will refuse what you sign", resp.GetCluster(), c.home.Cluster())}
	}
	if a.format == formatJSON {
		return a.printJSON(resp)
	}
	rows, err := a.ownRows(c.home, c.at)
	if err != nil {
		return err
	}
	skew := a.now().Sub(resp.GetServerTime().AsTime())
	rows = append(rows,
		[]string{"Known as", resp.GetCaller()},
		[]string{"Server version", resp.GetServerVersion()},
		[]string{"Server clock", stamp(resp.GetServerTime())},
	)
	if skew.Abs() > maxSkew {
		a.remark("warning: this clock is %s apart from the server's; tasks that you sign are refused until the clocks agree within %s", skew.Round(time.Second), maxSkew)
	}
	return table(a.out, rows)
}
