package blobservers

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
)

// builds remembers the programs of this process.
var builds struct {
	sync.Mutex
	paths map[string]string
}

// made is the path of a program, made when it is not there yet. Only one process of the machine
// makes at a time: two that build the same would do the same work twice.
func made(t T, name string, build func() (string, error)) string {
	t.Helper()
	builds.Lock()
	defer builds.Unlock()
	if path := builds.paths[name]; path != "" {
		return path
	}
	unlock, err := lockBuilds()
	if err != nil {
		t.Fatalf("build %s: %v", name, err)
	}
	defer unlock()
	path, err := build()
	if err != nil {
		t.Fatalf("build %s: %v", name, err)
	}
	if builds.paths == nil {
		builds.paths = map[string]string{}
	}
	builds.paths[name] = path
	return path
}

// cacheDir is where Azurite and the lock are.
func cacheDir() (string, error) {
	cache, err := os.UserCacheDir()
	if err != nil {
		return "", err
	}
	dir := filepath.Join(cache, "snapferry-tests")
	return dir, os.MkdirAll(dir, 0o700)
}

// lockBuilds waits until no other process builds.
func lockBuilds() (unlock func(), err error) {
	dir, err := cacheDir()
	if err != nil {
		return nil, err
	}
	f, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	if err := lockFile(f); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return func() { _ = f.Close() }, nil // closing unlocks
}

// tool is the path of a Go program that the module internal/blobservers/NAME pins. The go
// command builds it when its cache does not hold it, and keeps it there.
func tool(t T, module, name string) string {
	t.Helper()
	return made(t, module, func() (string, error) {
		dir, err := moduleDir(module)
		if err != nil {
			return "", err
		}
		cmd := exec.Command("go", "tool", "-n", name)
		cmd.Dir = dir
		cmd.Env = append(os.Environ(), "GOFLAGS=-mod=readonly", "GOWORK=off", "GOOS=", "GOARCH=", "PWD="+dir)
		var stderr bytes.Buffer
		cmd.Stderr = &stderr
		out, err := cmd.Output()
		if err != nil {
			return "", fmt.Errorf("%w: %s", err, bytes.TrimSpace(stderr.Bytes()))
		}
		return strings.TrimSpace(string(out)), nil
	})
}

// moduleDir finds a module of this directory from wherever in the project a test runs.
func moduleDir(module string) (string, error) {
	dir, err := os.Getwd()
	if err != nil {
		return "", err
	}
	for ; ; dir = filepath.Dir(dir) {
		at := filepath.Join(dir, "internal", "blobservers", module)
		if _, err := os.Stat(at); err == nil {
			return at, nil
		}
		if dir == filepath.Dir(dir) {
			return "", errors.New("the working directory is outside the project")
		}
	}
}

// installAzurite gives the path of Azurite's program for blobs, installed as
// azurite/package-lock.json pins it. What was begun and not ended is begun anew.
func installAzurite() (string, error) {
	src, err := moduleDir("azurite")
	if err != nil {
		return "", err
	}
	cache, err := cacheDir()
	if err != nil {
		return "", err
	}
	dir := filepath.Join(cache, "azurite-"+azuriteVersion)
	main := filepath.Join(dir, "node_modules", "azurite", "dist", "src", "blob", "main.js")
	if _, err := os.Stat(main); err == nil {
		return main, nil
	}
	temp := filepath.Join(cache, "installing")
	if err := errors.Join(os.RemoveAll(temp), os.RemoveAll(dir)); err != nil {
		return "", err
	}
	if err := npmInstall(src, temp); err != nil {
		return "", err
	}
	return main, os.Rename(temp, dir)
}

func npmInstall(src, dir string) error {
	if err := os.CopyFS(dir, os.DirFS(src)); err != nil {
		return err
	}
	cmd := exec.Command("npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error")
	cmd.Dir = dir
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("npm ci: %w: %s", err, bytes.TrimSpace(out))
	}
	return nil
}
