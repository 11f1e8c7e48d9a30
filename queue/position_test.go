package queue

import (
	"testing"

	"pgregory.net/rapid"
)

func TestRangeSetIsTheSetOfWhatWasAdded(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var s rangeSet
		in := map[int64]bool{}
		stride := rapid.Int64Range(1, 3).Draw(t, "stride") // gaps that stay, so that there is more than one chunk
		for _, i := range rapid.SliceOfN(rapid.Int64Range(0, 3000), 0, 1500).Draw(t, "indexes") {
			s.add(i * stride)
			in[i*stride] = true
		}
		n := int64(0)
		last := int64(-2)
		for _, r := range s.ranges() {
			if r[0] <= last || r[1] <= r[0] {
				t.Fatalf("%v does not stand apart from what ends at %d", r, last)
			}
			last = r[1]
			n += r[1] - r[0]
			for i := r[0]; i < r[1]; i++ {
				if !in[i] {
					t.Fatalf("%d was never added", i)
				}
			}
		}
		if n != int64(len(in)) {
			t.Fatalf("%d indexes, want %d", n, len(in))
		}
	})
}
