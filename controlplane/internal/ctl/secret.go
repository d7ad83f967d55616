package ctl

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/millwright/controlplane/internal/ctl/home"
	secretv1 "github.com/gpuaas/millwright/proto/millwright/secret/v1"
	"github.com/gpuaas/millwright/tasks"
	"github.com/gpuaas/millwright/tasks/host"
)

func (a *app) secretCmd() *cobra.Command {
	return group("secret", "Keep values that tasks refer to by name", a.secretPutCmd(false), a.secretPutCmd(true), a.secretListCmd(), a.secretRemoveCmd())
}

func (a *app) secretPutCmd(rotate bool) *cobra.Command {
	var file string
	cmd := &cobra.Command{
		Use:   "put NAME -f FILE",
		Short: "Give a value to the server, under a name",
		Long: `Give a value to the server, under a name. Specs refer to it by the name, and your
signature binds it by a digest, which is kept in your own directory: a server that
hands out another value is refused by the nodes.

FILE holds the value, byte by byte; - reads it from standard input.`,
		Example: "  millctl secret put munge -f munge.key",
		Args:    exactly("NAME"),
		RunE: func(cmd *cobra.Command, args []string) error {
			value, err := a.readValue(args[0], file)
			if err != nil {
				return err
			}
			defer clear(value)
			return a.online(func(ctx context.Context, c *client, args []string) error {
				return a.putSecret(ctx, c, args[0], value, rotate)
			})(cmd, args)
		},
	}
	if rotate {
		cmd.Use, cmd.Short = "rotate NAME -f FILE", "Give a secret another value"
		cmd.Long = `Give a secret another value. The one before is kept for tasks that were signed with
it, until: millctl secret remove NAME --old. Nodes get the new one by new tasks.

FILE holds the value, byte by byte; - reads it from standard input.`
		cmd.Example = "  millctl secret rotate munge -f munge.key"
	}
	cmd.Flags().StringVarP(&file, "file", "f", "", "the value, or - for standard input")
	a.outputFlag(cmd)
	return cmd
}

// readValue reads the value of a secret. It is never an argument, which others
// on the machine could see.
func (a *app) readValue(name, file string) (value []byte, err error) {
	if !tasks.SecretName(name) {
		return nil, usagef("NAME: %q: must be lower-case letters, digits, - . and _ , at most 63 bytes, and begin with a letter or digit", name)
	}
	switch file {
	case "":
		return nil, usagef("--file is missing: give the value with -f FILE, or -f - for standard input")
	case "-":
		value, err = io.ReadAll(io.LimitReader(a.in, host.MaxSecret+1))
	default:
		value, err = readFile(file)
	}
	switch {
	case err != nil:
		return nil, usagef("read value of %s: %w", name, err)
	case len(value) == 0:
		return nil, usagef("the value of %s is empty", name)
	case len(value) > host.MaxSecret:
		return nil, usagef("the value of %s has more than %d bytes, which is the most", name, host.MaxSecret)
	}
	return value, nil
}

func readFile(path string) (data []byte, err error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	return io.ReadAll(io.LimitReader(f, host.MaxSecret+1))
}

func (a *app) putSecret(ctx context.Context, c *client, name string, value []byte, rotate bool) error {
	what, err := digestOf(name, value)
	if err != nil {
		return err
	}
	resp, err := c.secrets.PutSecret(ctx, &secretv1.PutSecretRequest{
		Name: name, Value: value, Salt: what.GetSalt(), Sha256: what.GetSha256(), Rotate: rotate,
	})
	if err != nil {
		return c.explain(ctx, "keep secret "+name, err)
	}
	kept := resp.GetSecret()
	// An answer to a repeated request has the salt of the first one.
	if !slices.Equal(salted(kept.GetSalt(), value), kept.GetSha256()) {
		return fmt.Errorf("the server says that it keeps another value under %s than was sent: do not sign with it, and look at the server", name)
	}
	if err := c.home.KeepSecret(c.at.File.GetName(), kept); err != nil {
		return homeError(err)
	}
	return a.printSecrets([]*secretv1.Secret{kept}, resp)
}

func salted(salt, value []byte) []byte {
	h := sha256.New()
	h.Write(salt)
	h.Write(value)
	return h.Sum(nil)
}

func (a *app) secretListCmd() *cobra.Command {
	cmd := &cobra.Command{
		Use:     "list",
		Short:   "List the secrets of the server, without their values",
		Example: "  millctl secret list",
		Args:    none(),
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.online(func(ctx context.Context, c *client, _ []string) error {
				resp, err := c.secrets.ListSecrets(ctx, &secretv1.ListSecretsRequest{})
				if err != nil {
					return c.explain(ctx, "list secrets", err)
				}
				return a.printSecrets(resp.GetSecrets(), resp)
			})(cmd, args)
		},
	}
	a.outputFlag(cmd)
	return cmd
}

