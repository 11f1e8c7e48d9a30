package wire

import (
	"bytes"
	"encoding/json"
	"testing"

	"pgregory.net/rapid"

	"github.com/sluice-ml/sluice"
)

// asJSONHasIt is what encoding/json writes.
func asJSONHasIt(v any) ([]byte, error) {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	err := e.Encode(v)
	return bytes.TrimSuffix(b.Bytes(), []byte("\n")), err
}

func appendsAsJSON(t interface{ Errorf(string, ...any) }, v any) {
	want, wrong := asJSONHasIt(v)
	got, err := Append([]byte("before"), v)
	switch {
	case (err == nil) != (wrong == nil):
		t.Errorf("%T %+v: %v, encoding/json says %v", v, v, err, wrong)
	case err == nil && string(got) != "before"+string(want):
		t.Errorf("%T: %s, want %s", v, got, want)
	}
}

func TestBodiesAreWrittenAsJSONWouldWriteThem(t *testing.T) {
	t.Parallel()
	for _, v := range samples(t) {
		appendsAsJSON(t, v)
	}
	spec := RunSpec{RunID: "r", VisibilityTimeoutSeconds: 30}
	for _, v := range []any{
		new(Reserve), new(Reservations), new(Commit), new(Commits), new(Acquire), new(Delivery), new(Settle), new(Settled), new(Renew), new(Report), new(Run), new(Status), new(ServiceStatus), new(Problem),
		&spec, &Run{Spec: spec}, &Delivery{Leases: make([]Lease, 1)}, &Stored{}, &Stored{Ref: aRef(t)}, &SampleFields{Attributes: map[string]string{"<": "&"}}, &Positions{Taken: []sluice.Taken{{Source: "s", Ranges: [][2]int64{{1, 2}}}}}, &struct{ A int }{3}, Settle{Settlements: make([]Settlement, 1)}, Reserve{},
	} {
		appendsAsJSON(t, v)
	}
}

func TestWhateverIsSaidIsWrittenAsJSONWouldWriteIt(t *testing.T) {
	t.Parallel()
	ref := aRef(t)
	rapid.Check(t, func(t *rapid.T) {
		text := func(label string) string {
			return rapid.OneOf(rapid.String(), rapid.StringMatching(`[ -~é<>&"\x00-\x1f\x7f\x{2028}]{0,20}`), rapid.Just("\xff")).Draw(t, label)
		}
		seconds := func(label string) Seconds {
			return Seconds(rapid.OneOf(rapid.Float64(), rapid.Float64Range(-1, 1e9), rapid.SampledFrom([]float64{0, 1e-6, 9.9e-7, 1e21, -1e21, 0.25})).Draw(t, label))
		}
		d := &Delivery{End: rapid.Bool().Draw(t, "end"), WaitedSeconds: seconds("waited")}
		for range rapid.IntRange(0, 3).Draw(t, "leases") {
			l := Lease{ID: sluice.NewLeaseID(), Ref: ref, TimeLeftSeconds: seconds("left"), Redelivery: rapid.Int().Draw(t, "redelivery")}
			if rapid.Bool().Draw(t, "windowed") {
				l.Window = &sluice.WindowSlot{Number: rapid.Int64().Draw(t, "number"), Pad: rapid.Bool().Draw(t, "pad")}
			}
			d.Leases = append(d.Leases, l)
		}
		if rapid.Bool().Draw(t, "cause") {
			d.Cause = &Problem{Code: text("code"), Detail: text("detail")}
		}
		appendsAsJSON(t, d)
		appendsAsJSON(t, &Reserve{Bytes: rapid.SliceOf(rapid.Int64()).Draw(t, "bytes"), WaitSeconds: seconds("wait"), RequestID: text("id"), Ungated: rapid.Bool().Draw(t, "ungated")})
		appendsAsJSON(t, &Settle{Consumer: Consumer{Name: text("name"), Rank: rapid.Int().Draw(t, "rank")}, Settlements: []Settlement{{Verdict: sluice.Verdict(text("verdict")), Reason: text("reason")}}})
	})
}
