package lint

import (
	"slices"
	"strings"
	"testing"
)

// Every rule is shown to find what it is for: a rule that finds nothing is no rule.

func TestSourceRulesFind(t *testing.T) {
	long := "func f() {\n" + strings.Repeat("\tprintln()\n", maxFunctionLines-1) + "}\n"
	cases := []struct {
		name, path, src string
		rule            func(*goFile) []string
		want            string // part of the only finding; "" for none
	}{
		{"formatted", "a.go", "package a\n\nvar x = 1\n", formatFindings, ""},
		{"unformatted", "a.go", "package a\n\nvar   x = 1\n", formatFindings, "gofmt"},
		{"long function", "a.go", "package a\n\n" + long, lengthFindings, "f has 81 lines"},
		{"long test", "a_test.go", "package a\n\n" + long, lengthFindings, ""},
		{"long file", "a.go", "package a\n" + strings.Repeat("\n", maxFileLines), fileLengthFindings, "801 lines"},
		{"unfinished", "a.go", "package a\n\n// TO" + "DO: more\n", unfinishedFindings, "a.go:3"},
		{"stub", "a.go", "package a\n\nfunc f() { panic(\"not implemented\") }\n", unfinishedFindings, "a.go:3"},
		{"finished", "a.go", "package a\n\n// autodo and context.XX" + "XL\n", unfinishedFindings, ""},
		{"init", "a.go", "package a\n\nfunc init() {}\n", initFindings, "func init"},
		{"init method", "a.go", "package a\n\ntype t int\n\nfunc (t) init() {}\n", initFindings, ""},
		{"clock", "a.go", "package a\n\nimport \"time\"\n\nvar _ = time.Now()\n", clockFindings, "time.Now"},
		{"no clock", "a.go", "package a\n\nimport \"time\"\n\nvar _ = time.Unix(0, 0)\n", clockFindings, ""},
		{"chance", "a.go", "package a\n\nimport \"math/rand/v2\"\n\nvar _ = rand.IntN(2)\n", chanceFindings, "rand.IntN"},
		{"seeded", "a.go", "package a\n\nimport \"math/rand/v2\"\n\nvar _ = rand.New(rand.NewPCG(1, 2)).IntN(2)\n", chanceFindings, ""},
		{"weak package", "a.go", "package util\n", nameFindings, "name what it hides"},
		{"weak type", "a.go", "package a\n\ntype BackupManager int\n", nameFindings, "BackupManager"},
		{"manager of a lifetime", "a.go", "package raftsnap\n\ntype Manager int\n", nameFindings, ""},
		{"no doc", "a.go", "package a\n\nfunc F() {}\n", docFindings, "F: no doc"},
		{"other word", "a.go", "package a\n\n// Does it.\nfunc F() {}\n", docFindings, "another word"},
		{"fragment", "a.go", "package a\n\n// F does it\nfunc F() {}\n", docFindings, "no sentence"},
		{"documented", "a.go", "package a\n\n// F does it.\nfunc F() {}\n", docFindings, ""},
		{"article", "a.go", "package a\n\n// A Store holds.\ntype Store int\n", docFindings, ""},
		{"method", "a.go", "package a\n\n// T is.\ntype T[K any] int\n\nfunc (t *T[K]) M() {}\n", docFindings, "M: no doc"},
		{"method of unexported", "a.go", "package a\n\ntype t int\n\nfunc (t) M() {}\n", docFindings, ""},
		{"interface method", "a.go", "package a\n\n// I is.\ntype I interface {\n\tM()\n}\n", docFindings, "I.M: no doc"},
		{"constant", "a.go", "package a\n\nconst C = 1\n", docFindings, "C: no doc"},
		{"constant in a described group", "a.go", "package a\n\n// Limits.\nconst (\n\tC = 1\n)\n", docFindings, ""},
		{"type in a group", "a.go", "package a\n\n// Types.\ntype (\n\tT int\n)\n", docFindings, "T: no doc"},
		{"main", "a.go", "package main\n\nfunc F() {}\n", docFindings, ""},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			f, err := parse(c.path, c.src)
			if err != nil {
				t.Fatal(err)
			}
			wantOne(t, c.rule(f), c.want)
		})
	}
}

