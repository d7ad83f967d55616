// Package check holds what a server and its nodes recorded against what
// Millwright promises. It reads the exports of both, and the marks that test
// commands left on the nodes, and names each promise that was broken. It knows
// the formats and the keys, and nothing of the programs: what they claim is
// recomputed here.
package check

import (
	"bufio"
	"errors"
	"fmt"
	"io"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
	auditv1 "github.com/gpuaas/millwright/proto/millwright/audit/v1"
	serverv1 "github.com/gpuaas/millwright/proto/millwright/server/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"

	// Specs and results are printed as their types.
	_ "github.com/gpuaas/millwright/tasks/all"
)

// maxLine bounds a line of an export.
const maxLine = 64 << 20

// Server is what a server recorded.
type Server struct {
	Cluster  *serverv1.ClusterRow
	Entries  []*auditv1.ExportedEntry
	Tasks    map[string]*serverv1.TaskRow
	Nodes    map[string]*serverv1.NodeRow
	Journals map[string]*serverv1.JournalRow // by node: the one that it writes
}

// Node is what a node recorded.
type Node struct {
	Name   string
	Head   *agentv1.JournalHead
	Frames []*agentv1.JournalFrame
	Tasks  map[string]*agentv1.TaskRecord
	Steps  map[string][]*agentv1.StepRecord
	// Intents are by key.
	Intents map[string]*agentv1.IntentRecord
}

// Effect is a mark that a test command left on a node each time it ran. Its key
// stands in the arguments of one command alone.
type Effect struct {
	Node, Key string
	// Count is how often the mark is there; 0 for a key that never showed.
	Count int
}

// History is all that is known.
type History struct {
	Server *Server
	// Nodes are those whose journal could be read.
	Nodes []*Node
	// Gone names nodes that have not come to rest, since their agent does not
	// run any more or is cut off, each with the reason: their tasks need not
	// have ended, nor the server know their end. All else holds for them too.
	Gone map[string]string
	// Effects are the marks on the nodes.
	Effects []Effect
}

// ReadServer reads what millwright-server log export wrote.
func ReadServer(r io.Reader) (*Server, error) {
	s := NewServer()
	err := lines(r, func(b []byte) error {
		line := new(auditv1.LogLine)
		if err := protojson.Unmarshal(b, line); err != nil {
			return err
		}
		return s.Add(line)
	})
	if err == nil && s.Cluster == nil {
		err = errors.New("it has no cluster: it is not a whole log export")
	}
	if err != nil {
		return nil, fmt.Errorf("read log export: %w", err)
	}
	return s, nil
}

// NewServer returns a server of which nothing is known yet.
func NewServer() *Server {
	return &Server{Tasks: map[string]*serverv1.TaskRow{}, Nodes: map[string]*serverv1.NodeRow{}, Journals: map[string]*serverv1.JournalRow{}}
}

// Add takes the next line. What is for reading is made anew from the bytes, so
// that nothing is judged that no hash covers.
func (s *Server) Add(line *auditv1.LogLine) error {
	switch l := line.GetLine().(type) {
	case *auditv1.LogLine_Cluster:
		s.Cluster = l.Cluster
	case *auditv1.LogLine_Entry:
		e := l.Entry
		e.Entry, e.Event = new(auditv1.LogEntry), nil
		if err := proto.Unmarshal(e.GetBytes(), e.Entry); err != nil {
			return fmt.Errorf("entry %d: %w", e.GetIndex(), err)
		}
		if f := e.GetEntry().GetNodeFrame(); f != nil {
			e.Event = new(taskv1.Event)
			if err := proto.Unmarshal(f.GetFrame(), e.Event); err != nil {
				return fmt.Errorf("frame in entry %d: %w", e.GetIndex(), err)
			}
		}
		s.Entries = append(s.Entries, e)
	case *auditv1.LogLine_Task:
		s.Tasks[l.Task.GetTask().GetId()] = l.Task
	case *auditv1.LogLine_Node:
		s.Nodes[l.Node.GetName()] = l.Node
	case *auditv1.LogLine_Journal:
		s.Journals[l.Journal.GetNode()] = l.Journal
	default:
		return fmt.Errorf("a line of a kind that is not known: %v", line)
	}
	return nil
}

// ReadNode reads what millwrightd journal export wrote.
func ReadNode(r io.Reader) (*Node, error) {
	n := NewNode()
	err := lines(r, func(b []byte) error {
		line := new(agentv1.JournalLine)
		if err := protojson.Unmarshal(b, line); err != nil {
			return err
		}
		return n.Add(line)
	})
	if err == nil && n.Head == nil {
		err = errors.New("it has no head: it is not a whole journal export")
	}
	if err != nil {
		return nil, fmt.Errorf("read journal export: %w", err)
	}
	return n, nil
}

// NewNode returns a node of which nothing is known yet.
func NewNode() *Node {
	return &Node{Tasks: map[string]*agentv1.TaskRecord{}, Steps: map[string][]*agentv1.StepRecord{}, Intents: map[string]*agentv1.IntentRecord{}}
}

// Add takes the next line; see [Server.Add].
func (n *Node) Add(line *agentv1.JournalLine) error {
	switch l := line.GetLine().(type) {
	case *agentv1.JournalLine_Head:
		n.Head, n.Name = l.Head, l.Head.GetMeta().GetNode()
	case *agentv1.JournalLine_Frame:
		f := l.Frame
		f.Event = new(taskv1.Event)
		if err := proto.Unmarshal(f.GetBytes(), f.Event); err != nil {
			return fmt.Errorf("frame %d: %w", f.GetSeq(), err)
		}
		n.Frames = append(n.Frames, f)
	case *agentv1.JournalLine_Task:
		n.Tasks[l.Task.GetTaskId()] = l.Task
	case *agentv1.JournalLine_Step:
		id := l.Step.GetTaskId()
		n.Steps[id] = append(n.Steps[id], l.Step.GetRecord())
	case *agentv1.JournalLine_Intent:
		n.Intents[l.Intent.GetKey()] = l.Intent
	default:
		return fmt.Errorf("a line of a kind that is not known: %v", line)
	}
	return nil
}

// ReadEffects reads the marks that commands left on a node, one key a line, and
// counts them.
func ReadEffects(node string, r io.Reader) ([]Effect, error) {
	count := map[string]int{}
	var keys []string
	err := lines(r, func(b []byte) error {
		if count[string(b)]++; count[string(b)] == 1 {
			keys = append(keys, string(b))
		}
		return nil
	})
	var out []Effect
	for _, k := range keys {
		out = append(out, Effect{Node: node, Key: k, Count: count[k]})
	}
	return out, err
}

func lines(r io.Reader, take func([]byte) error) error {
	scanner := bufio.NewScanner(r)
	scanner.Buffer(nil, maxLine)
	for n := 1; scanner.Scan(); n++ {
		if len(scanner.Bytes()) == 0 {
			continue
		}
		if err := take(scanner.Bytes()); err != nil {
			return fmt.Errorf("line %d: %w", n, err)
		}
	}
	return scanner.Err()
}
