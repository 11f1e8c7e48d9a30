package tinyllama

import (
	"errors"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/sluice-ml/sluice"
)

// onlyTokenizer is a model that can do nothing but tokenise.
func onlyTokenizer(vocab int) *Model {
	return &Model{name: "m", cfg: config{vocab: vocab, bytes: true}}
}

func TestEncodeWritesTheTemplate(t *testing.T) {
	t.Parallel()
	ids, mask, err := onlyTokenizer(263).Encode([]sluice.Message{
		{Role: "system", Content: "s"}, {Role: "user", Content: ""}, {Role: "assistant", Content: "hé"}, {Role: "user", Content: "<end>"},
	})
	if err != nil {
		t.Fatal(err)
	}
	wantIDs := []int64{256, 259, 's', 262, 260, 262, 261, 'h', 0xc3, 0xa9, 262, 260, '<', 'e', 'n', 'd', '>', 262}
	wantMask := []int64{0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0}
	if d := cmp.Diff(wantIDs, ids); d != "" {
		t.Errorf("ids (-want +got):\n%s", d)
	}
	if d := cmp.Diff(wantMask, mask); d != "" {
		t.Errorf("mask (-want +got):\n%s", d)
	}
	if got, want := Decode(append(ids, 257, 258, 300, -1)), "<bos><system>s<end><user><end><assistant>hé<end><user><end><end><eos><pad><300><-1>"; got != want {
		t.Errorf("Decode gives %q, want %q", got, want)
	}
}

func TestEncodeRefusesByName(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		talk  []sluice.Message
		words []string
	}{
		{nil, []string{"conversation", "empty"}},
		{[]sluice.Message{{Role: "user", Content: "x"}, {Role: "narrator"}}, []string{"conversation[1].role", "narrator", "assistant"}},
		{[]sluice.Message{{Content: "x"}}, []string{"conversation[0].role", `""`}},
		{[]sluice.Message{{Role: "user", Content: "caf\xe9"}}, []string{"conversation[0].content", "UTF-8", "byte 3"}},
	} {
		ids, mask, err := onlyTokenizer(264).Encode(c.talk)
		if !errors.Is(err, sluice.ErrInvalid) || ids != nil || mask != nil {
			t.Errorf("%v: ids %v, error %v, want ErrInvalid", c.talk, ids, err)
			continue
		}
		for _, w := range c.words {
			if !strings.Contains(err.Error(), w) {
				t.Errorf("the message does not say %q: %v", w, err)
			}
		}
	}
}

func TestAModelThatDoesNotSaySoHasNoTokenizer(t *testing.T) {
	t.Parallel()
	other := &Model{name: "m", cfg: config{vocab: 1000}} // large enough for the ids, which mean other words there
	if _, _, err := other.Encode([]sluice.Message{{Role: "user"}}); !errors.Is(err, sluice.ErrUnsupported) || !strings.Contains(err.Error(), `does not say "byte_tokenizer": true`) {
		t.Errorf("error %v, want ErrUnsupported", err)
	}
	if other.Info().Tokenizer != "" || onlyTokenizer(263).Info().Tokenizer == "" {
		t.Error("Info has a tokenizer exactly if the model says so")
	}
	small := `{"architectures":["LlamaForCausalLM"],"hidden_size":8,"intermediate_size":8,"num_hidden_layers":1,"num_attention_heads":1,"vocab_size":262,"byte_tokenizer":true}`
	if _, err := parseConfig([]byte(small)); !errors.Is(err, sluice.ErrInvalid) || !strings.Contains(err.Error(), "byte_tokenizer is true, but vocab_size is 262; that tokenizer needs 263 entries") {
		t.Errorf("got %v", err)
	}
}

func TestDecodeIsTextForPeople(t *testing.T) {
	t.Parallel()
	if got := Decode([]int64{'h', 0xc3}); got != "h\uFFFD" {
		t.Errorf("a cut character gives %q", got)
	}
	rapid.Check(t, func(t *rapid.T) {
		content := rapid.String().Draw(t, "content")
		ids, mask, err := onlyTokenizer(264).Encode([]sluice.Message{{Role: "assistant", Content: content}})
		if err != nil {
			t.Fatal(err)
		}
		if got := Decode(ids); got != "<bos><assistant>"+content+"<end>" {
			t.Errorf("%q became %q", content, got)
		}
		sum := 0
		for _, m := range mask {
			sum += int(m)
		}
		if sum != len(content)+1 || !utf8.ValidString(Decode(ids[:rapid.IntRange(0, len(ids)).Draw(t, "cut")])) {
			t.Errorf("%d supervised tokens for %d bytes", sum, len(content))
		}
	})
}
