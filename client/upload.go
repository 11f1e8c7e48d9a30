package client

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"time"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/internal/wire"
	"github.com/sluice-ml/sluice/safetensors"
)

// upload streams the file to the service, again from its beginning if the connection breaks: half a file is never visible.
func (s *store) upload(ctx context.Context, ref sluice.Ref, layout *safetensors.Layout, features []sluice.Feature, r sluice.Reservation) error {
	bufs, err := layout.Buffers(features)
	if err != nil {
		return err
	}
	path := s.path("/samples/" + url.PathEscape(ref.SampleID()))
	if r.ID != "" {
		path += "?reservation=" + url.QueryEscape(r.ID)
	}
	fields, err := json.Marshal(fieldsOf(ref))
	if err != nil {
		return err
	}
	id := s.c.newRequestID()
	var pause backoff
	since := time.Now()
	for attempts := 1; ; attempts++ {
		body := &uploadBody{ctx: ctx, bufs: bufs}
		err := s.uploadOnce(ctx, path, id, string(fields), layout.Size(), body)
		var l *lost
		if !errors.As(err, &l) {
			return s.echo(ctx, ref, attempts, err)
		}
		if cause := context.Cause(ctx); cause != nil {
			s.takeBack(ctx, ref)
			return cause
		}
		if waited := time.Since(since); waited >= s.c.patience+body.took {
			return s.c.unavailable(l.err, waited)
		}
		if err := pause.wait(ctx); err != nil {
			s.takeBack(ctx, ref)
			return err
		}
		if err := s.c.open(); err != nil {
			return err
		}
	}
}

// takeBack makes sure that an upload which was given up has left nothing. The service answers when it has seen the end of it.
func (s *store) takeBack(ctx context.Context, ref sluice.Ref) {
	ctx, cancel := background(ctx)
	defer cancel()
	if err := s.Abort(ctx, ref); err != nil && !errors.Is(err, sluice.ErrClosed) {
		s.c.log.Warn("client: can't take back an upload that was given up", "run", s.run, "sample", ref.SampleID(), "error", err)
	}
}

func (s *store) uploadOnce(ctx context.Context, path, id, fields string, size int64, body *uploadBody) error {
	began := time.Now()
	defer func() { body.took = time.Since(began) }()
	// Once all is sent, the call is as good as done: it is not given up with ctx, so that it does not end undecided. Until then the body sees to that.
	longer, stop := outlive(ctx)
	defer stop()
	longer, cancel := context.WithCancelCause(longer)
	defer cancel(nil)
	body.watch = time.AfterFunc(stall, func() { cancel(fmt.Errorf("nothing moved for %v", stall)) })
	defer body.watch.Stop()
	req, err := s.c.request(longer, http.MethodPut, path, id)
	if err != nil {
		return err
	}
	req.Body, req.ContentLength = body, size
	req.Header.Set("Content-Type", "application/octet-stream")
	req.Header.Set(wire.SampleHeader, fields)
	req.Header.Set("Expect", "100-continue") // a refusal comes before the bytes
	resp, err := s.c.http.Do(req)
	if err != nil {
		return &lost{err}
	}
	a, err := answered(resp)
	if err != nil {
		return err
	}
	return decode(req.Method, path, a, nil)
}

// uploadBody is the file as a request's body. It ends with an error when ctx does.
type uploadBody struct {
	ctx   context.Context
	bufs  [][]byte
	watch *time.Timer
	took  time.Duration
}

func (b *uploadBody) Read(p []byte) (n int, err error) {
	if err := context.Cause(b.ctx); err != nil && len(b.bufs) > 0 {
		return 0, err
	}
	b.watch.Reset(stall)
	for n < len(p) && len(b.bufs) > 0 {
		m := copy(p[n:], b.bufs[0])
		n += m
		if m < len(b.bufs[0]) {
			// bufs is shared between attempts, its slices are not changed in place.
			b.bufs = append([][]byte{b.bufs[0][m:]}, b.bufs[1:]...)
		} else {
			b.bufs = b.bufs[1:]
		}
	}
	if n == 0 && len(b.bufs) == 0 {
		return 0, io.EOF
	}
	return n, nil
}

func (b *uploadBody) Close() error { return nil }
