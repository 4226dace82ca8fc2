package checkpoint_test

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/snapferry/snapferry/checkpoint"
	"github.com/snapferry/snapferry/internal/frame"
)

var update = flag.Bool("update", false, "rewrite the golden files")

func sample() *checkpoint.Entry {
	return &checkpoint.Entry{
		Kind: checkpoint.Commit, Slot: 7, Prev: strings.Repeat("0a", 32), Nonce: checkpoint.Nonce{1, 2, 15: 0xff}, Epoch: 3,
		Time: time.Date(2026, 11, 30, 18, 0, 0, 120000000, time.UTC),
		Body: []byte(`{"a": "<&>", "b":[1e400, "` + "\xff" + `"]}`),
	}
}

// The bytes of version 1 never change: an entry of any release is read by all later ones.
func TestGoldenEntry(t *testing.T) {
	const golden = "testdata/entry-v1"
	e := sample()
	data, err := checkpoint.Encode(e)
	if err != nil {
		t.Fatal(err)
	}
	if *update {
		if err := os.WriteFile(golden, data, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(string(data), string(want)); d != "" {
		t.Errorf("encoding differs (-got +want):\n%s", d)
	}
	got, err := checkpoint.Decode(want)
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(got, e); d != "" {
		t.Errorf("decoded entry differs (-got +want):\n%s", d)
	}
}

// An entry comes back as it went in, its body byte for byte.
func TestEntryRoundTrip(t *testing.T) {
	for what, change := range map[string]func(e *checkpoint.Entry){
		"as it is":     func(*checkpoint.Entry) {},
		"first":        func(e *checkpoint.Entry) { e.Slot, e.Prev = 1, "" },
		"no body":      func(e *checkpoint.Entry) { e.Body = nil },
		"null":         func(e *checkpoint.Entry) { e.Body = []byte("null") },
		"unknown kind": func(e *checkpoint.Entry) { e.Kind = "merge" },
		"last slot":    func(e *checkpoint.Entry) { e.Slot, e.Epoch = 1<<64-1, 1<<64-1 },
		"old":          func(e *checkpoint.Entry) { e.Time = time.Time{} },
	} {
		e := sample()
		change(e)
		data, err := checkpoint.Encode(e)
		if err != nil {
			t.Errorf("%s: %v", what, err)
			continue
		}
		got, err := checkpoint.Decode(data)
		if err != nil {
			t.Errorf("%s: %v", what, err)
			continue
		}
		if d := cmp.Diff(got, e); d != "" {
			t.Errorf("%s (-got +want):\n%s", what, d)
		}
	}
}

func TestEncodeRefuses(t *testing.T) {
	for what, change := range map[string]func(e *checkpoint.Entry){
		"no kind":            func(e *checkpoint.Entry) { e.Kind = "" },
		"slot 0":             func(e *checkpoint.Entry) { e.Slot = 0 },
		"no predecessor":     func(e *checkpoint.Entry) { e.Prev = "" },
		"first with one":     func(e *checkpoint.Entry) { e.Slot = 1 },
		"upper-case digest":  func(e *checkpoint.Entry) { e.Prev = strings.ToUpper(e.Prev) },
		"no nonce":           func(e *checkpoint.Entry) { e.Nonce = checkpoint.Nonce{} },
		"epoch 0":            func(e *checkpoint.Entry) { e.Epoch = 0 },
		"year 10000":         func(e *checkpoint.Entry) { e.Time = time.Date(10000, 1, 1, 0, 0, 0, 0, time.UTC) },
		"body not JSON":      func(e *checkpoint.Entry) { e.Body = []byte("{") },
		"body two values":    func(e *checkpoint.Entry) { e.Body = []byte(`1,"slot":9`) },
		"body nested deeply": func(e *checkpoint.Entry) { e.Body = []byte(strings.Repeat("[", 10000) + strings.Repeat("]", 10000)) },
		"body too large":     func(e *checkpoint.Entry) { e.Body = []byte(`"` + strings.Repeat("x", checkpoint.MaxEntrySize) + `"`) },
	} {
		e := sample()
		change(e)
		if _, err := checkpoint.Encode(e); !errors.Is(err, fs.ErrInvalid) {
			t.Errorf("%s: got error %v", what, err)
		}
	}
}

// What Encode would not write is damage, even when the frame is whole. Unknown fields are
// not damage, a newer version is ErrUnsupported.
func TestDecodeRefuses(t *testing.T) {
	good := `{"kind":"claim","slot":1,"prev":"","nonce":"00000000000000000000000000000001","epoch":1,"time":"2026-11-30T18:00:00Z"}`
	for what, c := range map[string]struct {
		payload string
		want    error
	}{
		"good":            {good, nil},
		"unknown field":   {strings.Replace(good, "{", `{"more":[1,2],`, 1), nil},
		"another offset":  {strings.Replace(good, "18:00:00Z", "19:00:00+01:00", 1), nil},
		"no slot":         {strings.Replace(good, `"slot":1,`, "", 1), checkpoint.ErrCorrupt},
		"negative slot":   {strings.Replace(good, `"slot":1`, `"slot":-1`, 1), checkpoint.ErrCorrupt},
		"short nonce":     {strings.Replace(good, "00000000000000000000000000000001", "01", 1), checkpoint.ErrCorrupt},
		"no time":         {strings.Replace(good, "2026", "year", 1), checkpoint.ErrCorrupt},
		"no JSON":         {good[1:], checkpoint.ErrCorrupt},
		"something after": {good + "{}", checkpoint.ErrCorrupt},
	} {
		_, err := checkpoint.Decode(frame.Encode("entry", 1, []byte(c.payload)))
		if !errors.Is(err, c.want) {
			t.Errorf("%s: got error %v, want %v", what, err, c.want)
		}
	}

	for what, c := range map[string]struct {
		data []byte
		want error
	}{
		"empty":         {nil, checkpoint.ErrCorrupt},
		"too large":     {make([]byte, checkpoint.MaxEntrySize+1), checkpoint.ErrCorrupt},
		"another frame": {frame.Encode("bind", 1, []byte(good)), checkpoint.ErrCorrupt},
		"newer version": {frame.Encode("entry", 2, []byte(good)), checkpoint.ErrUnsupported},
	} {
		if _, err := checkpoint.Decode(c.data); !errors.Is(err, c.want) {
			t.Errorf("%s: got error %v, want %v", what, err, c.want)
		}
	}
}

// Any change of an entry's bytes, and any cut, is found.
func TestEntryDamage(t *testing.T) {
	data, err := checkpoint.Encode(sample())
	if err != nil {
		t.Fatal(err)
	}
	for i := range data {
		bad := bytes.Clone(data)
		bad[i] ^= 4
		if e, err := checkpoint.Decode(bad); err == nil {
			t.Errorf("byte %d changed: %+v", i, e)
		}
		if _, err := checkpoint.Decode(data[:i]); !errors.Is(err, checkpoint.ErrCorrupt) {
			t.Errorf("cut at %d: %v", i, err)
		}
	}
}

// Decode never panics, and what it accepts can be written again and means the same.
func FuzzDecode(f *testing.F) {
	data, err := checkpoint.Encode(sample())
	if err != nil {
		f.Fatal(err)
	}
	_, payload, _ := bytes.Cut(data, []byte("\n"))
	f.Add(payload, true)
	f.Add(data, false)
	f.Add([]byte(`{"slot":1,"head":null}`), true)
	f.Fuzz(func(t *testing.T, data []byte, framed bool) {
		if framed {
			data = frame.Encode("entry", 1, data)
		}
		e, err := checkpoint.Decode(data)
		if err != nil {
			return
		}
		again, err := checkpoint.Encode(e)
		if errors.Is(err, fs.ErrInvalid) && len(data) > checkpoint.MaxEntrySize-256 {
			return // times and texts can grow a little when they are written anew
		}
		if err != nil {
			t.Fatalf("encode of what was decoded: %v", err)
		}
		got, err := checkpoint.Decode(again)
		if err != nil {
			t.Fatal(err)
		}
		if d := cmp.Diff(got, e); d != "" {
			t.Fatalf("differs after another round:\n%s", d)
		}
	})
}

func TestValidName(t *testing.T) {
	for _, s := range []string{"a", "A-b_c.9", "-", "_x", strings.Repeat("n", 128), "a.", "a..b"} {
		if err := checkpoint.ValidName(s); err != nil {
			t.Errorf("%q: %v", s, err)
		}
	}
	for _, s := range []string{"", ".", "..", ".a", "a/b", "a b", "é", "a\x00", strings.Repeat("n", 129)} {
		if err := checkpoint.ValidName(s); !errors.Is(err, fs.ErrInvalid) {
			t.Errorf("%q: got error %v", s, err)
		}
	}
	for _, id := range []checkpoint.TaskID{{Job: "a"}, {Task: "b"}, {Job: "a", Task: "b/c"}} {
		if err := id.Validate(); !errors.Is(err, fs.ErrInvalid) {
			t.Errorf("%v: got error %v", id, err)
		}
	}
	if got := fmt.Sprint(checkpoint.TaskID{Job: "orders", Task: "p7"}); got != "orders/p7" {
		t.Errorf("task is %q", got)
	}
}

func TestNonce(t *testing.T) {
	n := checkpoint.NewNonce()
	if n == checkpoint.NewNonce() || n.IsZero() {
		t.Error("nonces are not random")
	}
	got, err := checkpoint.ParseNonce(n.String())
	if err != nil || got != n {
		t.Errorf("parsed %v, %v", got, err)
	}
	for _, s := range []string{"", "00", strings.ToUpper("0000000000000000000000000000000a"), strings.Repeat("g", 32)} {
		if _, err := checkpoint.ParseNonce(s); !errors.Is(err, fs.ErrInvalid) {
			t.Errorf("%q: got error %v", s, err)
		}
	}
}
