//go:build millwright_noadopt

package command

import "log/slog"

// adopts is the build with which the demo shows that it would notice. The
// message is how a test tells the two builds apart.
func adopts(log *slog.Logger) bool {
	log.Warn("this build does not adopt running commands")
	return false
}
