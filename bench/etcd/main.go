// Command etcd is the reference that the raft rows of the benchmark are measured
// against: one member of an etcd group, and a load of puts on such a group. It is a
// module of its own so that nobody who builds Snapferry builds etcd.
//
//	etcd server NAME DIR CLIENT-URL PEER-URL NAME=PEER-URL,…
//	etcd load ENDPOINT,… CLIENTS KEYS BYTES PUTS
package main

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"os"
	"os/signal"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/server/v3/embed"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "etcd:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string) error {
	switch {
	case len(args) == 6 && args[0] == "server":
		return serve(ctx, args[1], args[2], args[3], args[4], args[5])
	case len(args) == 6 && args[0] == "load":
		return load(ctx, args[1:])
	}
	return errors.New("usage: etcd server NAME DIR CLIENT-URL PEER-URL CLUSTER | etcd load ENDPOINTS CLIENTS KEYS BYTES PUTS")
}

func serve(ctx context.Context, name, dir, client, peer, cluster string) error {
	cfg := embed.NewConfig()
	cfg.Name, cfg.Dir, cfg.InitialCluster, cfg.LogLevel = name, dir, cluster, "error"
	for _, u := range []struct {
		raw string
		to  []*[]url.URL
	}{
		{client, []*[]url.URL{&cfg.ListenClientUrls, &cfg.AdvertiseClientUrls}},
		{peer, []*[]url.URL{&cfg.ListenPeerUrls, &cfg.AdvertisePeerUrls}},
	} {
		parsed, err := url.Parse(u.raw)
		if err != nil {
			return err
		}
		for _, to := range u.to {
			*to = []url.URL{*parsed}
		}
	}
	e, err := embed.StartEtcd(cfg)
	if err != nil {
		return err
	}
	defer e.Close()
	select {
	case <-ctx.Done():
		return nil
	case err := <-e.Err():
		return err
	}
}

// result has the fields of `snapferry bench checkpoints --json`.
type result struct {
	Commits   int     `json:"commits"`
	Errors    int     `json:"errors"`
	Seconds   float64 `json:"seconds"`
	PerSecond float64 `json:"per_second"`
	P50       float64 `json:"p50_ms"`
	P99       float64 `json:"p99_ms"`
	Max       float64 `json:"max_ms"`
}

func load(ctx context.Context, args []string) error {
	var n [4]int // clients, keys, bytes, puts
	for i := range n {
		v, err := strconv.Atoi(args[i+1])
		if err != nil || v <= 0 {
			return fmt.Errorf("%q is not a positive number", args[i+1])
		}
		n[i] = v
	}
	c, err := clientv3.New(clientv3.Config{Endpoints: strings.Split(args[0], ","), DialTimeout: 10 * time.Second})
	if err != nil {
		return err
	}
	defer c.Close()
	if _, err := c.Put(ctx, "ready", "yes"); err != nil {
		return err
	}
	return json.NewEncoder(os.Stdout).Encode(put(ctx, c, n[0], n[1], n[2], n[3]))
}

func put(ctx context.Context, c *clientv3.Client, clients, keys, bytes, puts int) result {
	value := make([]byte, bytes)
	rand.Read(value)
	var mu sync.Mutex
	var took []time.Duration
	failed := 0
	var wg sync.WaitGroup
	begin := time.Now()
	for k := range clients {
		wg.Go(func() {
			for i := k; i < puts; i += clients {
				start := time.Now()
				_, err := c.Put(ctx, "task-"+strconv.Itoa(i%keys), string(value))
				mu.Lock()
				if err != nil {
					failed++
				} else {
					took = append(took, time.Since(start))
				}
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	seconds := time.Since(begin).Seconds()
	slices.Sort(took)
	at := func(q float64) float64 {
		if len(took) == 0 {
			return 0
		}
		return float64(took[int(q*float64(len(took)-1))].Microseconds()) / 1000
	}
	return result{len(took), failed, seconds, float64(len(took)) / seconds, at(0.5), at(0.99), at(1)}
}
