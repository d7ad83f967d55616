//go:build !millwright_crash

package cli

import "github.com/spf13/cobra"

// faultCmds are the commands that only a fault build has: none in a release.
func (*app) faultCmds() []*cobra.Command { return nil }
