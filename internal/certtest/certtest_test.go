package certtest

import (
	"crypto/tls"
	"crypto/x509"
	"io"
	"net"
	"os"
	"testing"
)

// Both sides believe a certificate of their own authority, and none of another one.
func TestCertificates(t *testing.T) {
	ours, err := New(t.TempDir(), "ca")
	if err != nil {
		t.Fatal(err)
	}
	other, err := New(t.TempDir(), "ca")
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		by   *Authority
		good bool
	}{{ours, true}, {other, false}} {
		server, client := config(t, ours, ours), config(t, c.by, ours)
		a, b := net.Pipe()
		ended := make(chan error, 1)
		go func() {
			ended <- tls.Server(a, server).Handshake()
			a.Close()
		}()
		_, _ = io.Copy(io.Discard, tls.Client(b, client)) // until the server, which decides last, is through
		err := <-ended
		b.Close()
		if (err == nil) != c.good {
			t.Errorf("good %v: the server says %v", c.good, err)
		}
	}
}

// config shows a certificate of one authority and believes in another one.
func config(t *testing.T, shown, believed *Authority) *tls.Config {
	t.Helper()
	certFile, keyFile, err := shown.Issue("member")
	if err != nil {
		t.Fatal(err)
	}
	pair, err := tls.LoadX509KeyPair(certFile, keyFile)
	if err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile(believed.CAFile)
	if err != nil {
		t.Fatal(err)
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(data) {
		t.Fatal("no certificate in the file of the authority")
	}
	return &tls.Config{
		Certificates: []tls.Certificate{pair}, RootCAs: pool, ClientCAs: pool, ServerName: "127.0.0.1",
		ClientAuth: tls.RequireAndVerifyClientCert, MinVersion: tls.VersionTLS13, SessionTicketsDisabled: true,
	}
}
