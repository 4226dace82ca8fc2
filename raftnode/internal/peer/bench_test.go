package peer

import (
	"testing"

	"go.etcd.io/raft/v3/raftpb"
)

// benchPair gives two connected members; what comes to each goes to its function.
func benchPair(b *testing.B, atA, atC func(*raftpb.Message)) (a, c *site) {
	sites := newGroup(b, nil, "a", "c")
	connected(b, sites...)
	for i, handle := range []func(*raftpb.Message){atA, atC} {
		sites[i].box.mu.Lock()
		sites[i].box.handle = handle
		sites[i].box.mu.Unlock()
	}
	return sites[0], sites[1]
}

// BenchmarkRoundTrip is an append of 2 kB and its answer, one at a time: two hops.
func BenchmarkRoundTrip(b *testing.B) {
	back := make(chan struct{}, 1)
	var a, c *site
	var answer []*raftpb.Message
	a, c = benchPair(b, func(*raftpb.Message) { back <- struct{}{} }, func(*raftpb.Message) { c.tr.Send(answer) })
	answer = []*raftpb.Message{message(raftpb.MsgAppResp, c, a, 1)}
	ask := []*raftpb.Message{entries(a, c, 1, 2000)}
	b.ReportAllocs()
	for b.Loop() {
		a.tr.Send(ask)
		<-back
	}
}

// BenchmarkAppends is a row of appends of 2 kB, as many under way as the queue takes.
func BenchmarkAppends(b *testing.B) {
	const window = 256
	room := make(chan struct{}, window)
	a, c := benchPair(b, nil, func(*raftpb.Message) { <-room })
	ask := []*raftpb.Message{entries(a, c, 1, 2000)}
	b.SetBytes(2000)
	b.ReportAllocs()
	for b.Loop() {
		room <- struct{}{}
		a.tr.Send(ask)
	}
	for range window {
		room <- struct{}{}
	}
}

// BenchmarkLargeAppends is the same with messages of 1 MiB.
func BenchmarkLargeAppends(b *testing.B) {
	const window = 16
	room := make(chan struct{}, window)
	a, c := benchPair(b, nil, func(*raftpb.Message) { <-room })
	ask := []*raftpb.Message{entries(a, c, 1, 1<<20)}
	b.SetBytes(1 << 20)
	b.ReportAllocs()
	for b.Loop() {
		room <- struct{}{}
		a.tr.Send(ask)
	}
	for range window {
		room <- struct{}{}
	}
}
