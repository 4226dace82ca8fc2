package cpwire

import (
	"bytes"
	"encoding/hex"
	"errors"
	"io/fs"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func sample() Append {
	return Append{
		Task: Task{Job: "orders", Name: "p7"}, Slot: 2, Prev: Digest{1, 2}, Nonce: Nonce{3, 4}, Body: []byte("body"),
	}
}

// The bytes of a request are those of docs/format.md.
func TestRequestBytes(t *testing.T) {
	a := sample()
	got := AppendItem(beginBatch(nil, 1), &a)
	want := "01" + "0100" + // version, one append
		"06" + hex.EncodeToString([]byte("orders")) + "02" + hex.EncodeToString([]byte("p7")) +
		"0200000000000000" + "0102" + strings.Repeat("00", 30) + "0304" + strings.Repeat("00", 14) +
		"04000000" + hex.EncodeToString([]byte("body"))
	if hex.EncodeToString(got) != want {
		t.Errorf("request %x\nwant    %s", got, want)
	}
	if n := a.size(); n != len(got)-batchHeader {
		t.Errorf("size %d, want %d", n, len(got)-batchHeader)
	}
	answer := AppendAnswer(nil, AppendResult(nil, Known, 5, &Digest{9}, 1))
	want = "01" + "0100" + "02" + "0500000000000000" + "09" + strings.Repeat("00", 31) + "0100000000000000"
	if hex.EncodeToString(answer) != want {
		t.Errorf("answer %x\nwant   %s", answer, want)
	}
}

func TestItemsComeBack(t *testing.T) {
	as := []Append{sample(), sample(), sample()}
	as[1].Slot, as[1].Prev, as[1].Body = 1, Digest{}, nil
	as[2].Task = Task{Job: BenchJob, Name: strings.Repeat("n", MaxName)}
	as[2].Body = bytes.Repeat([]byte("x"), MaxBody)
	b := beginBatch(nil, len(as))
	for i := range as {
		if err := as[i].Validate(); err != nil {
			t.Fatal(err)
		}
		b = AppendItem(b, &as[i])
	}
	items, n, err := DecodeBatch(b)
	if err != nil || n != len(as) {
		t.Fatalf("%d items, %v", n, err)
	}
	for _, want := range as {
		var it Item
		if it, items, err = DecodeItem(items); err != nil {
			t.Fatal(err)
		}
		got := Append{Task: Task{string(it.Job), string(it.Task)}, Slot: it.Slot, Prev: it.Prev, Nonce: it.Nonce, Body: it.Body}
		if len(want.Body) == 0 {
			got.Body = nil
		}
		if d := cmp.Diff(got, want); d != "" {
			t.Errorf("item (-got +want):\n%s", d)
		}
	}
}

// What breaks a rule is refused on both sides, so that no member ever meets it.
func TestInvalidAppends(t *testing.T) {
	for name, change := range map[string]func(a *Append){
		"no job":               func(a *Append) { a.Task.Job = "" },
		"no task":              func(a *Append) { a.Task.Name = "" },
		"job is a path":        func(a *Append) { a.Task.Job = "a/b" },
		"job goes up":          func(a *Append) { a.Task.Job = ".." },
		"job is here":          func(a *Append) { a.Task.Job = "." },
		"task has a dot":       func(a *Append) { a.Task.Name = ".x" },
		"task has a zero byte": func(a *Append) { a.Task.Name = "x\x00" },
		"name too long":        func(a *Append) { a.Task.Name = strings.Repeat("n", MaxName+1) },
		"slot 0":               func(a *Append) { a.Slot = 0 },
		"slot 1 after one":     func(a *Append) { a.Slot = 1 },
		"slot 2 after none":    func(a *Append) { a.Prev = Digest{} },
		"no nonce":             func(a *Append) { a.Nonce = Nonce{} },
		"too large":            func(a *Append) { a.Body = make([]byte, MaxBody+1) },
	} {
		a := sample()
		change(&a)
		if err := a.Validate(); !errors.Is(err, fs.ErrInvalid) {
			t.Errorf("%s: validate says %v", name, err)
		}
		if _, _, err := DecodeItem(AppendItem(nil, &a)); err == nil {
			t.Errorf("%s: it was decoded", name)
		}
	}
	good := sample()
	if err := good.Validate(); err != nil {
		t.Error(err)
	}
}

func TestEntriesComeBack(t *testing.T) {
	es := []Entry{
		{Slot: 1, Digest: Digest{1}, Nonce: Nonce{2}, Stored: time.Unix(0, 12345).UTC(), Body: []byte("x")},
		{Slot: 2, Stored: time.Unix(1, 0).UTC()},
		{Slot: 3, Body: []byte{}},
	}
	var b []byte
	for i := range es {
		b = AppendEntry(b, &es[i])
	}
	var got []Entry
	for len(b) > 0 {
		e, rest, err := decodeEntry(b)
		if err != nil {
			t.Fatal(err)
		}
		got, b = append(got, e), rest
	}
	if d := cmp.Diff(got, es); d != "" {
		t.Errorf("entries (-got +want):\n%s", d)
	}
}

// Decoding never panics, reads no more than there is, and what it takes comes back as the
// same bytes.
func FuzzDecodeBatch(f *testing.F) {
	a := sample()
	b := AppendItem(AppendItem(beginBatch(nil, 2), &a), &a)
	f.Add(b)
	f.Add(b[:len(b)-1])
	f.Add([]byte{1, 0, 0})
	f.Add([]byte{1, 255, 255, 0})
	f.Fuzz(func(t *testing.T, b []byte) {
		items, n, err := DecodeBatch(b)
		if err != nil {
			return
		}
		again := beginBatch(nil, n)
		for range n {
			var it Item
			if it, items, err = DecodeItem(items); err != nil {
				t.Fatal(err)
			}
			a := Append{Task{string(it.Job), string(it.Task)}, it.Slot, it.Prev, it.Nonce, it.Body}
			if err := a.Validate(); err != nil {
				t.Fatal(err)
			}
			again = AppendItem(again, &a)
		}
		if !bytes.Equal(again, b) {
			t.Errorf("%x became %x", b, again)
		}
	})
}

func FuzzDecodeAnswer(f *testing.F) {
	f.Add(AppendAnswer(nil, AppendResult(nil, Appended, 7, &Digest{1}, 99)), 1)
	f.Add([]byte{1, 0, 0}, 0)
	f.Fuzz(func(t *testing.T, b []byte, n int) {
		if n < 0 || n > MaxBatch {
			return
		}
		results, err := DecodeAnswer(b, n)
		if err == nil && len(results) != n {
			t.Errorf("%d results for %d appends", len(results), n)
		}
	})
}

func FuzzDecodeEntry(f *testing.F) {
	f.Add(AppendEntry(nil, &Entry{Slot: 1, Stored: time.Unix(1, 1), Body: []byte("x")}))
	f.Fuzz(func(t *testing.T, b []byte) {
		e, rest, err := decodeEntry(b)
		if err != nil {
			return
		}
		if again := append(AppendEntry(nil, &e), rest...); !bytes.Equal(again, b) {
			t.Errorf("%x became %x", b, again)
		}
	})
}

func TestAddress(t *testing.T) {
	for in, want := range map[string]string{
		"h:1": "http://h:1", "http://h:1/": "http://h:1", "https://h:1": "https://h:1", "[::1]:80": "http://[::1]:80",
		"": "", "ftp://h": "", "http://h:1/x": "", "http://u@h:1": "", "http://h?x": "", "http://": "",
	} {
		got, err := address(in)
		if got != want || (err == nil) != (want != "") || err != nil && !errors.Is(err, fs.ErrInvalid) {
			t.Errorf("address %q: %q, %v, want %q", in, got, err, want)
		}
	}
	if _, err := New(nil, nil); !errors.Is(err, fs.ErrInvalid) {
		t.Errorf("no address: %v", err)
	}
}

func TestWords(t *testing.T) {
	d := Digest{0xab}
	if got, err := ParseDigest(d.String()); err != nil || got != d {
		t.Errorf("digest %v, %v", got, err)
	}
	for _, s := range []string{"", "xx", "ab"} {
		if _, err := ParseDigest(s); !errors.Is(err, fs.ErrInvalid) {
			t.Errorf("digest %q: %v", s, err)
		}
	}
	if Appended.String() != "appended" || Status(77).String() != "status 77" || Status(0).String() != "status 0" {
		t.Errorf("statuses %v %v %v", Appended, Status(77), Status(0))
	}
	if e := (&Error{Code: CodeCorrupt, Op: "read", Message: "bad"}); e.Error() != "read: bad" {
		t.Error(e)
	}
}
