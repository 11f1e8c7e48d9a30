package storetest

import (
	"testing"

	"github.com/sluice-ml/sluice"
)

var corruptTests = []test{
	{"DamagedBytesAreAnErrorAndNeverData", corrupt, func(t *testing.T, k *kit) {
		for _, d := range []Damage{Truncate, FlipData, FlipHeader} {
			t.Run(d.String(), func(t *testing.T) {
				s := k.open(t, roomy)
				bad, good := mustPut(t, s, sampleSized("bad", 1, 70_000)), mustPut(t, s, sampleSized("good", 2, 70_000))
				reader := k.h.Corrupt(t, s, bad, d)
				if reader == nil {
					t.Skip("storetest: this medium does not notice " + d.String())
				}
				for range 2 {
					_, err := reader.Get(bg, bad)
					wantError(t, "Get of a damaged sample", err, sluice.ErrCorrupt, `"bad"`)
				}
				wantRead(t, reader, good, sampleSized("good", 2, 70_000).Features)
				// A damaged sample can still be got rid of, and the failed gets pinned nothing.
				noError(t, "Abort of a damaged sample", reader.Abort(bg, bad))
				wantHealth(t, "at the end", reader, held())
			})
		}
	}},
}
