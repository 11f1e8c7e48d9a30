package wire

import (
	"encoding/json"
	"reflect"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/sluice-ml/sluice"
)

func TestADeliveryIsWrittenAsJSONWouldWriteIt(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		d := &Delivery{End: rapid.Bool().Draw(t, "end")}
		if rapid.Bool().Draw(t, "some") {
			d.Leases = []Lease{}
		}
		for range rapid.IntRange(0, 3).Draw(t, "leases") {
			ref, err := sluice.NewRef(sluice.RefFields{
				SampleID: "s-1", RunID: "r", StoreURI: "mem:x", Generation: sluice.NewGeneration(), Algorithm: "bytes", SchemaVersion: 1, NumTokens: 3, EstimatedBytes: 100,
				Features:           []sluice.RefFeature{{Name: "x", Key: "x", Spec: sluice.Spec{Shape: []int64{100}, DType: sluice.Bool}}},
				Attributes:         map[string]string{"a": rapid.StringMatching(`[ -~é<>&"]{0,20}`).Draw(t, "attribute")},
				TargetModelVersion: "1", DraftWeightVersion: "0",
			})
			if err != nil {
				t.Fatal(err)
			}
			l := Lease{ID: sluice.NewLeaseID(), Ref: ref, TimeLeftSeconds: Seconds(rapid.Float64Range(-1, 1e9).Draw(t, "left")), Redelivery: rapid.IntRange(0, 9).Draw(t, "redelivery")}
			if rapid.Bool().Draw(t, "windowed") {
				l.Window = &sluice.WindowSlot{Number: 3, Rank: 1, Pad: true, Tokens: rapid.Int64().Draw(t, "tokens")}
			}
			d.Leases = append(d.Leases, l)
		}
		if rapid.Bool().Draw(t, "cause") {
			d.Cause = &Problem{Code: "target_fault", Detail: rapid.String().Draw(t, "detail")}
		}
		d.WaitedSeconds = Seconds(rapid.SampledFrom([]float64{0, 0.25, 1e-9}).Draw(t, "waited"))
		want, err := json.Marshal(d)
		if err != nil {
			t.Fatal(err)
		}
		got, err := d.AppendJSON(nil)
		if err != nil {
			t.Fatal(err)
		}
		var fromJSON, fromHand map[string]any
		if err := json.Unmarshal(want, &fromJSON); err != nil {
			t.Fatal(err)
		}
		if err := json.Unmarshal(got, &fromHand); err != nil {
			t.Fatalf("%s: %v", got, err)
		}
		if d := cmp.Diff(fromJSON, fromHand); d != "" {
			t.Errorf("-json +hand\n%s", d)
		}
	})
	// What is added to them must be written by hand too, and drawn above.
	if d, l := reflect.TypeFor[Delivery]().NumField(), reflect.TypeFor[Lease]().NumField(); d != 4 || l != 5 {
		t.Errorf("a delivery has %d fields and a lease %d, AppendJSON knows of 4 and 5", d, l)
	}
	d := &Delivery{Leases: make([]Lease, 1)}
	if got, err := d.AppendJSON(nil); err == nil {
		t.Errorf("a lease without a ref was written: %s", got)
	}
}
