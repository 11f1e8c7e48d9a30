package main

import "testing"

func TestByteSizesForPeople(t *testing.T) {
	t.Parallel()
	for in, want := range map[string]byteSize{"0": 0, "1048576": 1 << 20, "16MiB": 16 << 20, "2.5GB": 2_500_000_000, "1 KiB": 1024, "7B": 7} {
		var b byteSize
		if err := b.Set(in); err != nil || b != want {
			t.Errorf("%q: %d, %v; want %d", in, b, err, want)
		}
	}
	for b, want := range map[byteSize]string{0: "0", 7: "7", 8 << 30: "8GiB", 84e6: "84MB", 1536: "1536", 3 << 19: "1536KiB"} {
		if got := b.String(); got != want {
			t.Errorf("%d is shown as %s, want %s", int64(b), got, want)
		}
	}
	for _, in := range []string{"", "-1", "8MIB", "MiB", "1.5", "NaN", "Inf", "1e400", "9007199254740992", "0x10"} {
		b := byteSize(5)
		if err := b.Set(in); err == nil || b != 5 {
			t.Errorf("%q is taken for %d", in, b)
		}
	}
}
