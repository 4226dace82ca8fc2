package snapferry_test

import (
	"reflect"
	"testing"

	"github.com/snapferry/snapferry"
)

// TestObserverWith: each of two observers is told every event once, and a function that is
// missing in one is no hindrance for the other.
func TestObserverWith(t *testing.T) {
	told := map[string]int{}
	tell := func(who string, not string) *snapferry.Observer {
		o := &snapferry.Observer{}
		for f, v := range reflect.ValueOf(o).Elem().Fields() {
			if f.Name != not {
				v.Set(reflect.MakeFunc(f.Type, func([]reflect.Value) []reflect.Value { told[who+f.Name]++; return nil }))
			}
		}
		return o
	}
	o := tell("a", "Warned").With(tell("b", "Opened"))
	names := 0
	for _, v := range reflect.ValueOf(o).Elem().Fields() {
		names++
		v.Call([]reflect.Value{reflect.Zero(v.Type().In(0))})
	}
	if want := 2*names - 2; len(told) != want || told["aWarned"]+told["bOpened"] != 0 {
		t.Errorf("%d functions were told, want %d: %v", len(told), want, told)
	}
	for what, n := range told {
		if n != 1 {
			t.Errorf("%s: told %d times", what, n)
		}
	}
	alone := tell("c", "")
	if (*snapferry.Observer)(nil).With(alone) != alone || alone.With(nil) != alone {
		t.Error("with nobody beside it an observer is not itself")
	}
}
