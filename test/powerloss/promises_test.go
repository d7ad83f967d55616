package powerloss_test

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/gpuaas/millwright/test/powerloss"
)

const (
	stateDir = "/var/lib/millwright"
	unitDir  = "/etc/systemd/system"
)

// sides are the two programs' replays, with what each promised the other.
type sides struct {
	agent, server *powerloss.Replay
	kinds         map[string]int // promises by what they are about
}

func events(t *testing.T, path string) []powerloss.Event {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	out, err := powerloss.Read(f)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// prepare finds out what was promised, to whom and when: what one program wrote
// into its own files it had been told by the other before.
func prepare(t *testing.T, r *recording, judges, dir string) *sides {
	t.Helper()
	s := &sides{kinds: map[string]int{}}
	s.agent = &powerloss.Replay{
		Events: events(t, r.agent), Judge: filepath.Join(judges, "agent"), State: stateDir, Seed: 1,
		Roots: []powerloss.Root{{Path: stateDir}, {Path: unitDir, Only: "*.mount*"}},
	}
	s.server = &powerloss.Replay{
		Events: events(t, r.server), Judge: filepath.Join(judges, "server"), State: r.serverDir, Seed: 1,
		Roots: []powerloss.Root{{Path: r.serverDir}},
	}
	agentSaw, err := s.agent.Timeline(t.Context(), dir, filepath.Join(stateDir, "state.db"))
	if err != nil {
		t.Fatal(err)
	}
	serverSaw, err := s.server.Timeline(t.Context(), dir, filepath.Join(r.serverDir, "store.db"))
	if err != nil {
		t.Fatal(err)
	}
	s.toServer(t, serverSaw)
	s.toHost(t, r)
	s.toNode(t, r, agentSaw)
	s.toClients(r)
	return s
}

func (s *sides) promise(r *powerloss.Replay, kind string, from int, kept func(powerloss.Image, *powerloss.Verdict) error) {
	s.kinds[kind]++
	r.Promises = append(r.Promises, powerloss.Promise{What: kind, From: from, Until: powerloss.Forever, Kept: kept})
}

func (s *sides) file(t *testing.T, r *powerloss.Replay, kind, path string, event int) {
	t.Helper()
	p, err := r.FileKept(kind, path, event)
	if err != nil {
		t.Error(err)
		return
	}
	s.kinds[kind]++
	r.Promises = append(r.Promises, p)
}

// toServer has every frame that the server has stored, since the agent sent it,
// and the key with which it has joined.
func (s *sides) toServer(t *testing.T, saw []powerloss.Point) {
	t.Helper()
	stored, joined := map[string]uint64{}, false
	for _, p := range saw {
		if len(p.Nodes) > 0 && !joined {
			joined = true
			s.file(t, s.agent, "joined with a key", stateDir+"/identity/key.pem", powerloss.LastTold(s.agent.Events, p.Time))
		}
		for journal, seq := range p.Frames {
			if seq <= stored[journal] {
				continue
			}
			stored[journal] = seq
			s.promise(s.agent, "frame sent", powerloss.LastTold(s.agent.Events, p.Time), func(_ powerloss.Image, v *powerloss.Verdict) error {
				if !v.Joined || v.Journal != journal || v.Head < seq {
					return fmt.Errorf("the server has frame %d of journal %s; the node joined: %v, with journal %s and frame %d", seq, journal, v.Joined, v.Journal, v.Head)
				}
				return nil
			})
		}
	}
}

// toHost has what the node was changed after: a command that runs has its
// marker, a shim that has ended its result, and a mount its unit.
func (s *sides) toHost(t *testing.T, r *recording) {
	t.Helper()
	shims := map[int]string{}
	for i, e := range s.agent.Events {
		switch {
		case e.Name == "execve" && !e.End && e.Has("shim"):
			for id := range r.commands {
				if e.Has(id) && !e.Has("--post") {
					shims[e.Thread] = id
				}
			}
		case e.Name == "execve" && !e.End:
			for id, mark := range r.commands {
				if e.Has(mark) {
					s.file(t, s.agent, "command started", stateDir+"/commands/"+id+"/0-1/start", i)
				}
			}
			if e.Has("/mnt/powerloss") && e.Has("mount") && !e.Has("umount") {
				s.file(t, s.agent, "mount made", unitDir+"/mnt-powerloss.mount", i)
			}
		case e.Name == "exit" && shims[e.Thread] != "":
			for _, name := range []string{"result", "stdout.head", "stdout.tail", "stderr.head", "stderr.tail"} {
				s.file(t, s.agent, "command ended", stateDir+"/commands/"+shims[e.Thread]+"/0-1/"+name, i)
			}
			delete(shims, e.Thread)
		}
	}
}

// toNode has what the server acknowledged: the node's membership, its frames,
// and the output that it may delete.
func (s *sides) toNode(t *testing.T, r *recording, saw []powerloss.Point) {
	t.Helper()
	for _, e := range s.agent.Events {
		if strings.HasPrefix(e.Name, "rename") && !e.End && e.Has("identity/svid.pem") {
			s.promise(s.server, "node joined", powerloss.LastTold(s.server.Events, e.Start), func(_ powerloss.Image, v *powerloss.Verdict) error {
				if !slices.Contains(v.Nodes, "n1") {
					return fmt.Errorf("n1 has its certificate, and the server knows %v", v.Nodes)
				}
				return nil
			})
		}
	}
	acked, unsent := uint64(0), map[string]bool{}
	for _, p := range saw {
		if journal, seq := p.Journal, p.Acked; seq > acked {
			acked = seq
			s.promise(s.server, "frame acknowledged", powerloss.LastTold(s.server.Events, p.Time), func(_ powerloss.Image, v *powerloss.Verdict) error {
				if v.Frames[journal] < seq {
					return fmt.Errorf("frame %d of journal %s is acknowledged, and the server has %v", seq, journal, v.Frames)
				}
				return nil
			})
		}
		for id := range unsent {
			if slices.Contains(p.Outputs, id) {
				continue
			}
			delete(unsent, id)
			at := powerloss.LastTold(s.server.Events, p.Time)
			for _, f := range r.outputs[id] {
				s.file(t, s.server, "output acknowledged", f, at)
			}
		}
		for _, id := range p.Outputs {
			unsent[id] = true
		}
	}
}

// toClients has the tasks that millctl was told of, and the founding itself.
func (s *sides) toClients(r *recording) {
	for i, e := range s.server.Events {
		if e.Name == "execve" && !e.End && e.Has("run") {
			s.promise(s.server, "founded", i, func(_ powerloss.Image, v *powerloss.Verdict) error {
				if !v.Founded {
					return fmt.Errorf("init has ended, and there is no cluster or no authority")
				}
				return nil
			})
		}
	}
	for _, told := range r.told {
		s.promise(s.server, "task created", powerloss.LastTold(s.server.Events, told.at.UnixMicro()), func(_ powerloss.Image, v *powerloss.Verdict) error {
			for _, id := range told.ids {
				if !slices.Contains(v.Tasks, id) {
					return fmt.Errorf("millctl was told of task %s, and it is not there", id)
				}
			}
			return nil
		})
	}
}
