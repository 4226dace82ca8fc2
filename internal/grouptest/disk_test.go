//go:build linux

package grouptest

import (
	"fmt"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// disk is a small disk of one member, in memory.
type disk struct {
	t   testing.TB
	dir string
}

// giveDisk gives a member that has not run yet a disk of its own.
func (m *member) giveDisk(mib int) *disk {
	m.g.t.Helper()
	d := &disk{m.g.t, m.data}
	if err := unix.Mount("tmpfs", d.dir, "tmpfs", 0, fmt.Sprintf("size=%dm", mib)); err != nil {
		m.g.t.Fatalf("mount a disk: %v", err)
	}
	m.g.after = append(m.g.after, func() error { return unix.Unmount(d.dir, unix.MNT_DETACH) })
	return d
}

// fill leaves no room at all.
func (d *disk) fill() {
	d.t.Helper()
	var err error
	for range 1000 { // the member goes on writing meanwhile
		var s unix.Statfs_t
		if err = unix.Statfs(d.dir, &s); err == nil {
			err = d.resize(fmt.Sprint((s.Blocks - s.Bfree) * uint64(s.Bsize)))
		}
		if err == nil {
			return
		}
	}
	d.t.Fatalf("fill the disk: %v", err)
}

// grow makes room.
func (d *disk) grow(mib int) {
	d.t.Helper()
	if err := d.resize(fmt.Sprintf("%dm", mib)); err != nil {
		d.t.Fatal(err)
	}
}

func (d *disk) resize(size string) error {
	return unix.Mount("tmpfs", d.dir, "tmpfs", unix.MS_REMOUNT, "size="+size)
}

// restart brings a member back that may have ended by itself.
func (m *member) restart() {
	m.g.t.Helper()
	if code := m.finish(syscall.SIGTERM); code != 0 && code != 1 {
		m.g.t.Errorf("%s ended with exit code %d:\n%s", m.id, code, tail(m.log, 5))
	}
	m.start()
}

// stopsOrServes waits until a member that cannot write has ended with exit code 1, and
// otherwise wants it to be in service and not to fill the disk that its log is on.
func (m *member) stopsOrServes() {
	m.g.t.Helper()
	wait := time.NewTimer(10 * time.Second)
	defer wait.Stop()
	select {
	case <-m.process().ended:
		if code := m.process().cmd.ProcessState.ExitCode(); code != 1 {
			m.g.t.Errorf("%s ended with exit code %d, want 1", m.id, code)
		}
	case <-wait.C:
		if s := m.g.status(m); s.Why == "closed" {
			m.g.t.Errorf("%s serves no more and has not ended either", m.id)
		}
	}
	if lines := strings.Count(tail(m.log, 100_000), "\n"); lines > 1000 {
		m.g.t.Errorf("%s has logged %d lines about its full disk", m.id, lines)
	}
}

// A follower whose disk is full stops or refuses, and does no harm to the others: they go
// on, and their logs are cut. With room again it catches up.
func TestFaultFullDisk(t *testing.T) {
	long(t)
	if !namespaces {
		t.Skip("makes a mount, so it needs a mount namespace")
	}
	t.Parallel()
	var d *disk
	g := newGroup(t, options{entries: 200, trail: 50, prepare: func(g *group) { d = g.members[2].giveDisk(220) }})
	full := g.members[2]
	h := g.begin(newSeed(t), load{body: 4000, tasks: 12})
	h.progress(300)
	if g.leader() == full {
		g.must("transfer-leader", "--id", "n1")
	}
	full.mayEnd()
	d.fill()
	at := g.status(g.leader()).Applied
	h.progress(1500)
	g.eventually("logs cut without the full member", func(s *status) bool {
		return s.member("n1").FirstIndex > at && s.member("n2").FirstIndex > at
	})
	full.stopsOrServes()
	d.grow(400)
	full.restart()
	g.eventually("it has caught up", func(s *status) bool { return s.member("n3").Reachable && s.member("n3").Applied > at })
	h.end()
}

// A leader whose disk is full makes way for another one.
func TestFaultFullDiskOfLeader(t *testing.T) {
	long(t)
	if !namespaces {
		t.Skip("makes a mount, so it needs a mount namespace")
	}
	t.Parallel()
	var d *disk
	g := newGroup(t, options{prepare: func(g *group) { d = g.members[2].giveDisk(220) }})
	full := g.members[2]
	h := g.begin(newSeed(t), load{body: 30_000, tasks: 12})
	h.progress(50)
	g.must("transfer-leader", "--id", full.id)
	full.mayEnd()
	d.fill()
	g.eventually("another leader", func(s *status) bool { return s.Leader != "" && s.Leader != full.id })
	h.progress(100)
	full.stopsOrServes()
	d.grow(400)
	full.restart()
	h.end()
}
