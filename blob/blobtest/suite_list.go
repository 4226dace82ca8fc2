package blobtest

import (
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/snapferry/snapferry/blob"
)

func oddKeys() []string {
	long := strings.Repeat("l", 300)
	return []string{
		".hidden", "..double", "a/.b/..c", "%", "%2E", "%%41", "a%2Fb", "a b", "a\tb\n", "\x01\x1f\x7f", "CON", "nul.txt",
		"*?<>|:\"\\", "trailing.", "trailing ", "~", "-", "--", "ü/日本/🙂", "UPPER", "upper", ".tmp/x", "snapferry.json",
		long, long + "a", long + "/x", strings.Repeat("m", 240), strings.Repeat("m", 241), strings.Repeat("n", 255),
		strings.Repeat("o", 256), strings.Repeat("é", 200), "s/" + strings.Repeat(".", 700), strings.Repeat("%", 900),
		strings.Repeat("d/", 449) + "dd", "t/job/task/log/0000000000000001",
		"\"quoted\" 'single'", "a&b", "&amp;", "<key>", "]]>", "a+b", "a b+c%20d", "?x=1&y=2#z", "p;q,r", "$!@^`{}[]()", "back\\slash",
		"\\", "http:", "x..", "y../z.", "0", "00", ".0", "..0/0", "cr\r\nlf", " space", "a/ b /c ", "=", "'", "nfc-\u00f1", "nfd-n\u0303",
		"\ufeffbom", "\u2028", "\u0085", "\ufffd", "\uffff", "\ue000", "\U0001f469\u200d\U0001f467", "\U0010ffff",
	}
}

func testOddKeys(t *testing.T, h *harness) {
	keys := slices.DeleteFunc(oddKeys(), func(k string) bool { return k == strings.Repeat("l", 300) })
	for _, k := range keys {
		h.put(t, k, "value of "+k)
	}
	for _, k := range keys {
		h.want(t, k, "value of "+k)
		h.wantList(t, k, "", withPrefix(keys, k)...)
	}
	slices.Sort(keys)
	h.wantList(t, "", "", keys...)
	for i, k := range keys {
		h.wantList(t, "", k, keys[i+1:]...)
	}
	if err := h.Delete(t.Context(), keys); err != nil {
		t.Fatal(err)
	}
	h.wantList(t, "", "")
}

func withPrefix(keys []string, prefix string) []string {
	var found []string
	for _, k := range keys {
		if strings.HasPrefix(k, prefix) {
			found = append(found, k)
		}
	}
	slices.Sort(found)
	return found
}

func testInvalidKeys(t *testing.T, h *harness) {
	bad := []string{"", "/", "/a", "a/", "a//b", ".", "..", "a/../b", "./a", "a/.", "a\x00b", "\xff", strings.Repeat("x", 901)}
	for _, k := range bad {
		if err := h.Put(t.Context(), k, blob.Bytes(nil), blob.PutOptions{}); err == nil {
			t.Errorf("put %q: no error", k)
		}
		if _, err := h.Stat(t.Context(), k); err == nil {
			t.Errorf("stat %q: no error", k)
		}
		if _, err := h.Get(t.Context(), k, 0, -1); err == nil {
			t.Errorf("get %q: no error", k)
		}
		if err := h.Delete(t.Context(), []string{"ok", k}); err == nil {
			t.Errorf("delete %q: no error", k)
		}
		if err := h.RemoveTTL(t.Context(), []string{k}); err == nil {
			t.Errorf("remove ttl %q: no error", k)
		}
		for info, err := range h.List(t.Context(), k+"/x", "") { // may be an error, must be empty
			if err == nil {
				t.Errorf("list %q gave %v", k+"/x", info)
			}
		}
	}
	h.wantList(t, "", "")
}

// Order is the bytes of whole keys, whatever a store makes of slashes.
func testListOrder(t *testing.T, h *harness) {
	keys := []string{"a-b", "a-b-c", "a.b", "a/b", "a/b-c", "a/c/d", "a0", "a0/b", "ab", "b/a"}
	for _, k := range slices.Backward(keys) {
		if k == "a0" {
			continue // a path prefix of a0/b
		}
		h.put(t, k, k)
	}
	keys = slices.DeleteFunc(keys, func(k string) bool { return k == "a0" })
	slices.Sort(keys)
	h.wantList(t, "", "", keys...)
	h.wantList(t, "a/", "", "a/b", "a/b-c", "a/c/d")
	h.wantList(t, "a/b", "", "a/b", "a/b-c")
	h.wantList(t, "a/b", "a/b", "a/b-c")
	h.wantList(t, "a-", "", "a-b", "a-b-c")
	h.wantList(t, "a", "a-b-c", "a.b", "a/b", "a/b-c", "a/c/d", "a0/b", "ab")
	h.wantList(t, "", "a/", "a/b", "a/b-c", "a/c/d", "a0/b", "ab", "b/a")
	h.wantList(t, "", "a/c/zz", "a0/b", "ab", "b/a")
	h.wantList(t, "a", "b")
	h.wantList(t, "b", "a", "b/a")
	h.wantList(t, "c", "")
	h.wantList(t, "no/such/", "")
	h.wantList(t, "a/b/", "")
	for info := range h.List(t.Context(), "", "") { // the caller may stop
		if info.Key != "a-b" {
			t.Errorf("first is %q", info.Key)
		}
		break
	}
}

