package crash

import "slices"

// Registry returns all points, each declared once, in the order in which a task
// comes by.
func Registry() []Info {
	return slices.Concat(session(), journal(), executor(), hosts(), disks(), gpus(), shim(), output(), enrol())
}

func session() []Info {
	return []Info{
		{"session.hello.sent", Agent, Apart, "after Hello was sent"},
		{"session.welcome.received", Agent, Apart, "after Welcome came, before it counts"},
		{"session.heartbeat.sent", Agent, Apart, "after a heartbeat was handed on"},
		{"session.heartbeat.received", Agent, Apart, "after the server's heartbeat came"},
		{"session.assignment.received", Agent, Unaccepted, "after an assignment came, before the executor has it"},
		{"session.answer.ready", Agent, Apart, "after the executor answered, before the answer is sent"},
		{"session.answer.sent", Agent, Apart, "after the answer was handed on"},
		{"session.events.sent", Agent, Apart, "after frames of the outbox were handed on"},
		{"session.ack.received", Agent, Apart, "after an acknowledgement came, before it is written"},
		{"session.cancel.received", Agent, Apart, "after a cancel came, before it is written"},
		{"session.drain.received", Agent, Apart, "after the server said that it will stop"},
		{"session.goodbye.received", Agent, Apart, "after the server ended the session"},
		{"health.tell.before", Agent, Apart, "before changes of GPU conditions are written"},
		{"health.tell.committed", Agent, Apart, "after they are durable"},
	}
}

func journal() []Info {
	return []Info{
		{"state.created.before", Agent, Apart, "before the first transaction of a new journal"},
		{"state.created.after", Agent, Apart, "after it is durable, before the mark is"},
		{"state.commit.before", Agent, Apart, "in every transaction, before it is written"},
		{"state.commit.written", Agent, Apart, "after it is durable, before the mark is"},
		{"state.commit.marked", Agent, Apart, "after the mark is durable"},
	}
}

func executor() []Info {
	return []Info{
		{"executor.accept.before", Agent, Unaccepted, "before a delivered task is written"},
		{"executor.accept.committed", Agent, Within, "after it is durable, before it is answered"},
		{"executor.waiting.committed", Agent, Within, "after it is durable why a task waits"},
		{"executor.plan.made", Agent, Within, "after a plan was made, before it is written"},
		{"executor.plan.committed", Agent, Within, "after it is durable"},
		{"executor.step.observed", Agent, Within, "after Observe is durable"},
		{"executor.step.waits", Agent, Within, "after it is durable that a step waits for others"},
		{"executor.step.again", Agent, Within, "after it is durable that a step is applied once more"},
		{"executor.step.apply", Agent, Within, "before Apply is called"},
		{"executor.step.changed", Agent, Within, "after Apply returned, before that is written"},
		{"executor.step.applied", Agent, Within, "after Apply is durable"},
		{"executor.step.verified", Agent, Within, "after Verify is durable"},
		{"executor.verify.begun", Agent, Within, "after the final check is announced in the journal"},
		{"executor.finish.before", Agent, Within, "before the last event is written"},
		{"executor.finish.committed", Agent, Within, "after it is durable"},
		{"executor.undo.turned", Agent, Within, "after the turn to undo is durable"},
		{"executor.undo.begun", Agent, Within, "after it is durable that a step's undo begins"},
		{"executor.undo.step", Agent, Within, "before Undo is called"},
		{"executor.undo.changed", Agent, Within, "after Undo returned, before that is written"},
		{"executor.undo.undone", Agent, Within, "after Undo is durable"},
		{"executor.held", Agent, Within, "after a task was held"},
		{"executor.resolve.before", Agent, Within, "before a held task is settled"},
		{"executor.resolve.committed", Agent, Within, "after it is durable"},
		{"executor.cancel.committed", Agent, Within, "after a cancel is durable"},
		{"executor.resume", Agent, Within, "after a task was found again at start"},
		{"executor.boot.committed", Agent, Apart, "after it is durable that the intents were seen to in this boot"},
		{"executor.ack.before", Agent, Apart, "before an acknowledgement is written"},
		{"executor.ack.committed", Agent, Apart, "after it is durable"},
		{"executor.ack.closed", Agent, Apart, "after what acknowledged tasks kept for an undo is erased"},
	}
}

