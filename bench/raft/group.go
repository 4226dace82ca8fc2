//go:build linux

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// group is three server processes.
type group struct {
	dir  string
	urls string // what clients are given
	all  []*exec.Cmd
}

// load is what a load prints: ours and etcd's alike.
type load struct {
	Commits   int     `json:"commits"`
	Errors    int     `json:"errors"`
	Lost      int     `json:"lost"`
	Seconds   float64 `json:"seconds"`
	PerSecond float64 `json:"per_second"`
	P50       float64 `json:"p50_ms"`
	P99       float64 `json:"p99_ms"`
	Max       float64 `json:"max_ms"`
}

// freePorts finds ports that nobody listens on.
func freePorts(n int) ([]int, error) {
	var ports []int
	for range n {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			return nil, err
		}
		defer l.Close()
		ports = append(ports, l.Addr().(*net.TCPAddr).Port)
	}
	return ports, nil
}

// start runs a server process; its output goes to a file in the group's directory.
func (g *group) start(name string, cmd *exec.Cmd) error {
	out, err := os.Create(filepath.Join(g.dir, name+".log"))
	if err != nil {
		return err
	}
	defer out.Close()
	cmd.Stdout, cmd.Stderr = out, out
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		return err
	}
	g.all = append(g.all, cmd)
	return nil
}

// stop ends the processes and removes what they kept.
func (g *group) stop() error {
	for _, cmd := range g.all {
		_ = cmd.Process.Signal(syscall.SIGTERM) // it may have ended; Wait tells
	}
	for _, cmd := range g.all {
		_ = cmd.Wait()
	}
	return os.RemoveAll(g.dir)
}

// startOurs starts a group of three members and waits for its leader.
func (b *bench) startOurs(flags ...string) (*group, error) {
	g, ports, err := b.newGroup(3)
	if err != nil {
		return nil, err
	}
	var cluster, urls []string
	for i, p := range ports {
		cluster = append(cluster, fmt.Sprintf("n%d=http://127.0.0.1:%d", i+1, p))
		urls = append(urls, fmt.Sprintf("http://127.0.0.1:%d", p))
	}
	g.urls = strings.Join(urls, ",")
	for i, p := range ports {
		name := fmt.Sprintf("n%d", i+1)
		args := append([]string{
			"server", "--id", name, "--data", filepath.Join(g.dir, name), "--listen", fmt.Sprintf("127.0.0.1:%d", p),
			"--insecure", "--initial-cluster", strings.Join(cluster, ","),
		}, flags...)
		if err := g.start(name, exec.CommandContext(b.ctx, b.command, args...)); err != nil {
			return nil, errors.Join(err, g.stop())
		}
	}
	if err := b.until(func() bool { s, err := b.status(g); return err == nil && s.Leader != "" }); err != nil {
		return nil, errors.Join(fmt.Errorf("no leader: %w", err), g.stop())
	}
	return g, nil
}

func (b *bench) newGroup(n int) (*group, []int, error) {
	dir, err := os.MkdirTemp(b.work, "group.")
	if err != nil {
		return nil, nil, err
	}
	ports, err := freePorts(n)
	return &group{dir: dir}, ports, err
}

// until waits for a condition, at most a minute.
func (b *bench) until(ok func() bool) error {
	ctx, cancel := context.WithTimeout(b.ctx, time.Minute)
	defer cancel()
	again := time.NewTicker(100 * time.Millisecond)
	defer again.Stop()
	for !ok() {
		select {
		case <-again.C:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}

// status is what this program needs of `cluster status`.
type status struct {
	Leader  string `json:"leader"`
	Members []struct {
		ID    string           `json:"id"`
		Role  string           `json:"role"`
		Stats map[string]int64 `json:"stats"`
	} `json:"members"`
}

func (s status) sum(stat string) (n int64) {
	for _, m := range s.Members {
		n += m.Stats[stat]
	}
	return n
}

func (b *bench) status(g *group) (s status, err error) {
	out, err := exec.CommandContext(b.ctx, b.command, "cluster", "status", "--server", g.urls, "--json").Output()
	if err != nil {
		return s, err
	}
	return s, json.Unmarshal(out, &s)
}

// ours runs a load on a group of ours.
func (b *bench) ours(g *group, tasks, commits, bytes, clients int) (load, error) {
	return runLoad(exec.CommandContext(b.ctx, b.command, "bench", "checkpoints", "--server", g.urls, "--json",
		"--tasks", strconv.Itoa(tasks), "--commits", strconv.Itoa(commits),
		"--value-bytes", strconv.Itoa(bytes), "--concurrency", strconv.Itoa(clients)))
}

func runLoad(cmd *exec.Cmd) (l load, err error) {
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return l, fmt.Errorf("load: %w: %s", err, stderr.String())
	}
	if err := json.Unmarshal(out, &l); err != nil {
		return l, fmt.Errorf("load: %w", err)
	}
	if l.Errors != 0 || l.Lost != 0 {
		return l, fmt.Errorf("load: %d errors, %d lost", l.Errors, l.Lost)
	}
	return l, nil
}
