package azblob

import (
	"fmt"
	"testing"

	azcontainer "github.com/Azure/azure-sdk-for-go/sdk/storage/azblob/container"
	"go.uber.org/goleak"

	"github.com/snapferry/snapferry/blob"
	"github.com/snapferry/snapferry/blob/blobtest"
	"github.com/snapferry/snapferry/internal/blobservers"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// open opens a container of a server, by another address if that is given.
func open(t testing.TB, s *blobservers.AzureServer, addr, container string, opts Options) *Driver {
	t.Helper()
	opts.Account, opts.AccountKey, opts.Endpoint = s.Account, s.Key, "http://"+addr+"/"+s.Account
	d, err := Open(container, &opts)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// create makes a container and opens it.
func create(t testing.TB, s *blobservers.AzureServer, container string, opts Options) *Driver {
	t.Helper()
	d := open(t, s, s.Addr, container, opts)
	if _, err := d.container.Create(t.Context(), &azcontainer.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	return d
}

func TestConformance(t *testing.T) {
	blobservers.Long(t)
	s := blobservers.Azurite(t)
	n := 0
	blobtest.Run(t, func(t *testing.T) blob.Driver {
		n++
		return create(t, s, fmt.Sprint("box-", n), Options{Prefix: "some/prefix", ExpiryTags: true})
	}, &blobtest.Options{Large: 2*blockSize + 12345, Many: 5203})
}

func TestServer(t *testing.T) {
	blobservers.Long(t)
	s := blobservers.Azurite(t)
	if err := create(t, s, "trouble", Options{}).Close(); err != nil {
		t.Fatal(err)
	}
	blobtest.RunServer(t, blobtest.Server{
		Addr: s.Addr,
		Open: func(t *testing.T, addr string) blob.Driver { return open(t, s, addr, "trouble", Options{}) },
		Kill: s.Kill,
		Restart: func() {
			s.Restart()
			if err := create(t, s, "trouble", Options{}).Close(); err != nil {
				t.Error(err)
			}
		},
		Forgets: true,
	})
}
