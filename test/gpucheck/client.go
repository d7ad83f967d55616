package main

import (
	"encoding/binary"
	"fmt"
	"io"
	"maps"
	"net"
	"slices"
	"time"

	"google.golang.org/protobuf/proto"

	gpuv1 "github.com/gpuaas/millwright/proto/millwright/gpu/v1"
)

// client speaks the protocol of millwright-gpu by itself: what the product's own
// code gets wrong on both ends would not show otherwise.
type client struct {
	conn net.Conn
	next uint64
	took map[string][]time.Duration
}

const patience = 2 * time.Minute

func (c *client) ask(what string, r *gpuv1.ChildRequest) (*gpuv1.ChildReply, error) {
	c.next++
	r.Id = c.next
	b, err := proto.Marshal(r)
	if err != nil {
		return nil, fmt.Errorf("encode %s: %w", what, err)
	}
	begin := time.Now()
	if err := c.conn.SetDeadline(begin.Add(patience)); err != nil {
		return nil, fmt.Errorf("bound %s: %w", what, err)
	}
	if _, err := c.conn.Write(append(binary.BigEndian.AppendUint32(nil, uint32(len(b))), b...)); err != nil {
		return nil, fmt.Errorf("ask for %s: %w", what, err)
	}
	var head [4]byte
	if _, err := io.ReadFull(c.conn, head[:]); err != nil {
		return nil, fmt.Errorf("wait for %s: %w", what, err)
	}
	b = make([]byte, binary.BigEndian.Uint32(head[:]))
	if _, err := io.ReadFull(c.conn, b); err != nil {
		return nil, fmt.Errorf("read %s: %w", what, err)
	}
	c.took[what] = append(c.took[what], time.Since(begin))
	reply := &gpuv1.ChildReply{}
	if err := proto.Unmarshal(b, reply); err != nil {
		return nil, fmt.Errorf("decode %s: %w", what, err)
	}
	if f := reply.GetFailure(); f != nil {
		return nil, fmt.Errorf("%s: %s (%s)", what, f.GetMessage(), f.GetState())
	}
	return reply, nil
}

func (c *client) start(library string) error {
	_, err := c.ask("start", &gpuv1.ChildRequest{Ask: &gpuv1.ChildRequest_Start{Start: &gpuv1.ChildStart{Protocol: 1, Library: library}}})
	return err
}

func (c *client) inventory() (*gpuv1.Inventory, error) {
	r, err := c.ask("inventory", &gpuv1.ChildRequest{Ask: &gpuv1.ChildRequest_Inventory{Inventory: &gpuv1.ChildInventory{}}})
	return r.GetInventory(), err
}

// sample times samples of both tiers and returns the last slow one.
func (c *client) sample(rounds int) (*gpuv1.Sample, error) {
	var last *gpuv1.Sample
	for range max(1, rounds) {
		for _, tier := range []gpuv1.Tier{gpuv1.Tier_TIER_FAST, gpuv1.Tier_TIER_SLOW} {
			r, err := c.ask(tier.String(), &gpuv1.ChildRequest{Ask: &gpuv1.ChildRequest_Sample{Sample: &gpuv1.ChildSample{Tier: tier}}})
			if err != nil {
				return nil, err
			}
			last = r.GetSample()
			last.Calls = r.GetCalls()
		}
	}
	return last, nil
}

// print tells how long the questions took.
func (c *client) print(out io.Writer) {
	for _, what := range slices.Sorted(maps.Keys(c.took)) {
		all := slices.Clone(c.took[what])
		slices.Sort(all)
		fmt.Fprintf(out, "%-10s %3d times: median %v, longest %v\n", what, len(all), all[len(all)/2].Round(time.Microsecond), all[len(all)-1].Round(time.Microsecond))
	}
}
