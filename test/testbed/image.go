package testbed

import (
	"context"
	"crypto/sha256"
	_ "embed"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"time"
)

const imageSuite = "bookworm"

// imagePackages are what a node has besides Debian's essential packages. The
// storage node uses the same image: the server half of GlusterFS adds little. dnf
// and rpm are there to be tested, and look after nothing.
var imagePackages = []string{
	"ca-certificates",
	"containerd",
	"createrepo-c",
	"dbus",
	"dnf",
	"dnf-plugins-core",
	"faketime",
	"glusterfs-client",
	"glusterfs-server",
	"iproute2",
	"iputils-ping",
	"munge",
	"procps",
	"rpm",
	"runc",
	"s3fs",
	"slurm-client",
	"slurmctld",
	"slurmd",
	"strace",
	"systemd",
	"systemd-sysv",
	"xfsprogs",
}

//go:embed image.sh
var imageScript string

func imageRoot(image string) string { return filepath.Join(cacheRoot, image, "root") }

// imageID names the image by all that goes into it.
func imageID() string {
	sum := sha256.Sum256([]byte(strings.Join([]string{
		imageSuite, runtime.GOARCH, strings.Join(imagePackages, " "), imageScript,
	}, "\n")))
	return hex.EncodeToString(sum[:8])
}

// ensureImage returns the id of the nodes' image and builds it if the machine
// has none. It is made under another name and renamed, so one that is there is
// whole.
func ensureImage(ctx context.Context, log *slog.Logger) (string, error) {
	id := imageID()
	if err := os.MkdirAll(cacheRoot, 0o755); err != nil {
		return "", err
	}
	unlock, err := lockFile(ctx, filepath.Join(cacheRoot, ".lock"))
	if err != nil {
		return "", err
	}
	defer unlock()
	if _, err := os.Stat(imageRoot(id)); err == nil {
		return id, nil
	}
	if err := removeUnfinishedImages(); err != nil {
		return "", err
	}
	log.Info("building the nodes' image with mmdebstrap; this is done once", "image", id, "packages", strings.Join(imagePackages, " "))
	start := time.Now()
	tmp, err := os.MkdirTemp(cacheRoot, ".new-*")
	if err != nil {
		return "", err
	}
	if err := buildImage(ctx, filepath.Join(tmp, "root")); err != nil {
		return "", errors.Join(err, os.RemoveAll(tmp))
	}
	if err := os.Chmod(tmp, 0o755); err != nil {
		return "", errors.Join(err, os.RemoveAll(tmp))
	}
	if err := os.Rename(tmp, filepath.Join(cacheRoot, id)); err != nil {
		return "", errors.Join(err, os.RemoveAll(tmp))
	}
	log.Info("built the nodes' image", "image", id, "seconds", int(time.Since(start).Seconds()))
	return id, nil
}

// removeUnfinishedImages removes what killed builds left. The caller holds the
// lock, so none of them goes on.
func removeUnfinishedImages() error {
	left, err := filepath.Glob(filepath.Join(cacheRoot, ".new-*"))
	if err != nil {
		return err
	}
	for _, dir := range left {
		if err := os.RemoveAll(dir); err != nil {
			return err
		}
	}
	return nil
}

func buildImage(ctx context.Context, root string) error {
	args := []string{
		// In namespaces of its own: its processes and mounts end with it.
		"--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "--",
		"mmdebstrap", "--mode=root", "--variant=minbase", "--quiet",
		`--aptopt=APT::Install-Recommends "false"`,
		"--include=" + strings.Join(imagePackages, ","),
		imageSuite, root,
	}
	// The default archive, or the one that the caller's machine can reach.
	if mirror := os.Getenv("MILLWRIGHT_TESTBED_MIRROR"); mirror != "" {
		args = append(args, mirror)
	}
	if _, err := run(ctx, "unshare", args...); err != nil {
		return err
	}
	if _, err := run(ctx, "chroot", root, "sh", "-c", imageScript); err != nil {
		return fmt.Errorf("prepare the image: %w", err)
	}
	return nil
}