func (a *app) secretRemoveCmd() *cobra.Command {
	var old bool
	cmd := &cobra.Command{
		Use:   "remove NAME",
		Short: "Remove a secret from the server",
		Long: `Remove a secret from the server, with all its versions. What nodes have in files
stays there: take it away with secret.remove, or by the task that is the inverse of
the one that brought it.`,
		Example: "  millctl secret remove munge --old",
		Args:    exactly("NAME"),
		RunE: a.online(func(ctx context.Context, c *client, args []string) error {
			resp, err := c.secrets.RemoveSecret(ctx, &secretv1.RemoveSecretRequest{Name: args[0], OldVersionsOnly: old})
			if err != nil {
				return c.explain(ctx, "remove secret "+args[0], err)
			}
			if !old {
				if err := c.home.DropSecret(c.at.File.GetName(), args[0]); err != nil {
					return homeError(err)
				}
			}
			return a.printSecrets(resp.GetRemoved(), resp)
		}),
	}
	cmd.Flags().BoolVar(&old, "old", false, "only the versions that are not the newest")
	a.outputFlag(cmd)
	return cmd
}

func (a *app) printSecrets(secrets []*secretv1.Secret, message proto.Message) error {
	if a.format == formatJSON {
		return a.printJSON(message)
	}
	rows := [][]string{{"NAME", "VERSION", "CURRENT", "BYTES", "DIGEST", "PUT BY", "AT"}}
	for _, s := range secrets {
		rows = append(rows, []string{
			s.GetName(), strconv.FormatUint(uint64(s.GetVersion()), 10), yes(s.GetCurrent()), strconv.FormatUint(uint64(s.GetSizeBytes()), 10),
			hex.EncodeToString(s.GetSha256())[:min(12, 2*len(s.GetSha256()))], s.GetCreatedBy(), stamp(s.GetCreateTime()),
		})
	}
	return table(a.out, rows)
}

func yes(b bool) string {
	if b {
		return "yes"
	}
	return ""
}

// fillDigests completes the references in a spec: from the values in files, and
// otherwise from what was noted when the secret was put from here.
func (a *app) fillDigests(spec proto.Message, files []string) error {
	refs := tasks.SecretRefs(spec)
	if len(files) > 0 && len(refs) == 0 {
		return usagef("--secret: the spec names no secret")
	}
	var noted *notes
	for _, ref := range refs {
		if len(ref.GetSha256()) > 0 || !tasks.SecretName(ref.GetName()) {
			continue
		}
		if noted == nil {
			var err error
			if noted, err = a.notes(); err != nil {
				return err
			}
			if err := noted.take(files); err != nil {
				return err
			}
		}
		if s := noted.of(ref.GetName()); s != nil {
			ref.Salt, ref.Sha256 = s.GetSalt(), s.GetSha256()
		}
	}
	return nil
}

// notes are the digests that this operator knows of secrets in a context.
type notes struct {
	home    *home.Home
	context string
	list    []*secretv1.Secret
}

func (a *app) notes() (*notes, error) {
	h, err := a.openHome()
	if err != nil {
		return nil, err
	}
	at, err := a.currentContext(h)
	if err != nil {
		return nil, err
	}
	n := &notes{home: h, context: at.File.GetName()}
	n.list, err = h.Secrets(n.context)
	return n, homeError(err)
}

func (n *notes) of(name string) *secretv1.Secret {
	for _, s := range n.list {
		if s.GetName() == name {
			return s
		}
	}
	return nil
}

// take notes the values in files, given as NAME=FILE. One that is known keeps
// its salt, so that a repeated command makes an equal request.
func (n *notes) take(files []string) error {
	for _, f := range files {
		name, file, ok := strings.Cut(f, "=")
		if !ok || !tasks.SecretName(name) || file == "" {
			return usagef("--secret: %q: must be NAME=FILE", f)
		}
		value, err := readFile(file)
		if err != nil {
			return usagef("--secret: %w", err)
		}
		if s := n.of(name); s != nil && slices.Equal(salted(s.GetSalt(), value), s.GetSha256()) {
			clear(value)
			continue
		}
		fresh, err := digestOf(name, value)
		clear(value)
		if err != nil {
			return err
		}
		if err := n.home.KeepSecret(n.context, fresh); err != nil {
			return homeError(err)
		}
		n.list = append([]*secretv1.Secret{fresh}, n.list...)
	}
	return nil
}

func digestOf(name string, value []byte) (*secretv1.Secret, error) {
	salt := make([]byte, tasks.SaltBytes)
	if _, err := rand.Read(salt); err != nil {
		return nil, fmt.Errorf("make salt: %w", err)
	}
	return &secretv1.Secret{Name: name, Salt: salt, Sha256: salted(salt, value)}, nil
}
