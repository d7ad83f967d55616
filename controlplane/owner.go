package controlplane

import (
	"fmt"
	"os"
	"os/user"
	"strconv"
	"syscall"
)

// otherOwner says that the state directory belongs to another user than the one
// who runs this, and the way out, or nothing. What root makes in the directory
// of the server's user, the server cannot open.
func otherOwner(dir string) string {
	info, err := os.Stat(dir)
	if err != nil {
		return ""
	}
	st, ok := info.Sys().(*syscall.Stat_t)
	if !ok || int(st.Uid) == os.Geteuid() {
		return ""
	}
	name := strconv.Itoa(int(st.Uid))
	if u, err := user.LookupId(name); err == nil {
		name = u.Username
	}
	return fmt.Sprintf("; it belongs to user %s: run it as that user, with: runuser -u %s -- millwright-server ...", name, name)
}
