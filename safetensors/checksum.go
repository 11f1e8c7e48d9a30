package safetensors

import (
	"hash/crc32"
	"maps"
	"slices"
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// Checksum is the crc32c (Castagnoli) of data, computed with the processor's own instruction where it has one.
func Checksum(data []byte) uint32 { return crc32.Checksum(data, castagnoli) }

// UpdateChecksum is the checksum of what sum is the checksum of, followed by data: for data that passes in pieces. The
// checksum of nothing is 0.
func UpdateChecksum(sum uint32, data []byte) uint32 { return crc32.Update(sum, castagnoli, data) }

// CombineChecksums is the checksum of two pieces of data in a row, of which a and b are the checksums and n is the length
// of the second in bytes: for data that arrives in pieces at the same time. It takes about a microsecond.
func CombineChecksums(a, b uint32, n int64) uint32 {
	// To append a byte is to multiply by x^8, and what a polynomial is multiplied by for n bytes is found by squaring.
	power := unity >> 8
	for ; n > 0; n >>= 1 {
		if n&1 != 0 {
			a = multiply(a, power)
		}
		power = multiply(power, power)
	}
	return a ^ b
}

// unity is the polynomial 1: a crc32c has the coefficient of x^0 in its highest bit.
const unity = uint32(1) << 31

// multiply is the product of two polynomials modulo that of crc32c.
func multiply(a, b uint32) uint32 {
	product := uint32(0)
	for ; a != 0; a <<= 1 {
		if a&unity != 0 {
			product ^= b
		}
		b = b>>1 ^ b&1*crc32.Castagnoli
	}
	return product
}

// checksumDigits is the width of an encoded checksum. It is fixed, so that checksums can be filled in after a header
// was laid out.
const checksumDigits = 8

// EncodeChecksums writes checksums by tensor name as a JSON object, names in byte order, each value eight lower-case
// hexadecimal digits: {"input_ids":"0badf00d"}. Names must be valid UTF-8; nothing else about them matters.
func EncodeChecksums(sums map[string]uint32) string {
	names := slices.Sorted(maps.Keys(sums))
	b := []byte{'{'}
	for i, name := range names {
		if i > 0 {
			b = append(b, ',')
		}
		b = appendString(b, name)
		b = append(b, ':', '"')
		b = appendChecksum(b, sums[name])
		b = append(b, '"')
	}
	return string(append(b, '}'))
}

func appendChecksum(dst []byte, sum uint32) []byte {
	const hex = "0123456789abcdef"
	for shift := 28; shift >= 0; shift -= 4 {
		dst = append(dst, hex[sum>>shift&15])
	}
	return dst
}

// DecodeChecksums reads what [EncodeChecksums] wrote, or what another writer wrote in the same form, in any order. A
// name that is there twice and a value of another form are refused as [sluice.Corrupt].
func DecodeChecksums(text string) (map[string]uint32, error) {
	s := scanner{text: text, op: "checksums", subject: ChecksumsKey, maxItems: MaxItems}
	if at := invalidUTF8(text); at >= 0 {
		return nil, s.fail("is not valid UTF-8 at byte %d", at)
	}
	values, err := s.stringMap()
	if err != nil {
		return nil, err
	}
	if s.space(); s.pos < len(text) {
		return nil, s.unexpected("nothing behind the closing '}'")
	}
	sums := make(map[string]uint32, len(values))
	for name, value := range values {
		sum, ok := parseChecksum(value)
		if !ok {
			return nil, corrupt("checksums", name, "is %q, want %d lower-case hexadecimal digits", clip(value), checksumDigits)
		}
		sums[name] = sum
	}
	return sums, nil
}

func parseChecksum(text string) (uint32, bool) {
	if len(text) != checksumDigits {
		return 0, false
	}
	sum := uint32(0)
	for i := range checksumDigits {
		d, ok := hexDigit(text[i])
		if !ok || ('A' <= text[i] && text[i] <= 'F') {
			return 0, false
		}
		sum = sum<<4 | uint32(d)
	}
	return sum, true
}
