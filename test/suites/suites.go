package main

import "time"

// required is what `make test` must show. It only grows.
var required = []suite{
	{
		name: "arch", about: "import rules, sizes, names and comments; no test without a suite",
		packages: []string{"./test/arch/...", "./test/suites/..."}, timeout: 5 * time.Minute,
	},
	{
		name: "unit", about: "every package by itself, with the race detector", race: true,
		packages: []string{"./...", "-test"}, timeout: 25 * time.Minute,
	},
	{
		name: "gpu", about: "millwright-gpu, the real program, hangs, crashes and lacks symbols; each condition of the GPUs on the fake library; what it costs",
		packages: []string{"./agent/internal/gpu/...", "./agent/internal/health/...", "./test/gpucheck"}, timeout: 5 * time.Minute, // a C compiler's time when nothing is cached
	},
	{
		name: "kinds", about: "every case of every kind, by the real executor and journal and by the reference, without the race detector: each crash, each failing call",
		packages: []string{"./agent/internal/executor", "./tasks/tasktest"}, timeout: 20 * time.Minute,
	},
	{
		name: "store damage", about: "every kind of damage to a server's store, single bits among them, is told and harms nothing",
		packages: []string{"./controlplane/internal/store/look"}, timeout: 5 * time.Minute,
	},
	{
		name: "formats", about: "fixtures of every format, of every release, read back",
		packages: []string{"./test/formats/..."}, timeout: 5 * time.Minute,
	},
	{
		name: "script", about: "transcripts of millctl: every command, every exit code",
		packages: []string{"./test/script/..."}, timeout: 10 * time.Minute,
	},
	{
		name: "harness", about: "server and agents in one process, with restarts and cuts",
		packages: []string{"./test/harness/...", "./test/relisten"}, race: true, timeout: 10 * time.Minute,
	},
	{
		name: "fakenvml", about: "the stand-in for the driver's library, through go-nvml: values, events, faults, MIG, older drivers",
		packages: []string{"./test/fakenvml/..."}, timeout: 3 * time.Minute,
	},
	{
		name: "leak", about: "10,000 tasks on one agent leave no goroutine, descriptor or disk behind",
		packages: []string{"./test/leak"}, timeout: 10 * time.Minute,
	},
	{
		name: "simulation", about: "10,000 schedules of server and agents in fake time: every message, commit and host call in another order, with faults",
		packages: []string{"./test/simulation"}, timeout: 20 * time.Minute, show: "TestSchedules",
	},
	{
		name: "alerts", about: "the alert rules by promtool, and that promtool notices when one is wrong",
		packages: []string{"./test/alerts"}, timeout: 5 * time.Minute,
	},
	{
		name: "hostile", about: "a server with the cluster's keys alters, repeats and lies; the node is none the worse",
		packages: []string{"./test/hostile/..."}, timeout: 10 * time.Minute,
	},
	{
		name: "invariants", about: "histories that break one promise each, and are found out",
		packages: []string{"./test/invariants/..."}, timeout: 5 * time.Minute,
	},
	{
		name: "mutants", about: "each guard in the list of make mutants is where it says, and compiles without",
		packages: []string{"./test/mutants/..."}, timeout: 10 * time.Minute,
	},
	{
		name: "door", about: "certificates, tokens, RPCs and data at the port of a whole server",
		packages: []string{"./test/door/..."}, timeout: 5 * time.Minute,
	},
	{
		name: "testbed", about: "real nodes: systemd runs, containerd runs a container, nothing is left",
		packages: []string{"./test/testbed/..."}, timeout: 15 * time.Minute, parallel: 1,
	},
	{
		name: "stalefs", about: "the stand-in for a mount that answers with errors: the kernel passes each of them on",
		packages: []string{"./test/stalefs"}, timeout: 5 * time.Minute,
	},
	{
		name: "canary", about: "a secret planted in each place of a real node is found there",
		packages: []string{"./test/canary"}, timeout: 5 * time.Minute,
	},
	{
		name: "e2e/system_command", about: "a command on a real node, run once, whatever happens to the agent",
		packages: []string{"./test/e2e/system_command"}, timeout: 10 * time.Minute,
	},
	{
		name: "e2e/storage_mount", about: "real GlusterFS: native units, drift by name, busy, reboot",
		packages: []string{"./test/e2e/storage_mount"}, timeout: 10 * time.Minute,
	},
	{
		name: "e2e/storage_kinds", about: "S3 with s3fs, other network file systems with stand-in helpers: refused, failed, dead, hung, restored",
		packages: []string{"./test/e2e/storage_kinds"}, timeout: 10 * time.Minute,
	},
	{
		name: "e2e/storage_scratch", about: "a loop disk as scratch: made, kept over a reboot, made anew when it comes back empty, refused when it holds anything",
		packages: []string{"./test/e2e/storage_scratch"}, timeout: 10 * time.Minute,
	},
	{
		name: "e2e/container_run", about: "a container on containerd 1.6 and 2.4: adopted over kills and restarts, back after a reboot, nothing left",
		packages: []string{"./test/e2e/container_run"}, timeout: 20 * time.Minute, // containerd is built the first time
	},
	{
		name: "e2e/crash", about: "agent, shim, server, node and network fail in the middle of a mount and a command",
		packages: []string{"./test/e2e/crash"}, timeout: 10 * time.Minute, show: "TestCrash",
	},
	{
		name: "crash model", about: "the model of make crash finds what is duplicated, lost or wrong; every kind has its story",
		packages: []string{"./test/crash"}, timeout: 5 * time.Minute,
	},
	{
		name: "e2e/boundaries", about: "bus and systemd fail in the middle; lost adoption, foreign units, 1,000 units leave no pile",
		packages: []string{"./test/e2e/boundaries"}, timeout: 30 * time.Minute, show: "TestBoundaries/many_units",
	},
	{
		name: "e2e/host", about: "the node's hands on a node: systemd, dbus, mounts, commands",
		packages: []string{"./test/e2e/host"}, timeout: 15 * time.Minute,
	},
	{
		name: "e2e/packages", about: "install, upgrade, remove and purge of the packages",
		packages: []string{"./test/e2e/packages"}, timeout: 10 * time.Minute,
	},
	{
		name: "e2e/readme", about: "every command of the README, on fresh machines",
		packages: []string{"./test/e2e/readme"}, timeout: 15 * time.Minute, // make check builds buf
	},
	{
		name: "e2e/demo", about: "make demo passes, and fails with an agent that does not adopt",
		packages: []string{"./test/e2e/demo"}, timeout: 15 * time.Minute,
	},
	{
		name: "e2e/output", about: "200 MB, a line of 10 MB, no UTF-8, grandchildren: head, tail and total, in little memory",
		packages: []string{"./test/e2e/output"}, timeout: 10 * time.Minute, parallel: 1,
	},
	{
		name: "e2e/journal_lost", about: "a journal deleted or rolled back: held and told, never run again",
		packages: []string{"./test/e2e/journal_lost"}, timeout: 10 * time.Minute, parallel: 1,
	},
	{
		name: "e2e/control", about: "a reboot by a task and its budget, a stubborn command, a queue for a lock, held tasks settled",
		packages: []string{"./test/e2e/control"}, timeout: 10 * time.Minute,
	},
	{
		name: "e2e/slurm", about: "nodes join the cluster of a real controller with one signature, run jobs, reboot, leave; each cause fails and is undone",
		packages: []string{"./test/e2e/slurm"}, timeout: 15 * time.Minute,
	},
	{
		name: "e2e/gpu", about: "nodes with eight GPUs: faults, a driver that fails in each way, told within two periods; a count that drops; kills, five minutes without network; told once, and clear",
		packages: []string{"./test/e2e/gpu"}, timeout: 15 * time.Minute,
	},
	{
		name: "e2e/mig", about: "nodes with an A100 and an H100: partitioned, in use, the agent and the changing program killed, a boot: one layout or the other",
		packages: []string{"./test/e2e/mig"}, timeout: 15 * time.Minute,
	},
	{
		name: "e2e/gpu_kinds", about: "eight GPUs: one reset, with its MIG layout, in use, unsupported, hanging, the agent and nvidia-smi killed; all diagnosed, with a stand-in for dcgmi",
		packages: []string{"./test/e2e/gpu_kinds"}, timeout: 15 * time.Minute,
	},
	{
		name: "e2e/safe_mode", about: "a state that is locked: a session and no work; one that is damaged: set aside, held, never run again",
		packages: []string{"./test/e2e/safe_mode"}, timeout: 10 * time.Minute,
	},
	{
		name: "e2e/network", about: "two minutes without network in the middle of every kind, one-way cuts, a bad line, two hosts with one identity",
		packages: []string{"./test/e2e/network"}, timeout: 12 * time.Minute, show: "TestNetwork",
	},
	{
		name: "e2e/clock", about: "the clock steps by an hour and ten years under running work; a boot without a clock, clock reset",
		packages: []string{"./test/e2e/clock"}, timeout: 10 * time.Minute,
	},
	{
		name: "powerloss", about: "the power cut after every system call of agent, shim and server: nothing that was told is lost",
		packages: []string{"./test/powerloss"}, timeout: 10 * time.Minute, show: "TestPowerLoss",
	},
	{
		name: "e2e/disk", about: "a full, a read-only and a broken disk of a node and of the server: nothing lost, no restart",
		packages: []string{"./test/e2e/disk"}, timeout: 10 * time.Minute, parallel: 1,
	},
}