func TestSleepRuleFinds(t *testing.T) {
	f, err := parse("a_test.go", "package a\n\nimport \"time\"\n\nfunc f() { time.Sleep(1) }\n")
	if err != nil {
		t.Fatal(err)
	}
	wantOne(t, callFindings(f, "time", "Sleep"), "a_test.go:5: time.Sleep")
}

func TestPackageCommentRuleFinds(t *testing.T) {
	cases := []struct {
		name string
		srcs []string
		want string
	}{
		{"one", []string{"// Package a is.\npackage a\n", "package a\n"}, ""},
		{"none", []string{"package a\n"}, "0 package comments"},
		{"two", []string{"// Package a is.\npackage a\n", "// Package a is.\npackage a\n"}, "2 package comments"},
		{"wrong", []string{"// Something else.\npackage a\n"}, "begins with"},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			var files []*goFile
			for i, src := range c.srcs {
				f, err := parse("a/"+string(rune('a'+i))+".go", src)
				if err != nil {
					t.Fatal(err)
				}
				files = append(files, f)
			}
			wantOne(t, packageCommentFindings(files), c.want)
		})
	}
}

func TestTextRulesFind(t *testing.T) {
	hosts := []string{"packages.example.org"}
	cases := []struct{ text, want string }{
		{"see docs/design.md and https://example.com/work/x\n", ""},
		{"a relative t/root/x and b/home/y\n", ""},
		{"first\nat /ho" + "me/me/x\n", "a.md:2: path"},
		{"`/wo" + "rk/x`\n", "a.md:1: path"},
		{"from packages.example.org\n", "registry host"},
	}
	for _, c := range cases {
		wantOne(t, textFindings("a.md", c.text, hosts), c.want)
	}
	texts := map[string][]byte{"docs/a.md": nil, "blob/blob.go": nil}
	wantOne(t, linkFindings("docs/a.md", "[a](a.md) [b](../blob) [c](#x) [d](https://example.com)", texts), "")
	wantOne(t, linkFindings("docs/a.md", "[a](../a.md)", texts), "link to a.md")
}

func TestMayImport(t *testing.T) {
	cases := []struct {
		from, to string
		ok       bool
	}{
		{".", "blob", true},
		{"cmd/snapferry", ".", true},
		{"blob/fsblob", "blob", true},
		{"checkpoint/blobcp", "blob", true},
		{"blob", "internal/sentinel", true},
		{"blob/blobtest", "blob/memblob", true},
		{"internal/place", "snapshot", true},
		{".", "cmd/snapferry", false},
		{"bench", "cmd/snapferry", false},
		{".", "blob/blobtest", false},
		{"blob/memblob", "blob/blobtest", false},
		{"blob", "snapshot", false},
		{"blob", "blob/memblob", false},
		{"source", ".", false},
		{"checkpoint/checkpointtest", ".", false},
		{"source/pebblesrc", "snapshot", false},
		{"blob/fsblob", "blob/memblob", false},
		{"raftsnap", "raftsnap/transfer", true},
		{"raftsnap/transfer", "raftsnap/snapstore", true},
		{"raftsnap/protocol", "internal/sentinel", true},
		{"raftnode", "raftnode/internal/peer", true},
		{"raftnode/internal/raftlog/walsim", "raftnode/internal/raftlog", true},
		{"server", "raftnode", true},
		{"server/internal/tasklog", "checkpoint", true},
		{"cmd/snapferry", "server", true},
		{"checkpoint/raftcp", "internal/cpwire", true},
		{".", "raftsnap", false},
		{".", "server", false},
		{"raftsnap/protocol", "raftsnap", false},
		{"raftsnap/protocol", "blob", false},
		{"raftsnap/snapstore", "raftsnap/transfer", false},
		{"raftsnap", "raftnode", false},
		{"raftsnap", ".", false},
		{"raftnode", "server", false},
		{"raftnode/internal/peer", "raftnode", false},
		{"raftnode/internal/peer", "raftsnap/snapstore", false},
		{"server", ".", false},
		{"server", "checkpoint/raftcp", false},
		{"server", "cmd/snapferry", false},
		{"checkpoint/raftcp", "server", false},
		{"checkpoint/raftcp", "raftnode", false},
		{"snapshot", "raftsnap/protocol", false},
	}
	for _, c := range cases {
		if err := mayImport(c.from, c.to); (err == nil) != c.ok {
			t.Errorf("mayImport(%q, %q) = %v, want ok %v", c.from, c.to, err, c.ok)
		}
	}
}

