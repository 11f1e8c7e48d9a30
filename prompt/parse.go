package prompt

import (
	"bytes"
	"fmt"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/sluice-ml/sluice"
)

const (
	maxInteger = 1 << 53 // ids at or above it do not survive every JSON reader
	maxDepth   = 200     // of values that are ignored
)

// fault is what is wrong with a line; file and line number are added by who knows them.
type fault struct {
	detail string
	hint   string
	err    error
	kind   sluice.Kind // Invalid if empty; another one is no fault of the line, so that it is never passed over
}

func faultf(format string, args ...any) *fault { return &fault{detail: fmt.Sprintf(format, args...)} }

// lineParser takes one line apart. It is a scanner of its own because encoding/json matches names without regard to case, lets the last of
// two equal fields win, takes 1.0 or null for an integer, and is too slow for arrays of a hundred thousand ids.
// What it accepts is a subset of what encoding/json accepts.
type lineParser struct {
	limit uint64 // ids must be below it

	b []byte
	i int

	// The outcome, valid until the next line. Either ids and mask, of equal length, or turns.
	ids   []int64
	mask  []byte
	turns []sluice.Message

	attn  []byte
	names [][]byte
}

func newLineParser(vocab int64) *lineParser {
	p := &lineParser{limit: maxInteger}
	if vocab > 0 && vocab < maxInteger {
		p.limit = uint64(vocab)
	}
	return p
}

const (
	hasIDs = 1 << iota
	hasMask
	hasAttention
	hasConversations
	hasMessages
)

// parse reads a line that is not blank.
func (p *lineParser) parse(data []byte) *fault {
	p.b, p.i = data, 0
	p.ids, p.mask, p.attn, p.turns, p.names = p.ids[:0], p.mask[:0], p.attn[:0], nil, p.names[:0]
	if f := p.notText(); f != nil {
		return f
	}
	if !p.at('{') {
		if k := p.kind(); k != "" {
			return faultf("is %s, want a JSON object", k)
		}
		return p.syntax("want a JSON object")
	}
	p.i++
	seen, turnsAt := 0, 0
	for p.space(); !p.at('}'); {
		name, f := p.name()
		if f != nil {
			return f
		}
		bit := 0
		switch string(name) {
		case "input_ids":
			bit = hasIDs
		case "loss_mask":
			bit = hasMask
		case "attention_mask":
			bit = hasAttention
		case "conversations":
			bit = hasConversations
		case "messages":
			bit = hasMessages
		}
		if seen&bit != 0 {
			return faultf("%s is given twice", name)
		}
		seen |= bit
		switch bit {
		case hasIDs:
			f = p.idArray()
		case hasMask:
			p.mask, f = p.bitArray("loss_mask", p.mask)
		case hasAttention:
			p.attn, f = p.bitArray("attention_mask", p.attn)
		default:
			if bit != 0 {
				turnsAt = p.i
			} else if len(p.names) < 8 {
				p.names = append(p.names, name)
			}
			f = p.skip(0)
		}
		if f != nil {
			return f
		}
		p.space()
		if p.at(',') {
			p.i++
			p.space()
			if p.at('}') {
				return p.syntax("want a field name")
			}
			continue
		}
		if !p.at('}') {
			return p.syntax("want ',' or '}'")
		}
	}
	p.i++
	if p.space(); p.i < len(p.b) {
		return p.syntax("want the end of the line")
	}
	return p.choose(seen, turnsAt)
}

// choose takes token ids before a conversation: data sets that were tokenised often still carry their text.
func (p *lineParser) choose(seen, turnsAt int) *fault {
	switch {
	case seen&hasIDs != 0:
		return p.agree(seen)
	case seen&(hasConversations|hasMessages) == hasConversations|hasMessages:
		return faultf("has both conversations and messages, want one of them")
	case seen&hasConversations != 0:
		p.i = turnsAt
		return p.conversation("conversations")
	case seen&hasMessages != 0:
		p.i = turnsAt
		return p.conversation("messages")
	}
	const want = "want input_ids with loss_mask, or conversations, or messages"
	if len(p.names) == 0 {
		return faultf("has no input_ids; %s", want)
	}
	names := make([]string, len(p.names))
	for i, n := range p.names {
		names[i] = show(n)
	}
	return faultf("has no input_ids but %s; %s", strings.Join(names, ", "), want)
}

