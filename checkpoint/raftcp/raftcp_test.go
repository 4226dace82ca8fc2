package raftcp_test

import (
	"encoding/json"
	"errors"
	"io/fs"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/snapferry/snapferry/checkpoint"
	"github.com/snapferry/snapferry/checkpoint/raftcp"
	"github.com/snapferry/snapferry/internal/cpwire"
)

// Package server runs the conformance suite over this driver, with a group below it that
// breaks in every way. Here it is what the driver makes of each answer.

var task = checkpoint.TaskID{Job: "orders", Task: "p7"}

func entry() *checkpoint.Entry {
	return &checkpoint.Entry{
		Kind: checkpoint.Claim, Slot: 1, Nonce: checkpoint.Nonce{1}, Epoch: 1,
		Time: time.Date(2026, 11, 30, 12, 0, 0, 0, time.UTC), Body: []byte("{}"),
	}
}

// open returns a driver at a member that answers like this.
func open(t *testing.T, answer http.HandlerFunc) *raftcp.Driver {
	t.Helper()
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set(cpwire.HeaderGroup, "g")
		answer(w, r)
	}))
	t.Cleanup(s.Close)
	d, err := raftcp.Open([]string{s.URL}, &raftcp.Options{Patience: time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	})
	return d
}

// digestOf is the digest under which an entry is stored.
func digestOf(t *testing.T, e *checkpoint.Entry) cpwire.Digest {
	t.Helper()
	if _, err := checkpoint.Encode(e); err != nil {
		t.Fatal(err)
	}
	d, err := cpwire.ParseDigest(e.Digest)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// Each status becomes what checkpoint.Driver promises for it, and nothing else.
func TestAppendStatuses(t *testing.T) {
	own, other := digestOf(t, entry()), cpwire.Digest{9}
	stored := time.Date(2027, 1, 1, 0, 0, 0, 0, time.UTC)
	kinds := []error{checkpoint.ErrConflict, checkpoint.ErrFenced, checkpoint.ErrCorrupt, checkpoint.ErrUnknown, checkpoint.ErrNoEffect}
	cases := []struct {
		name   string
		status cpwire.Status
		slot   uint64
		digest cpwire.Digest
		want   error
	}{
		{"appended", cpwire.Appended, 1, own, nil},
		{"known", cpwire.Known, 1, own, nil},
		{"known with another content", cpwire.Known, 1, other, checkpoint.ErrCorrupt},
		{"appended elsewhere", cpwire.Appended, 2, own, checkpoint.ErrCorrupt},
		{"conflict", cpwire.Conflict, 7, other, checkpoint.ErrConflict},
		{"not on head", cpwire.NotOnHead, 0, cpwire.Digest{}, checkpoint.ErrConflict},
		{"forgotten", cpwire.Forgotten, 5000, other, checkpoint.ErrFenced},
		{"a status of a newer program", 99, 1, own, checkpoint.ErrUnknown},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			d := open(t, func(w http.ResponseWriter, _ *http.Request) {
				_, _ = w.Write(cpwire.AppendAnswer(nil, cpwire.AppendResult(nil, c.status, c.slot, &c.digest, stored.UnixNano())))
			})
			e := entry()
			err := d.Append(t.Context(), task, e)
			if c.want == nil && (err != nil || !e.Stored.Equal(stored) || e.Digest != own.String()) {
				t.Errorf("append: %v, entry %+v", err, e)
			}
			for _, kind := range kinds {
				if errors.Is(err, kind) != (kind == c.want) {
					t.Errorf("append: %v is %v: %v", err, kind, errors.Is(err, kind))
				}
			}
		})
	}
}

// What a group gives is believed only if it is the entry that the group says it is.
func TestEntriesAreChecked(t *testing.T) {
	good := entry()
	data, err := checkpoint.Encode(good)
	if err != nil {
		t.Fatal(err)
	}
	digest := digestOf(t, good)
	damaged := append([]byte{}, data...)
	damaged[len(damaged)-2] ^= 1
	newer := []byte("snapferry entry 99 0 \n")
	cases := []struct {
		name string
		e    cpwire.Entry
		want error
	}{
		{"good", cpwire.Entry{Slot: 1, Digest: digest, Body: data}, nil},
		{"damaged", cpwire.Entry{Slot: 1, Digest: digest, Body: damaged}, checkpoint.ErrCorrupt},
		{"another slot", cpwire.Entry{Slot: 2, Digest: digest, Body: data}, checkpoint.ErrCorrupt},
		{"another digest", cpwire.Entry{Slot: 1, Digest: cpwire.Digest{1}, Body: data}, checkpoint.ErrCorrupt},
		{"of a newer program", cpwire.Entry{Slot: 1, Body: newer}, checkpoint.ErrUnsupported},
		{"nothing", cpwire.Entry{Slot: 1}, checkpoint.ErrCorrupt},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			d := open(t, func(w http.ResponseWriter, _ *http.Request) { _ = cpwire.WriteEntry(w, &c.e) })
			for _, read := range []func() (*checkpoint.Entry, error){
				func() (*checkpoint.Entry, error) { return d.Head(t.Context(), task) },
				func() (*checkpoint.Entry, error) { return d.Get(t.Context(), task, 1) },
			} {
				e, err := read()
				if !errors.Is(err, c.want) || err == nil && (e.Digest != good.Digest || e.Nonce != good.Nonce) {
					t.Errorf("read %+v, %v, want %v", e, err, c.want)
				}
			}
		})
	}
}

// The identity is the group's, so that it outlives every server of it.
func TestInfo(t *testing.T) {
	d := open(t, func(w http.ResponseWriter, r *http.Request) {
		_ = json.NewEncoder(w).Encode(cpwire.OwnStatus{Group: "g"})
	})
	if info, err := d.Info(t.Context()); err != nil || info.ID != "g" {
		t.Errorf("info %+v, %v", info, err)
	}
}

func TestOpenRefuses(t *testing.T) {
	for _, urls := range [][]string{nil, {""}, {"ftp://h:1"}, {"h:1", "http://h:1/path"}} {
		if d, err := raftcp.Open(urls, nil); !errors.Is(err, fs.ErrInvalid) {
			t.Errorf("open %q: %v, %v", urls, d, err)
		}
	}
}
