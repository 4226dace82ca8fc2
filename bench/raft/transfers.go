//go:build linux

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"time"

	"github.com/zeebo/blake3"
	"golang.org/x/sys/unix"

	"github.com/snapferry/snapferry/internal/machine"
)

// The states that are moved, and how.
const (
	stateBytes = 2 << 30
	maxShare   = 0.06 // of a snapshot's bytes, which a member that has the one before may fetch
	memoryDir  = "/dev/shm"
)

// origin is a process that serves snapshots.
type origin struct {
	*group
	addr  string
	snaps []snap
}

func (o *origin) url() string { return "http://" + o.addr }

// plain is where the files of a snapshot are served as such, by an address.
func plain(addr string, s snap) string { return "http://" + addr + "/plain/" + s.ID }

// part runs a process of a row to its end and decodes what it printed.
func (b *bench) part(out any, args ...string) error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	cmd := exec.CommandContext(b.ctx, self, append([]string{partCommand}, args...)...)
	cmd.Stderr = os.Stderr
	said, err := cmd.Output()
	if err != nil {
		return fmt.Errorf("%s: %w", args[0], err)
	}
	return json.Unmarshal(said, out)
}

// startOrigin makes snapshots by a part of that name, which is given a number, and serves
// them.
func (b *bench) startOrigin(kind string, size int) (o *origin, err error) {
	g, ports, err := b.newGroup(1)
	if err != nil {
		return nil, err
	}
	o = &origin{group: g, addr: fmt.Sprintf("127.0.0.1:%d", ports[0])}
	defer func() {
		if err != nil {
			err = errors.Join(err, o.stop())
		}
	}()
	if err := b.part(&o.snaps, kind, g.dir, strconv.Itoa(size)); err != nil {
		return nil, err
	}
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	if err := g.start("serve", exec.CommandContext(b.ctx, self, partCommand, "serve", filepath.Join(g.dir, makerName), o.addr)); err != nil {
		return nil, err
	}
	return o, b.until(func() bool { _, err := trip(b.ctx, o.url()); return err == nil })
}

// trip is how long the shortest of requests takes.
func trip(ctx context.Context, url string) (time.Duration, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodHead, url, nil)
	if err != nil {
		return 0, err
	}
	begin := time.Now()
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return 0, err
	}
	return time.Since(begin), resp.Body.Close()
}

// startDatabase serves two snapshots of a database.
func (b *bench) startDatabase() (*origin, error) {
	return b.startOrigin("database", b.size(stateBytes/stateValue))
}

// fetch brings a snapshot into a store, checks it and removes it from there.
func (b *bench) fetch(url string, s snap, store string) (m moved, err error) {
	unix.Sync()
	if err := b.part(&m, "fetch", url, store, s.ID); err != nil {
		return m, err
	}
	if err := sameTree(s.Dir, m.Dir); err != nil {
		return m, fmt.Errorf("what was fetched differs: %w", err)
	}
	return m, os.RemoveAll(filepath.Dir(m.Dir))
}

