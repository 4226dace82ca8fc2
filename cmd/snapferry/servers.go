package main

import (
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"net/url"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/snapferry/snapferry/internal/cpwire"
)

// serverFlags name the members of a group that a verb talks to. Any member will do: it
// knows the leader, and the others are asked when it does not answer.
type serverFlags struct {
	urls    string
	tls     tlsFlags
	timeout age
}

func (f *serverFlags) bind(cmd *cobra.Command, timeout time.Duration) {
	f.timeout = age(timeout)
	cmd.Flags().Var(once(&f.urls), "server", "`URL[,URL...]` of members of the group, as in http://10.0.0.1:7480,10.0.0.2:7480 (needed)")
	cmd.Flags().Var(&f.timeout, "timeout", "how long to go on while no member answers, as in 5s or 2m")
	f.tls.bind(cmd)
}

// open returns a client of the group. It talks to nobody yet.
func (f *serverFlags) open(opts cpwire.Options) (*cpwire.Client, error) {
	if f.urls == "" {
		return nil, usagef("which group? Give --server URL[,URL...] of its members")
	}
	urls, err := parseServers("--server", f.urls)
	if err != nil {
		return nil, err
	}
	if err := f.tls.check(urls); err != nil {
		return nil, err
	}
	if opts.TLS, err = f.tls.config(); err != nil {
		return nil, err
	}
	opts.Patience = time.Duration(f.timeout)
	return cpwire.New(urls, &opts)
}

// tlsFlags are the files by which members are known, for those who call them.
type tlsFlags struct {
	cert, key, ca string
}

func (f *tlsFlags) bind(cmd *cobra.Command) {
	cmd.Flags().Var(once(&f.ca), "tls-ca", "`FILE` with the certificates of the authority that members are checked against (default the system's)")
	cmd.Flags().Var(once(&f.cert), "tls-cert", "`FILE` with the own certificate, where members ask for one")
	cmd.Flags().Var(once(&f.key), "tls-key", "`FILE` with the key of --tls-cert")
}

// check refuses flags that cannot go together. One scheme counts for all URLs.
func (f *tlsFlags) check(urls []string) error {
	if (f.cert == "") != (f.key == "") {
		return usagef("--tls-cert and --tls-key go together: give both or neither")
	}
	if given := f.ca != "" || f.cert != ""; given && !strings.HasPrefix(urls[0], "https://") {
		return usagef("--tls-ca, --tls-cert and --tls-key are for https:// URLs, and %s is none", urls[0])
	}
	return nil
}

// config reads the files. Without any, nil means the usual checks of the system.
func (f *tlsFlags) config() (*tls.Config, error) {
	if *f == (tlsFlags{}) {
		return nil, nil
	}
	config := &tls.Config{MinVersion: tls.VersionTLS12}
	if f.ca != "" {
		pem, err := os.ReadFile(f.ca)
		if err != nil {
			return nil, fmt.Errorf("read --tls-ca: %w", err)
		}
		config.RootCAs = x509.NewCertPool()
		if !config.RootCAs.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("read --tls-ca %s: no certificate in it", f.ca)
		}
	}
	if f.cert != "" {
		pair, err := tls.LoadX509KeyPair(f.cert, f.key)
		if err != nil {
			return nil, fmt.Errorf("read --tls-cert %s and --tls-key %s: %w", f.cert, f.key, err)
		}
		config.Certificates = []tls.Certificate{pair}
	}
	return config, nil
}

// parseServers reads a list of URLs of which only the first need carry the scheme.
func parseServers(flag, list string) ([]string, error) {
	scheme, _, ok := strings.Cut(list, "://")
	if !ok {
		return nil, usagef("%s %q: the first address needs a scheme: write http://HOST:PORT or https://HOST:PORT", flag, list)
	}
	var urls []string
	for part := range strings.SplitSeq(list, ",") {
		if !strings.Contains(part, "://") {
			part = scheme + "://" + part
		}
		u, err := parseMemberURL(flag, part)
		switch {
		case err != nil:
			return nil, err
		case !strings.HasPrefix(u, scheme+"://"):
			return nil, usagef("%s %q: http and https are mixed; a group has one of them", flag, list)
		case slices.Contains(urls, u):
			return nil, usagef("%s %q: %s stands there twice", flag, list, u)
		}
		urls = append(urls, u)
	}
	return urls, nil
}

// parseMemberURL reads the address of one member.
func parseMemberURL(flag, text string) (string, error) {
	u, err := url.Parse(text)
	switch {
	case err != nil, u.Host == "", u.Hostname() == "", u.Scheme != "http" && u.Scheme != "https":
		return "", usagef("%s %q is no address of a member: write http://HOST:PORT or https://HOST:PORT", flag, text)
	case u.Path != "" && u.Path != "/", u.RawQuery != "", u.Fragment != "", u.User != nil:
		return "", usagef("%s %q: a member's address is scheme, host and port, and nothing else", flag, text)
	}
	return u.Scheme + "://" + u.Host, nil
}

// parseCluster reads the list of the first members: n1=http://H:P,n2=...
func parseCluster(flag, list string) (map[string]string, error) {
	members := map[string]string{}
	for part := range strings.SplitSeq(list, ",") {
		name, address, ok := strings.Cut(part, "=")
		if !ok {
			return nil, usagef("%s %q: write ID=http://HOST:PORT, with commas between members", flag, part)
		}
		if err := checkNames(flag, []string{name}); err != nil {
			return nil, err
		}
		u, err := parseMemberURL(flag, address)
		if err != nil {
			return nil, err
		}
		if _, ok := members[name]; ok {
			return nil, usagef("%s: two members with the id %s", flag, name)
		}
		for other, taken := range members {
			if taken == u {
				return nil, usagef("%s: %s and %s have the same address %s", flag, other, name, u)
			}
		}
		members[name] = u
	}
	return members, nil
}
