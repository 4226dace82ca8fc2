package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/snapferry/snapferry"
	"github.com/snapferry/snapferry/internal/cpwire"
)

// Why a group did not do what it was asked for.
var (
	errNoMember  = errors.New("no such member")
	errMaybeDone = errors.New("it may have been done")
	errNotNow    = errors.New("the group is in a state that forbids it")
)

// clusterVerb is one verb of cluster: it opens a client, and most name a member.
type clusterVerb struct {
	app     *app
	cmd     *cobra.Command
	servers serverFlags
	id, url string
}

func (a *app) newCluster() *cobra.Command {
	return newVerbGroup("cluster VERB", "Look at a group of checkpoint servers and change it",
		`A group is three or five members that "snapferry server" runs. Any of them answers: --server
names one or more, and the command follows the leader.

A member is added in three steps: add-learner tells the group, "snapferry server --join" starts
it, promote lets it vote when it has caught up. A member whose disk is lost is removed and added
anew, under the same id if you like. Change one member at a time.`,
		examples(`
			snapferry cluster status --server http://10.0.0.1:7480,10.0.0.2:7480
			snapferry cluster add-learner --server http://10.0.0.1:7480 --id n4 --url http://10.0.0.4:7480`),
		a.newClusterStatus(), a.newClusterMembers(), a.newClusterAddLearner(), a.newClusterPromote(),
		a.newClusterRemove(), a.newClusterTransferLeader(), a.newClusterSnapshot())
}

// command makes the verb's command; do gets a client of the group.
func (v *clusterVerb) command(use, short, long, example string, do func(ctx context.Context, c *cpwire.Client) error) *cobra.Command {
	v.cmd = &cobra.Command{
		Use: use, Short: short, Long: long, Example: examples(example),
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return v.run(cmd.Context(), do) },
	}
	v.servers.bind(v.cmd, 30*time.Second)
	v.app.outputFlags(v.cmd)
	return v.cmd
}

// bindID adds the flag that names a member.
func (v *clusterVerb) bindID(cmd *cobra.Command, usage string) {
	cmd.Flags().Var(once(&v.id), "id", usage)
}

func (v *clusterVerb) run(ctx context.Context, do func(context.Context, *cpwire.Client) error) error {
	if err := v.check(); err != nil {
		return err
	}
	client, err := v.servers.open(cpwire.Options{})
	if err != nil {
		return err
	}
	defer client.Close()
	return v.explain(do(ctx, client))
}

// check refuses a member that is not named, where the verb has a flag to name it.
func (v *clusterVerb) check() (err error) {
	if v.cmd.Flags().Lookup("id") == nil {
		return nil
	}
	if v.id == "" {
		return usagef("which member? Give --id ID")
	}
	if err := checkNames("--id", []string{v.id}); err != nil {
		return err
	}
	if v.cmd.Flags().Lookup("url") == nil {
		return nil
	}
	if v.url == "" {
		return usagef("where will %s be? Give --url http://HOST:PORT or https://HOST:PORT", v.id)
	}
	v.url, err = parseMemberURL("--url", v.url)
	return err
}

// explain gives an error of the group the exit code that it has for this verb.
func (v *clusterVerb) explain(err error) error {
	var means error
	switch {
	case err == nil:
		return nil
	case errors.Is(err, fs.ErrNotExist):
		means = errNoMember
	case errors.Is(err, snapferry.ErrUnknown):
		means = errMaybeDone
	case errors.Is(err, snapferry.ErrConflict):
		means = errNotNow
	}
	e := &clusterError{op: verbOf(v.cmd), subject: cmp.Or(v.id, v.servers.urls), err: err, means: means}
	if answer, ok := errors.AsType[*cpwire.Error](err); ok {
		e.subject = cmp.Or(v.id, answer.Subject, e.subject)
		e.text = answer.Message
	}
	return e
}

// clusterError is an error of a verb of cluster or of bench.
type clusterError struct {
	op, subject string
	text        string // of the cause, if it is not err's
	err, means  error
}

