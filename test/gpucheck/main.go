// Command gpucheck is `make gpu-check`: on a machine with NVIDIA GPUs it compares
// what millwright-gpu reports with nvidia-smi, value by value, and prints how
// long each question took. It only reads, and changes nothing on the GPUs.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

func main() {
	program := flag.String("program", "bin/millwright-gpu", "the program to check, as make gpu-child builds it")
	library := flag.String("library", "", "the NVML library; empty: the system's")
	smi := flag.String("smi", "nvidia-smi", "the program to compare with")
	rounds := flag.Int("rounds", 20, "samples to time")
	flag.Parse()
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	if err := check(ctx, os.Stdout, *program, *library, *smi, *rounds); err != nil {
		fmt.Fprintln(os.Stderr, "gpucheck:", err)
		os.Exit(1)
	}
}

func check(ctx context.Context, out io.Writer, program, library, smi string, rounds int) error {
	conn, stop, err := begin(ctx, program)
	if err != nil {
		return err
	}
	defer stop()
	c := &client{conn: conn, took: map[string][]time.Duration{}}
	if err := c.start(library); err != nil {
		return err
	}
	inv, err := c.inventory()
	if err != nil {
		return err
	}
	table, err := ask(ctx, smi)
	if err != nil {
		return err
	}
	sample, err := c.sample(rounds)
	if err != nil {
		return err
	}
	again, err := ask(ctx, smi)
	if err != nil {
		return err
	}
	wrong := compare(out, inv, sample, table, again)
	c.print(out)
	if wrong > 0 {
		return fmt.Errorf("%d values differ", wrong)
	}
	_, err = fmt.Fprintf(out, "all values of %d GPUs agree with %s\n", len(inv.GetGpus()), smi)
	return err
}

// begin starts the program with a socket as descriptor 3, as the agent does.
func begin(ctx context.Context, program string) (net.Conn, func(), error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("make socket pair: %w", err)
	}
	ours, theirs := os.NewFile(uintptr(fds[0]), "ours"), os.NewFile(uintptr(fds[1]), "theirs")
	defer theirs.Close()
	defer ours.Close()
	conn, err := net.FileConn(ours)
	if err != nil {
		return nil, nil, fmt.Errorf("use socket pair: %w", err)
	}
	cmd := exec.CommandContext(ctx, program)
	cmd.ExtraFiles, cmd.Stderr = []*os.File{theirs}, os.Stderr
	if err := cmd.Start(); err != nil {
		return nil, nil, errors.Join(fmt.Errorf("start %s: %w", program, err), conn.Close())
	}
	return conn, func() {
		conn.Close() //nolint:errcheck // it ends then
		cmd.Wait()   //nolint:errcheck // its end says nothing more
	}, nil
}

// columns are what nvidia-smi is asked, by its own names.
var columns = []string{
	"index", "uuid", "name", "serial", "pci.bus_id", "driver_version", "vbios_version", "memory.total", "mig.mode.current", "mig.mode.pending",
	"ecc.mode.current", "pcie.link.gen.max", "pcie.link.width.max", "power.min_limit", "power.max_limit", "clocks.max.sm", "persistence_mode",
	"temperature.gpu", "temperature.memory", "enforced.power.limit", "ecc.errors.corrected.volatile.total", "ecc.errors.uncorrected.volatile.total",
	"ecc.errors.corrected.aggregate.total", "ecc.errors.uncorrected.aggregate.total", "pcie.link.width.current", "memory.used", "power.draw", "clocks.sm",
}

// ask asks nvidia-smi and returns its answers, by GPU and column. Columns that it
// does not know are asked no more.
func ask(ctx context.Context, smi string) ([]map[string]string, error) {
	known := columns
	for {
		cmd := exec.CommandContext(ctx, smi, "--query-gpu="+strings.Join(known, ","), "--format=csv,noheader,nounits")
		raw, err := cmd.Output()
		if name, ok := unknownColumn(string(raw)); ok {
			if known = without(known, name); len(known) > 0 {
				continue
			}
		}
		if err != nil {
			return nil, fmt.Errorf("ask %s: %w", smi, err)
		}
		var out []map[string]string
		for line := range strings.Lines(string(raw)) {
			cells := strings.Split(strings.TrimSpace(line), ", ")
			if len(cells) != len(known) {
				return nil, fmt.Errorf("%s: %d cells in %q, want %d", smi, len(cells), line, len(known))
			}
			row := map[string]string{}
			for i, name := range known {
				row[name] = strings.TrimSpace(cells[i])
			}
			out = append(out, row)
		}
		return out, nil
	}
}

// unknownColumn finds the column in nvidia-smi's complaint about one.
func unknownColumn(said string) (string, bool) {
	_, rest, ok := strings.Cut(said, `Field "`)
	name, tail, closed := strings.Cut(rest, `"`)
	return name, ok && closed && strings.Contains(tail, "not a valid field")
}

func without(names []string, name string) []string {
	var out []string
	for _, n := range names {
		if n != name {
			out = append(out, n)
		}
	}
	return out
}