func (p *lineParser) agree(seen int) *fault {
	if seen&hasMask == 0 {
		return &fault{detail: "has input_ids but no loss_mask", hint: "give a loss_mask of the same length, 1 on each token that the draft shall learn and 0 elsewhere"}
	}
	if len(p.mask) != len(p.ids) {
		return faultf("loss_mask has %d entries, want %d like input_ids", len(p.mask), len(p.ids))
	}
	if seen&hasAttention == 0 {
		return nil
	}
	if len(p.attn) != len(p.ids) {
		return faultf("attention_mask has %d entries, want %d like input_ids", len(p.attn), len(p.ids))
	}
	n := bytes.IndexByte(p.attn, 0)
	if n < 0 {
		return nil
	}
	if i := bytes.IndexByte(p.attn[n:], 1); i >= 0 {
		return faultf("attention_mask[%d] is 1 after a 0, want padding at the right only", n+i)
	}
	if i := bytes.IndexByte(p.mask[n:], 1); i >= 0 {
		return faultf("loss_mask[%d] is 1 where attention_mask is 0", n+i)
	}
	p.ids, p.mask = p.ids[:n], p.mask[:n]
	return nil
}

// notText recognises files that are no JSONL at all by how they begin.
func (p *lineParser) notText() *fault {
	for _, m := range []struct{ magic, what, hint string }{
		{"\x1f\x8b", "gzip", "decompress the file first"},
		{"\x28\xb5\x2f\xfd", "zstd", "decompress the file first"},
		{"PAR1", "Parquet", "convert the file to JSONL first"},
		{"\xff\xfe", "UTF-16", "save the file as UTF-8"},
		{"\xfe\xff", "UTF-16", "save the file as UTF-8"},
	} {
		if bytes.HasPrefix(p.b, []byte(m.magic)) {
			return &fault{detail: "begins like a " + m.what + " file, want JSON text in UTF-8", hint: m.hint}
		}
	}
	return nil
}

func (p *lineParser) at(c byte) bool { return p.i < len(p.b) && p.b[p.i] == c }

func isSpace(c byte) bool { return c == ' ' || c == '\t' || c == '\r' || c == '\n' }

func (p *lineParser) space() {
	for p.i < len(p.b) && isSpace(p.b[p.i]) {
		p.i++
	}
}

func (p *lineParser) syntax(want string) *fault {
	if p.i >= len(p.b) {
		return faultf("is not valid JSON: the line ends at column %d, %s", p.i+1, want)
	}
	r, n := utf8.DecodeRune(p.b[p.i:])
	found := fmt.Sprintf("%q", r)
	if r == utf8.RuneError && n == 1 {
		found = fmt.Sprintf("byte 0x%02x", p.b[p.i])
	}
	return faultf("is not valid JSON: %s at column %d, %s", found, p.i+1, want)
}

// kind names the value at p.i, or is empty where no value can begin so.
func (p *lineParser) kind() string {
	if p.i >= len(p.b) {
		return ""
	}
	switch c := p.b[p.i]; {
	case c == '{':
		return "an object"
	case c == '[':
		return "an array"
	case c == '"':
		return "a string"
	case c == '-' || c >= '0' && c <= '9':
		return "a number"
	}
	for _, lit := range []string{"true", "false", "null"} {
		if bytes.HasPrefix(p.b[p.i:], []byte(lit)) {
			return lit
		}
	}
	return ""
}

// value shows the value at p.i in a message: what it is, or for numbers and words the text itself.
func (p *lineParser) value() string {
	switch {
	case p.at('['):
		return "an array"
	case p.at('{'):
		return "an object"
	}
	j := p.i
	for j < len(p.b) && j-p.i <= 40 && !isSpace(p.b[j]) && !bytes.ContainsRune([]byte(",]}"), rune(p.b[j])) {
		j++
	}
	return show(p.b[p.i:j])
}

// show makes text from a file safe for a terminal, and short.
func show(text []byte) string {
	cut := ""
	if len(text) > 32 {
		text, cut = text[:32], "..."
	}
	return strings.Map(func(r rune) rune {
		if r == utf8.RuneError || !unicode.IsPrint(r) {
			return '?'
		}
		return r
	}, string(text)) + cut
}

