//go:build !linux

package blobservers

import (
	"net"
	"os"
	"syscall"
)

// dieWithParent has nothing to offer here: a server outlives a test that is killed.
func dieWithParent() *syscall.SysProcAttr { return nil }

// listens tells whether anybody listens on a port.
func listens(_ int, port string) bool {
	c, err := net.Dial("tcp", net.JoinHostPort("127.0.0.1", port))
	if err != nil {
		return false
	}
	return c.Close() == nil
}

// lockFile locks nothing here: two processes may do the same work.
func lockFile(*os.File) error { return nil }
