package session

import (
	"bufio"
	"bytes"
	"net"
	"os"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
)

// maxAddresses bounds what a host full of container interfaces would say.
const maxAddresses = 32

// ReadFacts returns what can be read of this host now, with the labels that
// its configuration sets. What cannot be read is left empty.
func ReadFacts(labels map[string]string) *agentv1.NodeFacts {
	f := &agentv1.NodeFacts{Addresses: addresses(), Labels: sortedLabels(labels)}
	if name, err := os.Hostname(); err == nil {
		f.Hostname = name
	}
	if b, err := os.ReadFile("/etc/os-release"); err == nil {
		f.Os = prettyName(b)
	}
	var u unix.Utsname
	if err := unix.Uname(&u); err == nil {
		f.Kernel = unix.ByteSliceToString(u.Release[:])
	}
	return f
}

func sortedLabels(labels map[string]string) []*taskv1.Label {
	var out []*taskv1.Label
	for k, v := range labels {
		out = append(out, &taskv1.Label{Key: k, Value: v})
	}
	slices.SortFunc(out, func(a, b *taskv1.Label) int { return strings.Compare(a.GetKey(), b.GetKey()) })
	return out
}

// addresses are those that others may reach: no loopback, no link-local.
func addresses() []string {
	all, err := net.InterfaceAddrs()
	if err != nil {
		return nil
	}
	var out []string
	for _, a := range all {
		n, ok := a.(*net.IPNet)
		if !ok || !n.IP.IsGlobalUnicast() {
			continue
		}
		out = append(out, n.IP.String())
	}
	slices.Sort(out)
	out = slices.Compact(out)
	return out[:min(len(out), maxAddresses)]
}

// prettyName is PRETTY_NAME of an os-release file.
func prettyName(b []byte) string {
	for lines := bufio.NewScanner(bytes.NewReader(b)); lines.Scan(); {
		v, ok := strings.CutPrefix(lines.Text(), "PRETTY_NAME=")
		if !ok {
			continue
		}
		if u, err := strconv.Unquote(v); err == nil {
			return u
		}
		return strings.Trim(v, `'"`)
	}
	return ""
}