// name reads a field name and its colon.
func (p *lineParser) name() ([]byte, *fault) {
	if !p.at('"') {
		return nil, p.syntax("want a field name")
	}
	raw, escaped, f := p.text()
	if f != nil {
		return nil, f
	}
	if escaped {
		s, _ := unquote(raw)
		raw = []byte(s)
	}
	p.space()
	if !p.at(':') {
		return nil, p.syntax("want ':'")
	}
	p.i++
	p.space()
	return raw, nil
}

func (p *lineParser) idArray() *fault {
	if !p.at('[') {
		if p.kind() == "" {
			return p.syntax("want an array of token ids")
		}
		return faultf("input_ids is %s, want an array of token ids", p.value())
	}
	b, i, limit, ids := p.b, p.i+1, p.limit, p.ids
	for i < len(b) && isSpace(b[i]) {
		i++
	}
	if i < len(b) && b[i] == ']' {
		p.i = i + 1
		return nil
	}
	for {
		for i < len(b) && isSpace(b[i]) {
			i++
		}
		start, v := i, uint64(0)
		for i < len(b) {
			d := b[i] - '0'
			if d > 9 {
				break
			}
			v = v*10 + uint64(d)
			i++
		}
		// Up to 16 digits cannot overflow, and more are above any limit.
		if n := i - start; n == 0 || n > 16 || n > 1 && b[start] == '0' || v >= limit {
			p.i = start
			return p.badID(len(ids))
		}
		end := i
		for i < len(b) && isSpace(b[i]) {
			i++
		}
		if i < len(b) && b[i] == ',' {
			ids = append(ids, int64(v))
			i++
			continue
		}
		if i < len(b) && b[i] == ']' {
			p.ids, p.i = append(ids, int64(v)), i+1
			return nil
		}
		if i == end && i < len(b) {
			p.i = start
			return p.badID(len(ids))
		}
		p.i = i
		return p.syntax("want ',' or ']' in input_ids")
	}
}

func (p *lineParser) badID(n int) *fault {
	if p.kind() == "" {
		return p.syntax(fmt.Sprintf("want a token id for input_ids[%d]", n))
	}
	v := p.value()
	digits := strings.Trim(v, "0123456789") == ""
	switch {
	case digits && len(v) > 1 && v[0] == '0':
		return faultf("input_ids[%d] is %s, want an integer without leading zeros", n, v)
	case digits, strings.HasSuffix(v, "..."):
		if p.limit == maxInteger {
			return faultf("input_ids[%d] is %s, want less than 2^53", n, v)
		}
		return faultf("input_ids[%d] is %s, want less than the vocabulary size %d", n, v, p.limit)
	case v[0] == '-':
		return faultf("input_ids[%d] is %s, want 0 or more", n, v)
	}
	return faultf("input_ids[%d] is %s, want an integer", n, v)
}

func (p *lineParser) bitArray(field string, bits []byte) ([]byte, *fault) {
	if !p.at('[') {
		if p.kind() == "" {
			return bits, p.syntax("want an array of 0 and 1")
		}
		return bits, faultf("%s is %s, want an array of 0 and 1", field, p.value())
	}
	b, i := p.b, p.i+1
	for i < len(b) && isSpace(b[i]) {
		i++
	}
	if i < len(b) && b[i] == ']' {
		p.i = i + 1
		return bits, nil
	}
	for {
		for i < len(b) && isSpace(b[i]) {
			i++
		}
		start := i
		if i < len(b) && (b[i] == '0' || b[i] == '1') {
			i++
		}
		end := i
		for i < len(b) && isSpace(b[i]) {
			i++
		}
		if end > start && i < len(b) && (b[i] == ',' || b[i] == ']') {
			bits = append(bits, b[start]-'0')
			i++
			if b[i-1] == ',' {
				continue
			}
			p.i = i
			return bits, nil
		}
		if end > start && (i > end || i == len(b)) {
			p.i = i
			return bits, p.syntax("want ',' or ']' in " + field)
		}
		p.i = start
		if p.kind() == "" {
			return bits, p.syntax(fmt.Sprintf("want 0 or 1 for %s[%d]", field, len(bits)))
		}
		return bits, faultf("%s[%d] is %s, want 0 or 1", field, len(bits), p.value())
	}
}

