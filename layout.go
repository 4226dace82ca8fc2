package snapferry

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"strconv"
	"strings"
	"time"

	"github.com/snapferry/snapferry/blob"
	"github.com/snapferry/snapferry/internal/frame"
	"github.com/snapferry/snapferry/internal/sentinel"
)

// Names in a repository; docs/format.md is normative. All are write-once.
const (
	repoKey     = "snapferry.json"
	repoFormat  = 1
	tasksPrefix = "t/"
	probePrefix = "snapferry-probe-" // as blob.Store.Now names its own
	minPackSize = 64 << 10
	maxPackSize = 64 << 20
	maxSmall    = 64 << 10 // entries and other conditional objects
)

func taskPrefix(id TaskID) string { return tasksPrefix + id.Job + "/" + id.Task + "/" }
func bindKey(id TaskID) string    { return taskPrefix(id) + "bind" }
func blobPrefix(id TaskID) string { return taskPrefix(id) + "b/" }

// attemptOf returns the attempt directory of a blob key of this task.
func attemptOf(id TaskID, key string) (string, bool) {
	rest, ok := strings.CutPrefix(key, blobPrefix(id))
	if !ok {
		return "", false
	}
	dir, _, ok := strings.Cut(rest, "/")
	return dir, ok
}

// marker names a snapshot index: where its root lies, how long it is, its digest.
type marker struct {
	Key    string `json:"key"`
	Size   int64  `json:"size"`
	Digest string `json:"digest"`
}

func (m marker) String() string { return fmt.Sprintf("%s#%d#%s", m.Key, m.Size, m.Digest) }

func parseMarker(s string) (marker, error) {
	f := strings.Split(s, "#")
	if len(f) == 3 {
		if n, err := strconv.ParseInt(f[1], 10, 64); err == nil && n > 0 {
			return marker{Key: f[0], Size: n, Digest: f[2]}, nil
		}
	}
	return marker{}, fmt.Errorf("%q is not a snapshot marker", s)
}

// RepoInfo identifies a repository.
type RepoInfo struct {
	ID      string    `json:"id"`
	Format  int       `json:"format"`
	Created time.Time `json:"created"`
	// ExpireUnsealed says that the store removes blobs by itself that no checkpoint came
	// to name in time (P7); without it only the sweep does.
	ExpireUnsealed bool `json:"expire_unsealed,omitempty"`
	// NoFencing says that the store does not keep two owners of a task apart, and that
	// the repository was made nevertheless.
	NoFencing bool `json:"no_fencing,omitempty"`
}

// InitOptions adjusts Init. The zero value and nil are valid.
type InitOptions struct {
	// ExpireUnsealed makes the store remove what is uploaded and not sealed in time
	// (P7). A store that cannot is ErrUnsupported; if only the permission is missing, the
	// repository goes without and Warn is told.
	ExpireUnsealed bool
	// UnsafeNoFencing accepts a store that does not keep two owners of a task apart: then
	// the caller has to, or they overwrite each other's checkpoints.
	UnsafeNoFencing bool
	// Warn is told of what is not as it should be, when the repository is made all the
	// same.
	Warn func(text string)
}

func (o *InitOptions) withDefaults() InitOptions {
	var v InitOptions
	if o != nil {
		v = *o
	}
	if v.Warn == nil {
		v.Warn = func(string) {}
	}
	return v
}

// ReadInfo reads which repository lies in blobs: ErrNotFound if none does,
// ErrUnsupported if its format is newer than this program.
func ReadInfo(ctx context.Context, blobs *blob.Store) (RepoInfo, error) {
	data, err := blobs.ReadAll(ctx, repoKey, 0, maxSmall)
	if err != nil {
		return RepoInfo{}, wrap("open", blobs.String(), notFound(err, "no repository here"))
	}
	payload, err := frame.Decode("repo", repoFormat, data)
	if err != nil {
		return RepoInfo{}, wrap("open", repoKey, err)
	}
	var info RepoInfo
	if err := json.Unmarshal(payload, &info); err != nil || info.ID == "" {
		return RepoInfo{}, wrap("open", repoKey, fmt.Errorf("%w: no repository id", sentinel.Corrupt))
	}
	if info.Format > repoFormat {
		return RepoInfo{}, wrap("open", repoKey, fmt.Errorf("repository has format %d, this program knows %d; use a newer one: %w", info.Format, repoFormat, ErrUnsupported))
	}
	return info, nil
}

// Init makes a repository in blobs after it has probed that the store gives what the
// commit protocol needs. It fails with fs.ErrExist if there is one already.
func Init(ctx context.Context, blobs *blob.Store, opts *InitOptions) (RepoInfo, error) {
	o := opts.withDefaults()
	info := RepoInfo{ID: randomHex(16), Format: repoFormat, Created: time.Now().UTC().Truncate(time.Second)}
	if err := info.prepare(ctx, blobs, &o); err != nil {
		return RepoInfo{}, wrap("init", blobs.String(), err)
	}
	payload, err := json.Marshal(info)
	if err != nil {
		return RepoInfo{}, wrap("init", blobs.String(), err)
	}
	err = blobs.Put(ctx, repoKey, blob.Bytes(frame.Encode("repo", repoFormat, payload)), blob.PutOptions{IfAbsent: true})
	if errors.Is(err, fs.ErrExist) {
		// Perhaps by this very call, whose first answer was lost.
		if got, rerr := ReadInfo(ctx, blobs); rerr == nil && got.ID == info.ID {
			return info, nil
		}
		return RepoInfo{}, wrap("init", blobs.String(), fmt.Errorf("there is a repository already: %w", fs.ErrExist))
	}
	return info, wrap("init", blobs.String(), err)
}

