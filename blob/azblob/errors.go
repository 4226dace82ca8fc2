package azblob

import (
	"cmp"
	"context"
	"crypto/tls"
	"encoding/xml"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strings"

	"github.com/Azure/azure-sdk-for-go/sdk/azcore"
	"github.com/Azure/azure-sdk-for-go/sdk/azcore/runtime"
	"github.com/Azure/azure-sdk-for-go/sdk/azidentity"
	"github.com/Azure/azure-sdk-for-go/sdk/storage/azblob/bloberror"

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
	if r, ok := errors.AsType[*azcore.ResponseError](err); ok {
		d.met.Store(true)
		return d.answered(r)
	}
	return d.unanswered(err)
}

// The codes of answers, by what they mean. The others go by the status.
var (
	existCodes  = []bloberror.Code{bloberror.BlobAlreadyExists, bloberror.ConditionNotMet}
	busyCodes   = []bloberror.Code{bloberror.ServerBusy}
	againCodes  = []bloberror.Code{bloberror.OperationTimedOut, bloberror.InternalError, bloberror.InvalidBlockList, bloberror.MD5Mismatch, bloberror.ContainerBeingDeleted}
	absentCodes = []bloberror.Code{bloberror.BlobNotFound, bloberror.ResourceNotFound}
)

// answered classifies the answer of the store.
func (d *Driver) answered(r *azcore.ResponseError) error {
	is := func(codes []bloberror.Code) bool { return slices.Contains(codes, bloberror.Code(r.ErrorCode)) }
	err := &answer{status: r.StatusCode, code: r.ErrorCode, message: message(r)}
	switch {
	case bloberror.HasCode(r, bloberror.ContainerNotFound, bloberror.ContainerDisabled):
		return fmt.Errorf("container %s does not exist: make it first, it is never made by itself", d.name)
	case is(absentCodes) || r.StatusCode == http.StatusNotFound:
		return fs.ErrNotExist
	case is(existCodes):
		return fs.ErrExist
	case is(busyCodes) || r.StatusCode == http.StatusTooManyRequests || r.StatusCode == http.StatusServiceUnavailable:
		return blob.Throttled(err)
	case is(againCodes) || r.StatusCode == http.StatusRequestTimeout || r.StatusCode >= 500:
		return blob.Retriable(err)
	case bloberror.HasCode(r, bloberror.AuthenticationFailed, bloberror.InvalidAuthenticationInfo, bloberror.NoAuthenticationInformation) || r.StatusCode == http.StatusUnauthorized:
		return fmt.Errorf("%w: the store does not accept the credentials (a wrong or expired key or signature, or a wrong clock): %w", fs.ErrPermission, err)
	case r.StatusCode == http.StatusForbidden:
		return fmt.Errorf("%w: the store refuses (the role Storage Blob Data Contributor is enough): %w", fs.ErrPermission, err)
	}
	return err
}

// answer is an error that the store answered, on one line.
type answer struct {
	status        int
	code, message string
}

// Error reads "code: message (status)".
func (a *answer) Error() string {
	text := cmp.Or(a.code, http.StatusText(a.status))
	if a.message != "" {
		text += ": " + a.message
	}
	return fmt.Sprintf("%s (status %d)", text, a.status)
}

// message is the first line of what the store says beside the code.
func message(r *azcore.ResponseError) string {
	if r.RawResponse == nil {
		return ""
	}
	body, err := runtime.Payload(r.RawResponse)
	var said struct{ Message string }
	if err != nil || xml.Unmarshal(body, &said) != nil {
		return ""
	}
	line, _, _ := strings.Cut(said.Message, "\n")
	return strings.TrimSpace(line[:min(len(line), 300)])
}

// unanswered classifies what happened on the way. The library's error may name the URL,
// which may have a signature in it.
func (d *Driver) unanswered(err error) error {
	if u, ok := errors.AsType[*url.Error](err); ok {
		err = fmt.Errorf("%s: %w", strings.ToLower(u.Op), u.Err)
	}
	if a, ok := errors.AsType[*azidentity.AuthenticationFailedError](err); ok {
		return fmt.Errorf("%w: Azure gives no token for these credentials: %w", fs.ErrPermission, a)
	}
	if n, ok := errors.AsType[nonRetriable](err); ok {
		return fmt.Errorf("no request could be made with these credentials (set AZURE_STORAGE_KEY or AZURE_STORAGE_SAS_TOKEN, or log in): %w: %w", fs.ErrPermission, n)
	}
	if _, ok := errors.AsType[*tls.CertificateVerificationError](err); ok {
		return fmt.Errorf("the store's certificate is not trusted: %w", err)
	}
	if dns, ok := errors.AsType[*net.DNSError](err); ok && dns.IsNotFound && !d.met.Load() {
		return fmt.Errorf("no such host (is the account's name right?): %w", err)
	}
	return blob.Retriable(err)
}

// nonRetriable is how the library marks what would fail again, such as a chain of
// credentials that has none.
type nonRetriable interface {
	error
	NonRetriable()
}
