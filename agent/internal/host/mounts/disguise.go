//go:build !millwright_crash

package mounts

import "github.com/gpuaas/millwright/tasks/host"

// disguised returns the table as it is. Only a build for tests knows stand-ins.
func disguised(table []host.Mount) []host.Mount { return table }
