package s3blob

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"net/url"
	"regexp"
	"slices"
	"strings"

	"github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/aws/aws-sdk-go-v2/service/s3/types"

	"github.com/snapferry/snapferry/blob"
)

// defaultSinglePut is also what can be put conditionally, since a store need not keep a
// condition on an upload of several parts.
const defaultSinglePut = 32 << 20

// Options say how a bucket is reached and how objects are put; nil and the zero value are
// S3 itself with what the environment says.
type Options struct {
	// Prefix is the part of the bucket that is used, without slashes around it.
	Prefix string
	// Endpoint is the base URL of a store other than S3 (also $AWS_ENDPOINT_URL_S3).
	Endpoint string
	// Region is where the bucket is; default: from the environment or the profile, else
	// us-east-1.
	Region string
	// Profile names a profile of the shared configuration files.
	Profile string
	// Addressing says where requests name the bucket; default: in the path with an own
	// endpoint, else in the host.
	Addressing Addressing
	// Anonymous sends unsigned requests and needs no credentials.
	Anonymous bool
	// CAFile is a file of certificates (PEM) that are trusted beside the system's.
	CAFile string

	// SSE is the encryption at rest that puts ask for: "AES256", "aws:kms" or
	// "aws:kms:dsse"; empty: the bucket's default.
	SSE string
	// SSEKMSKeyID is the key for aws:kms; empty: the account's default key.
	SSEKMSKeyID string
	// StorageClass is that of unconditional puts; empty: the store's default. Classes
	// that have to be thawed are refused.
	StorageClass string
	// Checksums says when a request carries a checksum of S3's own; default: always with
	// S3, and only where the protocol demands it with another endpoint. Bodies are
	// covered by a checksum or by the signature either way.
	Checksums Checksums

	// SinglePut is the largest body that goes in one request; default 32 MiB. Conditional
	// puts go in one up to the default, whatever is set here.
	SinglePut int64
	// PartSize is the size of the parts of larger ones; default 16 MiB, at least 5 MiB. It
	// grows where 10,000 parts would not do.
	PartSize int64
	// Parallel is how many parts of one body are under way; default 4.
	Parallel int
	// Buffers bounds the memory that copies of bodies take on their way; default 96 MiB.
	// What blob.Bytes made is sent from where it lies, unless in parts. A larger
	// one goes alone.
	Buffers int64

	// Warn is told, once each, of what works with restrictions only; it must not block.
	Warn func(text string)

	around func(httpDoer) httpDoer // a seam for tests: between the SDK and the network
}

// Addressing says where requests name the bucket.
type Addressing string

const (
	// PathStyle is https://HOST/BUCKET/KEY.
	PathStyle Addressing = "path"
	// VirtualHost is https://BUCKET.HOST/KEY.
	VirtualHost Addressing = "virtual"
)

// Checksums says when requests carry a checksum of S3's own kind.
type Checksums string

const (
	// WhenSupported is on every request that can have one.
	WhenSupported Checksums = "supported"
	// WhenRequired is only where the protocol demands it.
	WhenRequired Checksums = "required"
)

const (
	minPart  = 5 << 20
	maxParts = 10_000
	maxPut   = 5 << 30 // of one request, by S3
	maxKey   = 1024    // bytes, by S3
)

func (o *Options) withDefaults() (Options, error) {
	var v Options
	if o != nil {
		v = *o
	}
	v.SinglePut = cmp.Or(v.SinglePut, defaultSinglePut)
	v.PartSize = cmp.Or(v.PartSize, 16<<20)
	v.Parallel = cmp.Or(v.Parallel, 4)
	v.Buffers = cmp.Or(v.Buffers, 96<<20)
	return v, v.validate()
}

