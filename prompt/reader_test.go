package prompt_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/fstest"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"
	"pgregory.net/rapid"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/prompt"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// jsonl makes a file system of one file, train.jsonl.
func jsonl(lines ...string) fstest.MapFS {
	return fstest.MapFS{"train.jsonl": {Data: []byte(strings.Join(lines, "\n") + "\n")}}
}

// ids is a line whose first id is first, so that rows can be told apart, n tokens long, all supervised.
func ids(first, n int) string {
	var a, b []string
	for i := range n {
		a, b = append(a, fmt.Sprint(first+i)), append(b, "1")
	}
	return `{"input_ids":[` + strings.Join(a, ",") + `],"loss_mask":[` + strings.Join(b, ",") + `]}`
}

func numbered(n int) []string {
	var out []string
	for i := range n {
		out = append(out, ids(i, 2))
	}
	return out
}

func open(t testing.TB, o prompt.Options) *prompt.Reader {
	t.Helper()
	if o.Files == nil {
		o.Files = []string{"train.jsonl"}
	}
	r, err := prompt.Open(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := r.Close(); err != nil {
			t.Error(err)
		}
	})
	return r
}

func drain(t testing.TB, r *prompt.Reader) []*sluice.PromptBatch {
	t.Helper()
	var out []*sluice.PromptBatch
	for b, err := range r.All(t.Context()) {
		if err != nil {
			t.Fatal(err)
		}
		if err := b.Validate(0); err != nil {
			t.Fatal(err)
		}
		out = append(out, b)
	}
	return out
}

// firstIDs lists the first id of every row.
func firstIDs(batches []*sluice.PromptBatch) []int64 {
	var out []int64
	for _, b := range batches {
		v := sluice.View[int64](b.InputIDs)
		for r := range b.InputIDs.Shape[0] {
			out = append(out, v[r*b.InputIDs.Shape[1]])
		}
	}
	return out
}

func positions(batches []*sluice.PromptBatch) []sluice.Position {
	var out []sluice.Position
	for _, b := range batches {
		out = append(out, b.Positions...)
	}
	return out
}

func rows(t sluice.Tensor) [][]int64 {
	v := sluice.View[int64](t)
	return slices.Collect(slices.Chunk(v, int(t.Shape[1])))
}

func equal(t *testing.T, what string, got, want any) {
	t.Helper()
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("%s (-want +got):\n%s", what, d)
	}
}

func TestARowIsTheIDsAndTheMaskAsGiven(t *testing.T) {
	t.Parallel()
	b := drain(t, open(t, prompt.Options{FS: jsonl(`{"id":"x","input_ids":[7, 8,9],"source":{"a":[1,{}]},"loss_mask":[0,1,1]}`)}))
	if len(b) != 1 {
		t.Fatalf("%d batches, want 1", len(b))
	}
	equal(t, "ids", rows(b[0].InputIDs), [][]int64{{7, 8, 9}})
	equal(t, "attention", rows(b[0].AttentionMask), [][]int64{{1, 1, 1}})
	equal(t, "loss", rows(b[0].LossMask), [][]int64{{0, 1, 1}})
	if b[0].Packed() {
		t.Error("a plain batch carries packing tensors")
	}
}

func TestLinesComeInFileOrder(t *testing.T) {
	t.Parallel()
	fsys := fstest.MapFS{
		"b.jsonl": {Data: []byte(ids(1, 2) + "\n" + ids(2, 2))},
		"a.jsonl": {Data: []byte(ids(3, 2) + "\n")},
		"0.jsonl": {},
	}
	r := open(t, prompt.Options{FS: fsys, Files: []string{"b.jsonl", "0.jsonl", "a.jsonl", "b.jsonl"}})
	b := drain(t, r)
	equal(t, "rows", firstIDs(b), []int64{1, 2, 3, 1, 2})
	for i, p := range positions(b) {
		equal(t, "position", p, sluice.Position{Source: r.Source(), Epoch: 0, Index: int64(i)})
	}
}

func TestLineEndingsMarksAndBlankLinesDoNotMatter(t *testing.T) {
	t.Parallel()
	for name, data := range map[string]string{
		"CRLF":             ids(1, 2) + "\r\n" + ids(2, 2) + "\r\n",
		"no final newline": ids(1, 2) + "\n" + ids(2, 2),
		"BOM":              "\xef\xbb\xbf" + ids(1, 2) + "\n" + ids(2, 2) + "\n",
		"blank lines":      "\n \t\r\n" + ids(1, 2) + "\n\n\n" + ids(2, 2) + "\n\n",
		"spaces around":    "  " + ids(1, 2) + "\t \n " + ids(2, 2) + "  ",
	} {
		for _, shuffle := range []bool{false, true} {
			r := open(t, prompt.Options{FS: fstest.MapFS{"train.jsonl": {Data: []byte(data)}}, Shuffle: shuffle, BlockBytes: 7})
			b := drain(t, r)
			got := firstIDs(b)
			slices.Sort(got)
			equal(t, name, got, []int64{1, 2})
			for i, p := range positions(b) {
				equal(t, name+": index", p.Index, int64(i))
			}
			equal(t, name+": bytes", r.Stats().Bytes, int64(len(data)))
		}
	}
}

func TestThePaddingThatALineDeclaresIsCutOff(t *testing.T) {
	t.Parallel()
	b := drain(t, open(t, prompt.Options{FS: jsonl(`{"input_ids":[7,8,0,0],"attention_mask":[1,1,0,0],"loss_mask":[0,1,0,0]}`)}))
	equal(t, "ids", rows(b[0].InputIDs), [][]int64{{7, 8}})
}

// shout is a tokenizer of one token a turn: the turn's length.
type shout struct{ heard *[][]sluice.Message }

func (s shout) Encode(c []sluice.Message) (ids, mask []int64, err error) {
	if s.heard != nil {
		*s.heard = append(*s.heard, c)
	}
	for _, m := range c {
		if m.Content == "refuse" {
			return nil, nil, errors.New("no such template")
		}
		ids = append(ids, int64(len(m.Content)))
		bit := int64(0)
		if m.Role == "assistant" {
			bit = 1
		}
		mask = append(mask, bit)
	}
	if len(c) == 1 && c[0].Content == "uneven" {
		mask = nil
	}
	return ids, mask, nil
}

