package storage

import (
	"fmt"
	"strconv"
	"strings"

	storagev1 "github.com/gpuaas/millwright/proto/millwright/storage/v1"
	"github.com/gpuaas/millwright/tasks"
)

const (
	beegfsConfig = "/etc/beegfs/beegfs-client.conf"
	cephPort     = 6789
	lustrePort   = 988
	wekaPort     = 14000
	maxCores     = 64
)

func lustreSource(l *storagev1.LustreSource) source {
	name := strings.Join(l.GetMgs(), ":") + ":/" + l.GetFilesystem() + l.GetSubdirectory()
	locks := "flock"
	switch l.GetLocks() {
	case storagev1.LustreLocks_LUSTRE_LOCKS_LOCAL:
		locks = "localflock"
	case storagev1.LustreLocks_LUSTRE_LOCKS_NONE:
		locks = "noflock"
	default: // for the whole cluster
	}
	s := source{
		what: name, unitType: "lustre", options: []string{"_netdev", locks}, network: true, after: []string{"lnet.service"},
		fstype: "lustre", shown: name,
		needs: needs{programs: []program{{"mount.lustre", "lustre-client-utils"}}, kernel: []string{"lustre"}, modules: []string{"lnet"}},
	}
	if locks != "noflock" {
		s.inForce = []optionInForce{{key: locks, flag: true}}
	}
	for _, nid := range l.GetMgs() {
		host, net, _ := strings.Cut(nid, "@")
		e := endpoint{host: host}
		if strings.HasPrefix(net, "tcp") {
			e.port = lustrePort // others are not reached by TCP
		}
		s.needs.servers = append(s.needs.servers, e)
	}
	return s
}

func checkLustre(p *tasks.Problems, l *storagev1.LustreSource) {
	if n := len(l.GetMgs()); n == 0 || n > maxServers {
		p.Add("lustre.mgs", fmt.Sprintf("%d ids", n), fmt.Sprintf("must be 1 to %d: give network ids such as 10.0.0.1@o2ib", maxServers))
	}
	for i, nid := range l.GetMgs() {
		host, net, found := strings.Cut(nid, "@")
		_, bad := firstBad(net, "")
		if !found || net == "" || bad || len(net) > 16 || checkHost(host) != "" {
			p.Add(fmt.Sprintf("lustre.mgs[%d]", i), nid, "must be a network id, HOST@NETWORK: give for example 10.0.0.1@o2ib")
		}
	}
	if _, bad := firstBad(l.GetFilesystem(), "_-"); bad || l.GetFilesystem() == "" || len(l.GetFilesystem()) > 8 {
		p.Add("lustre.filesystem", l.GetFilesystem(), "must be 1 to 8 letters, digits, _ and -: give the name that lfs getname shows")
	}
	if sub := l.GetSubdirectory(); sub != "" {
		checkSubdirectory(p, "lustre.subdirectory", sub)
	}
	checkEnum(p, "lustre.locks", l.GetLocks())
}

// wekaSource is a stateless client: it joins the cluster with the mount.
func wekaSource(w *storagev1.WekaSource) source {
	name := strings.Join(w.GetBackends(), ",") + "/" + w.GetFilesystem()
	cache := "writecache"
	if w.GetCache() == storagev1.WekaCache_WEKA_CACHE_READ {
		cache = "readcache"
	}
	s := source{
		what: name, unitType: "wekafs", options: []string{"_netdev"}, network: true, after: []string{"weka-agent.service"},
		fstype: "wekafs", shown: name, otherNames: []string{w.GetFilesystem()},
		inForce: []optionInForce{{key: cache, flag: true}},
		needs:   needs{programs: []program{{"mount.wekafs", "the Weka client, from a server of the cluster"}, {"weka", "the Weka client, from a server of the cluster"}}},
	}
	if len(w.GetInterfaces()) == 0 {
		s.options = append(s.options, "net=udp")
	}
	for _, i := range w.GetInterfaces() {
		s.options = append(s.options, "net="+i)
	}
	if c := w.GetCores(); c > 0 {
		s.options = append(s.options, fmt.Sprintf("num_cores=%d", c))
	}
	s.options = append(s.options, cache)
	if f := w.GetAuthFile(); f != "" {
		s.options = append(s.options, "auth_token_path="+f)
		s.needs.secrets = []secretFile{{"weka.auth_file", f}}
	}
	for _, b := range w.GetBackends() {
		s.needs.servers = append(s.needs.servers, endpoint{b, wekaPort})
	}
	return s
}

