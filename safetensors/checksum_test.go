package safetensors

import (
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/sluice-ml/sluice"
)

func TestChecksumIsCRC32C(t *testing.T) {
	t.Parallel()
	// The check value of CRC-32/ISCSI, and an example of RFC 3720, B.4.
	if got := Checksum([]byte("123456789")); got != 0xe3069283 {
		t.Errorf("got %08x, want e3069283", got)
	}
	if got := Checksum(make([]byte, 32)); got != 0x8a9136aa {
		t.Errorf("got %08x, want 8a9136aa", got)
	}
	if got := Checksum(nil); got != 0 {
		t.Errorf("got %08x, want 0", got)
	}
}

func TestAChecksumOfPiecesIsThatOfTheWhole(t *testing.T) {
	t.Parallel()
	if got := UpdateChecksum(UpdateChecksum(0, []byte("1234")), []byte("56789")); got != 0xe3069283 {
		t.Errorf("got %08x, want e3069283", got)
	}
}

func TestCombinedChecksumsAreThatOfTheWhole(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		a, b := rapid.SliceOf(rapid.Byte()).Draw(t, "a"), rapid.SliceOf(rapid.Byte()).Draw(t, "b")
		got, want := CombineChecksums(Checksum(a), Checksum(b), int64(len(b))), Checksum(slices.Concat(a, b))
		if got != want {
			t.Fatalf("got %08x, want %08x", got, want)
		}
	})
	// Lengths that no slice of a test has: 3 TiB of zeros, by doubling.
	const half = 3 << 40 / 2
	n, zeros := int64(3), Checksum(make([]byte, 3))
	for ; n < 2*half; n *= 2 {
		zeros = CombineChecksums(zeros, zeros, n)
	}
	if got := CombineChecksums(Checksum(nil), zeros, n); got != zeros {
		t.Errorf("behind nothing: got %08x, want %08x", got, zeros)
	}
	one := Checksum([]byte{1})
	if got, want := CombineChecksums(CombineChecksums(one, zeros, n), zeros, n), CombineChecksums(one, CombineChecksums(zeros, zeros, n), 2*n); got != want {
		t.Errorf("two ways to append 6 TiB differ: %08x and %08x", got, want)
	}
}

func TestEncodeChecksumsSortsAndEscapes(t *testing.T) {
	t.Parallel()
	got := EncodeChecksums(map[string]uint32{"b": 0xbadf00d, "a\"\n": 1, "é": 0xffffffff, "": 0})
	if want := `{"":"00000000","a\"\u000a":"00000001","b":"0badf00d","é":"ffffffff"}`; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
	if got := EncodeChecksums(nil); got != "{}" {
		t.Errorf("got %s, want {}", got)
	}
}

func TestDecodeChecksumsReadsOtherWritersForm(t *testing.T) {
	t.Parallel()
	got, err := DecodeChecksums(" { \"b\" : \"0badf00d\",\n\"\\u0061\": \"00000001\" }\n")
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(map[string]uint32{"a": 1, "b": 0xbadf00d}, got); diff != "" {
		t.Error(diff)
	}
}

func TestDecodeChecksumsRefuses(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct{ text, want string }{
		"nothing":       {``, `safetensors: checksums "sluice.crc32c": ends at byte 0, want an object of strings`},
		"not an object": {`[]`, `safetensors: checksums "sluice.crc32c": has '[' at byte 0, want an object of strings`},
		"a number":      {`{"a":1}`, `safetensors: checksums "sluice.crc32c": has '1' at byte 5, want the value of "a" as a string`},
		"too short":     {`{"a":"123"}`, `safetensors: checksums "a": is "123", want 8 lower-case hexadecimal digits`},
		"too long":      {`{"a":"123456789"}`, `safetensors: checksums "a": is "123456789", want 8 lower-case hexadecimal digits`},
		"upper case":    {`{"a":"0BADF00D"}`, `safetensors: checksums "a": is "0BADF00D", want 8 lower-case hexadecimal digits`},
		"not hex":       {`{"a":"0badf00g"}`, `safetensors: checksums "a": is "0badf00g", want 8 lower-case hexadecimal digits`},
		"a sign":        {`{"a":"+badf00d"}`, `safetensors: checksums "a": is "+badf00d", want 8 lower-case hexadecimal digits`},
		"twice":         {`{"a":"00000000","a":"00000000"}`, `safetensors: checksums "sluice.crc32c": has the key "a" twice, want each once`},
		"rest":          {`{} x`, `safetensors: checksums "sluice.crc32c": has 'x' at byte 3, want nothing behind the closing '}'`},
		"not UTF-8":     {"{\"\xff\":\"00000000\"}", `safetensors: checksums "sluice.crc32c": is not valid UTF-8 at byte 2`},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, err := DecodeChecksums(c.text)
			wantKind(t, err, sluice.Corrupt, c.want)
		})
	}
}

func TestChecksumsOfAHeaderAreThoseOfItsTensors(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct{ sums, want string }{
		"a tensor without": {`{"b":"00000000"}`, `safetensors: checksums "a": has no checksum in the metadata under sluice.crc32c`},
		"one too many":     {`{"a":"00000000","b":"00000000"}`, `safetensors: checksums "sluice.crc32c": lists 2 tensors, the file has 1`},
		"unreadable":       {`x`, `safetensors: checksums "sluice.crc32c": has 'x' at byte 0, want an object of strings`},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := layoutOf(t, []sluice.Feature{feature("a", 0, sluice.Int8, 3)}, map[string]string{ChecksumsKey: c.sums})
			_, err := l.Header().Checksums()
			wantKind(t, err, sluice.Corrupt, c.want)
		})
	}
}
