package queue

import (
	"encoding/json"
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
