package ctl

import (
	"errors"
	"time"

	"github.com/spf13/cobra"

	"github.com/gpuaas/millwright/controlplane/internal/ctl/home"
)

func (a *app) contextCmd() *cobra.Command {
	return group("context", "Choose the server to talk to", a.contextAddCmd(), a.contextListCmd(), a.contextUseCmd())
}

func (a *app) contextAddCmd() *cobra.Command {
	return &cobra.Command{
		Use:   "add FILE",
		Short: "Verify and store the context file that millwright-server init wrote",
		Long: `Verify and store the context file that millwright-server init wrote. It must be
for your own key and for the cluster that you founded. The first context becomes
the current one.`,
		Args: exactly("FILE"),
		RunE: func(_ *cobra.Command, args []string) error {
			h, err := a.openHome()
			if err != nil {
				return err
			}
			c, replaced, err := h.Add(args[0])
			if err != nil {
				return homeError(err)
			}
			verb := "added"
			if replaced {
				verb = "replaced"
			}
			name := c.File.GetName()
			a.remark("%s context %s: %s at %s", verb, name, c.Identity.ID, c.File.GetServer())
			if h.Current() != name {
				a.remark("the current context is %s; change it with: millctl context use %s", h.Current(), name)
			}
			return nil
		},
	}
}

func (a *app) contextListCmd() *cobra.Command {
	return &cobra.Command{
		Use:   "list",
		Short: "List the contexts; a star marks the current one",
		Args:  none(),
		RunE: func(*cobra.Command, []string) error {
			h, err := a.openHome()
			if err != nil {
				return err
			}
			names, err := h.Contexts()
			if err != nil {
				return err
			}
			return a.printContexts(h, names)
		},
	}
}

func (a *app) printContexts(h *home.Home, names []string) error {
	rows := [][]string{{"", "NAME", "SERVER", "OPERATOR", "CERTIFICATE UNTIL"}}
	var bad error
	for _, name := range names {
		mark := " "
		if name == h.Current() {
			mark = "*"
		}
		c, err := h.Context(name)
		if err != nil {
			bad = errors.Join(bad, err)
			continue
		}
		until := c.Identity.NotAfter()
		text := until.Local().Format(time.RFC3339)
		if a.now().After(until) {
			text += " (over)"
		}
		rows = append(rows, []string{mark, name, c.File.GetServer(), c.Identity.ID.String(), text})
	}
	if err := table(a.out, rows); err != nil {
		return err
	}
	return homeError(bad)
}

func (a *app) contextUseCmd() *cobra.Command {
	return &cobra.Command{
		Use:   "use NAME",
		Short: "Make a context the current one",
		Args:  exactly("NAME"),
		RunE: func(_ *cobra.Command, args []string) error {
			h, err := a.openHome()
			if err != nil {
				return err
			}
			return homeError(h.Use(args[0]))
		},
	}
}
