// Package arch keeps the shape of the repository by tests: who may import
// whom and why, where files may stand, and the habits of the code that a
// reader would otherwise have to watch for. It has no code of its own.
package arch
