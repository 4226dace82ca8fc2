package blobservers

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"time"
)

// Stream is a direction through a proxy.
type Stream string

// The two directions.
const (
	Up   Stream = "upstream"   // what the client sends
	Down Stream = "downstream" // what the server answers
)

// Proxy stands before a server and spoils connections as it is told. What it is told holds
// for open connections too. Its methods end the test when they fail.
type Proxy struct {
	// Addr is the HOST:PORT that clients use in place of the server's.
	Addr string
	// Endpoint is the same as an http URL.
	Endpoint string

	t      T
	api    string
	toxics int
}

const proxyName = "test"

// Toxiproxy starts a proxy to upstream, a HOST:PORT. It does no harm at first.
func Toxiproxy(t T, upstream string) *Proxy {
	t.Helper()
	path := tool(t, "toxiproxy", "server")
	s := start(t, program{name: "toxiproxy", ports: 1,
		command: func(ports []string) *exec.Cmd {
			cmd := exec.Command(path, "-host", "127.0.0.1", "-port", ports[0])
			cmd.Env = append(os.Environ(), "LOG_LEVEL=error")
			return cmd
		},
		ready: func(ctx context.Context, addr string) error {
			req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+addr+"/version", nil)
			if err != nil {
				return err
			}
			return answer(req)
		}})
	p := &Proxy{t: t, api: "http://" + s.Addr + "/proxies"}
	var made struct{ Listen string }
	p.post("", map[string]any{"name": proxyName, "listen": "127.0.0.1:0", "upstream": upstream, "enabled": true}, &made)
	p.Addr = made.Listen
	p.Endpoint = "http://" + made.Listen
	return p
}

// Latency delays what flows.
func (p *Proxy) Latency(s Stream, d time.Duration) { p.add(s, "latency", "latency", d.Milliseconds()) }

// Bandwidth lets so many KiB a second through.
func (p *Proxy) Bandwidth(s Stream, kibPerSecond int64) { p.add(s, "bandwidth", "rate", kibPerSecond) }

// Stall lets nothing through any more while connections stay open.
func (p *Proxy) Stall(s Stream) { p.add(s, "timeout", "timeout", 0) }

// Timeout lets nothing through and closes connections after d.
func (p *Proxy) Timeout(s Stream, d time.Duration) {
	p.add(s, "timeout", "timeout", max(1, d.Milliseconds()))
}

// Reset resets connections d after they began.
func (p *Proxy) Reset(s Stream, d time.Duration) {
	p.add(s, "reset_peer", "timeout", d.Milliseconds())
}

// Cut closes each connection after so many bytes.
func (p *Proxy) Cut(s Stream, bytes int64) { p.add(s, "limit_data", "bytes", bytes) }

// Heal takes all of it back.
func (p *Proxy) Heal() {
	p.t.Helper()
	for ; p.toxics > 0; p.toxics-- {
		url := fmt.Sprintf("%s/%s/toxics/t%d", p.api, proxyName, p.toxics)
		req, err := http.NewRequestWithContext(p.t.Context(), http.MethodDelete, url, nil)
		if err == nil {
			err = answer(req)
		}
		if err != nil {
			p.t.Fatalf("heal the proxy: %v", err)
		}
	}
}

func (p *Proxy) add(s Stream, kind, attribute string, value int64) {
	p.t.Helper()
	p.toxics++
	p.post("/"+proxyName+"/toxics", map[string]any{
		"name": fmt.Sprintf("t%d", p.toxics), "type": kind, "stream": s, "attributes": map[string]int64{attribute: value},
	}, nil)
}

func (p *Proxy) post(path string, body map[string]any, into any) {
	p.t.Helper()
	data, err := json.Marshal(body)
	if err != nil {
		p.t.Fatalf("toxiproxy: %v", err)
	}
	req, err := http.NewRequestWithContext(p.t.Context(), http.MethodPost, p.api+path, strings.NewReader(string(data)))
	if err != nil {
		p.t.Fatalf("toxiproxy: %v", err)
	}
	req.Close = true
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		p.t.Fatalf("toxiproxy: %v", err)
	}
	defer resp.Body.Close()
	if resp.StatusCode/100 != 2 {
		p.t.Fatalf("toxiproxy: %s: %s", path, resp.Status)
	}
	if into != nil {
		if err := json.NewDecoder(resp.Body).Decode(into); err != nil {
			p.t.Fatalf("toxiproxy: %v", err)
		}
	}
}
