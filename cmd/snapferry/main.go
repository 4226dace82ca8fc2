// Command snapferry backs up and restores the state of embedded stores.
//
// Each verb is one file and thin: it parses flags, opens the repository, calls the
// engine, and prints. What the command adds to the library is only what a terminal or
// a script needs: the table of URL schemes (open.go), rules for what to back up
// (rules.go), exit codes and one-line messages (exit.go), progress (progress.go).
//
// Results go to standard output, all else to standard error. With --json standard
// output holds exactly one JSON object, also after a failure.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"

	"golang.org/x/term"
)

// errInterrupted is the cause of the context's end after SIGINT, SIGTERM or SIGHUP.
var errInterrupted = errors.New("interrupted")

func main() {
	ctx, stop := untilSignal(context.Background(), os.Stderr)
	a := &app{
		stdout: os.Stdout, stderr: os.Stderr,
		bars:   term.IsTerminal(int(os.Stderr.Fd())),
		getenv: os.Getenv, openDriver: openDriver,
	}
	code := a.run(ctx, os.Args[1:])
	stop()
	os.Exit(code)
}

// untilSignal returns a context that the first SIGINT, SIGTERM or SIGHUP ends. From then
// on signals have their usual effect, so that a second one ends the process at once.
// Under nohup a hangup stays without effect.
func untilSignal(ctx context.Context, stderr io.Writer) (context.Context, func()) {
	ctx, cancel := context.WithCancelCause(ctx)
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM)
	if !signal.Ignored(syscall.SIGHUP) {
		signal.Notify(signals, syscall.SIGHUP)
	}
	done := make(chan struct{})
	go func() {
		select {
		case <-signals:
			signal.Stop(signals)
			fmt.Fprintln(stderr, "snapferry: stopping cleanly; interrupt again to end at once")
			cancel(errInterrupted)
		case <-done:
		}
	}()
	return ctx, func() { signal.Stop(signals); close(done); cancel(nil) }
}