// drawn makes a graph of our own packages ("blob>internal/x") and foreign ones.
func drawn(edges ...string) graph {
	g := graph{}
	add := func(name string) *pkg {
		p := &pkg{ImportPath: name}
		if own, ok := strings.CutPrefix(name, "./"); ok {
			p.ImportPath = full(own)
			p.Module = &struct{ Path string }{modulePath}
		} else if !strings.Contains(name, ".") {
			p.Standard = true
		} else {
			p.Module = &struct{ Path string }{name}
		}
		if g[p.ImportPath] == nil {
			g[p.ImportPath] = p
		}
		return g[p.ImportPath]
	}
	for _, e := range edges {
		from, to, _ := strings.Cut(e, ">")
		p, q := add(from), add(to)
		p.Imports = append(p.Imports, q.ImportPath)
	}
	return g
}

func TestGraphRulesFind(t *testing.T) {
	cases := []struct {
		name  string
		rule  func(graph) []string
		edges []string
		want  string
	}{
		{"layers", layerFindings, []string{"./.>./blob", "./.>./snapshot"}, ""},
		{"wrong way", layerFindings, []string{"./blob>./."}, "the engine knows blob"},
		{"meet in internal", apartFindings, []string{"./blob>./internal/x", "./internal/x>./source"}, "internal/x"},
		{"apart", apartFindings, []string{"./blob>./internal/x", "./source>./internal/x"}, ""},
		{"database", moduleFindings, []string{"./.>./blob", "./blob>db.example"}, "blob -> db.example"},
		{"sql", moduleFindings, []string{"./source>database/sql"}, "database/sql"},
		{"database below a library", moduleFindings, []string{"./blob>github.com/zeebo/blake3", "github.com/zeebo/blake3>db.example"}, "db.example"},
		{"heavy", moduleFindings, []string{"./server>db.example", "./raftnode/internal/x>raft.example", "./cmd/x>./server"}, ""},
		{"raft library below raftsnap", moduleFindings, []string{"./raftsnap>./raftsnap/transfer", "./raftsnap/transfer>raft.example"}, "raftsnap/transfer -> raft.example"},
		{"heavy below a library", moduleFindings, []string{"./checkpoint/raftcp>./server", "./server>db.example"}, "server -> db.example"},
		{"allowed", moduleFindings, []string{"./.>github.com/zeebo/blake3", "./cmd/x>cli.example"}, ""},
		{"testing", testingFindings, []string{"./internal/x>testing"}, "testing"},
		{"suite", testingFindings, []string{"./blob/blobtest>testing"}, ""},
		{"pure", pureFindings, []string{"./snapshot>fmt", "fmt>os"}, ""},
		{"impure", pureFindings, []string{"./snapshot>./internal/x", "./internal/x>os"}, "os"},
		{"impure protocol", pureFindings, []string{"./raftsnap/protocol>./internal/x", "./internal/x>os"}, "raftsnap/protocol is pure"},
		{"network", pureFindings, []string{"./snapshot>net/http"}, "net/http"},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			findings := c.rule(drawn(c.edges...))
			if c.want != "" && len(findings) > 1 {
				findings = slices.Compact(findings[:1]) // the same chain is told of each package on it
			}
			wantOne(t, findings, c.want)
		})
	}
}

// wantOne checks that a rule found nothing, or just one thing that contains want.
func wantOne(t *testing.T, got []string, want string) {
	t.Helper()
	switch {
	case want == "" && len(got) > 0:
		t.Errorf("found %q, want nothing", got)
	case want != "" && (len(got) != 1 || !strings.Contains(got[0], want)):
		t.Errorf("found %q, want one with %q", got, want)
	}
}
