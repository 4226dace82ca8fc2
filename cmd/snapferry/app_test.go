package main

import (
	"bytes"
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/snapferry/snapferry"
	"github.com/snapferry/snapferry/blob"
	"github.com/snapferry/snapferry/blob/blobtest"
	"github.com/snapferry/snapferry/blob/memblob"
	"github.com/snapferry/snapferry/internal/frame"
)

// open keeps a driver usable over several runs of the command.
type open struct{ blob.Driver }

func (open) Close() error { return nil }

// outcome is what one run of the command left.
type outcome struct {
	code           int
	stdout, stderr string
}

// runOn runs the command in this process with a repository in the given driver.
func runOn(ctx context.Context, d blob.Driver, args ...string) outcome {
	var stdout, stderr bytes.Buffer
	a := &app{
		stdout: &stdout, stderr: &stderr,
		getenv:     func(string) string { return "" },
		openDriver: func(context.Context, place) (blob.Driver, error) { return open{d}, nil },
	}
	code := a.run(ctx, append(args, "--repo", "mem:"))
	return outcome{code, stdout.String(), stderr.String()}
}

func oneFile(t *testing.T) string {
	dir := filepath.Join(t.TempDir(), "kv")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "a"), []byte("alpha"), 0o600); err != nil {
		t.Fatal(err)
	}
	return dir
}

// inFakeTime runs f in a bubble. What the engine makes once for the whole process is
// made outside of it.
func inFakeTime(t *testing.T, f func(t *testing.T)) {
	d := memblob.New()
	for _, args := range [][]string{{"backup", "kv=" + oneFile(t)}, {"verify"}} {
		if got := runOn(t.Context(), d, args...); got.code != exitDone {
			t.Fatalf("%s: %+v", args, got)
		}
	}
	synctest.Test(t, f)
}

// loseAt gives a driver whose answers about the log are lost from the Put of one slot on.
func loseAt(d blob.Driver, slot string) *blobtest.Faults {
	var mu sync.Mutex
	lost := false
	f := blobtest.NewFaults(d, func(c blobtest.Call) bool {
		mu.Lock()
		defer mu.Unlock()
		lost = lost || c.Op == blobtest.OpPut && strings.HasSuffix(c.Key(), "/log/"+slot)
		return lost && strings.Contains(c.Key(), "/log")
	})
	f.LoseAt(0, nil)
	return f
}

// P3.5: a publish whose answer is lost is tried for 2 minutes, then exit 6 says that
// it may have been committed. Here it was.
func TestUnknownPublish(t *testing.T) {
	inFakeTime(t, func(t *testing.T) {
		d, dir := memblob.New(), oneFile(t)
		start := time.Now()
		got := runOn(t.Context(), loseAt(d, "0000000000000002"), "backup", "--json", "--quiet", "kv="+dir)
		if took := time.Since(start); took < publishTime || took > publishTime+10*time.Second {
			t.Errorf("gave up after %s, want about %s", took, publishTime)
		}
		if got.code != exitUnknown || !strings.Contains(got.stderr, "may have been committed; run snapferry ls") {
			t.Errorf("exit %d, want %d: %s", got.code, exitUnknown, got.stderr)
		}
		var f failure
		if err := json.Unmarshal([]byte(got.stdout), &f); err != nil || f.Error.Code != exitUnknown || f.Error.Op != "commit" || f.Error.Subject != "default/default" {
			t.Errorf("%v: %s", err, got.stdout)
		}
		if got := runOn(t.Context(), d, "ls"); !strings.Contains(got.stdout, "default/default  1 ") {
			t.Errorf("ls after it: %+v", got)
		}
	})
}

// A claim whose answer is lost is given up too, and no checkpoint is in doubt.
func TestUnknownClaim(t *testing.T) {
	inFakeTime(t, func(t *testing.T) {
		d, dir := memblob.New(), oneFile(t)
		got := runOn(t.Context(), loseAt(d, "0000000000000001"), "backup", "--quiet", "kv="+dir)
		if got.code != exitFailed || !strings.Contains(got.stderr, "nothing was committed") {
			t.Errorf("exit %d, want %d: %s", got.code, exitFailed, got.stderr)
		}
		if got := runOn(t.Context(), d, "backup", "--quiet", "kv="+dir); got.code != exitDone {
			t.Errorf("the next backup: %+v", got)
		}
	})
}

// I4: the older owner ends with exit 4 when a newer one has committed meanwhile.
func TestFenced(t *testing.T) {
	mem, dir := memblob.New(), oneFile(t)
	hold := blobtest.NewHold(mem)
	gate := hold.Before(func(c blobtest.Call) bool { return c.Op == blobtest.OpPut && strings.Contains(c.Key(), "/b/") })
	older := make(chan outcome)
	go func() { older <- runOn(context.Background(), hold, "backup", "--quiet", "--json", "kv="+dir) }()
	<-gate.Reached()
	if got := runOn(t.Context(), mem, "backup", "--quiet", "kv="+dir); got.code != exitDone {
		t.Fatalf("newer owner: %+v", got)
	}
	gate.Release()
	got := <-older
	if got.code != exitConflict || !strings.Contains(got.stdout, `"error":{"code":4,`) || !strings.Contains(got.stderr, "took over") {
		t.Errorf("older owner: %+v", got)
	}
	if got := runOn(t.Context(), mem, "ls", "--json"); strings.Count(got.stdout, `"checkpoint":`) != 1 {
		t.Errorf("ls: %s", got.stdout)
	}
}

