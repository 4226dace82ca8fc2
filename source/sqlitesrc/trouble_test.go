//go:build linux

package sqlitesrc_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/snapferry/snapferry/source"
	"github.com/snapferry/snapferry/source/sourcetest"
	"github.com/snapferry/snapferry/source/sqlitesrc"
)

// TestMain lets a test start itself as another process that uses a database:
//
//	try FILE    begins to write, and ends with 7 if the database is locked
//	crash FILE  ends in the middle of a transaction of which pages are written
//	leave FILE  commits to a write-ahead log and ends without closing the database
//	renew FILE  empties the write-ahead log if it can, and begins it anew with other pages
func TestMain(m *testing.M) {
	if verb := os.Getenv("SQLITESRC_VERB"); verb != "" {
		os.Exit(other(verb, os.Getenv("SQLITESRC_FILE")))
	}
	os.Exit(m.Run())
}

func other(verb, file string) int {
	mode := map[string]string{"try": "delete", "crash": "delete", "leave": "wal", "renew": "wal"}[verb]
	db, err := sql.Open("sqlite", "file:"+file+"?_pragma=journal_mode("+mode+")")
	if err != nil {
		return 1
	}
	db.SetMaxOpenConns(1)
	statements := map[string][]string{
		"try":   {"BEGIN IMMEDIATE", "ROLLBACK"},
		"crash": {"PRAGMA cache_size = 5", "BEGIN", "UPDATE history SET value = randomblob(300)"},
		"renew": {
			"DELETE FROM history WHERE n % 2 = 0", "PRAGMA wal_checkpoint(TRUNCATE)",
			"INSERT INTO history SELECT n + 10000, randomblob(300) FROM history", "PRAGMA wal_checkpoint(TRUNCATE)",
		},
		"leave": {"INSERT INTO history SELECT max(n)+1, randomblob(300) FROM history"},
	}[verb]
	for _, q := range statements {
		if _, err := db.Exec(q); err != nil {
			fmt.Println(err)
			if strings.Contains(err.Error(), "SQLITE_BUSY") {
				return 7
			}
			return 1
		}
	}
	return 0
}

// process runs this test's other process and returns its exit code.
func process(t *testing.T, verb, file string) int {
	t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), "SQLITESRC_VERB="+verb, "SQLITESRC_FILE="+file)
	said, err := cmd.CombinedOutput()
	if exit, ok := errors.AsType[*exec.ExitError](err); err != nil && !ok {
		t.Fatal(err)
	} else if ok && exit.ExitCode() == 1 {
		t.Fatalf("%s: %s", verb, said)
	}
	return cmd.ProcessState.ExitCode()
}

// filled makes a database with the numbers 1 to n and closes it.
func filled(t *testing.T, mode string, n uint64) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "store")
	s := newStore(mode)(t, dir).(store)
	increment.Fill(t, s, n)
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	return s.file
}

func holds(t *testing.T, img source.Image, n int) {
	t.Helper()
	dir := sourcetest.Copy(t, img)
	check(t, dir)
	if got := len(read(t, dir)); got != n {
		t.Errorf("the image holds %d numbers, want %d", got, n)
	}
}

func refuses(t *testing.T, file string, opts *sqlitesrc.Options, want error) {
	t.Helper()
	img, err := sqlitesrc.New(file, opts).Freeze(t.Context())
	if err == nil {
		img.Release()
	}
	if !errors.Is(err, want) {
		t.Errorf("freeze: %v, want %v", err, want)
	}
}

func names(t *testing.T, dir string) []string {
	t.Helper()
	list, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	var out []string
	for _, d := range list {
		out = append(out, d.Name())
	}
	return out
}

