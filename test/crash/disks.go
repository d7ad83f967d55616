package main

// disks are storage.scratch, as far as a node without a disk of its own gets:
// no disk has the serial, and nothing is touched. What a crash does to a disk is
// put to the kind by tasktest, on the node in memory.
func disks() []story {
	return []story{{
		kind: "storage.scratch", variant: "without its disk", facts: mountFacts, state: refused, reason: "PRECONDITION", idle: true,
		spec:    func(l string) string { return "target: /mnt/" + l + "/data\ndisk: {serial: none-" + l + "}" },
		prepare: func(string) string { return "true" },
	}}
}
