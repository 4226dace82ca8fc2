package raftnode_test

import (
	"testing"

	"github.com/snapferry/snapferry/internal/certtest"
	"github.com/snapferry/snapferry/raftnode"
)

// certificates makes one certificate for all members.
func certificates(t *testing.T) *raftnode.TLS {
	t.Helper()
	ca, err := certtest.New(t.TempDir(), "ca")
	if err != nil {
		t.Fatal(err)
	}
	certFile, keyFile, err := ca.Issue("member")
	if err != nil {
		t.Fatal(err)
	}
	return &raftnode.TLS{CertFile: certFile, KeyFile: keyFile, CAFile: ca.CAFile, RequireClientCert: true}
}

// TestSnapshotsOverTLS: messages and snapshots alike show certificates and check them.
func TestSnapshotsOverTLS(t *testing.T) {
	g := newGroupWith(t, 3, short, certificates(t))
	g.fill("k", 500)
	g.settled()
	f := g.follower()
	last := f.node.Status().Last
	g.stop(f)
	g.fill("l", 1500)
	g.eventually("the log is cut past the member that is away", func() bool { return g.leader().node.Status().First > last+1 })
	g.start(f, nil)
	g.eventually("it installs", func() bool { return f.node.Status().Snaps.Stats.Installed > 0 })
	g.level()
}
