package badgersrc

import (
	"fmt"
	"io"
	"os"

	"github.com/snapferry/snapferry/source"
)

// A grownFile is the beginning of a live file that Badger only writes behind that.
// Identity and Check are those of the placeholder, which stands still.
type grownFile struct {
	source.File
	live *os.File
	name string
	size int64
}

func (f *grownFile) ReadAt(p []byte, off int64) (int, error) {
	end := off+int64(len(p)) > f.size
	if end {
		p = p[:max(0, f.size-off)]
	}
	n, err := f.live.ReadAt(p, off)
	switch {
	case n == len(p) && end:
		return n, io.EOF
	case n == len(p):
		return n, nil
	case err == io.EOF:
		return n, fmt.Errorf("read %s: %w: shorter than it was", f.name, source.ErrChanged)
	}
	return n, fmt.Errorf("read %s: %w", f.name, err)
}

// Runs returns the whole: what is written has no holes.
func (f *grownFile) Runs() ([]source.Run, error) {
	return []source.Run{{Offset: 0, Length: f.size}}, nil
}
