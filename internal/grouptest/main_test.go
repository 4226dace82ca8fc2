//go:build linux

package grouptest

import (
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

const (
	// commandVar tells a test process that runs in a world of its own where the command is.
	commandVar = "SNAPFERRY_GROUPTEST_COMMAND"
	// plainVar keeps the tests on loopback addresses.
	plainVar = "SNAPFERRY_GROUPTEST_LOOPBACK"
)

// command is the snapferry under test.
var command string

// namespaces says that members get network namespaces, and that mounts are the test's own.
var namespaces bool

func TestMain(m *testing.M) { os.Exit(run(m)) }

func run(m *testing.M) int {
	if command = os.Getenv(commandVar); command != "" {
		if err := settleIn(); err != nil {
			fmt.Fprintln(os.Stderr, "grouptest:", err)
			return 1
		}
		namespaces = os.Getenv(plainVar) == "" && ipCommand("link add probe type bridge", "link del probe") == nil
		return runHere(m)
	}

	dir, err := os.MkdirTemp("", "grouptest")
	if err == nil {
		defer os.RemoveAll(dir)
		command, err = build(dir)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "grouptest:", err)
		return 1
	}
	if code, ok := emigrate(dir); ok {
		return code
	}
	return runHere(m)
}

// runHere runs the tests. They wait more than they compute.
func runHere(m *testing.M) int {
	flag.Parse()
	if n := flag.Lookup("test.parallel"); n.Value.String() == "2" {
		_ = n.Value.Set("3") // a number, so it does
	}
	return m.Run()
}

// build builds the command, with the race detector if the tests have it.
func build(dir string) (string, error) {
	path := filepath.Join(dir, "snapferry")
	args := []string{"build", "-o", path}
	if raceDetector {
		args = append(args, "-race")
	}
	out, err := exec.Command("go", append(args, "github.com/snapferry/snapferry/cmd/snapferry")...).CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("build the command: %w\n%s", err, out)
	}
	return path, nil
}

// emigrate runs this program again as the first process of a world with its own processes,
// mounts and network. When it ends the kernel ends what it has left, so nothing outlives a
// test that panics or is killed. Where that is not allowed it reports false.
func emigrate(dir string) (code int, ok bool) {
	runtime.LockOSThread() // Pdeathsig is about the thread
	defer runtime.UnlockOSThread()
	cmd := exec.Command(os.Args[0], os.Args[1:]...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.Env = append(os.Environ(), commandVar+"="+command, "TMPDIR="+dir)
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: syscall.CLONE_NEWNET | syscall.CLONE_NEWNS | syscall.CLONE_NEWPID,
		Pdeathsig:  syscall.SIGKILL,
	}
	if err := cmd.Start(); err != nil {
		return 0, false
	}
	if err := cmd.Wait(); err != nil && !cmd.ProcessState.Exited() {
		fmt.Fprintln(os.Stderr, "grouptest:", err)
		return 1, true
	}
	return cmd.ProcessState.ExitCode(), true
}

// settleIn makes the mounts private, shows the processes of this world in /proc, and lets
// loopback addresses work.
func settleIn() error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make mounts private: %w", err)
	}
	if err := unix.Mount("proc", "/proc", "proc", 0, ""); err != nil {
		return fmt.Errorf("mount proc: %w", err)
	}
	s, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM, 0)
	if err != nil {
		return err
	}
	defer unix.Close(s)
	lo, err := unix.NewIfreq("lo")
	if err == nil {
		lo.SetUint16(unix.IFF_UP)
		err = unix.IoctlIfreq(s, unix.SIOCSIFFLAGS, lo)
	}
	if err != nil {
		return fmt.Errorf("loopback: %w", err)
	}
	return nil
}

// ipCommand runs lines of the ip command.
func ipCommand(lines ...string) error {
	cmd := exec.Command("ip", "-batch", "-")
	if cmd.Err != nil {
		for _, dir := range []string{"/usr/sbin", "/sbin"} {
			if path, err := exec.LookPath(filepath.Join(dir, "ip")); err == nil {
				cmd = exec.Command(path, "-batch", "-")
			}
		}
	}
	text := strings.Join(lines, "\n") + "\n"
	cmd.Stdin = strings.NewReader(text)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("ip: %w: %s\n%s", err, out, text)
	}
	return nil
}
