package peer

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"slices"

	"go.etcd.io/raft/v3"
	"go.etcd.io/raft/v3/raftpb"
	"google.golang.org/protobuf/proto"
)

// A stream is a row of frames: length of the payload, kind, payload.
const (
	frameHeader = 5        // 4 bytes length, big-endian, and the kind
	maxPayload  = 64 << 20 // of a frame, by default; raft's messages are a sixtieth of it
	keepBuffer  = 4 << 20  // buffers above it are not kept
	growStep    = 1 << 20  // memory for a payload grows by at least so much
	readBuffer  = 256 << 10
)

// The kinds of frames.
const (
	frameMessage byte = 1 // a raftpb.Message; to the accepting side only
	frameBeat    byte = 2 // a sign of life, empty; both ways
	frameRefusal byte = 3 // JSON of a Refusal, the last frame; to the dialling side only
)

// errFrame is the end of a stream whose sender does not keep to the format.
var errFrame = errors.New("malformed frame")

func putHeader(b []byte, kind byte, size int) {
	binary.BigEndian.PutUint32(b, uint32(size))
	b[4] = kind
}

// appendFrame appends a small frame.
func appendFrame(b []byte, kind byte, payload []byte) []byte {
	b = append(b, 0, 0, 0, 0, 0)
	putHeader(b[len(b)-frameHeader:], kind, len(payload))
	return append(b, payload...)
}

// appendMessage appends the frame of a message whose encoding is size bytes.
func appendMessage(b []byte, m *raftpb.Message, size int) ([]byte, error) {
	start := len(b)
	b = append(b, 0, 0, 0, 0, 0)
	putHeader(b[start:], frameMessage, size)
	b, err := proto.MarshalOptions{UseCachedSize: true}.MarshalAppend(b, m)
	if err == nil && len(b) != start+frameHeader+size {
		err = errors.New("the message was changed while it was sent")
	}
	return b, err
}

// frameReader takes a stream apart. The payload of next is valid until the next call.
type frameReader struct {
	r    *bufio.Reader
	used int    // bytes of r that the last payload lies in
	big  []byte // for payloads that do not fit there
	max  int    // largest payload
}

func newFrameReader(r io.Reader, buffer, largest int) *frameReader {
	return &frameReader{r: bufio.NewReaderSize(r, buffer), max: largest}
}

// next returns the next frame; io.EOF between two frames is the regular end.
func (f *frameReader) next() (kind byte, payload []byte, err error) {
	if _, err := f.r.Discard(f.used); err != nil {
		return 0, nil, err
	}
	f.used = 0
	head, err := f.r.Peek(frameHeader)
	if err != nil {
		if err == io.EOF && len(head) > 0 {
			err = io.ErrUnexpectedEOF
		}
		return 0, nil, err
	}
	size, kind := int64(binary.BigEndian.Uint32(head)), head[4]
	if size > int64(f.max) {
		return 0, nil, fmt.Errorf("%w: %d bytes, the limit is %d", errFrame, size, f.max)
	}
	if _, err := f.r.Discard(frameHeader); err != nil {
		return 0, nil, err
	}
	payload, err = f.payload(int(size))
	if err == io.EOF {
		err = io.ErrUnexpectedEOF
	}
	return kind, payload, err
}

func (f *frameReader) payload(size int) ([]byte, error) {
	if size <= f.r.Size() {
		f.used = size
		return f.r.Peek(size)
	}
	// Memory grows with what has come, not with what was announced.
	if cap(f.big) > keepBuffer {
		f.big = nil
	}
	f.big = f.big[:0]
	for len(f.big) < size {
		at := len(f.big)
		step := min(size-at, max(at, growStep))
		f.big = slices.Grow(f.big, step)[:at+step]
		if _, err := io.ReadFull(f.r, f.big[at:]); err != nil {
			return nil, err
		}
	}
	return f.big, nil
}

// decodeMessage decodes a message that member from has sent to member to, and refuses what
// no member may say to another.
func decodeMessage(payload []byte, from, to uint64) (*raftpb.Message, error) {
	m := new(raftpb.Message)
	if err := proto.Unmarshal(payload, m); err != nil {
		return nil, fmt.Errorf("%w: %w", errFrame, err)
	}
	kind := m.GetType()
	_, exists := raftpb.MessageType_name[int32(kind)]
	switch {
	case m.Type == nil || !exists || raft.IsLocalMsg(kind):
		return nil, fmt.Errorf("%w: message type %v", errFrame, kind)
	case m.GetTo() != to:
		return nil, fmt.Errorf("%w: message for member %s", errFrame, formatID(m.GetTo()))
	case m.GetFrom() != from && kind != raftpb.MsgTransferLeader: // which names the new leader there
		return nil, fmt.Errorf("%w: message in the name of member %s", errFrame, formatID(m.GetFrom()))
	case (kind == raftpb.MsgSnap) != (m.Snapshot != nil):
		return nil, fmt.Errorf("%w: %v with or without a snapshot", errFrame, kind)
	}
	return m, nil
}
