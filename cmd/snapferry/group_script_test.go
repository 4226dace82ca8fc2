package main

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"os"
	"time"

	"github.com/rogpeppe/go-internal/testscript"
)

// cmdPorts holds all ports until it has as many as it needs, so that they differ.
func cmdPorts(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) == 0 {
		ts.Fatalf("usage: ports var...")
	}
	for _, name := range args {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		ts.Check(err)
		defer l.Close()
		ts.Setenv(name, l.Addr().String())
	}
}

func cmdUntil(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) < 4 {
		ts.Fatalf("usage: until path =|>=|<=|~ value command...")
	}
	look := time.NewTicker(100 * time.Millisecond)
	defer look.Stop()
	late := time.After(90 * time.Second)
	for {
		err := ts.Exec(args[3], args[4:]...)
		v, ferr := find(ts.ReadFile("stdout"), args[0])
		if err == nil && ferr == nil && compare(fmt.Sprint(v), args[1], args[2]) {
			return
		}
		select {
		case <-look.C:
		case <-late:
			ts.Fatalf("%s did not become %s %s: it is %v (%v, %v): %s", args[0], args[1], args[2], v, err, ferr, ts.ReadFile("stdout"))
		}
	}
}

// authority signs certificates.
type authority struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

func cmdCerts(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 0 {
		ts.Fatalf("usage: certs")
	}
	ours, other := newAuthority(ts, "ca.pem"), newAuthority(ts, "other.pem")
	ours.issue(ts, "n1")
	other.issue(ts, "stranger")
}

func newAuthority(ts *testscript.TestScript, file string) *authority {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	ts.Check(err)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: file}, IsCA: true, BasicConstraintsValid: true,
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), KeyUsage: x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	ts.Check(err)
	cert, err := x509.ParseCertificate(der)
	ts.Check(err)
	writePEM(ts, file, "CERTIFICATE", der)
	return &authority{cert, key}
}

// issue makes NAME.pem and NAME.key for this machine.
func (a *authority) issue(ts *testscript.TestScript, name string) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	ts.Check(err)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(2), Subject: pkix.Name{CommonName: name}, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), KeyUsage: x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, a.cert, &key.PublicKey, a.key)
	ts.Check(err)
	writePEM(ts, name+".pem", "CERTIFICATE", der)
	der, err = x509.MarshalPKCS8PrivateKey(key)
	ts.Check(err)
	writePEM(ts, name+".key", "PRIVATE KEY", der)
}

func writePEM(ts *testscript.TestScript, file, kind string, der []byte) {
	ts.Check(os.WriteFile(ts.MkAbs(file), pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600))
}