func TestConversationsOfEveryFormReachTheTokenizer(t *testing.T) {
	t.Parallel()
	var heard [][]sluice.Message
	b := drain(t, open(t, prompt.Options{Tokenizer: shout{&heard}, FS: jsonl(
		`{"messages":[{"role":"user","content":"Hi"},{"role":"assistant","content":"H\u00e9 \ud83d\ude00\n","extra":[1]}]}`,
		`{"id":1,"conversations":[{"role":"user","content":"Hi"},{"role":"assistant","content":"Ho"}]}`,
		`{"conversations":[{"from":"system","value":""},{"from":"human","value":"Hi"},{"value":"Ho","from":"gpt"}]}`,
	)}))
	equal(t, "turns", heard, [][]sluice.Message{
		{{Role: "user", Content: "Hi"}, {Role: "assistant", Content: "Hé 😀\n"}},
		{{Role: "user", Content: "Hi"}, {Role: "assistant", Content: "Ho"}},
		{{Role: "system"}, {Role: "user", Content: "Hi"}, {Role: "assistant", Content: "Ho"}},
	})
	equal(t, "loss", rows(b[2].LossMask), [][]int64{{0, 0, 1}})
}

func TestTokenIDsComeBeforeTheTextTheyWereMadeOf(t *testing.T) {
	t.Parallel()
	b := drain(t, open(t, prompt.Options{FS: jsonl(`{"messages":[{"role":"user"}],"input_ids":[4,5],"loss_mask":[0,1]}`)}))
	equal(t, "ids", rows(b[0].InputIDs), [][]int64{{4, 5}})
}

func TestABadLineSaysWhereAndWhat(t *testing.T) {
	t.Parallel()
	const in = `prompt: read "train.jsonl:2": `
	cases := []struct{ line, want string }{
		{`{"input_ids":[1,2]}`, `has input_ids but no loss_mask; give a loss_mask of the same length, 1 on each token that the draft shall learn and 0 elsewhere`},
		{`{"input_ids":[1,2],"loss_mask":[1]}`, `loss_mask has 1 entries, want 2 like input_ids`},
		{`{"input_ids":[1,-2],"loss_mask":[0,1]}`, `input_ids[1] is -2, want 0 or more`},
		{`{"input_ids":[1,100],"loss_mask":[0,1]}`, `input_ids[1] is 100, want less than the vocabulary size 100`},
		{`{"input_ids":[99999999999999999999999999999999999999999999],"loss_mask":[0]}`, `input_ids[0] is 99999999999999999999999999999999..., want less than the vocabulary size 100`},
		{`{"input_ids":[1.0],"loss_mask":[1]}`, `input_ids[0] is 1.0, want an integer`},
		{`{"input_ids":[1e2],"loss_mask":[1]}`, `input_ids[0] is 1e2, want an integer`},
		{`{"input_ids":[007],"loss_mask":[1]}`, `input_ids[0] is 007, want an integer without leading zeros`},
		{`{"input_ids":["7"],"loss_mask":[1]}`, `input_ids[0] is "7", want an integer`},
		{`{"input_ids":[true],"loss_mask":[1]}`, `input_ids[0] is true, want an integer`},
		{`{"input_ids":[null],"loss_mask":[1]}`, `input_ids[0] is null, want an integer`},
		{`{"input_ids":[[1,2]],"loss_mask":[[0,1]]}`, `input_ids[0] is an array, want an integer`},
		{`{"input_ids":null,"loss_mask":[1]}`, `input_ids is null, want an array of token ids`},
		{`{"input_ids":"1 2","loss_mask":[1]}`, `input_ids is "1, want an array of token ids`},
		{`{"input_ids":[1,2],"loss_mask":[0,2]}`, `loss_mask[1] is 2, want 0 or 1`},
		{`{"input_ids":[1,2],"loss_mask":[0,true]}`, `loss_mask[1] is true, want 0 or 1`},
		{`{"input_ids":[1,2],"loss_mask":[0,1.0]}`, `loss_mask[1] is 1.0, want 0 or 1`},
		{`{"input_ids":[1,2],"loss_mask":[0,01]}`, `loss_mask[1] is 01, want 0 or 1`},
		{`{"input_ids":[1,2],"loss_mask":7}`, `loss_mask is 7, want an array of 0 and 1`},
		{`{"input_ids":[1],"input_ids":[2],"loss_mask":[1]}`, `input_ids is given twice`},
		{`{"input_ids":[1],"loss_mask":[1],"input\u005fids":[2]}`, `input_ids is given twice`},
		{`{"input_ids":[1,2],"loss_mask":[0,1],"attention_mask":[0,1]}`, `attention_mask[1] is 1 after a 0, want padding at the right only`},
		{`{"input_ids":[1,2],"loss_mask":[0,1],"attention_mask":[1,0]}`, `loss_mask[1] is 1 where attention_mask is 0`},
		{`{"input_ids":[1,2],"loss_mask":[0,1],"attention_mask":[1]}`, `attention_mask has 1 entries, want 2 like input_ids`},
		{`{"Input_IDs":[1,2],"text":"\u001b[31m"}`, `has no input_ids but Input_IDs, text; want input_ids with loss_mask, or conversations, or messages`},
		{`{}`, `has no input_ids; want input_ids with loss_mask, or conversations, or messages`},
		{`[1,2]`, `is an array, want a JSON object`},
		{`hello`, `is not valid JSON: 'h' at column 1, want a JSON object`},
		{`{"input_ids":[1,2`, `is not valid JSON: the line ends at column 18, want ',' or ']' in input_ids`},
		{`{"input_ids":[1,]}`, `is not valid JSON: ']' at column 17, want a token id for input_ids[1]`},
		{`{"input_ids":[1 2]}`, `is not valid JSON: '2' at column 17, want ',' or ']' in input_ids`},
		{`{"loss_mask":[1 0]}`, `is not valid JSON: '0' at column 17, want ',' or ']' in loss_mask`},
		{`{"input_ids":[1],"loss_mask":[1],}`, `is not valid JSON: '}' at column 34, want a field name`},
		{`{"input_ids":[1],"loss_mask":[1]} x`, `is not valid JSON: 'x' at column 35, want the end of the line`},
		{`{"score":NaN}`, `is not valid JSON: 'N' at column 10, want a value`},
		{`{"a":"\x"}`, `is not valid JSON: 'x' at column 8, want one of "\/bfnrtu after a backslash`},
		{"{\"a\":\"\x01\"}", `is not valid JSON: '\x01' at column 7, want control characters escaped`},
		{"\x1f\x8b\x08", `begins like a gzip file, want JSON text in UTF-8; decompress the file first`},
		{strings.Repeat("\x00", 40), `is not valid JSON: '\x00' at column 1, want a JSON object`},
		{`{"a":` + strings.Repeat("[", 300) + strings.Repeat("]", 300) + `}`, `is nested more than 200 deep at column 207`},
		{`{"messages":[],"conversations":[]}`, `has both conversations and messages, want one of them`},
		{`{"messages":[]}`, `messages is empty, want at least one turn`},
		{`{"messages":"Hi"}`, `messages is a string, want an array of turns`},
		{`{"messages":["Hi"]}`, `messages[0] is a string, want an object with role and content`},
		{`{"messages":[{"role":"user","content":"a"},{"role":"user"}]}`, `messages[1] has role but no content`},
		{`{"messages":[{"content":"a"}]}`, `messages[0] has content but no role`},
		{`{"messages":[{"Role":"user","Content":"a"}]}`, `messages[0] has neither role and content nor from and value`},
		{`{"messages":[{"role":"user","content":null}]}`, `messages[0].content is null, want a string`},
		{`{"messages":[{"role":"user","content":[{"type":"text"}]}]}`, `messages[0].content is an array, want a string`},
		{`{"messages":[{"role":"","content":"a"}]}`, `messages[0].role is empty, want system, user, assistant or another role of the chat template`},
		{`{"messages":[{"role":"user","role":"user","content":"a"}]}`, `messages[0].role is given twice`},
		{`{"messages":[{"role":"user","content":"\ud83d"}]}`, `messages[0].content has \ud83d, half of a surrogate pair`},
		{"{\"messages\":[{\"role\":\"user\",\"content\":\"\xff\"}]}", `messages[0].content has byte 0xff, which is not UTF-8`},
		{`{"conversations":[{"from":"bot","value":"a"}]}`, `conversations[0].from is "bot", want human, gpt or system`},
		{`{"conversations":[{"from":"gpt"}]}`, `conversations[0] has from but no value`},
		{`{"messages":[{"role":"user","content":"refuse"}]}`, `the tokenizer refuses the conversation: no such template`},
		{`{"messages":[{"role":"user","content":"uneven"}]}`, `the tokenizer gave 1 ids and a loss mask of 0, want equal lengths`},
		{`{"messages":[{"role":"user","content":"` + strings.Repeat("a", 100) + `"}]}`, `the tokenizer gave id 100 for token 0, want 0 or more and less than 100`},
		{`{"text":"` + strings.Repeat("a", 2000) + `"}`, `is 2012 bytes long, want at most 2000; raise MaxLineBytes if the line is as it should be`},
	}
	for _, c := range cases {
		t.Run(c.want, func(t *testing.T) {
			t.Parallel()
			r := open(t, prompt.Options{FS: jsonl(ids(1, 2), c.line), Vocab: 100, Tokenizer: shout{}, MaxLineBytes: 2000})
			if _, err := r.Next(t.Context()); err != nil {
				t.Fatal(err)
			}
			_, err := r.Next(t.Context())
			if err == nil || err.Error() != in+c.want {
				t.Fatalf("got  %v\nwant %s", err, in+c.want)
			}
			if !errors.Is(err, sluice.ErrInvalid) {
				t.Errorf("%v is not ErrInvalid", err)
			}
			if _, again := r.Next(t.Context()); !errors.Is(again, err) {
				t.Errorf("the next call gives %v, want the same error", again)
			}
		})
	}
}

