//go:build linux

package main

import (
	"fmt"
	"io"
	"text/tabwriter"

	"github.com/snapferry/snapferry/internal/machine"
)

func table(w io.Writer, m machine.Info, scale float64, lines []line) error {
	fmt.Fprintf(w, "%v; medians\n\n", m)
	tw := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
	fmt.Fprintln(tw, "row\twork\tours\treference\tratio\tlimit\t")
	for _, l := range lines {
		verdict := "pass"
		if !l.Met {
			verdict = "FAIL"
		}
		fmt.Fprintf(tw, "%s\t%s\t%.2f%s\t%.2f%s\t%.2f\t%s\t%s\n", l.Row, l.Work,
			machine.Median(l.Ours), l.Unit, machine.Median(l.Reference), l.Unit, l.Ratio, l.Limit, verdict)
	}
	if err := tw.Flush(); err != nil {
		return err
	}
	for _, l := range lines {
		if l.Note != "" {
			fmt.Fprintf(w, "\n%s: %s\n", l.Row, l.Note)
		}
	}
	if scale != 1 {
		fmt.Fprintf(w, "\nscale %g: the limits are for scale 1, so the verdicts mean little\n", scale)
	}
	return nil
}
