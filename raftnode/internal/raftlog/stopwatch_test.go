package raftlog_test

import (
	"slices"
	"time"
)

// stopwatch keeps durations for a benchmark.
type stopwatch struct {
	took []float64
}

func (s *stopwatch) time(f func()) {
	start := time.Now()
	f()
	s.took = append(s.took, float64(time.Since(start)))
}

func (s *stopwatch) median() float64 { return s.at(0.5) }

func (s *stopwatch) at(q float64) float64 {
	slices.Sort(s.took)
	return s.took[int(q*float64(len(s.took)-1))]
}
