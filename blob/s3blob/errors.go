package s3blob

import (
	"cmp"
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"slices"
	"strings"
	"time"

	awshttp "github.com/aws/aws-sdk-go-v2/aws/transport/http"
	"github.com/aws/smithy-go"
	smithyhttp "github.com/aws/smithy-go/transport/http"

	"github.com/snapferry/snapferry/blob"
)

// action is what a request needs the permission for, in the words of S3's policies.
type action struct {
	name   string
	bucket bool // on the bucket, not on objects
}

var (
	getObject     = action{"s3:GetObject", false}
	putObject     = action{"s3:PutObject", false}
	putTagged     = action{"s3:PutObject and s3:PutObjectTagging", false}
	getTags       = action{"s3:GetObjectTagging", false}
	deleteTags    = action{"s3:DeleteObjectTagging", false}
	deleteObject  = action{"s3:DeleteObject", false}
	deleteObjects = deleteObject
	abortUpload   = action{"s3:AbortMultipartUpload", false}
	listBucket    = action{"s3:ListBucket", true}
	listVersions  = action{"s3:ListBucketVersions", true}
	listUploads   = action{"s3:ListBucketMultipartUploads", true}
	getVersioning = action{"s3:GetBucketVersioning", true}
	getLifecycle  = action{"s3:GetLifecycleConfiguration", true}
	putLifecycle  = action{"s3:PutLifecycleConfiguration", true}
)

// Conditions of this package's own.
var (
	errNoUpload = errors.New("the upload is not there any more")
	errPastEnd  = errors.New("the range is past the end")
	errNoBatch  = errors.New("the store takes no batches of deletes as they are sent here")
)

// answer is an error that a store answered.
type answer struct {
	code, message string
	status        int
	region        string    // of the bucket, as the store says
	date          time.Time // by the store's clock
	request       string    // id by which the store's operators find it
}

// Error reads "code: message (status, request id)".
func (a *answer) Error() string {
	text := cmp.Or(a.code, http.StatusText(a.status))
	if a.message != "" && a.message != a.code {
		text += ": " + strings.TrimSuffix(a.message, ".")
	}
	var notes []string
	if a.status != 0 {
		notes = append(notes, fmt.Sprintf("status %d", a.status))
	}
	if a.request != "" {
		notes = append(notes, "request "+a.request)
	}
	if len(notes) == 0 {
		return text
	}
	return text + " (" + strings.Join(notes, ", ") + ")"
}

// answerOf returns what the store answered, if that is what err is.
func answerOf(err error) (answer, bool) {
	api, isAPI := errors.AsType[smithy.APIError](err)
	var a answer
	if isAPI {
		a.code, a.message = api.ErrorCode(), api.ErrorMessage()
	}
	resp, ok := errors.AsType[*smithyhttp.ResponseError](err)
	if !ok || resp.Response == nil || resp.Response.Response == nil {
		return a, isAPI
	}
	h := resp.Response.Header
	a.status = resp.HTTPStatusCode()
	a.region = h.Get("X-Amz-Bucket-Region")
	a.date, _ = http.ParseTime(h.Get("Date"))
	if r, ok := errors.AsType[*awshttp.ResponseError](err); ok {
		a.request = r.ServiceRequestID()
	}
	if a.region == "" {
		a.region = expectedRegion(a.message)
	}
	return a, isAPI || a.status >= 300
}

// expectedRegion finds "expecting 'REGION'" in a message: the SDK drops the element of the
// answer that has it too.
func expectedRegion(message string) string {
	_, rest, ok := strings.Cut(message, "expecting ")
	if !ok || rest == "" || !strings.ContainsRune(`'"`, rune(rest[0])) {
		return ""
	}
	region, _, _ := strings.Cut(rest[1:], rest[:1])
	return region
}

// refusalDate is the Date of an answer by which a store refused something.
func refusalDate(err error) (time.Time, bool) {
	a, ok := answerOf(err)
	return a.date, ok && a.status == http.StatusForbidden && !a.date.IsZero()
}

