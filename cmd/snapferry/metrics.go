package main

import (
	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/cobra"

	"github.com/snapferry/snapferry"
	"github.com/snapferry/snapferry/promobserver"
)

// metricsFile is --metrics-file: where a one-shot run leaves its metrics.
type metricsFile struct {
	path     string
	registry *prometheus.Registry
}

func (m *metricsFile) bind(cmd *cobra.Command) {
	cmd.Flags().Var(once(&m.path), "metrics-file", "write Prometheus metrics of this run to `FILE` at its end, also when it fails: NAME.prom where node exporter's textfile collector looks")
	_ = cmd.MarkFlagFilename("metrics-file", "prom")
}

// observer returns what counts, or nil without the flag.
func (m *metricsFile) observer() (*snapferry.Observer, error) {
	if m.path == "" {
		return nil, nil
	}
	m.registry = prometheus.NewRegistry()
	o, err := promobserver.New(m.registry, nil)
	if err != nil {
		return nil, err
	}
	return o.Events(), nil
}

// write writes the file, if there is to be one. What the run was for has succeeded or failed
// without it, so trouble is only told.
func (m *metricsFile) write(a *app) {
	if m.registry == nil {
		return
	}
	if err := promobserver.WriteFile(m.path, m.registry); err != nil {
		a.warn("%v", err)
	}
}