func checkWeka(p *tasks.Problems, w *storagev1.WekaSource) {
	if n := len(w.GetBackends()); n == 0 || n > maxServers {
		p.Add("weka.backends", fmt.Sprintf("%d servers", n), fmt.Sprintf("must be 1 to %d: name a few servers of the cluster", maxServers))
	}
	for i, b := range w.GetBackends() {
		if rule := checkHost(b); rule != "" {
			p.Add(fmt.Sprintf("weka.backends[%d]", i), b, rule)
		}
	}
	checkName(p, "weka.filesystem", w.GetFilesystem(), "give the name that weka fs shows")
	if len(w.GetInterfaces()) > maxServers {
		p.Add("weka.interfaces", fmt.Sprintf("%d interfaces", len(w.GetInterfaces())), fmt.Sprintf("must be at most %d: name those that the client is to take", maxServers))
	}
	for i, n := range w.GetInterfaces() {
		if _, bad := firstBad(n, "_.-"); bad || n == "" || len(n) > 15 {
			p.Add(fmt.Sprintf("weka.interfaces[%d]", i), n, "must be the name of a network interface, of at most 15 characters: give one that ip link shows")
		}
	}
	if w.GetCores() > maxCores {
		p.Add("weka.cores", fmt.Sprint(w.GetCores()), fmt.Sprintf("must be at most %d: leave the others to the node's work", maxCores))
	}
	checkEnum(p, "weka.cache", w.GetCache())
	if w.GetAuthFile() != "" {
		checkSecretPath(p, "weka.auth_file", w.GetAuthFile())
	}
}

func beegfsSource(b *storagev1.BeegfsSource) source {
	file := b.GetConfigFile()
	if file == "" {
		file = beegfsConfig
	}
	return source{
		what: "beegfs_nodev", unitType: "beegfs", options: []string{"_netdev", "cfgFile=" + file}, network: true,
		after: []string{"beegfs-helperd.service"}, fstype: "beegfs", shown: "beegfs_nodev",
		needs: needs{kernel: []string{"beegfs"}, beegfs: file},
	}
}

func cephSource(c *storagev1.CephfsSource, key keyFile) source {
	dir := c.GetPath()
	if dir == "" {
		dir = "/"
	}
	s := source{
		what: strings.Join(c.GetMonitors(), ",") + ":" + dir, unitType: "ceph", network: true, fstype: "ceph", anyServer: true,
		options: []string{"_netdev", "name=" + c.GetUser(), "secretfile=" + key.path},
		inForce: []optionInForce{{key: "name", value: c.GetUser()}},
		needs: needs{
			programs: []program{{"mount.ceph", "ceph-common"}}, kernel: []string{"ceph"},
			secrets: key.needed("cephfs.key_file"),
		},
	}
	s.shown = s.what
	if f := c.GetFilesystem(); f != "" {
		s.options = append(s.options, "fs="+f)
	}
	mode := "prefer-crc"
	if c.GetEncrypt() {
		mode = "secure"
	}
	s.options = append(s.options, "ms_mode="+mode, "recover_session=clean")
	for _, m := range c.GetMonitors() {
		host, port := splitPort(m, cephPort)
		s.needs.servers = append(s.needs.servers, endpoint{host, port})
	}
	return s
}

func checkCeph(p *tasks.Problems, c *storagev1.CephfsSource) {
	if n := len(c.GetMonitors()); n == 0 || n > maxServers {
		p.Add("cephfs.monitors", fmt.Sprintf("%d monitors", n), fmt.Sprintf("must be 1 to %d: name monitors of the cluster", maxServers))
	}
	for i, m := range c.GetMonitors() {
		host, port := splitPort(m, cephPort)
		if rule := checkHost(host); rule != "" || port == 0 {
			p.Add(fmt.Sprintf("cephfs.monitors[%d]", i), m, "must be HOST or HOST:PORT: give for example mon1:6789")
		}
	}
	if c.GetPath() != "" && c.GetPath() != "/" {
		checkPath(p, "cephfs.path", c.GetPath())
	}
	checkName(p, "cephfs.user", c.GetUser(), "give the name without client.")
	checkKey(p, "cephfs", c.GetKeyFile(), c.GetKey())
	if c.GetFilesystem() != "" {
		checkName(p, "cephfs.filesystem", c.GetFilesystem(), "give the name that ceph fs ls shows")
	}
}

// splitPort splits HOST:PORT; port is 0 when it is none.
func splitPort(s string, usual uint32) (host string, port uint32) {
	host, text, found := strings.Cut(s, ":")
	if !found {
		return host, usual
	}
	n, err := strconv.ParseUint(text, 10, 16)
	if err != nil || strconv.FormatUint(n, 10) != text {
		return host, 0
	}
	return host, uint32(n)
}
