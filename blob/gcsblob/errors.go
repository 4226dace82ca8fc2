package gcsblob

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"slices"
	"strings"

	"cloud.google.com/go/auth"
	"cloud.google.com/go/storage"
	"google.golang.org/api/googleapi"

	"github.com/snapferry/snapferry/blob"
)

// failed turns an error of the client library into one that blob.Driver promises.
func (d *Driver) failed(ctx context.Context, err error) error {
	if err == nil {
		return nil
	}
	if cerr := ctx.Err(); cerr != nil {
		return cerr
	}
	if g, ok := errors.AsType[*googleapi.Error](err); ok {
		d.met.Store(true)
		return d.answered(ctx, readBody(g))
	}
	if errors.Is(err, storage.ErrBucketNotExist) {
		return d.noBucket()
	}
	return d.unanswered(err)
}

// answered classifies the answer of the store.
func (d *Driver) answered(ctx context.Context, g *googleapi.Error) error {
	err := fmt.Errorf("%w: %s", errStatus(g.Code), detail(g))
	switch {
	case g.Code == http.StatusNotFound:
		return d.absent(ctx)
	case g.Code == http.StatusPreconditionFailed || g.Code == http.StatusConflict && strings.Contains(g.Message, "exist"):
		return fs.ErrExist
	case g.Code == http.StatusTooManyRequests || g.Code == http.StatusForbidden && slowDown(g):
		return blob.Throttled(err)
	case g.Code == http.StatusUnauthorized:
		return fmt.Errorf("%w: the store does not accept the credentials: %s", fs.ErrPermission, detail(g))
	case g.Code == http.StatusForbidden:
		return fmt.Errorf("%w: the store refuses (storage.objects.create, get, list, delete and update are needed): %s", fs.ErrPermission, detail(g))
	case g.Code == http.StatusServiceUnavailable:
		return blob.Throttled(err)
	case g.Code == http.StatusRequestTimeout || g.Code >= 500:
		return blob.Retriable(err)
	}
	return err
}

// readBody fills in what the library leaves in the body when it is the answer to a download.
func readBody(g *googleapi.Error) *googleapi.Error {
	var said struct {
		Error struct {
			Message string                `json:"message"`
			Errors  []googleapi.ErrorItem `json:"errors"`
		} `json:"error"`
	}
	if g.Message != "" || json.Unmarshal([]byte(g.Body), &said) != nil {
		return g
	}
	filled := *g
	filled.Message, filled.Errors = said.Error.Message, said.Error.Errors
	return &filled
}

// errStatus is the meaning of a status.
type errStatus int

func (s errStatus) Error() string {
	return fmt.Sprintf("the store answered %d %s", int(s), http.StatusText(int(s)))
}

// detail is what the store says beside the status, on one line.
func detail(g *googleapi.Error) string {
	text := g.Message
	if text == "" {
		text = g.Body
	}
	text = strings.Join(strings.Fields(text), " ")
	return text[:min(len(text), 300)]
}

// slowDown tells a limit on the rate from a lack of permission: both are 403.
func slowDown(g *googleapi.Error) bool {
	return slices.ContainsFunc(g.Errors, func(e googleapi.ErrorItem) bool {
		return strings.HasSuffix(e.Reason, "ateLimitExceeded") || e.Reason == "quotaExceeded"
	})
}

// absent tells an absent object from an absent bucket, for which the store has one status.
func (d *Driver) absent(ctx context.Context) error {
	if d.bucketMet.Load() {
		return fs.ErrNotExist
	}
	err := d.reach(ctx)
	g, ok := errors.AsType[*googleapi.Error](err)
	switch {
	case errors.Is(err, storage.ErrBucketNotExist) || ok && g.Code == http.StatusNotFound:
		return d.noBucket()
	case ok && g.Code == http.StatusForbidden: // we may not list, but the object is absent
		return fs.ErrNotExist
	case err != nil:
		return d.failed(ctx, err)
	}
	d.bucketMet.Store(true)
	return fs.ErrNotExist
}

func (d *Driver) noBucket() error {
	return fmt.Errorf("bucket %s does not exist: make it first, it is never made by itself", d.name)
}

// unanswered classifies what happened on the way.
func (d *Driver) unanswered(err error) error {
	if a, ok := errors.AsType[*auth.Error](err); ok {
		return tokenError(a)
	}
	if _, ok := errors.AsType[*tls.CertificateVerificationError](err); ok {
		return fmt.Errorf("the store's certificate is not trusted: %w", err)
	}
	if dns, ok := errors.AsType[*net.DNSError](err); ok && dns.IsNotFound && !d.met.Load() {
		return fmt.Errorf("no such host: %w", err)
	}
	return blob.Retriable(err)
}

func tokenError(a *auth.Error) error {
	if a.Response != nil && a.Response.StatusCode < 500 && a.Response.StatusCode != http.StatusTooManyRequests {
		return fmt.Errorf("%w: Google gives no token for these credentials: %w", fs.ErrPermission, a)
	}
	return blob.Retriable(a)
}
