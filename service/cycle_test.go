package service

import (
	"bytes"
	"testing"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/internal/wire"
)

func TestASampleGoesAllTheWay(t *testing.T) {
	t.Parallel()
	b := newBed(t, Options{})
	run := b.create("r1")
	if run.Spec.Caps.HighWatermarkBytes == 0 || run.Store.ID == "" {
		t.Errorf("described as %+v", run)
	}
	res := do[wire.Reservations](b, "POST", "/v1/runs/r1/reserve", wire.Reserve{Bytes: []int64{sampleBytes, sampleBytes}, RequestID: "q1"})
	if len(res.Reservations) != 2 {
		t.Fatalf("reserved %+v", res)
	}
	if h := do[sluice.Health](b, "GET", "/v1/runs/r1/health", nil); h.ReservedBytes != 2*sampleBytes {
		t.Errorf("health %+v", h)
	}
	ref := b.upload("r1", "s-1", res.Reservations[0].ID)
	if r := b.commit("r1", ref, ref).Results; r[0].Status != sluice.Enqueued || r[1].Status != sluice.AlreadyPut {
		t.Errorf("committed %+v", r)
	}
	do[struct{}](b, "POST", "/v1/runs/r1/unreserve", wire.Unreserve{Reservations: []string{res.Reservations[1].ID}})
	d := b.acquire("r1", 4)
	if len(d.Leases) != 1 || !d.Leases[0].Ref.Equal(ref) || d.Leases[0].TimeLeftSeconds <= 0 {
		t.Fatalf("acquired %+v", d)
	}
	whole := b.send("GET", sampleURL(ref)+"?generation="+ref.Generation(), nil, nil)
	if whole.status != 200 || whole.header.Get("ETag") != `"`+ref.Generation()+`"` {
		t.Fatalf("read: %d %s", whole.status, whole.body)
	}
	part := b.send("GET", sampleURL(ref)+"?generation="+ref.Generation(), map[string]string{"Range": "bytes=8-19"}, nil)
	if part.status != 206 || !bytes.Equal(part.body, whole.body[8:20]) {
		t.Errorf("range: %d %q", part.status, part.body)
	}
	ids := b.send("GET", sampleURL(ref)+"/features/input_ids?generation="+ref.Generation(), nil, nil)
	if ids.status != 200 || len(ids.body) != 16 || ids.header.Get("Sluice-Shape") != "1,2" || ids.header.Get("Sluice-Dtype") != "int64" || !bytes.Contains(whole.body, ids.body) {
		t.Errorf("feature: %d %v %x", ids.status, ids.header, ids.body)
	}
	tail := b.send("GET", sampleURL(ref)+"/features/input_ids?generation="+ref.Generation(), map[string]string{"Range": "bytes=-8"}, nil)
	if tail.status != 206 || !bytes.Equal(tail.body, ids.body[8:]) {
		t.Errorf("range of a feature: %d %x", tail.status, tail.body)
	}
	if r := b.settle("r1", sluice.Ack, d.Leases...); r[0].Status != sluice.Settled {
		t.Errorf("settled %+v", r)
	}
	if r := b.settle("r1", sluice.Ack, d.Leases...); r[0].Status != sluice.AlreadySettled {
		t.Errorf("settled again %+v", r)
	}
	st := b.status("r1")
	if st.Acked != 1 || st.Health.UsedBytes() != 0 || st.Pending != 0 {
		t.Errorf("status %+v", st)
	}
	do[struct{}](b, "POST", "/v1/runs/r1/close", nil)
	if d := b.acquire("r1", 1); !d.End {
		t.Errorf("after close: %+v", d)
	}
	do[struct{}](b, "DELETE", "/v1/runs/r1", nil)
	b.wants("not_found", "GET", "/v1/runs/r1", nil)
	if st := do[wire.ServiceStatus](b, "GET", "/v1/status", nil); st.CapBytes != 0 || len(st.Runs) != 0 {
		t.Errorf("service %+v", st)
	}
}
