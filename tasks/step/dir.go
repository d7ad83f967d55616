package step

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"strings"

	"google.golang.org/protobuf/proto"

	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/tasks"
	"github.com/gpuaas/millwright/tasks/host"
)

type makeDir struct{ args *taskv1.DirectoryStep }

// MakeDir returns the step that makes a directory and those above it that are
// missing. Its undo removes those that it made, as far as they are empty: what
// someone else has put there since is not the step's to remove.
func MakeDir(args *taskv1.DirectoryStep) tasks.Step { return makeDir{args} }

func (s makeDir) Args() proto.Message { return s.args }

func (s makeDir) Title() string { return "make directory " + s.args.GetPath() }

// Observe returns the topmost directory that is missing, and nothing when none
// is.
func (s makeDir) Observe(ctx context.Context, h host.Reader) ([]byte, error) {
	for _, p := range Ancestry(s.args.GetPath()) {
		info, err := h.Lstat(ctx, p)
		if errors.Is(err, fs.ErrNotExist) {
			return encode(&taskv1.DirectoryStep{Path: p})
		}
		if err != nil {
			return nil, err
		}
		if !info.Mode.IsDir() {
			return nil, fmt.Errorf("%s is not a directory but %s", p, info.Mode.Type())
		}
	}
	return nil, nil
}

func (s makeDir) Apply(ctx context.Context, h host.Host) ([]byte, error) {
	for _, p := range Ancestry(s.args.GetPath()) {
		_, err := h.Lstat(ctx, p)
		if err == nil {
			continue
		}
		if !errors.Is(err, fs.ErrNotExist) {
			return nil, err
		}
		if err := h.MakeDir(ctx, p, fs.FileMode(s.args.GetMode()).Perm()); err != nil {
			return nil, err
		}
	}
	return nil, nil
}

func (s makeDir) Verify(ctx context.Context, h host.Prober) error {
	info, err := h.Lstat(ctx, s.args.GetPath())
	if err != nil {
		return err
	}
	if !info.Mode.IsDir() {
		return fmt.Errorf("%s is no directory: %w", s.args.GetPath(), tasks.ErrNotSatisfied)
	}
	return nil
}

func (s makeDir) Undo(ctx context.Context, h host.Host, before []byte) error {
	if len(before) == 0 {
		return nil
	}
	var top taskv1.DirectoryStep
	if err := decode(before, &top); err != nil {
		return err
	}
	mounts, err := h.Mounts(ctx)
	if err != nil {
		return err
	}
	for _, m := range mounts {
		if Within(m.Target, top.GetPath()) {
			return fmt.Errorf("remove directory %s: %s of type %s is mounted on %s: %w",
				top.GetPath(), m.Source, m.FSType, m.Target, host.ErrBusy)
		}
	}
	for p := s.args.GetPath(); Within(p, top.GetPath()); p = path.Dir(p) {
		empty, err := h.DirEmpty(ctx, p)
		switch {
		case errors.Is(err, fs.ErrNotExist):
			continue
		case err != nil:
			return err
		case !empty:
			return nil
		}
		if err := h.RemoveDir(ctx, p); err != nil {
			return err
		}
	}
	return nil
}

// Ancestry returns an absolute, clean path and the paths above it, from the one
// below / downwards.
func Ancestry(p string) []string {
	var out []string
	for ; p != "/" && p != "."; p = path.Dir(p) {
		out = append([]string{p}, out...)
	}
	return out
}

// Within reports whether the clean path p is dir or below it.
func Within(p, dir string) bool {
	return p == dir || dir == "/" || strings.HasPrefix(p, dir+"/")
}
