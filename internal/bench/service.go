package bench

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/client"
	"github.com/sluice-ml/sluice/service"
	"github.com/sluice-ml/sluice/service/access"
)

// serviceJobs measure a service's data plane over loopback, in one process with its client.
func (b *bench) serviceJobs(p *place) []job {
	return []job{
		{name: "service: download, one connection", unit: "GB/s", floor: "TCP sendfile of the file into a buffer", in: p,
			run: func(ctx context.Context) (float64, float64, error) { return b.download(ctx, p, 1, false, sendfile) }},
		{name: "service: download, four ranges", unit: "GB/s", floor: "four plain HTTP ranges into a buffer", in: p,
			run: func(ctx context.Context) (float64, float64, error) { return b.download(ctx, p, 4, false, plainRanges) }},
		{name: "service: download, staged, one connection", unit: "GB/s", floor: "TCP sendfile of the file into a buffer", in: p,
			run: func(ctx context.Context) (float64, float64, error) { return b.download(ctx, p, 1, true, sendfile) }},
		{name: "service: download, staged, four ranges", unit: "GB/s", floor: "four plain HTTP ranges into a buffer", in: p,
			run: func(ctx context.Context) (float64, float64, error) { return b.download(ctx, p, 4, true, plainRanges) }},
		{name: "service: upload", unit: "GB/s", floor: "plain HTTP upload into a file, 1 MiB buffers", in: p,
			run: func(ctx context.Context) (float64, float64, error) { return b.upload(ctx, p) }},
		{name: "service: map and release a sample", unit: "us", time: true, in: p,
			run: func(ctx context.Context) (float64, float64, error) { return b.mapped(ctx, p) }},
	}
}

// served is a service with one sample in a run, and a client of it.
type served struct {
	dir, file string
	svc       *service.Service
	servers   []*http.Server
	clients   []*client.Client
	run       *client.Run // on the same host
	ref       sluice.Ref
}

func (b *bench) serve(ctx context.Context, p *place) (_ *served, err error) {
	s := &served{}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.close())
		}
	}()
	if s.dir, err = os.MkdirTemp(p.folder.Path, "row-"); err != nil {
		return nil, err
	}
	if s.svc, err = service.Open(ctx, service.Options{StateDir: filepath.Join(s.dir, "state"), StoreDir: filepath.Join(s.dir, "store"), MaxBytes: b.caps().MaxBytes, Logger: slog.New(slog.DiscardHandler)}); err != nil {
		return nil, err
	}
	c, err := s.dial(ctx, client.Options{}, true)
	if err != nil {
		return nil, err
	}
	schema, err := sluice.SchemaOf(sluice.EAGLE3)
	if err != nil {
		return nil, err
	}
	if _, err := c.CreateRun(ctx, sluice.RunConfig{RunID: runID, Schema: schema, Caps: b.caps()}); err != nil {
		return nil, err
	}
	if s.run, err = c.Open(ctx, runID); err != nil {
		return nil, err
	}
	if s.ref, err = s.run.Store().Put(ctx, b.newSample(), sluice.Reservation{}); err != nil {
		return nil, err
	}
	if _, err := s.run.Queue().Put(ctx, sluice.PutRequest{Ref: s.ref}); err != nil { // so that a release does not free it
		return nil, err
	}
	s.file = filepath.Join(s.svc.StoreDir(), "runs", runID, s.ref.SampleID()+".safetensors")
	return s, nil
}

// dial listens anew, on a unix socket or over TCP, and makes a client of that.
func (s *served) dial(ctx context.Context, o client.Options, local bool) (*client.Client, error) {
	caller := access.Caller{Name: "bench", Role: access.Operator, UID: -1}
	var l net.Listener
	var err error
	if local {
		caller.UID = os.Getuid()
		o.URL = "unix:" + filepath.Join(s.dir, "sock")
		l, err = new(net.ListenConfig).Listen(ctx, "unix", filepath.Join(s.dir, "sock"))
	} else if l, err = new(net.ListenConfig).Listen(ctx, "tcp", "127.0.0.1:0"); err == nil {
		o.URL = "http://" + l.Addr().String()
	}
	if err != nil {
		return nil, err
	}
	h := &http.Server{ReadHeaderTimeout: time.Minute, Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		s.svc.Handler().ServeHTTP(w, r.WithContext(access.WithCaller(r.Context(), caller)))
	})}
	s.servers = append(s.servers, h)
	go func() { _ = h.Serve(l) }() // ends with close
	o.Logger = slog.New(slog.DiscardHandler)
	c, err := client.Dial(ctx, o)
	if err == nil {
		s.clients = append(s.clients, c)
	}
	return c, err
}

