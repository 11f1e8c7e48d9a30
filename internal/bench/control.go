package bench

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/client"
	"github.com/sluice-ml/sluice/internal/httpcall"
	"github.com/sluice-ml/sluice/internal/wire"
	"github.com/sluice-ml/sluice/journal/natsjournal"
	"github.com/sluice-ml/sluice/service"
	"github.com/sluice-ml/sluice/service/access"
	"github.com/sluice-ml/sluice/store/dirstore"
)

const (
	callers   = 16 // clients of the control plane at once
	manyAtOne = 64 // samples a call, where calls are batched
)

// controlJobs measure the calls of the service: over HTTP on TCP loopback, through its door.
func (b *bench) controlJobs(places []*place) []job {
	memory := places[0]
	jobs := []job{
		{name: "service: reserve-commit-acquire-settle, 16 callers, no bytes", unit: "cycles/s", floor: "four calls of a JSON echo with the same bodies", in: memory,
			run: func(ctx context.Context) (float64, float64, error) { return b.controlOne(ctx, memory) }},
		{name: "service: the same by 64 a call, no bytes", unit: "cycles/s", floor: "one a call", in: memory,
			run: func(ctx context.Context) (float64, float64, error) { return b.controlMany(ctx, memory) }},
		{name: "service: commit to a waiting acquire, no bytes", unit: "µs", floor: "one call of a JSON echo with the commit's body", time: true, in: memory,
			run: func(ctx context.Context) (float64, float64, error) { return b.controlWake(ctx, memory) }},
	}
	for _, disk := range places[1:] {
		jobs = append(jobs, job{name: "service: reserve-commit-acquire-settle, 16 callers, power, journal on disk, no bytes", unit: "cycles/s", floor: "the bare journal appends of the same cycles", in: disk, also: memory,
			run: func(ctx context.Context) (float64, float64, error) {
				return b.controlPower(ctx, memory, disk, b.few(), 1)
			}})
		jobs = append(jobs, job{name: "service: the same by 64 a call, power, journal on disk, no bytes", unit: "cycles/s", floor: "the bare journal appends, one cycle at a time", in: disk, also: memory,
			run: func(ctx context.Context) (float64, float64, error) {
				return b.controlPower(ctx, memory, disk, b.many(), manyAtOne)
			}})
	}
	return jobs
}

// plant is a service behind its door, with what its callers need.
type plant struct {
	url, token string
	calls      *httpcall.Caller // of the service
	http       *http.Client     // of the echo
	run        *client.Run      // nil: a JSON echo
	stored     []sluice.Ref     // not committed yet
	made       int
	taps       *taps
	close      func() error
}

