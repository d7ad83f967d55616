//go:build !race

package executor_test

// eachCase of a kind's suite is run.
const eachCase = 1
