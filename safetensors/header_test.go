package safetensors

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/sluice-ml/sluice"
)

const one = `"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}`

func TestParseHeaderRefuses(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("x", 70)
	for name, c := range map[string]struct {
		json string
		data int
		want string
	}{
		"no header":                        {``, 0, `safetensors: parse "header": is empty, want a JSON object`},
		"an array":                         {`[]`, 0, `safetensors: parse "header": starts with '[', want '{'`},
		"leading space":                    {` {}`, 0, `safetensors: parse "header": starts with ' ', want '{'`},
		"leading zeros":                    {"\x00\x00", 0, `safetensors: parse "header": starts with '\x00', want '{'`},
		"not UTF-8":                        {"{\"\xff\":1}", 0, `safetensors: parse "header": is not valid UTF-8 at byte 2`},
		"unclosed":                         {`{`, 0, `safetensors: parse "header": ends at byte 1, want a tensor name`},
		"name is a number":                 {`{1:2}`, 0, `safetensors: parse "header": has '1' at byte 1, want a tensor name`},
		"unclosed name":                    {`{"abc`, 0, `safetensors: parse "header": ends at byte 5, want a closing '"'`},
		"unclosed escaped name":            {`{"a\n`, 0, `safetensors: parse "header": ends at byte 5, want a closing '"'`},
		"raw control character":            {"{\"a\x01\":1}", 0, `safetensors: parse "header": has '\x01' at byte 3, want control characters to be escaped`},
		"raw control behind escape":        {"{\"\\n\n\":1}", 0, `safetensors: parse "header": has '\n' at byte 4, want control characters to be escaped`},
		"unknown escape":                   {`{"\x":1}`, 0, `safetensors: parse "header": has 'x' at byte 3, want one of "\/bfnrtu behind a backslash`},
		"end within escape":                {`{"\`, 0, `safetensors: parse "header": ends at byte 3, want an escaped character`},
		"short unicode escape":             {`{"\u12`, 0, `safetensors: parse "header": has "\\u12" at byte 2, want \u and 4 hexadecimal digits`},
		"bad unicode escape":               {`{"\u12g4":1}`, 0, `safetensors: parse "header": has "\\u12g4" at byte 2, want \u and 4 hexadecimal digits`},
		"half a surrogate pair":            {`{"\ud800":1}`, 0, `safetensors: parse "header": has half of a surrogate pair at byte 2`},
		"second half first":                {`{"\udc00\ud800":1}`, 0, `safetensors: parse "header": has half of a surrogate pair at byte 2`},
		"no colon":                         {`{"a" 1}`, 0, `safetensors: parse "header": has '1' at byte 5, want ':'`},
		"entry is a string":                {`{"a":"b"}`, 0, `safetensors: parse "a": has '"' at byte 5, want an object with dtype, shape and data_offsets`},
		"entry is null":                    {`{"a":null}`, 0, `safetensors: parse "a": has 'n' at byte 5, want an object with dtype, shape and data_offsets`},
		"trailing comma":                   {`{` + one + `,}`, 4, `safetensors: parse "header": has '}' at byte 53, want a tensor name`},
		"no comma":                         {`{` + one + one + `}`, 4, `safetensors: parse "header": has '"' at byte 52, want ',' or '}'`},
		"newline padding":                  {"{}\n", 0, `safetensors: parse "header": has '\n' at byte 2 behind its closing '}', want nothing but spaces`},
		"second object":                    {"{} {}", 0, `safetensors: parse "header": has '{' at byte 3 behind its closing '}', want nothing but spaces`},
		"duplicate tensor":                 {`{` + one + `,` + one + `}`, 4, `safetensors: parse "a": is there twice, want each name once`},
		"duplicate tensor, escaped":        {`{` + one + `,` + strings.Replace(one, `"a"`, `"\u0061"`, 1) + `}`, 4, `safetensors: parse "a": is there twice, want each name once`},
		"duplicate metadata":               {`{"__metadata__":{},"__metadata__":{}}`, 0, `safetensors: parse "__metadata__": is there twice, want it once`},
		"duplicate metadata key":           {`{"__metadata__":{"k":"1","k":"2"}}`, 0, `safetensors: parse "__metadata__": has the key "k" twice, want each once`},
		"metadata is null":                 {`{"__metadata__":null}`, 0, `safetensors: parse "__metadata__": has 'n' at byte 16, want an object of strings`},
		"metadata value is a number":       {`{"__metadata__":{"k":1}}`, 0, `safetensors: parse "__metadata__": has '1' at byte 21, want the value of "k" as a string`},
		"metadata value is an object":      {`{"__metadata__":{"k":{}}}`, 0, `safetensors: parse "__metadata__": has '{' at byte 21, want the value of "k" as a string`},
		"metadata key is a number":         {`{"__metadata__":{1:""}}`, 0, `safetensors: parse "__metadata__": has '1' at byte 17, want a key`},
		"unknown field":                    {`{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4],"x":1}}`, 4, `safetensors: parse "a": has a field "x", want dtype, shape and data_offsets only`},
		"field in another case":            {`{"a":{"DType":"U8","shape":[4],"data_offsets":[0,4]}}`, 4, `safetensors: parse "a": has a field "DType", want dtype, shape and data_offsets only`},
		"long field":                       {`{"a":{"` + long + `":1}}`, 4, `safetensors: parse "a": has a field "` + long[:60] + `...", want dtype, shape and data_offsets only`},
		"duplicate field":                  {`{"a":{"dtype":"U8","dtype":"U8","shape":[4],"data_offsets":[0,4]}}`, 4, `safetensors: parse "a": has dtype twice, want it once`},
		"no dtype":                         {`{"a":{"shape":[4],"data_offsets":[0,4]}}`, 4, `safetensors: parse "a": has no dtype`},
		"no shape":                         {`{"a":{"dtype":"U8","data_offsets":[0,4]}}`, 4, `safetensors: parse "a": has no shape`},
		"no offsets":                       {`{"a":{"dtype":"U8","shape":[4]}}`, 4, `safetensors: parse "a": has no data_offsets`},
		"dtype is a number":                {`{"a":{"dtype":8,"shape":[4],"data_offsets":[0,4]}}`, 4, `safetensors: parse "a": has '8' at byte 14, want dtype as a string`},
		"unknown dtype":                    {`{"a":{"dtype":"F12","shape":[4],"data_offsets":[0,4]}}`, 4, `safetensors: parse "a": dtype is "F12", which the format does not have`},
		"dtype in another case":            {`{"a":{"dtype":"u8","shape":[4],"data_offsets":[0,4]}}`, 4, `safetensors: parse "a": dtype is "u8", which the format does not have`},
		"empty dtype":                      {`{"a":{"dtype":"","shape":[4],"data_offsets":[0,4]}}`, 4, `safetensors: parse "a": dtype is "", which the format does not have`},
		"shape is a number":                {`{"a":{"dtype":"U8","shape":4,"data_offsets":[0,4]}}`, 4, `safetensors: parse "a": has '4' at byte 27, want shape as an array`},
		"shape is unclosed":                {`{"a":{"dtype":"U8","shape":[4`, 4, `safetensors: parse "a": ends at byte 29, want ',' or ']'`},
		"axis missing":                     {`{"a":{"dtype":"U8","shape":[4,],"data_offsets":[0,4]}}`, 4, `safetensors: parse "a": has ']' at byte 30, want shape[1] as an integer`},
		"axis is a bool":                   {`{"a":{"dtype":"U8","shape":[true],"data_offsets":[0,4]}}`, 4, `safetensors: parse "a": has 't' at byte 28, want shape[0] as an integer`},
		"axis is a string":                 {`{"a":{"dtype":"U8","shape":["4"],"data_offsets":[0,4]}}`, 4, `safetensors: parse "a": has '"' at byte 28, want shape[0] as an integer`},
		"axis is negative":                 {`{"a":{"dtype":"U8","shape":[2,-2],"data_offsets":[0,4]}}`, 4, `safetensors: parse "a": shape[1] is -2, want an integer of 0 or more`},
		"axis is a float":                  {`{"a":{"dtype":"U8","shape":[4.0],"data_offsets":[0,4]}}`, 4, `safetensors: parse "a": shape[0] is 4.0, want an integer of 0 or more`},
		"axis has an exponent":             {`{"a":{"dtype":"U8","shape":[4e0],"data_offsets":[0,4]}}`, 4, `safetensors: parse "a": shape[0] is 4e0, want an integer of 0 or more`},
		"axis has a leading zero":          {`{"a":{"dtype":"U8","shape":[04],"data_offsets":[0,4]}}`, 4, `safetensors: parse "a": shape[0] is 04, want an integer of 0 or more`},
		"axis overflows":                   {`{"a":{"dtype":"U8","shape":[9223372036854775808],"data_offsets":[0,4]}}`, 4, `safetensors: parse "a": shape[0] is 9223372036854775808, want at most 9223372036854775807`},
		"axis is beyond 2^53":              {`{"a":{"dtype":"U8","shape":[9007199254740992],"data_offsets":[0,4]}}`, 4, `safetensors: parse "a": shape[0] is 9007199254740992, want less than 2^53`},
		"product overflows":                {`{"a":{"dtype":"U8","shape":[4294967296,4294967296],"data_offsets":[0,0]}}`, 0, `safetensors: parse "a": the product of shape [4294967296,4294967296] overflows`},
		"product overflows past a zero":    {`{"a":{"dtype":"U8","shape":[0,4294967296,4294967296],"data_offsets":[0,0]}}`, 0, `safetensors: parse "a": the product of shape [0,4294967296,4294967296] overflows`},
		"product overflows, foreign":       {`{"a":{"dtype":"C64","shape":[4294967296,4294967296],"data_offsets":[0,0]}}`, 0, `safetensors: parse "a": the product of shape [4294967296,4294967296] overflows`},
		"too many axes":                    {`{"a":{"dtype":"U8","shape":[` + strings.Repeat("1,", 16) + `4],"data_offsets":[0,4]}}`, 4, `safetensors: parse "a": shape has more than 16 axes`},
		"half a byte":                      {`{"a":{"dtype":"F4","shape":[3],"data_offsets":[0,2]}}`, 2, `safetensors: parse "a": F4[3] is 12 bits, want whole bytes`},
		"offsets is an object":             {`{"a":{"dtype":"U8","shape":[4],"data_offsets":{}}}`, 4, `safetensors: parse "a": has '{' at byte 46, want data_offsets as an array`},
		"one offset":                       {`{"a":{"dtype":"U8","shape":[4],"data_offsets":[4]}}`, 4, `safetensors: parse "a": data_offsets has 1 numbers, want begin and end`},
		"three offsets":                    {`{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4,8]}}`, 4, `safetensors: parse "a": data_offsets has more than 2 numbers, want begin and end`},
		"offset is negative":               {`{"a":{"dtype":"U8","shape":[4],"data_offsets":[-4,0]}}`, 4, `safetensors: parse "a": data_offsets[0] is -4, want an integer of 0 or more`},
		"end before begin":                 {`{"a":{"dtype":"U8","shape":[4],"data_offsets":[4,0]}}`, 4, `safetensors: parse "a": data_offsets is [4,0], want the end behind the begin`},
		"too few bytes":                    {`{"a":{"dtype":"BF16","shape":[2,2],"data_offsets":[0,4]}}`, 4, `safetensors: parse "a": data_offsets is [0,4], 4 bytes, want 8 for BF16[2,2]`},
		"bytes for an empty tensor":        {`{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,1]}}`, 1, `safetensors: parse "a": data_offsets is [0,1], 1 bytes, want 0 for U8[0]`},
		"no bytes for a scalar":            {`{"a":{"dtype":"U8","shape":[],"data_offsets":[0,0]}}`, 0, `safetensors: parse "a": data_offsets is [0,0], 0 bytes, want 1 for U8[]`},
		"hole at the beginning":            {`{"a":{"dtype":"U8","shape":[4],"data_offsets":[1,5]}}`, 5, `safetensors: parse "a": begins at byte 1 of the data, want 0: nothing covers the 1 bytes between`},
		"hole between":                     {`{` + one + `,"b":{"dtype":"U8","shape":[1],"data_offsets":[6,7]}}`, 7, `safetensors: parse "b": begins at byte 6 of the data, want 4: nothing covers the 2 bytes between`},
		"overlap":                          {`{` + one + `,"b":{"dtype":"U8","shape":[4],"data_offsets":[2,6]}}`, 6, `safetensors: parse "b": begins at byte 2 of the data, want 4: it overlaps "a"`},
		"same bytes twice":                 {`{` + one + `,"b":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}`, 4, `safetensors: parse "b": begins at byte 0 of the data, want 4: it overlaps "a"`},
		"empty tensor within another":      {`{` + one + `,"b":{"dtype":"U8","shape":[0],"data_offsets":[2,2]}}`, 4, `safetensors: parse "b": begins at byte 2 of the data, want 4: it overlaps "a"`},
		"empty tensor behind the end":      {`{` + one + `,"b":{"dtype":"U8","shape":[0],"data_offsets":[5,5]}}`, 5, `safetensors: parse "b": begins at byte 5 of the data, want 4: nothing covers the 1 bytes between`},
		"file is too short":                {`{` + one + `}`, 3, `safetensors: parse "a": ends at byte 4 of the data, but the file has only 3 bytes of data`},
		"file is too long":                 {`{` + one + `}`, 5, `safetensors: parse "data": is 5 bytes long, but the tensors end at byte 4`},
		"data without tensors":             {`{}`, 1, `safetensors: parse "data": is 1 bytes long, but the tensors end at byte 0`},
		"terminal control in a name":       {`{"\u001b[31m":1}`, 0, `safetensors: parse "?[31m": has '1' at byte 14, want an object with dtype, shape and data_offsets`},
		"a very large number is cut":       {`{"a":{"dtype":"U8","shape":[` + strings.Repeat("9", 300) + `],"data_offsets":[0,4]}}`, 4, `safetensors: parse "a": shape[0] is ` + strings.Repeat("9", 40) + `, want at most 9223372036854775807`},
		"duplicate among many tensors":     {manyTensors(40, 20), 40, `safetensors: parse "t20": is there twice, want each name once`},
		"duplicate at the index threshold": {manyTensors(17, 0), 17, `safetensors: parse "t0": is there twice, want each name once`},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			file := fileOf(c.json, c.data)
			_, err := ParseHeader(file, int64(len(file)))
			wantKind(t, err, sluice.Corrupt, c.want)
			_, again := ReadHeader(bytes.NewReader(file), int64(len(file)))
			if again == nil || again.Error() != err.Error() {
				t.Errorf("ReadHeader says %v, ParseHeader says %v", again, err)
			}
		})
	}
}

