package script_test

import (
	"context"
	"crypto/ecdsa"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/millwright/pki"
	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
	healthv1 "github.com/gpuaas/millwright/proto/millwright/health/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
)

// gpuNode stands in for a node with GPUs: it joins with its bundle, has a real
// session, and says of its GPUs what the files of a transcript say.
type gpuNode struct {
	name       string
	generation uint64
	conn       *grpc.ClientConn
	journal    string
	frames     [][]byte
	number     uint64
	stream     grpc.BidiStreamingClient[agentv1.SessionRequest, agentv1.SessionResponse]
	epoch      uint64
	cancel     context.CancelFunc
	reader     sync.WaitGroup
	acks       chan uint64
}

// tellGPUs does what a line of a transcript says: join, open, close, report FILE
// or edge FILE.
func (c *cluster) tellGPUs(name, what string, files []string) (err error) {
	n := c.gpus[name]
	if n == nil && what != "join" {
		return fmt.Errorf("%s has not joined", name)
	}
	switch what {
	case "join":
		if c.gpus[name], err = joinGPUNode(filepath.Join(c.dir, name+".json")); err == nil {
			err = c.gpus[name].open()
		}
		return err
	case "open":
		return n.open()
	case "close":
		n.close()
		return nil
	}
	if len(files) != 1 {
		return fmt.Errorf("gpus %s %s: a file is missing", name, what)
	}
	text, err := os.ReadFile(filepath.Join(c.dir, files[0]))
	if err != nil {
		return err
	}
	if what == "report" {
		return n.report(text)
	}
	return n.edge(text)
}

func joinGPUNode(file string) (*gpuNode, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	bundle := &agentv1.JoinBundle{}
	if err := protojson.Unmarshal(text, bundle); err != nil {
		return nil, err
	}
	sum, err := hex.DecodeString(bundle.GetCaSha256())
	if err != nil || len(sum) != sha256.Size {
		return nil, fmt.Errorf("CA hash %q: %w", bundle.GetCaSha256(), err)
	}
	key, err := pki.GenerateKey()
	if err != nil {
		return nil, err
	}
	csr, err := pki.NewRequest(key)
	if err != nil {
		return nil, err
	}
	plain, err := grpc.NewClient("passthrough:///"+bundle.GetServer(), grpc.WithTransportCredentials(
		credentials.NewTLS(pki.JoinTLS(bundle.GetTrustDomain(), [sha256.Size]byte(sum), nil))))
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	resp, err := agentv1.NewEnrolmentServiceClient(plain).Join(ctx, &agentv1.JoinRequest{Token: bundle.GetToken(), Csr: csr, Hostname: bundle.GetNode()})
	if err := errors.Join(err, plain.Close()); err != nil {
		return nil, err
	}
	n := &gpuNode{name: bundle.GetNode(), generation: resp.GetGeneration(), journal: "journal-of-" + bundle.GetNode()}
	n.conn, err = n.dial(bundle, key, resp)
	if err != nil {
		return nil, err
	}
	return n, n.emit(&taskv1.Event{Payload: &taskv1.Event_JournalOpened{JournalOpened: &taskv1.JournalOpened{
		Reason: taskv1.JournalReason_JOURNAL_REASON_JOINED, Generation: n.generation}}})
}

func (n *gpuNode) dial(bundle *agentv1.JoinBundle, key *ecdsa.PrivateKey, resp *agentv1.JoinResponse) (*grpc.ClientConn, error) {
	chain, err := pki.ParseCertificatesDER(resp.GetCertificates())
	if err != nil {
		return nil, err
	}
	roots, err := pki.ParseCertificatesDER(resp.GetCaCertificates())
	if err != nil {
		return nil, err
	}
	identity, err := pki.NewIdentity(chain, key, roots)
	if err != nil {
		return nil, err
	}
	source := new(pki.Static)
	source.Set(identity)
	return grpc.NewClient("passthrough:///"+bundle.GetServer(), grpc.WithTransportCredentials(
		credentials.NewTLS(pki.TLS{Source: source, TrustDomain: bundle.GetTrustDomain()}.Client())),
		grpc.WithDefaultCallOptions(grpc.WaitForReady(true)))
}