func (e *clusterError) Error() string {
	return fmt.Sprintf("%s %s: %s", e.op, e.subject, cmp.Or(e.text, e.err.Error()))
}

func (e *clusterError) Unwrap() []error {
	if e.means == nil {
		return []error{e.err}
	}
	return []error{e.means, e.err}
}

func (a *app) newClusterStatus() *cobra.Command {
	v := &clusterVerb{app: a}
	return v.command("status", "Show every member, its log and its snapshots",
		`Show the group as a member that answers sees it. Of members that do not answer it shows what
was known of them last. "source" is whom a member's newest snapshot was taken from, local if it
made it itself. Counters begin at zero when a member starts. "why" says why there is no newer
snapshot, or what a member waits for in its first start; docs/raft.md explains each field.`, `
			snapferry cluster status --server http://10.0.0.1:7480,10.0.0.2:7480
			snapferry cluster status --server http://10.0.0.1:7480 --json`,
		func(ctx context.Context, c *cpwire.Client) error {
			s, err := c.Cluster(ctx)
			if err != nil {
				return err
			}
			if s.Members == nil {
				s.Members = []cpwire.MemberStatus{}
			}
			report := clusterReport{Leader: s.Leader, Term: s.Term, Members: s.Members}
			return a.result(report, func(w io.Writer) { report.print(w) })
		})
}

// clusterReport is the JSON of cluster status.
type clusterReport struct {
	Leader  string                `json:"leader"`
	Term    uint64                `json:"term"`
	Members []cpwire.MemberStatus `json:"members"`
}

func (r *clusterReport) print(w io.Writer) {
	fmt.Fprintf(w, "leader %s, term %d\n\n", cmp.Or(r.Leader, "none"), r.Term)
	rows := []string{"MEMBER\tROLE\tURL\tANSWERS\tAPPLIED\tLOG\t\tSNAPSHOT\tFROM"}
	for i := range r.Members {
		m := &r.Members[i]
		answers, snap := "yes", "-"
		if !m.Reachable {
			answers = "no"
		}
		if m.Snapshot.Index > 0 {
			snap = strconv.FormatUint(m.Snapshot.Index, 10)
		}
		rows = append(rows, fmt.Sprintf("%s\t%s\t%s\t%s\t%d\t%d to %d\t%s\t%s\t%s", m.ID, m.Role, m.URL, answers,
			m.Applied, m.FirstIndex, m.LastIndex, size(m.LogBytes), snap, m.Snapshot.Source))
	}
	table(w, rows)

	rows = []string{"MEMBER\tMADE\tTAKEN OVER\tINSTALLED\tSERVED\tREFUSED\tFAILED\tFETCHED\tREUSED"}
	for i := range r.Members {
		s := &r.Members[i].Stats
		rows = append(rows, fmt.Sprintf("%s\t%d\t%d\t%d\t%d\t%d\t%d\t%s\t%s", r.Members[i].ID, s.Generated+s.GeneratedFollower,
			s.TakenOver, s.Installed, s.Served, s.Refused, s.Failed, size(s.BytesFetched), size(s.BytesReused)))
	}
	fmt.Fprintln(w)
	table(w, rows)
	r.printWhy(w)
}

func (r *clusterReport) printWhy(w io.Writer) {
	gap := "\n"
	for i := range r.Members {
		if why := r.Members[i].Why; why != "" {
			fmt.Fprintf(w, "%s%s: %s\n", gap, r.Members[i].ID, oneLine(why))
			gap = ""
		}
	}
}

func (a *app) newClusterMembers() *cobra.Command {
	v := &clusterVerb{app: a}
	return v.command("members", "List the members of the group",
		`List the members with their addresses and roles, as a member that answers knows them.`, `
			snapferry cluster members --server http://10.0.0.1:7480
			snapferry cluster members --server http://10.0.0.1:7480 --json`,
		func(ctx context.Context, c *cpwire.Client) error {
			s, err := c.Status(ctx)
			if err != nil {
				return err
			}
			report := struct {
				Leader  string          `json:"leader"`
				Members []cpwire.Member `json:"members"`
			}{s.Leader, append([]cpwire.Member{}, s.Members...)}
			return a.result(report, func(w io.Writer) {
				rows := []string{"MEMBER\tROLE\tURL"}
				for _, m := range report.Members {
					rows = append(rows, strings.Join([]string{m.ID, m.Role, m.URL}, "\t"))
				}
				table(w, rows)
			})
		})
}

