package wire

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"reflect"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/sluice-ml/sluice"
)

// bodies are the types of the hot calls, and of their answers.
var bodies = []func() any{
	func() any { return new(Reserve) }, func() any { return new(Reservations) }, func() any { return new(Commit) }, func() any { return new(Commits) }, func() any { return new(Acquire) },
	func() any { return new(Delivery) }, func() any { return new(Settle) }, func() any { return new(Settled) }, func() any { return new(Renew) }, func() any { return new(Report) },
}

func aRef(t testing.TB) sluice.Ref {
	ref, err := sluice.NewRef(sluice.RefFields{
		SampleID: "s-1", RunID: "r", StoreURI: "mem:x", Generation: "g1", Algorithm: "bytes", SchemaVersion: 1, NumTokens: 3, EstimatedBytes: 100,
		Features:           []sluice.RefFeature{{Name: "x", Key: "s-1/x", Spec: sluice.Spec{Shape: []int64{100}, DType: sluice.Bool}}},
		Attributes:         map[string]string{"a": "b é"},
		TargetModelVersion: "1", DraftWeightVersion: "0",
	})
	if err != nil {
		t.Fatal(err)
	}
	return ref
}

// samples are bodies with every field that clients and service write.
func samples(t testing.TB) []any {
	ref, lease := aRef(t), sluice.LeaseID{1, 2, 3}
	who, consumer := &Producer{Name: "p", Incarnation: 3}, Consumer{Name: "c", Incarnation: 2, Rank: 1, Member: 1, Members: 2}
	return []any{
		&Reserve{Producer: who, Bytes: []int64{1, 0, 1 << 52}, WaitSeconds: 0.25, RequestID: "r é"}, &Reserve{Bytes: []int64{1}, Ungated: true},
		&Reservations{Reservations: []Reservation{{ID: "x", Bytes: 5, ExpiresSeconds: 600}}}, &Reservations{Reservations: []Reservation{}},
		&Commit{Producer: who, Items: []CommitItem{{Ref: &ref, Positions: []sluice.Position{{Source: "s", Epoch: 1, Index: 2}}}, {Ref: &ref}}},
		&Commits{Results: []CommitResult{{Status: sluice.Enqueued}, {Ref: &ref}, {Error: &Problem{Title: "t", Status: 404, Code: "c"}}}, Paused: true},
		&Acquire{Consumer: consumer, Max: 3, WaitSeconds: 10, Ahead: true, RequestID: "q"},
		&Delivery{Leases: []Lease{{ID: lease, Ref: ref, TimeLeftSeconds: 29.99, Redelivery: 1, Window: &sluice.WindowSlot{Number: 1, Pad: true}}}, WaitedSeconds: 5.6e-9},
		&Delivery{Leases: []Lease{}, End: true, Cause: &Problem{Title: "t"}},
		&Settle{Consumer: consumer, Settlements: []Settlement{{Lease: lease, Verdict: sluice.Ack}, {Lease: lease, Verdict: sluice.Fail, Reason: "why"}}, RequestID: "z"},
		&Settled{Results: []SettleResult{{Lease: lease, Status: sluice.Settled, As: sluice.Ack}, {Lease: lease, Dead: true}}},
		&Renew{Consumer: consumer, Leases: &[]sluice.LeaseID{lease}}, &Report{Producer: *who, State: "done"},
	}
}

func TestWhatIsWrittenIsReadInOnePass(t *testing.T) {
	t.Parallel()
	for _, want := range samples(t) {
		text, err := json.Marshal(want)
		if err != nil {
			t.Fatal(err)
		}
		var spaced bytes.Buffer
		if err := json.Indent(&spaced, text, "", "\t"); err != nil {
			t.Fatal(err)
		}
		for _, text := range [][]byte{text, spaced.Bytes()} {
			got := reflect.New(reflect.TypeOf(want).Elem()).Interface()
			if !Read(text, got) {
				t.Errorf("%T was not read: %s", want, text)
			} else if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("%T (-want +got):\n%s", want, diff)
			}
		}
	}
}

