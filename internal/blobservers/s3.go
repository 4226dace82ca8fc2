package blobservers

import (
	"context"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"
)

// S3 is a running S3 server. It knows one user, who may do everything.
type S3 struct {
	*Server
	// Endpoint is its base URL, for path-style requests.
	Endpoint string
	// Region is the one it signs for.
	Region string
	// AccessKey and SecretKey are the user's; they differ from server to server.
	AccessKey, SecretKey string
	// Dir is where it keeps its data. With the Versity gateway an object is the file
	// Dir/BUCKET/KEY, which a test may damage.
	Dir string
}

// Versity starts the Versity S3 gateway over a directory.
func Versity(t T) *S3 { return versity(t, "") }

// VersityVersioned is Versity with a place for old versions, so that buckets can be versioned.
func VersityVersioned(t T) *S3 { return versity(t, t.TempDir()) }

func versity(t T, versions string) *S3 {
	t.Helper()
	path := tool(t, "versitygw", "versitygw")
	s := newS3(t)
	s.serve(t, program{name: "versitygw", ports: 1, command: func(ports []string) *exec.Cmd {
		args := []string{"--port", "127.0.0.1:" + ports[0], "--region", s.Region, "--quiet", "posix"}
		if versions != "" {
			args = append(args, "--versioning-dir", versions)
		}
		cmd := exec.Command(path, append(args, s.Dir)...)
		cmd.Env = append(os.Environ(), "ROOT_ACCESS_KEY="+s.AccessKey, "ROOT_SECRET_KEY="+s.SecretKey)
		return cmd
	}})
	return s
}

// SeaweedFS starts a SeaweedFS of one node with its S3 service.
func SeaweedFS(t T) *S3 {
	t.Helper()
	path := tool(t, "seaweedfs", "weed")
	s := newS3(t)
	config := filepath.Join(t.TempDir(), "s3.json")
	if err := os.WriteFile(config, s.weedConfig(), 0o600); err != nil {
		t.Fatalf("configure SeaweedFS: %v", err)
	}
	s.serve(t, program{name: "weed", ports: len(weedPorts), command: func(ports []string) *exec.Cmd {
		// A bucket takes several volumes, and a small limit makes puts fail after some buckets.
		args := []string{"server", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-dir=" + s.Dir, "-s3", "-s3.config=" + config,
			"-s3.iam=false", "-master.volumeSizeLimitMB=64", "-volume.max=2000", "-master.telemetry=false"}
		for i, flag := range weedPorts {
			args = append(args, "-"+flag+"="+ports[i])
		}
		return exec.Command(path, args...)
	}})
	return s
}

// weedPorts are all the ports that SeaweedFS opens; the first one is the address.
var weedPorts = []string{
	"s3.port", "s3.port.grpc", "master.port", "master.port.grpc", "volume.port", "volume.port.grpc", "filer.port", "filer.port.grpc",
}

func (s *S3) weedConfig() []byte {
	type credential struct {
		AccessKey string `json:"accessKey"`
		SecretKey string `json:"secretKey"`
	}
	type identity struct {
		Name        string       `json:"name"`
		Credentials []credential `json:"credentials"`
		Actions     []string     `json:"actions"`
	}
	data, err := json.Marshal(map[string][]identity{"identities": {{
		"tester", []credential{{s.AccessKey, s.SecretKey}}, []string{"Admin", "Read", "Write", "List", "Tagging"},
	}}})
	if err != nil {
		panic(err) // strings always encode
	}
	return data
}

func newS3(t T) *S3 {
	return &S3{Region: "us-east-1", AccessKey: "AK" + rand.Text()[:18], SecretKey: rand.Text(), Dir: t.TempDir()}
}

// serve starts the server; it is ready when it lists buckets for this very user.
func (s *S3) serve(t T, prog program) {
	t.Helper()
	prog.ready = func(ctx context.Context, addr string) error {
		return s.call(ctx, http.MethodGet, "http://"+addr+"/", "")
	}
	s.Server = start(t, prog)
	s.Endpoint = "http://" + s.Addr
}

// Bucket makes a bucket with a name of its own and returns the name.
func (s *S3) Bucket() string {
	s.t.Helper()
	name := "b-" + strings.ToLower(rand.Text()[:12])
	s.CreateBucket(name)
	return name
}

// CreateBucket makes a bucket.
func (s *S3) CreateBucket(name string) {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(s.t.Context(), startTime)
	defer cancel()
	// A server that has just begun may have no room yet.
	err := poll(ctx, func() error { return s.call(ctx, http.MethodPut, s.Endpoint+"/"+name, "") })
	if err != nil {
		s.t.Fatalf("create bucket %s: %v", name, err)
	}
}

// SetVersioning turns the keeping of old versions of a bucket on.
func (s *S3) SetVersioning(bucket string) {
	s.t.Helper()
	const body = `<VersioningConfiguration xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Status>Enabled</Status></VersioningConfiguration>`
	if err := s.call(s.t.Context(), http.MethodPut, s.Endpoint+"/"+bucket+"?versioning=", body); err != nil {
		s.t.Fatalf("set versioning of %s: %v", bucket, err)
	}
}

// call sends one signed request. The few that this package needs do not need an SDK.
func (s *S3) call(ctx context.Context, method, url, body string) error {
	req, err := http.NewRequestWithContext(ctx, method, url, strings.NewReader(body))
	if err != nil {
		return err
	}
	s.sign(req, body, time.Now().UTC())
	return answer(req)
}

// answer sends a request on a connection of its own and wants a success.
func answer(req *http.Request) error {
	req.Close = true
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(io.LimitReader(resp.Body, 1000))
	if err == nil && resp.StatusCode/100 != 2 {
		err = fmt.Errorf("%s %s: %s: %s", req.Method, req.URL.Path, resp.Status, text)
	}
	return err
}

// sign is version 4 of Amazon's signatures, for requests whose path and query need no escapes.
func (s *S3) sign(req *http.Request, body string, now time.Time) {
	day, stamp := now.Format("20060102"), now.Format("20060102T150405Z")
	digest := hexSum(body)
	req.Header.Set("X-Amz-Date", stamp)
	req.Header.Set("X-Amz-Content-Sha256", digest)
	const signed = "host;x-amz-content-sha256;x-amz-date"
	canonical := strings.Join([]string{
		req.Method, req.URL.Path, req.URL.RawQuery,
		"host:" + req.URL.Host, "x-amz-content-sha256:" + digest, "x-amz-date:" + stamp, "",
		signed, digest,
	}, "\n")
	scope := day + "/" + s.Region + "/s3/aws4_request"
	key := mac([]byte("AWS4"+s.SecretKey), day)
	for _, part := range []string{s.Region, "s3", "aws4_request"} {
		key = mac(key, part)
	}
	signature := hex.EncodeToString(mac(key, "AWS4-HMAC-SHA256\n"+stamp+"\n"+scope+"\n"+hexSum(canonical)))
	req.Header.Set("Authorization", fmt.Sprintf("AWS4-HMAC-SHA256 Credential=%s/%s, SignedHeaders=%s, Signature=%s",
		s.AccessKey, scope, signed, signature))
}

func hexSum(s string) string {
	sum := sha256.Sum256([]byte(s))
	return hex.EncodeToString(sum[:])
}

func mac(key []byte, s string) []byte {
	h := hmac.New(sha256.New, key)
	_, _ = h.Write([]byte(s)) // a hash never fails
	return h.Sum(nil)
}