// explain turns an error of the SDK into one of the classes of blob.Driver. It is nil for
// nil.
func (d *Driver) explain(ctx context.Context, act action, err error) error {
	if err == nil {
		return nil
	}
	if cerr := ctx.Err(); cerr != nil {
		if errors.Is(err, cerr) {
			return err
		}
		return fmt.Errorf("%w: %w", cerr, err)
	}
	if c, ok := errors.AsType[*noCredentials](err); ok {
		return fmt.Errorf("no credentials for %s: check that AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY are set, or name a profile or role: %v: %w", d, c.err, fs.ErrPermission)
	}
	if a, ok := answerOf(err); ok {
		d.met.Store(true)
		return d.classify(act, a)
	}
	return d.noAnswer(err)
}

// explainBucket is explain for requests about the bucket: what they do not find is it.
func (d *Driver) explainBucket(ctx context.Context, act action, err error) error {
	err = d.explain(ctx, act, err)
	if errors.Is(err, fs.ErrNotExist) {
		return d.noBucket(err)
	}
	return err
}

// noBucket must not pass for the absence of an object.
func (d *Driver) noBucket(err error) error {
	return fmt.Errorf("there is no bucket %s%s: make it first, or correct the URL: %v", d.bucket, d.at(), err)
}

// at names the place for messages.
func (d *Driver) at() string {
	if e := d.client.Options().BaseEndpoint; e != nil {
		return " at " + *e
	}
	return " in region " + d.client.Options().Region
}

