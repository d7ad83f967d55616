package main

import "slices"

// mutants are the guards that the promise rests on, each with the change that
// takes it away.
func mutants() []mutant {
	return slices.Concat(executorMutants(), doorMutants(), durableMutants(), gpuMutants(), serverMutants())
}

const (
	executor = "./agent/internal/executor"
	state    = "./agent/internal/state"
	gate     = "./agent/internal/gate"
	shim     = "./agent/internal/shim"
	session  = "./agent/internal/session"
	server   = "./controlplane"
)

// gpuMutants are about changes of GPUs.
func gpuMutants() []mutant {
	const gpus = "./agent/internal/host/gpus"
	return []mutant{
		{
			name: "mig-activation", guards: "a MIG mode that the driver only stored is not told as active",
			file: "./agent/internal/gpu/nvml/change.go", judge: []string{gpus}, run: "Inert|GPUs",
			old: "\treturn int32(activation), nil", new: "\treturn int32(activation) * 0, nil",
		},
		{
			name: "gpu-earlier-change", guards: "no GPU is looked at while a change of an earlier agent may be under way",
			file: gpus + "/gpus.go", judge: []string{gpus}, run: "EarlierChange",
			old: "\tif err := s.cfg.Changes.Idle(ctx); err != nil {", new: "\tif err := s.cfg.Changes.Idle(ctx); err != nil && ctx.Err() != nil {",
		},
		{
			name: "gpu-quiet", guards: "the agent's own sampler holds no GPU while it is changed",
			file: gpus + "/quiet.go", judge: []string{gpus}, run: "Sampler|Quiet",
			old: "\tif q.quiesce == nil {", new: "\tif q.quiesce == nil || ctx != nil {",
		},
		{
			name: "gpu-part-of-a-layout", guards: "a MIG layout that was read in part is never taken for a smaller one",
			file: gpus + "/gpus.go", judge: []string{gpus}, run: "PartOfALayout",
			old: "\t\tif u.GetField() == \"compute_instances\" {", new: "\t\tif u.GetField() == \"\" {",
		},
	}
}

// executorMutants are about the life of a task on its node.
func executorMutants() []mutant {
	return []mutant{
		{
			name: "journal-before-apply", guards: "what undo needs is durable before a step changes the node",
			file: executor + "/forward.go", judge: []string{executor},
			old: "\t\treturn tx.PutStep(t.id, uint32(i), sr)\n\t})\n\tif err == nil {\n\t\tcrash.Point(\"executor.step.observed\")",
			new: "\t\treturn nil\n\t})\n\tif err == nil {\n\t\tcrash.Point(\"executor.step.observed\")",
		},
		{
			name: "after-change-failure", guards: "a step that failed after it changed the node is undone",
			file: executor + "/apply.go", judge: []string{executor},
			old: "\tif isKnown && known.Unchanged {", new: "\tif err != nil {",
		},
		{
			name: "early-intents", guards: "an intent on which others wait is restored at once after a boot",
			file: executor + "/reconcile.go", judge: []string{executor}, run: "EarlyIntents",
			old: "patient := settling && !early[key]", new: "patient := settling && (early != nil || !early[key])",
		},
		{
			name: "seen-ids", guards: "a task id that was accepted is never carried out again",
			file: executor + "/deliver.go", judge: []string{executor},
			old: "\tif err := tx.PutSeen(id, &agentv1.SeenRecord{LeafHash: hash, ForgetAfter: timestamppb.New(forget)}); err != nil {",
			new: "\tif _ = timestamppb.New(forget); err != nil && !errors.Is(err, state.ErrNotFound) {",
		},
		{
			name: "answer-after-commit", guards: "a task is answered as accepted once it is durable",
			file: executor + "/deliver.go", judge: []string{executor},
			old: "\tif err != nil {\n\t\treturn nil, err\n\t}\n\tcrash.Point(\"executor.accept.committed\")",
			new: "\tcrash.Point(\"executor.accept.committed\")",
		},
		{
			name: "boot-id", guards: "what a reboot has undone is done again",
			file: executor + "/resume.go", judge: []string{executor},
			old: "\tif !done || !again || sr.GetBootId() == t.e.cfg.BootID || t.gaveWay(i) {", new: "\tif done || !done || again {",
		},
		{
			name: "secret-digest", guards: "a value that is not the one that was signed is not written",
			file: "./agent/internal/host/secrets/secrets.go", judge: []string{"./agent/internal/host/secrets"}, run: "Swapped",
			old: "\t\tsubtle.ConstantTimeCompare(digest(secret.Salt, value), secret.SHA256) != 1 {",
			new: "\t\tsubtle.ConstantTimeCompare(digest(secret.Salt, value), secret.SHA256) > 1 {",
		},
		{
			name: "undo-order", guards: "steps are undone the last first",
			file: executor + "/backward.go", judge: []string{executor},
			old: "\tfor i := len(t.steps) - 1; i >= 0; i-- {", new: "\tfor i := range t.steps {",
		},
		{
			name: "lock-before-plan", guards: "two tasks on one thing wait for each other",
			file: executor + "/locks.go", judge: []string{executor}, run: "Lock",
			old: "\t\tfree := !slices.ContainsFunc(", new: "\t\tfree := l != nil || !slices.ContainsFunc(",
		},
		{
			name: "cancel-before-answer", guards: "a cancel that was taken is durable",
			file: executor + "/cancel.go", judge: []string{executor},
			old: "\t\treturn tx.PutTask(rec)", new: "\t\treturn nil",
		},
	}
}

