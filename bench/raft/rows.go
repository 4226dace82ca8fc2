//go:build linux

package main

import (
	"errors"
	"fmt"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/snapferry/snapferry/internal/machine"
)

// The load of the issue that the rows answer.
const (
	clients    = 64
	tasks      = 500
	valueBytes = 2000
)

func (b *bench) size(n int) int { return max(1, int(float64(n)*b.scale)) }

// commits measures commits against etcd's puts, one group beside the other but never both
// under load.
func (b *bench) commits() (m measured, err error) {
	ours, err := b.startOurs()
	if err != nil {
		return m, err
	}
	defer func() { err = errors.Join(err, ours.stop()) }()
	etcd, err := b.startEtcd()
	if err != nil {
		return m, err
	}
	defer func() { err = errors.Join(err, etcd.stop()) }()

	n := b.size(40_000)
	var p99 [2][]float64
	for i := range b.runs + 1 { // the first run warms both up
		a, err := b.ours(ours, tasks, n, valueBytes, clients)
		if err != nil {
			return m, err
		}
		e, err := b.puts(etcd, n)
		if err != nil {
			return m, err
		}
		if i == 0 {
			continue
		}
		m.Ours, m.Reference = append(m.Ours, a.PerSecond), append(m.Reference, e.PerSecond)
		p99[0], p99[1] = append(p99[0], a.P99), append(p99[1], e.P99)
	}
	m.Note = fmt.Sprintf("p99 %.1f ms, etcd %.1f ms", machine.Median(p99[0]), machine.Median(p99[1]))
	return m, nil
}

// startEtcd starts a group of three etcd servers.
func (b *bench) startEtcd() (*group, error) {
	if b.etcdBinary == "" {
		out, err := exec.CommandContext(b.ctx, "go", "list", "-f", "{{.Dir}}", "github.com/snapferry/snapferry").Output()
		if err != nil {
			return nil, err
		}
		bin := filepath.Join(b.work, "etcd")
		if err := goBuild(b.ctx, filepath.Join(strings.TrimSpace(string(out)), "bench", "etcd"), bin, "."); err != nil {
			return nil, err
		}
		b.etcdBinary = bin
	}
	g, ports, err := b.newGroup(6)
	if err != nil {
		return nil, err
	}
	var cluster, urls []string
	for i := range 3 {
		cluster = append(cluster, fmt.Sprintf("e%d=http://127.0.0.1:%d", i, ports[3+i]))
		urls = append(urls, fmt.Sprintf("http://127.0.0.1:%d", ports[i]))
	}
	g.urls = strings.Join(urls, ",")
	for i := range 3 {
		name := fmt.Sprintf("e%d", i)
		_, peer, _ := strings.Cut(cluster[i], "=")
		cmd := exec.CommandContext(b.ctx, b.etcdBinary, "server", name, filepath.Join(g.dir, name), urls[i], peer, strings.Join(cluster, ","))
		if err := g.start(name, cmd); err != nil {
			return nil, errors.Join(err, g.stop())
		}
	}
	if err := b.until(func() bool { _, err := b.puts(g, 1); return err == nil }); err != nil {
		return nil, errors.Join(fmt.Errorf("etcd has no leader: %w", err), g.stop())
	}
	return g, nil
}

func (b *bench) puts(g *group, n int) (load, error) {
	return runLoad(exec.CommandContext(b.ctx, b.etcdBinary, "load", g.urls,
		strconv.Itoa(clients), strconv.Itoa(tasks), strconv.Itoa(valueBytes), strconv.Itoa(n)))
}

// latency measures what snapshots cost a loaded group. Both groups hold the same 1 GiB of
// state; one of them makes and moves snapshots of it all the time.
func (b *bench) latency() (m measured, err error) {
	quiet, err := b.startFilled("--snapshot-entries", "1000000000")
	if err != nil {
		return m, err
	}
	defer func() { err = errors.Join(err, quiet.stop()) }()
	busy, err := b.startFilled("--snapshot-entries", "20000")
	if err != nil {
		return m, err
	}
	defer func() { err = errors.Join(err, busy.stop()) }()

	n := b.size(40_000)
	before, err := b.status(busy)
	if err != nil {
		return m, err
	}
	begin := time.Now()
	for range b.runs {
		with, err := b.ours(busy, tasks, n, valueBytes, clients)
		if err != nil {
			return m, err
		}
		without, err := b.ours(quiet, tasks, n, valueBytes, clients)
		if err != nil {
			return m, err
		}
		m.Ours, m.Reference = append(m.Ours, with.P99), append(m.Reference, without.P99)
	}
	after, err := b.status(busy)
	if err != nil {
		return m, err
	}
	made := after.sum("generated") + after.sum("generated_follower") - before.sum("generated") - before.sum("generated_follower")
	moved := after.sum("bytes_fetched") - before.sum("bytes_fetched")
	if made == 0 || moved == 0 {
		return m, errors.New("no snapshot was made and moved during the load")
	}
	m.Note = fmt.Sprintf("%d snapshots made, %d MiB fetched and %d MiB reused in %.0f s", made, moved>>20,
		(after.sum("bytes_reused")-before.sum("bytes_reused"))>>20, time.Since(begin).Seconds())
	return m, nil
}

// startFilled starts a group and gives it 1 GiB of state: 64 bodies of 8 KiB in each of
// 2,000 tasks, of which the load later replaces those of 500.
func (b *bench) startFilled(flags ...string) (*group, error) {
	g, err := b.startOurs(flags...)
	if err != nil {
		return nil, err
	}
	filled := 4 * tasks
	if _, err := b.ours(g, filled, b.size(filled*64), 8<<10, clients); err != nil {
		return nil, errors.Join(err, g.stop())
	}
	return g, nil
}