func (o *Options) validate() error {
	switch {
	case o.Addressing != "" && o.Addressing != PathStyle && o.Addressing != VirtualHost:
		return fmt.Errorf("addressing is %q, not %s or %s", o.Addressing, PathStyle, VirtualHost)
	case o.Checksums != "" && o.Checksums != WhenSupported && o.Checksums != WhenRequired:
		return fmt.Errorf("checksums are %q, not %s or %s", o.Checksums, WhenSupported, WhenRequired)
	case o.PartSize < minPart || o.PartSize > maxPut:
		return fmt.Errorf("the part size is %d bytes: S3 takes from 5 MiB to 5 GiB", o.PartSize)
	case o.SinglePut < 1 || o.SinglePut > maxPut:
		return fmt.Errorf("the largest single put is %d bytes: S3 takes from 1 byte to 5 GiB", o.SinglePut)
	case o.Parallel < 1 || o.Buffers < 1:
		return errors.New("parallel parts and buffers must not be negative")
	}
	return errors.Join(o.validateObjects(), checkPrefix(o.Prefix), checkEndpoint(o.Endpoint))
}

// validateObjects looks at what puts ask for.
func (o *Options) validateObjects() error {
	var sse types.ServerSideEncryption
	if o.SSE != "" && !slices.Contains(sse.Values(), types.ServerSideEncryption(o.SSE)) {
		return fmt.Errorf("unknown encryption %q: S3 has AES256, aws:kms and aws:kms:dsse", o.SSE)
	}
	if o.SSEKMSKeyID != "" && !strings.HasPrefix(o.SSE, "aws:kms") {
		return errors.New("a KMS key goes with the encryption aws:kms or aws:kms:dsse only")
	}
	switch types.StorageClass(o.StorageClass) {
	case types.StorageClassGlacier, types.StorageClassDeepArchive:
		return fmt.Errorf("objects of the storage class %s have to be thawed before they can be read", o.StorageClass)
	}
	return nil
}

func checkPrefix(prefix string) error {
	if prefix == "" {
		return nil
	}
	if err := blob.ValidKey(prefix); err != nil {
		return fmt.Errorf("prefix: %w", err)
	}
	if longest := maxKey - 1 - blob.MaxKey; len(prefix) > longest {
		return fmt.Errorf("the prefix has %d bytes: at most %d leave room for the keys", len(prefix), longest)
	}
	return nil
}

func checkEndpoint(endpoint string) error {
	if endpoint == "" {
		return nil
	}
	u, err := url.Parse(endpoint)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" || u.User != nil || u.RawQuery != "" || u.Fragment != "" {
		return errors.New("the endpoint has to be http://HOST:PORT or https://HOST:PORT")
	}
	return nil
}

var bucketName = regexp.MustCompile(`^[a-z0-9][a-z0-9._-]{1,61}[a-z0-9]$`)

func checkBucket(name string) error {
	if strings.HasSuffix(name, "--x-s3") {
		return fmt.Errorf("%w: %s is a directory bucket, which lists in no order", blob.ErrUnsupported, name)
	}
	_, ip := netip.ParseAddr(name)
	if !bucketName.MatchString(name) || strings.Contains(name, "..") || ip == nil {
		return fmt.Errorf("%q is no bucket name: 3 to 63 of a-z, 0-9, dots and dashes", name)
	}
	return nil
}

// pathStyle decides how buckets are named, given whether the endpoint is S3's own.
func (o *Options) pathStyle(own bool) bool {
	if o.Addressing == "" {
		return !own
	}
	return o.Addressing == PathStyle
}

// checksums decides likewise about checksums.
func (o *Options) checksums(own bool) Checksums {
	if o.Checksums != "" {
		return o.Checksums
	}
	if own {
		return WhenSupported
	}
	return WhenRequired
}

// decorate adds what puts ask for to one request.
func (o *Options) decorate(in *s3.PutObjectInput, conditional bool) {
	in.ServerSideEncryption = types.ServerSideEncryption(o.SSE)
	in.SSEKMSKeyId = optional(o.SSEKMSKeyID)
	if !conditional { // those are small, and what a commit waits for
		in.StorageClass = types.StorageClass(o.StorageClass)
	}
}

func optional(s string) *string {
	if s == "" {
		return nil
	}
	return &s
}
