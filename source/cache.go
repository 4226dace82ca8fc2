package source

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"github.com/zeebo/blake3"
)

const (
	// minGranularity is the least step of time that is believed of any file system.
	// Kernels with fine-grained times measure far less, but stamp a file that nobody
	// looked at with the time of the last tick, and a tick may last 10 ms.
	minGranularity = 10 * time.Millisecond

	// maxWait bounds WaitSettled. A file system that needs a longer guard has times
	// in whole seconds; its young files are simply read again next time.
	maxWait = time.Second
)

// A Cache remembers, for one store on this host, what was read from a file under
// which Identity. It claims that a file is unchanged only on the proof of rules S3
// and S4; whatever it does not know costs reading and never correctness (I5).
//
// The order of calls is OpenCache after Freeze, Lookup for each entry, and, if there
// is anything to read: Begin, then Image.Open, the reading and File.Check, then
// Record; at the end Save. Files that are not Settled are best left to the end, after
// WaitSettled. Lookup, Settled and Record may be called from many goroutines.
//
// The content that is recorded is opaque. Equal identities say that bytes, mode,
// owner and extended attributes are as they were when the content was recorded; for
// an Immutable entry they speak of the bytes only.
//
// On file systems that no test has shown to be safe, and when no probe file can be
// made, a cache is always empty.
type Cache struct {
	dir  string // empty if this image is not cached
	file string
	img  Image

	scope      [32]byte
	generation generation
	old        table
	loaded     Timespec // the file system's time at load
	hits       atomic.Int64
	probe      *probe

	// mu guards what follows.
	mu    sync.Mutex
	begun Timespec            // probe P; zero before Begin
	guard time.Duration       // rule S4
	late  map[string]Timespec // the later probe of entries that were waited for
	fresh map[string]record
}

// OpenCache loads the cache that the directory dir keeps for the store of an image.
// A file that is damaged, of another boot, file system or root directory, is the
// same as none.
func OpenCache(dir string, img Image) (*Cache, error) {
	c := &Cache{img: img}
	if dir == "" || img.CacheKey() == "" {
		return c, nil
	}
	vol, ok := volumeOf(img.ProbeDir())
	if !ok {
		return c, nil
	}
	c.probe = newProbe(vol.device, img.ProbeDir(), dir)
	loaded, err := c.probe.now()
	if err != nil {
		return c, nil // nowhere to learn the time: nothing can be proved
	}
	c.dir, c.file, c.loaded = dir, cacheFile(dir, img.CacheKey()), loaded
	if c.scope, err = vol.scope(img.CacheKey()); err == nil {
		err = c.load()
	}
	if err != nil {
		return nil, fmt.Errorf("open identity cache of %s: %w", img.CacheKey(), errors.Join(err, c.Close()))
	}
	return c, nil
}

func (c *Cache) load() error {
	data, err := os.ReadFile(c.file)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	all, ok := parseTable(data)
	if ok {
		c.generation = all.generation
	}
	if ok && all.scope == c.scope {
		c.old = all
	}
	return nil
}

// cacheFile returns the path of the file for a key.
func cacheFile(dir, key string) string {
	sum := blake3.Sum256([]byte(key))
	return filepath.Join(dir, hex.EncodeToString(sum[:16])+".idc")
}

// Lookup returns the content that was recorded for an entry whose identity is still
// the same. Entries that are not older than the moment the cache was loaded, by the
// clock of their file system, are not trusted (rule S4).
func (c *Cache) Lookup(e *Entry) (content [32]byte, ok bool) {
	if !c.caches(e) || youngest(e.Identity).Compare(c.loaded) >= 0 {
		return content, false
	}
	r, ok := c.old.find(e.Path)
	if !ok || r.id != e.Identity || r.immutable != e.Immutable {
		return content, false
	}
	c.hits.Add(1)
	return r.content, true
}

// caches reports whether e may be in this cache at all. Without ctime only the time
// of birth tells an inode from a later one of the same number.
func (c *Cache) caches(e *Entry) bool {
	return c.dir != "" && !e.Fresh && (!e.Immutable || !e.Identity.BTime.IsZero())
}

// youngest returns the later of mtime and ctime.
func youngest(id Identity) Timespec {
	if id.MTime.Compare(id.CTime) > 0 {
		return id.MTime
	}
	return id.CTime
}

