package source

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

const xattrTries = 8

func (m *image) Xattrs(path string) ([]Xattr, error) {
	if _, err := m.find(path); err != nil {
		return nil, fmt.Errorf("read attributes %w", m.explain(path, err))
	}
	attrs, err := m.xattrs(m.real(path))
	if err != nil {
		return nil, fmt.Errorf("read attributes %w", m.explain(path, err))
	}
	return attrs, nil
}

// xattrs reads through a descriptor that may stand for a symbolic link or a file
// that cannot be opened for reading. No call takes attributes from such a
// descriptor, but its name in /proc leads to exactly that inode.
func (m *image) xattrs(path string) ([]Xattr, error) {
	fd, err := m.tree.open(path, unix.O_PATH)
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd)
	link := fmt.Sprintf("/proc/self/fd/%d", fd)

	for range xattrTries {
		attrs, err := readXattrs(link)
		if !errors.Is(err, errGone) {
			return attrs, err
		}
	}
	return nil, fmt.Errorf("%w: attributes come and go", errGone)
}

// readXattrs returns errGone when an attribute changed between list and read.
func readXattrs(link string) ([]Xattr, error) {
	list, err := readGrown(func(buf []byte) (int, error) { return unix.Listxattr(link, buf) })
	if err == unix.ENOTSUP {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var attrs []Xattr
	for name := range strings.SplitSeq(string(list), "\x00") {
		if !keptXattr(name) {
			continue
		}
		value, err := readGrown(func(buf []byte) (int, error) { return unix.Getxattr(link, name, buf) })
		switch {
		case err == nil:
			attrs = append(attrs, Xattr{Name: name, Value: value})
		case err == unix.ENODATA:
			return nil, errGone
		case err == unix.ENOTSUP, err == unix.EPERM && !strings.HasPrefix(name, "user."):
			// Listed, but not for this process: kept by those who may.
		default:
			return nil, fmt.Errorf("%s: %w", name, err)
		}
	}
	slices.SortFunc(attrs, func(a, b Xattr) int { return strings.Compare(a.Name, b.Name) })
	return attrs, nil
}

// readGrown calls get with buffers that grow until the answer fits.
func readGrown(get func([]byte) (int, error)) ([]byte, error) {
	for {
		n, err := get(nil)
		if err != nil || n == 0 {
			return nil, err
		}
		buf := make([]byte, n)
		n, err = get(buf)
		if err == unix.ERANGE {
			continue
		}
		if err != nil {
			return nil, err
		}
		return buf[:n], nil
	}
}

func keptXattr(name string) bool {
	switch name {
	case "security.capability", "system.posix_acl_access", "system.posix_acl_default":
		return true
	}
	return strings.HasPrefix(name, "user.") || strings.HasPrefix(name, "trusted.")
}