// away is a tokenizer whose server has gone.
type away struct{}

func (away) Encode([]sluice.Message) (ids, mask []int64, err error) {
	return nil, nil, &sluice.Error{Kind: sluice.Unavailable, Op: "remote: encode", Detail: "connection refused"}
}

func TestATokenizerThatIsAwayMakesNoBadLines(t *testing.T) {
	t.Parallel()
	r := open(t, prompt.Options{FS: jsonl(ids(1, 2), `{"messages":[{"role":"user","content":"Hi"}]}`, ids(3, 4)), OnBad: prompt.SkipBad, Tokenizer: away{}})
	if _, err := r.Next(t.Context()); err != nil {
		t.Fatal(err)
	}
	_, err := r.Next(t.Context())
	want := `prompt: read "train.jsonl:2": the tokenizer failed: remote: encode: connection refused`
	if !errors.Is(err, sluice.ErrUnavailable) || err.Error() != want {
		t.Errorf("got  %v\nwant %s", err, want)
	}
	equal(t, "bad", r.Stats().Bad(), int64(0))
}

func TestAConversationWithoutATokenizerAsksForTokenIDs(t *testing.T) {
	t.Parallel()
	_, err := open(t, prompt.Options{FS: jsonl(`{"messages":[{"role":"user","content":"Hi"}]}`)}).Next(t.Context())
	want := `prompt: read "train.jsonl:1": is a conversation, but this target does not tokenise: token ids are needed; give input_ids and loss_mask, made with the target's own tokenizer and chat template`
	if err == nil || err.Error() != want {
		t.Fatalf("got  %v\nwant %s", err, want)
	}
}

func TestBadLinesAreSkippedCountedAndReportedByChoice(t *testing.T) {
	t.Parallel()
	for _, shuffle := range []bool{false, true} {
		lines := slices.Concat(numbered(5), []string{"", "bad 7"}, numbered(10), []string{"bad 18"}, numbered(3))
		var got []string
		r := open(t, prompt.Options{FS: jsonl(lines...), OnBad: prompt.SkipBad, Shuffle: shuffle, Seed: 3, BlockBytes: 50, BufferRows: 3,
			OnSkip: func(err error) { got = append(got, err.Error()) }})
		b := drain(t, r)
		slices.Sort(got)
		at := func(line string) string {
			if !shuffle {
				return ""
			}
			return fmt.Sprintf("at byte %d: ", strings.Index(strings.Join(lines, "\n"), line))
		}
		equal(t, "reports", got, []string{
			`prompt: read "train.jsonl:18": ` + at("bad 18") + `is not valid JSON: 'b' at column 1, want a JSON object`,
			`prompt: read "train.jsonl:7": ` + at("bad 7") + `is not valid JSON: 'b' at column 1, want a JSON object`,
		})
		s := r.Stats()
		equal(t, "bad", s.Bad(), int64(2))
		equal(t, "rows", []int64{s.Rows, s.Lines, int64(len(b))}, []int64{18, 20, 18})
		seen := map[int64]bool{}
		for _, p := range positions(b) {
			seen[p.Index] = true
		}
		equal(t, "distinct positions", len(seen), 18)
		if !shuffle {
			equal(t, "the position behind a bad line", b[5].Positions[0].Index, int64(6))
		}
	}
}

