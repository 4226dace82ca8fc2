// Package certtest makes the certificates of a group for tests.
//
// An Authority signs certificates for 127.0.0.1, with which a member serves and asks, and
// keeps all of them as PEM files in one directory, as the settings of TLS name them. They
// are valid for an hour. An Authority is used by one goroutine at a time.
package certtest

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
	"path/filepath"
	"time"
)

// Authority signs certificates.
type Authority struct {
	CAFile string // its own certificate

	dir  string
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
	last int64 // serial number
}

// New makes an authority of the given name. Its certificate is NAME.pem in the directory.
func New(dir, name string) (*Authority, error) {
	a := &Authority{dir: dir}
	var err error
	a.CAFile, _, err = a.issue(name, &x509.Certificate{
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	})
	return a, err
}

// Issue makes a key and a certificate for it: NAME.key and NAME.pem in the directory.
func (a *Authority) Issue(name string) (certFile, keyFile string, err error) {
	return a.issue(name, &x509.Certificate{
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, KeyUsage: x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	})
}

// issue signs c: the first one by itself, and then all others by the first. The key of the
// authority is not written.
func (a *Authority) issue(name string, c *x509.Certificate) (certFile, keyFile string, err error) {
	a.last++
	c.SerialNumber, c.Subject = big.NewInt(a.last), pkix.Name{CommonName: name}
	c.NotBefore, c.NotAfter = time.Now().Add(-time.Hour), time.Now().Add(time.Hour)
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return "", "", fmt.Errorf("make key of %s: %w", name, err)
	}
	self := a.cert == nil
	if self {
		a.cert, a.key = c, key
	}
	der, err := x509.CreateCertificate(rand.Reader, c, a.cert, &key.PublicKey, a.key)
	if err != nil {
		return "", "", fmt.Errorf("sign certificate of %s: %w", name, err)
	}
	if certFile, err = a.write(name+".pem", "CERTIFICATE", der); err != nil || self {
		return certFile, "", err
	}
	if der, err = x509.MarshalPKCS8PrivateKey(key); err != nil {
		return "", "", fmt.Errorf("encode key of %s: %w", name, err)
	}
	keyFile, err = a.write(name+".key", "PRIVATE KEY", der)
	return certFile, keyFile, err
}

func (a *Authority) write(file, kind string, der []byte) (string, error) {
	path := filepath.Join(a.dir, file)
	return path, os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600)
}