// skip passes over one value, and checks it.
func (p *lineParser) skip(depth int) *fault {
	if depth > maxDepth {
		return faultf("is nested more than %d deep at column %d", maxDepth, p.i+1)
	}
	if p.i >= len(p.b) {
		return p.syntax("want a value")
	}
	switch c := p.b[p.i]; {
	case c == '"':
		_, _, f := p.text()
		return f
	case c == '{':
		p.i++
		if p.space(); p.at('}') {
			p.i++
			return nil
		}
		for {
			p.space()
			if _, f := p.name(); f != nil {
				return f
			}
			if f := p.skip(depth + 1); f != nil {
				return f
			}
			if done, f := p.more('}'); done || f != nil {
				return f
			}
		}
	case c == '[':
		p.i++
		if p.space(); p.at(']') {
			p.i++
			return nil
		}
		for {
			p.space()
			if f := p.skip(depth + 1); f != nil {
				return f
			}
			if done, f := p.more(']'); done || f != nil {
				return f
			}
		}
	case c == '-' || c >= '0' && c <= '9':
		return p.number()
	}
	switch k := p.kind(); k {
	case "true", "false", "null":
		p.i += len(k)
		return nil
	}
	return p.syntax("want a value")
}

// more passes over a comma or the given end of an array or object.
func (p *lineParser) more(end byte) (done bool, f *fault) {
	p.space()
	switch {
	case p.at(','):
		p.i++
		return false, nil
	case p.at(end):
		p.i++
		return true, nil
	}
	return false, p.syntax(fmt.Sprintf("want ',' or %q", end))
}

func (p *lineParser) digits() *fault {
	start := p.i
	for p.i < len(p.b) && p.b[p.i] >= '0' && p.b[p.i] <= '9' {
		p.i++
	}
	if p.i == start {
		return p.syntax("want a digit")
	}
	return nil
}

func (p *lineParser) number() *fault {
	if p.at('-') {
		p.i++
	}
	if p.at('0') {
		p.i++
	} else if f := p.digits(); f != nil {
		return f
	}
	if p.at('.') {
		p.i++
		if f := p.digits(); f != nil {
			return f
		}
	}
	if p.at('e') || p.at('E') {
		p.i++
		if p.at('+') || p.at('-') {
			p.i++
		}
		return p.digits()
	}
	return nil
}

// text passes over a string and returns what is between its quotes.
func (p *lineParser) text() (raw []byte, escaped bool, f *fault) {
	p.i++
	start := p.i
	for p.i < len(p.b) {
		switch c := p.b[p.i]; {
		case c == '"':
			raw = p.b[start:p.i]
			p.i++
			return raw, escaped, nil
		case c < 0x20:
			return nil, false, p.syntax("want control characters escaped")
		case c == '\\':
			escaped = true
			p.i++
			if p.i == len(p.b) {
				continue
			}
			if p.b[p.i] == 'u' {
				for range 4 {
					if p.i++; p.i == len(p.b) || !isHex(p.b[p.i]) {
						return nil, false, p.syntax("want four hexadecimal digits after \\u")
					}
				}
			} else if bytes.IndexByte([]byte(`"\/bfnrt`), p.b[p.i]) < 0 {
				return nil, false, p.syntax(`want one of "\/bfnrtu after a backslash`)
			}
		}
		p.i++
	}
	return nil, false, p.syntax("want a closing quote")
}

func isHex(c byte) bool { return c >= '0' && c <= '9' || c >= 'a' && c <= 'f' || c >= 'A' && c <= 'F' }

