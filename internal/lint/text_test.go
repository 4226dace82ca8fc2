package lint

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"net/url"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

const maxReadmeLines = 150

// machinePath is a path that exists on somebody's machine only. The pieces keep this
// file from finding itself.
var machinePath = regexp.MustCompile("(^|[\\s\"'`(=:,])/(wo" + "rk|ro" + "ot|ho" + "me)/\\w")

// registryHosts serve packages to builds; nothing in the project depends on which.
var registryHosts = []string{"proxy." + "golang.org", "sum." + "golang.org", "registry." + "npmjs.org", "deb." + "debian.org", "go" + "proxy."}

func TestReadmeLength(t *testing.T) {
	if n := bytes.Count(get(t, textFiles)["README.md"], []byte("\n")); n > maxReadmeLines {
		t.Errorf("README.md: %d lines, the budget is %d", n, maxReadmeLines)
	}
}

// TestScripts: what is meant to be run can be.
func TestScripts(t *testing.T) {
	info, err := os.Stat(filepath.Join(get(t, root), ".ci", "run"))
	if err != nil {
		t.Fatal(err)
	}
	if info.Mode()&0o111 != 0o111 {
		t.Errorf(".ci/run has mode %v, want it executable", info.Mode())
	}
}

// TestText: nothing written depends on the machine it was written on.
func TestText(t *testing.T) {
	texts := get(t, textFiles)
	hosts := append(slices.Clone(registryHosts), proxyHosts(t)...)
	for _, name := range slices.Sorted(maps.Keys(texts)) {
		report(t, textFindings(name, string(texts[name]), hosts))
	}
}

// proxyHosts are the ones that this build uses. One without a dot or on this machine
// is too common a word to look for.
func proxyHosts(t *testing.T) []string {
	t.Helper()
	out, err := exec.Command("go", "env", "GOPROXY").Output()
	if err != nil {
		t.Fatal(err)
	}
	var hosts []string
	for _, p := range strings.FieldsFunc(string(out), func(r rune) bool { return strings.ContainsRune(",|\n", r) }) {
		if u, err := url.Parse(p); err == nil && strings.Contains(u.Hostname(), ".") && u.Hostname() != "127.0.0.1" {
			hosts = append(hosts, u.Hostname())
		}
	}
	return hosts
}

func textFindings(name, text string, hosts []string) []string {
	var bad []string
	number := 0
	for line := range strings.Lines(text) {
		number++
		if m := machinePath.FindString(line); m != "" {
			bad = append(bad, fmt.Sprintf("%s:%d: path of one machine: %q", name, number, m))
		}
		if i := slices.IndexFunc(hosts, func(h string) bool { return strings.Contains(line, h) }); i >= 0 {
			bad = append(bad, fmt.Sprintf("%s:%d: registry host", name, number))
		}
	}
	return bad
}

var link = regexp.MustCompile(`\]\(([^)\s]+)\)`)

// TestLinks: what a document points at in the project exists.
func TestLinks(t *testing.T) {
	texts := get(t, textFiles)
	for _, name := range slices.Sorted(maps.Keys(texts)) {
		if strings.HasSuffix(name, ".md") {
			report(t, linkFindings(name, string(texts[name]), texts))
		}
	}
}

func linkFindings(name, text string, texts map[string][]byte) []string {
	var bad []string
	for _, m := range link.FindAllStringSubmatch(text, -1) {
		target, _, _ := strings.Cut(m[1], "#")
		if target == "" || strings.Contains(target, ":") {
			continue
		}
		target = path.Join(path.Dir(name), target)
		if !exists(target, texts) {
			bad = append(bad, fmt.Sprintf("%s: link to %s, which does not exist", name, target))
		}
	}
	return bad
}

// exists tells whether a path is a text file or a directory that holds one.
func exists(target string, texts map[string][]byte) bool {
	if _, ok := texts[target]; ok {
		return true
	}
	for name := range texts {
		if strings.HasPrefix(name, target+"/") {
			return true
		}
	}
	return false
}

// TestDependenciesExplained: docs/dependencies.md says why of each direct dependency.
func TestDependenciesExplained(t *testing.T) {
	top := get(t, root)
	cmd := exec.Command("go", "mod", "edit", "-json")
	cmd.Dir = top
	out, err := cmd.Output()
	if err != nil {
		t.Fatal(err)
	}
	var mod struct {
		Require []struct {
			Path     string
			Indirect bool
		}
	}
	if err := json.Unmarshal(out, &mod); err != nil {
		t.Fatal(err)
	}
	explained := string(get(t, textFiles)["docs/dependencies.md"])
	for _, r := range mod.Require {
		if !r.Indirect && !strings.Contains(explained, "`"+r.Path+"`") {
			t.Errorf("docs/dependencies.md does not explain %s", r.Path)
		}
	}
}