// manyTensors is a header of n tensors of one byte each, the last of which has the name of tensor dup.
func manyTensors(n, dup int) string {
	var b strings.Builder
	b.WriteByte('{')
	for i := range n {
		name := i
		if i == n-1 {
			name = dup
		}
		fmt.Fprintf(&b, `"t%d":{"dtype":"U8","shape":[],"data_offsets":[%d,%d]},`, name, i, i+1)
	}
	return strings.TrimSuffix(b.String(), ",") + "}"
}

func TestAHeaderTellsTheSizeThatNobodyKnows(t *testing.T) {
	t.Parallel()
	file := func(json string) []byte {
		return append(binary.LittleEndian.AppendUint64(nil, uint64(len(json))), json...)
	}
	h, err := ParseHeader(file(`{"b":{"dtype":"U8","shape":[3],"data_offsets":[4,7]},`+one+`}`), -1)
	if err != nil || h.Size() != h.DataStart+7 || len(h.Entries) != 2 || h.Entries[1].Name != "b" {
		t.Errorf("a good header gives %+v, %v", h, err)
	}
	for _, bad := range []string{
		`{"b":{"dtype":"U8","shape":[3],"data_offsets":[5,8]},` + one + `}`,
		`{"b":{"dtype":"U8","shape":[3],"data_offsets":[3,6]},` + one + `}`,
		fmt.Sprintf(`{"a":{"dtype":"U8","shape":[1],"data_offsets":[%d,%d]}}`, int64(math.MaxInt64-1), int64(math.MaxInt64)),
	} {
		if h, err := ParseHeader(file(bad), -1); sluice.KindOf(err) != sluice.Corrupt {
			t.Errorf("%s gives %+v, %v", bad, h, err)
		}
	}
}

