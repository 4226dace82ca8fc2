package peer

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net/http"
	"os"
	"time"
)

// TLS names the files of a member's certificates, all PEM.
type TLS struct {
	CertFile, KeyFile string // what the member shows, to clients and to other members
	CAFile            string // who signs the others; empty for the system's roots
	RequireClientCert bool   // whoever connects must show a certificate of the CA too
}

// Server returns the configuration of a listener.
func (t *TLS) Server() (*tls.Config, error) {
	if t.CertFile == "" || t.KeyFile == "" {
		return nil, errors.New("TLS: a member needs a certificate and its key")
	}
	c, err := t.load()
	if err != nil {
		return nil, err
	}
	c.NextProtos = []string{"h2", "http/1.1"}
	if t.RequireClientCert {
		if c.RootCAs == nil {
			return nil, errors.New("TLS: client certificates need a CA file to check them")
		}
		c.ClientCAs, c.ClientAuth = c.RootCAs, tls.RequireAndVerifyClientCert
	}
	return c, nil
}

// Client returns the configuration for connections to other members. A nil TLS trusts
// the system's roots and shows no certificate.
func (t *TLS) Client() (*tls.Config, error) {
	if t == nil {
		t = &TLS{}
	}
	c, err := t.load()
	if err != nil {
		return nil, err
	}
	c.ClientSessionCache = tls.NewLRUClientSessionCache(0) // reconnects are cheap
	return c, nil
}

func (t *TLS) load() (*tls.Config, error) {
	c := &tls.Config{MinVersion: tls.VersionTLS13}
	if t.CertFile != "" || t.KeyFile != "" {
		pair, err := tls.LoadX509KeyPair(t.CertFile, t.KeyFile)
		if err != nil {
			return nil, fmt.Errorf("TLS certificate: %w", err)
		}
		c.Certificates = []tls.Certificate{pair}
	}
	if t.CAFile != "" {
		data, err := os.ReadFile(t.CAFile)
		if err != nil {
			return nil, fmt.Errorf("TLS CA: %w", err)
		}
		c.RootCAs = x509.NewCertPool()
		if !c.RootCAs.AppendCertsFromPEM(data) {
			return nil, fmt.Errorf("TLS CA %s: no certificate in it", t.CAFile)
		}
	}
	return c, nil
}

// What the server of a member gives a stream: enough that a round trip of 10 ms does not
// slow the log down, and no more than a few streams can hold.
const (
	streamWindow     = 4 << 20
	connectionWindow = 8 << 20
	readFrame        = 1 << 20
	headerPatience   = 10 * time.Second
)

// ConfigureServer prepares the server on which a member listens: HTTP/1.1 and HTTP/2, the
// latter also without TLS. With a TLS it is to be run by ServeTLS with empty file names,
// with nil by Serve.
func ConfigureServer(s *http.Server, t *TLS) error {
	p := new(http.Protocols)
	p.SetHTTP1(true)
	if t == nil {
		p.SetUnencryptedHTTP2(true)
	} else {
		c, err := t.Server()
		if err != nil {
			return err
		}
		s.TLSConfig = c
		p.SetHTTP2(true)
	}
	s.Protocols = p
	s.HTTP2 = &http.HTTP2Config{
		MaxReceiveBufferPerStream:     streamWindow,
		MaxReceiveBufferPerConnection: connectionWindow,
		MaxReadFrameSize:              readFrame,
	}
	if s.ReadHeaderTimeout == 0 {
		s.ReadHeaderTimeout = headerPatience
	}
	return nil
}
