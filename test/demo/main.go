// Command demo does the main job of Millwright on real nodes of this machine,
// and asserts everything that it tells: when one thing is not as it says, it
// exits with 1. It needs root and the binaries and packages that `make demo`
// builds, and leaves nothing behind but the nodes' cached image.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	"github.com/gpuaas/millwright/test/cluster"
	"github.com/gpuaas/millwright/test/testbed"
)

// bedName is the testbed of the demo.
const bedName = "demo"

const downTimeout = 2 * time.Minute

func main() {
	keep := flag.Bool("keep", false, "keep the nodes and the server running; -down ends them")
	down := flag.Bool("down", false, "end what -keep left running")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	log := slog.New(slog.NewTextHandler(os.Stdout, nil))
	err := run(ctx, *keep, *down, log)
	interrupted := ctx.Err() != nil
	stop()
	switch {
	case err == nil:
		return
	case interrupted:
		fmt.Fprintln(os.Stderr, "demo: interrupted:", err)
		os.Exit(130)
	}
	fmt.Fprintln(os.Stderr, "\ndemo: FAILED:", err)
	os.Exit(1)
}

func run(ctx context.Context, keep, down bool, log *slog.Logger) error {
	if down {
		return testbed.Down(ctx, bedName, log)
	}
	root, variant, err := built()
	if err != nil {
		return err
	}
	start := time.Now()
	fmt.Println("Millwright's main job, on real nodes: each is a Debian with its own systemd, in its own network.")
	bed, err := testbed.Up(ctx, testbed.Config{Name: bedName, Nodes: 2, Storage: true, Owned: !keep, Log: log})
	if errors.Is(err, testbed.ErrUp) {
		return fmt.Errorf("%w: end it with make demo-down", err)
	}
	if err != nil {
		return err
	}
	err = show(ctx, bed, root, variant, log)
	if keep && err == nil {
		howToGoOn(bed)
		return nil
	}
	if err := errors.Join(err, takeDown(ctx, bed)); err != nil {
		return err
	}
	fmt.Printf("\nDone in %d s. Nothing of it is left: no process, mount, link, control group or port.\n", int(time.Since(start).Seconds()))
	fmt.Println("To look further, keep it running: make demo-up. It then says what to try.")
	return nil
}

// built returns the repository and the variant of the agent to install.
func built() (root, variant string, err error) {
	if root, err = os.Getwd(); err != nil {
		return "", "", err
	}
	switch fault := os.Getenv("DEMO_BREAK"); fault {
	case "":
		variant = cluster.Release
	case "adopt":
		fmt.Println("DEMO_BREAK=adopt: this agent was built to lose the commands that it had started; the demo must fail.")
		variant = cluster.NoAdopt
	default:
		return "", "", fmt.Errorf("DEMO_BREAK=%s: unknown; it can be adopt", fault)
	}
	for _, file := range []string{
		filepath.Join("bin/millctl"), filepath.Join("bin/millwright-server"), filepath.Join("dist", variant, "millwright-agent.deb"),
	} {
		if _, err := os.Stat(file); err != nil {
			return "", "", fmt.Errorf("%w: run this as make demo, which builds it, in the repository", err)
		}
	}
	return root, variant, nil
}

func show(ctx context.Context, bed *testbed.Testbed, root, variant string, log *slog.Logger) error {
	d, err := newDemo(bed, root, variant, log)
	if err != nil {
		return err
	}
	for _, part := range []struct {
		title string
		do    func(context.Context) error
	}{
		{"The server starts; both nodes join it, each with its own bundle", d.join},
		{"One signature mounts a GlusterFS volume on both nodes", d.mount},
		{"The nodes' own policy decides what runs on them", d.policy},
		{"The agent of n1 is killed in the middle of a task", d.killAgent},
		{"A command ends while the agent of n1 is down", d.endWithoutAgent},
		{"n2 is rebooted with a task in flight", d.reboot},
		{"The history tells what happened", d.history},
	} {
		fmt.Printf("\n== %s\n", part.title)
		if err := part.do(ctx); err != nil {
			return fmt.Errorf("%s: %w", part.title, err)
		}
	}
	return nil
}

// takeDown also runs when ctx was cancelled.
func takeDown(ctx context.Context, bed *testbed.Testbed) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), downTimeout)
	defer cancel()
	if err := bed.Down(ctx); err != nil {
		return err
	}
	return nothingLeft(bed)
}

func howToGoOn(bed *testbed.Testbed) {
	fmt.Printf(`
It keeps running. To look further:

  eval "$(bin/testbed env --name %[1]s)"
  bin/millctl node list
  bin/millctl task list
  bin/millctl task get ID
  bin/millctl task watch
  echo 'argv: [/usr/local/bin/demo-work, hello, "0"]' | bin/millctl task run system.command -n n1 -f -
  bin/testbed exec --name %[1]s n1 -- millwrightd status
  bin/testbed exec --name %[1]s n1 -- millwrightd journal list
  bin/testbed kill --name %[1]s n2; bin/testbed start --name %[1]s n2
  bin/testbed cut --name %[1]s n1; bin/testbed heal --name %[1]s n1
  less %[2]s

To end it: make demo-down
`, bedName, bed.ProcessLog("server"))
}
