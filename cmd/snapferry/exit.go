package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"strings"

	"github.com/spf13/cobra"

	"github.com/snapferry/snapferry"
)

// Exit codes; scripts rely on them.
const (
	exitDone     = 0
	exitFailed   = 1
	exitUsage    = 2
	exitNotFound = 3
	exitConflict = 4 // fenced, or somebody else changed what the verb relied on
	exitCorrupt  = 5
	exitUnknown  = 6 // may have been committed
)

// usageError is a command line that cannot be meant.
type usageError struct{ err error }

func (e *usageError) Error() string { return e.err.Error() }
func (e *usageError) Unwrap() error { return e.err }

func usagef(format string, args ...any) error {
	return &usageError{fmt.Errorf(format, args...)}
}

// reported is a failure of which the result on standard output tells already, so that
// no error object follows it.
type reported struct {
	code int
	text string
}

func (e *reported) Error() string { return e.text }

// failures maps conditions to exit codes. The first match counts: what must not be
// mistaken for something harmless comes first.
var failures = []struct {
	is   error
	code int
	hint string
}{
	{errMaybeDone, exitUnknown, "may have been done; run snapferry cluster status"},
	{errNoMember, exitNotFound, "snapferry cluster members shows who is there"},
	{errNotNow, exitConflict, ""},
	{snapferry.ErrUnknown, exitUnknown, "may have been committed; run snapferry ls"},
	{errBadInfo, exitCorrupt, "put back a copy of snapferry.json; nothing else was touched"},
	{snapferry.ErrCorrupt, exitCorrupt, "run snapferry verify --read-data to see what is damaged; older checkpoints may be whole"},
	{snapferry.ErrRunning, exitConflict, "if that one has ended, --if-running preempt takes over"},
	{snapferry.ErrForeign, exitConflict, ""},
	{snapferry.ErrFenced, exitConflict, "another backup of this task took over; run this one again to take the task back"},
	{snapferry.ErrBaseGone, exitConflict, "run it again"},
	{snapferry.ErrConflict, exitConflict, "something else changed it meanwhile; run it again"},
	{snapferry.ErrBusy, exitConflict, "wait for the other one to end"},
	{errNoRepository, exitNotFound, "check --repo; the first backup to an empty place makes a repository"},
	{snapferry.ErrNotFound, exitNotFound, "snapferry ls shows what is there"},
	{snapferry.ErrChanged, exitFailed, "stop the writer, or leave the file out with --exclude"},
	{snapferry.ErrUnsupported, exitFailed, ""},
	{fs.ErrPermission, exitFailed, "check the permissions, or run as another user"},
}

// classify returns the exit code of err and what to do about it.
func classify(err error) (code int, hint string) {
	if _, ok := errors.AsType[*usageError](err); ok {
		return exitUsage, ""
	}
	if e, ok := errors.AsType[*reported](err); ok {
		return e.code, ""
	}
	// What is unknown while a task is opened is the claim: it commits nothing.
	if e, ok := errors.AsType[*snapferry.Error](err); ok && e.Op == "open" && errors.Is(err, snapferry.ErrUnknown) {
		return exitFailed, "nothing was committed; run it again when the repository works"
	}
	for _, f := range failures {
		if errors.Is(err, f.is) {
			return f.code, f.hint
		}
	}
	return exitFailed, ""
}

// fail tells of err in one line and returns the exit code.
func (a *app) fail(ctx context.Context, cmd *cobra.Command, err error) int {
	code, hint := classify(err)
	text := oneLine(err.Error())
	switch {
	case code == exitUsage:
		hint = "see " + cmd.CommandPath() + " --help"
	case code == exitFailed && wasInterrupted(ctx, err):
		text, hint = interruption(verbOf(cmd)), ""
	}
	if hint != "" && !advises(text) {
		text += " (" + hint + ")"
	}
	fmt.Fprintf(a.stderr, "snapferry: %s\n", text)
	if _, done := errors.AsType[*reported](err); a.json && !done {
		a.printFailure(verbOf(cmd), code, text, err)
	}
	return code
}

// advises tells whether a message says already what to do about it.
func advises(text string) bool {
	return strings.Contains(text, "; run ") || strings.Contains(text, ": check ") || strings.Contains(text, "; wait") || strings.Contains(text, "; stop ")
}

// failure is what --json prints instead of a result.
type failure struct {
	Error struct {
		Code    int    `json:"code"`
		Op      string `json:"op"`
		Subject string `json:"subject"`
		Message string `json:"message"`
	} `json:"error"`
}

func (a *app) printFailure(verb string, code int, text string, err error) {
	var f failure
	f.Error.Code, f.Error.Op, f.Error.Message = code, verb, strings.ToValidUTF8(text, "\uFFFD")
	if e, ok := errors.AsType[*snapferry.Error](err); ok {
		f.Error.Op, f.Error.Subject = e.Op, strings.ToValidUTF8(e.Subject, "\uFFFD")
	}
	if e, ok := errors.AsType[*clusterError](err); ok {
		f.Error.Op, f.Error.Subject = e.op, strings.ToValidUTF8(e.subject, "\uFFFD")
	}
	_ = json.NewEncoder(a.stdout).Encode(f) // the exit code tells it anyway
}

func wasInterrupted(ctx context.Context, err error) bool {
	return errors.Is(err, errInterrupted) ||
		errors.Is(context.Cause(ctx), errInterrupted) && errors.Is(err, context.Canceled)
}

// interruption says what a verb that was interrupted has left behind.
func interruption(verb string) string {
	switch verb {
	case "backup":
		return "interrupted: no checkpoint was made, all earlier ones are kept; the next backup goes on with what was recorded of this one and removes the rest"
	case "restore":
		return "interrupted: the target is as it was; what was fetched is kept beside it, and the same restore goes on from there"
	case "gc":
		return "interrupted: what is needed is kept; the next gc goes on"
	case "bench checkpoints":
		return "interrupted: what was acknowledged stays in the group"
	case "cluster add-learner", "cluster promote", "cluster remove", "cluster transfer-leader", "cluster snapshot":
		return "interrupted: it may have been done; snapferry cluster status tells"
	}
	return "interrupted: nothing was changed"
}

// oneLine keeps messages of joined errors on one line.
func oneLine(s string) string {
	return strings.Join(strings.FieldsFunc(s, func(r rune) bool { return r == '\n' || r == '\r' }), "; ")
}
