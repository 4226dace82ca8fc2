package raftnode

import (
	"context"
	"errors"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	pb "go.etcd.io/raft/v3/raftpb"

	"github.com/snapferry/snapferry/raftnode/internal/raftlog"
	"github.com/snapferry/snapferry/raftsnap/protocol"
)

var errBroken = errors.New("the disk is broken")

// brokenWAL fails every write once it is told to.
type brokenWAL struct {
	raftlog.WAL
	broken *atomic.Bool
}

func (w brokenWAL) Save(hs *pb.HardState, ents []*pb.Entry, sync bool) error {
	if w.broken.Load() {
		return errBroken
	}
	return w.WAL.Save(hs, ents, sync)
}

// counter is the least state machine there is.
type counter struct{ applied atomic.Uint64 }

func (c *counter) Apply(entries []Entry) ([][]byte, error) {
	c.applied.Store(entries[len(entries)-1].Index)
	return make([][]byte, len(entries)), nil
}
func (c *counter) AppliedIndex() uint64  { return c.applied.Load() }
func (c *counter) Snapshot(string) error { return errors.New("it has none") }
func (c *counter) Install(string) error  { return errors.New("it takes none") }
func (c *counter) Close() error          { return nil }

// TestFailedFsyncStopsTheMember: what the disk did not take is never acknowledged, and
// the member is out from then on.
func TestFailedFsyncStopsTheMember(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	url := "http://" + l.Addr().String()
	n, err := New(Options{
		Name: "m1", Dir: t.TempDir(), URL: url, InitialCluster: map[string]string{"m1": url}, Insecure: true, Tick: 10 * time.Millisecond,
	})
	if err != nil {
		t.Fatal(err)
	}
	var broken atomic.Bool
	n.openWAL = func(dir string, o *raftlog.WALOptions) (raftlog.WAL, *raftlog.Replay, error) {
		w, r, err := raftlog.OpenWAL(dir, o)
		return brokenWAL{w, &broken}, r, err
	}
	server := &http.Server{Handler: n.Handler()}
	var served sync.WaitGroup
	served.Go(func() { _ = server.Serve(l) })
	defer func() {
		server.Close()
		served.Wait()
		if err := n.Close(); err != nil {
			t.Error(err)
		}
	}()
	if err := n.Start(t.Context(), func(string) (StateMachine, error) { return &counter{}, nil }); err != nil {
		t.Fatal(err)
	}
	if err := n.leading.wait(t.Context(), func(l leadership) bool { return l.role == protocol.Leader }); err != nil {
		t.Fatal(err)
	}
	if _, err := n.Propose(t.Context(), []byte("before")); err != nil {
		t.Fatal(err)
	}
	broken.Store(true)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if _, err := n.Propose(ctx, []byte("after")); err == nil {
		t.Error("acknowledged what the disk did not take")
	}
	select {
	case <-n.Done():
	case <-ctx.Done():
		t.Fatal("the member goes on")
	}
	if !errors.Is(n.Err(), errBroken) {
		t.Errorf("it stopped with %v", n.Err())
	}
	if _, err := n.Propose(ctx, []byte("more")); err == nil {
		t.Error("acknowledged after it had stopped")
	}
}