func hosts() []Info {
	return []Info{
		{"host.mkdir.before", Agent, Before, "before a directory is made"},
		{"host.mkdir.after", Agent, After, "after it is durable"},
		{"host.rmdir.before", Agent, Before, "before a directory is removed"},
		{"host.rmdir.after", Agent, After, "after that is durable"},
		{"host.write.before", Agent, Before, "before a file is replaced"},
		{"host.write.temp", Agent, Before, "after the new file is durable under another name"},
		{"host.write.after", Agent, After, "after the file is replaced, durably"},
		{"host.secret.kept", Agent, Before, "after what a secret overwrites is kept, durably"},
		{"host.secret.write.before", Agent, Before, "before the file of a secret is replaced"},
		{"host.secret.write.temp", Agent, Before, "after the new one is durable under another name"},
		{"host.secret.write.after", Agent, After, "after the file is replaced, durably"},
		{"host.secret.forget.before", Agent, Within, "before what was kept of an ended task is deleted"},
		{"host.secret.forget.after", Agent, Within, "after that is durable"},
		{"courier.fetch.before", Agent, Before, "before the value of a secret is asked for"},
		{"courier.fetch.after", Agent, Before, "after the answer has come"},
		{"host.remove.before", Agent, Before, "before a file is removed"},
		{"host.remove.after", Agent, After, "after that is durable"},
		{"host.reload.before", Agent, Before, "before systemd is told to read its units again"},
		{"host.reload.after", Agent, After, "after it has"},
		{"host.unit.start.before", Agent, Before, "before a unit is started"},
		{"host.unit.start.after", Agent, After, "after its job has ended"},
		{"host.unmount.before", Agent, Before, "before a mount is unmounted by force, or lazily"},
		{"host.unmount.after", Agent, After, "after it was"},
		{"host.fuse.abort.before", Agent, Before, "before the connection of a FUSE mount is ended"},
		{"host.fuse.abort.after", Agent, After, "after it was"},
		{"host.unit.stop.before", Agent, Before, "before a unit is stopped"},
		{"host.unit.stop.after", Agent, After, "after its job has ended"},
		{"host.unit.enable.before", Agent, Before, "before a unit is enabled"},
		{"host.unit.enable.after", Agent, After, "after its links are durable"},
		{"host.unit.disable.before", Agent, Before, "before a unit is disabled"},
		{"host.unit.disable.after", Agent, After, "after its links are gone, durably"},
		{"host.probe.before", Agent, Within, "before a probe runs in a child process"},
		{"host.probe.after", Agent, Within, "after it has ended"},
		{"host.slurm.before", Agent, Within, "before one of Slurm's programs asks something"},
		{"host.slurm.after", Agent, Within, "after it has ended"},
		{"host.slurm_change.before", Agent, Within, "before Slurm's controller is asked to change a node"},
		{"host.slurm_change.after", Agent, Within, "after it has answered"},
		{"host.command.spec.before", Agent, Before, "before the spec of a command is written"},
		{"host.command.spec.after", Agent, After, "after it is durable"},
		{"host.command.start.before", Agent, Before, "before the unit of a command is started"},
		{"host.command.start.after", Agent, After, "after it was"},
		{"host.command.stop.before", Agent, Within, "before the unit of a command is stopped"},
		{"host.command.stop.after", Agent, Within, "after it was"},
		{"host.command.burn.before", Agent, Within, "before it is made final that a command was not started"},
		{"host.command.burn.after", Agent, Within, "after that is durable"},
		{"host.packages.repair.before", Agent, Within, "before an interrupted dpkg is finished"},
		{"host.packages.repair.after", Agent, Within, "after it is"},
		{"host.packages.record.before", Agent, Within, "before it is written which packages are brought"},
		{"host.packages.record.after", Agent, Within, "after it is durable"},
		{"host.packages.policy.before", Agent, Within, "before it is written that no service may be started"},
		{"host.packages.policy.after", Agent, Within, "after it is durable"},
		{"host.packages.install.before", Agent, Within, "before packages are installed"},
		{"host.packages.install.after", Agent, Within, "after they are"},
		{"host.packages.remove.before", Agent, Within, "before packages are removed"},
		{"host.packages.remove.after", Agent, Within, "after they are"},
		{"host.packages.hold.before", Agent, Within, "before packages are held, or not any more"},
		{"host.packages.hold.after", Agent, Within, "after they are"},
		{"host.image.import.before", Agent, Within, "before an image is read from its archive"},
		{"host.image.import.stored", Agent, Within, "after it is in the store, before it is unpacked"},
		{"host.image.import.after", Agent, Within, "after it is unpacked"},
		{"host.container.create.before", Agent, Within, "before a container and its snapshot are made"},
		{"host.container.create.after", Agent, Within, "after they are"},
		{"host.container.start.before", Agent, Within, "before the shim of a container is started"},
		{"host.container.start.made", Agent, Within, "after its process was made, before it runs"},
		{"host.container.leftover.before", Agent, Within, "before what a start has left in its way is removed"},
		{"host.container.leftover.mounted", Agent, Within, "before what is mounted there is unmounted"},
		{"host.container.leftover.after", Agent, Within, "after it is"},
		{"host.container.start.after", Agent, Within, "after its process was started"},
		{"host.container.remove.stopped", Agent, Within, "after a container has ended, before it is deleted"},
		{"host.container.remove.deleted", Agent, Within, "after it is deleted, before what is left of it is"},
	}
}

