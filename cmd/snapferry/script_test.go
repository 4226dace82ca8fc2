package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"
	"github.com/spf13/cobra"

	"github.com/snapferry/snapferry/internal/blobservers"
)

func TestMain(m *testing.M) {
	testscript.Main(m, map[string]func(){"snapferry": main, "stubborn": stubborn, "storetool": storetool})
}

// stubborn is a program that does not end when its context does. It makes a file when
// it is ready, and one when the context has ended.
func stubborn() {
	ctx, stop := untilSignal(context.Background(), os.Stderr)
	defer stop()
	if os.WriteFile("ready", nil, 0o600) == nil {
		<-ctx.Done()
		_ = os.WriteFile("ended", nil, 0o600)
	}
	<-time.After(time.Minute)
}

// TestScripts runs the command as scripts do. Beside testscript's own commands there are
//
//	exits N COMMAND...       the command ends with exit code N, or one of N|M
//	json FILE PATH OP VALUE  compares a value of a JSON file (or stdout), OP is = >= <= or ~;
//	                         the file must be exactly one JSON value
//	keys FILE PATH KEY...    an object has exactly these keys
//	jsonenv VAR FILE PATH    keeps a value in an environment variable
//	oneline                  stderr of the last command is one line, of snapferry
//	await GLOB               waits until a file is there
//	flip GLOB                damages the biggest of these files in its middle
//	nobody N COMMAND...      exits, as a user without rights
//	ports VAR...             keeps addresses of this machine at which nobody listens
//	until PATH OP VALUE COMMAND...  repeats a command that prints JSON until json is satisfied
//	certs                    makes ca.pem, n1.pem and n1.key, and stranger.pem and stranger.key
func TestScripts(t *testing.T) {
	testscript.Run(t, testscript.Params{
		Dir:                 "testdata/script",
		RequireExplicitExec: true,
		RequireUniqueNames:  true,
		Setup:               func(env *testscript.Env) error { return errors.Join(setupScript(env), setupS3(t, env)) },
		Condition:           scriptCondition,
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			"exits": cmdExits, "json": cmdJSON, "keys": cmdKeys, "jsonenv": cmdJSONEnv,
			"oneline": cmdOneLine, "await": cmdAwait, "flip": cmdFlip, "nobody": cmdNobody,
			"ports": cmdPorts, "until": cmdUntil, "certs": cmdCerts,
		},
	})
}

func setupScript(env *testscript.Env) error {
	env.Setenv("SNAPFERRY_CACHE", filepath.Join(env.WorkDir, ".cache"))
	env.Setenv("BAD", "x\xffy")                        // no UTF-8
	env.Setenv("M4", filepath.Join(env.WorkDir, "m4")) // another machine
	// For what runs as nobody the way has to be open.
	for dir := env.WorkDir; dir != os.TempDir() && dir != "/"; dir = filepath.Dir(dir) {
		if err := os.Chmod(dir, 0o755); err != nil {
			return err
		}
	}
	return nil
}

// setupS3 starts a server with a bucket for the script that needs one.
func setupS3(t *testing.T, env *testscript.Env) error {
	if filepath.Base(env.WorkDir) != "script-s3" {
		return nil
	}
	s := blobservers.Versity(t)
	s.CreateBucket("bucket")
	env.Setenv("AWS_ENDPOINT_URL_S3", s.Endpoint)
	env.Setenv("AWS_ACCESS_KEY_ID", s.AccessKey)
	env.Setenv("AWS_SECRET_ACCESS_KEY", s.SecretKey)
	env.Setenv("AWS_EC2_METADATA_DISABLED", "true")
	return nil
}

func scriptCondition(cond string) (bool, error) {
	switch cond {
	case "root":
		return os.Getuid() == 0, nil
	case "mount":
		return canMount(), nil
	}
	return false, fmt.Errorf("unknown condition %s", cond)
}

func canMount() bool {
	dir, err := os.MkdirTemp("", "snapferry-mount-")
	if err != nil {
		return false
	}
	defer os.Remove(dir)
	if syscall.Mount("tmpfs", dir, "tmpfs", 0, "size=64k") != nil {
		return false
	}
	return syscall.Unmount(dir, 0) == nil
}

