package safetensors

import (
	"fmt"
	"math"
	"unicode/utf16"
	"unicode/utf8"
)

// scanner reads the part of JSON that a header consists of. encoding/json would take several times as long, and it
// lets the last of two equal keys win and matches field names without regard to case.
//
// The strings it returns share the memory of text, which is a private copy of the file's bytes. The text must be valid
// UTF-8.
type scanner struct {
	text    string
	pos     int
	op      string // what is being done, for messages
	subject string // what is being read, for messages

	maxItems int // MaxItems, but for tests
	scratch  []byte
}

func (s *scanner) fail(format string, args ...any) error {
	return corrupt(s.op, s.subject, format, args...)
}

// unexpected says what is there instead of what was wanted.
func (s *scanner) unexpected(want string) error {
	if s.pos >= len(s.text) {
		return s.fail("ends at byte %d, want %s", s.pos, want)
	}
	r, _ := utf8.DecodeRuneInString(s.text[s.pos:])
	return s.fail("has %q at byte %d, want %s", r, s.pos, want)
}

func (s *scanner) space() {
	for s.pos < len(s.text) {
		switch s.text[s.pos] {
		case ' ', '\t', '\n', '\r':
			s.pos++
		default:
			return
		}
	}
}

// take skips white space and then consumes c, if it is there.
func (s *scanner) take(c byte) bool {
	s.space()
	if s.pos < len(s.text) && s.text[s.pos] == c {
		s.pos++
		return true
	}
	return false
}

func (s *scanner) open(c byte, want string) error {
	if !s.take(c) {
		return s.unexpected(want)
	}
	return nil
}

// member moves to the next member of an object; it is false behind the closing brace.
func (s *scanner) member(first bool) (bool, error) { return s.list(first, '}', "',' or '}'") }

// element moves to the next element of an array; it is false behind the closing bracket.
func (s *scanner) element(first bool) (bool, error) { return s.list(first, ']', "',' or ']'") }

func (s *scanner) list(first bool, end byte, want string) (bool, error) {
	if s.take(end) {
		return false, nil
	}
	if !first && !s.take(',') {
		return false, s.unexpected(want)
	}
	return true, nil
}

// key reads the name of a member and the colon behind it.
func (s *scanner) key(want string) (string, error) {
	name, err := s.str(want)
	if err != nil {
		return "", err
	}
	if !s.take(':') {
		return "", s.unexpected("':'")
	}
	return name, nil
}

func (s *scanner) str(want string) (string, error) {
	if !s.take('"') {
		return "", s.unexpected(want)
	}
	start := s.pos
	for i := start; i < len(s.text); i++ {
		switch c := s.text[i]; {
		case c == '"':
			s.pos = i + 1
			return s.text[start:i], nil
		case c == '\\':
			s.pos = i
			return s.unescape(start)
		case c < 0x20:
			s.pos = i
			return "", s.unexpected("control characters to be escaped")
		}
	}
	s.pos = len(s.text)
	return "", s.unexpected("a closing '\"'")
}

// unescape goes on with a string that began at start, from its first backslash, which is at pos.
func (s *scanner) unescape(start int) (string, error) {
	if s.scratch == nil {
		s.scratch = make([]byte, 0, min(len(s.text)-start, 4<<10))
	}
	buf := s.scratch[:0]
	plain := start // from here on nothing was copied yet
	for s.pos < len(s.text) {
		switch c := s.text[s.pos]; {
		case c == '"':
			buf = append(buf, s.text[plain:s.pos]...)
			s.pos++
			s.scratch = buf
			return string(buf), nil
		case c == '\\':
			buf = append(buf, s.text[plain:s.pos]...)
			var err error
			if buf, err = s.escape(buf); err != nil {
				return "", err
			}
			plain = s.pos
		case c < 0x20:
			return "", s.unexpected("control characters to be escaped")
		default:
			s.pos++
		}
	}
	return "", s.unexpected("a closing '\"'")
}

// escape appends the character that the escape at pos stands for.
func (s *scanner) escape(buf []byte) ([]byte, error) {
	s.pos++
	if s.pos >= len(s.text) {
		return nil, s.unexpected("an escaped character")
	}
	c := s.text[s.pos]
	switch c {
	case '"', '\\', '/':
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
		at := s.pos - 1
		s.pos++
		r, ok := s.hex4()
		if !ok {
			return nil, s.fail("has %q at byte %d, want \\u and 4 hexadecimal digits", clip(s.text[at:min(at+6, len(s.text))]), at)
		}
		if utf16.IsSurrogate(r) {
			low := rune(-1)
			if s.pos+1 < len(s.text) && s.text[s.pos] == '\\' && s.text[s.pos+1] == 'u' {
				s.pos += 2
				if l, ok := s.hex4(); ok {
					low = l
				}
			}
			if r = utf16.DecodeRune(r, low); r == utf8.RuneError {
				return nil, s.fail("has half of a surrogate pair at byte %d", at)
			}
		}
		return utf8.AppendRune(buf, r), nil
	default:
		return nil, s.unexpected(`one of "\/bfnrtu behind a backslash`)
	}
	s.pos++
	return append(buf, c), nil
}

