package s3blob

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

func TestParseURL(t *testing.T) {
	unexported := cmpopts.IgnoreUnexported(Options{})
	for raw, want := range map[string]struct {
		bucket string
		opts   Options
	}{
		"s3://bkt":                 {"bkt", Options{}},
		"s3://bkt/":                {"bkt", Options{}},
		"S3://bkt/a/b%20c/":        {"bkt", Options{Prefix: "a/b c"}},
		"s3://b.k-t/a?region=r":    {"b.k-t", Options{Prefix: "a", Region: "r"}},
		"s3://bkt?endpoint=h:9000": {"bkt", Options{Endpoint: "https://h:9000"}},
		"s3://bkt?endpoint=http://h:9000/&path-style=false&anonymous=1":      {"bkt", Options{Endpoint: "http://h:9000", Addressing: VirtualHost, Anonymous: true}},
		"s3://bkt?sse=aws:kms&sse-kms-key-id=k&storage-class=STANDARD_IA":    {"bkt", Options{SSE: "aws:kms", SSEKMSKeyID: "k", StorageClass: "STANDARD_IA"}},
		"s3://bkt?checksums=required&profile=p&ca-file=/ca":                  {"bkt", Options{Checksums: WhenRequired, Profile: "p", CAFile: "/ca"}},
		"s3://bkt?part-size=8MiB&single-put=1048576&buffers=1GiB&parallel=2": {"bkt", Options{PartSize: 8 << 20, SinglePut: 1 << 20, Buffers: 1 << 30, Parallel: 2}},
	} {
		bucket, opts, err := ParseURL(raw)
		if err != nil {
			t.Errorf("%s: %v", raw, err)
			continue
		}
		if diff := cmp.Diff(*opts, want.opts, unexported); diff != "" || bucket != want.bucket {
			t.Errorf("%s: bucket %s, options (-got +want):\n%s", raw, bucket, diff)
		}
	}
}

// What cannot be meant is told, and what could be a secret is not repeated.
func TestParseURLErrors(t *testing.T) {
	for raw, text := range map[string]string{
		"":                                     "write s3://BUCKET",
		"s3:bkt":                               "write s3://BUCKET",
		"http://bkt":                           "write s3://BUCKET",
		"s3://bkt#x":                           "write s3://BUCKET",
		"s3://":                                "no bucket name",
		"s3://Bkt":                             "no bucket name",
		"s3://b":                               "no bucket name",
		"s3://127.0.0.1/x":                     "no bucket name",
		"s3://bkt--use1-az4--x-s3":             "directory bucket",
		"s3://AKIA:hush@bkt":                   "credentials do not belong",
		"s3://bkt?secret_access_key=hush":      "credentials do not belong",
		"s3://bkt?session-token=hush":          "credentials do not belong",
		"s3://bkt?regoin=x":                    `unknown parameter "regoin"; known are anonymous,`,
		"s3://bkt?region=":                     "is empty",
		"s3://bkt?region=a&region=b":           "twice",
		"s3://bkt?endpoint=ftp://h":            "endpoint",
		"s3://bkt?endpoint=https://u:hush@h":   "endpoint",
		"s3://bkt?path-style=maybe":            "neither true nor false",
		"s3://bkt?part-size=1MiB":              "5 MiB",
		"s3://bkt?part-size=5MB":               "no size",
		"s3://bkt?checksums=never":             "checksums",
		"s3://bkt?sse=rot13":                   "rot13",
		"s3://bkt?sse-kms-key-id=k":            "aws:kms",
		"s3://bkt?storage-class=GLACIER":       "thawed",
		"s3://bkt/a//b":                        "prefix",
		"s3://bkt/" + strings.Repeat("p", 124): "prefix",
		"s3://bkt?%zz":                         "malformed",
	} {
		_, _, err := ParseURL(raw)
		if err == nil || !strings.Contains(err.Error(), text) || strings.Contains(err.Error(), "hush") {
			t.Errorf("%s: %v, want %q", raw, err, text)
		}
	}
}