func cmdExits(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) < 2 {
		ts.Fatalf("usage: exits N command...")
	}
	got := 0
	if err := ts.Exec(args[1], args[2:]...); err != nil {
		exit, ok := errors.AsType[*exec.ExitError](err)
		if !ok {
			ts.Fatalf("%v", err)
		}
		got = exit.ExitCode()
	}
	if !slices.Contains(strings.Split(args[0], "|"), strconv.Itoa(got)) {
		ts.Fatalf("exit code %d, want %s", got, args[0])
	}
}

func cmdNobody(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) < 2 {
		ts.Fatalf("usage: nobody N command...")
	}
	// The directory of the test's own programs is closed to others.
	program := ts.MkAbs("nobody-program")
	self, err := os.Executable()
	ts.Check(err)
	data, err := os.ReadFile(self)
	ts.Check(err)
	dir := filepath.Join(program, filepath.Base(args[1]))
	ts.Check(os.MkdirAll(program, 0o755))
	ts.Check(os.WriteFile(dir, data, 0o755))
	cmd := exec.Command(dir, args[2:]...)
	cmd.Dir = ts.MkAbs(".")
	ts.Check(os.Chown(program, 65534, 65534))
	cmd.Env = []string{"SNAPFERRY_CACHE=" + program}
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	cmd.Stdout, cmd.Stderr = ts.Stdout(), ts.Stderr()
	err = cmd.Run()
	if _, ok := errors.AsType[*exec.ExitError](err); err != nil && !ok {
		ts.Fatalf("%v", err)
	}
	if got := cmd.ProcessState.ExitCode(); strconv.Itoa(got) != args[0] {
		ts.Fatalf("exit code %d, want %s", got, args[0])
	}
}

// lookUp finds the value at a dotted path of a file that is exactly one JSON value.
func lookUp(ts *testscript.TestScript, file, path string) any {
	v, err := find(ts.ReadFile(file), path)
	if err != nil {
		ts.Fatalf("%s: %v", file, err)
	}
	return v
}

// find is lookUp in a text.
func find(text, path string) (any, error) {
	d := json.NewDecoder(strings.NewReader(text))
	d.UseNumber()
	var v any
	if err := d.Decode(&v); err != nil {
		return nil, fmt.Errorf("no JSON: %w: %s", err, text)
	}
	if rest, _ := json.Marshal(v); d.More() {
		return nil, fmt.Errorf("more than one JSON value, the first is %s", rest)
	}
	if path == "." {
		return v, nil
	}
	for _, step := range strings.Split(path, ".") {
		switch x := v.(type) {
		case map[string]any:
			var ok bool
			if v, ok = x[step]; !ok {
				return nil, fmt.Errorf("no %s of %s: %s", step, path, text)
			}
		case []any:
			if step == "len" {
				v = json.Number(strconv.Itoa(len(x)))
				continue
			}
			i, err := strconv.Atoi(step)
			if err != nil || i >= len(x) {
				return nil, fmt.Errorf("no %s of %s: %s", step, path, text)
			}
			v = x[i]
		default:
			return nil, fmt.Errorf("%s of %s is not in %v", step, path, v)
		}
	}
	return v, nil
}

func cmdJSON(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 4 {
		ts.Fatalf("usage: json file path =|>=|<=|~ value")
	}
	if got := fmt.Sprint(lookUp(ts, args[0], args[1])); !compare(got, args[2], args[3]) {
		ts.Fatalf("%s is %q, want %s %q", args[1], got, args[2], args[3])
	}
}

// compare tells whether got stands to want as op says.
func compare(got, op, want string) bool {
	switch op {
	case "=":
		return got == want
	case "~":
		return regexp.MustCompile(want).MatchString(got)
	case ">=", "<=":
		g, gerr := strconv.ParseFloat(got, 64)
		w, werr := strconv.ParseFloat(want, 64)
		return gerr == nil && werr == nil && (g == w || (g > w) == (op == ">="))
	}
	return false
}

func cmdKeys(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) < 2 {
		ts.Fatalf("usage: keys file path key...")
	}
	object, ok := lookUp(ts, args[0], args[1]).(map[string]any)
	if !ok {
		ts.Fatalf("%s is no object", args[1])
	}
	var got []string
	for k := range object {
		got = append(got, k)
	}
	slices.Sort(got)
	want := slices.Sorted(slices.Values(args[2:]))
	if !slices.Equal(got, want) {
		ts.Fatalf("keys of %s are %s, want %s", args[1], got, want)
	}
}