func (s *scanner) hex4() (rune, bool) {
	if len(s.text)-s.pos < 4 {
		return 0, false
	}
	r := rune(0)
	for range 4 {
		d, ok := hexDigit(s.text[s.pos])
		if !ok {
			return 0, false
		}
		r = r<<4 | rune(d)
		s.pos++
	}
	return r, true
}

func hexDigit(c byte) (byte, bool) {
	switch {
	case '0' <= c && c <= '9':
		return c - '0', true
	case 'a' <= c && c <= 'f':
		return c - 'a' + 10, true
	case 'A' <= c && c <= 'F':
		return c - 'A' + 10, true
	}
	return 0, false
}

// integer reads element i of the array that is called field: digits only, since the format has no use for a sign, a
// fraction or an exponent.
func (s *scanner) integer(field string, i int) (int64, error) {
	s.space()
	start, n := s.pos, int64(0)
	for ; s.pos < len(s.text); s.pos++ {
		d := int64(s.text[s.pos]) - '0'
		if d < 0 || d > 9 {
			break
		}
		if n > (math.MaxInt64-d)/10 {
			return 0, s.fail("%s[%d] is %s, want at most %d", field, i, s.token(start), int64(math.MaxInt64))
		}
		n = n*10 + d
	}
	digits := s.pos - start
	ends := s.pos == len(s.text)
	if !ends {
		switch s.text[s.pos] {
		case ',', ']', '}', ' ', '\t', '\n', '\r':
			ends = true
		}
	}
	if !ends || digits == 0 || (digits > 1 && s.text[start] == '0') {
		if digits == 0 && (s.pos == len(s.text) || s.text[s.pos] != '-') {
			return 0, s.unexpected(fmt.Sprintf("%s[%d] as an integer", field, i))
		}
		return 0, s.fail("%s[%d] is %s, want an integer of 0 or more", field, i, s.token(start))
	}
	return n, nil
}

// token is the literal that begins at start, for messages.
func (s *scanner) token(start int) string {
	end := start
	for end < len(s.text) && end-start < 40 {
		switch s.text[end] {
		case ',', ']', '}', ' ', '\t', '\n', '\r':
			return s.text[start:end]
		}
		end++
	}
	return clip(s.text[start:end])
}

// stringMap reads an object whose values are all strings. The result is never nil.
func (s *scanner) stringMap() (map[string]string, error) {
	if err := s.open('{', "an object of strings"); err != nil {
		return nil, err
	}
	m := map[string]string{}
	for first := true; ; first = false {
		more, err := s.member(first)
		if err != nil {
			return nil, err
		}
		if !more {
			return m, nil
		}
		key, err := s.key("a key")
		if err != nil {
			return nil, err
		}
		if _, ok := m[key]; ok {
			return nil, s.fail("has the key %q twice, want each once", clip(key))
		}
		if len(m) == s.maxItems {
			return nil, s.fail("has more than %d keys", s.maxItems)
		}
		s.space()
		if s.pos < len(s.text) && s.text[s.pos] != '"' {
			return nil, s.unexpected(fmt.Sprintf("the value of %q as a string", clip(key)))
		}
		if m[key], err = s.str("a string"); err != nil {
			return nil, err
		}
	}
}

// appendString appends text as a JSON string. The text must be valid UTF-8.
func appendString(dst []byte, text string) []byte {
	dst = append(dst, '"')
	dst = appendEscaped(dst, text)
	return append(dst, '"')
}

func appendEscaped(dst []byte, text string) []byte {
	const hex = "0123456789abcdef"
	plain := 0
	for i := range len(text) {
		c := text[i]
		if c >= 0x20 && c != '"' && c != '\\' {
			continue
		}
		dst = append(dst, text[plain:i]...)
		plain = i + 1
		if c < 0x20 {
			dst = append(dst, '\\', 'u', '0', '0', hex[c>>4], hex[c&15])
		} else {
			dst = append(dst, '\\', c)
		}
	}
	return append(dst, text[plain:]...)
}

func invalidUTF8(text string) int {
	for i, r := range text {
		if r == utf8.RuneError {
			if _, n := utf8.DecodeRuneInString(text[i:]); n == 1 {
				return i
			}
		}
	}
	return -1
}
