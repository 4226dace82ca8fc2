package blob

import "io"

// upload is the body of one try of a Put as the driver sees it: opened once beforehand,
// and metered.
type upload struct {
	store  *Store
	body   Body
	opened io.ReadCloser // until the driver takes it
	watch  *watch
}

// open gives the reader that is open already, and from then on new ones, for drivers
// that have to send twice.
func (u *upload) open() (io.ReadCloser, error) {
	src := u.opened
	u.opened = nil
	if src == nil {
		var err error
		if src, err = u.body.Open(); err != nil {
			return nil, err
		}
	}
	return &meter{src: src, size: u.body.Size, max: u.store.limits.piece(), piece: u.passed}, nil
}

// passed counts a piece as progress and waits for the rate, which does not count.
func (u *upload) passed(n int) error {
	u.watch.stand()
	err := u.store.limits.pay(u.watch.ctx, n)
	u.watch.progress()
	return err
}

func (u *upload) discard() {
	if u.opened != nil {
		_ = u.opened.Close() // nothing was read from it
	}
}
