package prompt

import (
	"bytes"
	"encoding/json"
	"math/big"
	"slices"
	"strings"
	"testing"

	"github.com/sluice-ml/sluice"
)

// oracle reads a line with encoding/json, as far as that tells fields apart. ok is false where the line must be refused.
func oracle(data []byte, limit int64) (ids []int64, mask []byte, ok bool) {
	if !json.Valid(data) {
		return nil, nil, false
	}
	var fields map[string]json.RawMessage // exact names, unlike a struct's
	if json.Unmarshal(data, &fields) != nil {
		return nil, nil, false
	}
	numbers := func(name string) ([]int64, bool) {
		d := json.NewDecoder(bytes.NewReader(fields[name]))
		d.UseNumber()
		var list []any
		if d.Decode(&list) != nil || list == nil {
			return nil, false
		}
		out := []int64{}
		for _, v := range list {
			n, isNumber := v.(json.Number)
			i, isInt := new(big.Int).SetString(string(n), 10)
			if !isNumber || !isInt || !i.IsInt64() || strings.HasPrefix(string(n), "-") {
				return nil, false
			}
			out = append(out, i.Int64())
		}
		return out, true
	}
	ids, ok = numbers("input_ids")
	bits, okMask := numbers("loss_mask")
	if !ok || !okMask || len(ids) != len(bits) {
		return nil, nil, false
	}
	for i := range ids {
		if ids[i] >= limit || bits[i] > 1 {
			return nil, nil, false
		}
		mask = append(mask, byte(bits[i]))
	}
	return ids, mask, true
}

func FuzzLine(f *testing.F) {
	for _, s := range []string{
		`{"input_ids":[1,2,3],"loss_mask":[0,1,1]}`,
		` { "input_ids" : [ 1 , 2 ] , "loss_mask" : [ 0 , 1 ] , "attention_mask":[1,0], "x":{"a":[1.5e-3,true,null,"\u00e9"]} } `,
		`{"input_ids":[],"loss_mask":[]}`, `{"input_ids":[1.0,01,-1,9007199254740992],"loss_mask":[true]}`,
		`{"conversations":[{"from":"human","value":"a\ud83d\ude00\n"},{"from":"gpt","value":"b"}]}`,
		`{"messages":[{"role":"user","content":"Hi"},{"role":"assistant","content":"\"\\\/\b\f\n\r\t"}]}`,
		`{"a":[[[[]]]],"b":{"c":{}}}`, `{}`, `[`, "{\"a\":\"\xff\"}", `{"input_ids":[1 2]}`, `{"input\u005fids":[1],"loss_mask":[1]}`,
	} {
		f.Add([]byte(s), int64(100))
	}
	f.Fuzz(func(t *testing.T, data []byte, vocab int64) {
		p := newLineParser(vocab)
		given := bytes.Clone(data)
		fault := p.parse(data)
		if !bytes.Equal(data, given) {
			t.Fatal("the line was written to")
		}
		if fault != nil {
			for _, r := range fault.detail {
				if r < 0x20 || r == 0x7f {
					t.Fatalf("the message %q carries control characters", fault.detail)
				}
			}
		}
		limit := int64(p.limit)
		if fault == nil {
			if !json.Valid(data) {
				t.Fatalf("accepted %q, which is not JSON", data)
			}
			if p.turns != nil {
				checkTurns(t, data, p.turns)
				return
			}
			if len(p.ids) != len(p.mask) {
				t.Fatalf("%d ids, %d mask entries", len(p.ids), len(p.mask))
			}
			for i, id := range p.ids {
				if id < 0 || id >= limit || p.mask[i] > 1 {
					t.Fatalf("entry %d: id %d, mask %d", i, id, p.mask[i])
				}
			}
		}
		ids, mask, ok := oracle(data, limit)
		// The oracle knows nothing of attention masks, of repeated names and of the bound on nesting.
		special := bytes.Contains(data, []byte("attention")) || bytes.Contains(data, []byte(`\`))
		switch {
		case special:
		case ok && fault != nil && !strings.Contains(fault.detail, "twice") && !strings.Contains(fault.detail, "nested"):
			t.Fatalf("refused %q: %s", data, fault.detail)
		case !ok && fault == nil:
			t.Fatalf("accepted %q", data)
		case ok && fault == nil && (!slices.Equal(ids, p.ids) || !slices.Equal(mask, p.mask)):
			t.Fatalf("got %v %v, want %v %v", p.ids, p.mask, ids, mask)
		}
	})
}

// checkTurns compares turns with what encoding/json makes of the same text.
func checkTurns(t *testing.T, data []byte, got []sluice.Message) {
	var line map[string]json.RawMessage
	if err := json.Unmarshal(data, &line); err != nil {
		t.Fatal(err)
	}
	raw := line["messages"]
	if raw == nil {
		raw = line["conversations"]
	}
	var turns []map[string]any
	if err := json.Unmarshal(raw, &turns); err != nil {
		t.Fatal(err)
	}
	if len(turns) != len(got) {
		t.Fatalf("%d turns, want %d", len(got), len(turns))
	}
	for i, m := range turns {
		if m["role"] != nil && m["content"] != nil {
			if m["role"] != got[i].Role || m["content"] != got[i].Content {
				t.Fatalf("turn %d is %q, want %q", i, got[i], m)
			}
		} else if m["value"] != got[i].Content {
			t.Fatalf("turn %d is %q, want %q", i, got[i], m)
		}
	}
}

func TestAnIDAboveTheExactIntegersIsRefusedWithoutAVocabulary(t *testing.T) {
	t.Parallel()
	p := newLineParser(0)
	if f := p.parse([]byte(`{"input_ids":[9007199254740991],"loss_mask":[1]}`)); f != nil {
		t.Fatal(f.detail)
	}
	f := p.parse([]byte(`{"input_ids":[9007199254740992],"loss_mask":[1]}`))
	if want := "input_ids[0] is 9007199254740992, want less than 2^53"; f == nil || f.detail != want {
		t.Fatalf("got %v, want %s", f, want)
	}
}

func BenchmarkParse(b *testing.B) {
	var ids, mask []string
	for i := range 2048 {
		ids, mask = append(ids, big.NewInt(int64(i*61%128000)).String()), append(mask, "1")
	}
	line := []byte(`{"input_ids": [` + strings.Join(ids, ", ") + `], "loss_mask": [` + strings.Join(mask, ", ") + `]}`)
	p := newLineParser(128256)
	b.SetBytes(int64(len(line)))
	b.ReportAllocs()
	for b.Loop() {
		if f := p.parse(line); f != nil {
			b.Fatal(f.detail)
		}
	}
}