func gpus() []Info {
	return []Info{
		{"host.mig.mode.before", Agent, Before, "before a GPU's MIG mode is set"},
		{"host.mig.mode.after", Agent, After, "after the driver took it"},
		{"host.mig.create.before", Agent, Before, "before a GPU instance is made"},
		{"host.mig.create.after", Agent, After, "after it is"},
		{"host.mig.destroy.before", Agent, Before, "before a GPU instance is removed"},
		{"host.mig.destroy.after", Agent, After, "after it is"},
		{"host.mig.compute.create.before", Agent, Before, "before a compute instance is made"},
		{"host.mig.compute.create.after", Agent, After, "after it is"},
		{"host.mig.compute.destroy.before", Agent, Before, "before a compute instance is removed"},
		{"host.mig.compute.destroy.after", Agent, After, "after it is"},
		{"host.gpu.persistence.before", Agent, Before, "before a GPU's persistence mode is set"},
		{"host.gpu.persistence.after", Agent, After, "after it is"},
		{"host.gpu.reset.before", Agent, Before, "before GPUs are reset"},
		{"host.gpu.reset.after", Agent, After, "after nvidia-smi said that they are"},
		{"host.cdi.before", Agent, Before, "before the CDI specification is replaced"},
		{"host.cdi.after", Agent, After, "after it is, durably"},
	}
}

func disks() []Info {
	return []Info{
		{"host.disk.wipe.before", Agent, Before, "before what a disk holds is erased"},
		{"host.disk.wipe.after", Agent, After, "after that is durable"},
		{"host.disk.make.before", Agent, Before, "before a file system is made on a disk"},
		{"host.disk.make.after", Agent, After, "after it is durable"},
		{"host.array.make.before", Agent, Before, "before disks are made an array"},
		{"host.array.make.after", Agent, After, "after it is durable"},
		{"host.array.assemble.before", Agent, Before, "before an array is assembled"},
		{"host.array.assemble.after", Agent, After, "after it is"},
		{"host.array.stop.before", Agent, Before, "before an array is stopped"},
		{"host.array.stop.after", Agent, After, "after it is"},
	}
}

func shim() []Info {
	return []Info{
		{"shim.reserve.before", Shim, Unstarted, "before room for the result is kept"},
		{"shim.marker.before", Shim, Unstarted, "before the start marker is made"},
		{"shim.marker", Shim, Unknown, "after it is durable"},
		{"shim.opened", Shim, Unknown, "after the output files are open, before the program starts"},
		{"shim.started", Shim, Unknown, "after the program was started"},
		{"shim.exited", Shim, Unknown, "after the program has ended"},
		{"shim.output.durable", Shim, Unknown, "after head and tail of its output are durable"},
		{"shim.result.before", Shim, Unknown, "before the result is written"},
		{"shim.result.filled", Shim, Unknown, "after it is written, before it has its name"},
		{"shim.result", Shim, Recorded, "after it is durable"},
		{"shim.death.before", Shim, Recorded, "before it is noted how a shim ended that left no result"},
		{"shim.death.after", Shim, Recorded, "after that is durable"},
	}
}

func output() []Info {
	return []Info{
		{"output.piece.sent", Agent, Apart, "after a piece of output was sent"},
		{"output.piece.answered", Agent, Apart, "after the server has answered it"},
		{"output.sent.before", Agent, Apart, "before it is written that all output is on the server"},
		{"output.sent.committed", Agent, Apart, "after it is durable"},
		{"output.delete.before", Agent, Apart, "before the files of a command are deleted"},
		{"output.delete.after", Agent, Apart, "after they are"},
	}
}

func enrol() []Info {
	return []Info{
		{"enrol.key.before", Agent, Joining, "before the node's key is written"},
		{"enrol.key.written", Agent, Joining, "after it is durable"},
		{"enrol.join.answered", Agent, Joining, "after the server has let the host join, before anything is written"},
		{"enrol.trust.written", Agent, Joining, "after the trust root is durable"},
		{"enrol.identity.written", Agent, Joining, "after the certificate is durable"},
		{"enrol.node.written", Agent, Joining, "after it is durable that the host has joined"},
	}
}
