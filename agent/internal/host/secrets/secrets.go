// Package secrets brings the values of secrets into files that only their owner
// can read, and keeps what stood there before until the task has ended. A value
// is held in memory for as long as a call takes, and nowhere else.
package secrets

import (
	"bytes"
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/user"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/gpuaas/millwright/agent/internal/crash"
	"github.com/gpuaas/millwright/agent/internal/host/files"
	"github.com/gpuaas/millwright/tasks/host"
)

// Fetcher gets the value of a secret that a task names.
type Fetcher interface {
	// Fetch returns it, unchecked. Its errors wrap [host.ErrSecretAway] or
	// [host.ErrSecretWrong].
	Fetch(ctx context.Context, taskID, reference string) ([]byte, error)
}

// Config is what a [Store] needs.
type Config struct {
	// Dir is where what was overwritten is kept. It is made when it is needed.
	Dir string
	// Files writes the files.
	Files *files.Files
	// Fetcher gets the values; nil: none can be had.
	Fetcher Fetcher
}

// Store changes files that hold secrets. It is safe for concurrent use.
type Store struct{ cfg Config }

// New returns a store. It does no I/O.
func New(cfg Config) *Store { return &Store{cfg: cfg} }

// Step is the step of a task that makes a change.
type Step struct {
	TaskID string
	Step   uint32
}

// SecretState implements [host.SecretReader].
func (s *Store) SecretState(ctx context.Context, path string, salt []byte) (host.SecretState, error) {
	o, err := s.cfg.Files.ReadOwned(ctx, path, host.MaxSecret)
	if err != nil {
		return host.SecretState{}, err
	}
	defer clear(o.Data)
	return host.SecretState{
		SHA256: digest(salt, o.Data), Mode: o.Mode, User: userName(o.UID), Group: groupName(o.GID),
	}, nil
}

// Write implements WriteSecret of [host.SecretWriter] for a step.
func (s *Store) Write(ctx context.Context, step Step, path string, f host.SecretFile) error {
	uid, gid, err := owner(f.User, f.Group)
	if err != nil {
		return fmt.Errorf("write secret %s to %s: %w", f.Secret.Name, path, err)
	}
	value, err := s.value(ctx, step.TaskID, f.Secret)
	if err != nil {
		return fmt.Errorf("write secret %s to %s: %w", f.Secret.Name, path, err)
	}
	defer clear(value)
	if err := s.keep(ctx, step, path); err != nil {
		return err
	}
	return s.cfg.Files.WriteOwned(ctx, path, files.Owned{Data: value, Mode: f.Mode.Perm(), UID: uid, GID: gid})
}

// value gets a value and holds it against what was signed.
func (s *Store) value(ctx context.Context, taskID string, secret host.Secret) ([]byte, error) {
	if s.cfg.Fetcher == nil {
		return nil, fmt.Errorf("%w: nothing here can fetch it", host.ErrSecretAway)
	}
	value, err := s.cfg.Fetcher.Fetch(ctx, taskID, secret.Name)
	if err != nil {
		return nil, err
	}
	if len(value) == 0 || len(value) > host.MaxSecret ||
		subtle.ConstantTimeCompare(digest(secret.Salt, value), secret.SHA256) != 1 {
		clear(value)
		return nil, fmt.Errorf("%w: what the control plane gave as %s has another digest than the task's signature; nothing was written", host.ErrSecretWrong, secret.Name)
	}
	return value, nil
}

// Remove implements RemoveSecret of [host.SecretWriter] for a step.
func (s *Store) Remove(ctx context.Context, step Step, path string) error {
	if err := s.keep(ctx, step, path); err != nil {
		return err
	}
	return s.cfg.Files.RemoveFile(ctx, path)
}

// Restore implements RestoreSecret of [host.SecretWriter] for a step.
func (s *Store) Restore(ctx context.Context, step Step, path string) error {
	kept, err := s.cfg.Files.ReadOwned(ctx, s.file(step), host.MaxSecret+maxHead)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("restore %s: %w", path, err)
	}
	defer clear(kept.Data)
	o, there, err := unpack(kept.Data)
	if err != nil {
		return fmt.Errorf("restore %s: %w", path, err)
	}
	if !there {
		return s.cfg.Files.RemoveFile(ctx, path)
	}
	if s.stands(ctx, path, o) {
		return nil
	}
	return s.cfg.Files.WriteOwned(ctx, path, o)
}

// stands reports whether a file is as it was kept: a write that was refused, as
// the directory is open to others, must not be undone by another one.
func (s *Store) stands(ctx context.Context, path string, was files.Owned) bool {
	now, err := s.cfg.Files.ReadOwned(ctx, path, host.MaxSecret)
	defer clear(now.Data)
	return err == nil && now.Mode == was.Mode && now.UID == was.UID && now.GID == was.GID && subtle.ConstantTimeCompare(now.Data, was.Data) == 1
}

