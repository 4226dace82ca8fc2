package fsblob

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/snapferry/snapferry/blob"
)

const (
	roleEnv  = "FSBLOB_TEST_ROLE"  // what a child process does
	dirEnv   = "FSBLOB_TEST_DIR"   // where
	namedEnv = "FSBLOB_TEST_NAMED" // in which mode
)

// play is a child process.
func play(role string) int {
	named, _ := strconv.ParseBool(os.Getenv(namedEnv))
	d, err := Open(os.Getenv(dirEnv), &Options{named: named})
	if err == nil {
		switch role {
		case "race":
			err = playRace(d)
		case "stuck":
			err = d.Put(context.Background(), "a/stuck", stuck(), blob.PutOptions{})
		}
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

const slots = 30

// playRace takes as many slots as it can, when told to start.
func playRace(d *Driver) error {
	if _, err := os.Stdin.Read(make([]byte, 1)); err != io.EOF {
		return err
	}
	for i := range slots {
		err := d.Put(context.Background(), fmt.Sprintf("log/%d/slot", i), blob.Bytes([]byte(strconv.Itoa(os.Getpid()))), blob.PutOptions{IfAbsent: true})
		switch {
		case err == nil:
			fmt.Println(i)
		case !errors.Is(err, fs.ErrExist):
			return err
		}
	}
	return nil
}

// stuck is a body that says when half of it is written and then never ends.
func stuck() blob.Body {
	const size = 8 << 20
	return blob.Body{Size: size, Open: func() (io.ReadCloser, error) {
		half := io.LimitReader(zeros{}, size/2)
		return io.NopCloser(io.MultiReader(half, waits{})), nil
	}}
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { return len(p), nil }

type waits struct{}

func (waits) Read([]byte) (int, error) {
	fmt.Println("half")
	select {}
}

func child(t *testing.T, role, dir string, opts Options) *exec.Cmd {
	t.Helper()
	cmd := exec.Command(os.Args[0], "-test.run=^$")
	cmd.Env = append(os.Environ(), roleEnv+"="+role, dirEnv+"="+dir, namedEnv+"="+strconv.FormatBool(opts.named))
	cmd.Stderr = os.Stderr
	return cmd
}

// Create-if-absent holds among processes: each slot has one winner, whose bytes it has
// (I4, P3).
func TestProcessesRace(t *testing.T) {
	eachMode(t, func(t *testing.T, opts Options) {
		dir := t.TempDir()
		const n = 16
		var cmds [n]*exec.Cmd
		var outs [n]strings.Builder
		start, all, err := os.Pipe()
		if err != nil {
			t.Fatal(err)
		}
		for i := range cmds {
			cmds[i] = child(t, "race", dir, opts)
			cmds[i].Stdin, cmds[i].Stdout = start, &outs[i]
			if err := cmds[i].Start(); err != nil {
				t.Fatal(err)
			}
		}
		if err := errors.Join(start.Close(), all.Close()); err != nil { // the end of the input is the start
			t.Fatal(err)
		}
		owner := map[string]int{}
		for i, cmd := range cmds {
			if err := cmd.Wait(); err != nil {
				t.Error(err)
			}
			for slot := range strings.FieldsSeq(outs[i].String()) {
				if other, taken := owner[slot]; taken {
					t.Errorf("slot %s was won by %d and %d", slot, other, cmd.Process.Pid)
				}
				owner[slot] = cmd.Process.Pid
			}
		}
		d := open(t, dir, opts)
		for i := range slots {
			slot := strconv.Itoa(i)
			got, err := os.ReadFile(d.path("log/" + slot + "/slot"))
			if err != nil || string(got) != strconv.Itoa(owner[slot]) {
				t.Errorf("slot %s holds %q, %v, won by %d", slot, got, err, owner[slot])
			}
		}
		if got := len(keys(t, d)); got != slots {
			t.Errorf("%d objects, want %d", got, slots)
		}
	})
}

// A process killed in the middle of a put leaves nothing visible, and no debris where
// there are unnamed files; else a sweep takes it, though not while the writer lives (I8).
func TestKill(t *testing.T) {
	eachMode(t, func(t *testing.T, opts Options) {
		dir := t.TempDir()
		cmd := child(t, "stuck", dir, opts)
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		if line, err := bufio.NewReader(out).ReadString('\n'); line != "half\n" {
			t.Fatalf("child said %q, %v", line, err)
		}
		d := open(t, dir, opts)
		if n, err := d.SweepTemp(t.Context()); n != 0 || err != nil {
			t.Errorf("sweep beside a living writer: %d, %v", n, err)
		}
		if err := cmd.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		_ = cmd.Wait() // killed

		if got := keys(t, d); len(got) != 0 {
			t.Errorf("visible after the kill: %q", got)
		}
		want := 0
		if opts.named {
			want = 1
		}
		if got := files(t, dir); len(got) != want {
			t.Errorf("left after the kill: %q", got)
		}
		for ; want >= 0; want-- {
			if n, err := d.SweepTemp(t.Context()); n != max(want, 0) || err != nil {
				t.Errorf("sweep: %d, %v, want %d", n, err, want)
			}
		}
		wantFiles(t, dir)
		put(t, d, "a/stuck", "now it works")
	})
}

// A sweep that races with writers takes none of their files.
func TestSweepRace(t *testing.T) {
	dir := t.TempDir()
	d := open(t, dir, Options{named: true})
	done := make(chan error)
	go func() {
		var err error
		for i := 0; i < 200 && err == nil; i++ {
			err = d.Put(context.Background(), "k/"+strconv.Itoa(i), blob.Bytes([]byte("v")), blob.PutOptions{})
		}
		done <- err
	}()
	for {
		select {
		case err := <-done:
			if err != nil {
				t.Fatal(err)
			}
			if got := len(keys(t, d)); got != 200 {
				t.Errorf("%d objects", got)
			}
			return
		default:
		}
		if _, err := d.SweepTemp(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
}

// A file system that cannot rename without replacing links instead, and an answer that a
// server gives to a request sent twice is understood.
func TestLinkNamed(t *testing.T) {
	d := open(t, t.TempDir(), Options{named: true})
	file, err := d.create()
	if err != nil {
		t.Fatal(err)
	}
	defer file.discard()
	target := filepath.Join(d.root, "k")
	if err := os.Link(file.name, target); err != nil {
		t.Fatal(err)
	}
	if err := file.linkNamed(target); err != nil {
		t.Errorf("our own link: %v", err)
	}
	other, err := d.create()
	if err != nil {
		t.Fatal(err)
	}
	defer other.discard()
	if err := other.linkNamed(target); !errors.Is(err, fs.ErrExist) {
		t.Errorf("another's link: %v", err)
	}
}
