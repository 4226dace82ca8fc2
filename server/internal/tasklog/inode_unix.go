//go:build unix

package tasklog

import "syscall"

// inodeOf finds the inode in what Stat says.
func inodeOf(sys any) (uint64, bool) {
	if st, ok := sys.(*syscall.Stat_t); ok {
		return st.Ino, true
	}
	return 0, false
}
