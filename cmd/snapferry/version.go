package main

import (
	"fmt"
	"io"
	"runtime"
	"runtime/debug"

	"github.com/spf13/cobra"
)

func (a *app) newVersion() *cobra.Command {
	cmd := &cobra.Command{
		Use:     "version",
		Short:   "Print the version of this program",
		Example: examples("\tsnapferry version\n\tsnapferry version --json"),
		Args:    noArgs,
		RunE:    func(*cobra.Command, []string) error { return a.printVersion() },
	}
	cmd.Flags().BoolVar(&a.json, "json", false, "print one JSON object on standard output, and nothing else there")
	return cmd
}

func (a *app) printVersion() error {
	report := struct {
		Version  string `json:"version"`
		Go       string `json:"go"`
		Platform string `json:"platform"`
	}{buildVersion(), runtime.Version(), runtime.GOOS + "/" + runtime.GOARCH}
	return a.result(report, func(w io.Writer) {
		fmt.Fprintf(w, "snapferry %s, %s, %s\n", report.Version, report.Go, report.Platform)
	})
}

// buildVersion is the module's version, or the revision that a checkout was built from.
func buildVersion() string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return "unknown"
	}
	if v := info.Main.Version; v != "" && v != "(devel)" {
		return v
	}
	for _, s := range info.Settings {
		if s.Key == "vcs.revision" {
			return "devel-" + s.Value[:min(12, len(s.Value))]
		}
	}
	return "devel"
}
