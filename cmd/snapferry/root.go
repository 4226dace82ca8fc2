package main

import (
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/snapferry/snapferry/blob"
)

// app is one run of the command: its streams and what every verb shares.
type app struct {
	stdout, stderr io.Writer
	bars           bool // stderr is a terminal
	getenv         func(string) string
	openDriver     func(ctx context.Context, p place) (blob.Driver, error)

	args  []string
	json  bool
	quiet bool

	mu    sync.Mutex // guards above, and lines on stderr
	above io.Writer  // prints above the progress bars while there are some
}

// later are the verbs that the design names and this release does not have.
var later = []string{"diff", "prune", "clone", "stats", "agent"}

// run executes one command line and returns the exit code. It prints every failure.
func (a *app) run(ctx context.Context, args []string) int {
	a.args = args
	out := &output{w: a.stdout}
	a.stdout = out
	root := a.command()
	root.SetArgs(args)
	if len(args) > 0 && strings.HasPrefix(args[0], cobra.ShellCompRequestCmd) {
		plainUsages(root)
	}
	cmd, err := root.ExecuteContextC(ctx)
	if err == nil && out.err != nil {
		err = fmt.Errorf("%s: done, but the result could not be printed: %w", verbOf(cmd), out.err)
	}
	if err == nil {
		return exitDone
	}
	// Parsing may have failed before it reached the flag.
	a.json = a.json || wantsJSON(args)
	return a.fail(ctx, cmd, err)
}

func (a *app) command() *cobra.Command {
	root := &cobra.Command{
		Use:   "snapferry VERB",
		Short: "Back up and restore the state of embedded stores, incrementally and safely",
		Long: `Snapferry backs up directories of embedded stores (Pebble, RocksDB, bbolt, ...)
incrementally to a blob store and restores them exactly. A backup is a checkpoint: one
cut over all stores named, with the application's offsets. The last checkpoint always
restores, whatever crashes and whoever else writes.

Exit codes: 0 done, 1 failed, 2 usage, 3 nothing found, 4 fenced or conflict, 5 corrupt,
6 outcome unknown (may have been committed). With --json standard output holds one JSON
object; after a failure it is {"error":{"code","op","subject","message"}}.`,
		Example: examples(`
			snapferry demo
			snapferry backup --repo /backup kv=/var/lib/app/kv
			snapferry ls --repo /backup
			snapferry restore --repo /backup --store kv --to /var/lib/app/kv`),
		Version:       buildVersion(),
		SilenceUsage:  true,
		SilenceErrors: true,
		Args:          cobra.ArbitraryArgs, // RunE says it better
		RunE:          a.noVerb,

		SuggestionsMinimumDistance: 2,
	}
	root.SetOut(a.stdout)
	root.SetErr(a.stderr)
	root.SetFlagErrorFunc(a.flagError)
	root.SetVersionTemplate("snapferry {{.Version}}\n")
	root.CompletionOptions.DisableDefaultCmd = true
	root.SetHelpCommand(newHelp())
	root.AddCommand(
		a.newBackup(), a.newRestore(), a.newInit(), a.newLs(), a.newShow(), a.newVerify(),
		a.newGC(), a.newServer(), a.newCluster(), a.newBench(), a.newDemo(), a.newVersion(), a.newCompletion(),
	)
	return root
}

// noVerb answers a command line whose first word is no verb.
func (a *app) noVerb(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return usagef("which verb? One of %s", strings.Join(verbs(cmd), ", "))
	}
	return unknownVerb(cmd, args[0])
}

// newVerbGroup returns a verb that has verbs of its own and does nothing without one.
func newVerbGroup(use, short, long, example string, verbs ...*cobra.Command) *cobra.Command {
	group := &cobra.Command{
		Use: use, Short: short, Long: long, Example: example,
		Args: cobra.ArbitraryArgs, // RunE says it better
		RunE: noSubVerb,

		SuggestionsMinimumDistance: 2,
		// Flags of a verb that does not exist are not what is wrong with the line.
		FParseErrWhitelist: cobra.FParseErrWhitelist{UnknownFlags: true},
	}
	group.AddCommand(verbs...)
	return group
}

