package raftnode_test

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/snapferry/snapferry/raftnode"
)

// certificates makes a CA and one certificate of it for all members.
func certificates(t *testing.T) *raftnode.TLS {
	t.Helper()
	dir := t.TempDir()
	caKey, caCert := issue(t, nil, nil, filepath.Join(dir, "ca.pem"), "")
	issue(t, caKey, caCert, filepath.Join(dir, "member.pem"), filepath.Join(dir, "member.key"))
	return &raftnode.TLS{
		CertFile: filepath.Join(dir, "member.pem"), KeyFile: filepath.Join(dir, "member.key"),
		CAFile: filepath.Join(dir, "ca.pem"), RequireClientCert: true,
	}
}

func issue(t *testing.T, caKey *ecdsa.PrivateKey, ca *x509.Certificate, certFile, keyFile string) (*ecdsa.PrivateKey, *x509.Certificate) {
	t.Helper()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	must(err)
	cert := &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()), Subject: pkix.Name{CommonName: filepath.Base(certFile)},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, BasicConstraintsValid: true, IsCA: ca == nil,
		KeyUsage:    x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	if ca == nil {
		ca, caKey = cert, key
	}
	der, err := x509.CreateCertificate(rand.Reader, cert, ca, &key.PublicKey, caKey)
	must(err)
	must(os.WriteFile(certFile, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), 0o600))
	if keyFile != "" {
		raw, err := x509.MarshalPKCS8PrivateKey(key)
		must(err)
		must(os.WriteFile(keyFile, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: raw}), 0o600))
	}
	parsed, err := x509.ParseCertificate(der)
	must(err)
	return key, parsed
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
