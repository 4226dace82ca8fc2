package main

import (
	"fmt"
	"io"
	"sync"
	"time"

	"github.com/vbauerster/mpb/v8"
	"github.com/vbauerster/mpb/v8/decor"

	"github.com/snapferry/snapferry"
)

// linesEvery is how often a plain line tells how far a store is.
const linesEvery = 10 * time.Second

// progress shows on standard error how far a verb is: a bar for each store on a
// terminal, else a line when a store begins and one every few seconds. Its observer's
// functions may be called from many goroutines.
type progress struct {
	app  *app
	verb string        // what happens to the files: read or restore
	pool *mpb.Progress // nil: plain lines

	mu     sync.Mutex // guards what follows
	tracks map[string]*track
	told   map[string]bool // warnings that were printed
}

// track is how far one store is.
type track struct {
	files, bytes         int64 // planned
	doneFiles, doneBytes int64
	moved                int64 // sent or fetched
	spoken               time.Time
	bar                  *mpb.Bar
}

// startProgress begins to show progress; stop ends it. Warnings are printed above the
// bars meanwhile.
func (a *app) startProgress(verb string) *progress {
	p := &progress{app: a, verb: verb, tracks: map[string]*track{}, told: map[string]bool{}}
	if a.bars && !a.quiet {
		p.pool = mpb.New(mpb.WithOutput(a.stderr), mpb.WithAutoRefresh())
		a.divert(p.pool)
	}
	return p
}

// stop takes the bars down; done tells whether they reached their end.
func (p *progress) stop(done bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.pool == nil {
		return
	}
	for _, t := range p.tracks {
		if t.bar == nil {
			continue
		}
		if done {
			t.bar.SetTotal(-1, true)
		} else {
			t.bar.Abort(false)
		}
	}
	p.pool.Wait()
	p.pool = nil
	p.app.divert(nil)
}

// observer returns the functions through which the engine reports.
func (p *progress) observer() *snapferry.Observer {
	return &snapferry.Observer{
		Compared: func(e snapferry.Compared) { p.plan(e.Store, e.ToReadFiles, e.ToReadBytes) },
		RestorePlanned: func(e snapferry.RestorePlanned) {
			p.plan(e.Store, e.Files, e.Bytes)
		},
		Progress: func(e snapferry.Progress) { p.advance(e.Store, e.Files, e.Bytes, e.Moved) },
		Warned:   p.warned,
	}
}

// warned tells of a warning when it arises. Reports have it with and without the store.
func (p *progress) warned(e snapferry.Warned) {
	p.mu.Lock()
	p.told[e.Text], p.told[e.Store+": "+e.Text] = true, true
	p.mu.Unlock()
	p.app.warn("%s", storeText(e.Store, e.Text))
}

// remind tells of the warnings of a report that were not told when they arose.
func (p *progress) remind(warnings []string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, text := range warnings {
		if !p.told[text] {
			p.app.warn("%s", text)
		}
	}
}

func storeText(store, text string) string {
	if store == "" {
		return text
	}
	return "store " + store + ": " + text
}

// plan begins a store, or begins it anew when the plan changed.
func (p *progress) plan(store string, n, bytes int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	t := p.trackLocked(store)
	*t = track{files: n, bytes: bytes, spoken: time.Now(), bar: t.bar}
	if p.pool == nil {
		p.app.note("%s: %s to %s, %s", store, files(n), p.verb, size(bytes))
		return
	}
	p.drawLocked(store, t)
}

// read counts bytes of work whose end nobody knows beforehand.
func (p *progress) read(n int64) {
	p.mu.Lock()
	t := p.trackLocked("data")
	t.bytes = max(t.bytes, t.doneBytes+n)
	p.mu.Unlock()
	p.advance("data", 0, n, n)
}

func (p *progress) advance(store string, n, bytes, moved int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	t := p.trackLocked(store)
	t.doneFiles += n
	t.doneBytes += bytes
	t.moved += moved
	if p.pool != nil {
		p.drawLocked(store, t)
		return
	}
	if now := time.Now(); now.Sub(t.spoken) >= linesEvery {
		t.spoken = now
		p.app.note("%s: %d of %s, %s of %s, %s moved", store, t.doneFiles, files(t.files), size(t.doneBytes), size(t.bytes), size(t.moved))
	}
}

func (p *progress) trackLocked(store string) *track {
	t := p.tracks[store]
	if t == nil {
		t = &track{spoken: time.Now()}
		p.tracks[store] = t
	}
	return t
}

// drawLocked brings the bar of a store to where the store is. A store with nothing to
// move has none. The last byte does not complete a bar: stop does.
func (p *progress) drawLocked(store string, t *track) {
	if t.bar == nil {
		if t.bytes == 0 {
			return
		}
		t.bar = p.pool.AddBar(0,
			mpb.PrependDecorators(decor.Name(store+" "), decor.Percentage(decor.WC{W: 5})),
			mpb.AppendDecorators(decor.CountersKibiByte("% .1f / % .1f"), decor.AverageSpeed(decor.SizeB1024(0), "  % .1f")),
		)
	}
	t.bar.SetTotal(t.bytes, false)
	t.bar.SetCurrent(t.doneBytes)
}

// divert sends notes and warnings through w, nil for standard error itself.
func (a *app) divert(w io.Writer) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.above = w
}

// warn tells of something that is not as it should be while the verb goes on.
func (a *app) warn(format string, args ...any) {
	a.print("warning: " + oneLine(fmt.Sprintf(format, args...)))
}

// note tells what goes on, unless --quiet.
func (a *app) note(format string, args ...any) {
	if !a.quiet {
		a.print(fmt.Sprintf(format, args...))
	}
}

func (a *app) print(line string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.above != nil {
		if _, err := fmt.Fprintln(a.above, line); err == nil {
			return
		}
	}
	fmt.Fprintln(a.stderr, line)
}