func TestRowsAreTruncatedSkippedAndCountedByReason(t *testing.T) {
	t.Parallel()
	lines := []string{
		`{"input_ids":[1,2,3,4,5],"loss_mask":[0,1,0,0,1]}`, // truncated
		`{"input_ids":[6,2,3,4,5],"loss_mask":[0,0,0,0,1]}`, // truncated to nothing
		`{"input_ids":[7],"loss_mask":[1]}`,                 // short
		`{"input_ids":[],"loss_mask":[]}`,                   // short
		`{"input_ids":[8,2],"loss_mask":[1,0]}`,             // only the first token is supervised
		`{"input_ids":[9,2],"loss_mask":[1,1]}`,
	}
	r := open(t, prompt.Options{FS: jsonl(lines...), MaxTokens: 3, MinTokens: 2})
	b := drain(t, r)
	equal(t, "ids", rows(b[0].InputIDs), [][]int64{{1, 2, 3}})
	s := r.Stats()
	equal(t, "stats", s, prompt.Stats{Lines: 6, Bytes: s.EpochBytes, EpochBytes: s.EpochBytes, Batches: 2, Rows: 2, Tokens: 5, Supervised: 3, Truncated: 2,
		Skipped: map[prompt.Reason]int64{prompt.Short: 2, prompt.Unsupervised: 2}})

	r = open(t, prompt.Options{FS: jsonl(lines...), MaxTokens: 3, Long: prompt.SkipLong})
	equal(t, "rows", firstIDs(drain(t, r)), []int64{9})
	equal(t, "skipped", r.Stats().Skipped, map[prompt.Reason]int64{prompt.Long: 2, prompt.Short: 1, prompt.Unsupervised: 2})
}

func TestAnEpochWithoutAUsableRowIsAnError(t *testing.T) {
	t.Parallel()
	for want, fsys := range map[string]fs.FS{
		`prompt: read "train.jsonl": not one of 2 lines is usable (1 bad, 1 short)`: jsonl("x", `{"input_ids":[],"loss_mask":[]}`),
		`prompt: read "train.jsonl": holds only blank lines`:                        jsonl("", " "),
	} {
		_, err := open(t, prompt.Options{FS: fsys, OnBad: prompt.SkipBad, Epochs: prompt.Endless}).Next(t.Context())
		if err == nil || err.Error() != want {
			t.Errorf("got %v, want %s", err, want)
		}
	}
}

func TestOpenRefusesWhatCannotWork(t *testing.T) {
	t.Parallel()
	good := jsonl(ids(1, 2))
	one := []string{"train.jsonl"}
	for want, o := range map[string]prompt.Options{
		`prompt: open "Files": is empty, want at least one JSONL file`:                                                                        {FS: good},
		`prompt: open "Rows": is -1, want 0 or more`:                                                                                          {FS: good, Files: one, Rows: -1},
		`prompt: open "Epochs": is -2, want a number of passes, or Endless (-1)`:                                                              {FS: good, Files: one, Epochs: -2},
		`prompt: open "FirstEpoch": is 4, want at most Epochs (3)`:                                                                            {FS: good, Files: one, Epochs: 3, FirstEpoch: 4},
		`prompt: open "PadID": is 9, want less than the vocabulary size 9`:                                                                    {FS: good, Files: one, Vocab: 9, PadID: 9},
		`prompt: open "MinTokens": is 9, above MaxTokens (8): no row could pass`:                                                              {FS: good, Files: one, MinTokens: 9, MaxTokens: 8},
		`prompt: open "MaxTokens": is 9, above PackTokens (8): such a row would fit nowhere`:                                                  {FS: good, Files: one, MaxTokens: 9, PackTokens: 8},
		`prompt: open "Bucket": is set together with PackTokens, want one of the two; packed rows are of nearly equal length already`:         {FS: good, Files: one, Bucket: 9, PackTokens: 8},
		`prompt: open "Bucket": is 3, want at least Rows (4)`:                                                                                 {FS: good, Files: one, Bucket: 3, Rows: 4},
		`prompt: open "MaxTokens": is 100, want a multiple of PadMultiple (64), or padded rows would be longer; use 64 or 128`:                {FS: good, Files: one, MaxTokens: 100, PadMultiple: 64},
		`prompt: open "OnBad": is 7, want FailOnBad or SkipBad`:                                                                               {FS: good, Files: one, OnBad: 7},
		`prompt: open "MaxLineBytes": is 1073741825, want at most 1 GiB`:                                                                      {FS: good, Files: one, MaxLineBytes: 1<<30 + 1},
		`prompt: open "nope.jsonl": there is no such file: file does not exist`:                                                               {FS: good, Files: []string{"train.jsonl", "nope.jsonl"}},
		`prompt: open "d": is a directory, want a JSONL file; name the files in it`:                                                           {FS: fstest.MapFS{"d/x": {}}, Files: []string{"d"}},
		`prompt: open "x": there is no data: all files given are empty`:                                                                       {FS: fstest.MapFS{"x": {}}, Files: []string{"x"}},
		`prompt: open "x": prompt_test.noReaderAt does not implement io.ReaderAt, which prompt files need`:                                    {FS: noReaderAtFS{}, Files: []string{"x"}},
		`prompt: open "BlockBytes": is 1, which cuts the files into more than 16777216 blocks; raise it`:                                      {FS: synthetic(1 << 18), Files: []string{"big.jsonl"}, Shuffle: true, BlockBytes: 1},
		`prompt: open "big.jsonl": is not a regular file (prw-r--r--), so it has no size to fix positions by; write the rows to a file first`: {FS: fstest.MapFS{"big.jsonl": {Mode: fs.ModeNamedPipe | 0o644}}, Files: []string{"big.jsonl"}},
	} {
		r, err := prompt.Open(o)
		if err == nil || err.Error() != want {
			t.Errorf("got  %v\nwant %s", err, want)
		}
		if r != nil {
			t.Errorf("%s: a reader comes with the error", want)
		}
	}
}

type noReaderAt struct{ fs.File }
type noReaderAtFS struct{}

func (noReaderAtFS) Open(string) (fs.File, error) {
	f, err := jsonl(ids(1, 2)).Open("train.jsonl")
	return noReaderAt{f}, err
}

