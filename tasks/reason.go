package tasks

import taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"

// The reasons that steps give for a failure. They become a task's reason.
const (
	// ReasonCommandExit is a command that ended with an exit code that the spec
	// does not count as success.
	ReasonCommandExit = "COMMAND_EXIT"
	// ReasonCommandSignal is a command that a signal ended.
	ReasonCommandSignal = "COMMAND_SIGNAL"
	// ReasonCommandTimeout is a command that was stopped because its time was
	// over.
	ReasonCommandTimeout = "COMMAND_TIMEOUT"
	// ReasonCommandOOM is a command that the kernel killed for want of memory.
	ReasonCommandOOM = "COMMAND_OOM"
	// ReasonCommandNotStarted is a program that could not be started.
	ReasonCommandNotStarted = "COMMAND_NOT_STARTED"
	// ReasonRebootRefused is a reboot that the node's systemd did not take on.
	ReasonRebootRefused = "REBOOT_REFUSED"
	// ReasonBusy is a mount that could not be unmounted because it is in use.
	ReasonBusy = "BUSY"
	// ReasonContainerEnded is a container that ended as soon as it was started.
	ReasonContainerEnded = "CONTAINER_ENDED"
	// ReasonSecretAway is a secret whose value could not be had in time.
	ReasonSecretAway = "SECRET_AWAY"
	// ReasonSecretWrong is a secret whose value is not there, or is not the one
	// that was signed.
	ReasonSecretWrong = "SECRET_WRONG"
	// ReasonPackagesLocked is a package database that another program held for
	// longer than is waited for.
	ReasonPackagesLocked = "PACKAGES_LOCKED"
	// ReasonOtherPackages is a change of packages that would have reached others
	// than those planned.
	ReasonOtherPackages = "OTHER_PACKAGES"
	// ReasonMungeDown is a munged that does not run or makes no credentials.
	ReasonMungeDown = "MUNGE_DOWN"
	// ReasonMungeKeyMode is a munge key that others than its owner can read.
	ReasonMungeKeyMode = "MUNGE_KEY_MODE"
	// ReasonMungeKeyRefused is a controller that does not trust the node.
	ReasonMungeKeyRefused = "MUNGE_KEY_REFUSED"
	// ReasonClockOff is a clock that makes credentials expired or too early.
	ReasonClockOff = "CLOCK_OFF"
	// ReasonSlurmControllerDown is a controller of Slurm that does not answer.
	ReasonSlurmControllerDown = "SLURM_CONTROLLER_DOWN"
	// ReasonSlurmVersion is a slurmd that is newer than its controller.
	ReasonSlurmVersion = "SLURM_VERSION"
	// ReasonSlurmDevice is a device that slurmd waits for in vain.
	ReasonSlurmDevice = "SLURM_DEVICE_MISSING"
	// ReasonSlurmGres is a node whose resources are not those that the controller has.
	ReasonSlurmGres = "SLURM_GRES"
	// ReasonSlurmSkipped is a slurmd that systemd did not start, by a condition.
	ReasonSlurmSkipped = "SLURM_SKIPPED"
	// ReasonSlurmNotRegistered is a node that the controller does not have in time.
	ReasonSlurmNotRegistered = "SLURM_NOT_REGISTERED"
	// ReasonSlurmForeignDrain is a node that somebody else has drained.
	ReasonSlurmForeignDrain = "SLURM_FOREIGN_DRAIN"
	// ReasonSlurmJobs is a node whose jobs did not end in time.
	ReasonSlurmJobs = "SLURM_JOBS"
	// ReasonGPUInUse is a GPU, or a MIG instance, that a program holds.
	ReasonGPUInUse = "GPU_IN_USE"
	// ReasonGPULost is a GPU that has fallen off the bus, or that the driver does
	// not have any more.
	ReasonGPULost = "GPU_LOST"
	// ReasonGPUDriver is a driver of GPUs that does not answer or cannot be asked.
	ReasonGPUDriver = "GPU_DRIVER"
	// ReasonGPUReset is a GPU that could not be reset, or was not although the
	// driver's program said so.
	ReasonGPUReset = "GPU_RESET"
	// ReasonGPURecovery is a GPU of which the driver still asks for more after it
	// was reset.
	ReasonGPURecovery = "GPU_RECOVERY"
	// ReasonGPUChanged is a GPU on which somebody changed the layout between the
	// plan and its first step.
	ReasonGPUChanged = "GPU_CHANGED"
	// ReasonMIGPending is a MIG mode that was stored and did not become active.
	ReasonMIGPending = "MIG_PENDING"
	// ReasonMIGRoom is an instance that the driver found no room for, or does not
	// make.
	ReasonMIGRoom = "MIG_ROOM"
)

// ReasonError is an error of a step with a code of its own. The executor finds
// it with errors.As, takes Reason as the task's reason, and keeps Command in the
// step's record. A step whose Apply returns one may return its out as well.
type ReasonError struct {
	// Reason is one of the constants above.
	Reason string
	// Command is how the step's command ended, of a step that ran one.
	Command *taskv1.CommandOutcome
	// Unchanged is set when the step is known to have changed nothing, so that
	// there is nothing to undo although the step cannot be undone.
	Unchanged bool
	// Err says what happened, in words.
	Err error
}

// Error is the text of Err.
func (e *ReasonError) Error() string { return e.Err.Error() }

// Unwrap returns Err.
func (e *ReasonError) Unwrap() error { return e.Err }

// CommandStep is a step that runs a command.
type CommandStep interface {
	Step
	// Outcome decodes what Apply returned.
	Outcome(out []byte) (*taskv1.CommandOutcome, error)
}
