package main

import (
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/pflag"
)

// byteRate is a number of bytes a second as a flag: 500K, 20MiB/s, 1GB. K, M, G and T
// and KiB to TiB count in 1024, KB to TB in 1000. 0 means no limit.
type byteRate int64

var _ pflag.Value = (*byteRate)(nil)

var units = map[string]float64{
	"": 1, "B": 1,
	"K": 1 << 10, "KIB": 1 << 10, "KB": 1e3,
	"M": 1 << 20, "MIB": 1 << 20, "MB": 1e6,
	"G": 1 << 30, "GIB": 1 << 30, "GB": 1e9,
	"T": 1 << 40, "TIB": 1 << 40, "TB": 1e12,
}

// Set parses a rate.
func (r *byteRate) Set(s string) error {
	text := strings.ToUpper(strings.TrimSuffix(strings.TrimSpace(s), "/s"))
	end := strings.LastIndexAny(text, "0123456789.") + 1
	unit, ok := units[strings.TrimSpace(text[end:])]
	n, err := strconv.ParseFloat(text[:end], 64)
	if !ok || err != nil || n < 0 || n*unit > math.MaxInt64/2 || n > 0 && n*unit < 1 {
		return fmt.Errorf("%q is no rate: write a number of bytes a second, as in 500K or 20MiB/s", s)
	}
	*r = byteRate(n * unit)
	return nil
}

// String is the form that help shows.
func (r *byteRate) String() string {
	if *r == 0 {
		return ""
	}
	return size(int64(*r)) + "/s"
}

// Type names the flag's value in help.
func (r *byteRate) Type() string { return "BYTES/s" }

// age is a span of time as a flag: what Go writes, and whole days or weeks such as 7d, 2w.
type age time.Duration

var _ pflag.Value = (*age)(nil)

// Set parses an age.
func (a *age) Set(s string) error {
	d, err := time.ParseDuration(s)
	for unit, days := range map[string]time.Duration{"d": 1, "w": 7} {
		if count, ok := strings.CutSuffix(s, unit); ok {
			var n uint64
			n, err = strconv.ParseUint(count, 10, 13) // 8191 weeks are still a Duration
			d = time.Duration(n) * days * 24 * time.Hour
		}
	}
	if err != nil || d < 0 {
		return fmt.Errorf("%q is no span of time: write 0s, 90m, 24h, 7d or 2w", s)
	}
	*a = age(d)
	return nil
}

// String is the form that help shows.
func (a *age) String() string { return time.Duration(*a).String() }

// Type names the flag's value in help.
func (a *age) Type() string { return "DUR" }

// positive is a number of at least 1 as a flag; 0 means that it was not given.
type positive int

var _ pflag.Value = (*positive)(nil)

// Set parses a number.
func (p *positive) Set(s string) error {
	n, err := strconv.ParseInt(s, 10, 32)
	if err != nil || n < 1 {
		return fmt.Errorf("%q is no number of at least 1", s)
	}
	*p = positive(n)
	return nil
}

// String is the form that help shows.
func (p *positive) String() string {
	if *p == 0 {
		return ""
	}
	return strconv.Itoa(int(*p))
}

// Type names the flag's value in help.
func (p *positive) Type() string { return "N" }

// single is a text as a flag that may neither be empty, as it is when a script's
// variable is not set, nor be given twice, since one of them would be dropped.
type single struct {
	to    *string
	given bool
}

var _ pflag.Value = (*single)(nil)

// once returns a flag that sets to. What stands there before is the default.
func once(to *string) *single { return &single{to: to} }

// Set keeps the text.
func (s *single) Set(text string) error {
	switch {
	case text == "":
		return errors.New("it may not be empty")
	case s.given:
		return fmt.Errorf("it is given twice, the first time as %q", *s.to)
	}
	*s.to, s.given = text, true
	return nil
}

// String is the form that help shows.
func (s *single) String() string { return *s.to }

// Type names the flag's value in help.
func (s *single) Type() string { return "string" }

// size writes a number of bytes for people.
func size(n int64) string {
	if n < 1<<10 {
		return fmt.Sprintf("%d B", n)
	}
	f, unit := float64(n)/(1<<10), "KiB"
	for _, next := range []string{"MiB", "GiB", "TiB", "PiB"} {
		if f < 1023.95 {
			break
		}
		f, unit = f/(1<<10), next
	}
	return fmt.Sprintf("%.1f %s", f, unit)
}

// count writes a number of things for people.
func count(n int64, thing string) string {
	if n == 1 {
		return "1 " + thing
	}
	return strconv.FormatInt(n, 10) + " " + thing + "s"
}

func files(n int64) string { return count(n, "file") }

// seconds writes a duration for people.
func seconds(d time.Duration) string {
	switch {
	case d < 100*time.Millisecond:
		return fmt.Sprintf("%.1f ms", float64(d.Microseconds())/1e3)
	case d < 100*time.Second:
		return fmt.Sprintf("%.2f s", d.Seconds())
	}
	return d.Round(time.Second).String()
}

func millis(ms int64) string { return seconds(time.Duration(ms) * time.Millisecond) }
