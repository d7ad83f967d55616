package gpus

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	gpuv1 "github.com/gpuaas/millwright/proto/millwright/gpu/v1"
	"github.com/gpuaas/millwright/tasks/host"
)

// maxHolders is the most that [Set.GPUHolders] returns.
const maxHolders = 100

// GPUHolders implements host.GPUReader. The driver names only who computes; who
// monitors, or was left behind, is found by the device nodes that it has open.
// Their memory maps are not looked at: a process that the kernel holds may keep
// its own locked, and whoever computes has the node open as well.
func (s *Set) GPUHolders(ctx context.Context, uuid string) ([]host.GPUHolder, error) {
	fail := func(err error) error { return fmt.Errorf("find who holds GPU %s: %w", uuid, err) }
	looked, err := s.look(ctx, &gpuv1.ChildLook{Uuid: uuid, Whole: true})
	if err != nil {
		return nil, fail(err)
	}
	if len(looked) != 1 {
		return nil, fail(host.ErrGPUUnknown)
	}
	if p := looked[0].GetProblem(); p != nil {
		return nil, fail(failure(p))
	}
	found := map[int]string{}
	for _, p := range looked[0].GetProcesses() {
		found[int(p.GetPid())] = "computes"
	}
	nodes, err := s.nodesOf(identity(looked[0]).Minor)
	if err != nil {
		return nil, fail(err)
	}
	if err := s.open(ctx, nodes, found); err != nil {
		return nil, fail(err)
	}
	var out []host.GPUHolder
	for pid, how := range found {
		if !s.ours(pid) {
			out = append(out, host.GPUHolder{PID: pid, Command: s.command(pid), How: how})
		}
	}
	slices.SortFunc(out, func(a, b host.GPUHolder) int { return a.PID - b.PID })
	return out[:min(len(out), maxHolders)], nil
}

// open finds the processes that have one of the nodes open. Those that end
// meanwhile are passed over.
func (s *Set) open(ctx context.Context, nodes []string, found map[int]string) error {
	entries, err := os.ReadDir(s.cfg.Proc)
	if err != nil {
		return err
	}
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		if err := ctx.Err(); err != nil {
			return context.Cause(ctx)
		}
		dir := filepath.Join(s.cfg.Proc, e.Name(), "fd")
		fds, _ := os.ReadDir(dir)
		for _, fd := range fds {
			target, err := os.Readlink(filepath.Join(dir, fd.Name()))
			if err == nil && slices.Contains(nodes, strings.TrimSuffix(target, " (deleted)")) {
				found[pid] = target
				break
			}
		}
	}
	return nil
}

// ours says whether a process is the agent's own.
func (s *Set) ours(pid int) bool {
	exe, err := os.Readlink(filepath.Join(s.cfg.Proc, strconv.Itoa(pid), "exe"))
	return pid == os.Getpid() || err == nil && strings.TrimSuffix(exe, " (deleted)") == s.cfg.Program
}

func (s *Set) command(pid int) string {
	dir := filepath.Join(s.cfg.Proc, strconv.Itoa(pid))
	b, _ := os.ReadFile(filepath.Join(dir, "cmdline"))
	if line := strings.TrimSpace(strings.ReplaceAll(string(b), "\x00", " ")); line != "" {
		const limit = 200
		return strings.ToValidUTF8(line[:min(len(line), limit)], "?")
	}
	b, _ = os.ReadFile(filepath.Join(dir, "comm"))
	return strings.TrimSpace(string(b))
}

// nodesOf are the device nodes of a GPU and of its MIG devices.
func (s *Set) nodesOf(minor int) ([]string, error) {
	if minor < 0 {
		return nil, errors.New("the driver does not tell the number of its device node")
	}
	out := []string{filepath.Join(s.cfg.Dev, fmt.Sprintf("nvidia%d", minor))}
	caps, err := s.capabilities()
	prefix := fmt.Sprintf("gpu%d/", minor)
	for name, number := range caps {
		if strings.HasPrefix(name, prefix) {
			out = append(out, s.capNode(number))
		}
	}
	return out, err
}

func (s *Set) capNode(number int) string {
	return filepath.Join(s.cfg.Dev, "nvidia-caps", fmt.Sprintf("nvidia-cap%d", number))
}

// capabilities are the numbers of the device nodes that stand for the rights to
// instances, by name: gpu0/gi1/access, gpu0/gi1/ci0/access. The driver gives them
// anew, so they are read each time. One without the file has other ways.
func (s *Set) capabilities() (map[string]int, error) {
	b, err := os.ReadFile(s.cfg.Minors)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	out := map[string]int{}
	lines := bufio.NewScanner(bytes.NewReader(b))
	for lines.Scan() {
		var name string
		var number int
		if n, _ := fmt.Sscan(lines.Text(), &name, &number); n == 2 {
			out[name] = number
		}
	}
	return out, errors.Join(err, lines.Err())
}
