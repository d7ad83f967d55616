// Package all lists the kinds and library steps that are compiled in.
package all

import (
	"github.com/gpuaas/millwright/tasks"
	"github.com/gpuaas/millwright/tasks/container"
	"github.com/gpuaas/millwright/tasks/gpu"
	"github.com/gpuaas/millwright/tasks/mig"
	"github.com/gpuaas/millwright/tasks/secret"
	"github.com/gpuaas/millwright/tasks/slurm"
	"github.com/gpuaas/millwright/tasks/step"
	"github.com/gpuaas/millwright/tasks/storage"
	"github.com/gpuaas/millwright/tasks/system"
	"github.com/gpuaas/millwright/tasks/task"
)

// Registry returns a registry of all kinds and steps.
func Registry() *tasks.Registry {
	r := tasks.NewRegistry()
	step.Register(r)
	r.AddAsker(slurm.Asker{})
	tasks.Add(r, container.RunInfo(), container.Run{})
	tasks.Add(r, container.StopInfo(), container.Stop{})
	tasks.Add(r, gpu.DiagnoseInfo(), gpu.Diagnose{})
	tasks.Add(r, gpu.ResetInfo(), gpu.Reset{})
	tasks.Add(r, mig.ConfigureInfo(), mig.Configure{})
	tasks.Add(r, secret.PlaceInfo(), secret.Place{})
	tasks.Add(r, secret.RemoveInfo(), secret.Remove{})
	tasks.Add(r, slurm.DrainInfo(), slurm.Drain{})
	tasks.Add(r, slurm.JoinInfo(), slurm.Join{})
	tasks.Add(r, slurm.LeaveInfo(), slurm.Leave{})
	tasks.Add(r, slurm.ReconfigureInfo(), slurm.Reconfigure{})
	tasks.Add(r, slurm.ResumeInfo(), slurm.Resume{})
	tasks.Add(r, storage.MountInfo(), storage.Mount{})
	tasks.Add(r, storage.ScratchInfo(), storage.Scratch{})
	tasks.Add(r, storage.UnmountInfo(), storage.Unmount{})
	tasks.Add(r, system.CommandInfo(), system.Command{})
	tasks.Add(r, system.RebootInfo(), system.Reboot{})
	tasks.Add(r, task.ResolveInfo(), task.Resolve{})
	return r
}