// newPlant starts a service with a run, with its samples in one folder and its journals in another.
func newPlant(ctx context.Context, samples, journals string, durability dirstore.Durability) (_ *plant, err error) {
	p := &plant{taps: &taps{}}
	alone := service.AddProcessor() // as sluice serve does; the floor has it too
	undo := []func() error{func() error { alone(); return nil }}
	p.close = func() error {
		var errs []error
		for _, f := range slices.Backward(undo) {
			errs = append(errs, f())
		}
		return errors.Join(errs...)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, p.close())
		}
	}()
	var dirs [2]string
	for i, folder := range []string{samples, journals} {
		if dirs[i], err = os.MkdirTemp(folder, "row-"); err != nil {
			return nil, err
		}
		undo = append(undo, func() error { return os.RemoveAll(dirs[i]) })
	}
	quiet := slog.New(slog.DiscardHandler)
	state := filepath.Join(dirs[1], "state")
	level := natsjournal.Process
	if durability == dirstore.Power {
		level = natsjournal.Power
	}
	if p.taps.Journals, err = natsjournal.Open(ctx, filepath.Join(dirs[1], "journal"), &natsjournal.Options{Durability: level, Logger: quiet}); err != nil {
		return nil, err
	}
	s, err := service.Open(ctx, service.Options{StateDir: state, StoreDir: filepath.Join(dirs[0], "store"), Durability: durability, Journals: p.taps, Logger: quiet})
	if err != nil {
		return nil, errors.Join(err, p.taps.Close())
	}
	undo = append(undo, func() error { return s.Close(context.WithoutCancel(ctx)) })
	door, err := access.Open(access.Options{StateDir: state, Listen: "127.0.0.1:0", Log: quiet})
	if err != nil {
		return nil, err
	}
	serving, stop := context.WithCancel(context.WithoutCancel(ctx))
	served := make(chan error, 1)
	go func() { served <- door.Serve(serving, s.Handler()) }() // ends with serving, and is waited for
	undo = append(undo, func() error { stop(); return <-served })
	tokens, err := wire.ReadTokens(state)
	if err != nil {
		return nil, err
	}
	i := slices.IndexFunc(tokens, func(t wire.Token) bool { return t.Role == string(access.Operator) })
	p.url, p.token = door.Endpoint().URL, tokens[i].Value
	if p.calls, err = newCaller(p.url, p.token); err != nil {
		return nil, err
	}
	undo = append(undo, func() error { p.calls.End(net.ErrClosed); return nil })
	c, err := client.Dial(ctx, client.Options{URL: p.url, Token: p.token, Logger: quiet})
	if err != nil {
		return nil, err
	}
	undo = append(undo, c.Close)
	schema, err := sluice.SchemaOf(sluice.EAGLE3)
	if err != nil {
		return nil, err
	}
	if _, err := c.CreateRun(ctx, sluice.RunConfig{RunID: runID, Schema: schema, Caps: sluice.Caps{MaxBytes: 1 << 30}}); err != nil {
		return nil, err
	}
	if p.run, err = c.Open(ctx, runID); err != nil {
		return nil, err
	}
	return p, nil
}

// newCaller are as those of package client.
func newCaller(to, token string) (*httpcall.Caller, error) {
	u, err := url.Parse(to)
	if err != nil {
		return nil, err
	}
	return httpcall.New(func(ctx context.Context) (net.Conn, error) { return new(net.Dialer).DialContext(ctx, "tcp", u.Host) }, u.Host, "", "Authorization: Bearer "+token)
}

func newHTTPClient() *http.Client {
	return &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: callers + 2, DisableCompression: true}}
}

// smallSample is as an eagle3 sample is, with next to no bytes: its ref is as long as any.
func smallSample(id string) *sluice.Sample {
	b := bench{tokens: 2}
	s := b.newSample()
	s.SampleID = id
	for _, f := range []struct{ i, width int64 }{{0, 3 * 8}, {4, 8}} {
		s.Features[f.i].Tensor = sluice.NewTensor(sluice.BFloat16, 1, b.tokens, f.width)
	}
	return s
}

// store puts n samples into the run's store, to be committed.
func (p *plant) store(ctx context.Context, n int) error {
	refs := make([]sluice.Ref, n)
	err := spread(ctx, n, 1, func(ctx context.Context, _, from, _ int) error {
		ref, err := p.run.Store().Put(ctx, smallSample("s"+strconv.Itoa(p.made+from)), sluice.Reservation{})
		refs[from] = ref
		return err
	})
	p.made += n
	p.stored = refs
	return err
}

// spread lets the callers do n things, each some at a time.
func spread(ctx context.Context, n, each int, do func(ctx context.Context, caller, from, to int) error) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var next atomic.Int64
	var group sync.WaitGroup
	for c := range callers {
		group.Go(func() {
			for ctx.Err() == nil {
				from := int(next.Add(int64(each))) - each
				if from >= n {
					return
				}
				if err := do(ctx, c, from, min(from+each, n)); err != nil {
					cancel(err)
				}
			}
		})
	}
	group.Wait()
	return context.Cause(ctx)
}