// doorMutants are about what a node lets in.
func doorMutants() []mutant {
	return []mutant{
		{
			name: "floor", guards: "nothing that a lost journal may have run is run",
			file: gate + "/gate.go", judge: []string{gate},
			old: "\tcase !issued.After(g.cfg.Floor):", new: "\tcase false:",
		},
		{
			name: "window", guards: "nothing begins after its window",
			file: gate + "/gate.go", judge: []string{gate},
			old: "\tcase !now.Before(notAfter):", new: "\tcase false:",
		},
		{
			name: "policy-deny-by-default", guards: "what no rule of the node allows is refused",
			file: gate + "/policy.go", judge: []string{gate},
			old: "\treturn Verdict{Message: fmt.Sprintf(\n\t\t\"%s is denied: no rule", new: "\treturn Verdict{Allowed: true, Message: fmt.Sprintf(\n\t\t\"%s is denied: no rule",
		},
		{
			name: "signature", guards: "nothing is carried out without a key of the trust root",
			file: "./pki/envelope/dsse.go", judge: []string{"./pki/envelope", gate},
			old: "|| !ed25519.Verify(pub, message, s.GetSignature()):", new: "|| message == nil:",
		},
		{
			name: "session-epoch-on-the-node", guards: "a node ignores what another session says",
			file: session + "/stream.go", judge: []string{session},
			old: "\t\tif m.GetSessionEpoch() != st.epoch {", new: "\t\tif false {",
		},
		{
			name: "resend-window", guards: "frames that the server lacks are sent again",
			file: session + "/window.go", judge: []string{session},
			old: "\tw.move(from - 1)\n", new: "\tw.move(from)\n",
		},
	}
}

