package transfer

import (
	"io"
	"net/http"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// holdBack sends all but the end of an answer, and that only when it is told to.
type holdBack struct {
	http.ResponseWriter
	r    *http.Request
	left int
	told <-chan struct{}
}

func (w *holdBack) Write(p []byte) (int, error) {
	if len(p) <= w.left {
		w.left -= len(p)
		return w.ResponseWriter.Write(p)
	}
	n, err := w.ResponseWriter.Write(p[:w.left])
	w.left = 0
	if err == nil {
		err = http.NewResponseController(w.ResponseWriter).Flush()
	}
	if err != nil {
		return n, err
	}
	select {
	case <-w.told:
	case <-w.r.Context().Done():
		return n, io.ErrUnexpectedEOF
	}
	w.left = 1 << 30
	rest, err := w.ResponseWriter.Write(p[n:])
	return n + rest, err
}

// The last bytes before a silence are told of too, however soon they follow a report.
func TestFetchTellsLastBytes(t *testing.T) {
	const size, held = 3 * mib, 1000
	files := tree{"a": bytesOf(1, size)}
	p := newPeer(t, 1, nil, nil)
	id := hold(t, 10, files, p).ID
	told := make(chan struct{})
	p.onData(func(w http.ResponseWriter, r *http.Request, next http.Handler) {
		next.ServeHTTP(&holdBack{w, r, size - held, told}, r)
	})
	var once sync.Once
	fetch(t, Fetch{Store: newStore(t), ID: id, Sources: sources(p), Idle: 5 * time.Second, Progress: func(fetched, _ int64) {
		if fetched >= size-held {
			once.Do(func() { close(told) })
		}
	}}, files)
}

// A disk that takes its time shows that it lives; one that hangs does so for a while only.
func TestSyncsAreSignsOfLife(t *testing.T) {
	const patience = 5 * time.Minute
	synctest.Test(t, func(t *testing.T) {
		var signs, done atomic.Int64
		var busy atomic.Bool
		m := newMeter(func(_, _ int64) { signs.Add(1) })
		stop := m.watchSyncs(func() (int64, bool) { return done.Load(), busy.Load() }, patience)
		defer stop()
		after := func(d time.Duration) int64 {
			before := signs.Load()
			_ = sleep(t.Context(), d)
			return signs.Load() - before
		}
		if n := after(time.Hour); n != 0 {
			t.Errorf("%d signs of life of an idle disk", n)
		}
		busy.Store(true)
		for range 4 { // slow, but each time there is an end
			if n := after(patience - 10*time.Second); n < 200 {
				t.Errorf("%d signs of life of a busy disk", n)
			}
			done.Add(1)
		}
		_ = after(patience)
		if n := after(time.Hour); n > 1 {
			t.Errorf("%d signs of life of a disk that hangs", n)
		}
		done.Add(1)
		if n := after(time.Minute); n == 0 {
			t.Error("no sign of life of a disk that has come back")
		}
	})
}
