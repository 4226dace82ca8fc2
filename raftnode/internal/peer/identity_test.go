package peer

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/snapferry/snapferry/internal/frame"
	"github.com/snapferry/snapferry/internal/sentinel"
	"github.com/snapferry/snapferry/raftsnap/protocol"
)

var threeMembers = []protocol.Member{
	{Name: "n2", URL: "http://10.0.0.2:7000"}, {Name: "n1", URL: "http://10.0.0.1:7000"}, {Name: "n3", URL: "http://10.0.0.3:7000"},
}

// TestGroupID: the ids are a format, as the members of one group derive them alone.
func TestGroupID(t *testing.T) {
	group := GroupID(threeMembers)
	const want = "b3621a48536521f95c35212317b6092aedf9b1d84301c6f9570e90c6a59c0b18"
	if group != want {
		t.Errorf("got group %s, want %s", group, want)
	}
	if got, want := formatID(InitialID(group, "n1")), "d9f30d8fd99e1e28"; got != want {
		t.Errorf("got id %s, want %s", got, want)
	}
	turned := []protocol.Member{threeMembers[2], threeMembers[0], threeMembers[1]}
	if got := GroupID(turned); got != group {
		t.Errorf("another order gives %s, want %s", got, group)
	}
	other := append([]protocol.Member{{Name: "n4", URL: "http://10.0.0.4:7000"}}, threeMembers...)
	if GroupID(other) == group || InitialID(group, "n1") == InitialID(group, "n2") || InitialID(group, "n1") == InitialID(GroupID(other), "n1") {
		t.Error("different members or groups share an id")
	}
	if one, two := NewID(), NewID(); one == two || !validID(one) {
		t.Error("two random ids are equal")
	}
}

func started() *Identity {
	group := GroupID(threeMembers)
	return &Identity{
		Group: group, ID: InitialID(group, "n1"), Name: "n1", URL: "http://10.0.0.1:7000",
		Incarnation: newIncarnation(), Initial: threeMembers, Started: true,
	}
}

func TestIdentityFile(t *testing.T) {
	dir := t.TempDir()
	_, err := Load(dir)
	wantIs(t, err, fs.ErrNotExist)

	d := disk{dir: dir}
	want := started()
	if err := d.put(memberFile, memberKind, want); err != nil {
		t.Fatal(err)
	}
	got, err := Load(dir)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	if left, _ := filepath.Glob(filepath.Join(dir, "*"+tempSuffix)); len(left) > 0 {
		t.Errorf("left over: %v", left)
	}
}

// TestDamagedFiles: no damage of a file goes unnoticed, and none makes it another one.
func TestDamagedFiles(t *testing.T) {
	dir := t.TempDir()
	d := disk{dir: dir}
	if err := d.put(memberFile, memberKind, started()); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, memberFile)
	whole, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	check := func(what string, data []byte) {
		t.Helper()
		if err := os.WriteFile(path, data, 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := Load(dir); !errors.Is(err, ErrCorrupt) && !errors.Is(err, sentinel.Unsupported) {
			t.Errorf("%s: got %v, want corrupt", what, err)
		}
		if _, err := NewDoor(dir, nil); err == nil {
			t.Errorf("%s: a door opens", what)
		}
	}
	for i := range whole {
		bad := append([]byte(nil), whole...)
		bad[i] ^= 0x10
		check("flipped bit", bad)
		check("cut", whole[:i])
	}
	check("more", append(append([]byte(nil), whole...), '\n'))
	check("no JSON", frame.Encode(memberKind, 1, []byte("{")))
	check("other kind", frame.Encode(knownKind, 1, []byte("{}")))
	check("empty object", frame.Encode(memberKind, 1, []byte("{}")))
	check("newer", frame.Encode(memberKind, 2, []byte("{}")))
}

// TestIdentityMakesSense: an identity whose parts do not fit is damage too.
func TestIdentityMakesSense(t *testing.T) {
	for what, spoil := range map[string]func(*Identity){
		"incarnation": func(id *Identity) { id.Incarnation = "x" },
		"name":        func(id *Identity) { id.Name = "../n1" },
		"group":       func(id *Identity) { id.Group = "g" },
		"no group":    func(id *Identity) { id.Group = "" },
		"id":          func(id *Identity) { id.ID = 0 },
		"table":       func(id *Identity) { id.Initial = nil },
	} {
		id := started()
		spoil(id)
		if id.validate() == nil {
			t.Errorf("%s: valid", what)
		}
	}
}

func TestNormalURL(t *testing.T) {
	for _, c := range []struct {
		raw      string
		insecure bool
		want     string // "" for an error
	}{
		{"http://127.0.0.1:7000", true, "http://127.0.0.1:7000"},
		{"https://Node.Example:7000/", false, "https://node.example:7000"},
		{"https://[::1]:7000", false, "https://[::1]:7000"},
		{"http://127.0.0.1:7000", false, ""},
		{"127.0.0.1:7000", true, ""},
		{"ftp://127.0.0.1:7000", true, ""},
		{"http://127.0.0.1", true, ""},
		{"http://127.0.0.1:0", true, ""},
		{"http://127.0.0.1:70000", true, ""},
		{"http://:7000", true, ""},
		{"http://a:7000/x", true, ""},
		{"http://a:7000?x", true, ""},
		{"http://u@a:7000", true, ""},
		{"http://a:7000#x", true, ""},
		{"http://%zz:7000", true, ""},
	} {
		got, err := NormalURL(c.raw, c.insecure)
		if got != c.want || (err == nil) != (c.want != "") {
			t.Errorf("NormalURL(%q, %v) = %q, %v, want %q", c.raw, c.insecure, got, err, c.want)
		}
	}
}

func TestInitialTable(t *testing.T) {
	a, b := "http://h:1", "http://h:2"
	for _, c := range []struct {
		name, url string
		initial   map[string]string
		want      string // part of the error, "" for none
	}{
		{"n1", a, map[string]string{"n1": a, "n2": b}, ""},
		{"n1", "", map[string]string{"n1": a, "n2": b}, ""},
		{"n1", "http://H:1/", map[string]string{"n1": a, "n2": b}, ""},
		{"n3", "", map[string]string{"n1": a, "n2": b}, `does not list "n3"`},
		{"n1", b, map[string]string{"n1": a, "n2": b}, "lists n1 at http://h:1, but its URL is http://h:2"},
		{"n1", "", map[string]string{"n1": a, "n2": a}, "n1 and n2 both have"},
		{"n1", "", map[string]string{"n1": a, "n2": "http://H:1/"}, "n1 and n2 both have"},
		{"n1", "", map[string]string{"n1": a, "n2": "x"}, "member n2"},
		{"n1", "", map[string]string{"n1": a, "n 2": b}, "member name"},
		{"n1", "", nil, "does not list"},
	} {
		_, _, err := initialTable(c.name, c.url, c.initial, true)
		if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s %s %v: got %v, want %q", c.name, c.url, c.initial, err, c.want)
		}
	}
}
