package source

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/zeebo/blake3"
	"golang.org/x/sys/unix"
)

// safeFileSystems are those on which TestMappedStoreS3 shows that, after a file was
// written back, a store through a mapping moves its times. On tmpfs it does not.
var safeFileSystems = map[string]bool{"ext4": true, "xfs": true, "btrfs": true}

// A volume is the file system of a store, as far as the cache must know it.
type volume struct {
	device uint64
	kind   string
	id     [8]byte
	boot   string
}

// volumeOf describes the file system a directory lies on; false if identities on it
// prove nothing.
func volumeOf(dir string) (v volume, ok bool) {
	fd, err := unix.Open(dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return v, false
	}
	defer unix.Close(fd)
	st, err := statFD(fd)
	if err != nil || st.Mask&unix.STATX_MNT_ID == 0 {
		return v, false
	}
	var sfs unix.Statfs_t
	if err := unix.Fstatfs(fd, &sfs); err != nil {
		return v, false
	}
	v.device = device(&st)
	v.kind = mountKind(st.Mnt_id)
	binary.LittleEndian.PutUint32(v.id[:4], uint32(sfs.Fsid.Val[0]))
	binary.LittleEndian.PutUint32(v.id[4:], uint32(sfs.Fsid.Val[1]))
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return v, false
	}
	v.boot = strings.TrimSpace(string(boot))
	return v, safeFileSystems[v.kind]
}

// mountKind returns the type of the file system that is mounted under a number.
func mountKind(mount uint64) string {
	f, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return ""
	}
	defer f.Close()
	want := strconv.FormatUint(mount, 10) + " "
	for lines := bufio.NewScanner(f); lines.Scan(); {
		if !strings.HasPrefix(lines.Text(), want) {
			continue
		}
		_, after, _ := strings.Cut(lines.Text(), " - ")
		kind, _, _ := strings.Cut(after, " ")
		return kind
	}
	return ""
}

// scope digests all that must be the same for a recorded identity to mean anything:
// boot, file system, path, and the root directory of the store, which a restore
// replaces.
func (v volume) scope(key string) ([32]byte, error) {
	var st unix.Statx_t
	if err := unix.Statx(unix.AT_FDCWD, key, unix.AT_SYMLINK_NOFOLLOW, statMask, &st); err != nil {
		return [32]byte{}, fmt.Errorf("%s: %w", key, err)
	}
	root := identity(&st)
	h := blake3.New()
	fmt.Fprintf(h, "%q %q %x %d %q %d %d.%d", v.boot, v.kind, v.id, v.device, key, root.Ino, root.BTime.Sec, root.BTime.Nsec)
	var sum [32]byte
	h.Sum(sum[:0])
	return sum, nil
}

// A probe is an unnamed file that tells what time its file system stamps on files.
type probe struct {
	device uint64
	dirs   []string // the file is made in the first that lets it
	file   *os.File
}

const (
	probeBound = 50 * time.Millisecond // for the time to move
	coarsest   = 2 * time.Second       // if it does not
)

func newProbe(device uint64, dirs ...string) *probe {
	return &probe{device: device, dirs: dirs}
}

// now stamps the probe and returns the stamp. Every later stamp on this file system
// is at least that (as long as nobody sets the clock back).
func (p *probe) now() (Timespec, error) {
	if p.file == nil {
		if err := p.open(); err != nil {
			return Timespec{}, err
		}
	}
	fd := int(p.file.Fd())
	if _, err := unix.Pwrite(fd, []byte{0}, 0); err != nil {
		return Timespec{}, err
	}
	st, err := statFD(fd)
	return timespec(st.Ctime), err
}

func (p *probe) open() error {
	err := errors.New("no directory for a probe file")
	for _, dir := range p.dirs {
		var fd int
		fd, err = unix.Open(dir, unix.O_TMPFILE|unix.O_RDWR|unix.O_CLOEXEC, 0o600)
		if err != nil {
			continue
		}
		if st, statErr := statFD(fd); statErr != nil || device(&st) != p.device {
			unix.Close(fd)
			err = fmt.Errorf("%s lies on another file system", dir)
			continue
		}
		p.file = os.NewFile(uintptr(fd), "probe")
		return nil
	}
	return err
}

func (p *probe) close() error {
	if p.file == nil {
		return nil
	}
	err := p.file.Close()
	p.file = nil
	return err
}

// granularity stamps until the time moves and returns the step.
func (p *probe) granularity() (time.Duration, error) {
	start, err := p.now()
	if err != nil {
		return 0, err
	}
	for began := time.Now(); time.Since(began) < probeBound; {
		t, err := p.now()
		if err != nil {
			return 0, err
		}
		if step := t.sub(start); step > 0 {
			return step, nil
		}
	}
	return coarsest, nil
}

// until waits until a stamp is later than t, and returns it.
func (p *probe) until(ctx context.Context, t Timespec) (Timespec, error) {
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for {
		now, err := p.now()
		if err != nil || now.Compare(t) > 0 {
			return now, err
		}
		select {
		case <-ctx.Done():
			return Timespec{}, ctx.Err()
		case <-tick.C:
		}
	}
}

// locked calls f while no other process that uses the cache directory is in f.
func locked(dir string, f func() error) error {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer d.Close()
	for {
		err := unix.Flock(int(d.Fd()), unix.LOCK_EX)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return fmt.Errorf("lock %s: %w", dir, err)
		}
		return f()
	}
}