// full fetches a snapshot into an empty store.
func (b *bench) full(url string, s snap, under string) (m moved, err error) {
	dir, err := os.MkdirTemp(under, "store.")
	if err != nil {
		return m, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	return b.fetch(url, s, dir)
}

// get is the reference: the same files by plain HTTP into one file.
func (b *bench) get(url string, s snap) (m moved, err error) {
	to := filepath.Join(b.work, "plain")
	defer func() { err = errors.Join(err, os.RemoveAll(to)) }()
	unix.Sync()
	if err := b.part(&m, "get", url, s.Dir, to); err != nil {
		return m, err
	}
	want, err := treeFiles(s.Dir)
	if err != nil {
		return m, err
	}
	return m, sameBytes(want, []string{to})
}

// install measures a full install over loopback against a plain transfer.
func (b *bench) install() (m measured, err error) {
	o, err := b.startDatabase()
	if err != nil {
		return m, err
	}
	defer func() { err = errors.Join(err, o.stop()) }()
	s := o.snaps[1]
	for range b.runs {
		ours, err := b.full(o.url(), s, b.work)
		if err != nil {
			return m, err
		}
		reference, err := b.get(plain(o.addr, s), s)
		if err != nil {
			return m, err
		}
		m.Ours, m.Reference = append(m.Ours, ours.rate()), append(m.Reference, reference.rate())
	}
	m.Note = fmt.Sprintf("%d MiB in %d files, durable at the end of both", s.Bytes>>20, s.files())
	return m, nil
}

// files is how many files a snapshot has.
func (s snap) files() int {
	list, _ := treeFiles(s.Dir) // it was read before
	return len(list)
}

// delta measures how much faster a member has a snapshot if it holds the one before.
func (b *bench) delta() (m measured, err error) {
	o, err := b.startDatabase()
	if err != nil {
		return m, err
	}
	defer func() { err = errors.Join(err, o.stop()) }()
	lagging := filepath.Join(o.dir, "lagging")
	var first moved
	if err := b.part(&first, "fetch", o.url(), lagging, o.snaps[0].ID); err != nil {
		return m, err
	}
	s := o.snaps[1]
	var share float64
	for range b.runs {
		ours, err := b.fetch(o.url(), s, lagging)
		if err != nil {
			return m, err
		}
		full, err := b.full(o.url(), s, b.work)
		if err != nil {
			return m, err
		}
		m.Ours, m.Reference = append(m.Ours, ours.rate()), append(m.Reference, full.rate())
		share = max(share, float64(ours.Fetched)/float64(s.Bytes))
	}
	m.Note = fmt.Sprintf("%.2f %% of the %d MiB were fetched, at most %.0f %% may be", 100*share, s.Bytes>>20, 100*maxShare)
	m.Missed = share > maxShare
	return m, nil
}

// far measures an install over a long way against stop and wait over the same, which takes so
// long in each direction. What comes goes to memory on both sides: the row is about the way,
// and a disk may be slower than that.
func far(each time.Duration) func(*bench) (measured, error) {
	return func(b *bench) (measured, error) { return b.far(each) }
}

func (b *bench) far(each time.Duration) (m measured, err error) {
	o, err := b.startOrigin("files", b.size(stateBytes>>20))
	if err != nil {
		return m, err
	}
	defer func() { err = errors.Join(err, o.stop()) }()
	far, err := newDelay(b.ctx, o.addr, each)
	if err != nil {
		return m, err
	}
	defer func() { err = errors.Join(err, far.close()) }()
	defer http.DefaultClient.CloseIdleConnections()
	s := o.snaps[0]
	for range b.runs {
		ours, err := b.full("http://"+far.addr(), s, memoryDir)
		if err != nil {
			return m, err
		}
		waits, err := b.pass("wait", far.addr(), s)
		if err != nil {
			return m, err
		}
		m.Ours, m.Reference = append(m.Ours, ours.rate()), append(m.Reference, waits)
	}
	m.Note, err = b.describeFar(o, far.addr(), each)
	return m, err
}

// pass gets a snapshot's files by plain HTTP and drops them; it returns the rate.
func (b *bench) pass(kind, addr string, s snap) (float64, error) {
	var m moved
	err := b.part(&m, kind, plain(addr, s), s.Dir, os.DevNull)
	if err == nil && m.Bytes != s.Bytes {
		err = fmt.Errorf("got %d bytes of %d", m.Bytes, s.Bytes)
	}
	return m.rate(), err
}

// describeFar says what bounds the numbers of the row: how long the round trip really is,
// whether the proxy limits anything, and what ours reaches without it and with the disk.
func (b *bench) describeFar(o *origin, far string, each time.Duration) (string, error) {
	var trips []float64
	for range 21 {
		t, err := trip(b.ctx, "http://"+far)
		if err != nil {
			return "", err
		}
		trips = append(trips, t.Seconds()*1000)
	}
	s := o.snaps[0]
	stream, err := b.pass("get", far, s)
	if err != nil {
		return "", err
	}
	near, err := b.full(o.url(), s, memoryDir)
	if err != nil {
		return "", err
	}
	disk, err := b.full("http://"+far, s, b.work)
	return fmt.Sprintf("ours in MiB/s: without the proxy %.0f, with it and to the disk %.0f; round trip %.1f ms, one stream through the proxy %.0f MiB/s; stop and wait in theory %.0f MiB/s",
		near.rate(), disk.rate(), machine.Median(trips), stream, stopAndWait/(1<<20)/(2*each).Seconds()), err
}

// sameTree compares two directories.
func sameTree(a, b string) error {
	listA, err := treeFiles(a)
	if err != nil {
		return err
	}
	listB, err := treeFiles(b)
	if err != nil {
		return err
	}
	if len(listA) != len(listB) {
		return fmt.Errorf("%d files, want %d", len(listB), len(listA))
	}
	for i := range listA {
		if filepath.Base(listA[i]) != filepath.Base(listB[i]) {
			return fmt.Errorf("file %s, want %s", listB[i], listA[i])
		}
		infoA, err := os.Stat(listA[i])
		if err != nil {
			return err
		}
		if infoB, err := os.Stat(listB[i]); err != nil || infoA.Size() != infoB.Size() {
			return fmt.Errorf("%s and %s differ in size: %w", listA[i], listB[i], err)
		}
	}
	return sameBytes(listA, listB)
}

func treeFiles(dir string) (list []string, err error) {
	entries, err := os.ReadDir(dir)
	for _, e := range entries {
		list = append(list, filepath.Join(dir, e.Name()))
	}
	return list, err
}

// sameBytes compares what two lists of files hold, one file after the other.
func sameBytes(a, b []string) error {
	sumA, err := sum(a)
	if err != nil {
		return err
	}
	sumB, err := sum(b)
	if err == nil && sumA != sumB {
		err = errors.New("other bytes")
	}
	return err
}

func sum(list []string) (s string, err error) {
	h, buf := blake3.New(), make([]byte, 256<<10)
	for _, name := range list {
		f, err := os.Open(name)
		if err != nil {
			return "", err
		}
		_, err = io.CopyBuffer(h, onlyReader{f}, buf)
		if err = errors.Join(err, f.Close()); err != nil {
			return "", err
		}
	}
	return string(h.Sum(nil)), nil
}

// onlyReader hides an os.File's WriteTo, which would copy with a smaller buffer.
type onlyReader struct{ io.Reader }
