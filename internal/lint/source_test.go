package lint

import (
	"bytes"
	"fmt"
	"go/ast"
	"go/format"
	"go/token"
	"regexp"
	"slices"
	"strings"
	"testing"
)

const (
	maxFunctionLines = 80
	maxFileLines     = 800
)

// longFunctions may be longer than the budget; each with its reason.
var longFunctions = map[string]string{}

// weakNames say nothing about what a package hides.
var weakNames = []string{"util", "utils", "common", "helper", "helpers", "misc", "types", "errors", "base", "shared"}

var weakType = regexp.MustCompile(`(Manager|Impl|Util|Utils|Helper)$`)

// managers are the types that do manage a lifetime.
var managers = []string{"raftsnap.Manager"}

func TestGofmt(t *testing.T) {
	report(t, each(get(t, goFiles), formatFindings))
}

func formatFindings(f *goFile) []string {
	want, err := format.Source(f.src)
	if err != nil || !bytes.Equal(want, f.src) {
		return []string{f.path + ": not formatted; run gofmt -w on it"}
	}
	return nil
}

// TestFunctionLength reports functions over the budget, and the median for those who
// like to watch it.
func TestFunctionLength(t *testing.T) {
	files := get(t, goFiles)
	report(t, each(files, lengthFindings))
	var lengths []int
	for _, f := range files {
		if !f.test() {
			for _, fn := range functions(f) {
				lengths = append(lengths, fn.lines)
			}
		}
	}
	if n := len(lengths); n > 0 {
		slices.Sort(lengths)
		t.Logf("%d functions outside tests: median %d lines, 90%% within %d, longest %d",
			n, lengths[n/2], lengths[n*9/10], lengths[n-1])
	}
}

type function struct {
	name  string
	decl  *ast.FuncDecl
	lines int
}

func functions(f *goFile) []function {
	var fns []function
	for _, d := range f.ast.Decls {
		if fn, ok := d.(*ast.FuncDecl); ok {
			name := fn.Name.Name
			if r := receiver(fn); r != "" {
				name = r + "." + name
			}
			lines := f.fset.Position(fn.End()).Line - f.fset.Position(fn.Pos()).Line + 1
			fns = append(fns, function{name, fn, lines})
		}
	}
	return fns
}

func lengthFindings(f *goFile) []string {
	if f.test() {
		return nil
	}
	var bad []string
	for _, fn := range functions(f) {
		if fn.lines > maxFunctionLines && longFunctions[f.dir()+"."+fn.name] == "" {
			bad = append(bad, fmt.Sprintf("%s: %s has %d lines, the budget is %d", f.at(fn.decl.Pos()), fn.name, fn.lines, maxFunctionLines))
		}
	}
	return bad
}

// TestFileLength fails for production files and names the tests that grow too long.
func TestFileLength(t *testing.T) {
	for _, f := range get(t, goFiles) {
		bad := fileLengthFindings(f)
		if f.test() {
			for _, b := range bad {
				t.Log(b)
			}
			continue
		}
		report(t, bad)
	}
}

func fileLengthFindings(f *goFile) []string {
	if n := f.lines(); n > maxFileLines {
		return []string{fmt.Sprintf("%s: %d lines, the budget is %d", f.path, n, maxFileLines)}
	}
	return nil
}

// TestUnfinished: what is not done is an issue, not a mark in the code.
func TestUnfinished(t *testing.T) {
	report(t, each(get(t, goFiles), unfinishedFindings))
}

// unfinished is put together so that this file does not find itself; stub is what
// code says that does nothing yet.
var (
	unfinished = regexp.MustCompile(`\b(TO` + `DO|FIX` + `ME|XX` + `X)\b`)
	stub       = regexp.MustCompile(`(?i)\b(not implemented|unimplemented)\b`)
)

