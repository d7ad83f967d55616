//go:build !race

package look_test

// flips says whether single bits are flipped.
const flips = true
