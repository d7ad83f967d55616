package storage

import (
	"errors"
	"path"
	"slices"
	"strings"
	"testing"

	"google.golang.org/protobuf/encoding/protojson"

	storagev1 "github.com/gpuaas/millwright/proto/millwright/storage/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/tasks"
)

// TestLongMountPoint checks that the file of a key has a name that a file can
// have, however long its unit's is.
func TestLongMountPoint(t *testing.T) {
	target := "/" + strings.Repeat("a", 248)
	if unit, key := MountUnit(target), path.Base(ownKeyPath(target)); len(unit) > 255 || len(key) > len(unit) {
		t.Errorf("a unit's name of %d bytes, a key's of %d", len(unit), len(key))
	}
}

// TestClientsAreGivenTheKey checks that each client that takes a key is told just
// the file to which it is written, by a name that nobody on the way reads as
// something else: systemd and libfuse unescape backslashes.
func TestClientsAreGivenTheKey(t *testing.T) {
	key := &taskv1.SecretRef{Name: "k", Salt: make([]byte, tasks.SaltBytes), Sha256: make([]byte, tasks.DigestBytes)}
	s3 := func(client storagev1.S3Client) *storagev1.MountSpec {
		b := &storagev1.S3Source{Client: client, Bucket: "abc", Key: key}
		if client == storagev1.S3Client_S3_CLIENT_RCLONE {
			b.Remote = "r"
		}
		return &storagev1.MountSpec{Source: &storagev1.MountSpec_S3{S3: b}}
	}
	for line, spec := range map[string]*storagev1.MountSpec{
		"passwd_file=": s3(storagev1.S3Client_S3_CLIENT_S3FS),
		"Environment=AWS_SHARED_CREDENTIALS_FILE=": s3(storagev1.S3Client_S3_CLIENT_MOUNT_S3),
		"config=":     s3(storagev1.S3Client_S3_CLIENT_RCLONE),
		"secretfile=": {Source: &storagev1.MountSpec_Cephfs{Cephfs: &storagev1.CephfsSource{Monitors: []string{"m"}, User: "u", Key: key}}},
	} {
		for _, target := range []string{"/mnt/models", "/mnt/my-models", "/srv/.a+b@c=d,e~f"} {
			spec.Target = target
			if err := (Mount{}).Validate(spec); err != nil {
				t.Fatal(err)
			}
			unit, err := unitFile(spec)
			if err != nil {
				t.Fatal(err)
			}
			_, rest, found := strings.Cut(unit, line)
			given, _, _ := strings.Cut(strings.SplitN(rest, "\n", 2)[0], ",")
			if wrote := keyFileOf(spec).write().GetPath(); !found || given != wrote {
				t.Errorf("%s%s is what the client is told, and the key is in %s", line, given, wrote)
			}
			if c, bad := firstBad(given, "._-+/"); bad {
				t.Errorf("%s%s: %q means something to those who read it", line, given, c)
			}
		}
	}
	if a, b := ownKeyPath("/a-b"), ownKeyPath("/a+2db"); a == b {
		t.Errorf("two mount points have one key file, %s", a)
	}
}

