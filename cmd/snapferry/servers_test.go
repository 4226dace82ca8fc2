package main

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/snapferry/snapferry/internal/cpwire"
	"github.com/snapferry/snapferry/server"
)

func TestParseServers(t *testing.T) {
	for list, want := range map[string][]string{
		"http://a:1":                        {"http://a:1"},
		"http://a:1,b:2,c:3":                {"http://a:1", "http://b:2", "http://c:3"},
		"http://a:1,http://b:2":             {"http://a:1", "http://b:2"},
		"https://a,b:2/":                    {"https://a", "https://b:2"},
		"http://[::1]:7480,[fe80::2]:7480":  {"http://[::1]:7480", "http://[fe80::2]:7480"},
		"http://127.0.0.1:1,127.0.0.1:2":    {"http://127.0.0.1:1", "http://127.0.0.1:2"},
		"http://n1.example.com:80/,n2:8080": {"http://n1.example.com:80", "http://n2:8080"},
	} {
		got, err := parseServers("--server", list)
		if diff := cmp.Diff(got, want); err != nil || diff != "" {
			t.Errorf("%s: %v\n%s", list, err, diff)
		}
	}
	for list, want := range map[string]string{
		"":                      "needs a scheme",
		"a:1":                   "needs a scheme",
		"a:1,http://b:2":        "no address",
		"ftp://a:1":             "no address",
		"http://":               "no address",
		"http://:7480":          "no address",
		"http://a:1,":           "no address",
		"http://a:1,,b:2":       "no address",
		"http://a:1,https://b":  "mixed",
		"http://a:1,a:1":        "twice",
		"http://a:1/,a:1":       "twice",
		"http://a:1/path":       "nothing else",
		"http://u:p@a:1":        "nothing else",
		"http://a:1?x=1":        "nothing else",
		"http://a:1,b:2#x":      "nothing else",
		"http://a:port":         "no address",
		"raft+http://a:1":       "no address",
		"http://a:1, http://b ": "no address",
	} {
		if got, err := parseServers("--server", list); !isUsage(err) || !strings.Contains(err.Error(), want) {
			t.Errorf("%q gives %q, %v, want a usage error with %q", list, got, err, want)
		}
	}
}

func TestParseCluster(t *testing.T) {
	got, err := parseCluster("--initial-cluster", "n1=http://a:1,n2=https://b:2/")
	if diff := cmp.Diff(got, map[string]string{"n1": "http://a:1", "n2": "https://b:2"}); err != nil || diff != "" {
		t.Errorf("%v\n%s", err, diff)
	}
	for list, want := range map[string]string{
		"":                            "write ID=",
		"http://a:1":                  "write ID=",
		"n1=http://a:1,":              "write ID=",
		"n1=a:1":                      "no address",
		"n1=http://a:1,n1=http:b":     "no address",
		"n1=http://a:1,n1=http://b:2": "two members",
		"n1=http://a:1,n2=http://a:1": "same address",
		".n=http://a:1":               "--initial-cluster",
	} {
		if got, err := parseCluster("--initial-cluster", list); !isUsage(err) || !strings.Contains(err.Error(), want) {
			t.Errorf("%q gives %q, %v, want a usage error with %q", list, got, err, want)
		}
	}
}

