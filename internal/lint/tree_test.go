package lint

import (
	"bytes"
	"encoding/json"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
)

const modulePath = "github.com/snapferry/snapferry"

// goFile is one parsed Go file of the project.
type goFile struct {
	path string // slash separated, relative to the root
	src  []byte
	fset *token.FileSet
	ast  *ast.File
}

func (f *goFile) test() bool  { return strings.HasSuffix(f.path, "_test.go") }
func (f *goFile) dir() string { return filepath.ToSlash(filepath.Dir(f.path)) }
func (f *goFile) lines() int  { return bytes.Count(f.src, []byte("\n")) }

func (f *goFile) at(p token.Pos) string {
	return fmt.Sprintf("%s:%d", f.path, f.fset.Position(p).Line)
}

// parse reads one file from memory; the rules' own tests use it too.
func parse(path, src string) (*goFile, error) {
	f := &goFile{path: path, src: []byte(src), fset: token.NewFileSet()}
	var err error
	f.ast, err = parser.ParseFile(f.fset, path, src, parser.ParseComments|parser.SkipObjectResolution)
	return f, err
}

// pkg is what `go list` tells of a package.
type pkg struct {
	ImportPath   string
	Imports      []string
	TestImports  []string
	XTestImports []string
	Standard     bool
	Module       *struct{ Path string }
}

func (p *pkg) ours() bool { return p.Module != nil && p.Module.Path == modulePath }

func (p *pkg) module() string {
	if p.Module == nil {
		return ""
	}
	return p.Module.Path
}

// rel is the directory of one of our import paths: "." for the root package.
func rel(importPath string) string {
	if importPath == modulePath {
		return "."
	}
	return strings.TrimPrefix(importPath, modulePath+"/")
}

// full is the import path of one of our directories.
func full(dir string) string {
	if dir == "." {
		return modulePath
	}
	return modulePath + "/" + dir
}

var root = sync.OnceValues(func() (string, error) {
	dir, err := os.Getwd()
	for ; err == nil; dir = filepath.Dir(dir) {
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil {
			return dir, nil
		}
		if dir == filepath.Dir(dir) {
			return "", fmt.Errorf("no go.mod above the working directory")
		}
	}
	return "", err
})

// textFiles returns the bytes of every text file of the project by its path. What
// git ignores and what tests read as data is left out.
var textFiles = sync.OnceValues(func() (map[string][]byte, error) {
	top, err := root()
	if err != nil {
		return nil, err
	}
	files := map[string][]byte{}
	err = filepath.WalkDir(top, func(p string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && (d.Name() == ".git" || d.Name() == "bin"):
			return fs.SkipDir
		case !d.Type().IsRegular():
			return nil
		}
		data, err := os.ReadFile(p)
		if err != nil || bytes.IndexByte(data[:min(len(data), 8000)], 0) >= 0 {
			return err
		}
		name, err := filepath.Rel(top, p)
		files[filepath.ToSlash(name)] = data
		return err
	})
	return files, err
})

// goFiles returns every Go file of the project in path order.
var goFiles = sync.OnceValues(func() ([]*goFile, error) {
	texts, err := textFiles()
	if err != nil {
		return nil, err
	}
	var files []*goFile
	for name, data := range texts {
		if !strings.HasSuffix(name, ".go") || strings.Contains("/"+name, "/testdata/") {
			continue
		}
		f, err := parse(name, string(data))
		if err != nil {
			return nil, err
		}
		files = append(files, f)
	}
	slices.SortFunc(files, func(a, b *goFile) int { return strings.Compare(a.path, b.path) })
	return files, nil
})

// graph is every package of the project and what it needs, by import path.
type graph map[string]*pkg

var imports = sync.OnceValues(func() (graph, error) {
	top, err := root()
	if err != nil {
		return nil, err
	}
	cmd := exec.Command("go", "list", "-e", "-deps",
		"-json=ImportPath,Imports,TestImports,XTestImports,Standard,Module", "./...")
	cmd.Dir = top
	cmd.Env = append(os.Environ(), "GOOS=linux")
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("go list: %w: %s", err, stderr.String())
	}
	g := graph{}
	for dec := json.NewDecoder(bytes.NewReader(out)); ; {
		p := &pkg{}
		if err := dec.Decode(p); err == io.EOF {
			return g, nil
		} else if err != nil {
			return nil, fmt.Errorf("go list: %w", err)
		}
		g[p.ImportPath] = p
	}
})

// own returns the project's packages in path order.
func (g graph) own() []*pkg {
	var own []*pkg
	for _, p := range g {
		if p.ours() {
			own = append(own, p)
		}
	}
	slices.SortFunc(own, func(a, b *pkg) int { return strings.Compare(a.ImportPath, b.ImportPath) })
	return own
}

// why returns the chain of imports by which a package comes to need one that bad
// holds for, or nil. Only packages for which through holds are looked into.
func (g graph) why(from string, through, bad func(*pkg) bool) []string {
	type step struct {
		path string
		from *step
	}
	seen := map[string]bool{from: true}
	for queue := []*step{{path: from}}; len(queue) > 0; queue = queue[1:] {
		s := queue[0]
		p := g[s.path]
		if p == nil {
			continue
		}
		if s.from != nil && bad(p) {
			var chain []string
			for ; s != nil; s = s.from {
				chain = append(chain, s.path)
			}
			slices.Reverse(chain)
			return chain
		}
		if s.from != nil && !through(p) {
			continue
		}
		for _, next := range p.Imports {
			if !seen[next] {
				seen[next] = true
				queue = append(queue, &step{path: next, from: s})
			}
		}
	}
	return nil
}

// get unwraps what is loaded once; every test that needs it fails if it cannot be had.
func get[T any](t *testing.T, load func() (T, error)) T {
	t.Helper()
	v, err := load()
	if err != nil {
		t.Fatal(err)
	}
	return v
}

// report fails the test with every finding on a line of its own.
func report(t *testing.T, findings []string) {
	t.Helper()
	for _, f := range findings {
		t.Error(f)
	}
}

// each collects a rule's findings over all files it applies to.
func each(files []*goFile, rule func(*goFile) []string) []string {
	var findings []string
	for _, f := range files {
		findings = append(findings, rule(f)...)
	}
	return findings
}
