package main

import (
	"os"
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/cobra"

	"github.com/snapferry/snapferry"
	"github.com/snapferry/snapferry/promobserver"
)

// metricsFile is --metrics-file: where a one-shot run leaves its metrics.
type metricsFile struct{ path string }

func (m *metricsFile) bind(cmd *cobra.Command) {
	cmd.Flags().Var(once(&m.path), "metrics-file", "write Prometheus metrics of this run to `FILE` at its end, also when it fails: NAME.prom where node exporter's textfile collector looks")
	_ = cmd.MarkFlagFilename("metrics-file", "prom")
}

// around runs a verb and writes the file at its end. A failure that the engine has not
// counted is counted under the name of the verb. What the verb is for succeeds or fails
// without the file, so trouble with it is only told.
func (m *metricsFile) around(a *app, verb string, id snapferry.TaskID, run func(counts *snapferry.Observer) error) error {
	if m.path == "" {
		return run(nil)
	}
	if info, err := os.Lstat(m.path); err == nil && !info.Mode().IsRegular() {
		return usagef("--metrics-file %s: there is something that is no regular file", m.path)
	}
	registry := prometheus.NewRegistry()
	o, err := promobserver.New(registry, nil)
	if err != nil {
		return err
	}
	var counted atomic.Bool
	counts := o.Events()
	err = run(counts.With(&snapferry.Observer{Failed: func(snapferry.Failed) { counted.Store(true) }}))
	if err != nil && !counted.Load() {
		counts.Failed(snapferry.Failed{Task: id, Op: verb, Err: err})
	}
	if werr := promobserver.WriteFile(m.path, registry); werr != nil {
		a.warn("%v", werr)
	}
	return err
}