// post makes one call: of the service as package client does, with its connections and its way to write and read bodies; of the echo as a Go program would without us.
func (p *plant) post(ctx context.Context, call string, in, out any) error {
	if p.run == nil {
		return p.postEcho(ctx, call, in, out)
	}
	body, err := wire.Append(nil, in)
	if err != nil {
		return err
	}
	a, err := p.calls.Do(ctx, &httpcall.Call{Method: http.MethodPost, Path: "/v1/runs/" + runID + "/" + call, Body: body, Limit: time.Minute, Most: 1 << 24})
	if err != nil {
		return err
	}
	if a.StatusCode/100 != 2 {
		return fmt.Errorf("%s was answered %d: %s", call, a.StatusCode, a.Body)
	}
	if out == nil || wire.Read(a.Body, out) {
		return nil
	}
	return json.Unmarshal(a.Body, out)
}

func (p *plant) postEcho(ctx context.Context, call string, in, out any) error {
	body, err := json.Marshal(in)
	if err != nil {
		return err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, p.url+"/v1/runs/"+runID+"/"+call, bytes.NewReader(body))
	if err != nil {
		return err
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("Authorization", "Bearer "+p.token)
	resp, err := p.http.Do(req)
	if err != nil {
		return err
	}
	answer, err := io.ReadAll(resp.Body)
	if err := errors.Join(err, resp.Body.Close()); err != nil {
		return err
	}
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("%s was answered %s: %s", call, resp.Status, answer)
	}
	return json.Unmarshal(answer, out)
}

// bodies are what the calls of a cycle send.
type bodies struct {
	reserve wire.Reserve
	commit  wire.Commit
	acquire wire.Acquire
	settle  wire.Settle
}

func newBodies(caller int, refs []sluice.Ref) *bodies {
	who := wire.Consumer{Name: "c" + strconv.Itoa(caller)}
	c := &bodies{acquire: wire.Acquire{Consumer: who, Max: len(refs), WaitSeconds: 10}, settle: wire.Settle{Consumer: who}}
	c.reserve.WaitSeconds = 10
	for i := range refs {
		c.reserve.Bytes = append(c.reserve.Bytes, refs[i].EstimatedBytes())
		c.commit.Items = append(c.commit.Items, wire.CommitItem{Ref: &refs[i]})
	}
	return c
}

// echo makes four calls of the cycle's bodies.
func (p *plant) echo(ctx context.Context, caller int, refs []sluice.Ref) error {
	c := newBodies(caller, refs)
	for range refs {
		c.settle.Settlements = append(c.settle.Settlements, wire.Settlement{Lease: sluice.NewLeaseID(), Verdict: sluice.Ack})
	}
	return errors.Join(p.post(ctx, "reserve", &c.reserve, &wire.Reserve{}), p.post(ctx, "commit", &c.commit, &wire.Commit{}),
		p.post(ctx, "acquire", &c.acquire, &wire.Acquire{}), p.post(ctx, "settle", &c.settle, &wire.Settle{}))
}

// cycle takes samples through the service, and returns the reservations, which uploads would have used up. One sample goes by the calls of package client, several by those of the API.
func (p *plant) cycle(ctx context.Context, caller int, refs []sluice.Ref) (room []string, err error) {
	if len(refs) == 1 {
		return p.cycleOne(ctx, caller, refs[0])
	}
	c := newBodies(caller, refs)
	var reserved wire.Reservations
	if err := p.post(ctx, "reserve", &c.reserve, &reserved); err != nil {
		return nil, err
	}
	for _, r := range reserved.Reservations {
		room = append(room, r.ID)
	}
	if len(room) != len(refs) {
		return room, fmt.Errorf("%d reservations of %d were granted", len(room), len(refs))
	}
	var committed wire.Commits
	if err := p.post(ctx, "commit", &c.commit, &committed); err != nil {
		return room, err
	}
	for i, r := range committed.Results {
		if r.Status != sluice.Enqueued {
			err := fmt.Errorf("commit of %s was answered %q, want %q", refs[i].SampleID(), r.Status, sluice.Enqueued)
			if r.Error != nil {
				err = errors.Join(err, r.Error.Err())
			}
			return room, err
		}
	}
	for left := len(refs); left > 0; {
		c.acquire.Max = left
		var got wire.Delivery
		if err := p.post(ctx, "acquire", &c.acquire, &got); err != nil {
			return room, err
		}
		if got.End {
			return room, errors.New("the run ended")
		}
		if len(got.Leases) == 0 {
			continue
		}
		left -= len(got.Leases)
		if err := p.ack(ctx, c, got.Leases); err != nil {
			return room, err
		}
	}
	return room, nil
}

