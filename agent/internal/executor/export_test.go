package executor

import "github.com/gpuaas/millwright/tasks"

// Conflict reports whether two locks conflict.
func Conflict(a, b tasks.Lock) bool {
	_, _, ok := conflict([]tasks.Lock{a}, []tasks.Lock{b})
	return ok
}
