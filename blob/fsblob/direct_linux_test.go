package fsblob

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

// Whatever the length and place in memory of what is written, and whichever of it goes
// past the page cache, the file has exactly these bytes.
func TestDirectWrites(t *testing.T) {
	mem := make([]byte, 3*directSize)
	for i := range mem {
		mem[i] = byte(i * 31 >> 3)
	}
	if !aligned(mem, directAlign) {
		t.Fatal("a large slice is not aligned: nothing would go past the page cache")
	}
	for name, parts := range map[string][][]byte{
		"aligned":            {mem[:writeSize]},
		"longer than a call": {mem[:2*directSize+directAlign]},
		"with a tail":        {mem[:directSize+1]},
		"just short":         {mem[:writeSize-1]},
		"unaligned memory":   {mem[1 : writeSize+1+directAlign]},
		"tail, then more":    {mem[:writeSize+5], mem[:writeSize]},
		"two aligned parts":  {mem[:writeSize], mem[writeSize : 3*writeSize+9]},
	} {
		t.Run(name, func(t *testing.T) {
			f, err := os.Create(filepath.Join(t.TempDir(), "f"))
			if err != nil {
				t.Fatal(err)
			}
			defer f.Close()
			w := &writer{ctx: t.Context(), f: f}
			var want []byte
			for _, p := range parts {
				if n, err := w.Write(p); n != len(p) || err != nil {
					t.Fatalf("Write(%d bytes) = %d, %v", len(p), n, err)
				}
				want = append(want, p...)
			}
			got, err := os.ReadFile(f.Name())
			if err != nil || !bytes.Equal(got, want) {
				t.Fatalf("read back %d bytes, %v, wrote %d", len(got), err, len(want))
			}
			if flags, err := unix.FcntlInt(f.Fd(), unix.F_GETFL, 0); err != nil || flags&unix.O_DIRECT != 0 {
				t.Fatalf("flags %#x, %v: direct mode left on", flags, err)
			}
		})
	}
}

// A file that takes no direct writes (a pipe is the nearest that always refuses the
// seekable kind) is written through the cache.
func TestDirectWritesRefused(t *testing.T) {
	r, wr, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	mem := make([]byte, writeSize)
	w := &writer{ctx: t.Context(), f: wr, cached: true}
	if n := w.fitsDirect(mem); n != 0 {
		t.Fatalf("fitsDirect = %d on a file system without", n)
	}
	go func() {
		defer wr.Close()
		_, _ = w.Write(mem)
	}()
	var got bytes.Buffer
	if _, err := got.ReadFrom(r); err != nil || got.Len() != len(mem) {
		t.Fatalf("read %d bytes, %v", got.Len(), err)
	}
	if !refusesDirect(&os.PathError{Err: unix.EINVAL}) || refusesDirect(&os.PathError{Err: unix.ENOSPC}) {
		t.Error("refusesDirect does not tell EINVAL from ENOSPC")
	}
}

func TestDirectWriteCancelled(t *testing.T) {
	f, err := os.Create(filepath.Join(t.TempDir(), "f"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	w := &writer{ctx: ctx, f: f}
	if n, err := w.Write(make([]byte, directSize)); n != 0 || !errors.Is(err, context.Canceled) {
		t.Fatalf("Write = %d, %v", n, err)
	}
}
