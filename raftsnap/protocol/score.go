package protocol

import (
	"math/rand/v2"
	"time"
)

// scores remembers which members have failed lately, so that one bad candidate does not
// block the rest and is not hammered. Failures double the back-off; a success forgives
// all of them, time half of them for each decay period.
type scores struct {
	cfg *Config
	rng *rand.Rand
	of  map[uint64]*score
}

type score struct {
	fails int
	until time.Duration // not to be asked before
	last  time.Duration // failure
	why   string
}

// fail notes a failure of a member.
func (s *scores) fail(now time.Duration, peer uint64, why string) {
	if peer == 0 {
		return
	}
	sc := s.of[peer]
	if sc == nil {
		sc = &score{}
		s.of[peer] = sc
	}
	sc.decay(now, s.cfg.BackoffDecay)
	sc.fails++
	sc.last, sc.why = now, why
	// Longer than a round waits after the same failure, so that the next round is without
	// this member.
	sc.until = now + s.cfg.backoff(sc.fails+2, s.rng)
}

// good forgives a member that has delivered.
func (s *scores) good(peer uint64) { delete(s.of, peer) }

// healthy reports whether a member may be asked.
func (s *scores) healthy(now time.Duration, peer uint64) bool {
	sc := s.of[peer]
	return sc == nil || now >= sc.until
}

// fails gives the failures of a member that are not forgotten yet, for choosing.
func (s *scores) fails(now time.Duration, peer uint64) int {
	sc := s.of[peer]
	if sc == nil {
		return 0
	}
	sc.decay(now, s.cfg.BackoffDecay)
	return sc.fails
}

// decay halves the failures for each period since the last one.
func (sc *score) decay(now, period time.Duration) {
	for sc.fails > 0 && now-sc.last >= period {
		sc.fails /= 2
		sc.last += period
	}
}
