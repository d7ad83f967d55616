package script_test

import (
	"context"
	"encoding/hex"
	"fmt"
	"os"
	"strconv"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/millwright/pki"
	"github.com/gpuaas/millwright/pki/ca"
	"github.com/gpuaas/millwright/pki/trustroot"
	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
	nodev1 "github.com/gpuaas/millwright/proto/millwright/node/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/tasks"
	"github.com/gpuaas/millwright/tasks/all"
	"github.com/gpuaas/millwright/test/relisten"
)

// server is a control plane in memory with nodes that do what a transcript
// says. What it checks and how it answers is what the protocol demands.
type server struct {
	taskv1.UnimplementedTaskServiceServer
	nodev1.UnimplementedNodeServiceServer

	t        *testing.T
	registry *tasks.Registry
	address  string
	running  *grpc.Server
	group    sync.WaitGroup
	identity *pki.Static

	authority *ca.CA
	root      *trustroot.Root

	mu       sync.Mutex // guards what follows
	changed  chan struct{}
	nodes    map[string]*nodev1.Node
	tasks    []*stored // by create index
	requests map[string][]string
	events   []*taskv1.TaskEvent
	oldest   uint64            // the first event that a watch can go on from
	fate     string            // what becomes of new tasks
	faults   map[string]*fault // by method
	output   []*taskv1.ReadOutputResponse
	cluster  []byte
	watchers int // how often a watch was begun
}

// stored is a task with what authorised it.
type stored struct {
	task     *taskv1.Task
	envelope *taskv1.Envelope
	signed   *taskv1.SignedLeaf
}

// fault is an answer that a method gives in place of its own.
type fault struct {
	err   error
	times int
	late  bool // do the work first, so that only the answer is lost
}

func newServer(t *testing.T) *server {
	return &server{
		t: t, registry: all.Registry(), changed: make(chan struct{}), fate: "succeeded",
		nodes: map[string]*nodev1.Node{}, requests: map[string][]string{}, faults: map[string]*fault{}, identity: &pki.Static{},
	}
}

// found does what millwright-server init does, with a server that runs.
func (s *server) found(foundingFile, contextFile string) error {
	data, err := os.ReadFile(foundingFile)
	if err != nil {
		return err
	}
	f := &nodev1.FoundingBundle{}
	if err := protojson.Unmarshal(data, f); err != nil {
		return err
	}
	if s.root, err = trustroot.OpenGenesis(f.GetGenesis()); err != nil {
		return err
	}
	if s.authority, err = ca.New(ca.Config{TrustDomain: s.root.TrustDomain()}); err != nil {
		return err
	}
	hash := s.root.Cluster()
	s.cluster = hash[:]
	if err := s.certify("server", pki.RoleServer); err != nil {
		return err
	}
	if err := s.serve(); err != nil {
		return err
	}
	return s.writeContext(f, contextFile, ca.DefaultOperatorTTL)
}

// certify gives the server a certificate.
func (s *server) certify(name string, role pki.Role) error {
	key, err := pki.GenerateKey()
	if err != nil {
		return err
	}
	id, err := s.authority.Identity(ca.Request{ID: pki.ID{TrustDomain: s.root.TrustDomain(), Role: role, Name: name}, TTL: time.Hour}, key)
	if err != nil {
		return err
	}
	s.identity.Set(id)
	return nil
}

func (s *server) writeContext(f *nodev1.FoundingBundle, file string, ttl time.Duration) error {
	key, err := pki.RequestKey(f.GetOperatorCsr())
	if err != nil {
		return err
	}
	chain, err := s.authority.Issue(ca.Request{
		ID:        pki.ID{TrustDomain: s.root.TrustDomain(), Role: pki.RoleOperator, Name: f.GetOperator()},
		PublicKey: key, TTL: ttl,
	})
	if err != nil {
		return err
	}
	sum := s.authority.SHA256()
	data, err := protojson.Marshal(&nodev1.ContextFile{
		Version: 1, Name: "main", Server: s.address, TrustDomain: s.root.TrustDomain(),
		CaCertificates: pki.DERs(s.authority.Roots()), CaSha256: hex.EncodeToString(sum[:]),
		Cluster: hex.EncodeToString(s.cluster), OperatorCertificates: pki.DERs(chain),
	})
	if err != nil {
		return err
	}
	return os.WriteFile(file, data, 0o600)
}