func TestSourcesValidate(t *testing.T) {
	const aKey = `{"name": "k", "salt": "AAECAwQFBgcICQoLDA0ODw==", "sha256": "QvbXb9gbAdfwnacLOWy8SGS3Ew+SN9RBVJ6gUILkJks="}`
	const wait = `"target": "/mnt/x", "wait": {"attempts": 3, "backOff": "2s"}, `
	for _, tc := range []struct {
		spec string
		want []string
	}{
		{`{` + wait + `"nfs": {"server": "f", "path": "/e", "version": "4.2", "nconnect": 16, "port": 65535}}`, nil},
		{`{"target": "/mnt/x", "nfs": {"server": "f,soft", "path": "e", "version": "5", "nconnect": 17, "port": 65536, "soft": true, "transport": 9}}`,
			[]string{"nfs.server", "nfs.path", "nfs.version", "nfs.nconnect", "nfs.transport", "nfs.port", "nfs.soft"}},
		{`{"target": "/mnt/x", "nfs": {"server": "f", "path": "/e\n[Service]", "version": "3", "nconnect": 1}}`, []string{"nfs.path", "nfs.nconnect"}},
		{`{"target": "/mnt/x", "lustre": {"mgs": ["10.0.0.1@tcp"], "filesystem": "fs"}}`, nil},
		{`{"target": "/mnt/x", "lustre": {"mgs": ["10.0.0.1"], "filesystem": "ninechars", "subdirectory": "a", "locks": 9}}`,
			[]string{"lustre.mgs[0]", "lustre.filesystem", "lustre.subdirectory", "lustre.locks"}},
		{`{"target": "/mnt/x", "lustre": {}}`, []string{"lustre.mgs", "lustre.filesystem"}},
		{`{"target": "/mnt/x", "weka": {"backends": ["a b"], "filesystem": "f/g", "interfaces": ["ib0,x"], "cores": 65, "cache": 7, "authFile": "/a,b"}}`,
			[]string{"weka.backends[0]", "weka.filesystem", "weka.interfaces[0]", "weka.cores", "weka.cache", "weka.auth_file"}},
		{`{"target": "/mnt/x", "beegfs": {"configFile": "rel"}}`, []string{"beegfs.config_file"}},
		{`{"target": "/mnt/x", "cephfs": {"monitors": ["m:0", "m:70000"], "path": "a", "user": "u,secret=x", "filesystem": "-f"}}`,
			[]string{"cephfs.monitors[0]", "cephfs.monitors[1]", "cephfs.path", "cephfs.user", "cephfs.key", "cephfs.filesystem"}},
		{`{"target": "/mnt/x", "s3": {"bucket": "Up", "prefix": "/a", "endpoint": "ftp://h", "region": "a b", "remote": "r"}}`,
			[]string{"s3.client", "s3.bucket", "s3.prefix", "s3.endpoint", "s3.region", "s3.key", "s3.remote"}},
		{`{"target": "/mnt/x", "readOnly": true, "s3": {"client": 3, "bucket": "abc", "endpoint": "http://h", "region": "r", "pathStyle": true, "keyFile": "/k"}}`,
			[]string{"s3.remote", "s3.endpoint", "s3.region", "s3.path_style", "sentinel"}},
		{`{"target": "/mnt/x", "readOnly": true, "sentinel": "README", "s3": {"client": 2, "bucket": "abc", "keyFile": "/k"}}`, nil},
		{`{"target": "/mnt/x", "s3": {"client": 1, "bucket": "abc", "key": ` + aKey + `}}`, nil},
		{`{"target": "/mnt/x", "s3": {"client": 1, "bucket": "abc", "keyFile": "/k", "key": ` + aKey + `}}`, []string{"s3.key_file"}},
		{`{"target": "/mnt/x", "s3": {"client": 1, "bucket": "abc", "key": {"name": "without-digest"}}}`, []string{"s3.key"}},
		{`{"target": "/mnt/x", "cephfs": {"monitors": ["m"], "user": "u", "key": {"name": "A B"}}}`, []string{"cephfs.key.name"}},
		{`{"target": "/mnt/x", "sentinel": "../etc/shadow", "device": {"uuid": "0F0E", "fstype": "btrfs"}}`, []string{"device.uuid", "device.fstype", "sentinel"}},
		{`{"target": "/mnt/x", "device": {"path": "/dev/sda1", "fstype": "xfs"}}`, []string{"device.path"}},
		{`{` + wait + `"device": {"path": "/dev/disk/by-id/a", "fstype": "xfs"}}`, []string{"wait"}},
		{`{"target": "/mnt/x", "wait": {"attempts": 21, "backOff": "301s"}, "beegfs": {}}`, []string{"wait.attempts", "wait.back_off"}},
	} {
		spec := &storagev1.MountSpec{}
		if err := protojson.Unmarshal([]byte(tc.spec), spec); err != nil {
			t.Fatal(err)
		}
		var p tasks.Problems
		err := Mount{}.Validate(spec)
		if err != nil && !errors.As(err, &p) {
			t.Fatalf("%s: %T", tc.spec, err)
		}
		var got []string
		for _, q := range p {
			got = append(got, q.Field)
		}
		if !slices.Equal(got, tc.want) {
			t.Errorf("%s\nhas problems with %v, want %v\n%v", tc.spec, got, tc.want, err)
		}
	}
}

