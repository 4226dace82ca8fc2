package transfer

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"net/http"
	"os"
	"strconv"
	"sync"
	"time"

	"github.com/snapferry/snapferry/raftsnap/protocol"
	"github.com/snapferry/snapferry/raftsnap/snapstore"
	"github.com/snapferry/snapferry/snapshot"
)

const (
	// serveSlice is how much is sent between two looks at lease, pace and deadline.
	serveSlice = 1 << 20
	// leastSlice is the same of an answer that begins, or that the pace holds up: with 16
	// requests at a time and 15 s until a receiver takes a source for dead, that keeps a
	// rate of 5 kB/s from looking like a stall.
	leastSlice = 4 << 10
	// A slice that waited for less than waitShort is followed by one twice as long, and
	// one that waited for more than waitLong by one of half the length.
	waitShort, waitLong = 100 * time.Millisecond, time.Second
	// smallExtent is below which reading and writing is cheaper than handing the kernel
	// the file, which flushes what is buffered.
	smallExtent = 64 << 10
)

// lease returns the lease of a key, taking it if there is none yet.
func (s *Server) lease(r *http.Request, k leaseKey) (*lease, []byte, error) {
	l, err := s.leases.find(k)
	if err == nil {
		return l, l.pin.Manifest(), nil
	}
	if asRefusal(err).Kind != protocol.Gone {
		return nil, nil, err
	}
	pin, err := s.store.Pin(k.id, string(k.holder))
	if err != nil {
		return nil, nil, s.readError(k.id, err)
	}
	l, manifest, err := s.newLease(r.Context(), k, pin)
	if err == nil {
		l.peer = s.opts.Peer(r)
		var kept *lease
		if kept, err = s.leases.add(l); kept == l {
			return l, manifest, nil
		}
		l = kept
	}
	return l, manifest, errors.Join(err, pin.Close())
}

// newLease verifies what pin holds and makes a lease of it.
func (s *Server) newLease(ctx context.Context, k leaseKey, pin *snapstore.Pin) (*lease, []byte, error) {
	if err := s.checks.verified(ctx, k.id); err != nil {
		return nil, nil, err
	}
	data := pin.Manifest()
	m, err := snapstore.DecodeManifest(data)
	if err != nil {
		return nil, nil, s.readError(k.id, err)
	}
	l := &lease{key: k, pin: pin, bytes: m.Bytes(), sizes: make([]int64, len(m.Index.Entries))}
	for i := range m.Index.Entries {
		l.sizes[i] = -1
		if e := &m.Index.Entries[i]; e.Type == snapshot.Regular && !e.IsLink() {
			l.sizes[i] = e.Size
		}
	}
	return l, data, nil
}

// readError makes a refusal of an error of the store. Damage leads to quarantine.
func (s *Server) readError(id protocol.ID, err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, snapstore.ErrCorrupt):
		return s.checks.condemn(id, err)
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, fs.ErrClosed):
		return refusal(protocol.Gone, "%v", err)
	case errors.Is(err, snapstore.ErrClosed):
		return refusal(protocol.Closed, "closing")
	}
	return asRefusal(err)
}

// takeLease answers that there is a lease, old or new. An old one is not renewed by it.
func (s *Server) takeLease(w http.ResponseWriter, r *http.Request, k leaseKey) error {
	l, _, err := s.lease(r, k)
	if err != nil {
		return err
	}
	return writeControl(w, leaseAnswer{Bytes: l.bytes, Expires: s.opts.Lease})
}

// manifest sends the manifest; whoever has it also has a lease.
func (s *Server) manifest(w http.ResponseWriter, r *http.Request, k leaseKey) error {
	_, data, err := s.lease(r, k)
	if err != nil {
		return err
	}
	s.beginData(w, http.StatusOK, int64(len(data)))
	// No lease is renewed by it: whoever asks for manifests only is reading nothing.
	return s.aborting(s.write(w, data))
}

// file sends a file or a range of it.
func (s *Server) file(w http.ResponseWriter, r *http.Request, k leaseKey, number string) error {
	l, err := s.leases.find(k)
	if err != nil {
		return err
	}
	n, err := strconv.Atoi(number)
	if err != nil || strconv.Itoa(n) != number || n < 0 || n >= len(l.sizes) || l.sizes[n] < 0 {
		return refusal(Malformed, "file %.20q of %d", number, len(l.sizes))
	}
	header := r.Header.Get("Range")
	off, length, err := readRange(header, l.sizes[n])
	if err != nil {
		return err
	}
	f, err := s.open(l, extent{n, off, length})
	if err != nil {
		return err
	}
	defer f.Close()

	status := http.StatusOK
	if header != "" {
		status = http.StatusPartialContent
		w.Header().Set("Content-Range", contentRange(off, length, l.sizes[n]))
	}
	s.beginData(w, status, length)
	return s.aborting(s.answer(w, r, l).send(f, length))
}

