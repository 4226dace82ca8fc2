package server

import (
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/snapferry/snapferry/checkpoint"
	"github.com/snapferry/snapferry/internal/cpwire"
	"github.com/snapferry/snapferry/server/internal/tasklog"
)

const benchTasks, benchBody = 500, 2000

// BenchmarkGroup appends from 64 callers of one client to a group of three in this
// process, with so many requests on their way at once.
func BenchmarkGroup(b *testing.B) {
	for _, inFlight := range []int{1, 2, 4, 8} {
		b.Run(fmt.Sprint("inflight=", inFlight), func(b *testing.B) { benchmarkGroup(b, inFlight) })
	}
}

func benchmarkGroup(b *testing.B, inFlight int) {
	r := newReal(b, 3)
	d := r.driver()
	defer d.Close()
	c, err := cpwire.New(r.urls(), &cpwire.Options{InFlight: inFlight})
	if err != nil {
		b.Fatal(err)
	}
	defer c.Close()
	var left atomic.Int64
	left.Store(int64(b.N))
	b.SetBytes(benchBody)
	b.ReportAllocs()
	b.ResetTimer()
	cpu := cpuTime(b)

	var wg sync.WaitGroup
	for w := range 64 {
		wg.Go(func() {
			heads := make([]cpwire.Result, benchTasks/64)
			body := randomBody()
			for i := 0; left.Add(-1) >= 0; i++ {
				at := i % len(heads)
				t := cpwire.Task{Job: cpwire.BenchJob, Name: fmt.Sprintf("w%d-%d", w, at)}
				res, err := c.Append(b.Context(), cpwire.Append{
					Task: t, Slot: heads[at].Slot + 1, Prev: heads[at].Digest, Nonce: cpwire.Nonce(checkpoint.NewNonce()), Body: body,
				})
				if err != nil || !res.Status.InLog() {
					b.Errorf("append: %+v, %v", res, err)
					return
				}
				heads[at] = res
			}
		})
	}
	wg.Wait()
	b.StopTimer()
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "appends/s")
	b.ReportMetric(float64((cpuTime(b)-cpu).Microseconds())/float64(b.N), "cpu-us/append")
}

// cpuTime is what this process has used so far: unlike the rate it does not depend on what
// else the machine does.
func cpuTime(b *testing.B) time.Duration {
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

func randomBody() []byte {
	body := make([]byte, benchBody)
	for i := range body {
		body[i] = byte(rand.Uint32())
	}
	return body
}

// BenchmarkApply is the state machine alone, in portions as a loaded leader applies them.
func BenchmarkApply(b *testing.B) {
	m, err := tasklog.Open(b.TempDir(), nil)
	if err != nil {
		b.Fatal(err)
	}
	defer m.Close()
	const portion = 16
	heads := make([]cpwire.Result, benchTasks)
	body := randomBody()
	b.SetBytes(benchBody * portion)
	b.ReportAllocs()
	index, at := uint64(0), 0
	for b.Loop() {
		command := tasklog.BeginAppends(nil, int64(index), portion)
		for i := range portion {
			h := heads[(at+i)%benchTasks]
			command = cpwire.AppendItem(command, &cpwire.Append{
				Task: cpwire.Task{Job: cpwire.BenchJob, Name: fmt.Sprint("t", (at+i)%benchTasks)},
				Slot: h.Slot + 1, Prev: h.Digest, Nonce: cpwire.Nonce{1}, Body: body,
			})
		}
		index++
		rs, err := m.Apply([]tasklog.Entry{{Index: index, Term: 1, Data: command}})
		if err != nil {
			b.Fatal(err)
		}
		results, err := tasklog.DecodeResult(rs[0])
		if err != nil {
			b.Fatal(err)
		}
		got, err := cpwire.DecodeAnswer(cpwire.AppendAnswer(nil, results), portion)
		if err != nil {
			b.Fatal(err)
		}
		for i := range portion {
			heads[(at+i)%benchTasks] = got[i]
		}
		at += portion
	}
}
