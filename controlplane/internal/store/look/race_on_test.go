//go:build race

package look_test

// flips says whether single bits are flipped: what looks at a damaged file under
// the race detector dies of its memory before it can say what it found.
const flips = false
