package ctl

import (
	"context"
	"encoding/hex"
	"fmt"
	"io/fs"
	"os"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/millwright/controlplane/internal/ctl/home"
	"github.com/gpuaas/millwright/pki"
	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
	nodev1 "github.com/gpuaas/millwright/proto/millwright/node/v1"
)

const (
	secretMode = 0o600
	maxTTL     = 7 * 24 * time.Hour
)

func (a *app) tokenCreateCmd() *cobra.Command {
	var ttl time.Duration
	var out string
	var rejoin bool
	cmd := &cobra.Command{
		Use:   "create NODE",
		Short: "Make the join bundle of a new node",
		Long: `Make the join bundle of a new node: the server's address, a single-use token, and
what the node shall believe, which is the CA and the trust root from your own
directory and not from the server.

The bundle holds a secret. Bring it to /etc/millwright/join.json on the host, with
mode 0600, and start millwrightd there.

A name that has joined is refused, so that no slip takes a node's name away. With
--rejoin the host that brings the bundle takes the place of the one that has the
name: a host that was made anew, or one whose certificate ended more than 30 days
ago. The former key is out from then on, and what was under way on the node is held
for you, since it may have run.`,
		Example: "  millctl node token create gpu-001 --out gpu-001.json\n  millctl node token create gpu-001 --rejoin --out gpu-001.json",
		Args:    exactly("NODE"),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := checkToken(args[0], ttl, out); err != nil {
				return err
			}
			return a.online(func(ctx context.Context, c *client, args []string) error {
				return a.createToken(ctx, c, &nodev1.CreateJoinTokenRequest{Node: args[0], Ttl: durationpb.New(ttl), Rejoin: rejoin}, out)
			})(cmd, args)
		},
	}
	cmd.Flags().DurationVar(&ttl, "ttl", time.Hour, "how long the token is good, at most 168h")
	cmd.Flags().BoolVar(&rejoin, "rejoin", false, "the node has joined before: the host that brings the bundle takes its place")
	cmd.Flags().StringVar(&out, "out", "", "the file to write, with mode 0600; without it the bundle goes to standard output")
	return cmd
}

// checkToken finds what is wrong before a token is made.
func checkToken(node string, ttl time.Duration, out string) error {
	if err := pki.CheckName(node); err != nil {
		return usagef("NODE: %w", err)
	}
	if ttl <= 0 || ttl > maxTTL {
		return usagef("--ttl: %s: must be longer than 0 and at most %s", ttl, maxTTL)
	}
	if out != "" {
		if _, err := os.Lstat(out); err == nil {
			return &failure{code: exitConflict, err: fmt.Errorf("--out: %s exists already; remove it, or choose another name: %w", out, fs.ErrExist)}
		}
	}
	return nil
}

func (a *app) createToken(ctx context.Context, c *client, req *nodev1.CreateJoinTokenRequest, out string) error {
	node := req.GetNode()
	resp, err := c.nodes.CreateJoinToken(ctx, req)
	if err != nil {
		return c.explain(ctx, "create token for node "+node, err)
	}
	data, err := home.Encode(a.bundle(c, node, resp))
	if err != nil {
		return err
	}
	if out == "" {
		return a.write(data)
	}
	if err := home.Create(out, data, secretMode); err != nil {
		return homeError(err)
	}
	a.remark("wrote %s, good until %s; bring it to /etc/millwright/join.json on %s, then: systemctl restart millwrightd",
		out, stamp(resp.GetExpireTime()), node)
	return nil
}

// bundle takes all that the node shall believe from the operator's own
// directory. Only the token and the address are the server's.
func (a *app) bundle(c *client, node string, resp *nodev1.CreateJoinTokenResponse) *agentv1.JoinBundle {
	root := c.home.Root()
	newest := root.Hash()
	address := resp.GetNodeAddress()
	if address == "" {
		address = c.server
	}
	return &agentv1.JoinBundle{
		Version:     1,
		Server:      address,
		TrustDomain: root.TrustDomain(),
		CaSha256:    c.at.File.GetCaSha256(),
		Cluster:     hex.EncodeToString(c.home.Cluster()),
		TrustRoot:   hex.EncodeToString(newest[:]),
		Floor:       timestamppb.New(a.now()),
		Node:        node,
		Token:       resp.GetToken(),
		Expires:     resp.GetExpireTime(),
	}
}