// What a server is started with follows from the flags; what contradicts itself or cannot
// work is a usage error that says what to do.
func TestServerOptions(t *testing.T) {
	used := t.TempDir()
	if err := os.WriteFile(filepath.Join(used, "x"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	fresh := t.TempDir()
	if err := os.Mkdir(filepath.Join(fresh, "lost+found"), 0o700); err != nil {
		t.Fatal(err)
	}
	base := serverVerb{app: &app{}, id: "n1", data: used, listen: "10.0.0.1:7480", insecure: true}
	for name, tt := range map[string]struct {
		set  func(v *serverVerb)
		want string // part of the error, "" for none
	}{
		"later start":         {func(*serverVerb) {}, ""},
		"no id":               {func(v *serverVerb) { v.id = "" }, "--id ID"},
		"bad id":              {func(v *serverVerb) { v.id = "a/b" }, "--id"},
		"no data":             {func(v *serverVerb) { v.data = "" }, "--data DIR"},
		"no listen":           {func(v *serverVerb) { v.listen = "" }, "--listen HOST:PORT"},
		"no port":             {func(v *serverVerb) { v.listen = "10.0.0.1" }, "write HOST:PORT"},
		"named port":          {func(v *serverVerb) { v.listen = "10.0.0.1:http" }, "port number"},
		"any port":            {func(v *serverVerb) { v.listen = "10.0.0.1:0" }, "port 0"},
		"any port, told":      {func(v *serverVerb) { v.listen, v.advertise = "10.0.0.1:0", "http://n1:80" }, ""},
		"bad advertise":       {func(v *serverVerb) { v.advertise = "n1:80" }, "--advertise"},
		"https when insecure": {func(v *serverVerb) { v.advertise = "https://n1:80" }, "leave --insecure away"},
		"no security":         {func(v *serverVerb) { v.insecure = false }, "or --insecure"},
		"both securities":     {func(v *serverVerb) { v.ca = "ca.pem" }, "contradict"},
		"cert without key":    {func(v *serverVerb) { v.insecure, v.cert = false, "c" }, "--tls-key"},
		"tls":                 {func(v *serverVerb) { v.insecure, v.cert, v.key = false, "c", "k" }, ""},
		"client auth, no ca":  {func(v *serverVerb) { v.insecure, v.cert, v.key, v.clientAuth = false, "c", "k", true }, "--tls-ca"},
		"http with tls": {func(v *serverVerb) {
			v.insecure, v.cert, v.key, v.join = false, "c", "k", "http://10.0.0.2:7480"
		}, "give --insecure"},
		"two groups":   {func(v *serverVerb) { v.cluster, v.join = "n1=http://10.0.0.1:7480", "http://10.0.0.2:7480" }, "one of them"},
		"not in it":    {func(v *serverVerb) { v.cluster = "n2=http://10.0.0.2:7480" }, "add n1=URL"},
		"bad cluster":  {func(v *serverVerb) { v.cluster = "n1" }, "write ID="},
		"bad join":     {func(v *serverVerb) { v.join = "10.0.0.2:7480" }, "needs a scheme"},
		"other self":   {func(v *serverVerb) { v.cluster, v.advertise = "n1=http://10.0.0.1:7480", "http://n1:80" }, "is not what --initial-cluster says"},
		"join on any":  {func(v *serverVerb) { v.listen, v.join = ":7480", "http://10.0.0.2:7480" }, "give --advertise"},
		"join on any4": {func(v *serverVerb) { v.listen, v.join = "0.0.0.0:7480", "http://10.0.0.2:7480" }, "give --advertise"},
		"join told": {func(v *serverVerb) {
			v.listen, v.join, v.advertise = ":7480", "http://10.0.0.2:7480", "http://10.0.0.4:7480"
		}, ""},
		"first start, nothing said": {func(v *serverVerb) { v.data = fresh }, "is empty"},
		"no directory yet":          {func(v *serverVerb) { v.data = used + "/new" }, "is empty"},
		"first start":               {func(v *serverVerb) { v.data, v.cluster = fresh, "n1=http://10.0.0.1:7480" }, ""},
	} {
		v := base
		tt.set(&v)
		_, err := v.options()
		if tt.want == "" && err != nil || tt.want != "" && (!isUsage(err) || !strings.Contains(err.Error(), tt.want)) {
			t.Errorf("%s: %v, want %q", name, err, tt.want)
		}
	}
	v := base
	v.data = filepath.Join(used, "x")
	if _, err := v.options(); err == nil || isUsage(err) {
		t.Errorf("data is a file: %v", err)
	}
}

func TestServerOptionsReachTheServer(t *testing.T) {
	v := &serverVerb{
		app: &app{}, id: "n1", data: "d", listen: "10.0.0.1:7480", cluster: "n1=https://10.0.0.1:7480",
		cert: "c", key: "k", ca: "a", clientAuth: true,
		snapshotEntries: 500, trailingEntries: 200, snapshotInterval: age(time.Minute), rate: 1 << 20,
	}
	got, err := v.options()
	if err != nil {
		t.Fatal(err)
	}
	got.Logger = nil
	want := server.Options{
		ID: "n1", Data: "d", Listen: "10.0.0.1:7480", InitialCluster: map[string]string{"n1": "https://10.0.0.1:7480"},
		SnapshotEntries: 500, TrailingEntries: 200, SnapshotInterval: time.Minute, RateLimit: 1 << 20,
		TLS: &server.TLS{CertFile: "c", KeyFile: "k", CAFile: "a", RequireClientCert: true},
	}
	if diff := cmp.Diff(got, want); diff != "" {
		t.Error(diff)
	}
}

func TestClientTLS(t *testing.T) {
	plain, secure := []string{"http://a"}, []string{"https://a"}
	for _, tt := range []struct {
		flags tlsFlags
		urls  []string
		ok    bool
	}{
		{tlsFlags{}, plain, true},
		{tlsFlags{}, secure, true},
		{tlsFlags{ca: "x"}, secure, true},
		{tlsFlags{ca: "x"}, plain, false},
		{tlsFlags{cert: "x", key: "y"}, secure, true},
		{tlsFlags{cert: "x", key: "y"}, plain, false},
		{tlsFlags{cert: "x"}, secure, false},
		{tlsFlags{key: "x"}, secure, false},
	} {
		if err := tt.flags.check(tt.urls); (err == nil) != tt.ok || err != nil && !isUsage(err) {
			t.Errorf("%+v for %s: %v", tt.flags, tt.urls, err)
		}
	}
	bad := filepath.Join(t.TempDir(), "bad.pem")
	if err := os.WriteFile(bad, []byte("no certificate"), 0o600); err != nil {
		t.Fatal(err)
	}
	for want, flags := range map[string]tlsFlags{
		"no such file":   {ca: bad + "x"},
		"no certificate": {ca: bad},
		"--tls-key":      {cert: bad, key: bad},
	} {
		if c, err := flags.config(); c != nil || err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%+v: %v, want %q", flags, err, want)
		}
	}
	if c, err := (&tlsFlags{}).config(); c != nil || err != nil {
		t.Errorf("no files: %v, %v", c, err)
	}
}

// A repository is not made for checkpoints that have no place to go.
func TestBackupReachesGroupFirst(t *testing.T) {
	stranger := httptest.NewServer(http.NotFoundHandler())
	defer stranger.Close()
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "a"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	repo := filepath.Join(t.TempDir(), "repo")
	var out, log bytes.Buffer
	a := &app{stdout: &out, stderr: &log, getenv: func(string) string { return t.TempDir() }, openDriver: openDriver}
	code := a.run(t.Context(), []string{"backup", "--repo", repo, "--checkpoints", "raft+" + stranger.URL, "kv=" + dir})
	if code != exitFailed || !strings.Contains(log.String(), "raft+"+stranger.URL) {
		t.Errorf("exit %d: %s", code, log.String())
	}
	if _, err := os.Stat(repo); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the repository is there: %v", err)
	}
}

