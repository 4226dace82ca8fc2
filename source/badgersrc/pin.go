package badgersrc

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/dgraph-io/badger/v4"
)

// A pin is an open iterator. Badger empties and removes no table, memtable log or value
// log file that was part of the database when it was opened.
type pin struct {
	db    *badger.DB
	let   chan struct{}
	ended chan error
}

// hold opens the iterator. A transaction belongs to the function that View runs, so a
// goroutine stays in it until release, which waits for it.
func hold(ctx context.Context, db *badger.DB) (*pin, error) {
	p := &pin{db: db, let: make(chan struct{}), ended: make(chan error, 1)}
	held := make(chan struct{})
	go func() {
		p.ended <- db.View(func(txn *badger.Txn) error {
			it := txn.NewIterator(badger.IteratorOptions{})
			defer it.Close()
			close(held)
			<-p.let
			return nil
		})
	}()
	select {
	case <-held:
		return p, nil
	case err := <-p.ended:
		return nil, fmt.Errorf("open an iterator: %w", err)
	case <-ctx.Done():
		return nil, errors.Join(context.Cause(ctx), p.release())
	}
}

// release closes the iterator. In a database that was closed, Badger would wait for ever
// in that; then the iterator is left as it is.
func (p *pin) release() error {
	if p.db.IsClosed() {
		return errors.New("the badger database was closed before its image was released")
	}
	close(p.let)
	return <-p.ended
}

// tables returns the numbers of the tables that the database consists of.
func tables(db *badger.DB) map[uint64]bool {
	list := db.Tables()
	ids := make(map[uint64]bool, len(list))
	for i := range list {
		ids[list[i].ID] = true
	}
	return ids
}

// errMoved says that the database went on between two looks at it.
var errMoved = errors.New("the database changed too often while it was frozen")

// How often Freeze and its parts look again at what moved between two looks.
const (
	looks     = 200
	firstWait = 50 * time.Microsecond
	lastWait  = 5 * time.Millisecond
)

// again calls look until it returns something else than errMoved.
func again(ctx context.Context, look func() error) error {
	wait := firstWait
	for range looks {
		if err := look(); !errors.Is(err, errMoved) {
			return err
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(wait):
		}
		wait = min(2*wait, lastWait)
	}
	return errMoved
}
