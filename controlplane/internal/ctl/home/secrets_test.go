package home_test

import (
	"fmt"
	"path/filepath"
	"sync"
	"testing"

	"github.com/gpuaas/millwright/controlplane/internal/ctl/home"
	secretv1 "github.com/gpuaas/millwright/proto/millwright/secret/v1"
)

// Several millctl that put secrets at the same time lose none of their digests.
func TestSecretsAtTheSameTime(t *testing.T) {
	const n = 50
	dir := filepath.Join(t.TempDir(), "home")
	if _, err := home.Init(dir, founder(t.TempDir())); err != nil {
		t.Fatal(err)
	}
	open := func() *home.Home {
		h, err := home.Open(dir)
		if err != nil {
			t.Fatal(err)
		}
		return h
	}
	homes := make([]*home.Home, n)
	for i := range homes {
		homes[i] = open()
	}
	var group sync.WaitGroup
	for i := range n {
		group.Go(func() {
			if err := homes[i].KeepSecret("here", &secretv1.Secret{Name: fmt.Sprintf("s%d", i)}); err != nil {
				t.Error(err)
			}
		})
	}
	group.Wait()
	have, err := open().Secrets("here")
	if err != nil || len(have) != n {
		t.Errorf("%d of %d secrets are known, %v", len(have), n, err)
	}
}