func (p *plant) cycleOne(ctx context.Context, caller int, ref sluice.Ref) (room []string, err error) {
	q, who := p.run.Queue(), sluice.Consumer{Name: "c" + strconv.Itoa(caller)}
	r, err := q.Reserve(ctx, sluice.ReserveRequest{Bytes: ref.EstimatedBytes()})
	if err != nil {
		return nil, err
	}
	room = []string{r.ID}
	if status, err := q.Put(ctx, sluice.PutRequest{Ref: ref}); err != nil || status != sluice.Enqueued {
		return room, errors.Join(err, fmt.Errorf("the put of %s was answered %q, want %q", ref.SampleID(), status, sluice.Enqueued))
	}
	d, err := q.Acquire(ctx, sluice.AcquireRequest{Consumer: who, Max: 1, Wait: time.Minute})
	if err != nil || len(d.Leases) != 1 {
		return room, errors.Join(err, fmt.Errorf("acquire gave %d leases, want 1", len(d.Leases)))
	}
	settled, err := q.Settle(ctx, sluice.SettleRequest{Consumer: who, Settlements: []sluice.Settlement{{Lease: d.Leases[0].ID, Verdict: sluice.Ack}}})
	if err == nil && settled[0].Status != sluice.Settled {
		err = fmt.Errorf("the ack was answered %q, want %q", settled[0].Status, sluice.Settled)
	}
	return room, err
}

func (p *plant) ack(ctx context.Context, c *bodies, leases []wire.Lease) error {
	c.settle.Settlements = c.settle.Settlements[:0]
	for i := range leases {
		c.settle.Settlements = append(c.settle.Settlements, wire.Settlement{Lease: leases[i].ID, Verdict: sluice.Ack})
	}
	var settled wire.Settled
	if err := p.post(ctx, "settle", &c.settle, &settled); err != nil {
		return err
	}
	for _, r := range settled.Results {
		if r.Status != sluice.Settled {
			return fmt.Errorf("the ack was answered %q, want %q", r.Status, sluice.Settled)
		}
	}
	return nil
}

// cycles is a turn that takes n samples through the service, some a call. To store them before and to give the room back afterwards does not count.
func (p *plant) cycles(n, batch int) turn {
	return func(ctx context.Context) (time.Duration, error) {
		if err := p.store(ctx, n); err != nil {
			return 0, err
		}
		rooms := make([][]string, callers)
		took, err := timed(func(ctx context.Context) error {
			return spread(ctx, n, batch, func(ctx context.Context, c, from, to int) error {
				room, err := p.cycle(ctx, c, p.stored[from:to])
				rooms[c] = append(rooms[c], room...)
				return err
			})
		})(ctx)
		for part := range slices.Chunk(slices.Concat(rooms...), wire.MaxBatch) {
			err = errors.Join(err, p.post(ctx, "unreserve", &wire.Unreserve{Reservations: part}, nil))
		}
		return took, err
	}
}

// echoes is the turn of the floor, with the same bodies.
func (p *plant) echoes(refs []sluice.Ref) turn {
	return timed(func(ctx context.Context) error {
		return spread(ctx, len(refs), 1, func(ctx context.Context, c, from, to int) error { return p.echo(ctx, c, refs[from:to]) })
	})
}

