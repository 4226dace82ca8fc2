package main

import (
	"fmt"
	"net"
	"time"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/snapferry/snapferry/internal/certtest"
)

// cmdPorts holds all ports until it has as many as it needs, so that they differ.
func cmdPorts(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) == 0 {
		ts.Fatalf("usage: ports var...")
	}
	for _, name := range args {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		ts.Check(err)
		defer l.Close()
		ts.Setenv(name, l.Addr().String())
	}
}

func cmdUntil(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) < 4 {
		ts.Fatalf("usage: until path =|>=|<=|~ value command...")
	}
	look := time.NewTicker(100 * time.Millisecond)
	defer look.Stop()
	late := time.After(90 * time.Second)
	for {
		err := ts.Exec(args[3], args[4:]...)
		v, ferr := find(ts.ReadFile("stdout"), args[0])
		if err == nil && ferr == nil && compare(fmt.Sprint(v), args[1], args[2]) {
			return
		}
		select {
		case <-look.C:
		case <-late:
			ts.Fatalf("%s did not become %s %s: it is %v (%v, %v): %s", args[0], args[1], args[2], v, err, ferr, ts.ReadFile("stdout"))
		}
	}
}

func cmdCerts(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 0 {
		ts.Fatalf("usage: certs")
	}
	for ca, name := range map[string]string{"ca": "n1", "other": "stranger"} {
		a, err := certtest.New(ts.MkAbs("."), ca)
		ts.Check(err)
		_, _, err = a.Issue(name)
		ts.Check(err)
	}
}
