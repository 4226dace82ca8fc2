package blobservers

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
)

// dieWithParent lets the kernel end a server whose test was killed.
func dieWithParent() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
}

// listens tells whether a process has the listening socket of a port, going by /proc.
func listens(pid int, port string) bool {
	for _, table := range []string{"tcp", "tcp6"} {
		data, err := os.ReadFile(fmt.Sprintf("/proc/%d/net/%s", pid, table))
		if err != nil {
			continue
		}
		if inode := listener(string(data), port); inode != "" && holds(pid, inode) {
			return true
		}
	}
	return false
}

// listener finds the inode of a port's listening socket in a table of /proc/net.
func listener(table, port string) string {
	const listening = "0A"
	n, err := strconv.Atoi(port)
	if err != nil {
		return ""
	}
	suffix := fmt.Sprintf(":%04X", n)
	for line := range strings.Lines(table) {
		f := strings.Fields(line)
		if len(f) > 9 && f[3] == listening && strings.HasSuffix(f[1], suffix) {
			return f[9]
		}
	}
	return ""
}

// holds tells whether a process has a socket open.
func holds(pid int, inode string) bool {
	fds, err := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", pid))
	if err != nil {
		return false
	}
	for _, fd := range fds {
		if to, err := os.Readlink(fd); err == nil && to == "socket:["+inode+"]" {
			return true
		}
	}
	return false
}

// lockFile waits for a lock that goes with the process, however it ends.
func lockFile(f *os.File) error { return syscall.Flock(int(f.Fd()), syscall.LOCK_EX) }
