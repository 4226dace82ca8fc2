//go:build linux

package main

import (
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/snapferry/snapferry/internal/machine"
)

// line is one row of the report. Times are medians, all else is the greatest.
type line struct {
	Row       string        `json:"row"`
	Work      string        `json:"work"`
	Ours      time.Duration `json:"ours_ns"`
	Reference time.Duration `json:"reference_ns,omitempty"`
	Ratio     float64       `json:"ratio,omitempty"`
	MaxRatio  float64       `json:"max_ratio,omitempty"`
	MaxTime   time.Duration `json:"max_ns,omitempty"`
	PeakBytes int64         `json:"peak_bytes,omitempty"` // none where no command runs
	Met       bool          `json:"met"`
	Share     float64       `json:"share,omitempty"`
	MaxShare  float64       `json:"max_share,omitempty"`
	Puts      int64         `json:"puts,omitempty"`
	MaxPuts   int64         `json:"max_puts,omitempty"`
	Note      string        `json:"note,omitempty"`
	Samples   []sample      `json:"samples"`
}

// report is all that this program prints.
type report struct {
	Machine     machine.Info `json:"machine"`
	Scale       float64      `json:"scale"`
	Runs        int          `json:"runs"`
	MemoryLimit int64        `json:"max_peak_bytes"`
	Rows        []line       `json:"rows"`
	Met         bool         `json:"met"`
}

func newReport(c *config, m machine.Info, results []result) *report {
	rep := &report{Machine: m, Scale: c.scale, Runs: c.runs, MemoryLimit: memoryLimit, Met: true}
	for _, r := range results {
		l := newLine(r)
		rep.Rows = append(rep.Rows, l)
		rep.Met = rep.Met && l.Met
	}
	return rep
}

func newLine(r result) line {
	most := r.row.limit
	l := line{Row: r.row.name, Work: r.row.work, MaxRatio: most.ratio, MaxTime: most.time, MaxShare: most.share,
		MaxPuts: most.puts, Note: r.note, Samples: r.samples}
	var ours, reference []time.Duration
	for _, s := range r.samples {
		ours = append(ours, s.Ours.Wall)
		if s.Reference != nil {
			reference = append(reference, s.Reference.Wall)
		}
		l.PeakBytes = max(l.PeakBytes, s.Ours.PeakBytes)
		l.Share, l.Puts = max(l.Share, s.Share), max(l.Puts, s.Puts)
	}
	l.Ours, l.Reference = machine.Median(ours), machine.Median(reference)
	if l.Reference > 0 {
		l.Ratio = float64(l.Ours) / float64(l.Reference)
	}
	l.Met = l.PeakBytes <= memoryLimit &&
		(l.MaxRatio == 0 || l.Reference > 0 && l.Ratio <= l.MaxRatio) && (l.MaxTime == 0 || l.Ours <= l.MaxTime) &&
		(l.MaxShare == 0 || l.Share <= l.MaxShare) && (l.MaxPuts == 0 || l.Puts <= l.MaxPuts)
	return l
}

func (rep *report) table(w io.Writer) error {
	fmt.Fprintf(w, "%v; median of %d, page cache warm\n\n", rep.Machine, rep.Runs)
	tw := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
	fmt.Fprintln(tw, "row\twork\tours\treference\tratio\tsent\tlimit\tpeak memory\t")
	for _, l := range rep.Rows {
		fmt.Fprintf(tw, "%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\n", l.Row, l.Work, seconds(l.Ours),
			dash(l.Reference > 0, seconds(l.Reference)), dash(l.Ratio > 0, fmt.Sprintf("%.2f x", l.Ratio)),
			l.sent(), l.limit(), dash(l.PeakBytes > 0, fmt.Sprintf("%d MiB", l.PeakBytes>>20)), l.verdict())
	}
	if err := tw.Flush(); err != nil {
		return err
	}
	_, err := fmt.Fprintf(w, "\nreference: cp -r + sync (first, restore), find -printf '%%s %%T@' (small); memory limit %d MiB in every row that runs the command\n",
		rep.MemoryLimit>>20)
	for _, l := range rep.Rows {
		if l.Note != "" {
			_, err = fmt.Fprintf(w, "%s: %s\n", l.Row, l.Note)
		}
	}
	if rep.Scale != 1 {
		_, err = fmt.Fprintf(w, "scale %g: the limits are for scale 1, so the verdicts mean little\n", rep.Scale)
	}
	return err
}

func (l *line) sent() string {
	switch {
	case l.Puts > 0:
		return requests(l.Puts)
	case l.Share > 0:
		return percent(l.Share)
	}
	return "-"
}

func (l *line) limit() string {
	var parts []string
	if l.MaxRatio > 0 {
		parts = append(parts, fmt.Sprintf("%.2f x", l.MaxRatio))
	}
	if l.MaxTime > 0 {
		parts = append(parts, seconds(l.MaxTime))
	}
	if l.MaxShare > 0 {
		parts = append(parts, percent(l.MaxShare))
	}
	if l.MaxPuts > 0 {
		parts = append(parts, requests(l.MaxPuts))
	}
	return dash(len(parts) > 0, strings.Join(parts, ", "))
}

func requests(n int64) string { return fmt.Sprintf("%d PUTs", n) }

func percent(share float64) string { return fmt.Sprintf("%.1f %%", 100*share) }

func seconds(d time.Duration) string { return fmt.Sprintf("%.3f s", d.Seconds()) }

func dash(known bool, text string) string {
	if known {
		return text
	}
	return "-"
}

// verdict is of rows with a limit of their own; others are shown for comparison.
func (l *line) verdict() string {
	switch {
	case !l.Met:
		return "FAIL"
	case l.limit() == "-":
		return "-"
	}
	return "pass"
}