func TestParseHeaderRefusesLengths(t *testing.T) {
	t.Parallel()
	length := func(n uint64) []byte { return binary.LittleEndian.AppendUint64(nil, n) }
	for name, c := range map[string]struct {
		data []byte
		size int64
		want string
	}{
		"empty file":                 {nil, 0, `safetensors: parse "file": is 0 bytes long, want at least the 8 of the header length`},
		"seven bytes":                {make([]byte, 7), 7, `safetensors: parse "file": is 7 bytes long, want at least the 8 of the header length`},
		"no size, seven bytes":       {make([]byte, 7), -1, `safetensors: parse "file": is 7 bytes long, want at least the 8 of the header length`},
		"no size, length too large":  {length(100_000_001), -1, `safetensors: parse "header length": is 100000001, want at most 100000000`},
		"length beyond the format":   {length(100_000_001), 1 << 40, `safetensors: parse "header length": is 100000001, want at most 100000000`},
		"length beyond int64":        {length(1<<64 - 1), 1 << 40, `safetensors: parse "header length": is 18446744073709551615, want at most 100000000`},
		"length beyond the file":     {length(3), 10, `safetensors: parse "header length": is 3, but only 2 bytes follow it in the file`},
		"header beyond what is here": {append(length(4), "{}"...), 12, `safetensors: parse "header": is 4 bytes long, only 2 of them are here`},
		"file of zeros":              {make([]byte, 64), 64, `safetensors: parse "header": is empty, want a JSON object`},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, err := ParseHeader(c.data, c.size)
			wantKind(t, err, sluice.Corrupt, c.want)
		})
	}
}

