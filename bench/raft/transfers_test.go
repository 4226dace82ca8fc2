//go:build linux

package main

import (
	"bytes"
	"io"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"
)

// TestDelay: what passes the proxy is whole, also when it takes several pipes, and no answer
// comes before a round trip is over.
func TestDelay(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go func() { // ends with the connection
		conn, err := l.Accept()
		if err != nil {
			return
		}
		defer conn.Close()
		_, _ = io.Copy(conn, conn) // what is lacking is found below
	}()
	d, err := newDelay(t.Context(), l.Addr().String(), 20*time.Millisecond)
	if err != nil {
		t.Fatal(err)
	}
	conn, err := net.Dial("tcp", d.addr())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()

	want := make([]byte, 9<<20)
	_, _ = bytesFor(7).Read(want)
	began := time.Now()
	go func() {
		_, _ = conn.Write(want)
		_ = conn.(*net.TCPConn).CloseWrite()
	}()
	got, err := io.ReadAll(conn)
	if err != nil || !bytes.Equal(got, want) {
		t.Errorf("got %d bytes, %v, want the %d that were sent", len(got), err, len(want))
	}
	if took := time.Since(began); took < 40*time.Millisecond {
		t.Errorf("a round trip took %v, want at least 40 ms", took)
	}
	if err := d.close(); err != nil {
		t.Error(err)
	}
}

// TestDifferencesAreFound: a transfer whose bytes differ is no row.
func TestDifferencesAreFound(t *testing.T) {
	tree := func(files map[string]string) string {
		dir := t.TempDir()
		for name, text := range files {
			if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		return dir
	}
	want := tree(map[string]string{"a": "12", "b": "34"})
	if err := sameTree(want, tree(map[string]string{"a": "12", "b": "34"})); err != nil {
		t.Errorf("equal trees: %v", err)
	}
	for name, other := range map[string]map[string]string{
		"bytes": {"a": "12", "b": "35"}, "cut": {"a": "123", "b": "4"},
		"name": {"a": "12", "c": "34"}, "fewer": {"a": "12"}, "more": {"a": "12", "b": "34", "c": ""},
	} {
		if sameTree(want, tree(other)) == nil {
			t.Errorf("%s: no difference found", name)
		}
	}
}