// prepare makes the store ready and notes what of it concerns later owners.
func (r *RepoInfo) prepare(ctx context.Context, blobs *blob.Store, o *InitOptions) error {
	if err := mustBeEmpty(ctx, blobs); err != nil {
		return err
	}
	err := blobs.Probe(ctx)
	if o.UnsafeNoFencing && errors.Is(err, blob.ErrUnfenced) {
		o.Warn(err.Error())
		r.NoFencing, err = true, nil
	}
	if err != nil || !o.ExpireUnsealed {
		return err
	}
	err = blobs.InstallExpiry(ctx, unsealedTTL)
	if errors.Is(err, fs.ErrPermission) {
		o.Warn(fmt.Sprintf("unsealed blobs are left to the sweep: %v", err))
		return nil
	}
	r.ExpireUnsealed = err == nil
	return err
}

// Ensure returns the repository in blobs, and makes it if there is none.
func Ensure(ctx context.Context, blobs *blob.Store) (info RepoInfo, created bool, err error) {
	info, err = ReadInfo(ctx, blobs)
	if !errors.Is(err, ErrNotFound) {
		return info, false, err
	}
	info, err = Init(ctx, blobs, nil)
	if errors.Is(err, fs.ErrExist) { // somebody else was quicker
		info, err = ReadInfo(ctx, blobs)
		return info, false, err
	}
	return info, err == nil, err
}

// mustBeEmpty refuses to make a repository over what is there: over the data of one whose
// identity was lost, above all, which a new identity would make unreachable.
func mustBeEmpty(ctx context.Context, blobs *blob.Store) error {
	for info, err := range blobs.List(ctx, "", "") {
		switch {
		case err != nil:
			return err
		case strings.HasPrefix(info.Key, probePrefix):
		case info.Key == repoKey:
			return fmt.Errorf("there is a repository already: %w", fs.ErrExist)
		case strings.HasPrefix(info.Key, tasksPrefix):
			return fmt.Errorf("%w: %s is missing, but the data of a repository is there; put it back from a copy", sentinel.Corrupt, repoKey)
		default:
			return fmt.Errorf("there are other things here (%s): choose an empty place", info.Key)
		}
	}
	return nil
}

// bind says which checkpoint store holds a task's log. Without it two owners with
// different stores would each delete the other's blobs.
type bind struct {
	Checkpoints string `json:"checkpoints"`
	Mode        string `json:"mode"` // internal or external publishing (P6)
}

const (
	modeInternal = "internal"
	modeExternal = "external"
)

func readBind(ctx context.Context, blobs *blob.Store, id TaskID) (bind, error) {
	var b bind
	data, err := blobs.ReadAll(ctx, bindKey(id), 0, maxSmall)
	if err != nil {
		return b, err
	}
	payload, err := frame.Decode("bind", 1, data)
	if err != nil {
		return b, fmt.Errorf("%s: %w", bindKey(id), err)
	}
	if err := json.Unmarshal(payload, &b); err != nil {
		return b, fmt.Errorf("%s: %w: %v", bindKey(id), sentinel.Corrupt, err)
	}
	return b, nil
}

// ensureBind binds the task to want, or checks that it is bound so.
func ensureBind(ctx context.Context, blobs *blob.Store, id TaskID, want bind) error {
	payload, err := json.Marshal(want)
	if err != nil {
		return err
	}
	err = blobs.Put(ctx, bindKey(id), blob.Bytes(frame.Encode("bind", 1, payload)), blob.PutOptions{IfAbsent: true})
	if err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	return checkBind(ctx, blobs, id, want)
}

// checkBind fails unless the task is bound to want; an empty mode fits any.
func checkBind(ctx context.Context, blobs *blob.Store, id TaskID, want bind) error {
	got, err := readBind(ctx, blobs, id)
	if err != nil {
		return err
	}
	if got.Checkpoints != want.Checkpoints {
		return fmt.Errorf("task %s keeps its checkpoints in %s, not in %s; open it with that store: %w", id, got.Checkpoints, want.Checkpoints, ErrForeign)
	}
	if want.Mode != "" && got.Mode != want.Mode {
		return fmt.Errorf("task %s publishes its checkpoints in %s mode, not %s: %w", id, got.Mode, want.Mode, ErrConflict)
	}
	return nil
}

func randomHex(n int) string {
	b := make([]byte, n)
	_, _ = rand.Read(b) // never fails, see crypto/rand
	return hex.EncodeToString(b)
}
