//go:build race

package shim_test

// maxShimKiB allows for what the race detector takes.
const maxShimKiB = 400 << 10
