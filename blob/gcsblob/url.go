package gcsblob

import (
	"errors"
	"fmt"
	"maps"
	"net/http"
	"net/url"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// Options say how a bucket is reached; nil and the zero value are Google's own service with
// the application default credentials.
type Options struct {
	// Prefix is the part of the bucket that is used, without slashes around it.
	Prefix string
	// Endpoint is the base URL of another service that speaks the same protocol, such as
	// an emulator or a private address.
	Endpoint string
	// Anonymous sends requests without credentials.
	Anonymous bool
	// UserProject pays for requests to a bucket whose requester pays.
	UserProject string

	around func(http.RoundTripper) http.RoundTripper // a seam for tests: above the network
}

// maxPrefix leaves room for blob.MaxKey in a name of 1,024 bytes.
const maxPrefix = 120

func (o *Options) withDefaults() (Options, error) {
	var v Options
	if o != nil {
		v = *o
	}
	v.Prefix = strings.Trim(v.Prefix, "/")
	if len(v.Prefix) > maxPrefix {
		return v, fmt.Errorf("the prefix has %d bytes, at most %d are allowed", len(v.Prefix), maxPrefix)
	}
	if strings.ContainsAny(v.Prefix, "\r\n\x00") {
		return v, fmt.Errorf("the prefix %q has characters that names cannot have", v.Prefix)
	}
	v.Endpoint = strings.TrimSuffix(v.Endpoint, "/")
	if v.Endpoint != "" {
		u, err := url.Parse(v.Endpoint)
		if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" || u.User != nil || u.RawQuery != "" {
			return v, errors.New("the endpoint is no URL such as http://HOST:PORT")
		}
	}
	return v, nil
}

var bucketName = regexp.MustCompile(`^[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]$`)

func checkBucket(name string) error {
	if !bucketName.MatchString(name) {
		return fmt.Errorf("%q is no name of a bucket", name)
	}
	return nil
}

// params are the parameters of a URL.
var params = map[string]func(o *Options, value string) error{
	"endpoint": func(o *Options, v string) error {
		o.Endpoint = v
		return nil
	},
	"anonymous": func(o *Options, v string) (err error) {
		if o.Anonymous, err = strconv.ParseBool(v); err != nil {
			err = fmt.Errorf("%q is neither true nor false", v)
		}
		return err
	},
	"user-project": func(o *Options, v string) error {
		o.UserProject = v
		return nil
	},
}

// ParseURL reads gs://BUCKET/PREFIX?NAME=VALUE&... Errors never repeat what could be a
// secret.
func ParseURL(rawURL string) (bucket string, opts *Options, err error) {
	u, err := url.Parse(rawURL)
	switch {
	case err != nil || u.Scheme != "gs" || u.Opaque != "" || u.Fragment != "":
		return "", nil, errors.New("this is no URL of Google Cloud Storage: write gs://BUCKET/PREFIX?NAME=VALUE")
	case u.User != nil:
		return "", nil, errors.New("credentials do not belong in the URL: set GOOGLE_APPLICATION_CREDENTIALS")
	}
	o := &Options{Prefix: u.Path}
	query, err := url.ParseQuery(u.RawQuery)
	if err != nil {
		return "", nil, errors.New("the part of the URL after the question mark is malformed")
	}
	for _, name := range slices.Sorted(maps.Keys(query)) {
		if err := o.set(name, query[name]); err != nil {
			return "", nil, err
		}
	}
	if err := checkBucket(u.Host); err != nil {
		return "", nil, err
	}
	v, err := o.withDefaults()
	return u.Host, &v, err
}

func (o *Options) set(name string, values []string) error {
	set, ok := params[name]
	switch {
	case !ok:
		return fmt.Errorf("unknown parameter %q; known are %s (credentials do not belong in the URL)",
			name, strings.Join(slices.Sorted(maps.Keys(params)), ", "))
	case len(values) > 1:
		return fmt.Errorf("parameter %s is given twice", name)
	case values[0] == "":
		return fmt.Errorf("parameter %s is empty", name)
	}
	if err := set(o, values[0]); err != nil {
		return fmt.Errorf("parameter %s: %w", name, err)
	}
	return nil
}
