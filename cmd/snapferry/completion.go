package main

import (
	"fmt"

	"github.com/spf13/cobra"
)

func (a *app) newCompletion() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "completion bash|zsh|fish|powershell",
		Short: "Print a script that completes verbs and flags in a shell",
		Example: examples(`
			snapferry completion bash >/etc/bash_completion.d/snapferry
			snapferry completion zsh >"${fpath[1]}/_snapferry"
			snapferry completion fish >~/.config/fish/completions/snapferry.fish
			snapferry completion powershell >snapferry.ps1`),
		Args:      atMostOneArg,
		ValidArgs: []string{"bash", "zsh", "fish", "powershell"},
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) == 0 {
				return usagef("for which shell? bash, zsh, fish or powershell")
			}
			return a.complete(cmd.Root(), args[0])
		},
	}
	return cmd
}

func (a *app) complete(root *cobra.Command, shell string) error {
	var err error
	switch shell {
	case "bash":
		err = root.GenBashCompletionV2(a.stdout, true)
	case "zsh":
		err = root.GenZshCompletion(a.stdout)
	case "fish":
		err = root.GenFishCompletion(a.stdout, true)
	case "powershell":
		err = root.GenPowerShellCompletionWithDesc(a.stdout)
	default:
		return usagef("no completion for shell %q: known are bash, zsh, fish and powershell", shell)
	}
	if err != nil {
		return fmt.Errorf("completion %s: %w", shell, err)
	}
	return nil
}