func unfinishedFindings(f *goFile) []string {
	var bad []string
	for _, group := range f.ast.Comments {
		for _, c := range group.List {
			if m := unfinished.FindString(c.Text); m != "" {
				bad = append(bad, f.at(c.Pos())+": "+m)
			}
		}
	}
	if f.test() {
		return bad
	}
	number := 0
	for line := range strings.Lines(string(f.src)) {
		number++
		if m := stub.FindString(line); m != "" {
			bad = append(bad, fmt.Sprintf("%s:%d: %s", f.path, number, m))
		}
	}
	return bad
}

// TestNoSleep: a test that sleeps to let something happen is wrong on a slow machine
// and slow on a fast one.
func TestNoSleep(t *testing.T) {
	for _, f := range get(t, goFiles) {
		if f.test() || suite(f.dir()) {
			report(t, callFindings(f, "time", "Sleep"))
		}
	}
}

// clockFindings: a pure package is told the time.
func clockFindings(f *goFile) []string {
	return callFindings(f, "time", "Now", "Since", "Until", "Sleep", "After", "NewTimer", "NewTicker", "AfterFunc")
}

// chanceFindings: what a pure package draws at random follows from a seed.
func chanceFindings(f *goFile) []string {
	return callFindings(f, "rand", "Int", "IntN", "Int32", "Int32N", "Int64", "Int64N", "Uint", "UintN", "Uint32", "Uint32N",
		"Uint64", "Uint64N", "Float32", "Float64", "N", "Perm", "Shuffle", "NormFloat64", "ExpFloat64", "Reader", "Text", "Read")
}

// callFindings finds uses of names of a standard package.
func callFindings(f *goFile, pkg string, names ...string) []string {
	var bad []string
	ast.Inspect(f.ast, func(n ast.Node) bool {
		sel, ok := n.(*ast.SelectorExpr)
		if !ok {
			return true
		}
		if x, ok := sel.X.(*ast.Ident); ok && x.Name == pkg && slices.Contains(names, sel.Sel.Name) {
			bad = append(bad, fmt.Sprintf("%s: %s.%s", f.at(sel.Pos()), pkg, sel.Sel.Name))
		}
		return true
	})
	return bad
}

// TestNoInit: the library registers nothing by being imported.
func TestNoInit(t *testing.T) {
	report(t, each(get(t, goFiles), initFindings))
}

func initFindings(f *goFile) []string {
	var bad []string
	for _, fn := range functions(f) {
		if fn.name == "init" && !f.test() {
			bad = append(bad, f.at(fn.decl.Pos())+": func init")
		}
	}
	return bad
}

func TestNames(t *testing.T) {
	report(t, each(get(t, goFiles), nameFindings))
}

func nameFindings(f *goFile) []string {
	var bad []string
	if slices.Contains(weakNames, f.ast.Name.Name) {
		bad = append(bad, fmt.Sprintf("%s: package %s: name what it hides", f.path, f.ast.Name.Name))
	}
	for _, d := range f.ast.Decls {
		gen, ok := d.(*ast.GenDecl)
		if !ok || gen.Tok != token.TYPE {
			continue
		}
		for _, s := range gen.Specs {
			name := s.(*ast.TypeSpec).Name.Name
			if weakType.MatchString(name) && !slices.Contains(managers, f.ast.Name.Name+"."+name) {
				bad = append(bad, fmt.Sprintf("%s: type %s: name what it does", f.at(s.Pos()), name))
			}
		}
	}
	return bad
}

// receiver returns the name of a method's receiver type, or "".
func receiver(fn *ast.FuncDecl) string {
	if fn.Recv == nil || len(fn.Recv.List) == 0 {
		return ""
	}
	switch e := ast.Unparen(fn.Recv.List[0].Type).(type) {
	case *ast.StarExpr:
		return baseName(e.X)
	default:
		return baseName(e)
	}
}

func baseName(e ast.Expr) string {
	switch e := e.(type) {
	case *ast.Ident:
		return e.Name
	case *ast.IndexExpr:
		return baseName(e.X)
	case *ast.IndexListExpr:
		return baseName(e.X)
	}
	return strings.TrimSpace(fmt.Sprint(e))
}
