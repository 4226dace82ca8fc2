package peer

import (
	"errors"
	"fmt"
	"maps"
	"net"
	"net/url"
	"slices"
	"strconv"
	"strings"

	"github.com/snapferry/snapferry/raftsnap/protocol"
)

// NormalURL checks the URL of a member and returns the one spelling in which it is kept
// and compared: scheme, host in lower case, and port. Plain http needs insecure.
func NormalURL(raw string, insecure bool) (string, error) {
	u, err := url.Parse(raw)
	switch {
	case err != nil:
		return "", fmt.Errorf("member URL: %w", err)
	case u.Scheme != "http" && u.Scheme != "https":
		return "", fmt.Errorf("member URL %q: it begins with https:// or http://", raw)
	case u.Scheme == "http" && !insecure:
		return "", fmt.Errorf("member URL %q: plain http needs the insecure option", raw)
	case u.User != nil || u.RawQuery != "" || u.Fragment != "" || u.Path != "" && u.Path != "/":
		return "", fmt.Errorf("member URL %q: only scheme, host and port are allowed", raw)
	case u.Hostname() == "":
		return "", fmt.Errorf("member URL %q: no host", raw)
	}
	if port, err := strconv.ParseUint(u.Port(), 10, 16); err != nil || port == 0 {
		return "", fmt.Errorf("member URL %q: the port is missing or is no port", raw)
	}
	return u.Scheme + "://" + net.JoinHostPort(strings.ToLower(u.Hostname()), u.Port()), nil
}

// CheckName refuses what cannot be a member's name.
func CheckName(name string) error { return checkName(name) }

// checkName allows what is safe in a file name, a header and a log.
func checkName(name string) error {
	ok := func(r rune) bool {
		return r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || strings.ContainsRune("._-", r)
	}
	bad := func(r rune) bool { return !ok(r) }
	if name == "" || len(name) > 128 || name[0] == '.' || strings.ContainsFunc(name, bad) {
		return fmt.Errorf("member name %q: 1 to 128 letters, digits, dots, hyphens and underscores, no dot first", name)
	}
	return nil
}

// initialTable turns the flag into a member table with ids, sorted by name, and the group
// id. The own name must be in it, with the own URL where that is given.
func initialTable(name, ownURL string, initial map[string]string, insecure bool) ([]protocol.Member, string, error) {
	var table []protocol.Member
	owner := map[string]string{} // of a URL
	for _, n := range slices.Sorted(maps.Keys(initial)) {
		if err := checkName(n); err != nil {
			return nil, "", err
		}
		u, err := NormalURL(initial[n], insecure)
		if err != nil {
			return nil, "", fmt.Errorf("member %s: %w", n, err)
		}
		if other, ok := owner[u]; ok {
			return nil, "", fmt.Errorf("members %s and %s both have the URL %s", other, n, u)
		}
		owner[u] = n
		table = append(table, protocol.Member{Name: n, URL: u})
	}
	if err := checkOwn(name, ownURL, initial, insecure); err != nil {
		return nil, "", err
	}
	group := GroupID(table)
	for i := range table {
		table[i].ID = InitialID(group, table[i].Name)
	}
	return table, group, nil
}

func checkOwn(name, ownURL string, initial map[string]string, insecure bool) error {
	listed, ok := initial[name]
	if !ok {
		return fmt.Errorf("the initial cluster does not list %q, which is this member", name)
	}
	if ownURL == "" {
		return nil
	}
	own, err := NormalURL(ownURL, insecure)
	if err != nil {
		return err
	}
	if u, err := NormalURL(listed, insecure); err != nil || u != own {
		return errors.Join(fmt.Errorf("the initial cluster lists %s at %s, but its URL is %s", name, listed, own), err)
	}
	return nil
}