// The codes that stores answer, by what they mean. What is in none of these goes by the
// status, see byStatus.
var (
	absentCodes    = []string{"NoSuchKey", "NotFound", "NoSuchVersion"}
	existsCodes    = []string{"PreconditionFailed"}
	throttledCodes = []string{"SlowDown", "SlowDownRead", "SlowDownWrite", "TooManyRequests", "Throttling", "ThrottlingException", "RequestLimitExceeded", "RequestThrottled", "ServiceUnavailable", "ServerBusy"}
	passingCodes   = []string{"InternalError", "RequestTimeout", "ConditionalRequestConflict", "OperationAborted", "IncompleteBody", "BadDigest", "XAmzContentSHA256Mismatch", "RestoreInProgress"}
	identityCodes  = []string{"InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "ExpiredToken", "TokenRefreshRequired", "NotSignedUp", "AccountProblem", "InvalidSecurity", "XAdminUserNotFound"}
	refusedCodes   = []string{"AccessDenied", "AllAccessDisabled", "Forbidden", "UnauthorizedAccess"}
	lackingCodes   = []string{"NotImplemented", "MethodNotAllowed", "UnsupportedOperation"}
	regionCodes    = []string{"AuthorizationHeaderMalformed", "PermanentRedirect", "MovedPermanently", "IllegalLocationConstraintException", "TemporaryRedirect", "Redirect"}
)

// classify says what an answer means for the caller.
func (d *Driver) classify(act action, a answer) error {
	is := func(codes []string) bool { return slices.Contains(codes, a.code) }
	switch {
	case a.code == "NoSuchBucket":
		return d.noBucket(&a)
	case a.code == "NoSuchUpload":
		return blob.Retriable(fmt.Errorf("%w: %w", errNoUpload, &a))
	case a.code == "InvalidRange" || a.status == http.StatusRequestedRangeNotSatisfiable:
		return fmt.Errorf("%w: %w", errPastEnd, &a)
	case is(absentCodes):
		return fs.ErrNotExist
	case is(existsCodes):
		return fs.ErrExist
	case is(throttledCodes):
		return blob.Throttled(&a)
	case is(passingCodes):
		return blob.Retriable(&a)
	case a.code == "RequestTimeTooSkewed":
		return skewed(&a)
	case is(identityCodes):
		return fmt.Errorf("the store does not accept the credentials: %w: check the access key and its secret (AWS_ACCESS_KEY_ID, AWS_PROFILE, a role): %w", &a, fs.ErrPermission)
	case is(regionCodes):
		return d.wrongRegion(&a)
	case a.code == "InvalidObjectState":
		return fmt.Errorf("the object was moved to an archive and has to be thawed first; keep lifecycle rules for archives off this prefix: %w", &a)
	case a.code == "MissingContentMD5" || act == deleteObjects && is(lackingCodes):
		return fmt.Errorf("%w: %w", errNoBatch, &a)
	case is(refusedCodes):
		return d.refused(act, &a)
	case is(lackingCodes):
		return fmt.Errorf("%w: %w", blob.ErrUnsupported, &a)
	}
	return d.byStatus(act, &a)
}

// byStatus classifies answers with an unknown code, or without any, as to HEAD.
func (d *Driver) byStatus(act action, a *answer) error {
	switch {
	case a.status == http.StatusNotFound && a.code == "":
		return fs.ErrNotExist
	case a.status == http.StatusPreconditionFailed:
		return fs.ErrExist
	case a.status == http.StatusForbidden || a.status == http.StatusUnauthorized:
		return d.refused(act, a)
	case a.status == http.StatusMovedPermanently || a.status == http.StatusBadRequest && a.region != "" && a.region != d.client.Options().Region:
		return d.wrongRegion(a)
	case a.status == http.StatusTooManyRequests || a.status == http.StatusServiceUnavailable:
		return blob.Throttled(a)
	case a.status == http.StatusNotImplemented || a.status == http.StatusMethodNotAllowed:
		return fmt.Errorf("%w: %w", blob.ErrUnsupported, a)
	case a.status == http.StatusRequestTimeout || a.status >= 500 && a.status != http.StatusInsufficientStorage:
		return blob.Retriable(a)
	case a.status >= 200 && a.status < 300: // an error, or no XML, under a status of success
		return blob.Retriable(a)
	}
	return a
}

// refused names the permission that is missing, which the store does not tell.
func (d *Driver) refused(act action, a *answer) error {
	on := "arn:aws:s3:::" + d.bucket
	if !act.bucket {
		on += "/" + d.prefix + "*"
	}
	hint := ""
	if act == getObject { // without it a store does not tell what is absent
		hint = ", or s3:ListBucket on arn:aws:s3:::" + d.bucket
	}
	return fmt.Errorf("the store refuses it: %w: check that the policy allows %s on %s%s: %w", a, act.name, on, hint, fs.ErrPermission)
}

// skewed tells the difference of the clocks, as the store refuses requests by the hour.
func skewed(a *answer) error {
	if a.date.IsZero() {
		return fmt.Errorf("this machine's clock is wrong: set it: %w", a)
	}
	off, way := time.Since(a.date).Round(time.Second), "ahead of"
	if off < 0 {
		off, way = -off, "behind"
	}
	return fmt.Errorf("this machine's clock is %v %s the store's: set it: %w", off, way, a)
}

func (d *Driver) wrongRegion(a *answer) error {
	if a.region == "" {
		return fmt.Errorf("the bucket %s is not in region %s: name the right one with ?region=: %w", d.bucket, d.client.Options().Region, a)
	}
	return fmt.Errorf("the bucket %s is in region %s and not in %s: add ?region=%s to the URL or set AWS_REGION: %w", d.bucket, a.region, d.client.Options().Region, a.region, a)
}

// noAnswer classifies what happened before or instead of an answer.
func (d *Driver) noAnswer(err error) error {
	if isUntrusted(err) {
		return fmt.Errorf("the store's certificate is not trusted: check the name in the endpoint, or add ?ca-file=FILE: %w", cause(err))
	}
	if dns, ok := errors.AsType[*net.DNSError](err); ok && dns.IsNotFound && !d.met.Load() {
		return fmt.Errorf("there is no host %s: check the endpoint and the region; ?path-style=true leaves the bucket out of the name: %w", dns.Name, dns)
	}
	if strings.Contains(err.Error(), "server gave HTTP response to HTTPS client") {
		return fmt.Errorf("the endpoint does not speak TLS: write endpoint=http://HOST:PORT: %w", cause(err))
	}
	if passing(err) {
		return blob.Retriable(cause(err))
	}
	return err
}

func isUntrusted(err error) bool {
	var unknown x509.UnknownAuthorityError
	var host x509.HostnameError
	var invalid x509.CertificateInvalidError
	return errors.As(err, &unknown) || errors.As(err, &host) || errors.As(err, &invalid)
}

// passing tells a broken connection or a broken answer.
func passing(err error) bool {
	_, sent := errors.AsType[*smithyhttp.RequestSendError](err)
	_, garbled := errors.AsType[*smithy.DeserializationError](err)
	_, network := errors.AsType[net.Error](err)
	return sent || garbled || network || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, io.EOF)
}

// cause leaves out what the SDK says about itself.
func cause(err error) error {
	if e, ok := errors.AsType[*smithyhttp.RequestSendError](err); ok && e.Err != nil {
		return e.Err
	}
	if e, ok := errors.AsType[*smithy.DeserializationError](err); ok {
		return fmt.Errorf("the store's answer makes no sense: %w", e)
	}
	return err
}