// emit appends an event to the journal.
func (n *gpuNode) emit(e *taskv1.Event) error {
	e.JournalId, e.Seq, e.BootId, e.WallTime = n.journal, uint64(len(n.frames))+1, "boot", timestamppb.Now()
	sum := sha256.Sum256(fmt.Appendf(nil, "%s\x00%d\x00", n.name, n.generation))
	if len(n.frames) > 0 {
		sum = sha256.Sum256(n.frames[len(n.frames)-1])
	}
	e.PrevHash = sum[:]
	frame, err := proto.Marshal(e)
	n.frames = append(n.frames, frame)
	return err
}

// open opens a session and sends the journal.
func (n *gpuNode) open() error {
	ctx, cancel := context.WithCancel(context.Background())
	n.cancel = cancel
	stream, err := agentv1.NewAgentServiceClient(n.conn).Session(ctx)
	if err != nil {
		return err
	}
	n.stream, n.epoch = stream, 0
	if err := n.send(&agentv1.SessionRequest{Message: &agentv1.SessionRequest_Hello{Hello: &agentv1.Hello{
		MinProtocol: 1, MaxProtocol: 1, BootId: "boot", JournalId: n.journal, LastSeq: uint64(len(n.frames)), FirstSeq: 1,
		AgentVersion: "1.0.0", WallTime: timestamppb.Now(), Generation: n.generation, InstanceId: "instance", TrustRootVersion: 1,
		Facts: &agentv1.NodeFacts{Conditions: []*taskv1.Condition{{Type: "GPUReady", Status: taskv1.ConditionStatus_CONDITION_STATUS_TRUE, Reason: "OK"}}},
	}}}); err != nil {
		return err
	}
	first, err := stream.Recv()
	if err != nil || first.GetWelcome() == nil {
		return fmt.Errorf("%v in place of a Welcome: %w", first, err)
	}
	n.epoch = first.GetWelcome().GetSessionEpoch()
	acks := make(chan uint64, 64)
	n.acks = acks
	n.reader.Go(func() {
		defer close(acks)
		for {
			m, err := stream.Recv()
			if err != nil {
				return
			}
			if m.GetAck() != nil {
				acks <- m.GetAck().GetSeq()
			}
		}
	})
	return n.flush()
}

func (n *gpuNode) close() {
	n.cancel()
	n.reader.Wait()
}

func (n *gpuNode) send(m *agentv1.SessionRequest) error {
	m.SessionEpoch = n.epoch
	return n.stream.Send(m)
}

// flush sends all frames, and waits until they are stored.
func (n *gpuNode) flush() error {
	if err := n.send(&agentv1.SessionRequest{Message: &agentv1.SessionRequest_Events{Events: &agentv1.EventBatch{
		JournalId: n.journal, Frames: n.frames}}}); err != nil {
		return err
	}
	deadline := time.After(30 * time.Second)
	for {
		select {
		case seq, ok := <-n.acks:
			if !ok {
				return errors.New("the session ended")
			}
			if seq >= uint64(len(n.frames)) {
				return nil
			}
		case <-deadline:
			return errors.New("no acknowledgement came")
		}
	}
}

// report sends a report, with its number and time filled in.
func (n *gpuNode) report(text []byte) error {
	r := &healthv1.HealthReport{}
	if err := protojson.Unmarshal(text, r); err != nil {
		return err
	}
	n.number++
	r.BootId, r.Number, r.ReportTime = "boot", n.number, timestamppb.Now()
	return n.send(&agentv1.SessionRequest{Message: &agentv1.SessionRequest_Health{Health: r}})
}

// edge writes a change into the journal and sends it, if there is a session.
func (n *gpuNode) edge(text []byte) error {
	edge := &healthv1.HealthEdge{}
	if err := protojson.Unmarshal(text, edge); err != nil {
		return err
	}
	edge.Condition.LastTime = timestamppb.Now()
	if err := n.emit(&taskv1.Event{Payload: &taskv1.Event_Health{Health: edge}}); err != nil {
		return err
	}
	if n.stream.Context().Err() != nil {
		return nil //nolint:nilerr // it is told in the next session
	}
	return n.flush()
}
