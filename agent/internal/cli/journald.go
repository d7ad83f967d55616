package cli

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"strings"

	"github.com/coreos/go-systemd/v22/journal"
)

// logHandler writes to the system's journal when the service runs under it,
// with a field for each attribute, so that journalctl MILLWRIGHT_TASK_ID=...
// finds what belongs to a task. Elsewhere it writes text to standard error.
func (a *app) logHandler(level slog.Level) slog.Handler {
	if os.Getenv("JOURNAL_STREAM") == "" || !journal.Enabled() {
		return slog.NewTextHandler(a.err, &slog.HandlerOptions{Level: level})
	}
	return newJournald(level, journal.Send)
}

// journald is a slog.Handler. It never changes once it was made.
type journald struct {
	level  slog.Level
	send   func(message string, priority journal.Priority, fields map[string]string) error
	prefix string            // of the group
	fields map[string]string // of the attributes given before
	text   string            // the same for people
}

func newJournald(level slog.Level, send func(string, journal.Priority, map[string]string) error) *journald {
	return &journald{level: level, send: send, fields: map[string]string{"SYSLOG_IDENTIFIER": "millwrightd"}}
}

// Enabled implements slog.Handler.
func (j *journald) Enabled(_ context.Context, l slog.Level) bool { return l >= j.level }

// Handle implements slog.Handler.
func (j *journald) Handle(_ context.Context, r slog.Record) error {
	var attrs []slog.Attr
	r.Attrs(func(a slog.Attr) bool { attrs = append(attrs, a); return true })
	all := j.with(attrs)
	if err := j.send(r.Message+all.text, priority(r.Level), all.fields); err != nil {
		return fmt.Errorf("write to the journal: %w", err)
	}
	return nil
}

// WithAttrs implements slog.Handler.
func (j *journald) WithAttrs(attrs []slog.Attr) slog.Handler { return j.with(attrs) }

// WithGroup implements slog.Handler.
func (j *journald) WithGroup(name string) slog.Handler {
	out := *j
	out.prefix += name + "."
	return &out
}

func (j *journald) with(attrs []slog.Attr) *journald {
	out := *j
	out.fields = maps.Clone(j.fields)
	var text bytes.Buffer
	for _, a := range attrs {
		out.add(&text, j.prefix, a)
	}
	out.text += text.String()
	return &out
}

func (j *journald) add(text *bytes.Buffer, prefix string, a slog.Attr) {
	v := a.Value.Resolve()
	if v.Kind() == slog.KindGroup {
		for _, in := range v.Group() {
			j.add(text, prefix+a.Key+".", in)
		}
		return
	}
	if a.Key == "" {
		return
	}
	s := v.String()
	j.fields[fieldName(prefix+a.Key)] = s
	if strings.ContainsAny(s, " \"=\n") {
		s = fmt.Sprintf("%q", s)
	}
	fmt.Fprintf(text, " %s%s=%s", prefix, a.Key, s)
}

// fieldName is a name that the journal takes: upper-case letters, digits and
// underscores.
func fieldName(key string) string {
	return "MILLWRIGHT_" + strings.Map(func(r rune) rune {
		switch {
		case r >= 'a' && r <= 'z':
			return r - 'a' + 'A'
		case r >= 'A' && r <= 'Z', r >= '0' && r <= '9':
			return r
		}
		return '_'
	}, key)
}

func priority(l slog.Level) journal.Priority {
	switch {
	case l >= slog.LevelError:
		return journal.PriErr
	case l >= slog.LevelWarn:
		return journal.PriWarning
	case l >= slog.LevelInfo:
		return journal.PriInfo
	}
	return journal.PriDebug
}
