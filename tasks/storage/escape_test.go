package storage_test

import (
	"testing"

	"github.com/gpuaas/millwright/tasks/storage"
)

// TestMountUnit compares with what systemd-escape --path --suffix=mount of
// systemd 252 printed.
func TestMountUnit(t *testing.T) {
	for _, tc := range []struct{ path, want string }{
		{"/", `-.mount`},
		{"/mnt/data", `mnt-data.mount`},
		{"/mnt/mill-wright/data", `mnt-mill\x2dwright-data.mount`},
		{"/a_b:c.d", `a_b:c.d.mount`},
		{"/a b", `a\x20b.mount`},
		{"/.hidden", `\x2ehidden.mount`},
		{"/a/.b", `a-.b.mount`},
		{"/ä", `\xc3\xa4.mount`},
		{"/a//b/", `a-b.mount`},
		{"/x\\y", `x\x5cy.mount`},
		{"/-foo", `\x2dfoo.mount`},
		{"/foo-", `foo\x2d.mount`},
		{"/a'b", `a\x27b.mount`},
		{"/a@b", `a\x40b.mount`},
		{"/a+b", `a\x2bb.mount`},
		{"/a=b,c", `a\x3db\x2cc.mount`},
		{"/0", `0.mount`},
		{"/a%b", `a\x25b.mount`},
		{"/~x", `\x7ex.mount`},
		{"/srv/x.mount", `srv-x.mount.mount`},
		{"/a\tb", `a\x09b.mount`},
		{"/A/Z/9", `A-Z-9.mount`},
		{"/mnt/data-1/data_2/v1.2", `mnt-data\x2d1-data_2-v1.2.mount`},
		{"/a/-/b", `a-\x2d-b.mount`},
		{"/..a", `\x2e.a.mount`},
		{"/日本", `\xe6\x97\xa5\xe6\x9c\xac.mount`},
	} {
		if got := storage.MountUnit(tc.path); got != tc.want {
			t.Errorf("MountUnit(%q) = %q, want %q", tc.path, got, tc.want)
		}
	}
}
