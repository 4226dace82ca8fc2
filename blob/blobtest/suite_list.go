package blobtest

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"

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

// More objects than any store gives in one page.
func testListMany(t *testing.T, h *harness) {
	const n = 1203
	var keys []string
	for i := range n {
		keys = append(keys, fmt.Sprintf("m/%d/%04d", i/500, i))
	}
	var wg sync.WaitGroup
	for part := range slices.Chunk(keys, n/8+1) {
		wg.Go(func() {
			for _, k := range part {
				h.put(t, k, "")
			}
		})
	}
	wg.Wait()
	h.wantList(t, "m/", "", keys...)
	h.wantList(t, "", "m/1/0700", keys[701:]...)
	if err := h.Delete(t.Context(), keys); err != nil {
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
