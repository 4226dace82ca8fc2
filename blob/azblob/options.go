package azblob

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"net/url"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/Azure/azure-sdk-for-go/sdk/azcore"
	"github.com/Azure/azure-sdk-for-go/sdk/azcore/policy"
	"github.com/Azure/azure-sdk-for-go/sdk/azidentity"
	"github.com/Azure/azure-sdk-for-go/sdk/storage/azblob/service"
)

// Options say how a container is reached; nil and the zero value are what the environment
// says. The first credential there is of connection string, account key, and shared access
// signature is used, else Azure's default chain.
type Options struct {
	// Prefix is the part of the container that is used, without slashes around it.
	Prefix string
	// Account is the storage account; default: AZURE_STORAGE_ACCOUNT.
	Account string
	// Endpoint is the base URL of the account's blobs; default
	// https://ACCOUNT.blob.core.windows.net.
	Endpoint string
	// Anonymous sends requests without credentials.
	Anonymous bool
	// ExpiryTags says that the account has a rule that removes what carries the tag
	// snapferry-expire, and that the credentials may write tags. Otherwise a TTL is ignored.
	ExpiryTags bool

	// ConnectionString has account, key and endpoint; default:
	// AZURE_STORAGE_CONNECTION_STRING.
	ConnectionString string
	// AccountKey is a key of the account; default: AZURE_STORAGE_KEY.
	AccountKey string
	// SASToken is a shared access signature; default: AZURE_STORAGE_SAS_TOKEN.
	SASToken string

	around func(http.RoundTripper) http.RoundTripper // a seam for tests: above the network
}

// maxPrefix leaves room for keys in a name of 1,024 characters.
const maxPrefix = 120

func (o *Options) withDefaults() (Options, error) {
	var v Options
	if o != nil {
		v = *o
	}
	v.Prefix = strings.Trim(v.Prefix, "/")
	if len(v.Prefix) > maxPrefix || strings.ContainsAny(v.Prefix, "\\\x00\r\n") || v.Prefix != "" && encodeKey(v.Prefix) != v.Prefix {
		return v, fmt.Errorf("the prefix %.200q is too long or has characters that do not keep in names of Azure", v.Prefix)
	}
	if !v.Anonymous {
		v.credentials()
	}
	v.Account = cmp.Or(v.Account, os.Getenv("AZURE_STORAGE_ACCOUNT"))
	if v.Endpoint == "" && v.Account != "" {
		v.Endpoint = "https://" + v.Account + ".blob.core.windows.net"
	}
	v.Endpoint = strings.TrimSuffix(v.Endpoint, "/")
	return v, v.check()
}

// credentials takes those of the environment when the caller gave none.
func (o *Options) credentials() {
	if o.ConnectionString == "" && o.AccountKey == "" && o.SASToken == "" {
		o.ConnectionString = os.Getenv("AZURE_STORAGE_CONNECTION_STRING")
		o.AccountKey = os.Getenv("AZURE_STORAGE_KEY")
		o.SASToken = os.Getenv("AZURE_STORAGE_SAS_TOKEN")
	}
}

func (o *Options) check() error {
	if o.Endpoint == "" {
		if o.ConnectionString != "" {
			return nil
		}
		return errors.New("no storage account: say account=NAME or set AZURE_STORAGE_ACCOUNT")
	}
	u, err := url.Parse(o.Endpoint)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" || u.User != nil || u.RawQuery != "" {
		return errors.New("the endpoint is no URL such as https://ACCOUNT.blob.core.windows.net, or has a signature in it: set AZURE_STORAGE_SAS_TOKEN")
	}
	return nil
}

