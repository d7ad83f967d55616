// Command fakenvml builds the stand-in for NVIDIA's library and runs one of the
// programs beside it on a node of FAKENVML_STATE, for people.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"

	"github.com/gpuaas/millwright/test/fakenvml"
)

const usage = `usage: fakenvml dir                  where the library lies: for LD_LIBRARY_PATH
       fakenvml state|smi ARGS...    fakenvml-state or nvidia-smi, on the node of FAKENVML_STATE
`

func main() {
	os.Exit(run(context.Background(), os.Args[1:]))
}

func run(ctx context.Context, args []string) int {
	if len(args) == 0 {
		fmt.Fprint(os.Stderr, usage)
		return 2
	}
	lib, err := fakenvml.Build(ctx, fakenvml.Variant{})
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	program := map[string]string{"state": "fakenvml-state", "smi": "nvidia-smi"}[args[0]]
	switch {
	case args[0] == "dir" && len(args) == 1:
		fmt.Fprintln(os.Stdout, lib.Dir)
		return 0
	case program == "":
		fmt.Fprint(os.Stderr, usage)
		return 2
	}
	cmd := exec.CommandContext(ctx, filepath.Join(lib.Dir, program), args[1:]...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	var exit *exec.ExitError
	if err := cmd.Run(); errors.As(err, &exit) {
		return exit.ExitCode()
	} else if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}