// newEcho serves a JSON echo, and calls it as the service is called.
func newEcho(ctx context.Context) (*plant, error) {
	l, err := new(net.ListenConfig).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	mux := http.NewServeMux()
	for call, answer := range map[string]http.HandlerFunc{"reserve": echo[wire.Reserve], "commit": echo[wire.Commit], "acquire": echo[wire.Acquire], "settle": echo[wire.Settle]} {
		mux.HandleFunc("POST /v1/runs/{run}/"+call, answer)
	}
	s := &http.Server{Handler: mux, ReadHeaderTimeout: time.Minute}
	served := make(chan error, 1)
	go func() { served <- s.Serve(l) }() // ends with Close below
	p := &plant{url: "http://" + l.Addr().String(), token: "none", http: newHTTPClient()}
	p.close = func() error {
		p.http.CloseIdleConnections()
		err := s.Close()
		if end := <-served; !errors.Is(end, http.ErrServerClosed) {
			err = errors.Join(err, end)
		}
		return err
	}
	return p, nil
}

// echo answers what it is sent.
func echo[Body any](w http.ResponseWriter, r *http.Request) {
	var body Body
	if err := json.NewDecoder(r.Body).Decode(&body); err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(&body) // who is gone does not hear of it
}

// refs are refs for the floor, which stores nothing.
func (p *plant) refs(n int) ([]sluice.Ref, error) {
	refs := make([]sluice.Ref, n)
	for i := range refs {
		fields, err := smallSample("e"+strconv.Itoa(i)).RefFields(p.run.Info().StoreURI, sluice.NewGeneration())
		if err != nil {
			return nil, err
		}
		if refs[i], err = sluice.NewRef(fields); err != nil {
			return nil, err
		}
	}
	return refs, nil
}

// few is how many samples a turn takes, one a call.
func (b *bench) few() int {
	if b.o.Quick {
		return 2 * callers
	}
	return 50 * callers
}

func (b *bench) controlOne(ctx context.Context, at *place) (value, floor float64, err error) {
	n := b.few()
	p, err := newPlant(ctx, at.folder.Path, at.folder.Path, dirstore.Process)
	if err != nil {
		return 0, 0, err
	}
	defer func() { err = errors.Join(err, p.close()) }()
	e, err := newEcho(ctx)
	if err != nil {
		return 0, 0, err
	}
	defer func() { err = errors.Join(err, e.close()) }()
	refs, err := p.refs(n)
	if err != nil {
		return 0, 0, err
	}
	floorS, workS, err := b.turns(ctx, 31, e.echoes(refs), p.cycles(n, 1))
	return float64(n) / workS, float64(n) / floorS, err
}

// many is how many cycles a turn of batched ones has.
func (b *bench) many() int {
	if b.o.Quick {
		return callers * manyAtOne
	}
	return 4 * callers * manyAtOne
}

func (b *bench) controlMany(ctx context.Context, at *place) (value, floor float64, err error) {
	few, many := b.few(), b.many()
	p, err := newPlant(ctx, at.folder.Path, at.folder.Path, dirstore.Process)
	if err != nil {
		return 0, 0, err
	}
	defer func() { err = errors.Join(err, p.close()) }()
	floorS, workS, err := b.turns(ctx, 31, p.cycles(few, 1), p.cycles(many, manyAtOne))
	return float64(many) / workS, float64(few) / floorS, err
}

