// Package wire frames the messages between the agent and millwright-gpu: four
// bytes of length, the highest first, and the message.
package wire

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"

	"google.golang.org/protobuf/proto"
)

// Protocol is the protocol's revision. Both ends must have the same.
const Protocol = 1

// maxFrame bounds a message: 256 GPUs with all their links fit easily.
const maxFrame = 4 << 20

// ErrFrame is wrapped by the error of [Read] for what is no frame.
var ErrFrame = errors.New("not a frame of this protocol")

// Write writes one message. Writers take turns.
func Write(w io.Writer, m proto.Message) error {
	b, err := proto.MarshalOptions{}.MarshalAppend(make([]byte, 4, 256), m)
	if err != nil {
		return fmt.Errorf("encode frame: %w", err)
	}
	if len(b)-4 > maxFrame {
		return fmt.Errorf("encode frame: %d bytes, at most %d", len(b)-4, maxFrame)
	}
	binary.BigEndian.PutUint32(b, uint32(len(b)-4))
	if _, err := w.Write(b); err != nil {
		return fmt.Errorf("write frame: %w", err)
	}
	return nil
}

// Read reads one message into m. Its error is io.EOF when the stream ended
// between two.
func Read(r io.Reader, m proto.Message) error {
	var head [4]byte
	switch _, err := io.ReadFull(r, head[:]); {
	case err == io.EOF:
		return err
	case err != nil:
		return fmt.Errorf("read frame: %w", err)
	}
	n := binary.BigEndian.Uint32(head[:])
	if n > maxFrame {
		return fmt.Errorf("%w: %d bytes, at most %d", ErrFrame, n, maxFrame)
	}
	b := make([]byte, n)
	if _, err := io.ReadFull(r, b); err != nil {
		return fmt.Errorf("read frame of %d bytes: %w", n, err)
	}
	if err := proto.Unmarshal(b, m); err != nil {
		return fmt.Errorf("%w: %w", ErrFrame, err)
	}
	return nil
}
