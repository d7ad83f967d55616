package storage

import (
	"fmt"
	"strings"

	storagev1 "github.com/gpuaas/millwright/proto/millwright/storage/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/tasks/step"
)

// source is what a spec wants mounted, in the words of the mount unit, of the
// kernel's mount table and of the node that has to be fit for it.
type source struct {
	// The mount unit.
	what, unitType string
	options        []string
	environment    []string
	network        bool     // it comes over the network
	after          []string // units that it comes after
	requires       string   // the path on which it stands
	jobTimeout     string

	// The mount table.
	fstype, shown string
	otherNames    []string // that shown may have
	anyServer     bool     // only what follows the servers in shown counts
	inForce       []optionInForce

	needs needs
}

// optionInForce is an option that the mount table shows. A flag has no value.
type optionInForce struct {
	key, value string
	flag       bool
}

// sourceOf returns what a valid spec wants mounted.
func sourceOf(spec *storagev1.MountSpec) source {
	switch src := spec.GetSource().(type) {
	case *storagev1.MountSpec_Bind:
		return source{
			what: src.Bind.GetPath(), unitType: "none", options: []string{"bind", "nofail"}, requires: src.Bind.GetPath(),
			fstype: step.FSTypeBind, shown: src.Bind.GetPath(),
		}
	case *storagev1.MountSpec_Tmpfs:
		return source{
			what: typeTmpfs, unitType: typeTmpfs,
			options: []string{"nofail", fmt.Sprintf("size=%d", src.Tmpfs.GetSizeBytes()), "mode=" + tmpfsMode(src.Tmpfs)},
			fstype:  typeTmpfs, shown: typeTmpfs, needs: needs{kernel: []string{typeTmpfs}},
		}
	case *storagev1.MountSpec_Glusterfs:
		return glusterSource(src.Glusterfs)
	case *storagev1.MountSpec_Nfs:
		return nfsSource(src.Nfs)
	case *storagev1.MountSpec_Lustre:
		return lustreSource(src.Lustre)
	case *storagev1.MountSpec_Weka:
		return wekaSource(src.Weka)
	case *storagev1.MountSpec_Beegfs:
		return beegfsSource(src.Beegfs)
	case *storagev1.MountSpec_Cephfs:
		return cephSource(src.Cephfs, keyFileOf(spec))
	case *storagev1.MountSpec_S3:
		return s3Source(src.S3, keyFileOf(spec), spec.GetReadOnly())
	case *storagev1.MountSpec_Device:
		return deviceSource(src.Device)
	default:
		return source{}
	}
}

func glusterSource(g *storagev1.GlusterfsSource) source {
	s := source{
		unitType: "glusterfs", options: []string{"_netdev", "log-level=WARNING"}, network: true, fstype: typeGluster,
		needs: needs{
			programs: []program{{"mount.glusterfs", "glusterfs-client"}}, kernel: []string{"fuse"},
		},
	}
	// The client names the server that answered it.
	for i, server := range g.GetServers() {
		name := server + ":/" + g.GetVolume() + g.GetSubdirectory()
		if i == 0 {
			s.what, s.shown = name, name
		} else {
			s.otherNames = append(s.otherNames, name)
		}
		s.needs.servers = append(s.needs.servers, endpoint{server, 24007})
	}
	if others := g.GetServers()[1:]; len(others) > 0 {
		s.options = append(s.options, "backup-volfile-servers="+strings.Join(others, ":"))
	}
	return s
}

// wanted returns the step that mounts what a spec asks for, and how the mount
// table will name it.
func wanted(spec *storagev1.MountSpec) *taskv1.MountUnitStep {
	s := sourceOf(spec)
	m := &taskv1.MountUnitStep{
		Unit: MountUnit(spec.GetTarget()), Where: spec.GetTarget(), ReadOnly: spec.GetReadOnly(),
		Action: taskv1.UnitAction_UNIT_ACTION_START,
		Source: s.shown, Fstype: s.fstype, OtherSources: s.otherNames, AnyServer: s.anyServer,
	}
	if w := spec.GetWait(); w != nil {
		m.Attempts, m.BackOff = w.GetAttempts(), w.GetBackOff()
	}
	return m
}