func TestFilesOfTheOperatingSystemAreCheckedAtOpen(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	pipe, secret := filepath.Join(dir, "pipe"), filepath.Join(dir, "secret")
	if err := syscall.Mkfifo(pipe, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(secret, []byte(ids(1, 2)), 0); err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]error{dir: sluice.ErrInvalid, pipe: sluice.ErrInvalid, filepath.Join(dir, "none"): sluice.ErrNotFound, secret: sluice.ErrDenied} {
		if path == secret && os.Getuid() == 0 {
			continue // root may read everything
		}
		if _, err := prompt.Open(prompt.Options{Files: []string{path}}); !errors.Is(err, want) {
			t.Errorf("%s: got %v, want %v", path, err, want)
		}
	}
}

func TestAFileThatMayNotBeReadIsDenied(t *testing.T) {
	t.Parallel()
	_, err := prompt.Open(prompt.Options{FS: denied{jsonl(ids(1, 2))}, Files: []string{"train.jsonl"}})
	want := `prompt: open "train.jsonl": may not be read by this user: permission denied`
	if err == nil || err.Error() != want || !errors.Is(err, sluice.ErrDenied) {
		t.Fatalf("got %v, want %s", err, want)
	}
}

type denied struct{ fstest.MapFS }

func (denied) Open(name string) (fs.File, error) {
	return nil, &fs.PathError{Op: "open", Path: name, Err: fs.ErrPermission}
}

func TestAFileThatChangesIsAnErrorAndNeverAnEnd(t *testing.T) {
	t.Parallel()
	data := []byte(strings.Join(numbered(8000), "\n") + "\n")
	for name, c := range map[string]struct {
		change func(path string) error
		kind   error
		text   string
	}{
		"shrinks":    {func(p string) error { return os.Truncate(p, int64(len(data)-100)) }, sluice.ErrCorrupt, fmt.Sprintf("ends at byte %d, but had %d bytes", len(data)-100, len(data))},
		"grows":      {func(p string) error { return os.WriteFile(p, append(slices.Clone(data), data...), 0o600) }, sluice.ErrCorrupt, fmt.Sprintf("has %d bytes, but had %d", 2*len(data), len(data))},
		"disappears": {os.Remove, sluice.ErrNotFound, "there is no such file"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			path := filepath.Join(t.TempDir(), "train.jsonl")
			if err := os.WriteFile(path, data, 0o600); err != nil {
				t.Fatal(err)
			}
			r := open(t, prompt.Options{Files: []string{path}})
			if _, err := r.Next(t.Context()); err != nil {
				t.Fatal(err)
			}
			if err := c.change(path); err != nil {
				t.Fatal(err)
			}
			for {
				_, err := r.Next(t.Context())
				if err == nil {
					continue
				}
				if !errors.Is(err, c.kind) || !strings.Contains(err.Error(), c.text) {
					t.Fatalf("got %v, want %v with %q", err, c.kind, c.text)
				}
				return
			}
		})
	}
}

func TestAFileThatChangesBetweenEpochsIsAnError(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "train.jsonl")
	line := ids(1, 2) + "\n"
	if err := os.WriteFile(path, []byte(line), 0o600); err != nil {
		t.Fatal(err)
	}
	r := open(t, prompt.Options{Files: []string{path}, Epochs: 2})
	if _, err := r.Next(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(line+line), 0o600); err != nil {
		t.Fatal(err)
	}
	_, err := r.Next(t.Context())
	want := fmt.Sprintf(`prompt: read %q: has %d bytes, but had %d when it was opened; positions in it would no longer hold; do not change prompt files while they are read`, path, 2*len(line), len(line))
	if err == nil || err.Error() != want {
		t.Fatalf("got  %v\nwant %s", err, want)
	}
}

func TestEachEpochIsAnotherPermutation(t *testing.T) {
	t.Parallel()
	r := open(t, prompt.Options{FS: jsonl(numbered(200)...), Shuffle: true, Seed: 1, BlockBytes: 100, BufferRows: 16, Epochs: 3})
	b := drain(t, r)
	got := firstIDs(b)
	equal(t, "rows", len(got), 600)
	for e := range 3 {
		epoch := got[e*200 : e*200+200]
		for f := range e {
			if slices.Equal(epoch, got[f*200:f*200+200]) {
				t.Errorf("epochs %d and %d have the same order", e, f)
			}
		}
		equal(t, "epoch", b[e*200].Positions[0], sluice.Position{Source: r.Source(), Epoch: int64(e)})
	}
	later := firstIDs(drain(t, open(t, prompt.Options{FS: jsonl(numbered(200)...), Shuffle: true, Seed: 1, BlockBytes: 100, BufferRows: 16, Epochs: 3, FirstEpoch: 2})))
	equal(t, "the third epoch on its own", later, got[400:])
}

// The order is a promise to those who resume with a newer version, so it is pinned.
func TestTheShuffledOrderNeverChanges(t *testing.T) {
	t.Parallel()
	r := open(t, prompt.Options{FS: jsonl(numbered(20)...), Shuffle: true, Seed: 42, BlockBytes: 100, BufferRows: 4})
	equal(t, "source", r.Source(), "train.jsonl:dbba9117e19f8315")
	equal(t, "order", firstIDs(drain(t, r)), []int64{9, 10, 5, 4, 6, 8, 11, 7, 13, 14, 12, 3, 15, 2, 18, 0, 1, 19, 17, 16})
}

