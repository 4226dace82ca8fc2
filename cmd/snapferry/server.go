package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/snapferry/snapferry"
	"github.com/snapferry/snapferry/server"
)

type serverVerb struct {
	app       *app
	id        string
	data      string
	listen    string
	advertise string
	cluster   string
	join      string
	insecure  bool

	cert, key, ca string
	clientAuth    bool

	snapshotEntries  positive
	trailingEntries  positive
	snapshotInterval age
	rate             byteRate
}

func (a *app) newServer() *cobra.Command {
	v := &serverVerb{app: a}
	cmd := &cobra.Command{
		Use:   "server --id ID --data DIR --listen HOST:PORT",
		Short: "Run a member of a group that keeps checkpoints",
		Long: `Run one member of a Raft group that keeps the checkpoints of tasks (backup --checkpoints).
Three or five members on different machines make a group; it works while more than half of
them do. The first start of a new group names all members with --initial-cluster, that of a
member that was added with "snapferry cluster add-learner" names some of the others with
--join. A later start needs neither: the data directory knows.

Members and clients use one port. It takes certificates (--tls-cert, --tls-key, --tls-ca), or
--insecure where everybody who can reach it may read and change everything. With
--tls-client-auth every certificate of --tls-ca may do so, and speak as a member too: use an
authority that issues for this group only. docs/raft.md shows how to make one with openssl, and
the --tls flags of clients.

SIGINT and SIGTERM end it cleanly, with exit code 0. A member that cannot go on, because its
disk fails for instance, ends with exit code 1 and does no harm. docs/raft.md says how to run
a group.`,
		Example: examples(`
			snapferry server --id n1 --data /var/lib/snapferry --listen 127.0.0.1:7480 --insecure --initial-cluster n1=http://127.0.0.1:7480
			snapferry server --id n1 --data /var/lib/snapferry --listen 10.0.0.1:7480 --insecure --initial-cluster n1=http://10.0.0.1:7480,n2=http://10.0.0.2:7480,n3=http://10.0.0.3:7480
			snapferry server --id n4 --data /var/lib/snapferry --listen 10.0.0.4:7480 --insecure --join http://10.0.0.1:7480,10.0.0.2:7480
			snapferry server --id n1 --data /var/lib/snapferry --listen 10.0.0.1:7480 --tls-cert n1.pem --tls-key n1.key --tls-ca ca.pem --tls-client-auth`),
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return v.run(cmd.Context()) },
	}
	v.flags(cmd)
	return cmd
}

func (v *serverVerb) flags(cmd *cobra.Command) {
	f := cmd.Flags()
	f.Var(once(&v.id), "id", "`ID` of this member, unique in its group (needed)")
	f.Var(once(&v.data), "data", "`DIR` for everything that the member keeps, on a local disk (needed)")
	f.Var(once(&v.listen), "listen", "`HOST:PORT` for members and clients (needed)")
	f.Var(once(&v.advertise), "advertise", "`URL` by which others reach this member (default what --initial-cluster says, else the address of --listen)")
	f.Var(once(&v.cluster), "initial-cluster", "first members of a new group as `ID=URL,...`, this one among them; the same on all of them")
	f.Var(once(&v.join), "join", "`URL[,URL...]` of members of the group that this one was added to")
	f.BoolVar(&v.insecure, "insecure", false, "plain http: no secrecy, and whoever reaches the port is believed")
	f.Var(once(&v.cert), "tls-cert", "`FILE` with this member's certificate, for both its roles")
	f.Var(once(&v.key), "tls-key", "`FILE` with the key of --tls-cert")
	f.Var(once(&v.ca), "tls-ca", "`FILE` with the certificates of the authority that others are checked against")
	f.BoolVar(&v.clientAuth, "tls-client-auth", false, "refuse members and clients without a certificate of --tls-ca")
	f.Var(&v.snapshotEntries, "snapshot-entries", "entries of the log after which a snapshot is made (default 100000)")
	f.Var(&v.trailingEntries, "trailing-entries", "entries of the log that are kept below a snapshot (default 10000)")
	f.Var(&v.snapshotInterval, "snapshot-interval", "time after which a snapshot is made if anything has changed; 0s for no limit")
	f.Var(&v.rate, "rate-limit", "bytes a second that snapshots are moved with, as in 500K, 20MiB/s or 1GB (default no limit)")
	f.BoolVarP(&v.app.quiet, "quiet", "q", false, "log warnings and errors only")
	_ = cmd.MarkFlagDirname("data")
}

func (v *serverVerb) run(ctx context.Context) error {
	opts, err := v.options()
	if err != nil {
		return err
	}
	s, err := server.Start(ctx, opts)
	if wasInterrupted(ctx, err) {
		return nil
	}
	if errors.Is(err, snapferry.ErrCorrupt) {
		return &memberError{err}
	}
	if err != nil {
		return err
	}
	v.app.note("listening on %s", v.where(s))
	select {
	case <-ctx.Done():
		return s.Close()
	case <-s.Done():
		return v.ended(s)
	}
}

// where says on which address the member listens, and where others look for it if that is
// another one.
func (v *serverVerb) where(s *server.Server) string {
	scheme, advertised, _ := strings.Cut(s.URL(), "://")
	own := s.Addr().String()
	text := fmt.Sprintf("%s://%s as %s", scheme, own, v.id)
	if own != advertised {
		text += ", which others reach at " + s.URL()
	}
	return text
}

// ended says why a member has stopped by itself. What it cannot close it leaves to the
// kernel: a goroutine may hold a damaged state for ever.
func (v *serverVerb) ended(s *server.Server) error {
	closed := make(chan error, 1)
	go func() { closed <- s.Close() }()
	var err error
	select {
	case err = <-closed:
	case <-time.After(3 * time.Second):
	}
	return &memberError{errors.Join(s.Err(), err)}
}

