package frame

import (
	"bytes"
	"errors"
	"testing"

	"github.com/snapferry/snapferry/internal/sentinel"
)

func TestRoundTrip(t *testing.T) {
	for _, p := range [][]byte{nil, []byte("{}"), bytes.Repeat([]byte("x\n"), 1000)} {
		got, err := Decode("entry", 1, Encode("entry", 1, p))
		if err != nil || !bytes.Equal(got, p) {
			t.Fatalf("Decode(Encode(%d bytes)) = %d bytes, %v", len(p), len(got), err)
		}
	}
}

// Every single-byte change and every truncation is found.
func TestDamage(t *testing.T) {
	good := Encode("entry", 1, []byte(`{"a":1}`))
	for i := range good {
		bad := bytes.Clone(good)
		bad[i] ^= 1
		if _, err := Decode("entry", 1, bad); err == nil {
			t.Errorf("byte %d changed: no error", i)
		}
		if _, err := Decode("entry", 1, good[:i]); !errors.Is(err, sentinel.Corrupt) {
			t.Errorf("cut at %d: %v", i, err)
		}
	}
}

func TestNewerVersion(t *testing.T) {
	if _, err := Decode("entry", 1, Encode("entry", 2, nil)); !errors.Is(err, sentinel.Unsupported) {
		t.Fatalf("got %v", err)
	}
	if _, err := Decode("entry", 1, Encode("bind", 1, nil)); !errors.Is(err, sentinel.Corrupt) {
		t.Fatalf("other kind: got %v", err)
	}
}

func FuzzDecode(f *testing.F) {
	f.Add(Encode("entry", 1, []byte("{}")))
	f.Add([]byte("snapferry entry 1 9999999999 00\n"))
	f.Fuzz(func(t *testing.T, data []byte) {
		if p, err := Decode("entry", 1, data); err == nil && !bytes.Equal(Encode("entry", 1, p), data) {
			t.Fatal("accepted bytes that Encode would not write")
		}
	})
}
