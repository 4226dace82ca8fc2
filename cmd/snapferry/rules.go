package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"github.com/snapferry/snapferry/checkpoint"
)

// rule is one argument of backup: a store and where it lies.
type rule struct {
	name string
	path string
	kind string
}

var (
	kinds      = []string{"auto", "dir"}
	laterKinds = []string{"sqlite", "bolt", "badger", "pebble"}
)

// parseRule parses [NAME=]PATH[,kind=KIND]. NAME ends at the first '=' if what stands
// before it is a valid name, and ,kind= begins at the last comma.
func parseRule(arg string) (rule, error) {
	r := rule{path: arg, kind: "auto"}
	if i := strings.LastIndexByte(r.path, ','); i >= 0 {
		if kind, ok := strings.CutPrefix(r.path[i+1:], "kind="); ok {
			r.path, r.kind = r.path[:i], kind
		}
	}
	if name, rest, ok := strings.Cut(r.path, "="); ok && checkpoint.ValidName(name) == nil {
		r.name, r.path = name, rest
	}
	if err := checkKind(r.kind); err != nil {
		return r, err
	}
	if r.path == "" {
		return r, usagef("%q names no path: write [NAME=]PATH", arg)
	}
	return r, nil
}

func checkKind(kind string) error {
	switch {
	case slices.Contains(kinds, kind):
		return nil
	case slices.Contains(laterKinds, kind):
		return usagef("kind %s comes in a later release; kind=dir backs up the files of a store that nobody writes meanwhile", kind)
	}
	return usagef("unknown kind %q: it is auto or dir", kind)
}

// resolve makes the path absolute, gives the store its name, and follows a symbolic
// link, so that the cache and the messages speak of the real place.
func (r rule) resolve() (rule, error) {
	abs, err := filepath.Abs(r.path)
	if err != nil {
		return r, fmt.Errorf("backup %s: %w", r.path, err)
	}
	if r.name == "" {
		r.name = filepath.Base(abs)
	}
	if err := checkpoint.ValidName(r.name); err != nil {
		return r, usagef("%w; write NAME=%s with a name of your choice", err, r.path)
	}
	if r.path, err = filepath.EvalSymlinks(abs); err != nil {
		return r, unreadable(abs, err)
	}
	info, err := os.Stat(r.path)
	if err != nil {
		return r, unreadable(abs, err)
	}
	if !info.IsDir() && !info.Mode().IsRegular() {
		return r, fmt.Errorf("backup %s: is neither a directory nor a regular file", r.path)
	}
	return r, nil
}

func unreadable(path string, err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("backup %s: no such directory or file: check the path", path)
	}
	return fmt.Errorf("backup %s: %w", path, err)
}

// parseRules parses and resolves all arguments of backup, by store name.
func parseRules(args []string) (map[string]rule, error) {
	if len(args) == 0 {
		return nil, usagef("what is to be backed up? Give [NAME=]PATH")
	}
	rules := map[string]rule{}
	for _, arg := range args {
		r, err := parseRule(arg)
		if err != nil {
			return nil, err
		}
		if r, err = r.resolve(); err != nil {
			return nil, err
		}
		if old, ok := rules[r.name]; ok {
			return nil, usagef("two stores with the name %s (%s and %s): give them names, NAME=PATH", r.name, old.path, r.path)
		}
		rules[r.name] = r
	}
	return rules, nil
}

// parseOffsets parses K=V, cut at the first '='. Both are opaque bytes.
func parseOffsets(args []string) (map[string]string, error) {
	offsets := map[string]string{}
	for _, arg := range args {
		key, value, ok := strings.Cut(arg, "=")
		if !ok || key == "" {
			return nil, usagef("--offset %q is not K=V", arg)
		}
		if _, ok := offsets[key]; ok {
			return nil, usagef("--offset %s is given twice", key)
		}
		offsets[key] = value
	}
	return offsets, nil
}

// checkGlobs refuses patterns that can never match because they are malformed.
func checkGlobs(flag string, globs []string) error {
	for _, g := range globs {
		if _, err := path.Match(g, ""); err != nil || g == "" {
			return usagef("%s %q is no valid pattern", flag, g)
		}
	}
	return nil
}

// checkNames refuses what can be no name of a store.
func checkNames(flag string, names []string) error {
	for _, name := range names {
		if err := checkpoint.ValidName(name); err != nil {
			return usagef("%s: %w", flag, err)
		}
	}
	return nil
}

// inside tells whether path is dir or lies in it; both are clean and absolute.
func inside(dir, path string) bool {
	rel, err := filepath.Rel(dir, path)
	return err == nil && rel != ".." && !strings.HasPrefix(rel, "../")
}