// unquote undoes the escapes of a string that text has checked. It says what is wrong where the outcome would not be Unicode: replacing that
// quietly, as encoding/json does, would give a target text that nobody wrote.
func unquote(raw []byte) (string, string) {
	var b strings.Builder
	b.Grow(len(raw))
	for i := 0; i < len(raw); {
		if raw[i] != '\\' {
			r, n := utf8.DecodeRune(raw[i:])
			if r == utf8.RuneError && n == 1 {
				return "", fmt.Sprintf("byte 0x%02x, which is not UTF-8", raw[i])
			}
			b.Write(raw[i : i+n])
			i += n
			continue
		}
		c := raw[i+1]
		i += 2
		switch c {
		case 'b':
			c = '\b'
		case 'f':
			c = '\f'
		case 'n':
			c = '\n'
		case 'r':
			c = '\r'
		case 't':
			c = '\t'
		case 'u':
			r := hex4(raw[i:])
			i += 4
			if r >= 0xdc00 && r < 0xe000 {
				return "", fmt.Sprintf(`\u%04x, half of a surrogate pair`, r)
			}
			if r >= 0xd800 && r < 0xdc00 {
				low := rune(-1)
				if i+6 <= len(raw) && raw[i] == '\\' && raw[i+1] == 'u' {
					low = hex4(raw[i+2:])
				}
				if low < 0xdc00 || low >= 0xe000 {
					return "", fmt.Sprintf(`\u%04x, half of a surrogate pair`, r)
				}
				r = (r-0xd800)<<10 | (low - 0xdc00) + 0x10000
				i += 6
			}
			b.WriteRune(r)
			continue
		}
		b.WriteByte(c)
	}
	return b.String(), ""
}

func hex4(b []byte) rune {
	var r rune
	for _, c := range b[:4] {
		switch {
		case c <= '9':
			c -= '0'
		case c >= 'a':
			c -= 'a' - 10
		default:
			c -= 'A' - 10
		}
		r = r<<4 | rune(c)
	}
	return r
}

// conversation reads the turns at p.i, whose syntax was checked already.
func (p *lineParser) conversation(field string) *fault {
	if !p.at('[') {
		return faultf("%s is %s, want an array of turns", field, p.kind())
	}
	p.i++
	if p.space(); p.at(']') {
		return faultf("%s is empty, want at least one turn", field)
	}
	for n := 0; ; n++ {
		p.space()
		m, f := p.turn(fmt.Sprintf("%s[%d]", field, n))
		if f != nil {
			return f
		}
		p.turns = append(p.turns, m)
		if done, f := p.more(']'); done || f != nil {
			return f
		}
	}
}

func (p *lineParser) turn(where string) (m sluice.Message, f *fault) {
	if !p.at('{') {
		return m, faultf("%s is %s, want an object with role and content", where, p.kind())
	}
	p.i++
	fields := [...]string{"role", "content", "from", "value"}
	var text [len(fields)]*string
	for p.space(); !p.at('}'); {
		p.space()
		name, f := p.name()
		if f != nil {
			return m, f
		}
		k := 0
		for k < len(fields) && fields[k] != string(name) {
			k++
		}
		switch {
		case k == len(fields):
			f = p.skip(1)
		case text[k] != nil:
			f = faultf("%s.%s is given twice", where, name)
		case !p.at('"'):
			f = faultf("%s.%s is %s, want a string", where, name, p.kind())
		default:
			var raw []byte
			if raw, _, f = p.text(); f == nil {
				s, wrong := unquote(raw)
				if wrong != "" {
					f = faultf("%s.%s has %s", where, name, wrong)
				}
				text[k] = &s
			}
		}
		if f != nil {
			return m, f
		}
		if p.space(); p.at(',') {
			p.i++
		}
	}
	p.i++
	role, content, from, value := text[0], text[1], text[2], text[3]
	switch {
	case role != nil && content != nil:
		if *role == "" {
			return m, faultf("%s.role is empty, want system, user, assistant or another role of the chat template", where)
		}
		return sluice.Message{Role: *role, Content: *content}, nil
	case from != nil && value != nil:
		switch *from {
		case "human", "user":
			m.Role = "user"
		case "gpt", "assistant":
			m.Role = "assistant"
		case "system":
			m.Role = "system"
		default:
			return m, faultf("%s.from is %q, want human, gpt or system", where, show([]byte(*from)))
		}
		m.Content = *value
		return m, nil
	case role != nil:
		return m, faultf("%s has role but no content", where)
	case content != nil:
		return m, faultf("%s has content but no role", where)
	case from != nil:
		return m, faultf("%s has from but no value", where)
	case value != nil:
		return m, faultf("%s has value but no from", where)
	}
	return m, faultf("%s has neither role and content nor from and value", where)
}