func TestParseHeaderAccepts(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		json string
		data int
		want Header
	}{
		"an empty file":             {`{}`, 0, Header{}},
		"padding":                   {`{}      `, 0, Header{}},
		"empty metadata":            {`{"__metadata__":{}}`, 0, Header{Metadata: map[string]string{}}},
		"escapes":                   {`{"__metadata__":{"\"\\\/\b\f\n\r\t":"\u00e9\u2028\ud83d\ude00x\u0000"}}`, 0, Header{Metadata: map[string]string{"\"\\/\b\f\n\r\t": "é\u2028😀x\x00"}}},
		"unescaped":                 {`{"__metadata__":{"é":"😀` + "\u2028\x7f" + `"}}`, 0, Header{Metadata: map[string]string{"é": "😀\u2028\x7f"}}},
		"metadata last":             {`{` + one + `,"__metadata__":{"k":"v"}}`, 4, Header{Metadata: map[string]string{"k": "v"}, Entries: []Entry{{"a", sluice.Spec{Shape: []int64{4}, DType: sluice.UInt8}, "U8", 0, 4}}}},
		"white space":               {"{\n\t\"a\" : {\r\n \"data_offsets\" : [ 0 , 4 ] , \"shape\" : [ 4 ] , \"dtype\" : \"U8\" } } ", 4, Header{Entries: []Entry{{"a", sluice.Spec{Shape: []int64{4}, DType: sluice.UInt8}, "U8", 0, 4}}}},
		"names in any order":        {`{"b":{"dtype":"I16","shape":[1],"data_offsets":[4,6]},` + one + `}`, 6, Header{Entries: []Entry{{"a", sluice.Spec{Shape: []int64{4}, DType: sluice.UInt8}, "U8", 0, 4}, {"b", sluice.Spec{Shape: []int64{1}, DType: sluice.Int16}, "I16", 4, 6}}}},
		"empty tensors at one byte": {`{"z":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"y":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"x":{"dtype":"F32","shape":[3,0],"data_offsets":[0,0]}}`, 1, Header{Entries: []Entry{{"y", sluice.Spec{Shape: []int64{0}, DType: sluice.UInt8}, "U8", 0, 0}, {"x", sluice.Spec{Shape: []int64{3, 0}, DType: sluice.Float32}, "F32", 0, 0}, {"z", sluice.Spec{Shape: []int64{1}, DType: sluice.UInt8}, "U8", 0, 1}}}},
		"a scalar":                  {`{"":{"dtype":"F64","shape":[],"data_offsets":[0,8]}}`, 8, Header{Entries: []Entry{{"", sluice.Spec{DType: sluice.Float64}, "F64", 0, 8}}}},
		"foreign dtypes": {`{"a":{"dtype":"F4","shape":[2,3],"data_offsets":[0,3]},"b":{"dtype":"F6_E2M3","shape":[4],"data_offsets":[3,6]},"c":{"dtype":"F8_E8M0","shape":[2],"data_offsets":[6,8]},"d":{"dtype":"C64","shape":[1],"data_offsets":[8,16]}}`, 16, Header{Entries: []Entry{
			{"a", sluice.Spec{Shape: []int64{2, 3}}, "F4", 0, 3},
			{"b", sluice.Spec{Shape: []int64{4}}, "F6_E2M3", 3, 6},
			{"c", sluice.Spec{Shape: []int64{2}}, "F8_E8M0", 6, 8},
			{"d", sluice.Spec{Shape: []int64{1}}, "C64", 8, 16},
		}}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			file := fileOf(c.json, c.data)
			c.want.DataStart = int64(8 + len(c.json))
			got, err := ParseHeader(file, int64(len(file)))
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(&c.want, got, cmpopts.IgnoreUnexported(Header{}), cmpopts.EquateEmpty()); diff != "" {
				t.Error(diff)
			}
			if (got.Metadata == nil) != (c.want.Metadata == nil) {
				t.Errorf("metadata is %v, want %v", got.Metadata, c.want.Metadata)
			}
			if got.Size() != int64(len(file)) {
				t.Errorf("size is %d, want %d", got.Size(), len(file))
			}
		})
	}
}

