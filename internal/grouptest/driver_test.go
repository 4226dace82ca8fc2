//go:build linux

package grouptest

import (
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/snapferry/snapferry/checkpoint"
	"github.com/snapferry/snapferry/checkpoint/checkpointtest"
	"github.com/snapferry/snapferry/checkpoint/raftcp"
	"github.com/snapferry/snapferry/internal/cpwire"
)

// The contract of a checkpoint driver holds over a group (P13), and cases begin in trouble:
// the leader was killed, or cut off, just before.
func TestFaultDriver(t *testing.T) {
	t.Parallel()
	g := newGroup(t, options{entries: 200, trail: 50})
	rng := rand.New(rand.NewPCG(newSeed(t), 7))
	var trouble sync.WaitGroup
	opts := checkpointtest.Options{ComparesHead: true, KeepsBodies: cpwire.KeptBodies, Writers: 4, Appends: 10 * times(1, 2)}
	n := 0
	checkpointtest.Run(t, func(t *testing.T) checkpoint.Driver {
		trouble.Wait()
		n++
		if every := times(3, 1); n%every == 0 || n > 14 { // the last ones have many writers
			begun := make(chan struct{})
			trouble.Go(func() { g.trouble(rng, begun) })
			<-begun
		}
		d, err := raftcp.Open(g.urls(), &raftcp.Options{Patience: patience})
		if err != nil {
			t.Fatal(err)
		}
		return checkpointtest.Within(d, fmt.Sprint("c", n, "-"))
	}, &opts)
	trouble.Wait()
	g.eventually("all members level", level)
	if n := g.eyes.terms(); n < 4 {
		t.Errorf("the suite saw %d terms, which is no trouble", n)
	}
}

// trouble kills the leader, takes it off the net, or lets the others not hear it. Some time
// later, when there is another leader as a rule, all is well again.
func (g *group) trouble(rng *rand.Rand, begun chan<- struct{}) {
	lead, others := g.leader(), g.followers()
	end := lead.plug
	switch rng.IntN(3) {
	case 0:
		lead.kill()
		end = func() { lead.start() }
	case 1:
		lead.unplug()
	case 2:
		p := partitions[2]
		p.cut(lead, others)
		end = func() { p.mend(lead, others) }
	}
	close(begun)
	pause(2*time.Second, nil)
	end()
}
