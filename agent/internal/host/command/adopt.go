//go:build !millwright_noadopt

package command

import "log/slog"

// adopts reports whether a command that was found running is waited for.
func adopts(*slog.Logger) bool { return true }