func TestParseHeaderKeepsNothingOfItsInput(t *testing.T) {
	t.Parallel()
	file := fileOf(`{"__metadata__":{"k":"v"},`+one+`}`, 4)
	h, err := ParseHeader(file, int64(len(file)))
	if err != nil {
		t.Fatal(err)
	}
	clear(file)
	if h.Entries[0].Name != "a" || h.Entries[0].RawDType != "U8" || h.Metadata["k"] != "v" {
		t.Errorf("changed with the input: %+v", h)
	}
}

func TestFindWorksBelowAndAboveTheIndex(t *testing.T) {
	t.Parallel()
	for _, n := range []int{1, indexAbove, indexAbove + 1, 300} {
		file := fileOf(manyTensors(n, n-1), n)
		h, err := ParseHeader(file, int64(len(file)))
		if err != nil {
			t.Fatal(err)
		}
		for i := range n {
			name := fmt.Sprintf("t%d", i)
			if e, ok := h.Find(name); !ok || e.Name != name || e.Begin != int64(i) {
				t.Errorf("%d tensors: %s is %+v", n, name, e)
			}
		}
		if _, ok := h.Find("other"); ok {
			t.Errorf("%d tensors: found one that is not there", n)
		}
	}
}

func TestFindWorksWhenManyEntriesWereReordered(t *testing.T) {
	t.Parallel()
	const n = 100
	var b strings.Builder
	for i := range n {
		fmt.Fprintf(&b, `,"t%d":{"dtype":"U8","shape":[1],"data_offsets":[%d,%d]}`, i, n-1-i, n-i)
	}
	file := fileOf("{"+b.String()[1:]+"}", n)
	h, err := ParseHeader(file, int64(len(file)))
	if err != nil {
		t.Fatal(err)
	}
	for i := range n {
		if e, ok := h.Find(fmt.Sprintf("t%d", i)); !ok || e.Begin != int64(n-1-i) {
			t.Errorf("t%d is %+v", i, e)
		}
	}
}

