package tasklog

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"strings"
	"time"

	"github.com/cockroachdb/pebble/v2"
	"github.com/zeebo/blake3"

	"github.com/snapferry/snapferry/checkpoint"
	"github.com/snapferry/snapferry/internal/cpwire"
)

// Head returns the newest entry of a task, with its body if wanted. A task without a log is
// fs.ErrNotExist.
func (m *Machine) Head(task cpwire.Task, body bool) (e cpwire.Entry, err error) {
	err = m.snapshot(func(s *pebble.Snapshot) error {
		key := []byte(task.String())
		h, err := readHead(s, key)
		if err != nil {
			return notExist(err)
		}
		e, err = readEntry(s, key, h.slot, body)
		return err
	})
	return e, wrap("read head of", task, err)
}

// Get returns the entry at a slot with its body. One that is not kept is fs.ErrNotExist.
func (m *Machine) Get(task cpwire.Task, slot uint64) (e cpwire.Entry, err error) {
	err = m.snapshot(func(s *pebble.Snapshot) error {
		key := []byte(task.String())
		h, err := readHead(s, key)
		if err != nil {
			return notExist(err)
		}
		if slot > h.slot || slot < h.oldest() {
			return fs.ErrNotExist
		}
		e, err = readEntry(s, key, slot, true)
		return err
	})
	return e, wrap("read entry of", task, err)
}

// History returns the entries above slot after as far as they are remembered, oldest
// first, with their bodies where these are wanted and kept.
func (m *Machine) History(task cpwire.Task, after uint64, bodies bool) (es []cpwire.Entry, err error) {
	err = m.snapshot(func(s *pebble.Snapshot) error {
		key := []byte(task.String())
		h, err := readHead(s, key)
		if err != nil {
			return notExist(err)
		}
		from := after + 1
		if h.slot > cpwire.KeptRecords {
			from = max(from, h.slot-cpwire.KeptRecords+1)
		}
		for slot := from; slot <= h.slot; slot++ {
			e, err := readEntry(s, key, slot, bodies && slot >= h.oldest())
			if err != nil {
				return err
			}
			es = append(es, e)
		}
		return nil
	})
	return es, wrap("read history of", task, err)
}

// Tasks returns up to limit tasks that have a log and come after the given one, in the
// order of the bytes of "job/task".
func (m *Machine) Tasks(after cpwire.Task, limit int) (tasks []cpwire.Task, err error) {
	lower := []byte{prefixHead}
	if after != (cpwire.Task{}) {
		lower = append(appendKey(nil, prefixHead, []byte(after.String())), 0)
	}
	err = m.read(func(r pebble.Reader) error {
		return scan(r, lower, []byte{prefixHead + 1}, func(k, _ []byte) (bool, error) {
			job, name, ok := strings.Cut(string(k[1:]), "/")
			if !ok {
				return false, fmt.Errorf("%w: key %q", checkpoint.ErrCorrupt, k)
			}
			tasks = append(tasks, cpwire.Task{Job: job, Name: name})
			return len(tasks) < limit, nil
		})
	})
	if err != nil {
		return nil, fmt.Errorf("list tasks: %w", err)
	}
	return tasks, nil
}

// Await returns when the newest entry of a task has a slot above after, or ctx ends.
func (m *Machine) Await(ctx context.Context, task cpwire.Task, after uint64) error {
	for {
		changed, forget := m.watch.add(task.String()) // before the look, or a change between is missed
		e, err := m.Head(task, false)
		if err == nil && e.Slot > after || err != nil && !errors.Is(err, fs.ErrNotExist) {
			forget()
			return err
		}
		select {
		case <-changed:
		case <-ctx.Done():
			forget()
			return ctx.Err()
		}
	}
}

