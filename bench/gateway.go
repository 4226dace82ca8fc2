//go:build linux

package main

import (
	"errors"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"

	"github.com/snapferry/snapferry/internal/blobservers"
)

// gateway is a Versity S3 gateway on this machine, over a directory of the file system that
// is measured, with one bucket.
type gateway struct {
	*blobservers.S3
	bucket string
}

// gateway starts one when a row first needs it. From then on the environment of the command
// and of rclone leads there.
func (b *bench) gateway() (*gateway, error) {
	if b.store != nil {
		return b.store, nil
	}
	g := &gateway{}
	err := b.host.start(func(t blobservers.T) {
		g.S3 = blobservers.Versity(t)
		g.bucket = g.Bucket()
	})
	if err != nil {
		return nil, err
	}
	b.store = g
	b.env = append(g.environment(), g.rcloneEnvironment()...)
	return g, nil
}

// environment has the credentials and nothing else that SDKs look for: a bundle of
// certificates or a profile that stands in the environment is for other stores.
func (g *gateway) environment() []string {
	var env []string
	for _, pair := range os.Environ() {
		if !strings.HasPrefix(pair, "AWS_") && !strings.HasPrefix(pair, "RCLONE_") {
			env = append(env, pair)
		}
	}
	return append(env, "AWS_ACCESS_KEY_ID="+g.AccessKey, "AWS_SECRET_ACCESS_KEY="+g.SecretKey, "AWS_REGION="+g.Region)
}

// repo is the URL of a repository below prefix, over the server at endpoint.
func (g *gateway) repo(endpoint, prefix string) string {
	return "s3://" + g.bucket + "/" + prefix + "?endpoint=" + url.QueryEscape(endpoint)
}

// remove takes everything below prefix from the bucket, at the speed of the file system.
func (g *gateway) remove(prefix string) error {
	return os.RemoveAll(filepath.Join(g.Dir, g.bucket, prefix))
}

// counter is a proxy before a server that counts what asks for an object to be made: PUTs,
// and the POSTs that begin and end an upload in parts.
type counter struct {
	endpoint string
	puts     atomic.Int64
	server   *http.Server
	served   chan error
}

func newCounter(endpoint string) (*counter, error) {
	to, err := url.Parse(endpoint)
	if err != nil {
		return nil, err
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	proxy := &httputil.ReverseProxy{Rewrite: func(r *httputil.ProxyRequest) {
		r.SetURL(to)
		r.Out.Host = r.In.Host // it is signed
	}}
	c := &counter{endpoint: "http://" + l.Addr().String(), served: make(chan error, 1)}
	c.server = &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodPut || r.Method == http.MethodPost && !r.URL.Query().Has("delete") {
			c.puts.Add(1)
		}
		proxy.ServeHTTP(w, r)
	})}
	go func() { c.served <- c.server.Serve(l) }()
	return c, nil
}

func (c *counter) close() error {
	err := c.server.Close()
	if served := <-c.served; !errors.Is(served, http.ErrServerClosed) {
		err = errors.Join(err, served)
	}
	return err
}