func TestReadHeaderReadsLongHeaders(t *testing.T) {
	t.Parallel()
	for _, n := range []int{firstRead - lengthBytes - 1, firstRead - lengthBytes, firstRead - lengthBytes + 1, 3 * firstRead} {
		json := `{"__metadata__":{"k":"` + strings.Repeat("v", n-len(`{"__metadata__":{"k":""}}`)) + `"}}`
		file := fileOf(json, 0)
		h, err := ReadHeader(bytes.NewReader(file), int64(len(file)))
		if err != nil {
			t.Fatalf("header of %d bytes: %v", n, err)
		}
		if h.DataStart != int64(len(file)) || len(h.Metadata["k"]) != n-25 {
			t.Errorf("header of %d bytes: data begins at %d", n, h.DataStart)
		}
	}
}

func TestReadHeaderRefusesAFileThatEndsEarly(t *testing.T) {
	t.Parallel()
	file := fileOf(`{`+one+`}`, 4)
	_, err := ReadHeader(bytes.NewReader(file[:20]), int64(len(file)))
	wantKind(t, err, sluice.Corrupt, fmt.Sprintf(`safetensors: read "header": ends after 20 bytes, want %d`, len(file)))
}

type brokenReader struct{ err error }

func (r brokenReader) ReadAt([]byte, int64) (int, error) { return 0, r.err }

