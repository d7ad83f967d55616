package storage

import (
	"fmt"

	storagev1 "github.com/gpuaas/millwright/proto/millwright/storage/v1"
	"github.com/gpuaas/millwright/tasks"
)

const (
	nfsPort     = 2049
	nfsRDMAPort = 20049
	maxConnect  = 16
)

func nfsRDMA(n *storagev1.NfsSource) bool {
	return n.GetTransport() == storagev1.NfsTransport_NFS_TRANSPORT_RDMA
}

// nfsSource mounts hard unless it is told otherwise. retry=0 leaves it to the
// task how often it is tried.
func nfsSource(n *storagev1.NfsSource) source {
	name := n.GetServer() + ":" + n.GetPath()
	s := source{
		what: name, unitType: "nfs", network: true, fstype: "nfs4", shown: name,
		options: []string{"_netdev", "vers=" + n.GetVersion()},
		needs:   needs{programs: []program{{"mount.nfs", "nfs-common"}}, kernel: []string{"nfs4"}},
	}
	show := func(key, value string) { s.inForce = append(s.inForce, optionInForce{key: key, value: value}) }
	show("vers", n.GetVersion())
	if n.GetVersion() == "3" {
		s.fstype, s.needs.kernel = "nfs", []string{"nfs"}
		s.after = []string{"rpcbind.service"}
		s.needs.programs = append(s.needs.programs, program{"rpc.statd", "nfs-common"}, program{"rpcbind", "rpcbind"})
	}
	if c := n.GetNconnect(); c > 1 {
		s.options = append(s.options, fmt.Sprintf("nconnect=%d", c))
		show("nconnect", fmt.Sprint(c))
	}
	port := n.GetPort()
	switch {
	case nfsRDMA(n):
		if port == 0 {
			port = nfsRDMAPort
		}
		s.options = append(s.options, "proto=rdma", fmt.Sprintf("port=%d", port))
		show("proto", "rdma")
		s.needs.modules = []string{"rpcrdma"}
		s.needs.servers = []endpoint{{n.GetServer(), 0}}
	case port != 0:
		s.options = append(s.options, "proto=tcp", fmt.Sprintf("port=%d", port))
		s.needs.servers = []endpoint{{n.GetServer(), port}}
	default:
		s.options = append(s.options, "proto=tcp")
		s.needs.servers = []endpoint{{n.GetServer(), nfsPort}}
	}
	if !nfsRDMA(n) {
		show("proto", "tcp")
	}
	how := "hard"
	if n.GetSoft() {
		how = "soft"
	}
	s.inForce = append(s.inForce, optionInForce{key: how, flag: true})
	s.options = append(s.options, how, "timeo=600", "retrans=2", "noresvport", "retry=0")
	return s
}

func checkNFS(p *tasks.Problems, n *storagev1.NfsSource, readOnly bool) {
	if rule := checkHost(n.GetServer()); rule != "" {
		p.Add("nfs.server", n.GetServer(), rule)
	}
	checkPath(p, "nfs.path", n.GetPath())
	switch n.GetVersion() {
	case "3", "4.0", "4.1", "4.2":
	default:
		p.Add("nfs.version", n.GetVersion(), "must be one of 3, 4.0, 4.1 and 4.2: give the one that the server has")
	}
	if c := n.GetNconnect(); c == 1 || c > maxConnect {
		p.Add("nfs.nconnect", fmt.Sprint(c), fmt.Sprintf("must be 2 to %d: leave it out for one connection", maxConnect))
	}
	checkEnum(p, "nfs.transport", n.GetTransport())
	checkPort(p, "nfs.port", n.GetPort())
	if n.GetSoft() && !readOnly {
		p.Add("nfs.soft", "true", "is for read_only mounts, since a writer would lose data without a word: set read_only, or leave soft out")
	}
}

func checkPort(p *tasks.Problems, field string, port uint32) {
	if port > 65535 {
		p.Add(field, fmt.Sprint(port), "must be at most 65535: leave it out for the usual port")
	}
}