// controlPower makes n cycles by so many a call; the floor writes what one cycle writes alone, as often, from as many callers.
func (b *bench) controlPower(ctx context.Context, memory, disk *place, n, batch int) (value, floor float64, err error) {
	few := b.few()
	p, err := newPlant(ctx, memory.folder.Path, disk.folder.Path, dirstore.Power)
	if err != nil {
		return 0, 0, err
	}
	defer func() { err = errors.Join(err, p.close()) }()
	dir, err := os.MkdirTemp(disk.folder.Path, "row-")
	if err != nil {
		return 0, 0, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	journals, err := natsjournal.Open(ctx, dir, &natsjournal.Options{Durability: natsjournal.Power})
	if err != nil {
		return 0, 0, err
	}
	defer func() { err = errors.Join(err, journals.Close()) }()
	bare, err := journals.Journal(ctx, runID)
	if err != nil {
		return 0, 0, err
	}
	defer func() { err = errors.Join(err, bare.Close()) }()
	// One cycle alone tells what a cycle writes.
	if _, err := p.cycles(1, 1)(ctx); err != nil {
		return 0, 0, err
	}
	records := p.taps.seen()
	floorS, workS, err := b.turns(ctx, 31, timed(func(ctx context.Context) error {
		return spread(ctx, few, 1, func(ctx context.Context, _, _, _ int) error {
			for i := range records {
				if err := bare.Append(ctx, records[i:i+1]); err != nil {
					return err
				}
			}
			return nil
		})
	}), p.cycles(n, batch))
	return float64(n) / workS, float64(few) / floorS, err
}

// controlWake measures from the call of commit to the answer of the acquire that waited for it.
func (b *bench) controlWake(ctx context.Context, at *place) (value, floor float64, err error) {
	const times = 50
	p, err := newPlant(ctx, at.folder.Path, at.folder.Path, dirstore.Process)
	if err != nil {
		return 0, 0, err
	}
	defer func() { err = errors.Join(err, p.close()) }()
	e, err := newEcho(ctx)
	if err != nil {
		return 0, 0, err
	}
	defer func() { err = errors.Join(err, e.close()) }()
	refs, err := p.refs(1)
	if err != nil {
		return 0, 0, err
	}
	floorS, workS, err := b.turns(ctx, 31, func(ctx context.Context) (time.Duration, error) {
		c := newBodies(0, refs)
		took := make([]time.Duration, times)
		for i := range took {
			begun := time.Now()
			if err := e.post(ctx, "commit", &c.commit, &wire.Commit{}); err != nil {
				return 0, err
			}
			took[i] = time.Since(begun)
		}
		return median(took), nil
	}, func(ctx context.Context) (time.Duration, error) {
		if err := p.store(ctx, times); err != nil {
			return 0, err
		}
		took := make([]time.Duration, times)
		for i := range took {
			d, err := p.wake(ctx, p.stored[i:i+1])
			if err != nil {
				return 0, err
			}
			took[i] = d
		}
		return median(took), nil
	})
	return workS * 1e6, floorS * 1e6, err
}

// wake commits one sample while one consumer waits.
func (p *plant) wake(ctx context.Context, refs []sluice.Ref) (time.Duration, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	c := newBodies(0, refs)
	var got wire.Delivery
	var at time.Time
	acquired := make(chan error, 1)
	var consumer sync.WaitGroup
	consumer.Go(func() {
		err := p.post(ctx, "acquire", &c.acquire, &got)
		at = time.Now()
		acquired <- err
	})
	defer consumer.Wait()
	defer cancel()
	for {
		s, err := p.run.Queue().Status(ctx)
		if err != nil {
			return 0, err
		}
		if s.ConsumersWaiting > 0 {
			break
		}
	}
	begun := time.Now()
	if err := p.post(ctx, "commit", &c.commit, &wire.Commits{}); err != nil {
		return 0, err
	}
	if err := <-acquired; err != nil {
		return 0, err
	}
	if len(got.Leases) != 1 {
		return 0, fmt.Errorf("acquire gave %d leases, want 1", len(got.Leases))
	}
	return at.Sub(begun), p.ack(ctx, c, got.Leases)
}

// taps are journals that tell what went through the last ones.
type taps struct {
	*natsjournal.Journals

	mu      sync.Mutex
	records []sluice.Record
}

// tap is one of them.
type tap struct {
	sluice.Journal
	of *taps
}

func (t *taps) Journal(ctx context.Context, name string) (sluice.Journal, error) {
	j, err := t.Journals.Journal(ctx, name)
	if err != nil || name != runID {
		return j, err
	}
	return &tap{j, t}, nil
}

// mostTapped is more records than one cycle writes.
const mostTapped = 64

func (t *tap) Append(ctx context.Context, records []sluice.Record) error {
	t.of.mu.Lock()
	if len(t.of.records) < mostTapped {
		t.of.records = append(t.of.records, records...)
	}
	t.of.mu.Unlock()
	return t.Journal.Append(ctx, records)
}

// seen are the records of the cycle that was done alone: that of the put and what came behind it.
func (t *taps) seen() []sluice.Record {
	t.mu.Lock()
	defer t.mu.Unlock()
	return slices.Clone(t.records)
}
