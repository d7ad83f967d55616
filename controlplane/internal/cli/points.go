//go:build !millwright_crash

package cli

import (
	"io"

	"github.com/spf13/cobra"
)

// faultCommands are those that only a fault build has: none in a release.
func faultCommands(io.Writer) []*cobra.Command { return nil }
