package s3blob

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"net/http"
	"os"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	awsmiddleware "github.com/aws/aws-sdk-go-v2/aws/middleware"
	awshttp "github.com/aws/aws-sdk-go-v2/aws/transport/http"
	"github.com/aws/aws-sdk-go-v2/config"
	"github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/aws/smithy-go/logging"
	"github.com/aws/smithy-go/middleware"
)

// httpDoer is what sends requests.
type httpDoer interface {
	Do(*http.Request) (*http.Response, error)
}

// idleConns keeps the connections of all workers; with less a busy Store opens new ones
// all the time.
const idleConns = 128

// newClient makes a client that tries each request once: the Store repeats. The second
// result ends its idle connections.
func newClient(ctx context.Context, o *Options) (*s3.Client, func(), error) {
	cfg, err := loadConfig(ctx, o)
	if err != nil {
		return nil, nil, fmt.Errorf("AWS configuration: %w", err)
	}
	transport, err := newTransport(cfg.HTTPClient, o.CAFile)
	if err != nil {
		return nil, nil, err
	}
	var hc httpDoer = &http.Client{Transport: transport, CheckRedirect: stay}
	if o.around != nil {
		hc = o.around(hc)
	}
	client := s3.NewFromConfig(cfg, func(so *s3.Options) {
		so.HTTPClient = hc
		so.Retryer = aws.NopRetryer{}
		if o.Endpoint != "" {
			so.BaseEndpoint = &o.Endpoint
		}
		own := so.BaseEndpoint == nil
		so.UsePathStyle = o.pathStyle(own)
		so.RequestChecksumCalculation = aws.RequestChecksumCalculationWhenRequired
		if o.checksums(own) == WhenSupported {
			so.RequestChecksumCalculation = aws.RequestChecksumCalculationWhenSupported
		}
		// What is read is held against digests above, whole or in part.
		so.ResponseChecksumValidation = aws.ResponseChecksumValidationWhenRequired
		so.DisableLogOutputChecksumValidationSkipped = true
	})
	return client, transport.CloseIdleConnections, nil
}

// stay leaves redirections to the SDK: the signature is for one host.
func stay(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }

// loadConfig reads the environment and the shared files. The client is one of the SDK's own
// kind, since it refuses $AWS_CA_BUNDLE together with any other.
func loadConfig(ctx context.Context, o *Options) (aws.Config, error) {
	loads := []func(*config.LoadOptions) error{
		config.WithHTTPClient(awshttp.NewBuildableClient().WithTransportOptions(tune)),
		config.WithLogger(logging.Nop{}),
	}
	if o.Profile != "" {
		loads = append(loads, config.WithSharedConfigProfile(o.Profile))
	}
	if o.Region != "" {
		loads = append(loads, config.WithRegion(o.Region))
	}
	if o.Anonymous {
		loads = append(loads, config.WithCredentialsProvider(aws.AnonymousCredentials{}))
	}
	cfg, err := config.LoadDefaultConfig(ctx, loads...)
	if err != nil {
		return cfg, err
	}
	if cfg.Region == "" {
		cfg.Region = "us-east-1"
	}
	if !o.Anonymous {
		cfg.Credentials = &chain{cfg.Credentials}
	}
	return cfg, nil
}

func tune(t *http.Transport) {
	t.MaxIdleConns, t.MaxIdleConnsPerHost = idleConns, idleConns
	t.DisableCompression = true
	t.ReadBufferSize, t.WriteBufferSize = 64<<10, 64<<10
	// All requests over one HTTP/2 connection would share its one congestion window.
	t.Protocols = new(http.Protocols)
	t.Protocols.SetHTTP1(true)
}

// newTransport takes over what the configuration made of the transport, $AWS_CA_BUNDLE
// above all, and trusts the certificates of a file too.
func newTransport(hc aws.HTTPClient, caFile string) (*http.Transport, error) {
	bc, ok := hc.(*awshttp.BuildableClient)
	if !ok {
		return nil, errors.New("the AWS configuration brings its own HTTP client")
	}
	t := bc.GetTransport() // a copy
	if caFile == "" {
		return t, nil
	}
	pem, err := os.ReadFile(caFile)
	if err != nil {
		return nil, fmt.Errorf("certificates: %w", err)
	}
	roots := t.TLSClientConfig.RootCAs
	if roots == nil {
		if roots, err = x509.SystemCertPool(); err != nil {
			return nil, fmt.Errorf("certificates: %w", err)
		}
	}
	roots = roots.Clone()
	if !roots.AppendCertsFromPEM(pem) {
		return nil, fmt.Errorf("certificates: no PEM certificate in %s", caFile)
	}
	t.TLSClientConfig.RootCAs = roots
	return t, nil
}

// chain is the usual chain of credentials; it marks its errors, so that they are not taken
// for those of the store.
type chain struct{ aws.CredentialsProvider }

type noCredentials struct{ err error }

func (e *noCredentials) Error() string { return e.err.Error() }
func (e *noCredentials) Unwrap() error { return e.err }

// Retrieve implements aws.CredentialsProvider.
func (c *chain) Retrieve(ctx context.Context) (aws.Credentials, error) {
	creds, err := c.CredentialsProvider.Retrieve(ctx)
	if err != nil {
		err = &noCredentials{err}
	}
	return creds, err
}

// serverTime is the Date of a successful answer.
func serverTime(md middleware.Metadata) (time.Time, bool) {
	t, ok := awsmiddleware.GetServerTime(md)
	return t, ok && !t.IsZero()
}
