//go:build cgo

// Command millwright-gpu asks the NVIDIA driver on behalf of millwrightd, which
// starts it with a socket as descriptor 3, or with the word once and a question
// that it answers before it ends. See packages serve and nvml.
package main

import (
	"fmt"
	"os"
	"runtime/debug"

	"github.com/gpuaas/millwright/agent/internal/clock"
	"github.com/gpuaas/millwright/agent/internal/gpu/nvml"
	"github.com/gpuaas/millwright/agent/internal/gpu/serve"
)

func main() {
	debug.SetGCPercent(50)
	debug.SetMemoryLimit(16 << 20)
	if len(os.Args) == 3 && os.Args[1] == "once" {
		if err := serve.Once(os.Stdout, os.Args[2], nvml.New(clock.System{})); err != nil {
			fmt.Fprintln(os.Stderr, "millwright-gpu:", err)
			os.Exit(1)
		}
		return
	}
	conn := os.NewFile(3, "agent")
	if st, err := conn.Stat(); err != nil || st.Mode()&os.ModeSocket == 0 {
		fmt.Fprintln(os.Stderr, "millwright-gpu: descriptor 3 is no socket: millwrightd starts this program; to see the GPUs: millwrightd gpu list")
		os.Exit(2)
	}
	if err := serve.Serve(conn, nvml.New(clock.System{})); err != nil {
		fmt.Fprintln(os.Stderr, "millwright-gpu:", err)
		os.Exit(1)
	}
}