func TestAnEndlessStreamDoesNotEnd(t *testing.T) {
	t.Parallel()
	r := open(t, prompt.Options{FS: jsonl(numbered(3)...), Epochs: prompt.Endless})
	for i := range int64(100) {
		b, err := r.Next(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		equal(t, "position", b.Positions[0], sluice.Position{Source: r.Source(), Epoch: i / 3, Index: i % 3})
	}
}

func TestTheSourceTextFitsThePatternOfIDs(t *testing.T) {
	t.Parallel()
	pattern := regexp.MustCompile(`^[A-Za-z0-9_][A-Za-z0-9._:-]{0,199}$`)
	for _, name := range []string{"train.jsonl", "..x..y", "-a", ".hidden", "d/für alle:?.jsonl", strings.Repeat("a", 190)} {
		r := open(t, prompt.Options{FS: fstest.MapFS{name: {Data: []byte(ids(1, 2))}}, Files: []string{name}})
		if s := r.Source(); !pattern.MatchString(s) || strings.Contains(s, "..") {
			t.Errorf("%s gives %s", name, s)
		}
	}
}

func TestTheSourceChangesWithTheOrderAndWithNothingElse(t *testing.T) {
	t.Parallel()
	base := prompt.Options{FS: fstest.MapFS{"a": {Data: []byte(ids(1, 2))}, "b": {Data: []byte(ids(1, 3))}, "d/a": {Data: []byte(ids(2, 2))}}, Files: []string{"a", "b"}, Shuffle: true}
	source := func(change func(*prompt.Options)) string {
		o := base
		change(&o)
		return open(t, o).Source()
	}
	same := source(func(*prompt.Options) {})
	for name, change := range map[string]func(*prompt.Options){
		"directory": func(o *prompt.Options) { o.Files = []string{"d/a", "b"} },
		"epochs":    func(o *prompt.Options) { o.Epochs = 9 },
		"limits":    func(o *prompt.Options) { o.MaxTokens, o.MinTokens, o.MaxLineBytes = 9, 2, 99 },
		"batching":  func(o *prompt.Options) { o.Rows, o.Bucket = 4, 8 },
		"policy":    func(o *prompt.Options) { o.OnBad, o.Vocab = prompt.SkipBad, 99 },
		"defaults": func(o *prompt.Options) {
			o.BlockBytes, o.BufferRows = prompt.DefaultBlockBytes, prompt.DefaultBufferRows
		},
	} {
		if source(change) != same {
			t.Errorf("%s changes the source", name)
		}
	}
	for name, change := range map[string]func(*prompt.Options){
		"order of files": func(o *prompt.Options) { o.Files = []string{"b", "a"} },
		"seed":           func(o *prompt.Options) { o.Seed = 1 },
		"shuffle":        func(o *prompt.Options) { o.Shuffle = false },
		"blocks":         func(o *prompt.Options) { o.BlockBytes = 1000 },
		"buffer rows":    func(o *prompt.Options) { o.BufferRows = 7 },
		"buffer bytes":   func(o *prompt.Options) { o.BufferBytes = 1000 },
	} {
		if source(change) == same {
			t.Errorf("%s does not change the source", name)
		}
	}
}

func TestSkipIsAskedBeforeALineIsParsed(t *testing.T) {
	t.Parallel()
	r := open(t, prompt.Options{FS: jsonl("not JSON", ids(1, 2)), Skip: func(p sluice.Position) bool { return p.Index == 0 }})
	equal(t, "rows", firstIDs(drain(t, r)), []int64{1})
	equal(t, "skipped", r.Stats().Skipped, map[prompt.Reason]int64{prompt.Taken: 1})
}

func TestWhenAllWasTakenTheStreamJustEnds(t *testing.T) {
	t.Parallel()
	r := open(t, prompt.Options{FS: jsonl(numbered(5)...), Skip: func(sluice.Position) bool { return true }})
	if _, err := r.Next(t.Context()); !errors.Is(err, io.EOF) {
		t.Fatalf("got %v, want io.EOF", err)
	}
}

func TestACancelledNextLosesNothing(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	n := 0
	r := open(t, prompt.Options{FS: jsonl(numbered(10)...), Rows: 5, Skip: func(sluice.Position) bool {
		if n++; n == 3 {
			cancel()
		}
		return false
	}})
	if _, err := r.Next(ctx); !errors.Is(err, context.Canceled) {
		t.Fatalf("got %v, want context.Canceled", err)
	}
	equal(t, "rows", firstIDs(drain(t, r)), []int64{0, 1, 2, 3, 4, 5, 6, 7, 8, 9})
}

func TestClose(t *testing.T) {
	t.Parallel()
	r := open(t, prompt.Options{FS: jsonl(numbered(10)...)})
	if _, err := r.Next(t.Context()); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := r.Close(); err != nil {
			t.Fatal(err)
		}
		if _, err := r.Next(t.Context()); !errors.Is(err, sluice.ErrClosed) {
			t.Fatalf("got %v, want ErrClosed", err)
		}
	}
}

func TestCloseFromACallbackEndsTheStream(t *testing.T) {
	t.Parallel()
	var opened atomic.Int64
	var r *prompt.Reader
	r = open(t, prompt.Options{FS: counting{jsonl(numbered(10)...), &opened}, Skip: func(sluice.Position) bool { return r.Close() != nil }})
	if _, err := r.Next(t.Context()); !errors.Is(err, sluice.ErrClosed) {
		t.Fatalf("got %v, want ErrClosed", err)
	}
	equal(t, "files still open", opened.Load(), int64(0))
}

// counting counts the handles that are open.
type counting struct {
	fs.FS
	n *atomic.Int64
}

func (c counting) Open(name string) (fs.File, error) {
	f, err := c.FS.Open(name)
	if err == nil {
		c.n.Add(1)
	}
	return countedFile{f, c.n}, err
}

type countedFile struct {
	fs.File
	n *atomic.Int64
}

func (f countedFile) Close() error { f.n.Add(-1); return f.File.Close() }
func (f countedFile) ReadAt(p []byte, off int64) (int, error) {
	return f.File.(io.ReaderAt).ReadAt(p, off)
}

func TestOneFileIsOpenAtATimeAndNoneAtTheEnd(t *testing.T) {
	t.Parallel()
	fsys := fstest.MapFS{}
	o := prompt.Options{Shuffle: true, BlockBytes: 64, BufferRows: 8, Epochs: 2}
	for i := range 20 {
		name := fmt.Sprintf("%d.jsonl", i)
		fsys[name] = &fstest.MapFile{Data: []byte(strings.Join(numbered(10), "\n"))}
		o.Files = append(o.Files, name)
	}
	var opened atomic.Int64
	o.FS = counting{fsys, &opened}
	r := open(t, o)
	equal(t, "open before the first row", opened.Load(), int64(0))
	for _, err := range r.All(t.Context()) {
		if err != nil {
			t.Fatal(err)
		}
		if n := opened.Load(); n > 1 {
			t.Fatalf("%d files are open", n)
		}
	}
	equal(t, "open at the end", opened.Load(), int64(0))
}

func TestStatsMayBeReadWhileNextRuns(t *testing.T) {
	t.Parallel()
	r := open(t, prompt.Options{FS: jsonl(numbered(500)...), Shuffle: true, BlockBytes: 200})
	var wg sync.WaitGroup
	for range 3 {
		wg.Go(func() {
			for {
				if _, err := r.Next(t.Context()); err != nil {
					return
				}
				maps.Clone(r.Stats().Skipped)[prompt.Bad]++
			}
		})
	}
	wg.Wait()
	equal(t, "rows", r.Stats().Rows, int64(500))
}

