package s3blob

import (
	"errors"
	"fmt"
	"maps"
	"net/url"
	"slices"
	"strconv"
	"strings"
)

// params are the parameters of a URL.
var params = map[string]func(o *Options, value string) error{
	"endpoint": func(o *Options, v string) error {
		if !strings.Contains(v, "://") {
			v = "https://" + v
		}
		o.Endpoint = strings.TrimSuffix(v, "/")
		return checkEndpoint(o.Endpoint)
	},
	"region":         text(func(o *Options) *string { return &o.Region }),
	"profile":        text(func(o *Options) *string { return &o.Profile }),
	"ca-file":        text(func(o *Options) *string { return &o.CAFile }),
	"sse":            text(func(o *Options) *string { return &o.SSE }),
	"sse-kms-key-id": text(func(o *Options) *string { return &o.SSEKMSKeyID }),
	"storage-class":  text(func(o *Options) *string { return &o.StorageClass }),
	"checksums": func(o *Options, v string) error {
		o.Checksums = Checksums(v)
		return nil
	},
	"path-style": func(o *Options, v string) error {
		yes, err := parseBool(v)
		o.Addressing = VirtualHost
		if yes {
			o.Addressing = PathStyle
		}
		return err
	},
	"anonymous": func(o *Options, v string) (err error) {
		o.Anonymous, err = parseBool(v)
		return err
	},
	"single-put": size(func(o *Options) *int64 { return &o.SinglePut }),
	"part-size":  size(func(o *Options) *int64 { return &o.PartSize }),
	"buffers":    size(func(o *Options) *int64 { return &o.Buffers }),
	"parallel": func(o *Options, v string) (err error) {
		o.Parallel, err = strconv.Atoi(v)
		return err
	},
}

// secrets are names of parameters under which other programs take credentials.
var secrets = []string{"key", "secret", "token", "password", "credential"}

// ParseURL reads s3://BUCKET/PREFIX?NAME=VALUE&... Errors never repeat what could be a
// secret.
func ParseURL(rawURL string) (bucket string, opts *Options, err error) {
	u, err := url.Parse(rawURL)
	switch {
	case err != nil || u.Scheme != "s3" || u.Opaque != "" || u.Fragment != "":
		return "", nil, errors.New("this is no S3 URL: write s3://BUCKET/PREFIX?NAME=VALUE")
	case u.User != nil:
		return "", nil, errors.New("credentials do not belong in the URL: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or name a profile")
	}
	o := &Options{Prefix: strings.Trim(u.Path, "/")}
	query, err := url.ParseQuery(u.RawQuery)
	if err != nil {
		return "", nil, errors.New("the part of the S3 URL after the question mark is malformed")
	}
	for _, name := range slices.Sorted(maps.Keys(query)) {
		if err := o.set(name, query[name]); err != nil {
			return "", nil, err
		}
	}
	if err := checkBucket(u.Host); err != nil {
		return "", nil, err
	}
	_, err = o.withDefaults()
	return u.Host, o, err
}

func (o *Options) set(name string, values []string) error {
	set, ok := params[name]
	if !ok {
		return unknown(name)
	}
	if len(values) > 1 {
		return fmt.Errorf("parameter %s is given twice", name)
	}
	if values[0] == "" {
		return fmt.Errorf("parameter %s is empty", name)
	}
	if err := set(o, values[0]); err != nil {
		return fmt.Errorf("parameter %s: %w", name, err)
	}
	return nil
}

// unknown tells apart a mistake of spelling and an attempt to hand over a secret.
func unknown(name string) error {
	isSecret := func(s string) bool { return strings.Contains(strings.ToLower(name), s) }
	if slices.ContainsFunc(secrets, isSecret) {
		return fmt.Errorf("parameter %s: credentials do not belong in the URL: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or name a profile", name)
	}
	return fmt.Errorf("unknown parameter %q; known are %s", name, strings.Join(slices.Sorted(maps.Keys(params)), ", "))
}

func text(field func(*Options) *string) func(*Options, string) error {
	return func(o *Options, v string) error {
		*field(o) = v
		return nil
	}
}

var units = []struct {
	suffix string
	bytes  int64
}{{"GiB", 1 << 30}, {"MiB", 1 << 20}, {"KiB", 1 << 10}, {"", 1}}

func size(field func(*Options) *int64) func(*Options, string) error {
	return func(o *Options, v string) error {
		for _, unit := range units {
			number, ok := strings.CutSuffix(v, unit.suffix)
			if !ok {
				continue
			}
			n, err := strconv.ParseInt(number, 10, 64)
			if err != nil || n < 1 || n > maxPut/unit.bytes {
				break
			}
			*field(o) = n * unit.bytes
			return nil
		}
		return fmt.Errorf("%q is no size such as 16MiB", v)
	}
}

func parseBool(v string) (bool, error) {
	b, err := strconv.ParseBool(v)
	if err != nil {
		return false, fmt.Errorf("%q is neither true nor false", v)
	}
	return b, nil
}
