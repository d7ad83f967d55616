// Command millwrightd is the agent of a node. See package cli.
package main

import (
	"context"
	"os"
	"os/signal"
	"syscall"

	"github.com/gpuaas/millwright/agent/internal/cli"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	code := cli.Main(ctx, cli.Version(), os.Args[1:], os.Stdout, os.Stderr)
	stop()
	os.Exit(code)
}