// pieces sends several extents, of several files, one after the other: a thousand small
// files cost a few requests.
func (s *Server) pieces(w http.ResponseWriter, r *http.Request, k leaseKey) error {
	var q piecesRequest
	if err := readJSON(r, maxRequest, &q); err != nil {
		return err
	}
	l, err := s.leases.find(k)
	if err != nil {
		return err
	}
	total, err := checkExtents(q.Extents, l.sizes)
	if err != nil {
		return err
	}
	s.beginData(w, http.StatusOK, total)
	a := s.answer(w, r, l)
	for _, e := range q.Extents {
		if err := a.sendExtent(e); err != nil {
			return s.aborting(err)
		}
	}
	return nil
}

// checkExtents returns the sum of the lengths of extents that all lie within their files.
func checkExtents(extents []extent, sizes []int64) (total int64, err error) {
	if len(extents) == 0 || len(extents) > maxExtents {
		return 0, refusal(Malformed, "%d extents, want 1 to %d", len(extents), maxExtents)
	}
	for _, e := range extents {
		if e.file < 0 || e.file >= len(sizes) || sizes[e.file] < 0 {
			return 0, refusal(Malformed, "file %d of %d", e.file, len(sizes))
		}
		if e.offset < 0 || e.length <= 0 || e.length > maxPieces || e.offset > sizes[e.file]-e.length {
			return 0, refusal(Malformed, "extent %d+%d of a file of %d bytes", e.offset, e.length, sizes[e.file])
		}
		if total += e.length; total > maxPieces {
			return 0, refusal(Malformed, "over %d bytes in one request", int64(maxPieces))
		}
	}
	return total, nil
}

// open opens a file for reading at the extent's offset.
func (s *Server) open(l *lease, e extent) (*os.File, error) {
	f, size, err := l.pin.Open(e.file)
	if errors.Is(err, snapstore.ErrClosed) { // the lease has just ended
		return nil, refusal(protocol.Gone, "the lease has ended")
	}
	if err != nil {
		return nil, s.readError(l.key.id, err)
	}
	if size < e.offset+e.length {
		f.Close()
		return nil, refusal(protocol.Gone, "file %d has %d bytes, not %d", e.file, size, l.sizes[e.file])
	}
	if _, err := f.Seek(e.offset, io.SeekStart); err != nil {
		f.Close()
		return nil, s.readError(l.key.id, err)
	}
	return f, nil
}

// answer is one that is being sent under a lease.
type answer struct {
	s     *Server
	w     http.ResponseWriter
	r     *http.Request
	lease *lease
	slice int64 // how much is paid for at a time
	slow  bool  // the last wait for the pace was not short
}

func (s *Server) answer(w http.ResponseWriter, r *http.Request, l *lease) *answer {
	return &answer{s: s, w: w, r: r, lease: l, slice: leastSlice}
}

func (a *answer) sendExtent(e extent) error {
	f, err := a.s.open(a.lease, e)
	if err != nil {
		return err
	}
	defer f.Close()
	return a.send(f, e.length)
}

// beginData starts an answer whose length is known, which is what lets the kernel copy
// files into the connection and the receiver tell a cut answer from a whole one.
func (s *Server) beginData(w http.ResponseWriter, status int, length int64) {
	h := w.Header()
	h.Set("Content-Type", "application/octet-stream")
	h.Set("Content-Length", strconv.FormatInt(length, 10))
	h.Set("Cache-Control", "no-store")
	w.WriteHeader(status)
	s.requests.Add(1)
}

// aborting ends an answer that has begun: what is wrong then can only be told by cutting
// the connection.
func (s *Server) aborting(err error) error {
	if err != nil {
		panic(http.ErrAbortHandler)
	}
	return nil
}

var buffers = sync.Pool{New: func() any { return new([smallExtent]byte) }}

// send sends length bytes of f from where it stands.
func (a *answer) send(f *os.File, length int64) error {
	rc := http.NewResponseController(a.w)
	for length > 0 {
		n := min(length, a.slice)
		if err := a.pace(n); err != nil {
			return err
		}
		if err := a.s.extend(rc); err != nil {
			return err
		}
		moved, err := copySlice(a.w, f, n)
		a.s.count(a.lease, moved)
		if err == nil && a.slow {
			err = flush(rc) // the next slice may be long in coming
		}
		if err != nil {
			return err
		}
		length -= n
	}
	return nil
}

// flush sends what is buffered. A writer that cannot be told to has its own ways.
func flush(rc *http.ResponseController) error {
	if err := rc.Flush(); !errors.Is(err, http.ErrNotSupported) {
		return err
	}
	return nil
}