// serve listens, on the port of the time before when there was one.
func (s *server) serve() error {
	address := s.address
	if address == "" {
		address = "127.0.0.1:0"
	}
	l := relisten.Listen(s.t, address)
	s.address = l.Addr().String()
	config := pki.TLS{Source: s.identity, TrustDomain: s.root.TrustDomain()}.Server()
	s.running = grpc.NewServer(grpc.Creds(credentials.NewTLS(config)),
		grpc.ChainUnaryInterceptor(s.answer), grpc.ChainStreamInterceptor(s.answerStream))
	taskv1.RegisterTaskServiceServer(s.running, s)
	nodev1.RegisterNodeServiceServer(s.running, s)
	running := s.running
	s.group.Go(func() { _ = running.Serve(l) })
	return nil
}

func (s *server) down() {
	if s.running != nil {
		s.running.Stop()
		s.running = nil
	}
	s.group.Wait()
}

// answer is the policy of the API, and the faults that a transcript wants.
func (s *server) answer(ctx context.Context, req any, info *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
	f := s.fault(info.FullMethod)
	if f != nil && !f.late {
		return nil, f.err
	}
	s.mu.Lock()
	resp, err := next(ctx, req)
	s.mu.Unlock()
	if f != nil {
		return nil, f.err
	}
	return resp, err
}

func (s *server) answerStream(srv any, stream grpc.ServerStream, info *grpc.StreamServerInfo, next grpc.StreamHandler) error {
	if f := s.fault(info.FullMethod); f != nil {
		return f.err
	}
	return next(srv, stream)
}

func (s *server) fault(method string) *fault {
	s.mu.Lock()
	defer s.mu.Unlock()
	f := s.faults[method[lastSlash(method)+1:]]
	if f == nil || f.times == 0 {
		return nil
	}
	f.times--
	return f
}

