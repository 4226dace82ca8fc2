package blobservers_test

import (
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"testing"

	"go.uber.org/goleak"

	"github.com/snapferry/snapferry/internal/blobservers"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// status asks without credentials; an answer of any kind shows a server.
func status(t *testing.T, url string) int {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, nil)
	if err != nil {
		t.Fatal(err)
	}
	req.Close = true
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return 0
	}
	defer resp.Body.Close()
	if _, err := io.Copy(io.Discard, resp.Body); err != nil {
		return 0
	}
	return resp.StatusCode
}

// A server refuses strangers, keeps its address over a kill, and ends with its test.
func TestVersity(t *testing.T) {
	var gone string
	t.Run("alive", func(t *testing.T) {
		s := blobservers.Versity(t)
		bucket := s.Bucket()
		if _, err := os.Stat(filepath.Join(s.Dir, bucket)); err != nil {
			t.Errorf("a bucket is no directory: %v", err)
		}
		if got := status(t, s.Endpoint+"/"+bucket); got != http.StatusForbidden {
			t.Errorf("a stranger got %d", got)
		}
		s.Kill()
		if got := status(t, s.Endpoint); got != 0 {
			t.Errorf("a killed server answered %d", got)
		}
		s.Restart()
		if got := status(t, s.Endpoint); got != http.StatusForbidden {
			t.Errorf("after a restart a stranger got %d", got)
		}
		gone = s.Addr
	})
	if c, err := net.Dial("tcp", gone); err == nil {
		t.Errorf("the server outlived its test: %v", c.Close())
	}
}

func TestVersityVersioned(t *testing.T) {
	s := blobservers.VersityVersioned(t)
	s.SetVersioning(s.Bucket())
}

func TestSeaweedFS(t *testing.T) {
	blobservers.Long(t)
	s := blobservers.SeaweedFS(t)
	s.SetVersioning(s.Bucket())
	s.Restart()
	s.Bucket()
}

func TestGCS(t *testing.T) {
	blobservers.Long(t)
	s := blobservers.GCS(t)
	if got := status(t, s.Endpoint+"/storage/v1/b/"+s.Bucket()); got != http.StatusOK {
		t.Errorf("got %d", got)
	}
}

func TestAzurite(t *testing.T) {
	blobservers.Long(t)
	s := blobservers.Azurite(t)
	s.Restart()
	if got := status(t, s.Endpoint+"?comp=list"); got != http.StatusForbidden && got != http.StatusBadRequest {
		t.Errorf("a stranger got %d", got)
	}
}

// A spoilt connection ends, and the next one after Heal does not.
func TestToxiproxy(t *testing.T) {
	s := blobservers.Versity(t)
	p := blobservers.Toxiproxy(t, s.Addr)
	if got := status(t, p.Endpoint); got != http.StatusForbidden {
		t.Fatalf("through the proxy: %d", got)
	}
	p.Cut(blobservers.Down, 10)
	p.Latency(blobservers.Up, 1)
	if got := status(t, p.Endpoint); got != 0 {
		t.Errorf("through a cut connection: %d", got)
	}
	p.Heal()
	if got := status(t, p.Endpoint); got != http.StatusForbidden {
		t.Errorf("after healing: %d", got)
	}
}
