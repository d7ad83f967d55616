package storage

import (
	"path"
	"strings"

	storagev1 "github.com/gpuaas/millwright/proto/millwright/storage/v1"
	"github.com/gpuaas/millwright/tasks"
)

// s3Source mounts a bucket. The key is in a file that the client reads: only
// its path is in the unit.
func s3Source(b *storagev1.S3Source, key keyFile, readOnly bool) source {
	s := source{
		network: true, options: []string{"_netdev", "allow_other"},
		needs: needs{kernel: []string{"fuse"}, secrets: key.needed("s3.key_file")},
	}
	if host, port, ok := splitEndpoint(b.GetEndpoint()); ok {
		s.needs.servers = []endpoint{{host, port}}
	}
	switch b.GetClient() {
	case storagev1.S3Client_S3_CLIENT_MOUNT_S3:
		mountS3(&s, b, key.path, readOnly)
	case storagev1.S3Client_S3_CLIENT_RCLONE:
		rclone(&s, b, key.path)
	default:
		s3fs(&s, b, key.path)
	}
	return s
}

// s3fs is told its name in the mount table, which would be the same for all
// buckets.
func s3fs(s *source, b *storagev1.S3Source, keyFile string) {
	s.what, s.unitType, s.fstype = b.GetBucket(), "fuse.s3fs", "fuse.s3fs"
	if b.GetPrefix() != "" {
		s.what += ":/" + b.GetPrefix()
	}
	s.shown = "s3fs#" + s.what
	s.options = append(s.options, "fsname="+s.shown, "subtype=s3fs", "passwd_file="+keyFile)
	if b.GetEndpoint() != "" {
		s.options = append(s.options, "url="+b.GetEndpoint())
	}
	if b.GetRegion() != "" {
		s.options = append(s.options, "endpoint="+b.GetRegion())
	}
	if b.GetPathStyle() {
		s.options = append(s.options, "use_path_request_style")
	}
	// A server that does not answer ends in an error within a minute.
	s.options = append(s.options, "connect_timeout=5", "readwrite_timeout=10", "retries=1")
	s.needs.programs = []program{{"s3fs", "s3fs"}, {"mount.fuse", "fuse3"}}
}

// mountS3 deletes nothing unless it is told that it may.
func mountS3(s *source, b *storagev1.S3Source, keyFile string, readOnly bool) {
	s.what, s.unitType, s.fstype, s.shown = "s3://"+b.GetBucket(), "mount-s3", "fuse", "mountpoint-s3"
	if b.GetPrefix() != "" {
		s.what += "/" + b.GetPrefix() + "/"
	}
	s.options = []string{"_netdev", "allow-other"}
	if !readOnly {
		s.options = append(s.options, "allow-delete")
	}
	if b.GetEndpoint() != "" {
		s.options = append(s.options, "endpoint-url="+b.GetEndpoint())
	}
	if b.GetRegion() != "" {
		s.options = append(s.options, "region="+b.GetRegion())
	}
	if b.GetPathStyle() {
		s.options = append(s.options, "force-path-style")
	}
	s.environment = []string{"AWS_SHARED_CREDENTIALS_FILE=" + keyFile}
	s.needs.programs = []program{{"mount-s3", "mount-s3"}, {"mount.mount-s3", "mount-s3"}}
}

// rclone writes to the store before a file is closed: otherwise it says yes to
// what the store may refuse later.
func rclone(s *source, b *storagev1.S3Source, keyFile string) {
	s.what, s.unitType, s.fstype = b.GetRemote()+":"+path.Join(b.GetBucket(), b.GetPrefix()), "rclone", "fuse.rclone"
	s.shown = s.what
	s.options = append(s.options, "args2env", "config="+keyFile, "vfs-cache-mode=writes", "vfs-write-back=0s",
		"contimeout=5s", "timeout=10s", "low-level-retries=1")
	s.needs.programs = []program{{"rclone", "rclone"}, {"mount.rclone", "rclone, with a link /sbin/mount.rclone to it"}}
}

func checkS3(p *tasks.Problems, b *storagev1.S3Source, spec *storagev1.MountSpec) {
	if checkEnum(p, "s3.client", b.GetClient()) && b.GetClient() == storagev1.S3Client_S3_CLIENT_UNSPECIFIED {
		p.Add("s3.client", "", "is required: give one of S3_CLIENT_S3FS, S3_CLIENT_MOUNT_S3 and S3_CLIENT_RCLONE")
	}
	if v := b.GetBucket(); len(v) < 3 || len(v) > 63 || strings.ToLower(v) != v || checkHost(v) != "" {
		p.Add("s3.bucket", v, "must be the name of a bucket: 3 to 63 lower case letters, digits, - and .")
	}
	if v := b.GetPrefix(); v != "" {
		if _, bad := firstBad(v, "._-/"); bad || path.Clean("/"+v) != "/"+v || len(v) > 512 {
			p.Add("s3.prefix", v, "must be letters, digits, . _ - and /, without a slash at either end: leave it out for the whole bucket")
		}
	}
	if _, _, ok := splitEndpoint(b.GetEndpoint()); b.GetEndpoint() != "" && !ok {
		p.Add("s3.endpoint", b.GetEndpoint(), "must be http://HOST[:PORT] or https://HOST[:PORT]: leave it out for AWS")
	}
	if b.GetRegion() != "" {
		checkName(p, "s3.region", b.GetRegion(), "give a region such as eu-central-1")
	}
	checkKey(p, "s3", b.GetKeyFile(), b.GetKey())
	checkRclone(p, b)
	if spec.GetReadOnly() && spec.GetSentinel() == "" {
		p.Add("sentinel", "", "is required for a bucket that is mounted read only, since a bucket that is not there looks empty: name a file that is in it")
	}
}

// checkRclone asks for what only rclone takes, and refuses what it has in its
// configuration.
func checkRclone(p *tasks.Problems, b *storagev1.S3Source) {
	if b.GetClient() != storagev1.S3Client_S3_CLIENT_RCLONE {
		if b.GetRemote() != "" {
			p.Add("s3.remote", b.GetRemote(), "is for rclone alone: leave it out")
		}
		return
	}
	checkName(p, "s3.remote", b.GetRemote(), "give the name of the remote in the configuration")
	for _, f := range []struct{ field, value string }{{"s3.endpoint", b.GetEndpoint()}, {"s3.region", b.GetRegion()}} {
		if f.value != "" {
			p.Add(f.field, f.value, "is in the configuration of rclone: leave it out here")
		}
	}
	if b.GetPathStyle() {
		p.Add("s3.path_style", "true", "is in the configuration of rclone: leave it out here")
	}
}

// splitEndpoint splits the address of an object store.
func splitEndpoint(s string) (host string, port uint32, ok bool) {
	usual := uint32(80)
	rest, found := strings.CutPrefix(s, "http://")
	if !found {
		if rest, found = strings.CutPrefix(s, "https://"); !found {
			return "", 0, false
		}
		usual = 443
	}
	host, port = splitPort(rest, usual)
	return host, port, port != 0 && checkHost(host) == ""
}
