package blob_test

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"strings"
	"testing"
	"time"

	"github.com/snapferry/snapferry/blob"
	"github.com/snapferry/snapferry/blob/blobtest"
	"github.com/snapferry/snapferry/blob/memblob"
)

func TestError(t *testing.T) {
	s := blob.New(memblob.New(), &blob.Options{Name: "the store"})
	_, err := s.Stat(t.Context(), "a/b")
	if got, want := err.Error(), "stat a/b: file does not exist"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	if s.String() != "the store" || blob.New(memblob.New(), nil).String() != "mem:" {
		t.Errorf("names: %s, %s", s, blob.New(memblob.New(), nil))
	}
	many := &blob.DeleteError{Errors: map[string]error{"b": fs.ErrPermission, "a": fs.ErrNotExist}}
	if got, want := many.Error(), "a: file does not exist (and 1 more keys failed)"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	if !errors.Is(many, fs.ErrPermission) || !errors.Is(many, fs.ErrNotExist) {
		t.Error("causes are hidden")
	}
}

func TestRetriable(t *testing.T) {
	err := errors.New("x")
	if blob.Retriable(nil) != nil || blob.IsRetriable(err) || blob.IsRetriable(nil) {
		t.Error("retriable by default")
	}
	wrapped := fmt.Errorf("y: %w", blob.Retriable(err))
	if !blob.IsRetriable(wrapped) || !errors.Is(wrapped, err) || blob.Retriable(wrapped) != wrapped {
		t.Errorf("%v", wrapped)
	}
}

func TestInvalidPut(t *testing.T) {
	s := blob.New(memblob.New(), nil)
	if err := s.Put(t.Context(), "k", blob.Body{Size: 1}, blob.PutOptions{}); err == nil {
		t.Error("a body without Open")
	}
	body := blob.Bytes(nil)
	body.Size = -1
	if err := s.Put(t.Context(), "k", body, blob.PutOptions{}); err == nil {
		t.Error("a negative size")
	}
	if err := s.Put(t.Context(), "k", blob.Bytes(nil), blob.PutOptions{TTL: -time.Second}); err == nil {
		t.Error("a negative TTL")
	}
}

// clockless has no Clock, so the store's time is read off a probe.
type clockless struct{ blob.Driver }

func TestNowByProbe(t *testing.T) {
	s := blob.New(clockless{memblob.New()}, nil)
	a, err := s.Now(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	b, err := s.Now(t.Context())
	if err != nil || !b.After(a) {
		t.Fatalf("%v then %v, %v", a, b, err)
	}
	for info := range s.List(t.Context(), "", "") {
		t.Errorf("%s was left behind", info.Key)
	}
}

// careless overwrites what it was to create only.
type careless struct{ blob.Driver }

func (c careless) Put(ctx context.Context, key string, body blob.Body, _ blob.PutOptions) error {
	return c.Driver.Put(ctx, key, body, blob.PutOptions{})
}

// Stores that would break the protocol are found by Probe before it is trusted to them.
func TestProbe(t *testing.T) {
	for name, d := range map[string]blob.Driver{
		"no create-if-absent": careless{memblob.New()},
		"stale list":          blobtest.NewStale(memblob.New(), 1),
		"no start-after":      disorder{memblob.New(), nil},
	} {
		if err := blob.New(d, nil).Probe(t.Context()); !errors.Is(err, blob.ErrUnsupported) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestMaxReadAll(t *testing.T) {
	d := memblob.New()
	s := blob.New(d, nil)
	if err := s.Put(t.Context(), "k", blob.Bytes([]byte("abc")), blob.PutOptions{}); err != nil {
		t.Fatal(err)
	}
	// A length that no object has costs no memory.
	if got, err := s.ReadAll(t.Context(), "k", 0, 1<<40); err != nil || string(got) != "abc" {
		t.Errorf("got %q, %v", got, err)
	}
}

func FuzzValidKey(f *testing.F) {
	f.Add("a/b")
	f.Add("a//../\x00")
	f.Fuzz(func(t *testing.T, key string) {
		if blob.ValidKey(key) != nil {
			return
		}
		if len(key) > blob.MaxKey || strings.Contains("/"+key+"/", "//") || strings.Contains("/"+key+"/", "/../") {
			t.Fatalf("%q is taken for valid", key)
		}
	})
}
