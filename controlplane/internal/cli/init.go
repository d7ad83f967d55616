package cli

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/encoding/protojson"

	nodev1 "github.com/gpuaas/millwright/proto/millwright/node/v1"

	"github.com/gpuaas/millwright/controlplane"
)

// initOptions are the flags of init.
type initOptions struct {
	trustRoot, trustDomain, contextOut string
}

func initCommand(path *string, stdout, stderr io.Writer) *cobra.Command {
	o := &initOptions{}
	cmd := &cobra.Command{
		Use: "init", Short: "Found the server's state for a cluster", Args: noArgs,
		Long: "Found the server's state for a cluster: make its CA, keep the trust root, and sign the\n" +
			"certificate of the first operator. Repeated with the same files it changes nothing and\n" +
			"writes the context file again.",
		RunE: func(cmd *cobra.Command, _ []string) error { return o.run(cmd, *path, stdout, stderr) },
	}
	cmd.Flags().StringVar(&o.trustRoot, "trust-root", "", "the founding bundle that millctl operator init wrote")
	cmd.Flags().StringVar(&o.trustDomain, "trust-domain", "", "the SPIFFE trust domain of the cluster")
	cmd.Flags().StringVar(&o.contextOut, "context-out", "", "where to write the context file for millctl context add")
	return cmd
}

func (o *initOptions) run(cmd *cobra.Command, path string, stdout, stderr io.Writer) error {
	for _, f := range []struct{ name, value string }{
		{"trust-root", o.trustRoot}, {"trust-domain", o.trustDomain}, {"context-out", o.contextOut},
	} {
		if f.value == "" {
			return &usageError{fmt.Errorf("init: --%s is missing", f.name)}
		}
	}
	cfg, err := readConfig(path, stderr)
	if err != nil {
		return err
	}
	data, err := os.ReadFile(o.trustRoot)
	if err != nil {
		return fmt.Errorf("read founding bundle: %w", err)
	}
	bundle := &nodev1.FoundingBundle{}
	if err := protojson.Unmarshal(data, bundle); err != nil {
		return fmt.Errorf("read founding bundle %s: %w", o.trustRoot, err)
	}
	file, err := controlplane.Found(cmd.Context(), cfg, bundle, o.trustDomain)
	if err != nil {
		return fmt.Errorf("init in %s: %w", cfg.StateDir, err)
	}
	out, err := protojson.MarshalOptions{Multiline: true}.Marshal(file)
	if err != nil {
		return fmt.Errorf("write context file: %w", err)
	}
	if err := replace(o.contextOut, append(out, '\n')); err != nil {
		return fmt.Errorf("write context file %s: %w", o.contextOut, err)
	}
	_, err = fmt.Fprintf(stdout, "cluster %s founded in %s\nnext, on the operator's machine: millctl context add %s\n",
		file.GetCluster(), cfg.StateDir, o.contextOut)
	return err
}

// replace writes a file whole or not at all.
func replace(path string, data []byte) (err error) {
	f, err := os.CreateTemp(filepath.Dir(path), ".context-*")
	if err != nil {
		return err
	}
	defer func() {
		if removeErr := os.Remove(f.Name()); !errors.Is(removeErr, fs.ErrNotExist) {
			err = errors.Join(err, removeErr)
		}
	}()
	_, err = f.Write(data)
	if err := errors.Join(err, f.Chmod(0o644), f.Sync(), f.Close()); err != nil {
		return err
	}
	return os.Rename(f.Name(), path)
}
