//go:build linux

package main

import (
	"fmt"
	"io"
	"text/tabwriter"
	"time"

	"github.com/snapferry/snapferry/internal/machine"
)

// line is one row of the report. Times are medians, the peak is the greatest.
type line struct {
	Row       string        `json:"row"`
	Work      string        `json:"work"`
	Ours      time.Duration `json:"ours_ns"`
	Reference time.Duration `json:"reference_ns,omitempty"`
	Ratio     float64       `json:"ratio,omitempty"`
	MaxRatio  float64       `json:"max_ratio,omitempty"`
	MaxTime   time.Duration `json:"max_ns,omitempty"`
	PeakBytes int64         `json:"peak_bytes"`
	Met       bool          `json:"met"`
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
	l := line{Row: r.row.name, Work: r.row.work, MaxRatio: r.row.limit.ratio, MaxTime: r.row.limit.time, Samples: r.samples}
	var ours, reference []time.Duration
	for _, s := range r.samples {
		ours = append(ours, s.Ours.Wall)
		if s.Reference != nil {
			reference = append(reference, s.Reference.Wall)
		}
		l.PeakBytes = max(l.PeakBytes, s.Ours.PeakBytes)
	}
	l.Ours, l.Reference = machine.Median(ours), machine.Median(reference)
	if l.Reference > 0 {
		l.Ratio = float64(l.Ours) / float64(l.Reference)
	}
	l.Met = l.PeakBytes <= memoryLimit &&
		(l.MaxRatio == 0 || l.Ratio <= l.MaxRatio) && (l.MaxTime == 0 || l.Ours <= l.MaxTime)
	return l
}

func (rep *report) table(w io.Writer) error {
	fmt.Fprintf(w, "%v; median of %d, page cache warm\n\n", rep.Machine, rep.Runs)
	tw := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
	fmt.Fprintln(tw, "row\twork\tours\treference\tratio\tlimit\tpeak memory\t")
	for _, l := range rep.Rows {
		fmt.Fprintf(tw, "%s\t%s\t%s\t%s\t%s\t%s\t%d MiB\t%s\n", l.Row, l.Work, seconds(l.Ours),
			dash(l.Reference > 0, seconds(l.Reference)), dash(l.Ratio > 0, fmt.Sprintf("%.2f x", l.Ratio)),
			l.limit(), l.PeakBytes>>20, verdict(l.Met))
	}
	if err := tw.Flush(); err != nil {
		return err
	}
	_, err := fmt.Fprintf(w, "\nreference: cp -r + sync (first, restore), find -printf '%%s %%T@' (small); memory limit %d MiB in every row\n",
		rep.MemoryLimit>>20)
	if rep.Scale != 1 {
		_, err = fmt.Fprintf(w, "scale %g: the limits are for scale 1, so the verdicts mean little\n", rep.Scale)
	}
	return err
}

func (l *line) limit() string {
	if l.MaxRatio > 0 {
		return fmt.Sprintf("%.2f x", l.MaxRatio)
	}
	return seconds(l.MaxTime)
}

func seconds(d time.Duration) string { return fmt.Sprintf("%.3f s", d.Seconds()) }

func dash(known bool, text string) string {
	if known {
		return text
	}
	return "-"
}

func verdict(met bool) string {
	if met {
		return "pass"
	}
	return "FAIL"
}
