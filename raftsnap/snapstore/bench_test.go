package snapstore

import (
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"github.com/snapferry/snapferry/snapshot"
)

const benchFiles, benchFile = 8, 64 << 20

// BenchmarkReceive puts a snapshot of 512 MiB into a receipt from memory, with two senders,
// and commits it: hashing, writing and flushing. For comparison, plain writes the same bytes
// to one file with one sync at the end.
func BenchmarkReceive(b *testing.B) {
	data := noise(1, benchFile)
	x := &snapshot.Index{}
	for i := range benchFiles {
		x.Entries = append(x.Entries, file(fmt.Sprintf("%06d.sst", i), perFile(data, i)))
	}
	manifest, _, err := EncodeManifest(metaAt(1), x)
	must(b, err)
	b.Run("store", func(b *testing.B) {
		b.SetBytes(benchFiles * benchFile)
		for b.Loop() {
			b.StopTimer()
			s, err := Open(b.TempDir(), &Options{Reserve: -1})
			must(b, err)
			b.StartTimer()
			r, err := s.Receive(b.Context(), manifest)
			must(b, err)
			putAll(b, r, data)
			held, err := r.Commit(b.Context())
			must(b, err)
			b.StopTimer()
			must(b, s.Close())
			must(b, os.RemoveAll(filepath.Join(s.dir, held.ID.String())))
			b.StartTimer()
		}
	})
	b.Run("plain", func(b *testing.B) {
		b.SetBytes(benchFiles * benchFile)
		for b.Loop() {
			f, err := os.Create(filepath.Join(b.TempDir(), "f"))
			must(b, err)
			for range benchFiles {
				for at := 0; at < len(data); at += writeSize {
					_, err := f.Write(data[at : at+writeSize])
					must(b, err)
				}
			}
			must(b, syncData(f))
			must(b, f.Close())
			must(b, os.Remove(f.Name()))
		}
	})
}

// perFile is the content of file i: the common bytes with a stamp in every chunk.
func perFile(data []byte, i int) []byte {
	for at := 0; at < len(data); at += ChunkSize {
		data[at] = byte(i)
	}
	return data
}

func putAll(b *testing.B, r *Receipt, data []byte) {
	pieces := r.Missing()
	var wg sync.WaitGroup
	for w := range 2 {
		wg.Go(func() {
			own := make([]byte, ChunkSize)
			for i := w; i < len(pieces); i += 2 {
				p := pieces[i]
				copy(own, data[p.Offset:])
				own[0] = byte(p.File)
				if err := r.Put(p, own[:p.Length]); err != nil {
					b.Error(err)
				}
			}
		})
	}
	wg.Wait()
}

// BenchmarkReuse receives a snapshot of 512 MiB of which all but one file are held.
func BenchmarkReuse(b *testing.B) {
	s := openStore(b, b.TempDir(), nil)
	tr := tree{}
	for i := range benchFiles {
		tr[fmt.Sprintf("%06d.sst", i)] = append([]byte(nil), perFile(noise(1, benchFile), i)...)
	}
	held := makeHeld(b, s, 1, tr)
	m, err := DecodeManifest(manifestOf(b, s, held.ID))
	must(b, err)
	must(b, s.Verify(b.Context(), held.ID, nil))
	index := uint64(1)
	b.SetBytes(benchFiles * benchFile)
	for b.Loop() {
		index++
		manifest, _, err := EncodeManifest(metaAt(index), m.Index)
		must(b, err)
		r, err := s.Receive(b.Context(), manifest)
		must(b, err)
		_, err = r.Reuse(b.Context(), nil)
		must(b, err)
		_, err = r.Commit(b.Context())
		must(b, err)
		_, err = s.Retire(nil)
		must(b, err)
	}
}

// BenchmarkDraft commits a draft of 512 MiB of which no file is known.
func BenchmarkDraft(b *testing.B) {
	s := openStore(b, b.TempDir(), nil)
	index := uint64(0)
	b.SetBytes(benchFiles * benchFile)
	for b.Loop() {
		b.StopTimer()
		d, err := s.Draft()
		must(b, err)
		tr := tree{}
		for i := range benchFiles {
			tr[fmt.Sprintf("%06d.sst", i)] = noise(uint64(i), benchFile)
		}
		tr.build(b, d.Dir())
		b.StartTimer()
		index++
		_, err = d.Commit(b.Context(), metaAt(index), nil)
		must(b, err)
		b.StopTimer()
		_, err = s.Retire(nil)
		must(b, err)
		b.StartTimer()
	}
}