func TestWhatNeedsAnotherLookIsLeftToEncodingJSON(t *testing.T) {
	t.Parallel()
	ref := aRef(t).Canonical()
	for text, v := range map[string]any{
		``: new(Reserve), ` `: new(Reserve), `null`: new(Reserve), `[]`: new(Reserve), `{`: new(Reserve), `{}x`: new(Reserve), `{},`: new(Reserve), "{}\x00": new(Reserve),
		`{"bytes":[1],"bytes":[2]}`: new(Reserve), `{"Bytes":[1]}`: new(Reserve), `{"bytes":[1],"x":1}`: new(Reserve), `{"bytes":null}`: new(Reserve), `{"bytes":[01]}`: new(Reserve),
		`{"bytes":[1.0]}`: new(Reserve), `{"bytes":[1e3]}`: new(Reserve), `{"bytes":[9999999999999999999]}`: new(Reserve), `{"bytes":["1"]}`: new(Reserve), `{"bytes":[1,]}`: new(Reserve), `{"bytes":[1}`: new(Reserve),
		`{"bytes":[-]}`: new(Reserve), `{"bytes":[1] "ungated":true}`: new(Reserve), `{"bytes":[1],}`: new(Reserve), `{"wait_seconds":1.}`: new(Reserve), `{"wait_seconds":.5}`: new(Reserve), `{"wait_seconds":1e}`: new(Reserve), `{"wait_seconds":1e400}`: new(Reserve), `{"wait_seconds":+1}`: new(Reserve),
		`{"request_id":"\u0061"}`: new(Reserve), "{\"request_id\":\"\xff\"}": new(Reserve), "{\"request_id\":\"\x01\"}": new(Reserve), `{"request_id":"a`: new(Reserve), `{"ungated":truer}`: new(Reserve), `{"ungated":1}`: new(Reserve),
		`{"producer":{"name":"p","name":"q"}}`: new(Reserve), `{"producer":[]}`: new(Reserve),
		`{"consumer":{"name":"c"},"settlements":[{"lease":"00","verdict":"ack"}]}`: new(Settle), `{"consumer":{"name":"c","Rank":1}}`: new(Settle),
		`{"items":[{"ref":{}}]}`: new(Commit), `{"items":[{"ref":` + ref[:len(ref)-1] + `]}]}`: new(Commit), `{"items":[{"ref":null}]}`: new(Commit), `{"items":[{"ref":` + ref + `x}]}`: new(Commit),
		`{"created":"2026-01-02T03:04:05Z"}`: new(Run), `{"fields":{"attributes":{"a":"b"}}}`: new(Stage), // types of no hot call
	} {
		if Read([]byte(text), v) {
			t.Errorf("%T was read in one pass: %q", v, text)
		}
		if !reflect.ValueOf(v).Elem().IsZero() {
			t.Errorf("%T was left with what was read of %q", v, text)
		}
	}
}

// FuzzRead holds the one pass against encoding/json: what it takes, encoding/json takes for the same, and writes again with the same names.
func FuzzRead(f *testing.F) {
	for _, v := range samples(f) {
		text, err := json.Marshal(v)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(text)
	}
	for _, text := range []string{`{}`, ` { "bytes" : [ 1 , 2 ] , "wait_seconds" : 0.5 } `, `{"bytes":[]}`, `{"bytes":[-0]}`, `{"items":[{}]}`, `{"consumer":{"name":""}}`, `{"leases":[]}`, `{"wait_seconds":-1.50E+01}`, `{"wait_seconds":-0e-7}`} {
		f.Add([]byte(text))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		for _, body := range bodies {
			got, want := body(), body()
			if !Read(text, got) {
				if !reflect.ValueOf(got).Elem().IsZero() {
					t.Errorf("%T was left with what was read of %q", got, text)
				}
				continue
			}
			d := json.NewDecoder(bytes.NewReader(text))
			d.DisallowUnknownFields()
			if err := d.Decode(want); err != nil {
				t.Errorf("%T: encoding/json refuses %q: %v", got, text, err)
			}
			if _, err := d.Token(); err != io.EOF {
				t.Errorf("%T: there is something behind %q", got, text)
			}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("%T of %q (-encoding/json +one pass):\n%s", got, text, diff)
			}
		}
	})
}

func BenchmarkRead(b *testing.B) {
	for _, v := range samples(b) {
		text, err := json.Marshal(v)
		if err != nil {
			b.Fatal(err)
		}
		for name, read := range map[string]func([]byte, any) bool{"one pass": Read, "encoding/json": func(text []byte, v any) bool { return json.Unmarshal(text, v) == nil }} {
			b.Run(fmt.Sprintf("%T/%d/%s", v, len(text), name), func(b *testing.B) {
				for b.Loop() {
					if !read(text, reflect.New(reflect.TypeOf(v).Elem()).Interface()) {
						b.Fatal("not read")
					}
				}
			})
		}
	}
}