func (a *app) newClusterAddLearner() *cobra.Command {
	v := &clusterVerb{app: a}
	cmd := v.command("add-learner", "Add a member that does not vote yet",
		`Tell the group of a new member. Start it then with "snapferry server --join", wait until it has
caught up, and let it vote with promote. The same id and address again is no error as long as
it does not vote; one that votes is refused with exit code 4. The address begins with http or
https as those of the other members do.`, `
			snapferry cluster add-learner --server http://10.0.0.1:7480 --id n4 --url http://10.0.0.4:7480`,
		func(ctx context.Context, c *cpwire.Client) error {
			m, err := c.AddLearner(ctx, v.id, v.url)
			if err != nil {
				return err
			}
			return a.summary(m, func(w io.Writer) { fmt.Fprintf(w, "added %s at %s as a learner\n", m.ID, m.URL) })
		})
	v.bindID(cmd, "`ID` of the new member (needed)")
	cmd.Flags().Var(once(&v.url), "url", "`URL` by which the others will reach it (needed)")
	return cmd
}

// changed is the JSON of verbs that change one member.
type changed struct {
	ID   string `json:"id"`
	Done string `json:"done"`
}

// change makes a verb that does one thing to one member.
func (a *app) change(use, short, long, done, which string, do func(c *cpwire.Client, ctx context.Context, id string) error) *cobra.Command {
	v := &clusterVerb{app: a}
	cmd := v.command(use, short, long, `
			snapferry cluster `+use+` --server http://10.0.0.1:7480,10.0.0.2:7480 --id n4`,
		func(ctx context.Context, c *cpwire.Client) error {
			if err := do(c, ctx, v.id); err != nil {
				return err
			}
			return a.summary(changed{v.id, done}, func(w io.Writer) { fmt.Fprintf(w, "%s %s\n", done, v.id) })
		})
	v.bindID(cmd, which)
	return cmd
}

func (a *app) newClusterPromote() *cobra.Command {
	return a.change("promote", "Let a learner vote",
		`Make a learner a full member. It must follow the log and have everything that is committed. The
group waits for that as long as --timeout says, at most 10 minutes; if a learner lags longer the
exit code is 4, and the verb can be tried again. One that votes already is no error.`,
		"promoted", "`ID` of the learner (needed)", (*cpwire.Client).Promote)
}

func (a *app) newClusterRemove() *cobra.Command {
	return a.change("remove", "Take a member out of the group",
		`Remove a member, running or not. Its data directory is of no use any more: to come back it is
added anew, with an empty one. A leader that is removed steps down.`,
		"removed", "`ID` of the member (needed)", (*cpwire.Client).Remove)
}

func (a *app) newClusterTransferLeader() *cobra.Command {
	return a.change("transfer-leader", "Make a member the leader",
		`Hand the leadership to a member that votes, for instance before its leader is stopped for
maintenance. One that leads already is no error.`,
		"leadership given to", "`ID` of the new leader (needed)", (*cpwire.Client).TransferLeader)
}

func (a *app) newClusterSnapshot() *cobra.Command {
	v := &clusterVerb{app: a}
	cmd := v.command("snapshot", "Have a snapshot made now",
		`Ask the group for a snapshot that has everything committed so far, and return when the leader has
recorded it. A follower makes it; only a group of one makes its own.`, `
			snapferry cluster snapshot --server http://10.0.0.1:7480`,
		func(ctx context.Context, c *cpwire.Client) error {
			id, err := c.Snapshot(ctx)
			if err != nil {
				return err
			}
			return a.summary(id, func(w io.Writer) {
				fmt.Fprintf(w, "snapshot at index %d, term %d, %.16s\n", id.Index, id.Term, id.Digest)
			})
		})
	return cmd
}
