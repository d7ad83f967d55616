package storage_kinds

import (
	"net/http"
	"sync"
	"testing"
	"time"

	"github.com/gpuaas/millwright/test/relisten"
	"github.com/gpuaas/millwright/test/s3store"
)

// serve starts the store at address until stop is called or the test ends.
func serve(t *testing.T, s *s3store.Store, address string) (stop func()) {
	t.Helper()
	listener := relisten.Listen(t, address)
	server := &http.Server{Handler: s, ReadHeaderTimeout: 10 * time.Second}
	var done sync.WaitGroup
	done.Go(func() { _ = server.Serve(listener) }) // it ends with stop
	stop = sync.OnceFunc(func() {
		_ = server.Close() // what is open is cut
		done.Wait()
	})
	t.Cleanup(stop)
	return stop
}