func TestReadHeaderTellsTheMediumFromTheBytes(t *testing.T) {
	t.Parallel()
	cause := errors.New("cable unplugged")
	_, err := ReadHeader(brokenReader{cause}, 100)
	wantKind(t, err, sluice.Unavailable, `safetensors: read "header": stopped after 0 of 100 bytes: cable unplugged`)
	if !errors.Is(err, cause) {
		t.Error("the cause is lost")
	}
	_, err = ReadHeader(brokenReader{&sluice.Error{Kind: sluice.NotFound}}, 100)
	wantKind(t, err, sluice.NotFound, "")
	_, err = ReadHeader(brokenReader{io.ErrUnexpectedEOF}, 100)
	wantKind(t, err, sluice.Corrupt, "")
}

func TestDTypeNamesAreAMapBothWays(t *testing.T) {
	t.Parallel()
	for _, d := range sluice.DTypes() {
		name := DTypeName(d)
		if got, ok := ParseDType(name); !ok || got != d || name == "" {
			t.Errorf("%s is %q, which is %s", d, name, got)
		}
	}
	for _, name := range []string{"", "bf16", "F4", "C64", "bfloat16"} {
		if d, ok := ParseDType(name); ok {
			t.Errorf("%q is %s", name, d)
		}
	}
	if DTypeName(0) != "" || DTypeName(200) != "" {
		t.Error("an invalid dtype has a name")
	}
}

func TestParseHeaderBoundsTheNumberOfItems(t *testing.T) {
	t.Parallel()
	metadata := `{"__metadata__":{"a":"","b":"","c":"","d":""}}`
	s := scanner{text: metadata, op: "parse", maxItems: 3}
	_, err := s.header(int64(8+len(metadata)), true)
	wantKind(t, err, sluice.Corrupt, `safetensors: parse "__metadata__": has more than 3 keys`)
	tensors := manyTensors(4, 3)
	s = scanner{text: tensors, op: "parse", maxItems: 3}
	_, err = s.header(int64(8+len(tensors)+4), true)
	wantKind(t, err, sluice.Corrupt, `safetensors: parse "t3": is tensor 4, want at most 3`)
	_, err = NewLayout(make([]sluice.Feature, MaxItems+1), nil)
	wantKind(t, err, sluice.Invalid, `safetensors: layout "features": are 1048577, want at most 1048576`)
}
