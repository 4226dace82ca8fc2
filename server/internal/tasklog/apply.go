package tasklog

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"

	"github.com/cockroachdb/pebble/v2"
	"github.com/zeebo/blake3"

	"github.com/snapferry/snapferry/checkpoint"
	"github.com/snapferry/snapferry/internal/cpwire"
)

// Apply applies entries in the order of their indexes and returns the result of each
// command; DecodeResult reads it. All of it becomes visible at once. An error means that the state
// can be used no more.
func (m *Machine) Apply(entries []Entry) ([][]byte, error) {
	if m.failed == nil && m.opts.broken.Load() {
		m.failed = errBroken
	}
	if m.failed != nil || len(entries) == 0 {
		return nil, m.failed
	}
	results, err := m.apply(entries)
	if err != nil {
		m.failed = fmt.Errorf("apply entries %d to %d: %w", entries[0].Index, entries[len(entries)-1].Index, err)
	}
	return results, m.failed
}

func (m *Machine) apply(entries []Entry) ([][]byte, error) {
	r := run{m: m, batch: m.mu.db.NewBatch()}
	defer r.batch.Close()
	results := make([][]byte, len(entries))
	last := m.applied.Load()
	for i, e := range entries {
		if e.Index <= last {
			return nil, fmt.Errorf("entry %d comes after entry %d", e.Index, last)
		}
		last = e.Index
		var err error
		if results[i], err = r.command(e.Data); err != nil {
			return nil, err
		}
	}

	end := entries[len(entries)-1]
	op := r.batch.SetDeferred(len(keyApplied), 16)
	copy(op.Key, keyApplied)
	binary.LittleEndian.PutUint64(op.Value, end.Index)
	binary.LittleEndian.PutUint64(op.Value[8:], end.Term)
	if err := errors.Join(op.Finish(), r.batch.Commit(pebble.NoSync)); err != nil {
		return nil, err
	}
	m.applied.Store(end.Index)
	r.finish()
	return results, nil
}

// run is one call of Apply.
type run struct {
	m       *Machine
	batch   *pebble.Batch
	touched []*log
	key     []byte // scratch
}

// finish is what follows a commit.
func (r *run) finish() {
	for _, l := range r.touched {
		l.touched, l.fresh = false, l.fresh[:0]
		r.m.watch.wake(l.key)
	}
	r.m.heads.age()
}

// command does one command. What no member can do changes nothing, and they all say so.
func (r *run) command(data []byte) ([]byte, error) {
	if len(data) == 0 {
		return nil, nil
	}
	if len(data) < commandHeader {
		return []byte{malformed}, nil
	}
	stamp := int64(binary.LittleEndian.Uint64(data[2:]))
	body := data[commandHeader:]
	switch {
	case data[0] == commandVersion && data[1] == kindAppends:
		return r.appends(stamp, body)
	case data[0] == commandVersion && data[1] == kindTrim:
		return r.trim(stamp, body)
	}
	return []byte{unsupported}, nil
}

func (r *run) appends(stamp int64, items []byte) ([]byte, error) {
	if len(items) < 2 {
		return []byte{malformed}, nil
	}
	n := int(binary.LittleEndian.Uint16(items))
	items = items[2:]
	if cpwire.CheckItems(items, n) != nil {
		return []byte{malformed}, nil // before any of them is done
	}
	result := append(make([]byte, 0, 1+n*cpwire.ResultSize), done)
	for range n {
		var it cpwire.Item
		it, items, _ = cpwire.DecodeItem(items)
		l, err := r.log(it.Job, it.Task)
		if err != nil {
			return nil, err
		}
		if result, err = r.append(result, l, stamp, &it); err != nil {
			return nil, err
		}
	}
	return result, nil
}

// append is the one step of P13: it compares the head, or finds out what became of an
// earlier try.
func (r *run) append(result []byte, l *log, stamp int64, it *cpwire.Item) ([]byte, error) {
	h := &l.head
	status := cpwire.NotOnHead
	switch {
	case it.Slot == h.slot+1 && it.Prev == h.digest:
		if err := r.add(l, stamp, it); err != nil {
			return nil, err
		}
		status = cpwire.Appended
	case it.Slot <= h.slot && h.slot-it.Slot >= cpwire.KeptRecords:
		status = cpwire.Forgotten
	case it.Slot <= h.slot:
		rec, err := r.record(l, it.Slot)
		if err != nil {
			return nil, err
		}
		if rec.nonce == it.Nonce {
			return cpwire.AppendResult(result, cpwire.Known, rec.slot, &rec.digest, rec.stored), nil
		}
		status = cpwire.Conflict
	}
	return cpwire.AppendResult(result, status, h.slot, &h.digest, h.stored), nil
}

