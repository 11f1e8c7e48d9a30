package queue

import (
	"encoding/json"
	"reflect"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/sluice-ml/sluice"
)

// A put's record is written by hand, and must read as if encoding/json had written it.
func TestAPutRecordIsWhatJSONWouldWrite(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		ref, err := sluice.NewRef(sluice.RefFields{
			SampleID: "s-1", RunID: "r", StoreURI: "mem:x", Generation: sluice.NewGeneration(), Algorithm: "bytes", SchemaVersion: 1, NumTokens: 3, EstimatedBytes: 100,
			Features:   []sluice.RefFeature{{Name: "x", Key: "x", Spec: sluice.Spec{Shape: []int64{100}, DType: sluice.Bool}}},
			Attributes: map[string]string{"a": rapid.StringMatching(`[ -~é<>&"]{0,20}`).Draw(t, "attribute")},
			// These are shown in logs and names of files, and may be anything that a caller thinks of.
			TargetModelVersion: rapid.StringMatching(`[a-z<>&]{1,9}`).Draw(t, "target"), DraftWeightVersion: "0",
		})
		if err != nil {
			t.Skip(err)
		}
		r := putRecord{T: "put", Ref: ref, Seq: rapid.Int64Min(1).Draw(t, "seq"), Producer: rapid.String().Draw(t, "producer"), At: rapid.Int64().Draw(t, "at"), Gated: rapid.Bool().Draw(t, "gated")}
		if rapid.Bool().Draw(t, "positions") {
			r.Positions = []sluice.Position{{Source: rapid.String().Draw(t, "source"), Index: 7}}
		}
		want, err := json.Marshal(r)
		if err != nil {
			t.Fatal(err)
		}
		var fromJSON, fromHand map[string]any
		if err := json.Unmarshal(want, &fromJSON); err != nil {
			t.Fatal(err)
		}
		if err := json.Unmarshal(encode(r), &fromHand); err != nil {
			t.Fatalf("%s: %v", encode(r), err)
		}
		if d := cmp.Diff(fromJSON, fromHand); d != "" {
			t.Errorf("-json +hand\n%s", d)
		}
	})
}

func TestRecordsOfLeasesAreWhatJSONWouldWrite(t *testing.T) {
	t.Parallel()
	// What is added to them must be written by hand too, and drawn below.
	if l, e := reflect.TypeFor[leaseRecord]().NumField(), reflect.TypeFor[endRecord]().NumField(); l != 17 || e != 18 {
		t.Errorf("the records have %d and %d fields, encode knows of 17 and 18", l, e)
	}
	rapid.Check(t, func(t *rapid.T) {
		text := rapid.OneOf(rapid.Just(""), rapid.StringMatching(`[a-z.:-]{1,9}`), rapid.String())
		number := rapid.OneOf(rapid.Just(int64(0)), rapid.Int64())
		small := rapid.Map(number, func(n int64) int32 { return int32(n) })
		flag := rapid.Bool()
		lease := leaseRecord{
			T: "lease", Lease: sluice.NewLeaseID(), Seq: number.Draw(t, "seq"), Consumer: text.Draw(t, "consumer"), Incarnation: number.Draw(t, "incarnation"), Rank: int(small.Draw(t, "rank")),
			Member: int(small.Draw(t, "member")), Members: int(small.Draw(t, "members")), Request: text.Draw(t, "request"), At: number.Draw(t, "at"), Windowed: flag.Draw(t, "windowed"),
			Window: number.Draw(t, "window"), Slot: int(small.Draw(t, "slot")), Pad: flag.Draw(t, "pad"),
		}
		end := endRecord{
			T: "end", Lease: lease.Lease, Seq: lease.Seq, Consumer: lease.Consumer, Incarnation: lease.Incarnation, As: sluice.Verdict(text.Draw(t, "as")), How: text.Draw(t, "how"),
			Fails: small.Draw(t, "fails"), Expiries: small.Draw(t, "expiries"), Reason: text.Draw(t, "reason"), At: lease.At, Windowed: lease.Windowed, Window: lease.Window, Slot: lease.Slot, Pad: lease.Pad,
		}
		for _, record := range []any{lease, end} {
			want, err := json.Marshal(record)
			if err != nil {
				t.Fatal(err)
			}
			if got := string(encode(record)); got != string(want) {
				t.Errorf("got  %s\nwant %s", got, want)
			}
		}
	})
}