func (s *served) close() error {
	var errs []error
	for _, c := range s.clients {
		errs = append(errs, c.Close())
	}
	for _, h := range s.servers {
		errs = append(errs, h.Close())
	}
	if s.svc != nil {
		errs = append(errs, s.svc.Close(context.Background()))
	}
	if s.dir != "" {
		errs = append(errs, os.RemoveAll(s.dir))
	}
	return errors.Join(errs...)
}

// get is a turn in which a fresh sample is put into one store, and got from another and released there; only the get counts.
func get(sample *sluice.Sample, to, from sluice.Store) turn {
	return func(ctx context.Context) (time.Duration, error) {
		ref, err := to.Put(ctx, sample, sluice.Reservation{})
		if err != nil {
			return 0, err
		}
		begun := time.Now()
		t, err := from.Get(ctx, ref)
		took := time.Since(begun)
		if err != nil {
			return 0, err
		}
		return took, t.Release(ctx) // which frees what nobody claims
	}
}

// download gets samples that nobody has got before: uploaded by the service, which sums them on their way, or staged by a client, which does.
func (b *bench) download(ctx context.Context, p *place, ranges int, staged bool, floor func(file string) (turn, func() error, error)) (value, _ float64, err error) {
	s, err := b.serve(ctx, p)
	if err != nil {
		return 0, 0, err
	}
	defer func() { err = errors.Join(err, s.close()) }()
	c, err := s.dial(ctx, client.Options{HTTPOnly: true, Ranges: ranges}, false)
	if err != nil {
		return 0, 0, err
	}
	run, err := c.Open(ctx, runID)
	if err != nil {
		return 0, 0, err
	}
	plain, stop, err := floor(s.file)
	if err != nil {
		return 0, 0, err
	}
	defer func() { err = errors.Join(err, stop()) }()
	sample := b.newSample()
	sample.SampleID = "down"
	to := run.Store()
	if staged {
		to = s.run.Store()
	}
	return b.gbPerS(b.turns(ctx, 9, plain, get(sample, to, run.Store())))
}

// sendfile has the kernel send the file over a TCP connection, into memory that is fresh, as that of a sample is.
func sendfile(file string) (turn, func() error, error) {
	l, err := new(net.ListenConfig).Listen(context.Background(), "tcp", "127.0.0.1:0")
	if err != nil {
		return nil, nil, err
	}
	return timed(func(ctx context.Context) error {
		f, err := os.Open(file)
		if err != nil {
			return err
		}
		defer f.Close() //nolint:errcheck // it was only read
		info, err := f.Stat()
		if err != nil {
			return err
		}
		var g errgroup.Group
		g.Go(func() error {
			conn, err := l.Accept()
			if err != nil {
				return err
			}
			_, err = io.Copy(conn, f)
			return errors.Join(err, conn.Close())
		})
		conn, err := new(net.Dialer).DialContext(ctx, "tcp", l.Addr().String())
		if err != nil {
			return errors.Join(err, l.Close(), g.Wait())
		}
		_, err = io.ReadFull(conn, make([]byte, info.Size()))
		return errors.Join(err, conn.Close(), g.Wait())
	}), l.Close, nil
}

