package snapferry

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"

	"github.com/snapferry/snapferry/blob"
	"github.com/snapferry/snapferry/blob/blobtest"
	"github.com/snapferry/snapferry/blob/fsblob"
	"github.com/snapferry/snapferry/checkpoint"
	"github.com/snapferry/snapferry/checkpoint/blobcp"
	"github.com/snapferry/snapferry/source"
)

// leaky is a repository on disk and a directory, since files are what leaks.
type leaky struct {
	t      *testing.T
	dir    string
	faults *blobtest.Faults
	task   *Task
}

func newLeaky(t *testing.T) *leaky {
	d := value(fsblob.Open(filepath.Join(t.TempDir(), "repo"), &fsblob.Options{Create: true}))(t)
	f := blobtest.NewFaults(d, nil)
	blobs := blob.New(f, &blob.Options{Retry: blob.Retry{First: quick, Max: quick}})
	t.Cleanup(func() { must(t, blobs.Close()) })
	info := value(Init(t.Context(), blobs, nil))(t)
	cps := checkpoint.New(blobcp.New(blobs, info.ID), &checkpoint.Options{FirstDelay: quick, MaxDelay: quick})
	l := &leaky{t: t, dir: t.TempDir(), faults: f}
	l.task = value(Open(t.Context(), kvTask, blobs, cps, &Options{PackSize: minPackSize, CacheDir: t.TempDir()}))(t)
	writeDir(t, l.dir, tree{"a": "alpha", "d/b": string(make([]byte, 100<<10)) + "beta", "d/c": "gamma"})
	return l
}

func (l *leaky) commit(ctx context.Context) error {
	_, err := commitStores(ctx, l.task, map[string]source.Source{"kv": source.Dir(l.dir, nil)}, "")
	return err
}

// openFiles tells what the descriptors of this process lead to.
func openFiles(t *testing.T) []string {
	t.Helper()
	var files []string
	for _, e := range value(os.ReadDir("/proc/self/fd"))(t) {
		if to, err := os.Readlink("/proc/self/fd/" + e.Name()); err == nil {
			files = append(files, to)
		}
	}
	slices.Sort(files)
	return files
}

// A commit, restore or snapshot gives back every file and goroutine, however it ends (I10).
func TestNothingLeaks(t *testing.T) {
	for name, run := range map[string]func(l *leaky) error{
		"commit": func(l *leaky) error { return l.commit(l.t.Context()) },
		"restore": func(l *leaky) error {
			must(l.t, l.commit(l.t.Context()))
			_, err := l.task.Restore(l.t.Context(), map[string]string{"kv": filepath.Join(l.t.TempDir(), "kv")}, nil)
			return err
		},
		"commit fails": func(l *leaky) error {
			writeDir(l.t, l.dir, tree{"new": "new"})
			l.faults.FailAt(0, nil)
			return wantFailure(l.commit(l.t.Context()), blobtest.ErrInjected)
		},
		"seal fails": func(l *leaky) error {
			writeDir(l.t, l.dir, tree{"new": "newer"})
			l.faults.FailAt(3, nil)
			return wantFailure(l.commit(l.t.Context()), blobtest.ErrInjected)
		},
		"commit cancelled": func(l *leaky) error {
			ctx, cancel := context.WithCancel(l.t.Context())
			cancel()
			return wantFailure(l.commit(ctx), context.Canceled)
		},
		"restore fails": func(l *leaky) error {
			must(l.t, l.commit(l.t.Context()))
			l.faults.LoseAt(4, nil)
			_, err := l.task.Restore(l.t.Context(), map[string]string{"kv": filepath.Join(l.t.TempDir(), "kv")}, nil)
			return wantFailure(err, blobtest.ErrInjected)
		},
		"snapshot fails": func(l *leaky) error {
			_, err := l.task.Snapshot(l.t.Context(), map[string]source.Source{
				"a": source.Dir(l.dir, nil), "b": source.Dir(filepath.Join(l.dir, "absent"), nil),
			}, nil)
			return wantFailure(err, os.ErrNotExist)
		},
		"abort": func(l *leaky) error {
			p, err := l.task.Snapshot(l.t.Context(), map[string]source.Source{"kv": source.Dir(l.dir, nil)}, nil)
			if err != nil {
				return err
			}
			return p.Abort(l.t.Context())
		},
	} {
		t.Run(name, func(t *testing.T) {
			l := newLeaky(t)
			must(t, run(l)) // what is opened once and for all
			l.faults.Heal()
			routines := goleak.IgnoreCurrent()
			before := openFiles(t)
			for range 3 {
				must(t, run(l))
				l.faults.Heal()
			}
			if after := openFiles(t); len(after) > len(before) {
				t.Errorf("files were left open (-before +after):\n%s", cmp.Diff(before, after))
			}
			goleak.VerifyNone(t, routines)
			must(t, l.commit(t.Context()))
			must(t, l.task.Close())
		})
	}
}

// wantFailure turns the error that a step must have into success.
func wantFailure(err, want error) error {
	if errors.Is(err, want) {
		return nil
	}
	return errors.Join(errors.New("did not fail as it should"), err)
}
