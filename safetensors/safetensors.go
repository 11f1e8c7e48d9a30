// Package safetensors is the codec of the data plane: it reads files by mapping them and writes them in one pass.
//
// A safetensors file is eight bytes of header length (little-endian), a JSON header, and the tensors' bytes end to end:
//
//	{"__metadata__":{"key":"value"},"input_ids":{"dtype":"I64","shape":[1,2048],"data_offsets":[0,16384]}}
//
// Everything about the layout follows from names, shapes and dtypes, so it is known before any tensor byte exists. A
// [Layout] is that knowledge: it gives the exact header, the offset of each tensor and the size of the whole, and then
// writes the header and the caller's tensors to a file or a socket without an intermediate copy.
//
//	layout, err := safetensors.NewLayout(features, map[string]string{safetensors.RefKey: ref})
//	err = layout.WriteFile(f, 0, features)
//
//	m, err := safetensors.Map(f, layout.Size())
//	defer m.Close()
//	features, err := m.Features(order)
//
// A layout pads the header so that data begins at a multiple of 64 bytes, and puts the tensors whose size is a multiple
// of 64 first, then wider elements before narrower ones, then names in byte order. So each tensor is aligned to its
// elements, almost always to 64 bytes, and equal inputs give equal files. The order in which the caller listed the
// features is not in the file's layout; whoever needs it back keeps it in the metadata, as stores do under [RefKey].
//
// Reading is strict, because a header is input from strangers: duplicate names, unknown fields, holes and overlaps in
// the data, shapes that overflow or disagree with their bytes, and files that are longer or shorter than the header
// says are all refused, and no length is believed before it was checked. What the stock Python and Rust packages write
// is accepted, up to 16 axes a tensor, including dtypes that no [sluice.DType] has; such tensors are listed, but can't be
// handed out as features.
//
// # Errors
//
// Every error is a [*sluice.Error]. Bytes that are not a valid file are [sluice.Corrupt]. A tensor that the file
// doesn't have is [sluice.NotFound], one whose dtype has no counterpart is [sluice.Unsupported], a closed mapping or
// file is [sluice.Closed]. Features that can't be laid out or don't agree with their layout are [sluice.Invalid].
// Running out of room is [sluice.NoSpace]. Another failure of the medium is [sluice.Unavailable], with the cause inside.
//
// # Hosts
//
// Tensor bytes are little-endian and are viewed in place, so hosts must be little-endian (amd64, arm64) and 64-bit.
package safetensors

import (
	"github.com/sluice-ml/sluice"
)

// Metadata keys that sluice gives a meaning to. Other readers see two more strings.
const (
	// RefKey holds the canonical JSON of the sample's ref: feature order, generation, attributes.
	RefKey = "sluice.ref"
	// ChecksumsKey holds the tensors' crc32c, as [EncodeChecksums] writes them.
	ChecksumsKey = "sluice.crc32c"
)

const (
	// MaxHeader is the largest header length, in bytes, that the format allows.
	MaxHeader = 100_000_000
	// MaxItems is the largest number of tensors, and of metadata keys, in one file. The format has no such limit;
	// without one, a header of the largest size could ask for more than a gigabyte of small objects.
	MaxItems = 1 << 20
	// Alignment is where data begins in a file that a Layout describes: at a multiple of this many bytes, a cache line.
	Alignment = 64

	metadataKey = "__metadata__"
	lengthBytes = 8
	maxRank     = 16 // as in sluice.Spec; checked here too, before the axes are stored
)

var formatNames = [...]string{
	sluice.Float64:      "F64",
	sluice.Float32:      "F32",
	sluice.Float16:      "F16",
	sluice.BFloat16:     "BF16",
	sluice.Float8E4M3FN: "F8_E4M3",
	sluice.Float8E5M2:   "F8_E5M2",
	sluice.Int64:        "I64",
	sluice.Int32:        "I32",
	sluice.Int16:        "I16",
	sluice.Int8:         "I8",
	sluice.UInt8:        "U8",
	sluice.UInt16:       "U16",
	sluice.UInt32:       "U32",
	sluice.UInt64:       "U64",
	sluice.Bool:         "BOOL",
}

// DTypeName is the format's name for d, such as "BF16", or "" if d is not valid.
func DTypeName(d sluice.DType) string {
	if int(d) >= len(formatNames) {
		return ""
	}
	return formatNames[d]
}

// ParseDType returns the dtype with the format's name, such as "BF16". It is false for names that the format doesn't
// know and for those that no [sluice.DType] stands for.
func ParseDType(name string) (sluice.DType, bool) {
	if name == "" {
		return 0, false
	}
	for d, n := range formatNames {
		if n == name {
			return sluice.DType(d), true
		}
	}
	return 0, false
}

// foreignBits is the width in bits of an element of the format's other dtypes, or 0 for a name that is none.
func foreignBits(name string) int64 {
	switch name {
	case "F4":
		return 4
	case "F6_E2M3", "F6_E3M2":
		return 6
	case "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ":
		return 8
	case "C64":
		return 64
	}
	return 0
}
