package step

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"time"

	"google.golang.org/protobuf/proto"

	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/tasks"
	"github.com/gpuaas/millwright/tasks/host"
)

// importTime is what reading and unpacking an image may take: some have tens of
// gigabytes.
const importTime = 20 * time.Minute

// short shortens a digest for people.
func short(digest string) string { return digest[:min(len(digest), len("sha256:")+12)] }

type importImage struct{ args *taskv1.ImageImportStep }

// ImportImage returns the step that brings an image from an archive into the
// node's store. What does not match the digest is refused by the store.
func ImportImage(args *taskv1.ImageImportStep) tasks.Step { return importImage{args} }

func (s importImage) Args() proto.Message { return s.args }

func (s importImage) Title() string {
	return fmt.Sprintf("import image %s from %s", short(s.args.GetDigest()), s.args.GetOciArchive())
}

// Timeout implements [tasks.Limiter].
func (s importImage) Timeout() time.Duration { return importTime }

func (s importImage) Observe(ctx context.Context, h host.Reader) ([]byte, error) {
	return observeImage(ctx, h, s.args.GetDigest())
}

func observeImage(ctx context.Context, h host.Reader, digest string) ([]byte, error) {
	st, err := h.Image(ctx, digest)
	if err != nil {
		return nil, err
	}
	return encode(&taskv1.ImageObserved{Present: st.Present})
}

func (s importImage) Apply(ctx context.Context, h host.Host) ([]byte, error) {
	return nil, h.ImportImage(ctx, s.args.GetOciArchive(), s.args.GetDigest())
}

func (s importImage) Verify(ctx context.Context, h host.Prober) error {
	st, err := h.Image(ctx, s.args.GetDigest())
	if err != nil {
		return err
	}
	if !st.Present {
		return fmt.Errorf("image %s is not in the store: %w", s.args.GetDigest(), tasks.ErrNotSatisfied)
	}
	return nil
}

// Undo removes the image if the step brought it, and no container uses it.
func (s importImage) Undo(ctx context.Context, h host.Host, before []byte) error {
	var was taskv1.ImageObserved
	if err := decode(before, &was); err != nil || was.GetPresent() {
		return err
	}
	return h.RemoveImage(ctx, s.args.GetDigest())
}

type removeImage struct{ args *taskv1.ImageRemoveStep }

// RemoveImage returns the step that removes an image from the node's store,
// unless a container uses it. Its undo imports it again from its archive, and
// says so when that is gone.
func RemoveImage(args *taskv1.ImageRemoveStep) tasks.Step { return removeImage{args} }

func (s removeImage) Args() proto.Message { return s.args }

func (s removeImage) Title() string { return "remove image " + short(s.args.GetDigest()) }

func (s removeImage) Observe(ctx context.Context, h host.Reader) ([]byte, error) {
	return observeImage(ctx, h, s.args.GetDigest())
}

func (s removeImage) Apply(ctx context.Context, h host.Host) ([]byte, error) {
	return nil, h.RemoveImage(ctx, s.args.GetDigest())
}

func (s removeImage) Verify(ctx context.Context, h host.Prober) error {
	st, err := h.Image(ctx, s.args.GetDigest())
	if err != nil {
		return err
	}
	if st.Present && len(st.Users) == 0 {
		return fmt.Errorf("image %s is in the store: %w", s.args.GetDigest(), tasks.ErrNotSatisfied)
	}
	return nil
}

func (s removeImage) Undo(ctx context.Context, h host.Host, before []byte) error {
	var was taskv1.ImageObserved
	if err := decode(before, &was); err != nil || !was.GetPresent() {
		return err
	}
	err := h.ImportImage(ctx, s.args.GetOciArchive(), s.args.GetDigest())
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%w: %w", err, tasks.ErrIrreversible)
	}
	return err
}