// noSubVerb answers a command line whose second word is no verb of the first.
func noSubVerb(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return usagef("%s what? One of %s", cmd.Name(), strings.Join(verbs(cmd), ", "))
	}
	return unknownVerb(cmd, args[0])
}

// verbOf returns the words that name a verb: "ls", "cluster status".
func verbOf(cmd *cobra.Command) string {
	if !cmd.HasParent() {
		return cmd.Name()
	}
	return strings.TrimPrefix(cmd.CommandPath(), cmd.Root().Name()+" ")
}

// newHelp is the help of cobra, but an unknown verb is a usage error.
func newHelp() *cobra.Command {
	return &cobra.Command{
		Use:   "help [VERB]",
		Short: "Print the help of a verb",
		Args:  cobra.ArbitraryArgs,
		ValidArgsFunction: func(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
			about, _, err := cmd.Root().Find(args)
			if err != nil {
				return nil, cobra.ShellCompDirectiveNoFileComp
			}
			return verbs(about), cobra.ShellCompDirectiveNoFileComp
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			about, rest, err := cmd.Root().Find(args)
			switch {
			case err != nil:
				return unknownVerb(cmd.Root(), args[0])
			case len(rest) > 0 && about.HasSubCommands():
				return unknownVerb(about, rest[0])
			case len(rest) > 0:
				return usagef("unexpected argument %q", rest[0])
			}
			return about.Help()
		},
	}
}

// plainUsages removes the quotes around the names of values, which help understands
// and a shell would show.
func plainUsages(root *cobra.Command) {
	for _, cmd := range root.Commands() {
		cmd.Flags().VisitAll(func(f *pflag.Flag) { f.Usage = strings.ReplaceAll(f.Usage, "`", "") })
		plainUsages(cmd)
	}
}

func unknownVerb(root *cobra.Command, word string) error {
	if !root.HasParent() && slices.Contains(later, word) {
		return usagef("verb %s comes in a later release", word)
	}
	if near := root.SuggestionsFor(word); len(near) > 0 {
		return usagef("unknown verb %q, did you mean %s?", word, strings.Join(near, " or "))
	}
	return usagef("unknown verb %q: it is one of %s", word, strings.Join(verbs(root), ", "))
}

// flagError makes a usage error of what the flag parser says. Flags of an unknown
// verb end up at the root, where the verb is the mistake.
func (a *app) flagError(cmd *cobra.Command, err error) error {
	if !cmd.HasParent() {
		if i := slices.IndexFunc(a.args, func(s string) bool { return !strings.HasPrefix(s, "-") }); i >= 0 {
			return unknownVerb(cmd, a.args[i])
		}
	}
	return usagef("%w", err)
}

func verbs(root *cobra.Command) []string {
	var names []string
	for _, c := range root.Commands() {
		if !c.Hidden && c.Name() != "help" {
			names = append(names, c.Name())
		}
	}
	return names
}

// outputFlags binds --json and --quiet.
func (a *app) outputFlags(cmd *cobra.Command) {
	cmd.Flags().BoolVar(&a.json, "json", false, "print one JSON object on standard output, and nothing else there")
	cmd.Flags().BoolVarP(&a.quiet, "quiet", "q", false, "no progress and no summary; warnings and errors only")
}

// wantsJSON finds --json in arguments that could not be parsed.
func wantsJSON(args []string) bool {
	for _, arg := range args {
		switch arg {
		case "--":
			return false
		case "--json", "--json=true", "--json=1":
			return true
		}
	}
	return false
}

// noArgs and atMostOneArg refuse the wrong number of arguments as usage errors.
func noArgs(_ *cobra.Command, args []string) error {
	if len(args) > 0 {
		return usagef("unexpected argument %q", args[0])
	}
	return nil
}

func atMostOneArg(_ *cobra.Command, args []string) error {
	if len(args) > 1 {
		return usagef("unexpected argument %q", args[1])
	}
	return nil
}

// examples removes the indentation of Go source.
func examples(s string) string {
	var b strings.Builder
	for line := range strings.Lines(strings.Trim(s, "\n")) {
		fmt.Fprintf(&b, "  %s", strings.TrimLeft(line, "\t"))
	}
	return b.String()
}
