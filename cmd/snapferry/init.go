package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"

	"github.com/spf13/cobra"

	"github.com/snapferry/snapferry"
)

type initVerb struct {
	repo   repoFlags
	expire bool
	unsafe bool
}

func (a *app) newInit() *cobra.Command {
	v := &initVerb{}
	cmd := &cobra.Command{
		Use:   "init",
		Short: "Make a repository",
		Long: `Make an empty repository after a probe that the store is safe for commits. The first
backup to an empty place does the same by itself; init is for doing it beforehand, with
other rights for instance. A repository that exists is an error and stays as it is.

With --expire-unsealed an s3:// bucket removes by itself, after three days or more, what
backups that died have left: init adds a lifecycle rule to those of the bucket. Without
it gc removes the same. A store that does not keep two writers apart is refused unless
--unsafe-no-fencing is given; then you have to see to it that no two backups of one task
run at a time.`,
		Example: examples(`
			snapferry init --repo /backup
			snapferry init --repo file:///backup --json
			snapferry init --repo s3://bucket/prefix`),
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return v.run(cmd.Context()) },
	}
	v.repo.bind(a, cmd)
	cmd.Flags().BoolVar(&v.expire, "expire-unsealed", false, "let the store itself remove what dead backups left (s3:// only)")
	cmd.Flags().BoolVar(&v.unsafe, "unsafe-no-fencing", false, "accept a store on which two backups of one task can damage each other")
	return cmd
}

func (v *initVerb) run(ctx context.Context) error {
	blobs, err := v.repo.blobs(ctx, true)
	if err != nil {
		return err
	}
	info, err := snapferry.Init(ctx, blobs, &snapferry.InitOptions{
		ExpireUnsealed: v.expire, UnsafeNoFencing: v.unsafe,
		Warn: func(text string) { v.repo.app.warn("%s", oneLine(text)) },
	})
	if errors.Is(err, fs.ErrExist) {
		err = fmt.Errorf("%w; use it as it is, or name an empty place", err)
	}
	if err := errors.Join(err, blobs.Close()); err != nil {
		return err
	}
	v.repo.warnIfFleeting()
	report := struct {
		Repository string `json:"repository"`
		snapferry.RepoInfo
	}{v.repo.url, info}
	return v.repo.app.summary(report, func(w io.Writer) {
		fmt.Fprintf(w, "made repository %s (id %s, format %d)\n", v.repo.url, info.ID, info.Format)
	})
}
