// Package formats keeps the formats that are frozen: for every message that
// crosses the wire or lies on a disk, testdata holds one fixture per release,
// as the bytes that the release wrote and as the text of what they mean. The
// tests read both back with the present code. From the first release on a
// fixture is only ever added.
package formats
