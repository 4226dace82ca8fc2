package main

import (
	"bytes"
	"context"
	"fmt"
	"os/exec"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
)

const (
	hookOutput = 16 << 10        // of a command's output so much is kept, the end of it
	hookGrace  = 2 * time.Second // for its children to let go of the output
)

// hooks are the commands that make the owner of stores stand still while they are
// frozen.
type hooks struct {
	freezeCmd, thawCmd string
	timeout            age

	warn   func(format string, args ...any)
	frozen bool // thaw is due
}

func (h *hooks) bind(cmd *cobra.Command) {
	h.timeout = age(time.Minute)
	f := cmd.Flags()
	f.Var(once(&h.freezeCmd), "freeze-cmd", "`COMMAND` for sh -c that makes the owner of the stores stand still, run before they are frozen")
	f.Var(once(&h.thawCmd), "thaw-cmd", "`COMMAND` for sh -c that lets it go on, always run after the stores are frozen, or after a failure")
	f.Var(&h.timeout, "hook-timeout", "how long each of the two commands may take")
}

// given tells whether there is anything to run.
func (h *hooks) given() bool { return h.freezeCmd != "" || h.thawCmd != "" }

// freeze runs the command that makes the stores stand still. Whatever becomes of it, thaw
// is due from then on.
func (h *hooks) freeze(ctx context.Context) error {
	h.frozen = true
	return h.run(ctx, "--freeze-cmd", h.freezeCmd)
}

// thaw lets the stores go on, once, also when ctx has ended.
func (h *hooks) thaw(ctx context.Context) error {
	if !h.frozen {
		return nil
	}
	h.frozen = false
	return h.run(context.WithoutCancel(ctx), "--thaw-cmd", h.thawCmd)
}

// run runs a command in a process group of its own, so that its children end with it,
// and an interrupt from the terminal does not reach it. What it said is shown if it fails.
func (h *hooks) run(ctx context.Context, flag, command string) error {
	if command == "" {
		return nil
	}
	ctx, cancel := context.WithTimeoutCause(ctx, time.Duration(h.timeout), fmt.Errorf("it took longer than %s; --hook-timeout allows more", time.Duration(h.timeout)))
	defer cancel()
	var said tail
	cmd := exec.CommandContext(ctx, "sh", "-c", command)
	cmd.Stdout, cmd.Stderr = &said, &said
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = hookGrace
	err := cmd.Run()
	if err == nil {
		return nil
	}
	if ctx.Err() != nil {
		err = context.Cause(ctx)
	}
	for line := range strings.Lines(said.String()) {
		h.warn("%s said: %s", flag, strings.TrimRight(line, "\r\n"))
	}
	return fmt.Errorf("%s %q: %w", flag, command, err)
}

// tail keeps the end of what is written to it.
type tail struct{ bytes.Buffer }

// Write keeps the end.
func (t *tail) Write(b []byte) (int, error) {
	if t.Len()+len(b) > 2*hookOutput {
		keep := bytes.Clone(t.Bytes()[max(0, t.Len()-hookOutput):])
		t.Reset()
		t.Buffer.Write(keep)
	}
	t.Buffer.Write(b[max(0, len(b)-hookOutput):])
	return len(b), nil
}