// plainRanges fetches a quarter of the file from net/http's file server by each of four connections.
func plainRanges(file string) (turn, func() error, error) {
	l, err := new(net.ListenConfig).Listen(context.Background(), "tcp", "127.0.0.1:0")
	if err != nil {
		return nil, nil, err
	}
	h := &http.Server{ReadHeaderTimeout: time.Minute, Handler: http.FileServer(http.Dir(filepath.Dir(file)))}
	go func() { _ = h.Serve(l) }() // ends with stop
	transport := &http.Transport{MaxIdleConnsPerHost: 4}
	stop := func() error { transport.CloseIdleConnections(); return h.Close() }
	info, err := os.Stat(file)
	if err != nil {
		return nil, nil, errors.Join(err, stop())
	}
	return timed(func(ctx context.Context) error {
		buf := make([]byte, info.Size())
		g, ctx := errgroup.WithContext(ctx)
		for i := range 4 {
			from, to := len(buf)*i/4, len(buf)*(i+1)/4
			g.Go(func() error {
				req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+l.Addr().String()+"/"+filepath.Base(file), http.NoBody)
				if err != nil {
					return err
				}
				req.Header.Set("Range", "bytes="+strconv.Itoa(from)+"-"+strconv.Itoa(to-1))
				resp, err := transport.RoundTrip(req)
				if err != nil {
					return err
				}
				_, err = io.ReadFull(resp.Body, buf[from:to])
				return errors.Join(err, resp.Body.Close())
			})
		}
		return g.Wait()
	}), stop, nil
}

func (b *bench) upload(ctx context.Context, p *place) (value, _ float64, err error) {
	s, err := b.serve(ctx, p)
	if err != nil {
		return 0, 0, err
	}
	defer func() { err = errors.Join(err, s.close()) }()
	c, err := s.dial(ctx, client.Options{HTTPOnly: true}, false)
	if err != nil {
		return 0, 0, err
	}
	run, err := c.Open(ctx, runID)
	if err != nil {
		return 0, 0, err
	}
	sample := b.newSample()
	sample.SampleID = "up"
	put := func(ctx context.Context) (time.Duration, error) {
		begun := time.Now()
		ref, err := run.Store().Put(ctx, sample, sluice.Reservation{})
		took := time.Since(begun)
		if err != nil {
			return 0, err
		}
		return took, run.Store().Abort(ctx, ref)
	}
	plain, stop, err := plainUpload(s.file)
	if err != nil {
		return 0, 0, err
	}
	defer func() { err = errors.Join(err, stop()) }()
	return b.gbPerS(b.turns(ctx, 9, plain, put))
}

// plainUpload sends the file's bytes to a server that copies them into a file beside it, which is there already, as a store's recycled ones are.
func plainUpload(file string) (turn, func() error, error) {
	data, err := os.ReadFile(file)
	if err != nil {
		return nil, nil, err
	}
	to := file + ".floor"
	l, err := new(net.ListenConfig).Listen(context.Background(), "tcp", "127.0.0.1:0")
	if err != nil {
		return nil, nil, err
	}
	buf := make([]byte, 1<<20)
	h := &http.Server{ReadHeaderTimeout: time.Minute, Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		f, err := os.OpenFile(to, os.O_WRONLY|os.O_CREATE, 0o600)
		if err == nil {
			_, err = io.CopyBuffer(struct{ io.Writer }{f}, struct{ io.Reader }{r.Body}, buf)
			err = errors.Join(err, f.Close())
		}
		if err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
		}
	})}
	go func() { _ = h.Serve(l) }() // ends with stop
	transport := &http.Transport{}
	stop := func() error { transport.CloseIdleConnections(); return errors.Join(h.Close(), os.RemoveAll(to)) }
	return timed(func(ctx context.Context) error {
		req, err := http.NewRequestWithContext(ctx, http.MethodPut, "http://"+l.Addr().String()+"/", bytes.NewReader(data))
		if err != nil {
			return err
		}
		resp, err := transport.RoundTrip(req)
		if err != nil {
			return err
		}
		if resp.StatusCode != http.StatusOK {
			err = fmt.Errorf("the floor's upload: %s", resp.Status)
		}
		return errors.Join(err, resp.Body.Close())
	}), stop, nil
}

func (b *bench) mapped(ctx context.Context, p *place) (value, _ float64, err error) {
	s, err := b.serve(ctx, p)
	if err != nil {
		return 0, 0, err
	}
	defer func() { err = errors.Join(err, s.close()) }()
	nothing := func(context.Context) (time.Duration, error) { return 0, nil }
	_, took, err := b.turns(ctx, 200, nothing, timed(func(ctx context.Context) error {
		t, err := s.run.Store().Get(ctx, s.ref)
		if err != nil {
			return err
		}
		return t.Release(ctx)
	}))
	return took * 1e6, 0, err
}