// memberError is why a member cannot go on. That its data is damaged is no matter of a
// repository, so the advice and the code for those do not fit.
type memberError struct{ err error }

func (e *memberError) Error() string { return e.err.Error() }

// options checks the flags.
func (v *serverVerb) options() (server.Options, error) {
	opts := server.Options{
		ID: v.id, Data: v.data, Listen: v.listen, Insecure: v.insecure,
		SnapshotEntries: uint64(v.snapshotEntries), TrailingEntries: uint64(v.trailingEntries),
		SnapshotInterval: time.Duration(v.snapshotInterval), RateLimit: int64(v.rate),
		Logger: v.logger(),
	}
	for _, check := range []func(*server.Options) error{v.checkSelf, v.checkSecurity, v.checkGroup, v.checkSchemes, v.checkStart} {
		if err := check(&opts); err != nil {
			return opts, err
		}
	}
	return opts, nil
}

// checkSelf wants to know who this member is.
func (v *serverVerb) checkSelf(opts *server.Options) error {
	switch {
	case v.id == "":
		return usagef("which member is this? Give --id ID")
	case v.data == "":
		return usagef("where does it keep its data? Give --data DIR")
	case v.listen == "":
		return usagef("where does it listen? Give --listen HOST:PORT")
	}
	if err := checkNames("--id", []string{v.id}); err != nil {
		return err
	}
	host, port, err := net.SplitHostPort(v.listen)
	if n, perr := strconv.ParseUint(port, 10, 16); err != nil || perr != nil {
		return usagef("--listen %q: write HOST:PORT with a port number, as in 10.0.0.1:7480", v.listen)
	} else if n == 0 && v.advertise == "" {
		return usagef("--listen %q: port 0 is another one at each start; say with --advertise where others reach this member", v.listen)
	}
	if ip := net.ParseIP(host); (host == "" || ip != nil && ip.IsUnspecified()) && v.advertise == "" && v.join != "" {
		return usagef("--listen %q is no address that others could use: give --advertise URL", v.listen)
	}
	if v.advertise == "" {
		return nil
	}
	opts.URL, err = parseMemberURL("--advertise", v.advertise)
	return err
}

// checkSecurity wants certificates or the word that none are wanted.
func (v *serverVerb) checkSecurity(opts *server.Options) error {
	given := v.cert != "" || v.key != "" || v.ca != "" || v.clientAuth
	switch {
	case v.insecure && given:
		return usagef("--insecure and --tls-cert, --tls-key, --tls-ca or --tls-client-auth contradict each other")
	case v.insecure:
		return nil
	case v.cert == "" || v.key == "":
		return usagef("give --tls-cert FILE and --tls-key FILE, or --insecure on a network where everybody may read and change everything")
	case v.clientAuth && v.ca == "":
		return usagef("--tls-client-auth needs --tls-ca FILE to check against")
	}
	opts.TLS = &server.TLS{CertFile: v.cert, KeyFile: v.key, CAFile: v.ca, RequireClientCert: v.clientAuth}
	return nil
}

// checkGroup reads who else there is.
func (v *serverVerb) checkGroup(opts *server.Options) (err error) {
	switch {
	case v.cluster != "" && v.join != "":
		return usagef("--initial-cluster makes a new group and --join enters one that exists: give one of them")
	case v.join != "":
		opts.Join, err = parseServers("--join", v.join)
		return err
	case v.cluster == "":
		return nil
	}
	opts.InitialCluster, err = parseCluster("--initial-cluster", v.cluster)
	if err != nil {
		return err
	}
	own, ok := opts.InitialCluster[v.id]
	switch {
	case !ok:
		return usagef("--initial-cluster does not have this member: add %s=URL, the same on all members", v.id)
	case opts.URL != "" && opts.URL != own:
		return usagef("--advertise %s is not what --initial-cluster says of %s, %s", opts.URL, v.id, own)
	}
	return nil
}

// checkSchemes wants one scheme in all URLs, the one that this member speaks.
func (v *serverVerb) checkSchemes(opts *server.Options) error {
	scheme, instead := "https://", "give --insecure for http"
	if v.insecure {
		scheme, instead = "http://", "leave --insecure away for https"
	}
	urls := append([]string{opts.URL}, opts.Join...)
	for _, u := range opts.InitialCluster {
		urls = append(urls, u)
	}
	for _, u := range urls {
		if u != "" && !strings.HasPrefix(u, scheme) {
			return usagef("%s does not begin with %s: %s", u, scheme, instead)
		}
	}
	return nil
}

// checkStart refuses the first start of a member that does not say of which group.
func (v *serverVerb) checkStart(opts *server.Options) error {
	if opts.InitialCluster != nil || opts.Join != nil {
		return nil
	}
	entries, err := os.ReadDir(v.data)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("server: %w", err)
	}
	for _, e := range entries {
		if e.Name() != "lost+found" {
			return nil
		}
	}
	return usagef("--data %s is empty, so this is a first start: give --initial-cluster for a new group, or --join for one that this member was added to", v.data)
}

// logger writes lines of text to standard error.
func (v *serverVerb) logger() *slog.Logger {
	level := slog.LevelInfo
	if v.app.quiet {
		level = slog.LevelWarn
	}
	return slog.New(slog.NewTextHandler(lines{v.app}, &slog.HandlerOptions{Level: level}))
}

// lines are the lines on standard error, of which each is written whole.
type lines struct{ app *app }

var _ io.Writer = lines{}

func (l lines) Write(p []byte) (int, error) {
	l.app.mu.Lock()
	defer l.app.mu.Unlock()
	return l.app.stderr.Write(p)
}
