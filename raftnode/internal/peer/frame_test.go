package peer

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"slices"
	"testing"
	"testing/iotest"

	"go.etcd.io/raft/v3/raftpb"
	"google.golang.org/protobuf/proto"
)

func frameOf(t testing.TB, m *raftpb.Message) []byte {
	b, err := appendMessage(nil, m, proto.Size(m))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func sample(size int) *raftpb.Message {
	return &raftpb.Message{
		Type: raftpb.MsgApp.Enum(), From: new(uint64(1)), To: new(uint64(2)), Term: new(uint64(3)), Index: new(uint64(size)),
		Entries: []*raftpb.Entry{{Index: new(uint64(4)), Term: new(uint64(3)), Data: bytes.Repeat([]byte{byte(size)}, size)}},
	}
}

// TestFrames: what goes in comes out, in whatever pieces it arrives.
func TestFrames(t *testing.T) {
	var stream []byte
	var want []*raftpb.Message
	for _, size := range []int{0, 1, 100, 4000, readBuffer, 3 * keepBuffer, 5} {
		want = append(want, sample(size))
		stream = append(stream, frameOf(t, want[len(want)-1])...)
		stream = appendFrame(stream, frameBeat, nil)
	}
	for name, r := range map[string]io.Reader{
		"whole": bytes.NewReader(stream), "halves": iotest.HalfReader(bytes.NewReader(stream)), "data and end": iotest.DataErrReader(bytes.NewReader(stream)),
	} {
		f := newFrameReader(r, 64<<10, maxPayload)
		var got []*raftpb.Message
		beats := 0
		for {
			kind, payload, err := f.next()
			if err == io.EOF {
				break
			}
			if err != nil {
				t.Fatal(name, err)
			}
			if kind == frameBeat {
				beats++
				continue
			}
			m, err := decodeMessage(payload, 1, 2)
			if err != nil {
				t.Fatal(name, err)
			}
			got = append(got, m)
		}
		same := func(a, b *raftpb.Message) bool { return proto.Equal(a, b) }
		if !slices.EqualFunc(want, got, same) || beats != len(want) {
			t.Errorf("%s: %d messages and %d beats, or not the same", name, len(got), beats)
		}
	}
}

// TestBrokenFrames: a stream that ends inside a frame, or announces too much, is an error
// and not an end, and costs no more memory than it sent bytes.
func TestBrokenFrames(t *testing.T) {
	whole := frameOf(t, sample(100))
	for n := 1; n < len(whole); n++ {
		_, _, err := newFrameReader(bytes.NewReader(whole[:n]), 64, maxPayload).next()
		if !errors.Is(err, io.ErrUnexpectedEOF) {
			t.Errorf("cut at %d: got %v", n, err)
		}
	}
	huge := binary.BigEndian.AppendUint32(nil, maxPayload+1)
	_, _, err := newFrameReader(bytes.NewReader(append(huge, frameMessage)), 64, maxPayload).next()
	wantIs(t, err, errFrame)

	most := append(binary.BigEndian.AppendUint32(nil, maxPayload), frameMessage, 1, 2, 3)
	f := newFrameReader(bytes.NewReader(most), 64, maxPayload)
	_, _, err = f.next()
	wantIs(t, err, io.ErrUnexpectedEOF)
	if cap(f.big) > 2*growStep {
		t.Errorf("3 bytes came, %d are held", cap(f.big))
	}
}

// TestMessagesNobodyMaySend: what only the own raft may say is refused, and so is a message
// in another one's name.
func TestMessagesNobodyMaySend(t *testing.T) {
	for what, change := range map[string]func(*raftpb.Message){
		"no type":            func(m *raftpb.Message) { m.Type = nil },
		"unknown type":       func(m *raftpb.Message) { m.Type = raftpb.MessageType(99).Enum() },
		"local":              func(m *raftpb.Message) { m.Type = raftpb.MsgHup.Enum() },
		"snapshot status":    func(m *raftpb.Message) { m.Type = raftpb.MsgSnapStatus.Enum() },
		"unreachable":        func(m *raftpb.Message) { m.Type = raftpb.MsgUnreachable.Enum() },
		"storage":            func(m *raftpb.Message) { m.Type = raftpb.MsgStorageAppendResp.Enum() },
		"to another":         func(m *raftpb.Message) { m.To = new(uint64(9)) },
		"from another":       func(m *raftpb.Message) { m.From = new(uint64(9)) },
		"from nobody":        func(m *raftpb.Message) { m.From = nil },
		"snapshot in MsgApp": func(m *raftpb.Message) { m.Snapshot = &raftpb.Snapshot{} },
		"MsgSnap without":    func(m *raftpb.Message) { m.Type = raftpb.MsgSnap.Enum() },
	} {
		m := sample(10)
		change(m)
		if _, err := decodeMessage(frameOf(t, m)[frameHeader:], 1, 2); !errors.Is(err, errFrame) {
			t.Errorf("%s: got %v", what, err)
		}
	}
	// The one exception: a forwarded request names the member that is to lead.
	m := &raftpb.Message{Type: raftpb.MsgTransferLeader.Enum(), From: new(uint64(9)), To: new(uint64(2))}
	if _, err := decodeMessage(frameOf(t, m)[frameHeader:], 1, 2); err != nil {
		t.Error(err)
	}
}

// FuzzFrames: no bytes make the decoder panic or give a frame that was not sent whole.
func FuzzFrames(f *testing.F) {
	f.Add(frameOf(f, sample(10)))
	f.Add(append(frameOf(f, sample(300)), appendFrame(nil, frameBeat, nil)...))
	f.Add(appendFrame(nil, frameRefusal, []byte(`{"kind":"removed"}`)))
	f.Add([]byte{0xff, 0xff, 0xff, 0xff, 1})
	f.Fuzz(func(t *testing.T, data []byte) {
		r := newFrameReader(bytes.NewReader(data), 64, 1<<16)
		var again []byte
		for {
			kind, payload, err := r.next()
			if err != nil {
				break
			}
			again = appendFrame(again, kind, payload)
			m, err := decodeMessage(payload, 1, 2)
			if err == nil && m.GetTo() != 2 {
				t.Fatal("a message for another member got through")
			}
			_ = asRefusalFrame(payload)
		}
		if !bytes.HasPrefix(data, again) {
			t.Fatalf("frames %x out of %x", again, data)
		}
	})
}

// TestQueue: a ring that keeps the order, counts its bytes and knows its bounds.
func TestQueue(t *testing.T) {
	q := newQueue(40, 1000)
	next, seen := uint64(0), uint64(0)
	push := func(size int) bool {
		m := sample(size)
		m.Index = new(next)
		if !q.push(m) {
			return false
		}
		next++
		return true
	}
	for round := range 50 {
		for range 1 + round%30 {
			push(1)
		}
		for range 1 + round%20 {
			if m := q.pop(); m != nil {
				if m.GetIndex() != seen {
					t.Fatalf("got %d, want %d", m.GetIndex(), seen)
				}
				seen++
			}
		}
	}
	for push(1) {
	}
	if q.count != 40 || q.bytes != 40 {
		t.Errorf("full with %d messages of %d bytes", q.count, q.bytes)
	}
	if n := len(q.setDown(true)); n != 40 || q.bytes != 0 || push(1) {
		t.Errorf("%d dropped, %d bytes left, or one taken", n, q.bytes)
	}
	q.setDown(false)
	if !push(5000) || push(1) {
		t.Error("one message of any size fits, and nothing beside it")
	}
}
