// Package serve is millwright-gpu: it answers the agent's questions to the
// driver over a socket. It decides nothing and keeps no deadline, since a call
// into the driver may crash, end the process or never return: the agent does.
package serve

import (
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/millwright/agent/internal/gpu/wire"
	gpuv1 "github.com/gpuaas/millwright/proto/millwright/gpu/v1"
)

// Driver is what is asked. Start is called first and once; of the others Wait
// may run beside one of the rest.
type Driver interface {
	// Start loads a library, or the system's when the path is empty, and
	// initialises it for the life of the process. It returns how many GPUs there
	// are, or an [Failure].
	Start(library string) (gpus int, err error)
	// Inventory reads what the GPUs are.
	Inventory() (*gpuv1.Inventory, error)
	// Sample reads how they are.
	Sample(tier gpuv1.Tier) (*gpuv1.Sample, error)
	// Wait waits for events.
	Wait(most time.Duration) ([]*gpuv1.GpuEvent, error)
	// Calls is how many calls into the library were made.
	Calls() uint64
}

// Changer answers one question and is not used again.
type Changer interface {
	// Once loads a library, or the system's when the path is empty, and answers a
	// question that looks at GPUs or changes one. Its error is a [Failure].
	Once(library string, r *gpuv1.ChildRequest, to *gpuv1.ChildReply) error
	// Calls is how many calls into the library were made.
	Calls() uint64
}

// Once answers the one question of an argument, a ChildOnce in base64, and
// writes the answer. Whoever asked for a change and gets no answer does not know
// whether it was made.
func Once(w io.Writer, argument string, c Changer) error {
	once := &gpuv1.ChildOnce{}
	b, err := base64.RawURLEncoding.DecodeString(argument)
	if err == nil {
		err = proto.Unmarshal(b, once)
	}
	if err != nil {
		return fmt.Errorf("decode the question: %w", err)
	}
	reply := &gpuv1.ChildReply{Id: once.GetRequest().GetId()}
	if once.GetProtocol() != wire.Protocol {
		err = &Failure{State: gpuv1.DriverState_DRIVER_STATE_PROGRAM_UNUSABLE, Message: otherVersion(once.GetProtocol())}
	} else {
		err = c.Once(once.GetLibrary(), once.GetRequest(), reply)
	}
	if err != nil {
		reply.Failure, reply.Answer = failure(err), nil
	}
	reply.Calls = uint32(c.Calls())
	return wire.Write(w, reply)
}

func otherVersion(p uint32) string {
	return fmt.Sprintf("millwright-gpu speaks protocol %d and the agent %d: they are of two versions; systemctl restart millwrightd", wire.Protocol, p)
}

// Failure is an error whose state the agent is to show.
type Failure struct {
	State   gpuv1.DriverState
	Code    int32
	Message string
}

// Error is the message.
func (f *Failure) Error() string { return f.Message }

// Serve answers until the agent's end of the socket is closed, and returns nil
// then. A call that is under way is not waited for: the process is to end.
func Serve(conn io.ReadWriter, d Driver) error {
	s := &server{conn: conn, driver: d, events: make(chan *gpuv1.ChildRequest, 1), failed: make(chan error, 3)}
	queries := make(chan *gpuv1.ChildRequest, 1)
	// Nobody waits for these: the driver may keep them for ever, and the end of
	// the process is the end of both.
	var forever sync.WaitGroup
	forever.Go(func() { s.answer(queries) })
	forever.Go(func() { s.answer(s.events) })
	forever.Go(func() { s.failed <- s.read(queries) })
	return <-s.failed
}

type server struct {
	conn   io.ReadWriter
	driver Driver
	events chan *gpuv1.ChildRequest
	failed chan error

	mu sync.Mutex // of writes to conn
}

func (s *server) read(queries chan<- *gpuv1.ChildRequest) error {
	defer close(queries)
	defer close(s.events)
	for {
		r := &gpuv1.ChildRequest{}
		switch err := wire.Read(s.conn, r); {
		case errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return err
		}
		if r.GetEvents() != nil {
			s.events <- r
		} else {
			queries <- r
		}
	}
}

func (s *server) answer(requests <-chan *gpuv1.ChildRequest) {
	for r := range requests {
		before := s.driver.Calls()
		reply := &gpuv1.ChildReply{Id: r.GetId()}
		if err := s.ask(r, reply); err != nil {
			reply.Failure = failure(err)
		}
		reply.Calls = uint32(s.driver.Calls() - before)
		s.mu.Lock()
		err := wire.Write(s.conn, reply)
		s.mu.Unlock()
		if err != nil {
			s.failed <- err
			return
		}
	}
}

func (s *server) ask(r *gpuv1.ChildRequest, reply *gpuv1.ChildReply) error {
	switch ask := r.GetAsk().(type) {
	case *gpuv1.ChildRequest_Start:
		if p := ask.Start.GetProtocol(); p != wire.Protocol {
			return &Failure{
				State:   gpuv1.DriverState_DRIVER_STATE_PROGRAM_UNUSABLE,
				Message: otherVersion(p),
			}
		}
		n, err := s.driver.Start(ask.Start.GetLibrary())
		reply.Answer = &gpuv1.ChildReply_Started{Started: &gpuv1.ChildStarted{Protocol: wire.Protocol, Gpus: uint32(n)}}
		return err
	case *gpuv1.ChildRequest_Inventory:
		inv, err := s.driver.Inventory()
		reply.Answer = &gpuv1.ChildReply_Inventory{Inventory: inv}
		return err
	case *gpuv1.ChildRequest_Sample:
		sample, err := s.driver.Sample(ask.Sample.GetTier())
		reply.Answer = &gpuv1.ChildReply_Sample{Sample: sample}
		return err
	case *gpuv1.ChildRequest_Events:
		events, err := s.driver.Wait(time.Duration(ask.Events.GetWaitMilliseconds()) * time.Millisecond)
		reply.Answer = &gpuv1.ChildReply_Events{Events: &gpuv1.ChildEventList{Events: events}}
		return err
	}
	return errors.New("a question that this version does not know")
}

func failure(err error) *gpuv1.ChildFailure {
	var f *Failure
	if errors.As(err, &f) {
		return &gpuv1.ChildFailure{State: f.State, Code: f.Code, Message: f.Message}
	}
	return &gpuv1.ChildFailure{State: gpuv1.DriverState_DRIVER_STATE_ERROR, Message: err.Error()}
}
