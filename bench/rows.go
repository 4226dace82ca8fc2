//go:build linux

package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"time"
)

// limit is what a row must reach: a ratio to the reference, a time of its own, a share of
// the bytes that are sent, a number of requests that make objects. What is zero has no limit.
type limit struct {
	ratio float64
	time  time.Duration
	share float64
	puts  int64
}

// memoryLimit holds for every row that runs the command.
const memoryLimit = 300 << 20

// row is one line of the table.
type row struct {
	name    string
	work    string
	limit   limit
	measure func(*bench) ([]sample, error)
}

var rows = []row{
	{"first", "first backup of 32 files of 64 MiB", limit{ratio: 1.6}, (*bench).firstBackup},
	{"unchanged", "the same tree, nothing changed", limit{time: 100 * time.Millisecond}, (*bench).unchanged},
	{"replaced", "the same tree, one 64 MiB file replaced", limit{time: 350 * time.Millisecond}, (*bench).replaced},
	{"restore", "restore of it to an empty directory", limit{ratio: 1.8}, (*bench).restore},
	{"sqlite", "SQLite 1 GiB, 1 % of its pages updated", limit{time: 1200 * time.Millisecond, share: 0.15}, (*bench).sqlite},
	{"bolt", "bbolt 1 GiB, 1,000 random keys updated", limit{share: 0.20}, (*bench).bolt},
	{"small", "50,000 files of 4 KiB, nothing changed", limit{ratio: 4}, (*bench).small},
	{"freeze", "freeze of Pebble 2 GiB, every write synced", limit{time: 50 * time.Millisecond}, (*bench).freezeSync},
	{"freeze-nosync", "the same, no write synced", limit{}, (*bench).freezeNoSync},
	{"s3small", "20,000 files of 2 KiB to S3", limit{ratio: 0.2, puts: 60}, (*bench).smallObjects},
	{"s3up", "32 files of 64 MiB to S3", limit{ratio: 1}, (*bench).largeUp},
	{"s3down", "restore of them from S3", limit{ratio: 1}, (*bench).largeDown},
}

func rowNames() []string {
	var names []string
	for _, r := range rows {
		names = append(names, r.name)
	}
	return names
}

// sample is one run of a row: the command, and the reference beside it where the row
// has one.
type sample struct {
	Ours      usage  `json:"ours"`
	Reference *usage `json:"reference,omitempty"`
	// Share is what was sent of all bytes, where the row has a limit for it.
	Share float64 `json:"share,omitempty"`
	// Puts is how many requests made objects, where they were counted.
	Puts int64 `json:"puts,omitempty"`
}

// result is all samples of one row, and what else there is to say of them.
type result struct {
	row     row
	samples []sample
	note    string
}

// bench is one run of this program. Its trees and servers are made when a row first needs
// them.
type bench struct {
	*config
	ctx     context.Context
	work    string
	log     io.Writer
	command string

	big, many *tree
	repo      string // holds a committed backup of the big tree, and bigCache its identity cache
	bigCache  string
	pebbleDir string
	store     *gateway

	host *host    // of the servers
	env  []string // of commands
	note string   // of the row that is measured
}

func (b *bench) measure() ([]result, error) {
	var results []result
	for _, r := range rows {
		if !slices.Contains(b.rows, r.name) {
			continue
		}
		fmt.Fprintf(b.log, "bench: %s\n", r.work)
		b.note = ""
		samples, err := r.measure(b)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", r.name, err)
		}
		results = append(results, result{r, samples, b.note})
	}
	return results, nil
}

// repeat takes the samples of a row.
func (b *bench) repeat(one func(i int) (sample, error)) ([]sample, error) {
	var samples []sample
	for i := range b.runs {
		s, err := one(i)
		if err != nil {
			return nil, err
		}
		samples = append(samples, s)
	}
	return samples, nil
}

