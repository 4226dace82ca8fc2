package snapferry_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"os"
	"path/filepath"

	"github.com/cockroachdb/pebble/v2"

	"github.com/snapferry/snapferry"
	"github.com/snapferry/snapferry/blob"
	"github.com/snapferry/snapferry/blob/fsblob"
	"github.com/snapferry/snapferry/checkpoint"
	"github.com/snapferry/snapferry/checkpoint/blobcp"
	"github.com/snapferry/snapferry/source"
	"github.com/snapferry/snapferry/source/pebblesrc"
)

// A service restores its store before it opens it, and commits a checkpoint now and then.
// Then its disk is lost, and another process goes on where the last checkpoint stands.
func Example() {
	ctx := context.Background()
	dir, err := os.MkdirTemp("", "snapferry-example")
	if err != nil {
		log.Fatal(err)
	}
	defer os.RemoveAll(dir)

	for range 2 {
		if err := serve(ctx, filepath.Join(dir, "backup"), filepath.Join(dir, "kv")); err != nil {
			log.Fatal(err)
		}
		if err := os.RemoveAll(filepath.Join(dir, "kv")); err != nil {
			log.Fatal(err)
		}
	}
	// Output:
	// first start
	// committed checkpoint 1 of epoch 1 at input 1
	// restored, input stands at 1
	// committed checkpoint 2 of epoch 2 at input 2
}

// serve is one life of the service.
func serve(ctx context.Context, backup, data string) error {
	driver, err := fsblob.Open(backup, &fsblob.Options{Create: true})
	if err != nil {
		return err
	}
	blobs := blob.New(driver, nil)
	info, _, err := snapferry.Ensure(ctx, blobs) // makes the repository if there is none
	if err != nil {
		return err
	}
	checkpoints := checkpoint.New(blobcp.New(blobs, info.ID), nil) // the log lies in the repository itself

	id := snapferry.TaskID{Job: "orders", Task: "p7"}
	task, err := snapferry.Open(ctx, id, blobs, checkpoints, nil) // takes ownership
	if err != nil {
		return err
	}
	defer task.Close()

	_, err = task.Restore(ctx, map[string]string{"kv": data}, nil) // before the store is opened
	first := errors.Is(err, snapferry.ErrNotFound)
	if err != nil && !first {
		return err
	}

	db, err := pebble.Open(data, &pebble.Options{Logger: silent{}})
	if err != nil {
		return err
	}
	defer db.Close()
	input, err := next(db, first)
	if err != nil {
		return err
	}

	// At each checkpoint of the application. It applies nothing between here and the
	// return of Snapshot.
	sources := map[string]source.Source{"kv": pebblesrc.New(db, nil)}
	pending, err := task.Snapshot(ctx, sources, map[string]string{"input": input})
	if err != nil {
		return err
	}
	report, err := pending.Commit(ctx) // runs beside the application
	if err != nil {
		return err
	}
	fmt.Printf("committed checkpoint %d of epoch %d at input %s\n", report.Sequence, report.Epoch, input)
	return nil
}

// next applies one more piece of input and returns where the input stands.
func next(db *pebble.DB, first bool) (string, error) {
	n := byte('0')
	if first {
		fmt.Println("first start")
	} else {
		value, closer, err := db.Get([]byte("input"))
		if err != nil {
			return "", err
		}
		n = value[0]
		if err := closer.Close(); err != nil {
			return "", err
		}
		fmt.Printf("restored, input stands at %c\n", n)
	}
	n++
	return string(n), db.Set([]byte("input"), []byte{n}, pebble.NoSync)
}

type silent struct{}

func (silent) Infof(string, ...any)  {}
func (silent) Errorf(string, ...any) {}
func (silent) Fatalf(format string, args ...any) {
	log.Fatalf(format, args...)
}
