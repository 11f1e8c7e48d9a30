package tinyllama

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"strings"
	"unicode/utf8"

	"github.com/sluice-ml/sluice"
)

// The ids above the bytes. <pad> is for whoever needs an id at padded positions; no text becomes it.
const (
	BOS       = 256
	EOS       = 257
	Pad       = 258
	System    = 259
	User      = 260
	Assistant = 261
	End       = 262

	tokenizerVocab = 263
)

var specials = [...]string{"<bos>", "<eos>", "<pad>", "<system>", "<user>", "<assistant>", "<end>"}

// template describes all that Encode does; its hash is the tokenizer's fingerprint, so a change of one is a change of the other.
const template = "sluice bytes 1: <bos>256 <eos>257 <pad>258 <system>259 <user>260 <assistant>261 <end>262; <bos> (<role> bytes <end>)*; loss on assistant bytes and <end>"

var tokenizerFingerprint = func() string {
	sum := sha256.Sum256([]byte(template))
	return "sha256:" + hex.EncodeToString(sum[:])
}()

// tokenises reports whether the model says that its vocabulary is this tokenizer's. Nothing else could tell: in another model of the same size the ids
// mean other words, and it would train on them in silence.
func (m *Model) tokenises() bool { return m.cfg.bytes }

// Encode turns a conversation into token ids: <bos>, then for every turn the role's token, the content's bytes and <end>.
// The loss mask is 1 on the bytes and the <end> of assistant turns. Text never becomes a special token, so content cannot forge a turn.
//
// Roles are system, user and assistant. An empty conversation, another role and content that is not UTF-8 are [sluice.ErrInvalid]. A model whose
// config.json does not say "byte_tokenizer": true has a vocabulary of its own, for which token ids must come in: [sluice.ErrUnsupported].
func (m *Model) Encode(conversation []sluice.Message) (ids, lossMask []int64, err error) {
	const op = "tinyllama: encode"
	if !m.tokenises() {
		return nil, nil, &sluice.Error{
			Kind: sluice.Unsupported, Op: op, Subject: m.name,
			Detail: "the model's config.json does not say \"byte_tokenizer\": true, so its ids are those of another tokenizer",
			Hint:   "give token ids (input_ids and loss_mask) instead of text",
		}
	}
	if len(conversation) == 0 {
		return nil, nil, &sluice.Error{Kind: sluice.Invalid, Op: op, Subject: "conversation", Detail: "is empty, want at least one turn"}
	}
	n := 1
	for _, turn := range conversation {
		n += len(turn.Content) + 2
	}
	ids, lossMask = make([]int64, 0, n), make([]int64, 0, n)
	ids, lossMask = append(ids, BOS), append(lossMask, 0)
	for i, turn := range conversation {
		var role, loss int64
		switch turn.Role {
		case "system":
			role = System
		case "user":
			role = User
		case "assistant":
			role, loss = Assistant, 1
		default:
			return nil, nil, &sluice.Error{
				Kind: sluice.Invalid, Op: op, Subject: fmt.Sprintf("conversation[%d].role", i),
				Detail: fmt.Sprintf("is %q, want system, user or assistant", clip(turn.Role)),
			}
		}
		if !utf8.ValidString(turn.Content) {
			return nil, nil, &sluice.Error{
				Kind: sluice.Invalid, Op: op, Subject: fmt.Sprintf("conversation[%d].content", i),
				Detail: fmt.Sprintf("is not valid UTF-8 at byte %d", invalidUTF8(turn.Content)),
			}
		}
		ids, lossMask = append(ids, role), append(lossMask, 0)
		for _, b := range []byte(turn.Content) {
			ids, lossMask = append(ids, int64(b)), append(lossMask, loss)
		}
		ids, lossMask = append(ids, End), append(lossMask, loss)
	}
	return ids, lossMask, nil
}

func invalidUTF8(s string) int {
	for i := 0; i < len(s); {
		r, n := utf8.DecodeRuneInString(s[i:])
		if r == utf8.RuneError && n == 1 {
			return i
		}
		i += n
	}
	return len(s)
}

// Decode shows ids to people: bytes as text, special tokens by name, other ids as <300>. Bytes that are not UTF-8, such as
// a character that a row's end cuts, become U+FFFD, so Decode does not undo Encode in every case.
func Decode(ids []int64) string {
	var b strings.Builder
	for _, id := range ids {
		switch {
		case id >= 0 && id < BOS:
			b.WriteByte(byte(id))
		case id >= BOS && id < tokenizerVocab:
			b.WriteString(specials[id-BOS])
		default:
			fmt.Fprintf(&b, "<%d>", id)
		}
	}
	return strings.ToValidUTF8(b.String(), "\uFFFD")
}