// Sum returns a digest of the whole state and the index that it is of. Members whose
// states are of one index have the same.
func (m *Machine) Sum() (sum cpwire.Digest, applied uint64, err error) {
	err = m.snapshot(func(s *pebble.Snapshot) error {
		if applied, err = readApplied(s); err != nil {
			return err
		}
		h := blake3.New()
		var n [8]byte
		err := scan(s, nil, nil, func(k, v []byte) (bool, error) {
			binary.LittleEndian.PutUint32(n[:], uint32(len(k)))
			binary.LittleEndian.PutUint32(n[4:], uint32(len(v)))
			for _, b := range [][]byte{n[:], k, v} {
				if _, err := h.Write(b); err != nil {
					return false, err
				}
			}
			return true, nil
		})
		h.Sum(sum[:0])
		return err
	})
	if err != nil {
		return cpwire.Digest{}, 0, fmt.Errorf("sum up state: %w", err)
	}
	return sum, applied, nil
}

// snapshot calls f with the state of one index.
func (m *Machine) snapshot(f func(s *pebble.Snapshot) error) error {
	m.mu.RLock()
	defer m.mu.RUnlock()
	if m.mu.db == nil {
		return checkpoint.ErrClosed
	}
	s := m.mu.db.NewSnapshot()
	return errors.Join(f(s), s.Close())
}

// scan calls f for the keys from lower up to but without upper, until it wants no more.
func scan(r pebble.Reader, lower, upper []byte, f func(k, v []byte) (bool, error)) error {
	it, err := r.NewIter(&pebble.IterOptions{LowerBound: lower, UpperBound: upper})
	if err != nil {
		return err
	}
	for ok := it.First(); ok && err == nil; ok = ok && it.Next() {
		v, verr := it.ValueAndErr()
		if err = verr; err == nil {
			ok, err = f(it.Key(), v)
		}
	}
	return errors.Join(err, it.Close())
}

func readHead(r pebble.Reader, key []byte) (h head, err error) {
	v, closer, err := r.Get(appendKey(nil, prefixHead, key))
	if err != nil {
		return head{}, err
	}
	h, err = decodeHead(v)
	return h, errors.Join(err, closer.Close())
}

func readRecord(r pebble.Reader, key []byte, slot uint64) (rec record, err error) {
	v, closer, err := r.Get(appendRecordKey(nil, key, slot))
	if err != nil {
		return record{}, err
	}
	rec, err = decodeRecord(v)
	return rec, errors.Join(err, closer.Close())
}

// readEntry reads what the head says is there, so that anything else is damage.
func readEntry(r pebble.Reader, key []byte, slot uint64, body bool) (cpwire.Entry, error) {
	rec, err := readRecord(r, key, slot)
	if err == nil && rec.slot != slot {
		err = fmt.Errorf("it is slot %d", rec.slot)
	}
	if err != nil {
		return cpwire.Entry{}, fmt.Errorf("%w: record of slot %d: %w", checkpoint.ErrCorrupt, slot, err)
	}
	e := cpwire.Entry{Slot: slot, Digest: rec.digest, Nonce: rec.nonce, Stored: time.Unix(0, rec.stored).UTC()}
	if body {
		if e.Body, err = readBody(r, key, slot); err != nil {
			return cpwire.Entry{}, fmt.Errorf("%w: body of slot %d: %w", checkpoint.ErrCorrupt, slot, err)
		}
	}
	return e, nil
}

// readBody returns a copy of the body at a slot, which is not nil.
func readBody(r pebble.Reader, key []byte, slot uint64) ([]byte, error) {
	v, closer, err := r.Get(appendBodyKey(nil, key, slot))
	if err != nil {
		return nil, err
	}
	var body []byte
	if len(v) < 8 || binary.LittleEndian.Uint64(v) != slot {
		err = errors.New("it is that of another slot")
	} else {
		body = append([]byte{}, v[8:]...)
	}
	return body, errors.Join(err, closer.Close())
}

func wrap(op string, task cpwire.Task, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s %s: %w", op, task, err)
}