// Begin takes the probe that Record judges files by (rule S3: before the flush that
// Open makes). Files opened before Begin must not be recorded. Calls after the first
// do nothing.
func (c *Cache) Begin() error {
	if c.dir == "" {
		return nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.begun.IsZero() {
		return nil
	}
	step, err := c.probe.granularity()
	if err != nil {
		return fmt.Errorf("probe the time of %s: %w", c.img.ProbeDir(), err)
	}
	begun, err := c.probe.now()
	if err != nil {
		return fmt.Errorf("probe the time of %s: %w", c.img.ProbeDir(), err)
	}
	c.guard = 2 * max(step, minGranularity)
	c.begun = begun
	c.late, c.fresh = map[string]Timespec{}, map[string]record{}
	return nil
}

// Settled reports whether e could be recorded if it were opened now, or whether
// waiting would not make it so.
func (c *Cache) Settled(e *Entry) bool {
	if !c.caches(e) {
		return true
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.begun.IsZero() || !c.worthWaiting(e) || old(e.Identity, c.begun, c.guard)
}

// worthWaiting is false for times so far ahead that they were set, not stamped.
func (c *Cache) worthWaiting(e *Entry) bool {
	return c.guard <= maxWait && youngest(e.Identity).Compare(c.begun.add(maxWait)) <= 0
}

// old reports whether a state of a file lies before probe p by the guard.
func old(id Identity, p Timespec, guard time.Duration) bool {
	return youngest(id).add(guard).Compare(p) < 0
}

// WaitSettled waits, by the clock of the file system, until the entries are old
// enough to be recorded, and takes a new probe for them. Open them after it returns.
// It waits about two steps of that clock, and about a second at most.
func (c *Cache) WaitSettled(ctx context.Context, entries []*Entry) error {
	if c.dir == "" {
		return nil
	}
	wait, newest := c.toWaitFor(entries)
	if len(wait) == 0 {
		return nil
	}
	p, err := c.probe.until(ctx, newest)
	if err != nil {
		return fmt.Errorf("wait for young files: %w", err)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, e := range wait {
		c.late[e.Path] = p
	}
	return nil
}

// toWaitFor returns the entries that waiting helps, and the time to wait for.
func (c *Cache) toWaitFor(entries []*Entry) (wait []*Entry, newest Timespec) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.begun.IsZero() {
		return nil, newest
	}
	for _, e := range entries {
		if !c.caches(e) || !c.worthWaiting(e) {
			continue
		}
		wait = append(wait, e)
		if t := youngest(e.Identity).add(c.guard); t.Compare(newest) > 0 {
			newest = t
		}
	}
	return wait, newest
}

// Record remembers the content that was read from the file at path under identity
// id, which is that of File.Identity, after File.Check agreed. It is kept only if the
// file was older than the probe by the guard.
func (c *Cache) Record(path string, id Identity, content [32]byte) {
	e := findEntry(c.img.Entries(), path)
	if e == nil || !c.caches(e) {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	p, ok := c.late[path]
	if !ok {
		p = c.begun
	}
	if p.IsZero() || !old(id, p, c.guard) {
		return
	}
	c.fresh[path] = record{id: id, immutable: e.Immutable, content: content}
}

// Close gives back what Begin and OpenCache took: the probe file. Nothing can be recorded
// afterwards; Save still works.
func (c *Cache) Close() error {
	if c.probe == nil {
		return nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.probe.close()
}

// Save replaces the file of the cache by what is known of the files of this image.
// It writes nothing if nothing was recorded and little became stale, nor if Forget
// was called since the cache was loaded.
func (c *Cache) Save() error {
	if c.dir == "" {
		return nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.fresh) == 0 && int(c.hits.Load()) >= c.old.len()/2 {
		return nil
	}
	data := encodeTable(c.scope, c.generation, c.merged())
	err := locked(c.dir, func() error {
		if generationOf(c.file) != c.generation {
			return nil
		}
		return replace(c.file, data)
	})
	if err != nil {
		return fmt.Errorf("save identity cache: %w", err)
	}
	return nil
}

// merged returns what to write, sorted by path.
func (c *Cache) merged() []named {
	entries := c.img.Entries()
	list := make([]named, 0, len(c.fresh)+c.old.len())
	for i := range entries {
		e := &entries[i]
		r, ok := c.fresh[e.Path]
		if !ok {
			r, ok = c.old.find(e.Path)
			ok = ok && r.id == e.Identity && r.immutable == e.Immutable
		}
		if ok {
			list = append(list, named{e.Path, r})
		}
	}
	return list
}

// Forget empties the cache that dir keeps for a store and begins a new incarnation,
// so that a backup which runs meanwhile cannot bring the old one back. Restore and
// install call it with the absolute path of the store.
func Forget(dir, cacheKey string) error {
	if dir == "" {
		return nil
	}
	if resolved, err := filepath.EvalSymlinks(cacheKey); err == nil {
		cacheKey = resolved
	}
	err := locked(dir, func() error {
		return replace(cacheFile(dir, cacheKey), encodeTable([32]byte{}, newGeneration(), nil))
	})
	if err != nil {
		return fmt.Errorf("forget identity cache of %s: %w", cacheKey, err)
	}
	return nil
}
