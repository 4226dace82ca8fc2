package lint

import (
	"fmt"
	"path"
	"slices"
	"strings"
	"testing"
)

// The layers of docs/design.md. Arrows point one way: the command knows the engine,
// the engine knows the four packages under it, and those do not know each other.

// pillars are the packages under the engine.
var pillars = []string{"snapshot", "blob", "checkpoint", "source"}

// libraryModules is everything the engine may bring into a user's program. A new
// line here is a decision about every user's build: docs/dependencies.md says why.
var libraryModules = []string{
	"github.com/klauspost/compress",
	"github.com/klauspost/cpuid/v2", // by blake3
	"github.com/zeebo/blake3",
	"golang.org/x/sync",
	"golang.org/x/sys",
	"golang.org/x/time",
}

// heavy are the packages that keep a large dependency out of everything else: a driver,
// a member with its Raft library and log, a service with its database. What is below them
// is heavy too.
var heavy = []string{"blob/azblob", "blob/gcsblob", "blob/s3blob", "promobserver", "source/badgersrc", "source/boltsrc", "source/hotsrc", "source/pebblesrc", "source/sqlitesrc", "raftnode", "server"}

// extraImports are the arrows that a driver has beside the one to its parent.
var extraImports = map[string][]string{
	"checkpoint/blobcp": {"blob"}, // the log lies in the repository's own blob store
}

// arrows are what packages may import of ours beside internal ones at the top of the
// tree: of the engine, and of the packages of Raft replication, where NAME/... is all below
// NAME. A directory goes by the entry that is nearest above it, and knows what shares that.
var arrows = map[string][]string{
	".":                  pillars,
	"raftsnap/protocol":  {"snapshot"},
	"raftsnap/snapstore": {"snapshot", "raftsnap/protocol"},
	"raftsnap/transfer":  {"snapshot", "raftsnap/protocol", "raftsnap/snapstore"},
	"raftsnap":           {"snapshot", "raftsnap/..."},
	"raftnode/internal":  {"snapshot", "raftsnap/protocol"},
	"raftnode":           {"snapshot", "raftsnap", "raftsnap/...", "raftnode/internal/..."},
	"server/internal":    {"checkpoint", "raftnode"},
	"server":             {"checkpoint", "raftnode", "raftsnap/protocol", "server/internal/..."},
}

// pure are the packages that are told everything and do nothing themselves.
var pure = []string{"snapshot", "raftsnap/protocol"}

// pureForbidden is what a pure package may not import. fmt and strings are not I/O, and
// math/rand/v2 is none where it begins at a seed (TestPure).
var pureForbidden = []string{"os", "net", "syscall", "io/ioutil", "path/filepath", "log", "math/rand", "crypto/rand"}

// suite tells whether a directory is an exported test suite, such as blob/blobtest.
func suite(dir string) bool { return strings.HasSuffix(path.Base(dir), "test") }

// program tells whether a directory holds what nobody may import.
func program(dir string) bool {
	top, _, _ := strings.Cut(dir, "/")
	return top == "cmd" || top == "bench"
}

// pillarOf returns the pillar a directory belongs to, or "".
func pillarOf(dir string) string {
	top, _, _ := strings.Cut(dir, "/")
	if slices.Contains(pillars, top) {
		return top
	}
	return ""
}

// layerOf returns the nearest entry of arrows above a directory, or "".
func layerOf(dir string) string {
	for ; ; dir = path.Dir(dir) {
		if _, ok := arrows[dir]; ok {
			return dir
		}
		if top := !strings.Contains(dir, "/"); top {
			return ""
		}
	}
}

// listed tells whether a directory is in a list of arrows.
func listed(dir string, list []string) bool {
	return slices.ContainsFunc(list, func(entry string) bool {
		below, all := strings.CutSuffix(entry, "...")
		return dir == entry || all && strings.HasPrefix(dir, below)
	})
}

// mayImport tells whether one directory of the project may import another.
func mayImport(from, to string) error {
	internal := strings.HasPrefix(to, "internal/")
	parent := pillarOf(from)
	switch {
	case program(to):
		return fmt.Errorf("nothing imports a program")
	case program(from):
		return nil
	case suite(to) && !suite(from):
		return fmt.Errorf("production code imports a test suite")
	case internal:
		return nil
	case layerOf(from) != "":
		if listed(to, arrows[layerOf(from)]) || layerOf(to) == layerOf(from) {
			return nil
		}
		return fmt.Errorf("%s knows %s only", layerOf(from), strings.Join(arrows[layerOf(from)], ", "))
	case parent == "":
		return nil // internal packages: cycles are the compiler's business
	case to == ".":
		return fmt.Errorf("the engine knows %s, not the reverse", parent)
	case suite(from):
		return nil // a suite may use any driver it likes to test with
	case from == parent:
		return fmt.Errorf("%s stands alone: it imports internal packages only", parent)
	case to == parent || slices.Contains(extraImports[from], to):
		return nil
	}
	return fmt.Errorf("a driver imports its parent only")
}

