package server

import (
	"context"
	"crypto/tls"
	"testing"
	"time"

	"github.com/snapferry/snapferry/internal/certtest"
	"github.com/snapferry/snapferry/internal/cpwire"
)

// shown returns the certificate of one party, which serves and asks with it.
func shown(t *testing.T, ca *certtest.Authority, name string) *TLS {
	t.Helper()
	certFile, keyFile, err := ca.Issue(name)
	if err != nil {
		t.Fatal(err)
	}
	return &TLS{CertFile: certFile, KeyFile: keyFile, CAFile: ca.CAFile, RequireClientCert: true}
}

// Members and clients show each other certificates; without one there is no answer.
func TestRealTLS(t *testing.T) {
	ca, err := certtest.New(t.TempDir(), "ca")
	if err != nil {
		t.Fatal(err)
	}
	initial := map[string]string{"n1": "https://" + freeAddress(t), "n2": "https://" + freeAddress(t)}
	for id, url := range initial {
		s, err := Start(context.Background(), Options{
			ID: id, Data: t.TempDir(), Listen: url[len("https://"):], InitialCluster: initial, TLS: shown(t, ca, id),
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
	config, err := shown(t, ca, "client").Client()
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