// FuzzUnit checks that whatever Validate accepts is one unit file that says what
// was asked for and nothing else: no value makes a line, a section, a specifier
// or an option of its own.
func FuzzUnit(f *testing.F) {
	for _, seed := range []string{"a", "a,soft", "a\nExecStart=/bin/sh", "a%n", "a b", `a\x20b`, "[Service]", "srv", "10.0.0.1@o2ib", "/mnt/a", "a;b", "4.2"} {
		f.Add(seed, seed, seed, uint8(0))
		f.Add("srv", "/exp", "4.2", uint8(1))
		f.Add(seed, "/k", "abc", uint8(5))
	}
	f.Fuzz(func(t *testing.T, a, b, c string, which uint8) {
		spec := &storagev1.MountSpec{Target: "/mnt/data", ReadOnly: which&16 != 0, Sentinel: "f"}
		switch which % 8 {
		case 0:
			spec.Target = a
			spec.Source = &storagev1.MountSpec_Bind{Bind: &storagev1.BindSource{Path: b}}
		case 1:
			spec.Source = &storagev1.MountSpec_Nfs{Nfs: &storagev1.NfsSource{Server: a, Path: b, Version: c}}
		case 2:
			spec.Source = &storagev1.MountSpec_Lustre{Lustre: &storagev1.LustreSource{Mgs: []string{a}, Filesystem: b, Subdirectory: c}}
		case 3:
			spec.Source = &storagev1.MountSpec_Weka{Weka: &storagev1.WekaSource{Backends: []string{a}, Filesystem: b, Interfaces: []string{c}, AuthFile: b}}
		case 4:
			spec.Source = &storagev1.MountSpec_Cephfs{Cephfs: &storagev1.CephfsSource{Monitors: []string{a}, KeyFile: b, User: c, Filesystem: c}}
		case 5:
			spec.Source = &storagev1.MountSpec_S3{S3: &storagev1.S3Source{Client: storagev1.S3Client(1 + which/64), Bucket: c, Prefix: a, KeyFile: b, Region: a, Endpoint: a}}
		case 6:
			spec.Source = &storagev1.MountSpec_Device{Device: &storagev1.DeviceSource{Path: a, Uuid: b, Fstype: c}}
		default:
			spec.Source = &storagev1.MountSpec_Beegfs{Beegfs: &storagev1.BeegfsSource{ConfigFile: a}}
		}
		if (Mount{}).Validate(spec) != nil {
			return
		}
		content, err := unitFile(spec)
		if err != nil {
			t.Fatal(err)
		}
		checkUnitFile(t, spec, content)
	})
}

func checkUnitFile(t *testing.T, spec *storagev1.MountSpec, content string) {
	u, src := settings(content), sourceOf(spec)
	want := slices.Clone(src.options)
	if spec.GetReadOnly() {
		want = append(want, "ro")
	}
	if got := strings.Split(u.setting("Mount.Options"), ","); !slices.Equal(got, want) {
		t.Errorf("options %q, want %q", got, want)
	}
	if u.setting("Mount.What") != src.what || u.setting("Mount.Where") != spec.GetTarget() || u.setting("Mount.Type") != src.unitType {
		t.Errorf("it mounts something else:\n%s", content)
	}
	for _, key := range u.keys {
		if len(u.values[key]) > 1 {
			t.Errorf("%s stands twice:\n%s", key, content)
		}
		switch section, _, _ := strings.Cut(key, "."); section {
		case "Unit", "Mount", "Install":
		default:
			t.Errorf("section of %s:\n%s", key, content)
		}
	}
	if strings.ContainsAny(content, "%\\\"'$`") {
		t.Errorf("a character that systemd reads in its own way:\n%s", content)
	}
}