// add puts an entry after the head. The time of an entry never goes back, whatever the
// clocks of leaders say.
func (r *run) add(l *log, stamp int64, it *cpwire.Item) error {
	rec := record{
		slot: it.Slot, nonce: it.Nonce, digest: blake3.Sum256(it.Body),
		stored: max(stamp, l.head.stored, 1),
	}
	l.head.slot, l.head.stored, l.head.digest = rec.slot, rec.stored, rec.digest
	l.fresh = append(l.fresh, rec)
	r.touch(l)

	r.key = appendRecordKey(r.key[:0], l.key, rec.slot)
	op := r.batch.SetDeferred(len(r.key), recordSize)
	copy(op.Key, r.key)
	rec.encode(op.Value)
	if err := op.Finish(); err != nil {
		return err
	}

	r.key = appendBodyKey(r.key[:0], l.key, rec.slot)
	op = r.batch.SetDeferred(len(r.key), 8+len(it.Body))
	copy(op.Key, r.key)
	binary.LittleEndian.PutUint64(op.Value, rec.slot)
	copy(op.Value[8:], it.Body)
	if err := op.Finish(); err != nil {
		return err
	}
	return r.putHead(l)
}

func (r *run) putHead(l *log) error {
	r.key = appendKey(r.key[:0], prefixHead, l.key)
	op := r.batch.SetDeferred(len(r.key), headSize)
	copy(op.Key, r.key)
	l.head.encode(op.Value)
	return op.Finish()
}

func (r *run) touch(l *log) {
	if !l.touched {
		l.touched = true
		r.touched = append(r.touched, l)
	}
}

// log returns what is known of a task, reading it if need be.
func (r *run) log(job, task []byte) (*log, error) {
	r.key = append(append(append(r.key[:0], job...), '/'), task...)
	if l := r.m.heads.get(r.key); l != nil {
		return l, nil
	}
	l := &log{key: slices.Clone(r.key)}
	h, err := readHead(r.m.mu.db, l.key)
	if err != nil && !errors.Is(err, pebble.ErrNotFound) {
		return nil, err
	}
	l.head = h
	r.m.heads.put(l)
	return l, nil
}

// record returns the record of a slot that is not above the head and not forgotten.
func (r *run) record(l *log, slot uint64) (record, error) {
	for _, rec := range slices.Backward(l.fresh) {
		if rec.slot == slot {
			return rec, nil
		}
	}
	rec, err := readRecord(r.m.mu.db, l.key, slot)
	if err == nil && rec.slot != slot {
		err = fmt.Errorf("%w: record of slot %d lies in the place of slot %d", checkpoint.ErrCorrupt, rec.slot, slot)
	}
	if err != nil {
		return record{}, fmt.Errorf("record of %s at slot %d: %w", l.key, slot, err)
	}
	return rec, nil
}

// trim removes the bodies of entries that were superseded long ago by the leader's clock.
// The newest entry has not been superseded.
func (r *run) trim(stamp int64, body []byte) ([]byte, error) {
	job, task, rest, err := cpwire.DecodeTask(body)
	if err != nil || len(rest) > 0 {
		return []byte{malformed}, nil
	}
	l, err := r.log(job, task)
	if err != nil {
		return nil, err
	}
	oldest, first := l.head.oldest(), l.head.oldest()
	for first < l.head.slot {
		next, err := r.record(l, first+1)
		if err != nil {
			return nil, err
		}
		if next.stored > stamp-int64(checkpoint.KeepSuperseded) {
			break
		}
		first++
	}
	return []byte{done}, r.cut(l, oldest, first)
}

// cut removes the bodies from slot oldest up to but without slot first.
func (r *run) cut(l *log, oldest, first uint64) error {
	if first == oldest {
		return nil
	}
	for slot := oldest; slot < first; slot++ {
		r.key = appendBodyKey(r.key[:0], l.key, slot)
		if err := r.batch.Delete(r.key, nil); err != nil {
			return err
		}
	}
	l.head.first = first
	r.touch(l)
	return r.putHead(l)
}
