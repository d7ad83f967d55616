package enrol_test

import (
	"bytes"
	"context"
	"encoding/hex"
	"errors"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/gpuaas/millwright/agent/internal/enrol"
	"github.com/gpuaas/millwright/pki"
)

// onLog is a log that calls f for each line.
func onLog(f func()) *slog.Logger { return slog.New(logHandler{f: f}) }

type logHandler struct{ f func() }

// Enabled is always true.
func (logHandler) Enabled(context.Context, slog.Level) bool { return true }

// Handle calls the function.
func (h logHandler) Handle(context.Context, slog.Record) error { h.f(); return nil }

// WithAttrs changes nothing.
func (h logHandler) WithAttrs([]slog.Attr) slog.Handler { return h }

// WithGroup changes nothing.
func (h logHandler) WithGroup(string) slog.Handler { return h }

func strangerKey(t *testing.T) []byte {
	t.Helper()
	key, err := pki.GenerateKey()
	if err != nil {
		t.Fatal(err)
	}
	pem, err := pki.MarshalPrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	return pem
}

func TestOpenRefusesWhatWasAltered(t *testing.T) {
	a, other := newAuthority(t), newAuthority(t)
	a.start(t, "127.0.0.1:0")
	cfg := config(t)
	if _, err := enrol.Join(deadline(t, 20*time.Second), cfg, parse(t, a.message("token-1"))); err != nil {
		t.Fatal(err)
	}
	mine, cluster := a.root.Cluster(), other.root.Cluster()
	own := []byte(hex.EncodeToString(mine[:]))
	for name, tt := range map[string]struct {
		file string
		edit func([]byte) []byte
	}{
		"other cluster":      {"node.json", func(b []byte) []byte { return bytes.Replace(b, own, []byte(hex.EncodeToString(cluster[:])), 1) }},
		"unknown key":        {"node.json", func(b []byte) []byte { return bytes.Replace(b, []byte("{"), []byte(`{"x":1,`), 1) }},
		"newer format":       {"node.json", func(b []byte) []byte { return bytes.Replace(b, []byte(`"version": 1`), []byte(`"version": 2`), 1) }},
		"other name":         {"node.json", func(b []byte) []byte { return bytes.Replace(b, []byte(nodeName), []byte("gpu-002"), 1) }},
		"empty trust":        {"trust.json", func([]byte) []byte { return []byte(`{"version":1,"chain":[]}`) }},
		"half a trust file":  {"trust.json", func(b []byte) []byte { return b[:len(b)/2] }},
		"no certificate":     {"svid.pem", func([]byte) []byte { return nil }},
		"another's key":      {"key.pem", func([]byte) []byte { return strangerKey(t) }},
		"two JSON documents": {"node.json", func(b []byte) []byte { return append(b, b...) }},
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(cfg.Dir, tt.file)
			good, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			bad := tt.edit(bytes.Clone(good))
			if bytes.Equal(bad, good) {
				t.Fatal("nothing was altered")
			}
			if err := os.WriteFile(path, bad, 0o600); err != nil {
				t.Fatal(err)
			}
			if _, err := enrol.Open(cfg); err == nil || errors.Is(err, enrol.ErrNotJoined) || errors.Is(err, fs.ErrNotExist) {
				t.Errorf("got %v", err)
			}
			if err := os.WriteFile(path, good, 0o600); err != nil {
				t.Fatal(err)
			}
			if _, err := enrol.Open(cfg); err != nil {
				t.Errorf("put back: %v", err)
			}
		})
	}
}
