//go:build !race

package shim_test

// maxShimKiB is the most memory that a shim may take, whatever passes through it.
const maxShimKiB = 32 << 10