// durableMutants are about what a node remembers.
func durableMutants() []mutant {
	return []mutant{
		{
			name: "prev-hash-on-the-node", guards: "frames form a chain",
			file: state + "/frames.go", judge: []string{state},
			old: "ev.JournalId, ev.Seq, ev.PrevHash = meta.GetJournalId(), h.seq+1, h.hash",
			new: "ev.JournalId, ev.Seq, ev.PrevHash = meta.GetJournalId(), h.seq+1, nil",
		},
		{
			name: "directory-fsync", guards: "a new state file is there after a power loss",
			file: state + "/open.go", judge: []string{"./test/powerloss"}, packaged: true,
			old: "\tif err := syncDir(s.cfg.Dir); err != nil {\n\t\treturn err\n\t}\n", new: "",
		},
		{
			name: "shim-result", guards: "how a command ended outlives the agent",
			file: shim + "/shim.go", judge: []string{shim},
			old: "\tif err := dir.writeResult(rec); err != nil {", new: "\tif err := error(nil); err != nil {",
		},
		{
			name: "shim-start-marker", guards: "a command that was begun is never begun again",
			file: shim + "/shim.go", judge: []string{shim},
			old: "\tif err := dir.Take(rec); err != nil {", new: "\tif err := error(nil); err != nil {",
		},
		{
			name: "high-water-mark", guards: "a state file that is older than its mark is not used",
			file: state + "/inspect.go", judge: []string{state},
			old: "\tcase f.Seq < m.GetSeq() || f.Transaction < m.GetTransaction():", new: "\tcase f.JournalID == \"\":",
		},
		{
			name: "state-in-place", guards: "nothing is told as durable that the next start would not find",
			file: state + "/commit.go", judge: []string{state},
			old: "\t\tif err := s.InPlace(); err != nil {\n\t\t\treturn err\n\t\t}\n", new: "",
		},
		{
			name: "terminal-state-on-the-node", guards: "a task that has ended stays as it ended",
			file: state + "/records.go", judge: []string{state},
			old: "\t\tif Terminal(old.GetState()) && old.GetState() != rec.GetState() {", new: "\t\tif old == nil {",
		},
	}
}

// serverMutants are about the server.
func serverMutants() []mutant {
	return []mutant{
		{
			name: "session-epoch-on-the-server", guards: "the server ignores what an older session says",
			file: "./controlplane/internal/dispatch/session.go", judge: []string{server}, run: "AnotherSession|ProtocolErrors",
			old: "\t\tif m.GetSessionEpoch() != s.epoch {", new: "\t\tif false {",
		},
		{
			name: "acknowledge-after-commit", guards: "a frame is acknowledged once it is durable",
			file: "./controlplane/internal/dispatch/events.go", judge: []string{"./controlplane/internal/dispatch"},
			old: "\t\treturn s.stall(\"store events\", err)\n\t}\n\tcrash.Point(\"server.events.committed\")",
			new: "\t\tb.stored = b.events[len(b.events)-1].GetSeq()\n\t}\n\tcrash.Point(\"server.events.committed\")",
		},
		{
			name: "prev-hash-on-the-server", guards: "a journal that forked is found",
			file: "./controlplane/internal/dispatch/events.go", judge: []string{server}, run: "Journal|Fork|Chain|Frame",
			old: "\tcase !bytes.Equal(event.GetPrevHash(), b.previous(journal, event)):", new: "\tcase b.previous(journal, event) == nil:",
		},
		{
			name: "request-id", guards: "a request that is repeated makes nothing twice",
			file: "./controlplane/internal/rpc/taskv1/create.go", judge: []string{server}, run: "Create|Repeat|Request",
			old: "\trequest, err := v.Request(caller, form.ID)", new: "\trequest, err := v.Request(caller, form.ID+\"!\")",
		},
		{
			name: "terminal-state-on-the-server", guards: "a task that has ended stays as it ended",
			file: "./controlplane/internal/eventlog/project.go", judge: []string{"./controlplane/internal/eventlog"},
			old: "\tended := store.Terminal(row.GetTask().GetState())", new: "\tended := store.Terminal(0)",
		},
		{
			name: "journal-lost", guards: "what a lost journal may have run is held",
			file: "./controlplane/internal/dispatch/hello.go", judge: []string{server}, run: "Journal|Lost",
			old: "State: taskv1.TaskState_TASK_STATE_HELD, Reason: eventlog.ReasonJournalLost,",
			new: "State: taskv1.TaskState_TASK_STATE_QUEUED, Reason: eventlog.ReasonJournalLost,",
		},
		{
			name: "duplicate-identity", guards: "two hosts with one identity get no work",
			file: "./controlplane/internal/dispatch/hello.go", judge: []string{server}, run: "Duplicate|Identity|Host|Clone",
			old: "\tif o.duplicate {\n\t\tlogger.Warn(", new: "\tif o.duplicate && s == nil {\n\t\tlogger.Warn(",
		},
	}
}
