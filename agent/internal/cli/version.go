package cli

import "runtime/debug"

// Version is the version that the program was built with: that of its module,
// with the commit where it was built from a checkout.
func Version() string {
	info, ok := debug.ReadBuildInfo()
	if !ok || info.Main.Version == "" {
		return "devel"
	}
	return info.Main.Version
}