// What a group answers has the exit codes of other verbs, and one error object.
func TestClusterErrors(t *testing.T) {
	wire := func(code cpwire.Code) error {
		return &cpwire.Error{Code: code, Op: "promote", Subject: "n9", Message: "because"}
	}
	for _, tt := range []struct {
		err  error
		code int
		hint string
	}{
		{wire(cpwire.CodeNotFound), exitNotFound, "cluster members"},
		{wire(cpwire.CodeConflict), exitConflict, ""},
		{wire(cpwire.CodeUnknown), exitUnknown, "cluster status"},
		{wire(cpwire.CodeUnavailable), exitFailed, ""},
		{wire(cpwire.CodeInternal), exitFailed, ""},
		{fmt.Errorf("x: %w", fs.ErrNotExist), exitNotFound, "cluster members"},
		{errors.New("no member answers"), exitFailed, ""},
	} {
		var out, log bytes.Buffer
		a := &app{stdout: &out, stderr: &log}
		v := &clusterVerb{app: a, id: "n9"}
		cmd := v.command("promote", "", "", "", nil)
		newVerbGroup("cluster", "", "", "", cmd)
		a.json = true
		err := v.explain(tt.err)
		if code := a.fail(t.Context(), cmd, err); code != tt.code {
			t.Errorf("%v: exit %d, want %d", tt.err, code, tt.code)
		}
		if !strings.Contains(log.String(), tt.hint) || strings.Count(log.String(), "n9") != 1 || strings.Count(log.String(), "promote") != 1 {
			t.Errorf("%v: %s", tt.err, log.String())
		}
		if !strings.Contains(out.String(), `"subject":"n9"`) {
			t.Errorf("%v: %s", tt.err, out.String())
		}
	}
	v := &clusterVerb{app: &app{}}
	v.command("status", "", "", "", nil)
	if err := v.explain(nil); err != nil {
		t.Error(err)
	}
}

// A group is told in two tables and the reasons; a leader or a snapshot may be missing.
func TestClusterTable(t *testing.T) {
	r := clusterReport{Term: 3, Members: []cpwire.MemberStatus{
		{ID: "n1", URL: "http://a:1", Role: "leader", Reachable: true, Applied: 9, FirstIndex: 4, LastIndex: 9, LogBytes: 2048,
			Snapshot: cpwire.SnapshotStatus{Term: 2, Index: 6, Source: "n2"}, Stats: cpwire.Stats{Generated: 1, GeneratedFollower: 2, TakenOver: 5, BytesFetched: 1 << 20}},
		{ID: "n2", URL: "http://b:2", Role: "follower", Snapshot: cpwire.SnapshotStatus{Source: "none"}, Why: "no space:\nnot now"},
	}}
	var out bytes.Buffer
	r.print(&out)
	want := `leader none, term 3

MEMBER  ROLE      URL         ANSWERS  APPLIED  LOG              SNAPSHOT  FROM
n1      leader    http://a:1  yes      9        4 to 9  2.0 KiB  6         n2
n2      follower  http://b:2  no       0        0 to 0  0 B      -         none

MEMBER  MADE  TAKEN OVER  INSTALLED  SERVED  REFUSED  FAILED  FETCHED  REUSED
n1      3     5           0          0       0        0       1.0 MiB  0 B
n2      0     0           0          0       0        0       0 B      0 B

n2: no space:; not now
`
	if diff := cmp.Diff(out.String(), want); diff != "" {
		t.Error(diff)
	}
}