// corpus draws the contents of a few files, with what goes wrong in real ones. It returns the expected rows, sorted.
func corpus(t *rapid.T) (fstest.MapFS, []string, []int64, int) {
	fsys, names, want, lines := fstest.MapFS{}, []string{}, []int64{}, 0
	for f := range rapid.IntRange(1, 3).Draw(t, "files") {
		var b strings.Builder
		if rapid.Bool().Draw(t, "bom") {
			b.WriteString("\xef\xbb\xbf")
		}
		for i := range rapid.IntRange(0, 30).Draw(t, "lines") {
			switch rapid.IntRange(0, 9).Draw(t, "kind") {
			case 0:
			case 1:
				b.WriteString(" ")
			case 2:
				b.WriteString(`{"input_ids":[1.5]}`)
				lines++
			case 3:
				b.WriteString(strings.Repeat("x", 500))
				lines++
			default:
				first := 1000*f + 20*i
				b.WriteString(ids(first, rapid.IntRange(2, 12).Draw(t, "tokens")))
				want = append(want, int64(first))
				lines++
			}
			b.WriteString(rapid.SampledFrom([]string{"\n", "\n", "\n", "\r\n", "\n\n"}).Draw(t, "end"))
		}
		if f == 0 {
			b.WriteString(ids(999, 3))
			want = append(want, 999)
			lines++
		}
		names = append(names, fmt.Sprintf("%d.jsonl", f))
		fsys[names[f]] = &fstest.MapFile{Data: []byte(b.String())}
	}
	slices.Sort(want)
	return fsys, names, want, lines
}

func drawOptions(t *rapid.T) prompt.Options {
	o := prompt.Options{
		OnBad: prompt.SkipBad, Shuffle: rapid.Bool().Draw(t, "shuffle"), Seed: rapid.Uint64().Draw(t, "seed"),
		BlockBytes: rapid.Int64Range(1, 400).Draw(t, "block"), BufferRows: rapid.IntRange(1, 20).Draw(t, "buffer rows"), BufferBytes: rapid.Int64Range(1, 3000).Draw(t, "buffer bytes"),
		MaxLineBytes: 400, PadID: 5, Rows: rapid.IntRange(1, 5).Draw(t, "rows"), PadMultiple: rapid.SampledFrom([]int64{1, 4}).Draw(t, "multiple"),
	}
	switch rapid.IntRange(0, 2).Draw(t, "grouping") {
	case 1:
		o.Bucket = o.Rows + rapid.IntRange(0, 10).Draw(t, "bucket")
	case 2:
		o.PackTokens = 4 * rapid.Int64Range(3, 8).Draw(t, "pack")
		o.PackBins = rapid.IntRange(1, 4).Draw(t, "bins")
	}
	return o
}

// documents cuts batches into the documents in them: position and ids, in the order of Positions.
func documents(t *rapid.T, batches []*sluice.PromptBatch) map[sluice.Position][]int64 {
	out := map[sluice.Position][]int64{}
	for _, b := range batches {
		var docs [][]int64
		for r, row := range rows(b.InputIDs) {
			if b.Packed() {
				at := int64(0)
				for _, n := range rows(b.SeqLens)[r] {
					if n > 0 {
						docs = append(docs, row[at:at+n])
					}
					at += n
				}
				continue
			}
			n := int64(0)
			for _, a := range rows(b.AttentionMask)[r] {
				n += a
			}
			docs = append(docs, row[:n])
		}
		if len(docs) != len(b.Positions) {
			t.Fatalf("%d documents with %d positions", len(docs), len(b.Positions))
		}
		for i, p := range b.Positions {
			if out[p] != nil {
				t.Fatalf("position %v came twice", p)
			}
			out[p] = docs[i]
		}
	}
	return out
}

func readAll(t *rapid.T, o prompt.Options) ([]*sluice.PromptBatch, prompt.Stats) {
	r, err := prompt.Open(o)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = r.Close() }()
	var out []*sluice.PromptBatch
	for b, err := range r.All(context.Background()) {
		if err != nil {
			t.Fatal(err)
		}
		if err := b.Validate(0); err != nil {
			t.Fatal(err)
		}
		out = append(out, b)
	}
	return out, r.Stats()
}

func TestEveryLineComesExactlyOnceAnEpoch(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		fsys, names, want, lines := corpus(t)
		o := drawOptions(t)
		o.FS, o.Files, o.Epochs = fsys, names, 2
		batches, s := readAll(t, o)
		docs := documents(t, batches)
		for epoch := range int64(2) {
			got := []int64{}
			for p, d := range docs {
				if p.Epoch == epoch {
					got = append(got, d[0])
				}
				if p.Index < 0 || p.Index >= int64(lines) {
					t.Fatalf("%v is outside the %d lines", p, lines)
				}
			}
			slices.Sort(got)
			if !slices.Equal(got, want) {
				t.Fatalf("epoch %d: got %v, want %v", epoch, got, want)
			}
		}
		if s.Bytes != 2*s.EpochBytes || s.Lines != 2*int64(lines) || s.Rows+s.Bad() != s.Lines || s.Rows != int64(len(docs)) {
			t.Fatalf("the counts do not add up: %+v, %d lines", s, lines)
		}
		for _, b := range batches {
			if b.Positions[0].Epoch != b.Positions[len(b.Positions)-1].Epoch {
				t.Fatalf("a batch mixes epochs: %v", b.Positions)
			}
			s.Tokens -= sum(b.AttentionMask)
			s.Supervised -= sum(b.LossMask)
			s.Padding -= b.InputIDs.Elements() - sum(b.AttentionMask)
			checkShape(t, b, o)
		}
		if s.Tokens != 0 || s.Supervised != 0 || s.Padding != 0 {
			t.Fatalf("the counts of tokens are off by %d, %d, %d", s.Tokens, s.Supervised, s.Padding)
		}
	})
}

func sum(x sluice.Tensor) (n int64) {
	for _, v := range sluice.View[int64](x) {
		n += v
	}
	return n
}

