package cli

import (
	"log/slog"

	"github.com/coreos/go-systemd/v22/journal"
)

// NewJournald makes the journal's handler over another sender.
func NewJournald(level slog.Level, send func(string, journal.Priority, map[string]string) error) slog.Handler {
	return newJournald(level, send)
}