// copySlice copies n bytes, by the kernel where that pays.
func copySlice(w io.Writer, f *os.File, n int64) (int64, error) {
	if n > smallExtent {
		return io.CopyN(w, f, n)
	}
	buf := buffers.Get().(*[smallExtent]byte)
	defer buffers.Put(buf)
	if _, err := io.ReadFull(f, buf[:n]); err != nil {
		return 0, err
	}
	moved, err := w.Write(buf[:n])
	return int64(moved), err
}

// write sends bytes in slices.
func (s *Server) write(w http.ResponseWriter, data []byte) error {
	rc := http.NewResponseController(w)
	for len(data) > 0 {
		if err := s.extend(rc); err != nil {
			return err
		}
		n, err := w.Write(data[:min(len(data), serveSlice)])
		s.count(nil, int64(n))
		if err != nil {
			return err
		}
		data = data[n:]
	}
	return nil
}

// extend gives the receiver time for one more slice, unless the Server is being closed. A
// writer that knows no deadlines has its own.
func (s *Server) extend(rc *http.ResponseController) error {
	err := rc.SetWriteDeadline(time.Now().Add(s.opts.Stall))
	if s.ctx.Err() != nil {
		return s.ctx.Err()
	}
	if errors.Is(err, http.ErrNotSupported) {
		return nil
	}
	return err
}

// pace waits until n bytes may be sent, and learns from the wait how many it should be the
// next time: a receiver must see bytes now and then also under a low limit.
func (a *answer) pace(n int64) error {
	s := a.s
	began := time.Now()
	if err := s.pace(a.r.Context(), n); err != nil {
		return err
	}
	waited := time.Since(began)
	a.slow = waited >= waitShort
	switch {
	case !a.slow:
		a.slice = min(2*a.slice, serveSlice)
	case waited > waitLong:
		a.slice = max(a.slice/2, leastSlice)
	}
	return nil
}

func (s *Server) pace(ctx context.Context, n int64) error {
	if s.opts.Work == nil || s.opts.Work.Wait == nil {
		return s.ctx.Err()
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(s.ctx, cancel)()
	return s.opts.Work.Wait(ctx, int(n))
}

// count renews a lease by what was moved under it; l is nil for what needs none.
func (s *Server) count(l *lease, n int64) {
	if n <= 0 {
		return
	}
	s.served.Add(n)
	if l != nil {
		s.leases.move(l, n)
	}
}

// chunk sends a chunk that some snapshot here has (R10).
func (s *Server) chunk(w http.ResponseWriter, name string) error {
	d, err := snapshot.ParseDigest(name)
	if err != nil {
		return refusal(Malformed, "digest %.80q", name)
	}
	data, err := s.store.Chunk(d)
	if err != nil {
		return refusal(protocol.Gone, "no chunk with that digest")
	}
	s.beginData(w, http.StatusOK, int64(len(data)))
	return s.aborting(s.write(w, data))
}

// doubt reads a chunk again that a receiver found to be wrong. If it is wrong here, the
// snapshot is damaged, whatever an earlier verification found.
func (s *Server) doubt(w http.ResponseWriter, r *http.Request, k leaseKey) error {
	var q doubtRequest
	if err := readControl(r, &q); err != nil {
		return err
	}
	l, manifest, err := s.lease(r, k)
	if err != nil {
		return err
	}
	m, err := snapstore.DecodeManifest(manifest)
	if err != nil {
		return s.readError(k.id, err)
	}
	c, err := findChunk(m, q)
	if err != nil {
		return err
	}
	if err := s.reread(l, q.File, c); err != nil {
		return s.readError(k.id, err)
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

func findChunk(m *snapstore.Manifest, q doubtRequest) (snapshot.Chunk, error) {
	if q.File >= 0 && q.File < len(m.Index.Entries) {
		for _, c := range m.Index.Entries[q.File].Chunks {
			if c.Offset == q.Offset {
				return c, nil
			}
		}
	}
	return snapshot.Chunk{}, refusal(Malformed, "no chunk at %d of file %d", q.Offset, q.File)
}

// reread returns ErrCorrupt if a chunk's bytes do not fit its digest.
func (s *Server) reread(l *lease, file int, c snapshot.Chunk) error {
	f, err := s.open(l, extent{file, c.Offset, int64(c.Length)})
	if err != nil {
		return err
	}
	defer f.Close()
	data := make([]byte, c.Length)
	if _, err := io.ReadFull(f, data); err != nil {
		return err
	}
	if snapshot.Sum(data) != c.Digest {
		return &damage{file, c.Offset}
	}
	return nil
}

// damage says which chunk is not what the manifest says.
type damage struct {
	file   int
	offset int64
}

func (d *damage) Error() string {
	return "file " + strconv.Itoa(d.file) + " at " + strconv.FormatInt(d.offset, 10) + ": corrupt chunk"
}

// Is makes damage an ErrCorrupt.
func (d *damage) Is(target error) bool { return target == snapstore.ErrCorrupt }
