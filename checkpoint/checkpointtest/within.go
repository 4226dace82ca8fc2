package checkpointtest

import (
	"context"
	"iter"
	"strings"

	"github.com/snapferry/snapferry/checkpoint"
)

// Within returns a driver over the tasks of d whose job begins with a prefix, as if they
// were a store of their own: tests that share one store, which is dear to make, keep their
// tasks apart so. The job names of its callers have no prefix.
func Within(d checkpoint.Driver, prefix string) checkpoint.Driver { return within{d, prefix} }

type within struct {
	checkpoint.Driver
	prefix string
}

func (w within) task(t checkpoint.TaskID) checkpoint.TaskID {
	return checkpoint.TaskID{Job: w.prefix + t.Job, Task: t.Task}
}

// Head implements checkpoint.Driver.
func (w within) Head(ctx context.Context, t checkpoint.TaskID) (*checkpoint.Entry, error) {
	return w.Driver.Head(ctx, w.task(t))
}

// Get implements checkpoint.Driver.
func (w within) Get(ctx context.Context, t checkpoint.TaskID, slot uint64) (*checkpoint.Entry, error) {
	return w.Driver.Get(ctx, w.task(t), slot)
}

// Append implements checkpoint.Driver.
func (w within) Append(ctx context.Context, t checkpoint.TaskID, e *checkpoint.Entry) error {
	return w.Driver.Append(ctx, w.task(t), e)
}

// Trim implements checkpoint.Driver.
func (w within) Trim(ctx context.Context, t checkpoint.TaskID) error {
	return w.Driver.Trim(ctx, w.task(t))
}

// Tasks implements checkpoint.Driver.
func (w within) Tasks(ctx context.Context) iter.Seq2[checkpoint.TaskID, error] {
	return func(yield func(checkpoint.TaskID, error) bool) {
		for t, err := range w.Driver.Tasks(ctx) {
			job, mine := strings.CutPrefix(t.Job, w.prefix)
			if err == nil && !mine {
				continue
			}
			if !yield(checkpoint.TaskID{Job: job, Task: t.Task}, err) {
				return
			}
		}
	}
}
