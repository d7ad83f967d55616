package fakehost

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"

	"github.com/gpuaas/millwright/tasks/host"
)

// keptFile is what a step found at a path before it changed it.
type keptFile struct {
	entry
	there bool
}

type keptKey struct {
	step commandKey
	path string
}

func (n *Node) secretState(p string, salt []byte) (host.SecretState, error) {
	e, _, err := n.find("read", p)
	if err != nil {
		return host.SecretState{}, err
	}
	if !e.mode.IsRegular() {
		return host.SecretState{}, fmt.Errorf("read %s: it is not a regular file", p)
	}
	if len(e.data) > host.MaxSecret {
		return host.SecretState{}, fmt.Errorf("read %s: it has more than %d bytes", p, host.MaxSecret)
	}
	return host.SecretState{SHA256: salted(salt, e.data), Mode: e.mode.Perm(), User: e.ownedBy(), Group: e.groupOf()}, nil
}

func (e entry) ownedBy() string {
	if e.user == "" {
		return "root"
	}
	return e.user
}

func (e entry) groupOf() string {
	if e.group == "" {
		return "root"
	}
	return e.group
}

func salted(salt []byte, value string) []byte {
	sum := sha256.Sum256(append(bytes.Clone(salt), value...))
	return sum[:]
}

// TakeSecrets has the values of secrets fetched from elsewhere than the node's
// script.
func (h Hosts) TakeSecrets(fetch func(ctx context.Context, taskID, name string) ([]byte, error)) {
	h.node.mu.Lock()
	defer h.node.mu.Unlock()
	h.node.fetch = fetch
}

// fetched asks for a value that is not the script's.
func (v *view) fetched(ctx context.Context, f host.SecretFile) (string, bool, error) {
	v.n.mu.Lock()
	fetch := v.n.fetch
	v.n.mu.Unlock()
	if fetch == nil {
		return "", false, nil
	}
	value, err := fetch(ctx, v.key.task, f.Secret.Name)
	return string(value), err == nil, err
}

func (n *Node) writeSecret(key commandKey, p string, f host.SecretFile, value string, ok bool) error {
	if !ok {
		value, ok = n.secrets[f.Secret.Name]
	}
	switch {
	case n.noSecrets:
		return fmt.Errorf("write secret %s to %s: %w", f.Secret.Name, p, host.ErrSecretAway)
	case !ok, !bytes.Equal(salted(f.Secret.Salt, value), f.Secret.SHA256):
		return fmt.Errorf("write secret %s to %s: %w", f.Secret.Name, p, host.ErrSecretWrong)
	case !n.users[f.User]:
		return fmt.Errorf("write secret %s to %s: no user %s", f.Secret.Name, p, f.User)
	}
	if err := n.keep(key, p); err != nil {
		return err
	}
	if err := n.writeFile(p, host.File{Data: []byte(value), Mode: f.Mode}); err != nil {
		return err
	}
	k := n.key(n.real(p, false))
	e := n.entries[k]
	e.user, e.group = named(f.User), named(f.Group)
	n.entries[k] = e
	return nil
}

// named leaves out the owner that all files have.
func named(s string) string {
	if s == "root" {
		return ""
	}
	return s
}

func (n *Node) removeSecret(key commandKey, p string) error {
	if err := n.keep(key, p); err != nil {
		return err
	}
	return n.removeFile(p)
}

func (n *Node) keep(key commandKey, p string) error {
	k := keptKey{key, p}
	if _, ok := n.kept[k]; ok {
		return nil
	}
	e, _, err := n.find("read", p)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	n.kept[k] = keptFile{entry: e, there: err == nil}
	return nil
}

func (n *Node) restoreSecret(key commandKey, p string) error {
	was, ok := n.kept[keptKey{key, p}]
	switch {
	case !ok:
		return nil
	case !was.there:
		return n.removeFile(p)
	}
	n.entries[n.key(n.real(p, false))] = was.entry
	return nil
}

func (v *view) SecretState(ctx context.Context, path string, salt []byte) (host.SecretState, error) {
	return call(ctx, v, Op{Name: "SecretState", Object: path}, func() (host.SecretState, error) { return v.n.secretState(path, salt) })
}

func (v *view) WriteSecret(ctx context.Context, path string, f host.SecretFile) error {
	value, ok, err := v.fetched(ctx, f)
	if err != nil {
		return err
	}
	return change(ctx, v, "WriteSecret", path, func() error { return v.n.writeSecret(v.key, path, f, value, ok) })
}

func (v *view) RemoveSecret(ctx context.Context, path string) error {
	return change(ctx, v, "RemoveSecret", path, func() error { return v.n.removeSecret(v.key, path) })
}

func (v *view) RestoreSecret(ctx context.Context, path string) error {
	return change(ctx, v, "RestoreSecret", path, func() error { return v.n.restoreSecret(v.key, path) })
}

// Forget deletes what the steps of a task have kept of secrets.
func (h Hosts) Forget(ctx context.Context, taskID string) error {
	v := &view{n: h.node, hook: h.hook}
	return change(ctx, v, "Forget", taskID, func() error {
		for k := range h.node.kept {
			if k.step.task == taskID {
				delete(h.node.kept, k)
			}
		}
		return nil
	})
}

// Kept returns the tasks of which something is kept.
func (h Hosts) Kept() ([]string, error) {
	h.node.mu.Lock()
	defer h.node.mu.Unlock()
	var out []string
	for k := range h.node.kept {
		out = append(out, k.step.task)
	}
	return out, nil
}