func cmdJSONEnv(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 3 {
		ts.Fatalf("usage: jsonenv var file path")
	}
	ts.Setenv(args[0], fmt.Sprint(lookUp(ts, args[1], args[2])))
}

func cmdOneLine(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 0 {
		ts.Fatalf("usage: oneline")
	}
	text := ts.ReadFile("stderr")
	if !strings.HasPrefix(text, "snapferry: ") || strings.Count(text, "\n") != 1 || !strings.HasSuffix(text, "\n") {
		ts.Fatalf("stderr is not one line of snapferry:\n%s", text)
	}
}

func cmdAwait(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 1 {
		ts.Fatalf("usage: await glob")
	}
	look := time.NewTicker(5 * time.Millisecond)
	defer look.Stop()
	late := time.After(30 * time.Second)
	for {
		if found, err := filepath.Glob(ts.MkAbs(args[0])); err == nil && len(found) > 0 {
			return
		}
		select {
		case <-look.C:
		case <-late:
			ts.Fatalf("no file %s in 30 s", args[0])
		}
	}
}

func cmdFlip(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 1 {
		ts.Fatalf("usage: flip glob")
	}
	found, err := filepath.Glob(ts.MkAbs(args[0]))
	ts.Check(err)
	var biggest string
	var data []byte
	for _, name := range found {
		if b, err := os.ReadFile(name); err == nil && len(b) > len(data) {
			biggest, data = name, b
		}
	}
	if biggest == "" {
		ts.Fatalf("no file %s", args[0])
	}
	data[len(data)/2] ^= 1
	ts.Check(os.Chmod(biggest, 0o600))
	ts.Check(os.WriteFile(biggest, data, 0o600))
}

// TestEveryExampleIsTested holds that each command line that --help or the README
// shows is in a script, where paths lie below $WORK, or $M4 on another machine, and
// addresses are those of ports.
func TestEveryExampleIsTested(t *testing.T) {
	var scripts bytes.Buffer
	names, err := filepath.Glob("testdata/script/*.txtar")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range names {
		data, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		scripts.Write(data)
	}
	tested := strings.NewReplacer("$WORK/", "/", "$M4/", "/", "$N0", "127.0.0.1:7480",
		"$N1", "10.0.0.1:7480", "$N2", "10.0.0.2:7480", "$N3", "10.0.0.3:7480", "$N4", "10.0.0.4:7480").Replace(scripts.String())
	tested = regexp.MustCompile(` &\w*&?\n`).ReplaceAllString(tested, "\n")
	a := &app{stdout: &scripts, stderr: &scripts}
	missing := func(line string) bool { return !strings.Contains(tested, " "+line+"\n") }
	eachCommand(a.command(), func(c *cobra.Command) {
		if c.Example == "" && c.Name() != "help" {
			t.Errorf("%s --help has no example", c.CommandPath())
		}
		for line := range strings.Lines(c.Example) {
			if want := commandLine(line); missing(want) {
				t.Errorf("%s: example in no script: %s", c.CommandPath(), want)
			}
		}
	})
	for _, line := range readmeLines(t) {
		if missing(line) {
			t.Errorf("README: example in no script: %s", line)
		}
	}
}

// eachCommand calls f for a command and all below it.
func eachCommand(c *cobra.Command, f func(*cobra.Command)) {
	f(c)
	for _, sub := range c.Commands() {
		eachCommand(sub, f)
	}
}

// commandLine leaves out where the output of an example goes.
func commandLine(line string) string {
	line, _, _ = strings.Cut(strings.TrimSpace(line), " >")
	line, _, _ = strings.Cut(line, " #")
	line = strings.TrimSuffix(line, " &")
	return strings.Join(strings.Fields(line), " ")
}

// readmeLines returns the command lines of snapferry in the README's code blocks.
func readmeLines(t *testing.T) []string {
	data, err := os.ReadFile("../../README.md")
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		t.Fatal(err)
	}
	var lines []string
	code := false
	for line := range strings.Lines(string(data)) {
		if strings.HasPrefix(line, "```") {
			code = !code
			continue
		}
		line = strings.Replace(strings.TrimSpace(line), "go run ./cmd/snapferry", "snapferry", 1)
		if code && strings.HasPrefix(line, "snapferry ") {
			lines = append(lines, commandLine(line))
		}
	}
	return lines
}
