package secret

import (
	"bytes"
	"strings"
	"testing"

	secretv1 "github.com/gpuaas/millwright/proto/millwright/secret/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/tasks"
)

func ref(name string) *taskv1.SecretRef {
	return &taskv1.SecretRef{Name: name, Salt: bytes.Repeat([]byte{1}, tasks.SaltBytes), Sha256: bytes.Repeat([]byte{2}, tasks.DigestBytes)}
}

func TestValidate(t *testing.T) {
	good := &secretv1.PlaceSpec{Path: "/etc/munge/munge.key", Secret: ref("munge"), User: "munge", Group: "munge"}
	if err := (Place{}).Validate(good); err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct {
		name string
		spec *secretv1.PlaceSpec
		want []string
	}{
		{"empty", &secretv1.PlaceSpec{}, []string{"path: is required", "secret.name: is required"}},
		{"no digest", &secretv1.PlaceSpec{Path: "/etc/a", Secret: &taskv1.SecretRef{Name: "a"}}, []string{`secret: "a": has no digest`, "--secret a=FILE"}},
		{"short digest", &secretv1.PlaceSpec{Path: "/etc/a", Secret: &taskv1.SecretRef{Name: "a", Salt: []byte("x"), Sha256: make([]byte, 32)}}, []string{"has no digest"}},
		{"bad name", &secretv1.PlaceSpec{Path: "/etc/a", Secret: ref("A b")}, []string{"secret.name"}},
		{"relative", &secretv1.PlaceSpec{Path: "etc/a", Secret: ref("a")}, []string{"path", "absolute"}},
		{"not clean", &secretv1.PlaceSpec{Path: "/etc/../a", Secret: ref("a")}, []string{`write "/a"`}},
		{"root", &secretv1.PlaceSpec{Path: "/", Secret: ref("a")}, []string{"path"}},
		{"kernel's", &secretv1.PlaceSpec{Path: "/proc/a", Secret: ref("a")}, []string{"is in /proc"}},
		{"our own", &secretv1.PlaceSpec{Path: "/var/lib/millwright/state.db", Secret: ref("a")}, []string{"is in /var/lib/millwright"}},
		{"a unit", &secretv1.PlaceSpec{Path: "/etc/systemd/system/a.service", Secret: ref("a")}, []string{"is in /etc/systemd"}},
		{"a number for a user", &secretv1.PlaceSpec{Path: "/etc/a", Secret: ref("a"), User: "0"}, []string{`user: "0"`}},
		{"long part", &secretv1.PlaceSpec{Path: "/etc/" + strings.Repeat("a", 201), Secret: ref("a")}, []string{"longer than 200"}},
	} {
		err := (Place{}).Validate(test.spec)
		if err == nil {
			t.Errorf("%s: accepted", test.name)
			continue
		}
		for _, w := range test.want {
			if !strings.Contains(err.Error(), w) {
				t.Errorf("%s: %q lacks %q", test.name, err, w)
			}
		}
	}
	// /etc/sudoers has the mode of a secret that a group can read.
	for _, path := range []string{"/usr/bin/x", "/etc/sudoers", "/etc/sudoers.d/ops", "/etc/shadow", "/etc/cron.d/x", "/etc/millwright-keys/mnt-s3.key"} {
		if err := (Remove{}).Validate(&secretv1.RemoveSpec{Path: path}); err == nil {
			t.Errorf("secret.remove takes %s", path)
		}
	}
}
