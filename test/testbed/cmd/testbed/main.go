// Command testbed boots real nodes on this machine to develop and test with.
package main

import (
	"context"
	"os"
	"os/signal"
	"syscall"

	"github.com/gpuaas/millwright/test/testbed/cli"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	code := cli.Run(ctx, os.Args[1:], os.Stdin, os.Stdout, os.Stderr)
	stop()
	os.Exit(code)
}