// tell does what a transcript says:
//
//	node NAME [STATE]              there is a node, connected if not said otherwise
//	fate FATE                      what becomes of new tasks: see server.carryOut
//	end FATE                       what becomes of those that are queued, now
//	fail METHOD CODE TIMES TEXT    a method answers so, TIMES times
//	lose METHOD CODE TIMES TEXT    it does its work and answers so
//	watched N                      wait until watches were begun N times,
//	unwatched                      from here on
//	forget                         watches cannot go on from what was until now
//	output STEP STREAM OFFSET TEXT a command wrote TEXT
//	truncated STEP STREAM TOTAL    and that was not all
//	certificate NAME ROLE          the server shows another certificate
//	authority                      and one of another CA
//	context FILE FOUNDING TTL      write another context file
//	cluster HEX                    it says that it is another cluster
func (s *server) tell(args []string) error {
	switch cmd, rest := args[0], args[1:]; {
	case cmd == "certificate" && len(rest) == 2:
		return s.certify(rest[0], pki.Role(rest[1]))
	case cmd == "watched" && len(rest) == 1:
		return s.watched(rest[0])
	case cmd == "authority":
		return s.otherAuthority()
	case cmd == "context" && len(rest) == 3:
		return s.tellContext(rest[0], rest[1], rest[2])
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	switch cmd, rest := args[0], args[1:]; {
	case cmd == "node" && len(rest) >= 1:
		s.tellNode(rest)
	case cmd == "fate" && len(rest) == 1:
		s.fate = rest[0]
	case cmd == "end" && len(rest) == 1:
		for _, st := range s.tasks {
			if st.task.GetState() == taskv1.TaskState_TASK_STATE_QUEUED {
				s.carryOut(st.task, rest[0])
			}
		}
	case (cmd == "fail" || cmd == "lose") && len(rest) == 4:
		return s.tellFault(rest, cmd == "lose")
	case cmd == "unwatched":
		s.watchers = 0
	case cmd == "forget":
		s.oldest = uint64(len(s.events)) + 1
	case cmd == "output" && len(rest) == 4, cmd == "truncated" && len(rest) == 3:
		return s.tellOutput(cmd, rest)
	case cmd == "cluster" && len(rest) == 1:
		var err error
		s.cluster, err = hex.DecodeString(rest[0])
		return err
	default:
		return fmt.Errorf("server: unknown command %q", args)
	}
	return nil
}

// watched waits until watches were begun so often.
func (s *server) watched(times string) error {
	want, err := strconv.Atoi(times)
	if err != nil {
		return err
	}
	deadline := time.After(20 * time.Second)
	for {
		s.mu.Lock()
		got, changed := s.watchers, s.changed
		s.mu.Unlock()
		if got >= want {
			return nil
		}
		select {
		case <-changed:
		case <-deadline:
			return fmt.Errorf("watches were begun %d times, want %d", got, want)
		}
	}
}

func (s *server) tellNode(args []string) {
	n := &nodev1.Node{
		Name: args[0], State: nodev1.NodeState_NODE_STATE_CONNECTED, AgentVersion: "1.0.0", Generation: 1,
		LastSeenTime: timestamppb.Now(), JoinTime: timestamppb.Now(), JournalId: "j1", AcknowledgedSeq: 7, TrustRootVersion: 1,
		Facts: &agentv1.NodeFacts{Hostname: args[0], Os: "Debian GNU/Linux 12", Kernel: "6.1.0", Addresses: []string{"10.0.0.7"}},
	}
	for _, k := range s.registry.Kinds() {
		n.Kinds = append(n.Kinds, &agentv1.KindSupport{Kind: k.Kind, Revision: k.Revision})
	}
	if len(args) > 1 {
		n.State = nodev1.NodeState(nodev1.NodeState_value["NODE_STATE_"+args[1]])
	}
	s.nodes[args[0]] = n
}

func (s *server) tellFault(args []string, late bool) error {
	var code codes.Code
	if err := code.UnmarshalJSON([]byte(strconv.Quote(args[1]))); err != nil {
		return err
	}
	times, err := strconv.Atoi(args[2])
	if err != nil {
		return err
	}
	s.faults[args[0]] = &fault{err: status.Error(code, args[3]), times: times, late: late}
	return nil
}

func (s *server) tellOutput(cmd string, args []string) error {
	step, err := strconv.ParseUint(args[0], 10, 32)
	if err != nil {
		return err
	}
	n, err := strconv.ParseUint(args[2], 10, 64)
	if err != nil {
		return err
	}
	m := &taskv1.ReadOutputResponse{Step: uint32(step), Stream: taskv1.Stream(taskv1.Stream_value["STREAM_"+args[1]])}
	if cmd == "output" {
		m.Offset, m.Data = n, []byte(args[3]+"\n")
		for _, before := range s.output {
			if end := before.GetOffset() + uint64(len(before.GetData())); before.GetStep() == m.GetStep() && before.GetStream() == m.GetStream() {
				m.SkippedBytes = n - end
			}
		}
	} else {
		m.Output = &taskv1.Output{
			Step: m.GetStep(), Stream: m.GetStream(), State: taskv1.OutputState_OUTPUT_STATE_TRUNCATED,
			Summary: &taskv1.OutputSummary{TotalBytes: n, HeadBytes: 5, TailBytes: 4},
		}
	}
	s.output = append(s.output, m)
	return nil
}

func (s *server) otherAuthority() error {
	own := s.authority
	defer func() { s.authority = own }()
	var err error
	if s.authority, err = ca.New(ca.Config{TrustDomain: s.root.TrustDomain()}); err != nil {
		return err
	}
	return s.certify("server", pki.RoleServer)
}

func (s *server) tellContext(file, foundingFile, ttl string) error {
	data, err := os.ReadFile(foundingFile)
	if err != nil {
		return err
	}
	f := &nodev1.FoundingBundle{}
	if err := protojson.Unmarshal(data, f); err != nil {
		return err
	}
	life, err := time.ParseDuration(ttl)
	if err != nil {
		return err
	}
	return s.writeContext(f, file, life)
}
