package slurm

import (
	"slices"
	"testing"
	"time"

	"github.com/gpuaas/millwright/tasks/host"
)

// A node as Slurm 22.05.8 shows it, with a reason that is made to mislead.
const drained = `NodeName=n1 Arch=x86_64 CoresPerSocket=2 
   CPUAlloc=0 CPUEfctv=2 CPUTot=2 CPULoad=3.77
   AvailableFeatures=mw,fast
   ActiveFeatures=mw,fast
   Gres=gpu:h100:2
   NodeAddr=10.213.1.11 NodeHostName=n1 Version=22.05.8
   OS=Linux 6.1.0 State=DOWN #1 SMP PREEMPT_DYNAMIC 
   RealMemory=1000 AllocMem=0 FreeMem=328 Sockets=1 Boards=1
   State=IDLE*+DRAIN+DYNAMIC_NORM ThreadsPerCore=1 TmpDisk=0 Weight=1 Owner=N/A MCS_label=N/A
   Partitions=gpu 
   BootTime=2026-11-28T19:44:06 SlurmdStartTime=2026-11-28T20:38:23
   Reason=mw:drain: [x@y] State=IDLE Gres=none [root@2026-11-28T20:44:00]

`

func TestParseNode(t *testing.T) {
	n, err := parseNode(drained)
	if err != nil {
		t.Fatal(err)
	}
	if n.Name != "n1" || !n.Known || n.Reason != "mw:drain: [x@y] State=IDLE Gres=none" || n.Gres != "gpu:h100:2" || n.Version != "22.05.8" ||
		n.RealMemoryMiB != 1000 || n.SlurmdStart.Year() != 2026 || !slices.Equal(n.Features, []string{"mw", "fast"}) || !slices.Equal(n.Partitions, []string{"gpu"}) {
		t.Errorf("parsed %+v", n)
	}
	if want := []string{"IDLE", "NOT_RESPONDING", "DRAIN", "DYNAMIC_NORM"}; !slices.Equal(n.States, want) {
		t.Errorf("states %v, want %v", n.States, want)
	}
	if !n.DrainedBy("mw:drain") || n.DrainedBy("mw:dr") || n.DrainedBy("mw:other") {
		t.Errorf("owner of %q is misread", n.Reason)
	}
	for _, bad := range []string{"", "NodeName=n1\n", "State=IDLE\n", "slurm_load_nodes error", "NodeName=n1 State=IDLE RealMemory=much\n", "NodeName=n1 State=\n"} {
		if n, err := parseNode(bad); err == nil {
			t.Errorf("%q was understood as %+v", bad, n)
		}
	}
}

func TestParseJobs(t *testing.T) {
	jobs, err := parseJobs("17|ann|RUNNING|2026-11-28T20:38:23|train|x y\n18_3|bob|COMPLETING|NOT_SET|\n")
	want := []host.SlurmJob{{ID: "17", User: "ann", State: "RUNNING", Name: "train|x y", End: time.Date(2026, 11, 28, 20, 38, 23, 0, time.Local)}, {ID: "18_3", User: "bob", State: "COMPLETING"}}
	if err != nil || !slices.Equal(jobs, want) {
		t.Errorf("jobs %+v, %v", jobs, err)
	}
	// A name of several lines is one job's, and can at most make up another job.
	jobs, err = parseJobs("17|ann|RUNNING|NOT_SET|one\ntwo|three\n\n18|bob|RUNNING|NOT_SET|b\n")
	want = []host.SlurmJob{{ID: "17", User: "ann", State: "RUNNING", Name: "one two|three"}, {ID: "18", User: "bob", State: "RUNNING", Name: "b"}}
	if err != nil || !slices.Equal(jobs, want) {
		t.Errorf("a name of two lines: %+v, %v", jobs, err)
	}
	if jobs, err := parseJobs(""); err != nil || len(jobs) != 0 {
		t.Errorf("no job: %+v, %v", jobs, err)
	}
	if jobs, err := parseJobs("slurm is away\n"); err == nil {
		t.Errorf("rubbish was understood as %+v", jobs)
	}
}

// TestUnknown: only the controller's own word that it has no such node counts.
func TestUnknown(t *testing.T) {
	for words, want := range map[string]bool{
		"Node n1 not found": true,
		"delete_node nodename=n1: Invalid node name specified": true,
		"Node n11 not found": false,
		"slurm_load_node error: Unable to contact slurm controller (connect failure)": false,
		"": false,
	} {
		if unknown(words, "n1") != want {
			t.Errorf("%q: %v", words, !want)
		}
	}
}
