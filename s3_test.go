package snapferry

import (
	"testing"

	"github.com/snapferry/snapferry/blob/s3blob"
	"github.com/snapferry/snapferry/internal/blobservers"
)

// A repository in a bucket lives as one on disk does: commits, retention, collecting and
// restoring leave exactly what the log names (I1, I3).
func TestLifeInBucket(t *testing.T) {
	s := blobservers.Versity(t)
	t.Setenv("AWS_CA_BUNDLE", "")
	t.Setenv("AWS_CONFIG_FILE", "/dev/null")
	t.Setenv("AWS_SHARED_CREDENTIALS_FILE", "/dev/null")
	t.Setenv("AWS_ACCESS_KEY_ID", s.AccessKey)
	t.Setenv("AWS_SECRET_ACCESS_KEY", s.SecretKey)
	// Small limits, so that packs go in parts.
	d, err := s3blob.Open(t.Context(), s.Bucket(), &s3blob.Options{
		Prefix: "repo", Endpoint: s.Endpoint, Region: s.Region, SinglePut: 64 << 10, PartSize: 5 << 20, Buffers: 8 << 20,
	})
	check(t, err)
	w := newWorldOn(t, d)
	defer w.blobs.Close()
	w.opts.KeepLast = 2
	w.opts.Grace = -1
	task := w.open()
	for _, text := range []string{"one", "two", "three", "four"} {
		w.write(map[string]string{"a": text, "d/large": string(make([]byte, 300<<10)) + text, "d/same": "same"})
		w.mustCommit(task, nil)
	}
	wantSameTree(t, w.restore(""), w.dir)
	w.wantSound()
	upload, err := task.Snapshot(t.Context(), w.sources(), nil)
	check(t, err)
	_, err = upload.Upload(t.Context()) // and its owner dies
	check(t, err)
	task = w.open()
	w.mustCommit(task, nil)
	w.gc(GCOptions{})
	w.wantSound()
	w.wantOnlyNamed()
	wantSameTree(t, w.restore(""), w.dir)
}
