package main

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/gpuaas/millwright/test/testbed"
)

// nothingLeft looks for what a testbed leaves, by other means than Down's.
func nothingLeft(bed *testbed.Testbed) error {
	number := strconv.Itoa(int(bed.Address().As4()[2]))
	var left []string
	for _, glob := range []string{
		"/run/millwright-testbed/" + bed.Name(), "/var/lib/millwright-testbed/" + bed.Name(),
		"/sys/fs/cgroup/millwright-testbed-" + bed.Name(), "/sys/fs/cgroup/*/millwright-testbed-" + bed.Name(),
		"/sys/class/net/mwt" + number, "/sys/class/net/mwt" + number + "[nsx]*", "/run/netns/mwt" + number + "-*",
	} {
		found, err := filepath.Glob(glob)
		if err != nil {
			return err
		}
		left = append(left, found...)
	}
	mounts, err := os.ReadFile("/proc/self/mounts")
	if err != nil {
		return err
	}
	processes, err := processesLeft(bed.Name())
	if err != nil {
		return err
	}
	ports, err := portsLeft(bed.Address())
	if err != nil {
		return err
	}
	left = append(append(left, processes...), ports...)
	for line := range strings.Lines(string(mounts)) {
		if strings.Contains(line, "/millwright-testbed/"+bed.Name()+"/") {
			left = append(left, strings.TrimSpace(line))
		}
	}
	if len(left) > 0 {
		return fmt.Errorf("left behind: %s", strings.Join(left, ", "))
	}
	return nil
}

// processesLeft returns the processes that are in a control group of the
// testbed. One that has ended and was not collected yet is none.
func processesLeft(bed string) ([]string, error) {
	files, err := filepath.Glob("/proc/[0-9]*/cgroup")
	if err != nil {
		return nil, err
	}
	var left []string
	for _, file := range files {
		groups, _ := os.ReadFile(file) // the process may have ended
		status, _ := os.ReadFile(filepath.Join(filepath.Dir(file), "status"))
		if strings.Contains(string(groups), "/millwright-testbed-"+bed+"/") && !strings.Contains(string(status), "\nState:\tZ") {
			left = append(left, filepath.Dir(file))
		}
	}
	return left, nil
}

// portsLeft returns the sockets that still listen on an address, as the kernel
// lists them.
func portsLeft(addr netip.Addr) ([]string, error) {
	table, err := os.ReadFile("/proc/net/tcp")
	if err != nil {
		return nil, err
	}
	ip := addr.As4()
	prefix := fmt.Sprintf("%08X:", binary.NativeEndian.Uint32(ip[:]))
	const listening = "0A"
	var left []string
	for line := range strings.Lines(string(table)) {
		fields := strings.Fields(line)
		if len(fields) > 3 && fields[3] == listening && strings.HasPrefix(fields[1], prefix) {
			left = append(left, "port "+addr.String()+" "+fields[1])
		}
	}
	return left, nil
}
