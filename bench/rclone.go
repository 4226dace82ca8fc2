//go:build linux

package main

import (
	"errors"
	"fmt"
	"os/exec"
	"strings"
)

// Settings of rclone that rows try; the fastest is the reference. What saves it requests is in
// all of them: it looks for no bucket and no object before it writes one, and not after it. What
// it fetches it compares with its checksum, as the command does.
const (
	rcloneCopy  = "--no-check-dest --s3-no-check-bucket --s3-no-head "
	rcloneWhole = rcloneCopy + "--s3-upload-cutoff 256M --s3-disable-checksum " // 64 MiB in one request
)

var (
	rcloneSmall = []string{
		rcloneCopy + "--transfers 16 --checkers 8", rcloneCopy + "--transfers 32 --checkers 16",
		rcloneCopy + "--transfers 64 --checkers 32", "--no-traverse --transfers 32 --checkers 32",
	}
	rcloneUp = []string{
		rcloneWhole + "--transfers 4", rcloneWhole + "--transfers 8",
		rcloneCopy + "--s3-upload-cutoff 16M --s3-disable-checksum --transfers 4 --s3-chunk-size 16M --s3-upload-concurrency 4",
		rcloneCopy + "--s3-upload-cutoff 16M --s3-disable-checksum --transfers 4 --s3-chunk-size 64M --s3-upload-concurrency 2",
	}
	rcloneDown = []string{
		rcloneCopy + "--transfers 2", rcloneCopy + "--transfers 4", rcloneCopy + "--transfers 8",
		rcloneCopy + "--transfers 4 --multi-thread-cutoff 16M --multi-thread-streams 4",
	}
)

// rcloneEnvironment describes the gateway as the remote gw and keeps a configuration file out.
func (g *gateway) rcloneEnvironment() []string {
	const remote = "RCLONE_CONFIG_GW_"
	return []string{
		"RCLONE_CONFIG=", remote + "TYPE=s3", remote + "PROVIDER=Other", remote + "ENDPOINT=" + g.Endpoint,
		remote + "REGION=" + g.Region, remote + "ACCESS_KEY_ID=" + g.AccessKey, remote + "SECRET_ACCESS_KEY=" + g.SecretKey,
	}
}

// remote is a prefix of the bucket in rclone's words.
func (g *gateway) remote(prefix string) string { return "gw:" + g.bucket + "/" + prefix }

// rival is rclone as the reference of a row.
type rival struct {
	b        *bench
	from, to string
	clean    func() error // removes what a copy made
	settings string
}

// rival finds the fastest of some settings by a copy with each. Without rclone it is nil, and
// the row says so.
func (b *bench) rival(from, to string, clean func() error, settings []string) (*rival, error) {
	if err := b.lacksRclone(); err != nil {
		b.note = "no reference: " + err.Error()
		return nil, nil
	}
	version, err := exec.CommandContext(b.ctx, b.rclone, "version").Output()
	if err != nil {
		return nil, fmt.Errorf("rclone version: %w", err)
	}
	r := &rival{b: b, from: from, to: to, clean: clean}
	var best usage
	for _, s := range settings {
		u, err := r.copy(s)
		if err != nil {
			return nil, err
		}
		fmt.Fprintf(b.log, "bench: rclone %s: %s\n", s, seconds(u.Wall))
		if r.settings == "" || u.Wall < best.Wall {
			r.settings, best = s, u
		}
	}
	name, _, _ := strings.Cut(string(version), "\n")
	b.note = fmt.Sprintf("reference: %s copy %s (fastest of %d settings)", name, r.settings, len(settings))
	return r, nil
}

// sample is one copy with the best settings, nil without rclone.
func (r *rival) sample() (*usage, error) {
	if r == nil {
		return nil, nil
	}
	u, err := r.copy(r.settings)
	return &u, err
}

func (r *rival) copy(settings string) (usage, error) {
	u, err := r.b.runRclone(r.from, r.to, settings)
	return u, errors.Join(err, r.clean())
}

// lacksRclone is nil when there is an rclone.
func (b *bench) lacksRclone() error {
	_, err := exec.LookPath(b.rclone)
	return err
}

func (b *bench) runRclone(from, to, settings string) (usage, error) {
	args := append([]string{"copy", from, to}, strings.Fields(settings)...)
	cmd := exec.CommandContext(b.ctx, b.rclone, args...)
	cmd.Env = b.env
	u, _, err := b.timed(cmd)
	return u, err
}
