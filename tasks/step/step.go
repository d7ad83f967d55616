// Package step has the library steps: the only code of the tasks that changes a
// node. A step is a protobuf message with an Observe, Apply, Verify and Undo;
// kinds plan with them and never touch a node themselves.
package step

import (
	"fmt"

	"google.golang.org/protobuf/proto"

	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/tasks"
)

// Register adds all library steps to r.
func Register(r *tasks.Registry) {
	idempotent := func(name string) tasks.StepInfo {
		return tasks.StepInfo{Type: name, Revision: 1, Effect: taskv1.Effect_EFFECT_IDEMPOTENT, Undoable: true}
	}
	tasks.AddStep(r, idempotent("file.write"), WriteFile)
	tasks.AddStep(r, idempotent("file.remove"), RemoveFile)
	tasks.AddStep(r, idempotent("secret.write"), WriteSecret)
	tasks.AddStep(r, idempotent("secret.remove"), RemoveSecret)
	tasks.AddStep(r, idempotent("dir.make"), MakeDir)
	tasks.AddStep(r, idempotent("unit.set"), SetUnit)
	tasks.AddStep(r, idempotent("mount.set"), SetMount)
	tasks.AddStep(r, tasks.StepInfo{Type: "disk.wipe", Revision: 1, Effect: taskv1.Effect_EFFECT_IDEMPOTENT}, WipeDisk)
	tasks.AddStep(r, idempotent("filesystem.make"), MakeFilesystem)
	tasks.AddStep(r, idempotent("array.set"), SetArray)
	tasks.AddStep(r, idempotent("image.import"), ImportImage)
	tasks.AddStep(r, idempotent("image.remove"), RemoveImage)
	tasks.AddStep(r, tasks.StepInfo{
		Type: "container.start", Revision: 1, Effect: taskv1.Effect_EFFECT_CHECK_THEN_ACT, Undoable: true,
	}, StartContainer)
	tasks.AddStep(r, idempotent("container.remove"), RemoveContainer)
	checked := func(name string) tasks.StepInfo {
		return tasks.StepInfo{Type: name, Revision: 1, Effect: taskv1.Effect_EFFECT_CHECK_THEN_ACT, Undoable: true}
	}
	tasks.AddStep(r, checked("package.install"), InstallPackages)
	tasks.AddStep(r, checked("package.remove"), RemovePackages)
	once := func(name string) tasks.StepInfo {
		return tasks.StepInfo{Type: name, Revision: 1, Effect: taskv1.Effect_EFFECT_AT_MOST_ONCE}
	}
	tasks.AddStep(r, once("command.run"), RunCommand)
	tasks.AddStep(r, idempotent("slurm.munge"), Munge)
	tasks.AddStep(r, idempotent("slurm.stop"), StopSlurmd)
	tasks.AddStep(r, idempotent("slurm.start"), StartSlurmd)
	tasks.AddStep(r, idempotent("slurm.drain"), DrainSlurm)
	tasks.AddStep(r, idempotent("slurm.ask"), AskSlurm)
	tasks.AddStep(r, idempotent("slurm.return"), ReturnSlurm)
	tasks.AddStep(r, idempotent("gpu.quiesce"), QuiesceGPU)
	tasks.AddStep(r, idempotent("gpu.publish"), PublishGPU)
	tasks.AddStep(r, idempotent("gpu.persistence"), PersistGPU)
	tasks.AddStep(r, once("gpu.reset"), ResetGPU)
	tasks.AddStep(r, idempotent("gpu.check"), CheckGPUs)
	tasks.AddStep(r, once("gpu.dcgm"), RunDCGM)
	tasks.AddStep(r, idempotent("mig.inspect"), InspectMIG)
	tasks.AddStep(r, idempotent("mig.clear"), ClearMIG)
	tasks.AddStep(r, idempotent("mig.mode"), SetMIGMode)
	tasks.AddStep(r, idempotent("mig.activate"), ActivateMIG)
	tasks.AddStep(r, idempotent("mig.create"), CreateMIG)
	tasks.AddStep(r, idempotent("mig.verify"), VerifyMIG)
	tasks.AddStep(r, tasks.StepInfo{Type: "node.reboot", Revision: 1, Effect: taskv1.Effect_EFFECT_REBOOT}, Reboot)
}

// encode serialises what a step observed or returned, the same way each time.
func encode(m proto.Message) ([]byte, error) {
	b, err := proto.MarshalOptions{Deterministic: true}.Marshal(m)
	if err != nil {
		return nil, fmt.Errorf("serialise %s: %w", m.ProtoReflect().Descriptor().Name(), err)
	}
	return b, nil
}

// decode is the inverse of encode.
func decode(b []byte, m proto.Message) error {
	if err := proto.Unmarshal(b, m); err != nil {
		return fmt.Errorf("decode %s: %w", m.ProtoReflect().Descriptor().Name(), err)
	}
	return nil
}
