package blobservers

import (
	"context"
	"crypto/rand"
	"encoding/base64"
	"net/http"
	"os"
	"os/exec"
	"strings"
)

// azuriteVersion is the version in azurite/package.json.
const azuriteVersion = "3.37.0"

// GCSServer is a running fake-gcs-server. It asks nobody who he is.
type GCSServer struct {
	*Server
	// Endpoint is its base URL.
	Endpoint string
}

// GCS starts fake-gcs-server. It keeps everything in memory, so nothing is left after a
// Restart.
func GCS(t T) *GCSServer {
	t.Helper()
	path := tool(t, "fakegcs", "fake-gcs-server")
	s := start(t, program{name: "fake-gcs-server", ports: 1,
		command: func(ports []string) *exec.Cmd {
			return exec.Command(path, "-backend", "memory", "-scheme", "http", "-host", "127.0.0.1", "-port", ports[0],
				"-public-host", "127.0.0.1:"+ports[0], "-log-level", "warn")
		},
		ready: func(ctx context.Context, addr string) error {
			req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+addr+"/storage/v1/b?project=test", nil)
			if err != nil {
				return err
			}
			return answer(req)
		}})
	return &GCSServer{Server: s, Endpoint: "http://" + s.Addr}
}

// Bucket makes a bucket with a name of its own and returns the name.
func (s *GCSServer) Bucket() string {
	s.t.Helper()
	name := "b-" + strings.ToLower(rand.Text()[:12])
	s.CreateBucket(name)
	return name
}

// CreateBucket makes a bucket.
func (s *GCSServer) CreateBucket(name string) {
	s.t.Helper()
	req, err := http.NewRequestWithContext(s.t.Context(), http.MethodPost, s.Endpoint+"/storage/v1/b?project=test",
		strings.NewReader(`{"name":"`+name+`"}`))
	if err == nil {
		req.Header.Set("Content-Type", "application/json")
		err = answer(req)
	}
	if err != nil {
		s.t.Fatalf("create bucket %s: %v", name, err)
	}
}

// AzureServer is a running Azurite with one storage account.
type AzureServer struct {
	*Server
	// Endpoint is the base URL of the account's blobs.
	Endpoint string
	// Account and Key are the storage account; the key differs from server to server.
	Account, Key string
}

// Azurite starts Azurite's blob service. It writes its tables now and then only, so nothing
// is sure to be left after a Kill. Where there is no Node.js the test is skipped.
func Azurite(t T) *AzureServer {
	t.Helper()
	for _, program := range []string{"node", "npm"} {
		if _, err := exec.LookPath(program); err != nil {
			t.Skipf("Azurite needs %s", program)
		}
	}
	main := made(t, "azurite", installAzurite)
	key := base64.StdEncoding.EncodeToString([]byte(rand.Text()))
	a := &AzureServer{Account: "tester", Key: key}
	a.Server = start(t, program{name: "azurite", ports: 1, command: func(ports []string) *exec.Cmd {
		cmd := exec.Command("node", main, "--blobHost", "127.0.0.1", "--blobPort", ports[0], "--inMemoryPersistence",
			"--skipApiVersionCheck", "--disableTelemetry", "--silent")
		cmd.Env = append(os.Environ(), "AZURITE_ACCOUNTS="+a.Account+":"+key)
		return cmd
	}})
	a.Endpoint = "http://" + a.Addr + "/" + a.Account
	return a
}