// connect makes the client with the first credential there is.
func connect(o Options, base *http.Transport) (*service.Client, error) {
	var inner http.RoundTripper = base
	if o.around != nil {
		inner = o.around(inner)
	}
	opts := &service.ClientOptions{ClientOptions: policy.ClientOptions{
		Transport: &http.Client{Transport: inner},
		Retry:     policy.RetryOptions{MaxRetries: -1},
	}}
	switch {
	case o.ConnectionString != "":
		c, err := service.NewClientFromConnectionString(o.ConnectionString, opts)
		if err != nil {
			return nil, errors.New("the connection string is malformed") // the cause may repeat a secret
		}
		return c, nil
	case o.AccountKey != "":
		cred, err := service.NewSharedKeyCredential(o.accountName(), o.AccountKey)
		if err != nil {
			return nil, errors.New("the account key is not base64")
		}
		return service.NewClientWithSharedKeyCredential(o.Endpoint, cred, opts)
	case o.SASToken != "":
		return service.NewClientWithNoCredential(o.Endpoint+"?"+strings.TrimPrefix(o.SASToken, "?"), opts)
	case o.Anonymous:
		return service.NewClientWithNoCredential(o.Endpoint, opts)
	}
	var cred azcore.TokenCredential
	cred, err := azidentity.NewDefaultAzureCredential(nil)
	if err != nil {
		return nil, fmt.Errorf("no credentials (set AZURE_STORAGE_KEY or AZURE_STORAGE_SAS_TOKEN, or log in): %w", err)
	}
	return service.NewClient(o.Endpoint, cred, opts)
}

// accountName is the first part of the endpoint's host where it is not given.
func (o *Options) accountName() string {
	if o.Account != "" {
		return o.Account
	}
	u, err := url.Parse(o.Endpoint)
	if err != nil {
		return ""
	}
	name, _, _ := strings.Cut(u.Hostname(), ".")
	return name
}

var containerName = regexp.MustCompile(`^(\$root|[a-z0-9](-?[a-z0-9])+)$`)

func checkContainer(name string) error {
	if len(name) < 3 || len(name) > 63 || !containerName.MatchString(name) {
		return fmt.Errorf("%q is no name of a container", name)
	}
	return nil
}

// params are the parameters of a URL.
var params = map[string]func(o *Options, value string) error{
	"account":     text(func(o *Options) *string { return &o.Account }),
	"endpoint":    text(func(o *Options) *string { return &o.Endpoint }),
	"anonymous":   truth(func(o *Options) *bool { return &o.Anonymous }),
	"expiry-tags": truth(func(o *Options) *bool { return &o.ExpiryTags }),
}

func text(field func(*Options) *string) func(*Options, string) error {
	return func(o *Options, v string) error {
		*field(o) = v
		return nil
	}
}

func truth(field func(*Options) *bool) func(*Options, string) error {
	return func(o *Options, v string) (err error) {
		if *field(o), err = strconv.ParseBool(v); err != nil {
			return fmt.Errorf("%q is neither true nor false", v)
		}
		return nil
	}
}

// ParseURL reads azblob://CONTAINER/PREFIX?NAME=VALUE&... Errors never repeat what could be a
// secret.
func ParseURL(rawURL string) (container string, opts *Options, err error) {
	u, err := url.Parse(rawURL)
	switch {
	case err != nil || u.Scheme != "azblob" || u.Opaque != "" || u.Fragment != "":
		return "", nil, errors.New("this is no URL of Azure Blob Storage: write azblob://CONTAINER/PREFIX?NAME=VALUE")
	case u.User != nil:
		return "", nil, errors.New("credentials do not belong in the URL: set AZURE_STORAGE_KEY or AZURE_STORAGE_SAS_TOKEN")
	}
	o := &Options{Prefix: strings.Trim(u.Path, "/")}
	query, err := url.ParseQuery(u.RawQuery)
	if err != nil {
		return "", nil, errors.New("the part of the URL after the question mark is malformed")
	}
	for _, name := range slices.Sorted(maps.Keys(query)) {
		if err := o.set(name, query[name]); err != nil {
			return "", nil, err
		}
	}
	if err := checkContainer(u.Host); err != nil {
		return "", nil, err
	}
	_, err = o.withDefaults()
	return u.Host, o, err
}

func (o *Options) set(name string, values []string) error {
	set, ok := params[name]
	switch {
	case !ok:
		return fmt.Errorf("unknown parameter %q; known are %s (credentials do not belong in the URL)",
			name, strings.Join(slices.Sorted(maps.Keys(params)), ", "))
	case len(values) > 1 || values[0] == "":
		return fmt.Errorf("parameter %s is given twice or is empty", name)
	}
	if err := set(o, values[0]); err != nil {
		return fmt.Errorf("parameter %s: %w", name, err)
	}
	return nil
}