// Ctrl-C in the middle of an upload: nothing is committed and nothing is left behind.
func TestInterruptedUpload(t *testing.T) {
	mem, dir := memblob.New(), oneFile(t)
	hold := blobtest.NewHold(mem)
	gate := hold.After(func(c blobtest.Call) bool { return c.Op == blobtest.OpPut && strings.Contains(c.Key(), "/b/") })
	ctx, interrupt := context.WithCancelCause(t.Context())
	done := make(chan outcome)
	go func() { done <- runOn(ctx, hold, "backup", "--quiet", "--json", "kv="+dir) }()
	<-gate.Reached()
	interrupt(errInterrupted)
	gate.Release()
	got := <-done
	if got.code != exitFailed || !strings.Contains(got.stderr, "interrupted: no checkpoint was made") || !strings.Contains(got.stdout, `"op":"commit"`) {
		t.Errorf("interrupted: %+v", got)
	}
	for info, err := range mem.List(t.Context(), "t/default/default/b/", "") {
		t.Errorf("left behind: %s, %v", info.Key, err)
	}
	if got := runOn(t.Context(), mem, "backup", "--quiet", "kv="+dir); got.code != exitDone {
		t.Errorf("the next: %+v", got)
	}
	if got := runOn(t.Context(), mem, "ls", "--json"); strings.Count(got.stdout, `"checkpoint":`) != 1 {
		t.Errorf("ls: %s", got.stdout)
	}
}

// A repository of a newer format is refused by every verb and stays as it is.
func TestNewerFormat(t *testing.T) {
	d, dir := memblob.New(), oneFile(t)
	data := frame.Encode("repo", 99, []byte(`{"id":"x","format":99}`))
	if err := d.Put(t.Context(), "snapferry.json", blob.Bytes(data), blob.PutOptions{}); err != nil {
		t.Fatal(err)
	}
	for _, args := range [][]string{
		{"backup", "kv=" + dir}, {"backup", "--dry-run", "kv=" + dir}, {"restore", "--to", t.TempDir()},
		{"ls"}, {"show"}, {"verify"}, {"gc"},
	} {
		got := runOn(t.Context(), d, args...)
		if got.code != exitFailed || !strings.Contains(got.stderr, "newer") || strings.Count(got.stderr, "\n") > 2 {
			t.Errorf("%s: %+v", args, got)
		}
	}
	for info, err := range d.List(t.Context(), "", "") {
		if err != nil || info.Key != "snapferry.json" {
			t.Errorf("left behind: %s, %v", info.Key, err)
		}
	}
}

// Bars are drawn on a terminal, warnings appear above them, and all is taken down.
func TestBars(t *testing.T) {
	for _, done := range []bool{true, false} {
		var out bytes.Buffer
		a := &app{stdout: &out, stderr: &out, bars: true}
		p := a.startProgress("read")
		o := p.observer()
		o.Compared(snapferry.Compared{Store: "kv", ToReadFiles: 2, ToReadBytes: 4 << 20})
		o.Progress(snapferry.Progress{Store: "kv", Bytes: 1 << 20})
		o.Warned(snapferry.Warned{Store: "kv", Text: "something"})
		o.Compared(snapferry.Compared{Store: "empty"})
		if done {
			o.Progress(snapferry.Progress{Store: "kv", Bytes: 3 << 20, Files: 2})
		}
		p.stop(done)
		a.warn("afterwards")
		for _, want := range []string{"kv ", "4.0 MiB", "warning: store kv: something\n", "warning: afterwards\n"} {
			if !strings.Contains(out.String(), want) {
				t.Errorf("done %t: no %q in %q", done, want, out.String())
			}
		}
		if strings.Contains(out.String(), "empty") {
			t.Errorf("a bar for a store with nothing to read: %q", out.String())
		}
		if full := strings.Contains(out.String(), "100 %"); full != done {
			t.Errorf("done %t: %q", done, out.String())
		}
	}
}

// Without a terminal there is a line every few seconds.
func TestLines(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out bytes.Buffer
		a := &app{stderr: &out}
		p := a.startProgress("read")
		p.plan("kv", 2, 2<<20)
		for range 20 {
			<-time.After(time.Second)
			p.advance("kv", 0, 100<<10, 50<<10)
		}
		p.stop(true)
		want := "kv: 2 files to read, 2.0 MiB\n" +
			"kv: 0 of 2 files, 1000.0 KiB of 2.0 MiB, 500.0 KiB moved\n" +
			"kv: 0 of 2 files, 2.0 MiB of 2.0 MiB, 1000.0 KiB moved\n"
		if out.String() != want {
			t.Errorf("got %q, want %q", out.String(), want)
		}
		a.quiet = true
		a.note("not this")
		a.warn("but this")
		if !strings.HasSuffix(out.String(), "\nwarning: but this\n") {
			t.Errorf("quiet: %q", out.String())
		}
	})
}

// A report's warnings are told once, and a backup that is no single moment is told of,
// however quiet the verb is.
func TestWarningsOfReports(t *testing.T) {
	var out, err bytes.Buffer
	a := &app{stdout: &out, stderr: &err, quiet: true}
	p := a.startProgress("read")
	p.observer().Warned(snapferry.Warned{Store: "kv", Text: "cache not saved"})
	p.observer().Warned(snapferry.Warned{Store: "kv", Text: "a: owner"})
	v := &backupVerb{app: a}
	v.remind(p, &snapferry.CommitReport{Warnings: []string{"cache not saved", "kv: a: owner", "kv: left out a pipe"}, Consistent: true})
	want := "warning: store kv: cache not saved\nwarning: store kv: a: owner\nwarning: kv: left out a pipe\n"
	if err.String() != want {
		t.Errorf("got %q, want %q", err.String(), want)
	}
	v.remind(p, &snapferry.CommitReport{})
	if !strings.Contains(err.String(), "\nwarning: files changed during the backup") || out.Len() > 0 {
		t.Errorf("not consistent: %q, %q", err.String(), out.String())
	}
}
