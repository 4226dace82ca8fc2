package lint

import (
	"fmt"
	"go/ast"
	"go/token"
	"maps"
	"slices"
	"strings"
	"testing"
)

// TestPackageComments: each package is described once, where a reader looks first.
func TestPackageComments(t *testing.T) {
	report(t, packageCommentFindings(get(t, goFiles)))
}

func packageCommentFindings(files []*goFile) []string {
	documented := map[string][]string{}
	for _, f := range files {
		if f.test() {
			continue
		}
		where := documented[f.dir()]
		if f.ast.Doc == nil {
			documented[f.dir()] = where
			continue
		}
		documented[f.dir()] = append(where, f.path)
		want := "Package " + f.ast.Name.Name + " "
		if f.ast.Name.Name != "main" && !strings.HasPrefix(f.ast.Doc.Text(), want) {
			return []string{fmt.Sprintf("%s: the package comment begins with %q", f.path, want)}
		}
	}
	var bad []string
	for _, dir := range slices.Sorted(maps.Keys(documented)) {
		if where := documented[dir]; len(where) != 1 {
			bad = append(bad, fmt.Sprintf("%s: %d package comments %v, want one", dir, len(where), where))
		}
	}
	return bad
}

// TestExportedDocs: every exported name has a comment in full sentences. Functions,
// methods and types begin theirs with the name, so that it can be found by it.
func TestExportedDocs(t *testing.T) {
	report(t, each(get(t, goFiles), docFindings))
}

func docFindings(f *goFile) []string {
	if f.test() || f.ast.Name.Name == "main" {
		return nil
	}
	d := docs{f: f}
	for _, decl := range f.ast.Decls {
		switch decl := decl.(type) {
		case *ast.FuncDecl:
			if r := receiver(decl); r == "" || ast.IsExported(r) {
				d.named(decl.Name, decl.Doc)
			}
		case *ast.GenDecl:
			d.group(decl)
		}
	}
	return d.bad
}

// docs collects what is missing in one file.
type docs struct {
	f   *goFile
	bad []string
}

func (d *docs) group(decl *ast.GenDecl) {
	for _, s := range decl.Specs {
		switch s := s.(type) {
		case *ast.TypeSpec:
			doc := s.Doc
			if doc == nil && !decl.Lparen.IsValid() {
				doc = decl.Doc
			}
			d.named(s.Name, doc)
			if i, ok := s.Type.(*ast.InterfaceType); ok && s.Name.IsExported() {
				d.methods(s.Name.Name, i)
			}
		case *ast.ValueSpec:
			for _, name := range s.Names {
				d.value(name, s.Doc, s.Comment, decl.Doc)
			}
		}
	}
}

// named wants a sentence that begins with the name.
func (d *docs) named(name *ast.Ident, doc *ast.CommentGroup) {
	if !name.IsExported() {
		return
	}
	text := doc.Text()
	switch first := strings.Fields(strings.TrimPrefix(strings.TrimPrefix(strings.TrimPrefix(text, "A "), "An "), "The ")); {
	case len(first) == 0:
		d.missing(name.Pos(), name.Name, "no doc comment")
	case strings.TrimRight(first[0], ",:;.'s") != strings.TrimRight(name.Name, "s"):
		d.missing(name.Pos(), name.Name, "the doc comment begins with another word")
	case !sentence(text):
		d.missing(name.Pos(), name.Name, "the doc comment is no sentence")
	}
}

// methods wants words at every method of an exported interface.
func (d *docs) methods(owner string, i *ast.InterfaceType) {
	for _, m := range i.Methods.List {
		for _, name := range m.Names {
			if name.IsExported() && m.Doc.Text() == "" && m.Comment.Text() == "" {
				d.missing(name.Pos(), owner+"."+name.Name, "no doc comment")
			}
		}
	}
}

// value wants words at a constant or variable, or at the group it stands in.
func (d *docs) value(name *ast.Ident, comments ...*ast.CommentGroup) {
	said := slices.ContainsFunc(comments, func(c *ast.CommentGroup) bool { return c.Text() != "" })
	if name.IsExported() && !said {
		d.missing(name.Pos(), name.Name, "no doc comment")
	}
}

func (d *docs) missing(at token.Pos, name, what string) {
	d.bad = append(d.bad, fmt.Sprintf("%s: %s: %s", d.f.at(at), name, what))
}

// sentence tells whether a comment ends one somewhere; lists and examples may follow.
func sentence(text string) bool {
	return strings.ContainsAny(text, ".:") && !strings.HasSuffix(strings.TrimSpace(text), ",")
}
