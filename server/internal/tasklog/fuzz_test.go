package tasklog

import (
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/snapferry/snapferry/internal/cpwire"
)

// Whatever a command holds, no machine stops or panics over it, its result can be read,
// and two machines agree on what it did.
func FuzzCommand(f *testing.F) {
	one := after(0, cpwire.Digest{}, "one")
	f.Add(command(1, one))
	f.Add(command(1, one, one))
	f.Add(EncodeTrim(1<<62, orders))
	f.Add([]byte{commandVersion, 3, 0, 0, 0, 0, 0, 0, 0, 0})
	f.Add([]byte{})
	var machines [2]*Machine
	for i := range machines {
		m, err := Open(stateDir, small(vfs.NewMem()))
		if err != nil {
			f.Fatal(err)
		}
		f.Cleanup(func() { _ = m.Close() })
		machines[i] = m
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		var seen [2]string
		for i, m := range machines {
			rs, err := m.Apply(entries(m.AppliedIndex()+1, data))
			if err != nil {
				t.Fatal(err)
			}
			seen[i] = string(rs[0])
			if b, err := DecodeResult(rs[0]); err == nil && len(b)%cpwire.ResultSize != 0 {
				t.Fatalf("result %x", rs[0])
			}
		}
		if seen[0] != seen[1] || sumOf(t, machines[0]) != sumOf(t, machines[1]) {
			t.Fatalf("results %x and %x, or the states differ", seen[0], seen[1])
		}
	})
}