// A process that closes any descriptor of a file loses its POSIX locks on it. The owner's
// lock, in the process that freezes, is still there for other processes after Release.
func TestOwnersLockSurvives(t *testing.T) {
	file := filled(t, "delete", 100)
	db := openDB(t, file, "delete")
	defer db.Close()
	tx, err := db.BeginTx(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback()
	if _, err := tx.Exec("UPDATE history SET value = 'x' WHERE n = 1"); err != nil {
		t.Fatal(err)
	}
	if code := process(t, "try", file); code != 7 {
		t.Fatalf("another process writes beside a writer: exit code %d", code)
	}
	img, err := sqlitesrc.New(file, nil).Freeze(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	holds(t, img, 100)
	if err := img.Release(); err != nil {
		t.Fatal(err)
	}
	if code := process(t, "try", file); code != 7 {
		t.Errorf("the owner's lock is gone after Release: exit code %d", code)
	}
}

// In a rollback mode a writer commits while an image is held, and the image stands still.
func TestWriterDoesNotWaitForRelease(t *testing.T) {
	file := filled(t, "delete", 5000)
	db := openDB(t, file, "delete")
	defer db.Close()
	img := sourcetest.Freeze(t, sqlitesrc.New(file, nil))
	mustExec(t, db, "UPDATE history SET value = 'x'")
	mustExec(t, db, "DELETE FROM history WHERE n > 100")
	holds(t, img, 5000)
}

// Without a place for the copy a writer has to wait, and goes on after Release.
func TestNowhereToCopy(t *testing.T) {
	file := filled(t, "delete", 100)
	db := openDB(t, file, "delete")
	defer db.Close()
	mustExec(t, db, "PRAGMA busy_timeout = 100")
	img := sourcetest.Freeze(t, sqlitesrc.New(file, &sqlitesrc.Options{Scratch: filepath.Join(t.TempDir(), "absent")}))
	if _, err := db.Exec("UPDATE history SET value = 'x'"); err == nil {
		t.Error("a writer committed under the image")
	}
	holds(t, img, 100)
	if err := img.Release(); err != nil {
		t.Fatal(err)
	}
	mustExec(t, db, "UPDATE history SET value = 'x'")
}

// A database in WAL mode that nobody has open is left as it was: one file.
func TestNothingIsLeft(t *testing.T) {
	for _, mode := range []string{"wal", "delete"} {
		file := filled(t, mode, 100)
		before, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		img, err := sqlitesrc.New(file, nil).Freeze(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		holds(t, img, 100)
		if err := img.Release(); err != nil {
			t.Fatal(err)
		}
		if got := names(t, filepath.Dir(file)); !slices.Equal(got, []string{fileName}) {
			t.Errorf("%s: beside the database: %v", mode, got)
		}
		if after, err := os.ReadFile(file); err != nil || string(after) != string(before) {
			t.Errorf("%s: the database was changed: %v", mode, err)
		}
	}
}

// A log that an owner left behind is part of the image, and stays where it is.
func TestAbandonedLog(t *testing.T) {
	file := filled(t, "wal", 100)
	for n := range 3 {
		process(t, "leave", file)
		before, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		img := sourcetest.Freeze(t, sqlitesrc.New(file, nil))
		holds(t, img, 101+n)
		if err := img.Release(); err != nil {
			t.Fatal(err)
		}
		if after, err := os.ReadFile(file); err != nil || string(after) != string(before) {
			t.Errorf("the database was changed: %v", err)
		}
		if info, err := os.Stat(file + "-wal"); err != nil || info.Size() == 0 {
			t.Errorf("the log is gone: %v", err)
		}
	}
}

// When all of the log was moved into the database, a writer may begin the log anew under
// the image, which must not read from it then.
func TestLogBegunAnew(t *testing.T) {
	file := filled(t, "wal", 100)
	db := openDB(t, file, "wal")
	defer db.Close()
	mustExec(t, db, "UPDATE history SET value = 'x'")
	mustExec(t, db, "PRAGMA wal_checkpoint(FULL)")
	img := sourcetest.Freeze(t, sqlitesrc.New(file, nil))
	size := func() int64 {
		info, err := os.Stat(file + "-wal")
		if err != nil {
			t.Fatal(err)
		}
		return info.Size()
	}
	was := size()
	mustExec(t, db, "DELETE FROM history WHERE n > 10")
	if now := size(); now != was {
		t.Errorf("the log went from %d to %d bytes: it was not begun anew, and the test shows nothing", was, now)
	}
	mustExec(t, db, "PRAGMA wal_checkpoint(PASSIVE)")
	holds(t, img, 100)
}

// A checkpoint moves pages into the database under the image; what the image needs stays.
func TestCheckpointUnderImage(t *testing.T) {
	file := filled(t, "wal", 3000)
	db := openDB(t, file, "wal")
	defer db.Close()
	mustExec(t, db, "UPDATE history SET value = zeroblob(2000) WHERE n % 3 = 0")
	img := sourcetest.Freeze(t, sqlitesrc.New(file, nil))
	mustExec(t, db, "DELETE FROM history WHERE n > 10")
	mustExec(t, db, "PRAGMA wal_checkpoint(PASSIVE)")
	mustExec(t, db, "INSERT INTO history SELECT n + 10000, zeroblob(5000) FROM history")
	mustExec(t, db, "PRAGMA wal_checkpoint(PASSIVE)")
	holds(t, img, 3000)
}

func TestPageSizes(t *testing.T) {
	for _, mode := range []string{"wal", "delete"} {
		for _, size := range []int{512, 65536} {
			file := filepath.Join(t.TempDir(), fileName)
			db, err := sql.Open("sqlite", fmt.Sprintf("file:%s?_pragma=page_size(%d)&_pragma=journal_mode(%s)", file, size, mode))
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { db.Close() })
			mustExec(t, db, "CREATE TABLE history (n INTEGER PRIMARY KEY, value BLOB)")
			increment.Fill(t, store{db, file}, 500)
			holds(t, sourcetest.Freeze(t, sqlitesrc.New(file, nil)), 500)
		}
	}
}

func TestHotJournal(t *testing.T) {
	file := filled(t, "delete", 1000)
	process(t, "crash", file)
	if _, err := os.Stat(file + "-journal"); err != nil {
		t.Fatalf("the crash left no journal: %v", err)
	}
	before, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	refuses(t, file, nil, sqlitesrc.ErrHotJournal)
	if after, err := os.ReadFile(file); err != nil || string(after) != string(before) {
		t.Errorf("the database was changed: %v", err)
	}
	db := openDB(t, file, "delete")
	defer db.Close()
	mustExec(t, db, "SELECT count(*) FROM history")
	holds(t, sourcetest.Freeze(t, sqlitesrc.New(file, nil)), 1000)
}

func TestLocked(t *testing.T) {
	file := filled(t, "delete", 10)
	db := openDB(t, file, "delete")
	defer db.Close()
	db.SetMaxOpenConns(1)
	mustExec(t, db, "BEGIN EXCLUSIVE")
	refuses(t, file, &sqlitesrc.Options{BusyTimeout: -1}, sqlitesrc.ErrLocked)
	refuses(t, file, &sqlitesrc.Options{BusyTimeout: 30 * time.Millisecond}, sqlitesrc.ErrLocked)

	ctx, cancel := context.WithCancelCause(t.Context())
	stop := errors.New("stop")
	cancel(stop)
	if _, err := sqlitesrc.New(file, &sqlitesrc.Options{BusyTimeout: time.Hour}).Freeze(ctx); !errors.Is(err, stop) {
		t.Errorf("cancelled while locked: %v", err)
	}
	mustExec(t, db, "COMMIT")
	holds(t, sourcetest.Freeze(t, sqlitesrc.New(file, nil)), 10)
}

func TestNotADatabase(t *testing.T) {
	dir := t.TempDir()
	file := filled(t, "delete", 1000)
	whole, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	for name, content := range map[string]string{
		"text":      strings.Repeat("text\n", 1000),
		"encrypted": string(slices.Repeat([]byte{0x9c, 1, 0xfe}, 4096)),
		"header":    string(whole[:16]) + strings.Repeat("\xff", 8000),
		"cut short": string(whole[:len(whole)/2]),
	} {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		refuses(t, path, nil, sqlitesrc.ErrNotDatabase)
	}
	refuses(t, dir, nil, sqlitesrc.ErrNotDatabase)
	refuses(t, filepath.Join(dir, "absent"), nil, fs.ErrNotExist)
	if got := names(t, dir); len(got) != 4 {
		t.Errorf("something was left: %v", got)
	}
}

// A file without content is an empty database.
func TestEmptyFile(t *testing.T) {
	file := filepath.Join(t.TempDir(), fileName)
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	img := sourcetest.Freeze(t, sqlitesrc.New(file, nil))
	check(t, sourcetest.Copy(t, img))
}

// What is not SQLite may write in spite of the lock, or put another file in place.
func TestTamperedWhileRead(t *testing.T) {
	for name, tamper := range map[string]func(file string) error{
		"removed":  os.Remove,
		"replaced": func(file string) error { return errors.Join(os.Remove(file), os.WriteFile(file, nil, 0o600)) },
		"cut":      func(file string) error { return os.Truncate(file, 8192) },
	} {
		file := filled(t, "delete", 1000)
		img := sourcetest.Freeze(t, sqlitesrc.New(file, nil))
		f, err := img.Open(fileName)
		if err != nil {
			t.Fatal(err)
		}
		if err := f.Check(); err != nil {
			t.Fatal(err)
		}
		if err := tamper(file); err != nil {
			t.Fatal(err)
		}
		if err := f.Check(); !errors.Is(err, source.ErrChanged) {
			t.Errorf("%s: check says %v", name, err)
		}
	}
}

// A symbolic link leads to the database, whose sidecars lie beside it and not the link.
func TestSymbolicLink(t *testing.T) {
	file := filled(t, "wal", 100)
	db := openDB(t, file, "wal")
	defer db.Close()
	mustExec(t, db, "DELETE FROM history WHERE n > 50")
	link := filepath.Join(t.TempDir(), "link.db")
	if err := os.Symlink(file, link); err != nil {
		t.Fatal(err)
	}
	holds(t, sourcetest.Freeze(t, sqlitesrc.New(link, nil)), 50)
}

// S1: what was committed is in the image, also where SQLite may only read the -shm and so
// reads the log by itself: on a read-only mount of a volume's snapshot.
func TestReadOnlyMountS1(t *testing.T) {
	s := newStore("wal")(t, t.TempDir()).(store)
	defer s.Close()
	for _, q := range []string{"PRAGMA wal_autocheckpoint=0", "PRAGMA wal_checkpoint(TRUNCATE)"} {
		mustExec(t, s.db, q)
	}
	for n := range uint64(100) {
		if err := s.Write(n + 1); err != nil {
			t.Fatal(err)
		}
	}
	dir := t.TempDir()
	for _, suffix := range []string{"", "-wal", "-shm"} {
		b, err := os.ReadFile(s.file + suffix)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, filepath.Base(s.file)+suffix), b, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := unix.Mount(dir, dir, "", unix.MS_BIND, ""); err != nil {
		t.Skipf("needs the right to mount: %v", err)
	}
	defer unix.Unmount(dir, unix.MNT_DETACH)
	if err := unix.Mount("", dir, "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY, ""); err != nil {
		t.Fatal(err)
	}
	img, err := sqlitesrc.New(filepath.Join(dir, filepath.Base(s.file)), nil).Freeze(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer img.Release()
	holds(t, img, 100)
}

// Another store of the same process does not open the files on which the transaction has
// its locks: it would take them away when it closes them.
func TestOtherStoreLeavesLocks(t *testing.T) {
	for _, mode := range []string{"wal", "delete"} {
		file := filled(t, mode, 500)
		img, err := sqlitesrc.New(file, nil).Freeze(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		defer img.Release()
		other, err := source.Dir(filepath.Dir(file), nil).Freeze(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		defer other.Release()
		for _, e := range other.Entries() {
			f, err := other.Open(e.Path)
			if err == nil {
				f.Close()
			}
			if locked := e.Path == filepath.Base(file) || strings.HasSuffix(e.Path, "-shm"); locked && (err == nil || !strings.Contains(err.Error(), "store of its own")) {
				t.Errorf("%s: %s in another store: %v", mode, e.Path, err)
			}
		}
		process(t, "renew", file)
		holds(t, img, 500)
	}
}

// A process that lost its locks all the same says so, and gives no torn image.
func TestLostLocks(t *testing.T) {
	file := filled(t, "wal", 500)
	img, err := sqlitesrc.New(file, nil).Freeze(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer img.Release()
	e := img.Entries()[0]
	if _, err := sourcetest.ReadFile(img, &e); err != nil {
		t.Fatalf("with its locks: %v", err)
	}
	for _, suffix := range []string{"-shm", ""} {
		f, err := os.Open(file + suffix)
		if err != nil {
			t.Fatal(err)
		}
		f.Close()
		if _, err := sourcetest.ReadFile(img, &e); !errors.Is(err, source.ErrChanged) || !strings.Contains(err.Error(), "lost its locks") {
			t.Errorf("%s closed: %v", filepath.Base(file)+suffix, err)
		}
	}
}