// keep makes durable what stands at path, unless the step has kept it before.
func (s *Store) keep(ctx context.Context, step Step, path string) error {
	if _, err := s.cfg.Files.Lstat(ctx, s.file(step)); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	o, err := s.cfg.Files.ReadOwned(ctx, path, host.MaxSecret)
	there := !errors.Is(err, fs.ErrNotExist)
	if err != nil && there {
		return fmt.Errorf("keep what stands at %s: %w", path, err)
	}
	if err := files.MakeDirs(s.cfg.Dir, 0o700); err != nil {
		return fmt.Errorf("keep what stands at %s: %w", path, err)
	}
	data := pack(o, there)
	defer clear(data)
	defer clear(o.Data)
	if err := s.cfg.Files.WriteOwned(ctx, s.file(step), files.Owned{Data: data, Mode: 0o400}); err != nil {
		return fmt.Errorf("keep what stands at %s: %w", path, err)
	}
	crash.Point("host.secret.kept")
	return nil
}

// Forget deletes what the steps of a task have kept: it has ended.
func (s *Store) Forget(ctx context.Context, taskID string) error {
	names, err := s.names()
	if err != nil {
		return err
	}
	for _, name := range names {
		if id, _, _ := strings.Cut(name, "."); id != taskID {
			continue
		}
		crash.Point("host.secret.forget.before")
		if err := s.cfg.Files.RemoveFile(ctx, filepath.Join(s.cfg.Dir, name)); err != nil {
			return err
		}
		crash.Point("host.secret.forget.after")
	}
	return nil
}

// Kept returns the ids of the tasks of which something is kept.
func (s *Store) Kept() ([]string, error) {
	names, err := s.names()
	var out []string
	for _, name := range names {
		if id, _, ok := strings.Cut(name, "."); ok && id != "" && !slices.Contains(out, id) {
			out = append(out, id)
		}
	}
	return out, err
}

// names are those of the files in which something is kept, or was to be: a write
// that was cut off has left the secret under another name.
func (s *Store) names() ([]string, error) {
	entries, err := os.ReadDir(s.cfg.Dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var out []string
	for _, e := range entries {
		name := files.TempOf(e.Name())
		if !slices.Contains(out, name) {
			out = append(out, name)
		}
	}
	return out, nil
}

func (s *Store) file(step Step) string {
	return filepath.Join(s.cfg.Dir, step.TaskID+"."+strconv.FormatUint(uint64(step.Step), 10))
}

// maxHead is the longest first line of a kept file.
const maxHead = 64

// pack puts a line before what stood there: mode, user and group, or "none".
func pack(o files.Owned, there bool) []byte {
	if !there {
		return []byte("none\n")
	}
	return append(fmt.Appendf(nil, "%o %d %d\n", o.Mode.Perm(), o.UID, o.GID), o.Data...)
}

func unpack(b []byte) (o files.Owned, there bool, err error) {
	head, data, ok := bytes.Cut(b, []byte("\n"))
	if ok && string(head) == "none" {
		return files.Owned{}, false, nil
	}
	var mode uint32
	if _, err := fmt.Sscanf(string(head), "%o %d %d", &mode, &o.UID, &o.GID); err != nil || !ok {
		return files.Owned{}, false, errors.New("what was kept of it cannot be read")
	}
	o.Mode, o.Data = fs.FileMode(mode).Perm(), data
	return o, true, nil
}

func digest(salt, value []byte) []byte {
	h := sha256.New()
	h.Write(salt)
	h.Write(value)
	return h.Sum(nil)
}

func owner(userName, groupName string) (uid, gid uint32, err error) {
	u, err := user.Lookup(userName)
	if err != nil {
		return 0, 0, err
	}
	g, err := user.LookupGroup(groupName)
	if err != nil {
		return 0, 0, err
	}
	n, err := strconv.ParseUint(u.Uid, 10, 32)
	if err != nil {
		return 0, 0, err
	}
	m, err := strconv.ParseUint(g.Gid, 10, 32)
	return uint32(n), uint32(m), err
}

func userName(uid uint32) string {
	id := strconv.FormatUint(uint64(uid), 10)
	if u, err := user.LookupId(id); err == nil {
		return u.Username
	}
	return id
}

func groupName(gid uint32) string {
	id := strconv.FormatUint(uint64(gid), 10)
	if g, err := user.LookupGroupId(id); err == nil {
		return g.Name
	}
	return id
}
