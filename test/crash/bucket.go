package main

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"sync"
	"time"

	"github.com/gpuaas/millwright/test/s3store"
)

// Each world has an object store with one bucket.
const (
	storeBucket = "models"
	storeKey    = "CRASHKEYID"
	storePort   = 9000
)

// serveStore starts the store of a world; the function that it returns ends it.
func serveStore(ctx context.Context, address string) (stop func(), err error) {
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", fmt.Sprintf("%s:%d", address, storePort))
	if err != nil {
		return nil, fmt.Errorf("serve the object store: %w", err)
	}
	srv := &http.Server{Handler: s3store.New(storeBucket, storeKey), ReadHeaderTimeout: 10 * time.Second}
	var done sync.WaitGroup
	done.Go(func() { _ = srv.Serve(listener) }) // it ends with stop
	return func() {
		_ = srv.Close() // what is open is cut
		done.Wait()
	}, nil
}