func (b *bench) firstBackup() ([]sample, error) {
	t, err := b.bigTree()
	if err != nil {
		return nil, err
	}
	copied, repo, cache := b.path("copy"), b.path("first-repo"), b.path("first-cache")
	return b.repeat(func(int) (s sample, err error) {
		if s.Reference, err = b.copyAndSync(t.dir, copied); err != nil {
			return s, err
		}
		if err := os.RemoveAll(copied); err != nil {
			return s, err
		}
		rep, err := b.backup(repo, cache, t.dir)
		if err != nil {
			return s, err
		}
		s.Ours = rep.usage
		return s, first(rep.uploaded(t.bytes), os.RemoveAll(repo), os.RemoveAll(cache))
	})
}

func (b *bench) unchanged() ([]sample, error) {
	t, err := b.committed()
	if err != nil {
		return nil, err
	}
	return b.repeat(func(int) (sample, error) {
		rep, err := b.backup(b.repo, b.bigCache, t.dir)
		return sample{Ours: rep.usage}, first(err, rep.uploaded(0))
	})
}

func (b *bench) replaced() ([]sample, error) {
	t, err := b.committed()
	if err != nil {
		return nil, err
	}
	return b.repeat(func(i int) (sample, error) {
		n, err := t.replace(i)
		if err != nil {
			return sample{}, err
		}
		rep, err := b.backup(b.repo, b.bigCache, t.dir)
		return sample{Ours: rep.usage}, first(err, rep.uploaded(n))
	})
}

func (b *bench) restore() ([]sample, error) {
	t, err := b.committed()
	if err != nil {
		return nil, err
	}
	rep, err := b.backup(b.repo, b.bigCache, t.dir) // the newest checkpoint is the tree as it is now
	if err := first(err, rep.uploaded(0)); err != nil {
		return nil, err
	}
	if err := warm(b.repo); err != nil {
		return nil, err
	}
	copied, out := b.path("copy"), b.path("out")
	return b.repeat(func(i int) (s sample, err error) {
		if s.Reference, err = b.copyAndSync(t.dir, copied); err != nil {
			return s, err
		}
		if err := os.RemoveAll(copied); err != nil {
			return s, err
		}
		if s.Ours, err = b.restoreTo(b.repo, out); err != nil {
			return s, err
		}
		if i == 0 {
			err = same(t.dir, filepath.Join(out, storeName))
		}
		return s, first(err, os.RemoveAll(out))
	})
}

func (b *bench) small() ([]sample, error) {
	t, err := b.manyTree()
	if err != nil {
		return nil, err
	}
	repo, cache := b.path("small-repo"), b.path("small-cache")
	rep, err := b.backup(repo, cache, t.dir)
	if err := first(err, rep.uploaded(t.bytes)); err != nil {
		return nil, err
	}
	return b.repeat(func(int) (s sample, err error) {
		if s.Reference, err = b.find(t.dir); err != nil {
			return s, err
		}
		rep, err := b.backup(repo, cache, t.dir)
		s.Ours = rep.usage
		return s, first(err, rep.uploaded(0))
	})
}

// committed returns the big tree after at least one backup of it.
func (b *bench) committed() (*tree, error) {
	t, err := b.bigTree()
	if err != nil || b.repo != "" {
		return t, err
	}
	repo, cache := b.path("repo"), b.path("cache")
	rep, err := b.backup(repo, cache, t.dir)
	if err := first(err, rep.uploaded(t.bytes)); err != nil {
		return nil, err
	}
	b.repo, b.bigCache = repo, cache
	return t, nil
}

func (b *bench) bigTree() (t *tree, err error) {
	if b.big == nil {
		b.big, err = makeTree(b.path("big"), layout{dirs: 1, files: 32, size: scaled(64<<20, b.scale), seed: 1})
	}
	return b.big, err
}

func (b *bench) manyTree() (t *tree, err error) {
	if b.many == nil {
		dirs := scaled(500, b.scale)
		b.many, err = makeTree(b.path("small"), layout{dirs: int(dirs), files: 100, size: 4 << 10, seed: 2})
	}
	return b.many, err
}

func (b *bench) path(name string) string { return filepath.Join(b.work, name) }

// scaled is never nothing.
func scaled(n int64, scale float64) int64 { return max(1, int64(float64(n)*scale)) }

// first returns the first error there is.
func first(errs ...error) error {
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}
