package safetensors

import (
	"cmp"
	"encoding/binary"
	"maps"
	"math"
	"slices"
	"strconv"
	"unicode/utf8"

	"github.com/sluice-ml/sluice"
)

// Layout is the plan of one file: its header to the byte and the place of each tensor. It is immutable, and may
// be used by several goroutines at once and for any number of files.
type Layout struct {
	header  Header
	bytes   []byte  // length, JSON and padding: everything before the data
	listed  []int   // for each feature in the caller's order, its entry
	ordered []int   // for each entry, its feature in the caller's order
	sumsAt  []int64 // for each entry, where in bytes its checksum's digits begin; nil without checksums
}

// NewLayout lays out the given features with the given metadata, which may be nil. Only names and specs are looked at;
// Data may be nil, and the arguments may be modified afterwards.
//
// Names must be different from each other, valid UTF-8, and not "__metadata__"; specs must validate. What does not is
// refused as [sluice.Invalid].
func NewLayout(features []sluice.Feature, metadata map[string]string) (*Layout, error) {
	return newLayout(features, metadata, false)
}

// NewChecksummedLayout is NewLayout with a crc32c of each tensor in the metadata, under [ChecksumsKey], which the
// caller must not set. The checksums have a fixed width, so that the header can be written, or rewritten, after the
// data has passed: [Layout.WriteFile] computes them while it writes, and for other ways [Layout.HeaderWithChecksums]
// fills them in.
func NewChecksummedLayout(features []sluice.Feature, metadata map[string]string) (*Layout, error) {
	if _, ok := metadata[ChecksumsKey]; ok {
		return nil, invalid("layout", ChecksumsKey, "is set in the metadata of a layout that computes it")
	}
	return newLayout(features, metadata, true)
}

func newLayout(features []sluice.Feature, metadata map[string]string, checksums bool) (*Layout, error) {
	if len(features) > MaxItems {
		return nil, invalid("layout", "features", "are %d, want at most %d", len(features), MaxItems)
	}
	if len(metadata) >= MaxItems {
		return nil, invalid("layout", "metadata", "has %d keys, want less than %d", len(metadata), MaxItems)
	}
	l := &Layout{
		header:  Header{Entries: make([]Entry, len(features))},
		listed:  make([]int, len(features)),
		ordered: make([]int, len(features)),
	}
	for i := range features {
		f := &features[i]
		switch err := f.Spec.Validate(); {
		case err != nil:
			return nil, invalid("layout", f.Name, "%s", detail(err))
		case f.Name == metadataKey:
			return nil, invalid("layout", f.Name, "is the name of the metadata, want another")
		case !utf8.ValidString(f.Name):
			return nil, invalid("layout", f.Name, "is not valid UTF-8 at byte %d of the name", invalidUTF8(f.Name))
		}
		l.ordered[i] = i
	}
	slices.SortFunc(l.ordered, func(i, j int) int { return compareForLayout(&features[i], &features[j]) })
	end := int64(0)
	for at, i := range l.ordered {
		f := &features[i]
		n := f.Bytes()
		if n > math.MaxInt64-2*MaxHeader-end {
			return nil, invalid("layout", f.Name, "begins at byte %d and takes %d more, which overflows", end, n)
		}
		l.header.Entries[at] = Entry{
			Name:     f.Name,
			Spec:     sluice.Spec{Shape: append(make([]int64, 0, len(f.Shape)), f.Shape...), DType: f.DType},
			RawDType: formatNames[f.DType],
			Begin:    end,
			End:      end + n,
		}
		end += n
		l.listed[i] = at
	}
	if name, ok := repeated(features); ok {
		return nil, invalid("layout", name, "is there twice, want each name once")
	}
	l.header.reindex()
	if len(metadata) > 0 || checksums {
		l.header.Metadata = make(map[string]string, len(metadata)+1)
		maps.Copy(l.header.Metadata, metadata)
	}
	if checksums {
		sums := make(map[string]uint32, len(features))
		for i := range features {
			sums[features[i].Name] = 0
		}
		l.header.Metadata[ChecksumsKey] = EncodeChecksums(sums)
		l.sumsAt = make([]int64, len(features))
	}
	for key, value := range l.header.Metadata {
		if !utf8.ValidString(key) || !utf8.ValidString(value) {
			return nil, invalid("layout", key, "or its value in the metadata is not valid UTF-8")
		}
	}
	if err := l.encode(); err != nil {
		return nil, err
	}
	l.header.DataStart = int64(len(l.bytes))
	return l, nil
}

// compareForLayout orders tensors so that as many as possible begin at a multiple of 64 bytes and the others are
// aligned to their elements: a tensor that is followed by narrower elements only can't push any of them off their
// alignment.
func compareForLayout(a, b *sluice.Feature) int {
	whole := func(f *sluice.Feature) int {
		if f.Bytes()%Alignment == 0 {
			return 0
		}
		return 1
	}
	return cmp.Or(
		cmp.Compare(whole(a), whole(b)),
		cmp.Compare(b.DType.Size(), a.DType.Size()),
		cmp.Compare(a.Name, b.Name),
	)
}

