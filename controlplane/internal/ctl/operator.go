package ctl

import (
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"

	"github.com/gpuaas/millwright/controlplane/internal/ctl/home"
	"github.com/gpuaas/millwright/pki"
)

func (a *app) operatorCmd() *cobra.Command {
	return group("operator", "Set yourself up", a.operatorInitCmd())
}

// initOptions are the flags of operator init.
type initOptions struct {
	name, trustDomain, out, recovery string
	controllers                      []string
}

func (a *app) operatorInitCmd() *cobra.Command {
	o := &initOptions{}
	cmd := &cobra.Command{
		Use:   "init --name NAME --trust-domain DOMAIN --out FILE",
		Short: "Make your keys and found a cluster",
		Long: `Make your keys and found a cluster: a daily key, which signs tasks, a recovery
key, which signs changes of who may sign, the genesis of the trust root, and the
request for your certificate.

FILE gets the public parts, for: millwright-server init --trust-root FILE`,
		Example: "  millctl operator init --name alice --trust-domain example.org --out founding.json",
		Args:    none(),
		RunE: func(*cobra.Command, []string) error {
			return a.operatorInit(o)
		},
	}
	f := cmd.Flags()
	f.StringVar(&o.name, "name", "", "your name: lower-case letters, digits, '-' and '.'")
	f.StringVar(&o.trustDomain, "trust-domain", "", "the SPIFFE trust domain of the cluster, for example example.org")
	f.StringVar(&o.out, "out", "", "the file for the public parts")
	f.StringVar(&o.recovery, "recovery-out", "", "the file for the recovery key, for example on a medium that is kept offline")
	f.StringArrayVar(&o.controllers, "controller", nil, "a program that may sign tasks too, as NAME=FILE with its Ed25519 public key in PEM; repeat the flag for more")
	return cmd
}

func (a *app) operatorInit(o *initOptions) error {
	founder, err := o.founder()
	if err != nil {
		return err
	}
	founder.Now = a.now()
	dir, err := home.Dir(a.getenv)
	if err != nil {
		return usagef("%w", err)
	}
	founded, err := home.Init(dir, founder)
	if err != nil {
		return homeError(err)
	}
	a.remark("made the keys of %s in %s: signing key %s, recovery key %s", o.name, dir, founded.SigningKeyID, founded.RecoveryKeyID)
	a.remark("founded cluster %x", founded.Cluster)
	a.remark("move %s to a place that is offline, now: who has it can change who may sign", founded.Recovery)
	a.remark("next, on the server: millwright-server init --trust-root %s --trust-domain %s --context-out context.json", filepath.Base(o.out), o.trustDomain)
	a.remark("then, here: millctl context add context.json")
	return nil
}

// founder checks the flags.
func (o *initOptions) founder() (home.Founder, error) {
	f := home.Founder{Name: o.name, TrustDomain: o.trustDomain, Recovery: o.recovery, Out: o.out}
	for _, flag := range []struct{ name, value string }{{"name", o.name}, {"trust-domain", o.trustDomain}, {"out", o.out}} {
		if flag.value == "" {
			return f, usagef("--%s is missing", flag.name)
		}
	}
	if err := pki.CheckName(o.name); err != nil {
		return f, usagef("--name: %w", err)
	}
	if err := pki.CheckTrustDomain(o.trustDomain); err != nil {
		return f, usagef("--trust-domain: %w", err)
	}
	for _, s := range o.controllers {
		name, file, ok := strings.Cut(s, "=")
		if !ok || file == "" {
			return f, usagef("--controller: %q: must be NAME=FILE", s)
		}
		if err := pki.CheckName(name); err != nil {
			return f, usagef("--controller: %w", err)
		}
		key, err := home.ReadPublicKey(file)
		if err != nil {
			return f, usagef("--controller: %w", err)
		}
		f.Controllers = append(f.Controllers, home.Controller{Name: name, Key: key})
	}
	return f, nil
}
