package snapferry

import (
	"context"
	"errors"
	"maps"
	"slices"
	"time"

	"github.com/snapferry/snapferry/blob"
	"github.com/snapferry/snapferry/checkpoint"
	"github.com/snapferry/snapferry/snapshot"
	"github.com/snapferry/snapferry/source"
)

// DryRun reports what a commit of these sources would do now. It reads what a commit
// would read and writes nothing: no epoch is taken, no identity cache is changed. A
// repository or task that is not there yet counts as empty.
func DryRun(ctx context.Context, id TaskID, blobs *blob.Store, checkpoints *checkpoint.Store, sources map[string]source.Source, opts *Options) (*CommitReport, error) {
	rep, err := dryRun(ctx, id, blobs, checkpoints, sources, opts)
	return rep, wrap("dry run", id.String(), err)
}

func dryRun(ctx context.Context, id TaskID, blobs *blob.Store, checkpoints *checkpoint.Store, sources map[string]source.Source, opts *Options) (_ *CommitReport, err error) {
	start := time.Now()
	if err := checkSources(sources); err != nil {
		return nil, err
	}
	t, err := newTask(id, blobs, checkpoints, opts)
	if err != nil {
		return nil, err
	}
	if _, t.state, err = t.head(ctx); err != nil {
		return nil, err
	}
	if err := t.loadBases(ctx); err != nil {
		return nil, err
	}
	p := &Pending{task: t}
	defer func() { err = errors.Join(err, p.end()) }()
	for _, name := range slices.Sorted(maps.Keys(sources)) {
		if err := p.freeze(ctx, name, sources[name]); err != nil {
			return nil, err
		}
	}
	p.sources = sources
	t.epoch = t.state.State.Epoch + 1
	a := t.newAttempt()
	if err := a.read(ctx, p, func(context.Context, string, blob.Body) error { return nil }); err != nil {
		return nil, err
	}
	rep := a.report(start)
	rep.Checkpoint, rep.Epoch, rep.Sequence = "", 0, 0
	for _, r := range a.runs { // what an index would refuse, a dry run tells too
		x := snapshot.Index{Job: id.Job, Task: id.Task, Store: r.name, Checkpoint: a.id, Created: a.time, Entries: r.entries}
		if err := x.Validate(); err != nil {
			return nil, err
		}
	}
	return rep, nil
}