func layerFindings(g graph) []string {
	var bad []string
	for _, p := range g.own() {
		for _, i := range p.Imports {
			if to := g[i]; to == nil || !to.ours() {
				continue
			}
			if err := mayImport(rel(p.ImportPath), rel(i)); err != nil {
				bad = append(bad, fmt.Sprintf("%s imports %s: %v", rel(p.ImportPath), rel(i), err))
			}
		}
	}
	return bad
}

func TestLayers(t *testing.T) {
	report(t, layerFindings(get(t, imports)))
}

// TestPillarsApart looks through internal packages too: two pillars that meet in one
// would know each other after all.
func TestPillarsApart(t *testing.T) {
	report(t, apartFindings(get(t, imports)))
}

func apartFindings(g graph) []string {
	var bad []string
	for _, name := range pillars {
		foreign := func(p *pkg) bool {
			other := pillarOf(rel(p.ImportPath))
			return p.ours() && (p.ImportPath == modulePath || other != "" && other != name)
		}
		if chain := g.why(full(name), (*pkg).ours, foreign); chain != nil {
			bad = append(bad, "reaches another layer: "+strings.Join(chain, " -> "))
		}
	}
	return bad
}

// TestLibraryModules holds what a program must build when it imports the engine or
// any package of the library: no cloud SDK, no database, no metrics, no command line.
func TestLibraryModules(t *testing.T) {
	report(t, moduleFindings(get(t, imports)))
}

func moduleFindings(g graph) []string {
	var bad []string
	foreign := func(p *pkg) bool {
		return !p.Standard && !p.ours() && !slices.Contains(libraryModules, p.module()) || p.ImportPath == "database/sql"
	}
	for _, p := range g.own() {
		dir := rel(p.ImportPath)
		if program(dir) || suite(dir) || isHeavy(dir) || strings.HasPrefix(dir, "internal/") {
			continue // internal packages count where the library reaches them
		}
		if chain := g.why(p.ImportPath, func(*pkg) bool { return true }, foreign); chain != nil {
			bad = append(bad, "pulls in too much: "+strings.Join(chain, " -> "))
		}
	}
	return bad
}

// isHeavy tells whether a directory is one of heavy or below one.
func isHeavy(dir string) bool {
	return slices.ContainsFunc(heavy, func(h string) bool { return dir == h || strings.HasPrefix(dir, h+"/") })
}

// TestNoTestingInProduction: only the exported suites may need package testing.
func TestNoTestingInProduction(t *testing.T) {
	report(t, testingFindings(get(t, imports)))
}

func testingFindings(g graph) []string {
	var bad []string
	tools := func(p *pkg) bool {
		return slices.Contains([]string{"testing", "github.com/google/go-cmp", "go.uber.org/goleak"}, p.ImportPath) ||
			slices.Contains([]string{"github.com/google/go-cmp", "go.uber.org/goleak", "github.com/rogpeppe/go-internal"}, p.module())
	}
	for _, p := range g.own() {
		if suite(rel(p.ImportPath)) {
			continue
		}
		if chain := g.why(p.ImportPath, (*pkg).ours, tools); chain != nil {
			bad = append(bad, "production code needs a test tool: "+strings.Join(chain, " -> "))
		}
	}
	return bad
}

// TestPure: pure packages, and whatever of ours they use, do no I/O, read no clock, and
// draw no random number that they could not draw again.
func TestPure(t *testing.T) {
	g := get(t, imports)
	report(t, pureFindings(g))
	for _, f := range get(t, goFiles) {
		if slices.Contains(pure, f.dir()) && !f.test() {
			report(t, append(clockFindings(f), chanceFindings(f)...))
		}
	}
}

func pureFindings(g graph) []string {
	impure := func(p *pkg) bool {
		return slices.ContainsFunc(pureForbidden, func(f string) bool {
			return p.ImportPath == f || (f == "os" || f == "net") && strings.HasPrefix(p.ImportPath, f+"/")
		})
	}
	var bad []string
	for _, dir := range pure {
		if chain := g.why(full(dir), (*pkg).ours, impure); chain != nil {
			bad = append(bad, dir+" is pure: "+strings.Join(chain, " -> "))
		}
	}
	return bad
}
