package protocol

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

var update = flag.Bool("update", false, "write what the transcripts should be")

// A transcript is a file in testdata: lines that begin with ">" are commands, those that
// begin with "#" say what is going on, and the rest are the effects of the command above.
// Commands are a verb, words, and key=value pairs; see the table verbs.
func transcript(t *testing.T, name string) *world {
	t.Helper()
	path := filepath.Join("testdata", name+".txt")
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	s := &script{t: t}
	var out strings.Builder
	for line := range strings.Lines(string(data)) {
		line = strings.TrimRight(line, "\n")
		switch {
		case strings.HasPrefix(line, ">"):
			fmt.Fprintln(&out, line)
			for _, l := range collapse(s.run(strings.TrimSpace(line[1:]))) {
				fmt.Fprintln(&out, "  "+l)
			}
		case line == "" || strings.HasPrefix(line, "#"):
			fmt.Fprintln(&out, line)
		}
	}
	if *update {
		if err := os.WriteFile(path, []byte(out.String()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if diff := cmp.Diff(string(data), out.String()); diff != "" && !*update {
		t.Errorf("%s (-want +got):\n%s", path, diff)
	}
	return s.w
}

// collapse writes lines that follow each other and are the same as one.
func collapse(lines []string) []string {
	var out []string
	for i := 0; i < len(lines); {
		n := 1
		for i+n < len(lines) && lines[i+n] == lines[i] {
			n++
		}
		line := lines[i]
		if n > 1 {
			line += fmt.Sprintf(" (%d times)", n)
		}
		out = append(out, line)
		i += n
	}
	return out
}

// script runs commands on a world.
type script struct {
	t     *testing.T
	w     *world
	verb  string
	words []string
	keys  map[string]string
}

func (s *script) run(line string) []string {
	fields := strings.Fields(line)
	s.verb, s.words, s.keys = fields[0], nil, map[string]string{}
	for _, f := range fields[1:] {
		if k, v, ok := strings.Cut(f, "="); ok {
			s.keys[k] = v
		} else {
			s.words = append(s.words, f)
		}
	}
	f := verbs[s.verb]
	if f == nil {
		s.t.Fatalf("no verb in %q", line)
	}
	return f(s)
}

// verbs are the commands. Those that stand for an event give its effects.
var verbs = map[string]func(s *script) []string{
	// member ID of=N applied=I [recorded=SNAP] [entries=N] [interval=D] [single=P] [logcap=N]
	"member": (*script).member,
	// view applied=I role=R term=T ... peer=ID active=B match=I voter=B
	"view": (*script).view,
	// hold SNAP
	"hold": func(s *script) []string { s.w.hold(s.snap(0)); return nil },
	"tick": func(s *script) []string {
		return showAll(s.w.tick(s.length(0)))
	},
	// busy PEER D: time passes, and the peer says "generating" whenever it is asked.
	"busy": func(s *script) []string {
		var out []Effect
		for end := s.w.now + s.length(1); s.w.now < end; {
			effects := s.w.tick(100 * time.Millisecond)
			for _, e := range effects {
				if a, ok := e.(Ask); ok && a.Peer == s.id(0) {
					s.w.step(s.w.answer(a.Peer, Generating, ""))
				} else {
					out = append(out, e)
				}
			}
		}
		return showAll(out)
	},
	"wanted":  func(s *script) []string { return s.event(Wanted{s.num("min"), s.num("needs")}) },
	"install": (*script).install,
	"announced": func(s *script) []string {
		h := s.snap(0)
		return s.event(Announced{Announce{Group: s.text("group", "g"), From: s.num("from"), Term: s.or("term", s.w.v.Term), ID: h.ID, Lineage: h.Meta.Lineage, Holders: s.list("holders")}})
	},
	"asked":  (*script).asked,
	"answer": (*script).asked,
	"info":   (*script).info,
	"silent": func(s *script) []string { return s.event(InfoFailed{s.transfer(), s.id(0), "no route"}) },
	"moved":  func(s *script) []string { return s.event(FetchMoved{s.transfer(), int64(s.id(0))}) },
	"done": func(s *script) []string {
		t := s.w.fetch.Target
		return s.event(FetchDone{s.transfer(), snap(t.Index, t.Term, uint64(t.Digest[0]))})
	},
	"ended": func(s *script) []string {
		return s.event(FetchEnded{s.transfer(), Failure{Kind: FailureKind(s.words[0]), Peer: s.num("peer")}})
	},
	"recorded": func(s *script) []string {
		e := RecordDone{Transfer: s.transfer()}
		if s.w.m.maker.stage == makerRecording && s.w.m.slot.stage != Recording {
			e.Transfer = s.w.m.maker.transfer
		}
		if len(s.words) > 0 {
			e.Refusal = &Refusal{Kind: RefusalKind(s.words[0])}
		}
		return s.event(e)
	},
	"handed": func(s *script) []string {
		return s.event(HandDone{s.transfer(), Outcome{Kind: OutcomeKind(s.words[0])}})
	},
	"made": func(s *script) []string { return s.event(Made{s.snap(0)}) },
	"unmade": func(s *script) []string {
		return s.event(MakeFailed{Failure{Kind: FailureKind(s.words[0]), Text: "disk"}})
	},
	"damaged": func(s *script) []string { return s.event(Damaged{s.snap(0).ID}) },
	"close":   func(s *script) []string { return s.event(Close{}) },
	"why":     func(s *script) []string { return []string{s.w.m.Why(s.w.now, &s.w.v)} },
	"stage": func(s *script) []string {
		st := s.w.m.Status()
		return []string{fmt.Sprintf("%s, making: %s, install: %v", st.Stage, st.Making, st.Install)}
	},
}

func (s *script) event(e Event) []string { return showAll(s.w.step(e)) }

func (s *script) member() []string {
	cfg := Config{Entries: s.or("entries", 100), Bytes: -1, LogCap: -1, Seed: 1}
	if s.keys["interval"] != "" {
		cfg.Interval = s.parseDuration(s.keys["interval"])
	}
	cfg.Single = map[string]SinglePolicy{"": SingleLocal, "never": SingleNever, "logcap": SingleLogCap}[s.keys["single"]]
	if s.keys["logcap"] != "" {
		cfg.LogCap, cfg.LogCapWait = int64(s.num("logcap")), time.Minute
	}
	s.w = newWorld(s.t, cfg, s.id(0), int(s.num("of")))
	if r := s.keys["recorded"]; r != "" {
		s.w.has(s.parse(r))
	}
	s.w.applied(s.num("applied"))
	return s.event(Tick{})
}

func (s *script) view() []string {
	v := &s.w.v
	if s.keys["applied"] != "" {
		s.w.applied(s.num("applied"))
	}
	v.Term, v.Leader = s.or("term", v.Term), s.or("leader", v.Leader)
	v.First, v.LogBytes = s.or("first", v.First), int64(s.or("logbytes", uint64(v.LogBytes)))
	if r, ok := s.keys["role"]; ok {
		v.Role = map[string]Role{"leader": Leader, "follower": Follower, "learner": Learner}[r]
	}
	if own := s.keys["own"]; own != "" {
		v.Applied, v.Commit = s.num("own"), s.num("own")
	}
	if s.keys["peer"] == "" {
		return nil
	}
	for i := range v.Peers {
		if p := &v.Peers[i]; p.ID == s.num("peer") {
			p.Active, p.Voter = s.text("active", "true") == "true", s.text("voter", "true") == "true"
			p.Match = s.or("match", p.Match)
			return nil
		}
	}
	v.Peers = append(v.Peers, Peer{Member: Member{ID: s.num("peer")}, Active: true, Voter: s.text("voter", "true") == "true"})
	return nil
}

func (s *script) install() []string {
	h := s.snap(0)
	return s.event(InstallAsked{Envelope{
		From: s.or("from", 1), Term: s.or("term", s.w.v.Term), SnapTerm: h.ID.Term, SnapIndex: h.ID.Index,
		Target: h.ID, Holders: s.list("holders"), First: s.or("first", h.ID.Index-5),
	}})
}

// asked gives another member's request and then the answer to it.
func (s *script) asked() []string {
	r := InfoRequest{
		Group: s.text("group", "g"), From: s.or("from", 1), Term: s.or("term", s.w.v.Term), Transfer: "other",
		MinIndex: s.num("min"), MinTerm: s.num("minterm"), Needs: s.num("needs"), Make: s.text("make", "") == "true",
	}
	if held := s.keys["held"]; held != "" {
		h := s.parse(held)
		r.Held, r.Lineage = h.ID, h.Meta.Lineage
	}
	var out []string
	if s.verb == "asked" {
		out = s.event(Asked{r})
	}
	a := s.w.m.Answer(&s.w.v, r)
	line := "answer " + string(a.State)
	if a.State == Ready {
		line += " " + a.ID.Short()
	}
	if a.Reason != "" {
		line += " (" + a.Reason + ")"
	}
	if a.Refusal != nil {
		line = fmt.Sprintf("answer refusal %s term %d leader %d", a.Refusal.Kind, a.Refusal.Term, a.Refusal.Leader)
	}
	return append(out, line)
}

func (s *script) info() []string {
	peer, what := s.id(0), s.words[1]
	var e InfoCame
	switch what {
	case "ready":
		e = s.w.ready(peer, s.snap(2))
	case "none", "generating", "failed":
		e = s.w.answer(peer, AnswerState(what), strings.Join(s.words[2:], " "))
	default:
		e = s.w.refusal(peer, RefusalKind(what))
	}
	e.Answer.Transfer = s.transfer()
	return s.event(e)
}

func (s *script) transfer() TransferID {
	return TransferID(s.text("transfer", string(s.w.m.slot.transfer)))
}

// snap reads the word at a place as INDEX@TERM/MAKER.
func (s *script) snap(word int) Held { return s.parse(s.words[word]) }

func (s *script) parse(text string) Held {
	var index, term, maker uint64
	if _, err := fmt.Sscanf(text, "%d@%d/%d", &index, &term, &maker); err != nil {
		s.t.Fatalf("snapshot %q: %v", text, err)
	}
	h := snap(index, term, maker)
	if conf := s.list("conf"); conf != nil {
		h.Meta.Conf = Conf{Voters: conf}
	}
	return h
}

func (s *script) text(key, def string) string {
	if v, ok := s.keys[key]; ok {
		return v
	}
	return def
}

func (s *script) number(text string) uint64 {
	n, err := strconv.ParseUint(text, 10, 64)
	if err != nil {
		s.t.Fatal(err)
	}
	return n
}

func (s *script) num(key string) uint64 { return s.or(key, 0) }

func (s *script) or(key string, def uint64) uint64 {
	if v, ok := s.keys[key]; ok {
		return s.number(v)
	}
	return def
}

func (s *script) id(word int) uint64 { return s.number(s.words[word]) }

func (s *script) list(key string) []uint64 {
	var out []uint64
	for f := range strings.SplitSeq(s.keys[key], ",") {
		if f != "" {
			out = append(out, s.number(f))
		}
	}
	return out
}

func (s *script) length(word int) time.Duration { return s.parseDuration(s.words[word]) }

func (s *script) parseDuration(text string) time.Duration {
	d, err := time.ParseDuration(text)
	if err != nil {
		s.t.Fatal(err)
	}
	return d
}
