package queue

import (
	"context"
	"fmt"
	"sync"
	"testing"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/queue/queuetest"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// newQueue opens a queue that the test stops.
func newQueue(t testing.TB, cfg sluice.RunConfig, store *queuetest.Store, opts *Options) *Queue {
	t.Helper()
	q, err := Open(context.Background(), cfg, store, opts)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { q.Stop(context.Background()) })
	return q
}

// fixture makes samples and puts them.
type fixture struct {
	t     testing.TB
	store *queuetest.Store
	cfg   sluice.RunConfig
	q     *Queue
	n     int
}

var roomy = sluice.Caps{MaxBytes: 1 << 40}

func newFixture(t testing.TB, edit func(*sluice.RunConfig), opts *Options) *fixture {
	t.Helper()
	cfg := sluice.RunConfig{RunID: "r1", Schema: queuetest.Schema(), Caps: roomy}
	if edit != nil {
		edit(&cfg)
	}
	f := &fixture{t: t, store: queuetest.NewStore(cfg.Caps), cfg: cfg}
	f.q = newQueue(t, cfg, f.store, opts)
	return f
}

// sample makes a sample in the store and returns its ref.
func (f *fixture) sample(id string, bytes int64) sluice.Ref {
	f.t.Helper()
	ref := queuetest.NewRef(f.store.URI(), "r1", id, bytes, nil)
	if err := f.store.Add(ref, sluice.Reservation{}); err != nil {
		f.t.Fatal(err)
	}
	return ref
}

// put puts n samples s0, s1, ... of 100 bytes.
func (f *fixture) put(n int) {
	f.t.Helper()
	for range n {
		ref := f.sample(fmt.Sprint("s", f.n), 100)
		f.n++
		if st, err := f.q.Put(context.Background(), sluice.PutRequest{Ref: ref}); err != nil || st != sluice.Enqueued {
			f.t.Fatalf("put: %v, %v", st, err)
		}
	}
}

var alice = sluice.Consumer{Name: "alice"}

func (f *fixture) acquire(c sluice.Consumer, n int) []sluice.Lease {
	f.t.Helper()
	d, err := f.q.Acquire(context.Background(), sluice.AcquireRequest{Consumer: c, Max: n})
	if err != nil {
		f.t.Fatal(err)
	}
	return d.Leases
}

func (f *fixture) settle(c sluice.Consumer, v sluice.Verdict, leases ...sluice.Lease) []sluice.SettleResult {
	f.t.Helper()
	r := sluice.SettleRequest{Consumer: c}
	for _, l := range leases {
		r.Settlements = append(r.Settlements, sluice.Settlement{Lease: l.ID, Verdict: v, Reason: "because"})
	}
	res, err := f.q.Settle(context.Background(), r)
	if err != nil {
		f.t.Fatal(err)
	}
	return res
}

func ids(leases []sluice.Lease) string {
	s := ""
	for _, l := range leases {
		s += l.Ref.SampleID() + " "
	}
	return s
}

// memJournal is a journal in memory that can fail, be slow, and lose what it may lose.
type memJournal struct {
	mu       sync.Mutex
	records  []sluice.Record
	appends  int
	compacts int
	hold     chan struct{} // Append waits for it, if not nil
	fail     error
}

func (j *memJournal) Append(_ context.Context, records []sluice.Record) error {
	if j.hold != nil {
		<-j.hold
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.fail != nil {
		return j.fail
	}
	j.appends++
	j.records = append(j.records, records...)
	return nil
}

func (j *memJournal) Replay(_ context.Context, f func(sluice.Record) error) error {
	j.mu.Lock()
	records := j.records
	j.mu.Unlock()
	for _, r := range records {
		if err := f(r); err != nil {
			return err
		}
	}
	return nil
}

func (j *memJournal) Compact(_ context.Context, snapshot []sluice.Record) error {
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.fail != nil {
		return j.fail
	}
	j.compacts++
	j.records = append([]sluice.Record(nil), snapshot...)
	return nil
}

func (j *memJournal) Close() error { return nil }
