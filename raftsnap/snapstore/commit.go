package snapstore

import (
	"context"
	"errors"
	"fmt"
	"path"
)

// Commit makes a complete receipt a snapshot. It reads what an earlier process left, unless
// Reuse has, as nothing counts that was not verified. ErrIncomplete says that chunks are
// missing, perhaps since just now: Missing names them, and Commit may be called again, as
// after any other error, unless a sync failed: then Close it and Receive once more, which
// keeps what is certain. After success the receipt is closed.
func (r *Receipt) Commit(ctx context.Context) (Held, error) {
	r.life.Lock()
	defer r.life.Unlock()
	err := ErrClosed
	if !r.done {
		var held Held
		if held, err = r.commit(ctx); err == nil {
			return held, nil
		}
		if isSyncError(err) {
			r.fail(err)
		}
	}
	return Held{}, fmt.Errorf("commit receipt of %s: %w", r.m.ID.Short(), err)
}

func (r *Receipt) commit(ctx context.Context) (Held, error) {
	if _, err := r.verifyClaims(ctx, nil); err != nil {
		return Held{}, err
	}
	if err := r.finishEmpty(); err != nil {
		return Held{}, err
	}
	_ = r.flush.Wait() // its errors are kept by fail
	lacking, err := r.lacking()
	if err != nil {
		return Held{}, err
	}
	if lacking > 0 {
		return Held{}, fmt.Errorf("%w: %d chunks are missing", ErrIncomplete, lacking)
	}
	if err := ctx.Err(); err != nil {
		return Held{}, context.Cause(ctx)
	}
	marks, err := r.settleTree()
	if err != nil {
		return Held{}, err
	}
	var held Held
	err = r.durable(func() (err error) {
		held, err = r.s.publish(r.name, r.m, marks)
		return err
	})
	if err != nil {
		return Held{}, err
	}
	// What is left to do is to tidy up, which the next Open does else.
	if err := errors.Join(r.end(), r.s.disk.remove(path.Join(r.m.ID.String(), journalName))); err != nil {
		r.s.note("remove the journal of a snapshot", r.name, err)
	}
	return held, nil
}

// settleTree compares what lies there with the index, and makes the names durable. The
// manifest has been for long; what makes it that of a snapshot is the rename to come.
func (r *Receipt) settleTree() ([]mark, error) {
	disk, data := r.s.disk, path.Join(r.name, dataName)
	all, err := disk.scan(data)
	if err != nil {
		return nil, err
	}
	if err := compare(r.m.Index, all); err != nil {
		return nil, err
	}
	marks := make([]mark, len(all))
	for i, st := range r.byEntry {
		if m, linked := st.source(); linked {
			marks[i] = m // what was written to it since is seen by that
		} else {
			marks[i] = all[i].mark
		}
	}
	err = disk.syncTree(data, r.m.Index, func(dir string) error {
		return r.durable(func() error { return disk.syncDir(dir) })
	})
	if err != nil {
		return nil, err
	}
	if err := disk.writeFile(path.Join(r.name, marksName), encodeMarks(marks), false); err != nil {
		return nil, err
	}
	return marks, r.durable(func() error { return disk.syncDir(r.name) })
}

// finishEmpty makes the files that have no chunk.
func (r *Receipt) finishEmpty() error {
	for _, st := range r.files {
		if len(st.e.Chunks) > 0 {
			continue
		}
		if err := st.finish(); err != nil {
			return err
		}
	}
	return nil
}

// verifyClaims reads the chunks that an earlier process left, and those of files that were
// taken over from another receipt. It returns how many bytes were right; the others are
// missing from then on.
func (r *Receipt) verifyClaims(ctx context.Context, w *Work) (int64, error) {
	var todo []*staged
	for _, st := range r.files {
		if r.count(st, claimed) > 0 {
			todo = append(todo, st)
		}
	}
	right := make([]int64, len(todo))
	err := each(ctx, len(todo), func(ctx context.Context, i int, buf []byte) (err error) {
		right[i], err = r.verifyFile(ctx, r.s.disk.hasher(w, buf), todo[i])
		return err
	})
	var n int64
	for _, bytes := range right {
		n += bytes
	}
	return n, err
}

// count counts the chunks of a file that are in a state.
func (r *Receipt) count(st *staged, want state) (n int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, s := range r.mu.state[st.first : st.first+len(st.e.Chunks)] {
		if s == want {
			n++
		}
	}
	return n
}

func (r *Receipt) verifyFile(ctx context.Context, h *hasher, st *staged) (right int64, err error) {
	f, err := st.borrow()
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, st.giveBack()) }()
	for j := range st.e.Chunks {
		k, c := uint32(st.first+j), &st.e.Chunks[j]
		if !r.takeClaim(k) {
			continue
		}
		d, err := h.chunk(ctx, f, st.name, c.Offset, c.Length)
		if err != nil && !errors.Is(err, ErrCorrupt) {
			r.unclaim(k)
			return right, err
		}
		ok := err == nil && d == c.Digest
		if err := r.settle(st, k, ok); err != nil {
			return right, err
		}
		if ok {
			right += int64(c.Length)
		}
	}
	return right, nil
}

// takeClaim reserves a claimed chunk for the caller, who settles it.
func (r *Receipt) takeClaim(k uint32) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.mu.state[k] != claimed {
		return false
	}
	r.mu.state[k] = writing
	return true
}

// unclaim gives a claimed chunk back unread.
func (r *Receipt) unclaim(k uint32) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.mu.state[k] = claimed
}

// Close ends the receipt and keeps what it has for a later one of the same snapshot. After
// Commit or Drop it does nothing.
func (r *Receipt) Close() error {
	r.life.Lock()
	defer r.life.Unlock()
	if r.done {
		return nil
	}
	if err := r.end(); err != nil {
		return fmt.Errorf("close receipt of %s: %w", r.m.ID.Short(), err)
	}
	return nil
}

// Drop ends the receipt and removes what it has. After Commit it does nothing.
func (r *Receipt) Drop() error {
	r.life.Lock()
	defer r.life.Unlock()
	if r.done {
		return nil
	}
	err := r.shut()
	err = errors.Join(err, r.s.disk.discard(r.name))
	r.s.yield(r.m.ID)
	if err != nil {
		return fmt.Errorf("drop receipt of %s: %w", r.m.ID.Short(), err)
	}
	return nil
}

// end closes all files and lets others receive the snapshot.
func (r *Receipt) end() error {
	err := r.shut()
	r.s.yield(r.m.ID)
	return err
}

func (r *Receipt) shut() error {
	r.done = true
	_ = r.flush.Wait() // its errors matter to Commit only
	err := r.journal.Close()
	for _, st := range r.files {
		err = errors.Join(err, st.close())
	}
	return err
}
