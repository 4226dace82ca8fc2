//go:build linux

package grouptest

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"

	"github.com/snapferry/snapferry/internal/cpwire"
)

// head is the state of a task as clients can know it: where its log ends.
type head struct {
	slot   uint64
	digest cpwire.Digest
}

// call is what a client asked a task for: an append, or a read of its head.
type call struct {
	task   cpwire.Task
	append bool
	after  head // what the append is built on
	nonce  cpwire.Nonce
	digest cpwire.Digest // of its body
}

// answer is what the client was told: whether the append is in the log, and where the log
// ends if it is not.
type answer struct {
	done bool
	head head
}

// logModel says what one task does (P13): an append is taken if it is built on the head,
// and becomes it; otherwise it changes nothing and tells the head.
var logModel = porcupine.Model{
	Partition: func(history []porcupine.Operation) (parts [][]porcupine.Operation) {
		at := map[cpwire.Task]int{}
		for _, op := range history {
			task := op.Input.(call).task
			i, ok := at[task]
			if !ok {
				i = len(parts)
				at[task], parts = i, append(parts, nil)
			}
			parts[i] = append(parts[i], op)
		}
		return parts
	},
	Init: func() any { return head{} },
	Step: func(state, input, output any) (bool, any) {
		s, c, a := state.(head), input.(call), output.(answer)
		switch {
		case c.append && a.done:
			next := head{c.after.slot + 1, c.digest}
			return s == c.after && a.head == next, next
		case c.append:
			return s != c.after && a.head == s, s
		}
		return a.head == s, s
	},
	DescribeOperation: func(input, output any) string {
		c, a := input.(call), output.(answer)
		if !c.append {
			return fmt.Sprintf("%s: head is %d %.6s", c.task, a.head.slot, a.head.digest)
		}
		return fmt.Sprintf("%s: append %.6s after %d %.6s: %v, %d %.6s", c.task, c.digest, c.after.slot, c.after.digest, a.done, a.head.slot, a.head.digest)
	},
}

// forever is when an operation returns whose outcome its client never learned.
const forever = math.MaxInt64

// checkLinear reports whether the history could have happened one operation after the other.
func checkLinear(history []porcupine.Operation) error {
	switch r := porcupine.CheckOperationsTimeout(logModel, history, patience); r {
	case porcupine.Ok:
		return nil
	case porcupine.Unknown:
		return fmt.Errorf("no verdict on %d operations in %v", len(history), patience)
	}
	for _, part := range logModel.Partition(history) {
		if porcupine.CheckOperationsTimeout(logModel, part, patience) == porcupine.Illegal {
			return fmt.Errorf("%s: %d operations are not linearizable:%s", part[0].Input.(call).task, len(part), excerpt(part))
		}
	}
	return fmt.Errorf("not linearizable")
}

// excerpt shows the end of the shortest beginning of a history that is already wrong.
func excerpt(part []porcupine.Operation) (text string) {
	slices.SortFunc(part, func(a, b porcupine.Operation) int { return cmp.Compare(a.Return, b.Return) })
	n, _ := slices.BinarySearchFunc(part, 0, func(op porcupine.Operation, _ int) int {
		if porcupine.CheckOperationsTimeout(logModel, until(part, op.Return), 5*time.Second) == porcupine.Illegal {
			return 0
		}
		return -1
	})
	for _, op := range part[max(0, n-12):min(n+1, len(part))] {
		text += fmt.Sprintf("\n%14d to %14d client %d, %s", op.Call, op.Return, op.ClientId, logModel.DescribeOperation(op.Input, op.Output))
	}
	return text
}

// until is what was known of a history at some time: of calls without an answer those
// count that may have had an effect.
func until(part []porcupine.Operation, at int64) (known []porcupine.Operation) {
	for _, op := range part {
		switch {
		case op.Return <= at:
			known = append(known, op)
		case op.Call <= at && op.Input.(call).append && op.Output.(answer).done:
			op.Return = forever
			known = append(known, op)
		}
	}
	return known
}

// The model finds what a broken group would do.
func TestModel(t *testing.T) {
	task := cpwire.Task{Job: "j", Name: "t"}
	d := func(n byte) cpwire.Digest { return cpwire.Digest{n} }
	put := func(call0, ret int64, after head, n byte, a answer) porcupine.Operation {
		return porcupine.Operation{Input: call{task: task, append: true, after: after, digest: d(n)}, Call: call0, Output: a, Return: ret}
	}
	get := func(call0, ret int64, h head) porcupine.Operation {
		return porcupine.Operation{Input: call{task: task}, Call: call0, Output: answer{head: h}, Return: ret}
	}
	one, two := head{1, d(1)}, head{2, d(2)}
	cases := []struct {
		name string
		ops  []porcupine.Operation
		ok   bool
	}{
		{"one after the other", []porcupine.Operation{put(0, 1, head{}, 1, answer{true, one}), get(2, 3, one), put(4, 5, one, 2, answer{true, two}), get(6, 7, two)}, true},
		{"overtaken read", []porcupine.Operation{put(0, 5, head{}, 1, answer{true, one}), get(1, 2, head{}), get(3, 4, one)}, true},
		{"stale read", []porcupine.Operation{put(0, 1, head{}, 1, answer{true, one}), get(2, 3, head{})}, false},
		{"read goes back", []porcupine.Operation{put(0, 9, head{}, 1, answer{true, one}), get(1, 2, one), get(3, 4, head{})}, false},
		{"lost append", []porcupine.Operation{put(0, 1, head{}, 1, answer{true, one}), put(2, 3, head{}, 2, answer{true, head{1, d(2)}})}, false},
		{"conflict", []porcupine.Operation{put(0, 1, head{}, 1, answer{true, one}), put(2, 3, head{}, 2, answer{false, one})}, true},
		{"conflict with nobody", []porcupine.Operation{put(0, 1, head{}, 1, answer{false, one})}, false},
		{"refused and done", []porcupine.Operation{put(0, 1, head{}, 1, answer{false, head{}}), get(2, 3, one)}, false},
		{"unknown, done late", []porcupine.Operation{put(0, forever, head{}, 1, answer{true, one}), get(2, 3, head{}), get(4, 5, one)}, true},
		{"unknown, done twice", []porcupine.Operation{put(0, forever, head{}, 1, answer{true, one}), get(4, 5, one), put(6, 7, one, 2, answer{true, two}), get(8, 9, one)}, false},
	}
	for _, c := range cases {
		if err := checkLinear(c.ops); (err == nil) != c.ok {
			t.Errorf("%s: %v", c.name, err)
		}
	}
}
