package server

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/snapferry/snapferry/internal/cpwire"
)

// authority makes certificates for a test.
type authority struct {
	t    *testing.T
	dir  string
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
	n    int64
}

func newAuthority(t *testing.T) *authority {
	a := &authority{t: t, dir: t.TempDir()}
	a.issue("ca", &x509.Certificate{IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign})
	return a
}

// issue writes NAME.pem and NAME.key; the first certificate signs itself and then all others.
func (a *authority) issue(name string, c *x509.Certificate) {
	a.t.Helper()
	a.n++
	c.SerialNumber, c.Subject = big.NewInt(a.n), pkix.Name{CommonName: name}
	c.NotBefore, c.NotAfter = time.Now().Add(-time.Hour), time.Now().Add(time.Hour)
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		a.t.Fatal(err)
	}
	if a.cert == nil {
		a.cert, a.key = c, key
	}
	der, err := x509.CreateCertificate(rand.Reader, c, a.cert, &key.PublicKey, a.key)
	if err != nil {
		a.t.Fatal(err)
	}
	keyDER, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		a.t.Fatal(err)
	}
	for file, block := range map[string]*pem.Block{
		name + ".pem": {Type: "CERTIFICATE", Bytes: der}, name + ".key": {Type: "PRIVATE KEY", Bytes: keyDER},
	} {
		if err := os.WriteFile(filepath.Join(a.dir, file), pem.EncodeToMemory(block), 0o600); err != nil {
			a.t.Fatal(err)
		}
	}
}

// member returns the certificate of one party, which serves and asks with it.
func (a *authority) member(name string) *TLS {
	a.issue(name, &x509.Certificate{
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	})
	in := func(file string) string { return filepath.Join(a.dir, file) }
	return &TLS{CertFile: in(name + ".pem"), KeyFile: in(name + ".key"), CAFile: in("ca.pem"), RequireClientCert: true}
}

// Members and clients show each other certificates; without one there is no answer.
func TestRealTLS(t *testing.T) {
	ca := newAuthority(t)
	initial := map[string]string{"n1": "https://" + freeAddress(t), "n2": "https://" + freeAddress(t)}
	for id, url := range initial {
		s, err := Start(context.Background(), Options{
			ID: id, Data: t.TempDir(), Listen: url[len("https://"):], InitialCluster: initial, TLS: ca.member(id),
		})
		if err != nil {
			t.Fatal(err)
		}
		defer func() {
			if err := s.Close(); err != nil {
				t.Error(err)
			}
		}()
	}
	urls := []string{initial["n1"], initial["n2"]}
	config, err := ca.member("client").Client()
	if err != nil {
		t.Fatal(err)
	}
	c, err := cpwire.New(urls, &cpwire.Options{TLS: config})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	fill(t, c, task("p7"), 3)
	s, err := c.Cluster(t.Context())
	if err != nil || len(s.Members) != 2 || !s.Members[0].Reachable || !s.Members[1].Reachable {
		t.Errorf("status %+v, %v", s, err)
	}

	stranger, err := cpwire.New(urls, &cpwire.Options{TLS: &tls.Config{RootCAs: config.RootCAs}, Patience: time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	defer stranger.Close()
	if e, err := stranger.Head(t.Context(), task("p7")); err == nil {
		t.Errorf("a client without a certificate reads %+v", e)
	}
	patient, err := cpwire.New(urls, &cpwire.Options{TLS: &tls.Config{RootCAs: config.RootCAs}, Patience: time.Hour})
	if err != nil {
		t.Fatal(err)
	}
	defer patient.Close()
	if s, err := patient.Cluster(t.Context()); err == nil {
		t.Errorf("a client without a certificate is told %+v", s)
	}
}
