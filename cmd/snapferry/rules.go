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
	"time"

	"github.com/snapferry/snapferry"
	"github.com/snapferry/snapferry/checkpoint"
)

// rule is one argument of backup: a store and where it lies.
type rule struct {
	name string
	path string
	kind string

	// checkpointDir is a checkpoint of the store that its owner made; empty for none.
	checkpointDir string
}

// parseRule parses [NAME=]PATH[,kind=KIND]. NAME ends at the first '=' if what stands
// before it is a valid name, and ,kind= begins at the last comma.
func parseRule(arg string) (rule, error) {
	r := rule{path: arg, kind: kindAuto}
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
	if slices.Contains(kinds, kind) {
		return nil
	}
	return usagef("unknown kind %q: it is one of %s", kind, strings.Join(kinds, ", "))
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
		if r, err = r.recognise(); err != nil {
			return nil, err
		}
		if old, ok := rules[r.name]; ok {
			return nil, usagef("two stores with the name %s (%s and %s): give them names, NAME=PATH", r.name, old.path, r.path)
		}
		rules[r.name] = r
	}
	return rules, nil
}

// addCheckpointDirs parses [NAME=]DIR and notes it in the rule of that store. The name may
// be left out if there is one store. The directory need not be there yet: --freeze-cmd may
// make it.
func addCheckpointDirs(rules map[string]rule, args []string) error {
	for _, arg := range args {
		name, dir, ok := strings.Cut(arg, "=")
		if _, known := rules[name]; !ok || !known {
			if len(rules) != 1 {
				return usagef("--from-checkpoint-dir %q names no store of this backup: write NAME=DIR", arg)
			}
			for name = range rules {
				dir = arg
			}
		}
		r := rules[name]
		abs, err := filepath.Abs(dir)
		switch {
		case err != nil || dir == "":
			return usagef("--from-checkpoint-dir %q names no directory", arg)
		case r.checkpointDir != "":
			return usagef("--from-checkpoint-dir is given twice for store %s", name)
		case r.kind == kindSQLite || r.kind == kindBolt:
			return usagef("--from-checkpoint-dir %s: store %s is %s, one file", dir, name, kindNames[r.kind])
		}
		r.checkpointDir = abs
		rules[name] = r
	}
	return nil
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

// cleanGlobs returns patterns as the engine takes them: relative to the store. A slash
// or ./ before and a slash behind, as shells and people write them, do not count. What
// is malformed or can match nothing, or everything, is refused.
func cleanGlobs(flag string, globs []string) ([]string, error) {
	clean := make([]string, 0, len(globs))
	for _, g := range globs {
		c := path.Clean(strings.TrimLeft(g, "/"))
		_, err := path.Match(c, "")
		switch {
		case err != nil || g == "":
			return nil, usagef("%s %q is no valid pattern", flag, g)
		case slices.Contains(strings.Split(g, "/"), ".."):
			return nil, usagef("%s %q: a pattern is relative to the store and has no ..", flag, g)
		case c == ".":
			return nil, usagef("%s %q is the whole store", flag, g)
		}
		clean = append(clean, c)
	}
	return clean, nil
}

// parseAt parses what --at names. A date is refused: whether its first or its last
// moment is meant, and in which zone, only the user knows.
func parseAt(s string) (snapferry.At, error) {
	if _, err := time.Parse(time.DateOnly, s); err == nil {
		return snapferry.At{}, usagef("--at %s: a date alone is not enough; write a time with its zone, such as %sT00:00:00Z", s, s)
	}
	at, err := snapferry.ParseAt(s)
	if err != nil {
		return at, usagef("--at: %w", err)
	}
	return at, nil
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

// within tells whether path is dir or lies in it, by the names or because one of the
// directories above path is dir itself: under a bind mount a directory has two names.
// Both are clean and absolute; what does not exist yet is judged by what is above it.
func within(dir, path string) bool {
	if inside(dir, path) {
		return true
	}
	want, err := os.Stat(dir)
	if err != nil {
		return false
	}
	for {
		if info, err := os.Stat(path); err == nil && os.SameFile(want, info) {
			return true
		}
		if path == filepath.Dir(path) {
			return false
		}
		path = filepath.Dir(path)
	}
}

// inside tells whether path is dir or lies in it; both are clean and absolute.
func inside(dir, path string) bool {
	rel, err := filepath.Rel(dir, path)
	return err == nil && rel != ".." && !strings.HasPrefix(rel, "../")
}
