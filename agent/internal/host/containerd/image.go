package containerd

import (
	"archive/tar"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"slices"

	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/containerd/v2/core/images/archive"
	"github.com/containerd/errdefs"
	"github.com/containerd/platforms"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/gpuaas/millwright/agent/internal/crash"
	"github.com/gpuaas/millwright/tasks/host"
)

// maxIndex is far more than the index of an archive needs.
const maxIndex = 4 << 20

// imageName is how the store calls an image that Millwright imported.
func imageName(digest string) string { return "millwright.invalid/image@" + digest }

// Image implements [host.ContainerReader].
func (r *Runtime) Image(ctx context.Context, digest string) (host.ImageStatus, error) {
	var st host.ImageStatus
	err := r.do(ctx, "look at image "+digest, func(ctx context.Context, c *client.Client) (err error) {
		if st.Present, err = ready(ctx, c, digest); err != nil {
			return err
		}
		st.Users, err = users(ctx, c, digest)
		return err
	})
	return st, err
}

// ready reports whether an image is in the store and unpacked.
func ready(ctx context.Context, c *client.Client, digest string) (bool, error) {
	i, err := c.GetImage(ctx, imageName(digest))
	if errdefs.IsNotFound(err) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	unpacked, err := i.IsUnpacked(ctx, snapshotter)
	if errdefs.IsNotFound(err) { // a part of its content has gone
		return false, nil
	}
	return unpacked, err
}

func users(ctx context.Context, c *client.Client, digest string) ([]string, error) {
	list, err := c.ContainerService().List(ctx, fmt.Sprintf("labels.%q==%q", labelImage, digest))
	if err != nil {
		return nil, err
	}
	var names []string
	for _, info := range list {
		names = append(names, info.ID)
	}
	slices.Sort(names)
	return names, nil
}

// ImageArchive implements [host.ContainerReader].
func (*Runtime) ImageArchive(ctx context.Context, file string) ([]string, error) {
	f, err := os.Open(file)
	if err != nil {
		return nil, fmt.Errorf("read image archive: %w", err)
	}
	defer func() { _ = f.Close() }() // it was only read
	tr := tar.NewReader(f)
	for ctx.Err() == nil {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			return nil, fmt.Errorf("image archive %s has no index.json: %w", file, fs.ErrInvalid)
		}
		if err != nil {
			return nil, fmt.Errorf("image archive %s: %w: %w", file, err, fs.ErrInvalid)
		}
		if path.Clean(h.Name) != ocispec.ImageIndexFile {
			continue
		}
		var index ocispec.Index
		if err := json.NewDecoder(io.LimitReader(tr, maxIndex)).Decode(&index); err != nil {
			return nil, fmt.Errorf("index of image archive %s: %w: %w", file, err, fs.ErrInvalid)
		}
		var digests []string
		for _, m := range index.Manifests {
			digests = append(digests, m.Digest.String())
		}
		slices.Sort(digests)
		return slices.Compact(digests), nil
	}
	return nil, fmt.Errorf("read image archive %s: %w", file, ctx.Err())
}

// ImportImage implements [host.ContainerController].
func (r *Runtime) ImportImage(ctx context.Context, file, digest string) error {
	r.images.Lock()
	defer r.images.Unlock()
	return r.do(ctx, fmt.Sprintf("import image %s from %s", digest, file), func(ctx context.Context, c *client.Client) error {
		if there, err := ready(ctx, c, digest); there || err != nil {
			return err
		}
		ctx, release, err := lease(ctx, c, "image-"+digest[len("sha256:"):])
		if err != nil {
			return err
		}
		defer release()
		crash.Point("host.image.import.before")
		target, err := store(ctx, c, file, digest)
		if err != nil {
			return err
		}
		record := images.Image{Name: imageName(digest), Target: target}
		if _, err := c.ImageService().Create(ctx, record); err != nil && !errdefs.IsAlreadyExists(err) {
			return err
		}
		crash.Point("host.image.import.stored")
		i, err := c.GetImage(ctx, record.Name)
		if err != nil {
			return err
		}
		err = i.Unpack(ctx, snapshotter)
		crash.Point("host.image.import.after")
		return err
	})
}

// store reads the archive into the content store, which checks each part against
// its digest, and marks what belongs to the image.
func store(ctx context.Context, c *client.Client, file, digest string) (ocispec.Descriptor, error) {
	f, err := os.Open(file)
	if err != nil {
		return ocispec.Descriptor{}, err
	}
	defer func() { _ = f.Close() }() // it was only read
	cs := c.ContentStore()
	top, err := archive.ImportIndex(ctx, cs, f)
	if err != nil {
		return ocispec.Descriptor{}, err
	}
	b, err := content.ReadBlob(ctx, cs, top)
	if err != nil {
		return ocispec.Descriptor{}, err
	}
	var index ocispec.Index
	if err := json.Unmarshal(b, &index); err != nil {
		return ocispec.Descriptor{}, err
	}
	i := slices.IndexFunc(index.Manifests, func(d ocispec.Descriptor) bool { return d.Digest.String() == digest })
	if i < 0 {
		return ocispec.Descriptor{}, fmt.Errorf("it is not in the archive: %w", fs.ErrNotExist)
	}
	children := images.FilterPlatforms(images.ChildrenHandler(cs), platforms.Default())
	return index.Manifests[i], images.WalkNotEmpty(ctx, images.SetChildrenLabels(cs, children), index.Manifests[i])
}

// RemoveImage implements [host.ContainerController].
func (r *Runtime) RemoveImage(ctx context.Context, digest string) error {
	r.images.Lock()
	defer r.images.Unlock()
	return r.do(ctx, "remove image "+digest, func(ctx context.Context, c *client.Client) error {
		used, err := users(ctx, c, digest)
		if err != nil || len(used) > 0 {
			return err
		}
		// Synchronous: its content and snapshots are gone when it returns.
		err = c.ImageService().Delete(ctx, imageName(digest), images.SynchronousDelete())
		if errdefs.IsNotFound(err) {
			return nil
		}
		return err
	})
}
