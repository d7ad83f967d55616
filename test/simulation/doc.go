// Package simulation runs the real agent and the real server in one bubble of
// fake time, and delivers every message, commit and host call by hand, in an
// order that a seed decides. Everything that can go wrong between them does:
// streams break at each end at another time, messages come late, twice or from
// an older stream, processes die before and after each commit, nodes reboot,
// clocks are set, disks come back from a backup. At the end of a schedule what
// is kept on both sides is held against what happened to the nodes.
//
// Nothing runs at the same time as something else: the driver lets one thing
// happen, waits until all is quiet, and only then looks what can happen next.
// So the same seed gives the same history.
package simulation