func checkShape(t *rapid.T, b *sluice.PromptBatch, o prompt.Options) {
	cols := b.InputIDs.Shape[1]
	longest := int64(0)
	for r, attn := range rows(b.AttentionMask) {
		n := int64(0)
		for i, a := range attn {
			n += a
			if id := rows(b.InputIDs)[r][i]; a == 0 && id != o.PadID {
				t.Fatalf("padding has id %d, want %d", id, o.PadID)
			}
		}
		longest = max(longest, n)
	}
	if b.InputIDs.Shape[0] > int64(o.Rows) || cols%o.PadMultiple != 0 || cols-longest >= o.PadMultiple || b.Packed() != (o.PackTokens > 0) {
		t.Fatalf("shape %v with longest row %d, %+v", b.InputIDs.Shape, longest, o)
	}
	if !b.Packed() {
		return
	}
	if cols > o.PackTokens {
		t.Fatalf("a packed row has %d tokens, want at most %d", cols, o.PackTokens)
	}
	for r, at := range rows(b.PositionIDs) {
		for i, p := range at {
			if p == 0 && rows(b.LossMask)[r][i] != 0 {
				t.Fatalf("row %d, token %d: the first token of a document is supervised", r, i)
			}
		}
	}
}

func TestTheSameOptionsGiveTheSameStream(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		fsys, names, _, _ := corpus(t)
		o := drawOptions(t)
		o.FS, o.Files, o.Epochs = fsys, names, 2
		a, _ := readAll(t, o)
		b, _ := readAll(t, o)
		if !reflect.DeepEqual(a, b) {
			t.Fatal(cmp.Diff(a, b))
		}
	})
}

func TestPositionsDoNotDependOnLimitsOrGrouping(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		fsys, names, _, _ := corpus(t)
		o := drawOptions(t)
		o.FS, o.Files = fsys, names
		plain := o
		plain.Rows, plain.Bucket, plain.PackTokens, plain.MaxLineBytes = 1, 0, 0, 300
		a, _ := readAll(t, o)
		b, _ := readAll(t, plain)
		if d := cmp.Diff(documents(t, b), documents(t, a)); d != "" {
			t.Fatal(d)
		}
	})
}

func TestWhatWasTakenAndWhatComesAfterAResumeAreTheWhole(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		fsys, names, _, _ := corpus(t)
		o := drawOptions(t)
		o.FS, o.Files, o.Epochs = fsys, names, 2
		batches, _ := readAll(t, o)
		whole := documents(t, batches)
		taken := map[sluice.Position]bool{}
		prefix := rapid.IntRange(0, len(batches)).Draw(t, "prefix")
		for i, b := range batches {
			if i < prefix || rapid.IntRange(0, 3).Draw(t, "also") == 0 {
				for _, p := range b.Positions {
					taken[p] = true
				}
			}
		}
		o.Skip = func(p sluice.Position) bool { return taken[p] }
		rest, s := readAll(t, o)
		got := documents(t, rest)
		if len(got)+len(taken) != len(whole) || s.Skipped[prompt.Taken] != int64(len(taken)) {
			t.Fatalf("%d taken (%d counted) and %d resumed, want %d together", len(taken), s.Skipped[prompt.Taken], len(got), len(whole))
		}
		for p, d := range got {
			if taken[p] || !slices.Equal(d, whole[p]) {
				t.Fatalf("%v came again or changed", p)
			}
		}
	})
}

func TestReportsNameTheLineWhateverTheOrder(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		fsys, names, _, _ := corpus(t)
		o := drawOptions(t)
		o.FS, o.Files = fsys, names
		var got []string
		o.OnSkip = func(err error) { e, _ := errors.AsType[*sluice.Error](err); got = append(got, e.Subject) }
		readAll(t, o)
		var want []string
		for _, name := range names {
			text := strings.TrimPrefix(string(fsys[name].Data), "\xef\xbb\xbf")
			for i, l := range strings.Split(text, "\n") {
				if strings.HasPrefix(l, "xxx") || strings.Contains(l, "1.5") {
					want = append(want, fmt.Sprintf("%s:%d", name, i+1))
				}
			}
		}
		slices.Sort(got)
		slices.Sort(want)
		if !slices.Equal(got, want) {
			t.Fatalf("got %v, want %v", got, want)
		}
	})
}

func TestBucketingSavesPaddingAndHoldsNothingForEver(t *testing.T) {
	t.Parallel()
	var lines []string
	for i := range 400 {
		lines = append(lines, ids(i, 2+(i*37)%60))
	}
	plain := open(t, prompt.Options{FS: jsonl(lines...), Rows: 8})
	drain(t, plain)
	r := open(t, prompt.Options{FS: jsonl(lines...), Rows: 8, Bucket: 64})
	batches := drain(t, r)
	if a, b := r.Stats().Padding, plain.Stats().Padding; a*4 > b {
		t.Errorf("padding with buckets is %d tokens, without %d; want less than a quarter", a, b)
	}
	newest := int64(0)
	for i, b := range batches {
		for _, p := range b.Positions {
			newest = max(newest, p.Index)
		}
		for _, p := range b.Positions {
			if waited := int64(i) - p.Index/8; waited > 64 {
				t.Errorf("row %d waited for %d batches", p.Index, waited)
			}
		}
	}
	equal(t, "rows", r.Stats().Rows, int64(400))
}

func TestPackingIsFirstFit(t *testing.T) {
	t.Parallel()
	r := open(t, prompt.Options{FS: jsonl(ids(10, 6), ids(20, 5), ids(30, 2), ids(40, 3), ids(50, 2)), PackTokens: 8, Rows: 2, PadID: 1, PadMultiple: 4})
	b := drain(t, r)
	equal(t, "batches", len(b), 2)
	equal(t, "ids", rows(b[0].InputIDs), [][]int64{{10, 11, 12, 13, 14, 15, 30, 31}, {20, 21, 22, 23, 24, 40, 41, 42}})
	equal(t, "seq_lens", rows(b[0].SeqLens), [][]int64{{6, 2}, {5, 3}})
	equal(t, "position_ids", rows(b[0].PositionIDs), [][]int64{{0, 1, 2, 3, 4, 5, 0, 1}, {0, 1, 2, 3, 4, 0, 1, 2}})
	equal(t, "doc_remaining", rows(b[0].DocRemaining), [][]int64{{5, 4, 3, 2, 1, 0, 1, 0}, {4, 3, 2, 1, 0, 2, 1, 0}})
	equal(t, "loss", rows(b[0].LossMask), [][]int64{{0, 1, 1, 1, 1, 1, 0, 1}, {0, 1, 1, 1, 1, 0, 1, 1}})
	equal(t, "tail", rows(b[1].InputIDs), [][]int64{{50, 51, 1, 1}})
	equal(t, "tail's attention", rows(b[1].AttentionMask), [][]int64{{1, 1, 0, 0}})
	var order []int64
	for _, p := range positions(b) {
		order = append(order, p.Index)
	}
	equal(t, "positions", order, []int64{0, 2, 1, 3, 4})
}
