//go:build linux

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/snapferry/snapferry/raftsnap/protocol"
	"github.com/snapferry/snapferry/raftsnap/snapstore"
	"github.com/snapferry/snapferry/raftsnap/transfer"
)

// partCommand is the hidden first argument that makes this program one of the processes of
// a row: sender and receiver must not share a heap, nor ours and the reference.
const partCommand = "part"

// moved is what a receiving process prints.
type moved struct {
	Seconds float64
	Bytes   int64 // that are there at the end
	Fetched int64 // of those: that came over the network
	Dir     string
}

// rate returns MiB per second.
func (m moved) rate() float64 { return float64(m.Bytes) / (1 << 20) / m.Seconds }

// runPart runs one process of a row and prints what it has to say as JSON.
func runPart(ctx context.Context, args []string) (err error) {
	var said any
	switch {
	case len(args) == 3 && args[0] == "database":
		said, err = makeDatabase(ctx, args[1], args[2])
	case len(args) == 3 && args[0] == "files":
		said, err = makeFiles(ctx, args[1], args[2])
	case len(args) == 3 && args[0] == "serve":
		return servePart(ctx, args[1], args[2])
	case len(args) == 4 && args[0] == "fetch":
		said, err = fetchPart(ctx, args[1], args[2], args[3])
	case len(args) == 4 && args[0] == "get":
		said, err = getPart(ctx, args[1], args[2], args[3], 0)
	case len(args) == 4 && args[0] == "wait":
		said, err = getPart(ctx, args[1], args[2], args[3], stopAndWait)
	default:
		err = fmt.Errorf("no part %q", args)
	}
	if err != nil {
		return err
	}
	return json.NewEncoder(os.Stdout).Encode(said)
}

// servePart serves the snapshots of a store until it is told to end: to members below the
// transfer's own paths, and as plain files below /plain/ID/.
func servePart(ctx context.Context, dir, addr string) (err error) {
	store, err := snapstore.Open(dir, nil)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, store.Close()) }()
	server := transfer.NewServer(store, silent{}, nil)
	defer server.Close()
	mux := http.NewServeMux()
	mux.Handle(transfer.Prefix, server)
	for _, held := range store.List() {
		data, err := store.Dir(held.ID)
		if err != nil {
			return err
		}
		at := "/plain/" + held.ID.String()
		mux.Handle(at+"/", http.StripPrefix(at, http.FileServer(http.Dir(data))))
	}
	l, err := net.Listen("tcp", addr)
	if err != nil {
		return err
	}
	web := &http.Server{Handler: mux}
	ended := make(chan error, 1)
	go func() { ended <- web.Serve(l) }()
	<-ctx.Done()
	err = web.Close()
	if served := <-ended; !errors.Is(served, http.ErrServerClosed) {
		err = errors.Join(err, served)
	}
	return err
}

// silent answers the control messages, of which these rows send none.
type silent struct{}

func (silent) Info(context.Context, protocol.InfoRequest) protocol.Answer { return protocol.Answer{} }
func (silent) Announce(context.Context, protocol.Announce)                {}
func (silent) Outcome(context.Context, protocol.Outcome) error            { return nil }

// fetchPart fetches a snapshot into a store with the product's defaults.
func fetchPart(ctx context.Context, url, dir, name string) (m moved, err error) {
	id, err := protocol.ParseID(name)
	if err != nil {
		return m, err
	}
	store, err := snapstore.Open(dir, nil)
	if err != nil {
		return m, err
	}
	defer func() { err = errors.Join(err, store.Close()) }()
	client := transfer.NewClient(nil)
	defer client.Close()

	begin := time.Now()
	held, stats, err := client.Fetch(ctx, transfer.Fetch{Store: store, ID: id, Sources: []transfer.Source{{ID: 1, URL: url}}})
	m = moved{Seconds: time.Since(begin).Seconds(), Bytes: held.Bytes, Fetched: stats.Fetched + stats.Manifest}
	if err != nil {
		return m, err
	}
	m.Dir, err = store.Dir(id)
	return m, err
}

// stopAndWait is what a stop-and-wait transfer asks for in each round trip.
const stopAndWait = 4 << 20

// getPart gets the files of the directory from, one after the other over one connection,
// and writes them to one file with fdatasync at the end. With a step each request asks for
// that many bytes, and the next one waits for the answer.
func getPart(ctx context.Context, url, from, to string, step int64) (m moved, err error) {
	entries, err := os.ReadDir(from)
	if err != nil {
		return m, err
	}
	f, err := os.OpenFile(to, os.O_WRONLY|os.O_CREATE, 0o644)
	if err != nil {
		return m, err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	g := &getter{client: &http.Client{Transport: &http.Transport{DisableCompression: true}}, to: f, buf: make([]byte, 128<<10)}
	defer g.client.CloseIdleConnections()

	begin := time.Now()
	for _, e := range entries {
		info, err := e.Info()
		if err != nil {
			return m, err
		}
		if err := g.file(ctx, url+"/"+e.Name(), info.Size(), step); err != nil {
			return m, err
		}
	}
	if info, statErr := f.Stat(); statErr == nil && info.Mode().IsRegular() {
		err = unix.Fdatasync(int(f.Fd()))
	}
	return moved{Seconds: time.Since(begin).Seconds(), Bytes: g.got, Fetched: g.got, Dir: filepath.Dir(to)}, err
}

// getter gets files by plain HTTP.
type getter struct {
	client *http.Client
	to     io.Writer
	buf    []byte
	got    int64
}

func (g *getter) file(ctx context.Context, url string, size, step int64) error {
	if step == 0 {
		step = max(size, 1)
	}
	for at := int64(0); at < size; at += step {
		if err := g.get(ctx, url, at, min(step, size-at)); err != nil {
			return err
		}
	}
	return nil
}

func (g *getter) get(ctx context.Context, url string, at, n int64) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	req.Header.Set("Range", fmt.Sprintf("bytes=%d-%d", at, at+n-1))
	resp, err := g.client.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusPartialContent {
		return fmt.Errorf("get %s: %s", url, resp.Status)
	}
	got, err := io.CopyBuffer(onlyWriter{g.to}, resp.Body, g.buf)
	g.got += got
	if err == nil && got != n {
		err = io.ErrUnexpectedEOF
	}
	return err
}

// onlyWriter hides an os.File's ReadFrom, which would copy with a smaller buffer.
type onlyWriter struct{ io.Writer }