// A List agrees with a plain model for random keys, prefixes and starts.
func testListModel(t *testing.T, h *harness) {
	const alphabet = "ab-./%é"
	r := rand.New(rand.NewPCG(7, 7))
	word := func() string {
		var b strings.Builder
		for range 1 + r.IntN(6) {
			runes := []rune(alphabet)
			b.WriteRune(runes[r.IntN(len(runes))])
		}
		return b.String()
	}
	model := map[string]blob.Info{}
	for len(model) < 150 {
		k := word()
		if blob.ValidKey(k) != nil || clashes(model, k) {
			continue
		}
		h.put(t, k, k)
		model[k] = blob.Info{Key: k}
	}
	for range 200 {
		prefix, after := word(), word()
		switch r.IntN(3) {
		case 0:
			prefix = prefix[:1]
		case 1:
			prefix = ""
		}
		var want []string
		for _, info := range selectInfos(model, prefix, after) {
			want = append(want, info.Key)
		}
		h.wantList(t, prefix, after, want...)
	}
}

func clashes(model map[string]blob.Info, key string) bool {
	for k := range model {
		if k == key || strings.HasPrefix(k, key+"/") || strings.HasPrefix(key, k+"/") {
			return true
		}
	}
	return false
}

// putMany puts n empty objects, from several goroutines, and gives their keys in order.
func (h *harness) putMany(t *testing.T, prefix string, n int, opts blob.PutOptions) []string {
	t.Helper()
	var keys []string
	for i := range n {
		keys = append(keys, fmt.Sprintf("%s/%02d/%05d", prefix, i/500, i))
	}
	var wg sync.WaitGroup
	for part := range slices.Chunk(keys, n/8+1) {
		wg.Go(func() {
			for _, k := range part {
				if err := h.Put(t.Context(), k, blob.Bytes(nil), opts); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
	return keys
}

// More objects than any store gives in one page, from any start, and with any prefix.
func testListMany(t *testing.T, h *harness) {
	keys := h.putMany(t, "m", h.many, blob.PutOptions{})
	n := len(keys)
	h.wantList(t, "m/", "", keys...)
	for _, at := range []int{0, 498, 499, 500, 999, 1000, 1001, n - 2, n - 1} {
		h.wantList(t, "", keys[at], keys[at+1:]...)
		h.wantList(t, "m/", keys[at]+"-", keys[at+1:]...)
		h.wantList(t, "m/", keys[at][:len(keys[at])-1], keys[at-at%10:]...)
	}
	h.wantList(t, "m/01", "", keys[500:1000]...)
	h.wantList(t, "m/01/", keys[777], keys[778:1000]...)
	h.wantList(t, "m/02/010", "", keys[1000:1100]...)
	h.wantList(t, "m/02", keys[10], keys[1000:min(1500, n)]...)
	h.wantList(t, "m/01", keys[1000])
}

// Sealing and deleting take any number of keys, with absent ones among them (P5d, I9).
func testBulk(t *testing.T, h *harness) {
	keys := h.putMany(t, "bulk", 1103, blob.PutOptions{TTL: 72 * time.Hour})
	if err := h.RemoveTTL(t.Context(), keys); err != nil {
		t.Fatal(err)
	}
	with := slices.Concat([]string{"bulk/no"}, keys, []string{"nor/this"})
	err := h.RemoveTTL(t.Context(), with)
	d, ok := errors.AsType[*blob.DeleteError](err)
	if !ok || !errors.Is(err, fs.ErrNotExist) || len(d.Errors) != 2 {
		t.Errorf("sealing with two absent keys: %v", err)
	}
	h.wantList(t, "", "", keys...)
	if err := h.Delete(t.Context(), slices.Concat(with[:1000], with[1001:])); err != nil {
		t.Fatal(err)
	}
	h.wantList(t, "", "", with[1000])
	if err := h.Delete(t.Context(), with); err != nil {
		t.Fatal(err)
	}
	h.wantList(t, "", "")
}

// The loop over a listing may delete and put; what stays is listed once, in order.
func testListWhileChanging(t *testing.T, h *harness) {
	for i := range 60 {
		h.put(t, fmt.Sprintf("w/%d/%02d", i/10, i), "")
	}
	var seen []string
	for info, err := range h.List(t.Context(), "w/", "") {
		if err != nil {
			t.Fatal(err)
		}
		seen = append(seen, info.Key)
		var n, i int
		if _, err := fmt.Sscanf(info.Key, "w/%d/%d", &n, &i); err != nil {
			t.Fatal(err)
		}
		if i%10 == 0 { // this one, the last beside it, and some that are further on
			gone := []string{info.Key, fmt.Sprintf("w/%d/%02d", n, i+9), fmt.Sprintf("w/%d/%02d", n+3, i+31)}
			if err := h.Delete(t.Context(), gone); err != nil {
				t.Fatal(err)
			}
			h.put(t, fmt.Sprintf("v/%02d", i), "")
		}
	}
	if !slices.IsSorted(seen) || len(slices.Compact(slices.Clone(seen))) != len(seen) {
		t.Errorf("listed out of order or twice: %q", seen)
	}
	for i := 2; i < 60; i += 5 { // nobody touched these
		if k := fmt.Sprintf("w/%d/%02d", i/10, i); !slices.Contains(seen, k) {
			t.Errorf("%s is missing in %q", k, seen)
		}
	}
}
