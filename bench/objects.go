//go:build linux

package main

import (
	"errors"
	"os"
	"path/filepath"
)

// smallObjects is the first backup of many small files to S3. The requests are counted in a
// backup of its own, since the counting takes time.
func (b *bench) smallObjects() ([]sample, error) {
	g, err := b.gateway()
	if err != nil {
		return nil, err
	}
	t, err := makeTree(b.path("objects"), layout{dirs: int(scaled(200, b.scale)), files: 100, size: 2 << 10, seed: 3})
	if err != nil {
		return nil, err
	}
	puts, err := b.countPuts(g, t)
	if err != nil {
		return nil, err
	}
	samples, err := b.uploads(g, t, "rclone-small", rcloneSmall)
	for i := range samples {
		samples[i].Puts = puts
	}
	return samples, err
}

// uploads measures first backups of a tree beside copies of it by rclone to a prefix.
func (b *bench) uploads(g *gateway, t *tree, prefix string, settings []string) ([]sample, error) {
	r, err := b.rival(t.dir, g.remote(prefix), func() error { return g.remove(prefix) }, settings)
	if err != nil {
		return nil, err
	}
	return b.repeat(func(int) (s sample, err error) {
		if s.Reference, err = r.sample(); err != nil {
			return s, err
		}
		s.Ours, err = b.upload(g, g.Endpoint, t)
		return s, errors.Join(err, g.remove(uploadPrefix))
	})
}

// uploadPrefix is where upload puts a repository.
const uploadPrefix = "upload"

// upload makes the first backup of a tree.
func (b *bench) upload(g *gateway, endpoint string, t *tree) (usage, error) {
	cache := b.path("upload-cache")
	rep, err := b.backup(g.repo(endpoint, uploadPrefix), cache, t.dir)
	return rep.usage, first(err, rep.uploaded(t.bytes), os.RemoveAll(cache))
}

func (b *bench) countPuts(g *gateway, t *tree) (puts int64, err error) {
	c, err := newCounter(g.Endpoint)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, c.close(), g.remove(uploadPrefix)) }()
	if _, err = b.upload(g, c.endpoint, t); err == nil && c.puts.Load() == 0 {
		err = errors.New("the proxy has counted nothing")
	}
	return c.puts.Load(), err
}

// largeUp is the first backup of the big tree to S3.
func (b *bench) largeUp() ([]sample, error) {
	g, err := b.gateway()
	if err != nil {
		return nil, err
	}
	t, err := b.bigTree()
	if err != nil {
		return nil, err
	}
	return b.uploads(g, t, "rclone-up", rcloneUp)
}

// largeDown restores the big tree from S3. rclone fetches the same files as objects of their
// own, and leaves them in the page cache; the command syncs what it restores.
func (b *bench) largeDown() ([]sample, error) {
	g, err := b.gateway()
	if err != nil {
		return nil, err
	}
	t, err := b.bigTree()
	if err != nil {
		return nil, err
	}
	if _, err := b.upload(g, g.Endpoint, t); err != nil {
		return nil, err
	}
	if b.lacksRclone() == nil {
		if _, err := b.runRclone(t.dir, g.remote("rclone-down"), rcloneUp[0]); err != nil {
			return nil, err
		}
	}
	copied, out := b.path("copy"), b.path("out")
	r, err := b.rival(g.remote("rclone-down"), copied, func() error { return os.RemoveAll(copied) }, rcloneDown)
	if err != nil {
		return nil, err
	}
	samples, err := b.repeat(func(i int) (s sample, err error) {
		if s.Reference, err = r.sample(); err != nil {
			return s, err
		}
		if s.Ours, err = b.restoreTo(g.repo(g.Endpoint, uploadPrefix), out); err != nil {
			return s, err
		}
		if i == 0 {
			err = same(t.dir, filepath.Join(out, storeName))
		}
		return s, first(err, os.RemoveAll(out))
	})
	return samples, first(err, g.remove(uploadPrefix), g.remove("rclone-down"))
}
