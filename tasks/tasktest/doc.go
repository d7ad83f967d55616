// Package tasktest is the suite that every kind must pass. [Run] carries out
// cases, read from testdata files, with the executor that a [Runner] wraps: the
// real one on its real journal. It asks of each case
//
//   - that the plan is the golden one, the same each time, and survives sealing;
//   - that a second run plans nothing;
//   - that after a crash before or after any journal write or host change, with
//     a restart or a reboot, the node ends exactly as the spec wants it or
//     exactly as it was;
//   - that it ends so too when a host call fails, before and after its change;
//   - of an action, that its effect happened at most once and is known or held.
//
// [Secrets] and [FuzzValidate] look at all kinds of a registry.
package tasktest
