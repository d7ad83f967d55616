package ctl

import (
	"errors"
	"io"
	"os"

	"github.com/spf13/cobra"

	"github.com/gpuaas/millwright/tasks/mig/migparted"
)

func (a *app) migCmd() *cobra.Command {
	return group("mig", "Take over MIG layouts", a.migImportCmd())
}

// importOptions are the flags of mig import.
type importOptions struct {
	file, config       string
	reset, reboot, all bool
}

func (a *app) migImportCmd() *cobra.Command {
	o := &importOptions{}
	cmd := &cobra.Command{
		Use:   "import -f FILE [--config NAME]",
		Short: "Print a configuration of mig-parted as a spec of mig.configure",
		Long: `Print a configuration of NVIDIA's mig-parted as a spec of mig.configure.

FILE is a configuration file of version v1; - reads it from standard input. It is
read strictly: all mistakes are told at once, each with its line. Nothing is asked
of the server. What is signed later is the spec, with the layouts written out, so
that a name in a file cannot come to mean something else.

A profile is found on each GPU by its slices, attributes and memory. Entries that
name GPUs by a device-filter are left out on a node that has none of them.`,
		Example: `  millctl mig import -f config.yaml --list
  millctl mig import -f config.yaml --config all-balanced --allow-reset > spec.yaml
  millctl task run mig.configure -n gpu-001 -f spec.yaml --allow-impact gpu-reset --wait`,
		Args: none(),
		RunE: func(*cobra.Command, []string) error { return a.importMIG(o) },
	}
	f := cmd.Flags()
	f.StringVarP(&o.file, "file", "f", "", "the file, or - for standard input")
	f.StringVar(&o.config, "config", "", "the configuration; not needed where the file has one")
	f.BoolVar(&o.reset, "allow-reset", false, "write allow_reset: a GPU may be reset where its MIG mode needs that")
	f.BoolVar(&o.reboot, "allow-reboot", false, "write allow_reboot: the node may be rebooted where a GPU cannot be reset")
	f.BoolVar(&o.all, "list", false, "print the names of the configurations instead")
	return cmd
}

func (a *app) importMIG(o *importOptions) error {
	name := o.file
	var data []byte
	var err error
	switch o.file {
	case "":
		return usagef("--file is missing: give a configuration file of mig-parted with -f FILE, or -f - for standard input")
	case "-":
		name = "standard input"
		data, err = io.ReadAll(io.LimitReader(a.in, migparted.MaxBytes+1))
	default:
		data, err = os.ReadFile(o.file)
	}
	if err != nil {
		return usagef("read the configuration of mig-parted: %w", err)
	}
	f, err := migparted.Read(name, data)
	if err != nil {
		return usagef("the configuration of mig-parted is not valid:\n%w", err)
	}
	if o.all {
		for _, c := range f.Configs() {
			if err := a.write([]byte(c + "\n")); err != nil {
				return err
			}
		}
		return nil
	}
	s, err := f.Spec(o.config)
	if errors.Is(err, migparted.ErrNoConfig) {
		return usagef("--config: %w", err)
	}
	if err != nil {
		return err
	}
	s.AllowReset, s.AllowReboot = o.reset, o.reboot
	text, err := asYAML(s)
	if err != nil {
		return err
	}
	return a.write([]byte(text + "\n"))
}