// repeated finds a name that two features have.
func repeated(features []sluice.Feature) (string, bool) {
	if len(features) <= indexAbove {
		for i := range features {
			for j := range i {
				if features[i].Name == features[j].Name {
					return features[i].Name, true
				}
			}
		}
		return "", false
	}
	seen := make(map[string]struct{}, len(features))
	for i := range features {
		if _, ok := seen[features[i].Name]; ok {
			return features[i].Name, true
		}
		seen[features[i].Name] = struct{}{}
	}
	return "", false
}

// encode writes the header's bytes, with zeros for checksums.
func (l *Layout) encode() error {
	b := make([]byte, lengthBytes, 512)
	b = append(b, '{')
	if len(l.header.Metadata) > 0 {
		b = appendString(b, metadataKey)
		b = append(b, ':', '{')
		for i, key := range slices.Sorted(maps.Keys(l.header.Metadata)) {
			if i > 0 {
				b = append(b, ',')
			}
			b = appendString(b, key)
			b = append(b, ':')
			if key == ChecksumsKey && l.sumsAt != nil {
				b = l.appendChecksums(b)
			} else {
				b = appendString(b, l.header.Metadata[key])
			}
		}
		b = append(b, '}')
	}
	for i := range l.header.Entries {
		if b[len(b)-1] != '{' {
			b = append(b, ',')
		}
		b = appendEntry(b, &l.header.Entries[i])
	}
	b = append(b, '}')
	for len(b)%Alignment != 0 {
		b = append(b, ' ')
	}
	if n := len(b) - lengthBytes; n > MaxHeader {
		return invalid("layout", "header", "is %d bytes long, want at most %d", n, MaxHeader)
	}
	binary.LittleEndian.PutUint64(b, uint64(len(b)-lengthBytes))
	l.bytes = b
	return nil
}

func appendEntry(b []byte, e *Entry) []byte {
	b = appendString(b, e.Name)
	b = append(b, `:{"dtype":"`...)
	b = append(b, e.RawDType...)
	b = append(b, `","shape":[`...)
	for i, d := range e.Spec.Shape {
		if i > 0 {
			b = append(b, ',')
		}
		b = strconv.AppendInt(b, d, 10)
	}
	b = append(b, `],"data_offsets":[`...)
	b = strconv.AppendInt(b, e.Begin, 10)
	b = append(b, ',')
	b = strconv.AppendInt(b, e.End, 10)
	return append(b, "]}"...)
}

// appendChecksums writes the metadata's value under ChecksumsKey, which is JSON within a JSON string, and notes where
// the digits are.
func (l *Layout) appendChecksums(b []byte) []byte {
	byName := make([]int, len(l.header.Entries))
	for i := range byName {
		byName[i] = i
	}
	slices.SortFunc(byName, func(i, j int) int { return cmp.Compare(l.header.Entries[i].Name, l.header.Entries[j].Name) })
	b = append(b, '"', '{')
	for n, i := range byName {
		if n > 0 {
			b = append(b, ',')
		}
		b = appendEscaped(b, string(appendString(nil, l.header.Entries[i].Name)))
		b = append(b, `:\"`...)
		l.sumsAt[i] = int64(len(b))
		b = appendChecksum(b, 0)
		b = append(b, `\"`...)
	}
	return append(b, '}', '"')
}

// Header is what a reader of the file will find. In a layout with checksums, the metadata has zeros for them. The
// result must not be modified.
func (l *Layout) Header() *Header { return &l.header }

// Size is the size of the file in bytes.
func (l *Layout) Size() int64 { return l.header.Size() }

// Offset is where in the file, in bytes from its beginning, the data of the tensor with the given name begins.
func (l *Layout) Offset(name string) (int64, bool) {
	e, ok := l.header.Find(name)
	if !ok {
		return 0, false
	}
	return l.header.DataStart + e.Begin, true
}

// HeaderBytes returns a fresh copy of everything before the data: length, JSON and padding. In a layout with checksums,
// it has zeros for them.
func (l *Layout) HeaderBytes() []byte { return slices.Clone(l.bytes) }

// HeaderWithChecksums is HeaderBytes with the given checksums by tensor name filled in, for whoever moved the data by
// other means. Each tensor must have one. The length does not depend on the values, so the bytes may be written over
// those of HeaderBytes.
func (l *Layout) HeaderWithChecksums(sums map[string]uint32) ([]byte, error) {
	if l.sumsAt == nil {
		return nil, invalid("checksums", ChecksumsKey, "has no room in this layout; make it with NewChecksummedLayout")
	}
	bySlot := make([]uint32, len(l.header.Entries))
	for i := range l.header.Entries {
		sum, ok := sums[l.header.Entries[i].Name]
		if !ok {
			return nil, invalid("checksums", l.header.Entries[i].Name, "has no checksum")
		}
		bySlot[i] = sum
	}
	if len(sums) != len(bySlot) {
		return nil, invalid("checksums", ChecksumsKey, "are %d, the layout has %d tensors", len(sums), len(bySlot))
	}
	return l.fillChecksums(bySlot), nil
}

// fillChecksums returns the header with the given checksums, one an entry.
func (l *Layout) fillChecksums(sums []uint32) []byte {
	b := slices.Clone(l.bytes)
	for i, at := range l.sumsAt {
		appendChecksum(b[at:at], sums[i])
	}
	return b
}
