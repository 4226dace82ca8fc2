package raftnode_test

import (
	"context"
	"fmt"
	"log"
	"net"
	"net/http"
	"os"
	"sync"
	"time"

	"github.com/snapferry/snapferry/raftnode"
)

// A group of three members in one program. The state machine is the map in kv_test.go,
// some hundred lines; everything else that a replicated store needs is here. Each member
// would be a process of its own in earnest, and its listener would speak TLS.
func Example() {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()

	cluster := map[string]string{}
	listeners := map[string]net.Listener{}
	for _, name := range []string{"a", "b", "c"} {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			log.Fatal(err)
		}
		listeners[name], cluster[name] = l, "http://"+l.Addr().String()
	}

	var nodes []*raftnode.Node
	var starting sync.WaitGroup
	for name, l := range listeners {
		dir, err := os.MkdirTemp("", "example-"+name)
		if err != nil {
			log.Fatal(err)
		}
		defer os.RemoveAll(dir)
		node, err := raftnode.New(raftnode.Options{
			Name: name, Dir: dir, URL: cluster[name], InitialCluster: cluster, Insecure: true,
			SnapshotEntries: 1000, TrailingEntries: 100,
		})
		if err != nil {
			log.Fatal(err)
		}
		defer node.Close()
		server := &http.Server{Handler: node.Handler()}
		if err := raftnode.ConfigureServer(server, nil); err != nil {
			log.Fatal(err)
		}
		go server.Serve(l)
		defer server.Close()
		nodes = append(nodes, node)
		// The members find each other, so they start side by side.
		starting.Go(func() {
			if err := node.Start(ctx, openKV); err != nil {
				log.Fatal(err)
			}
		})
	}
	starting.Wait()

	// Whoever leads takes proposals; the others say who that is.
	propose := func(command string) string {
		for range time.Tick(10 * time.Millisecond) {
			for _, n := range nodes {
				if result, err := n.Propose(ctx, []byte(command)); err == nil {
					return string(result)
				}
			}
		}
		return ""
	}
	propose("fruit=apple")
	fmt.Println("before it was:", propose("fruit=pear"))

	// A snapshot of the leader is one that a follower has made.
	for _, n := range nodes {
		if leader, ok := n.Leader(); ok && n.Status().Name == leader.Name {
			if _, err := n.Snapshot(ctx); err != nil {
				log.Fatal(err)
			}
			s := n.Status().Snaps.Stats
			fmt.Println("made by the leader:", s.Generated, "taken over:", s.TakenOver)
		}
	}
	// Output:
	// before it was: apple
	// made by the leader: 0 taken over: 1
}
