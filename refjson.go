package sluice

import (
	"fmt"
	"strconv"
	"unicode/utf16"
	"unicode/utf8"
)

// ParseRef reads a ref from JSON. It takes the fields in any order and with any spacing, but is strict otherwise: field names
// match exactly and once, every field is there, unknown ones are refused, integers are plain digits. encoding/json is not used, since it matches
// names without regard to case, lets the last of two equal names win and mends broken UTF-8 in silence.
func ParseRef(data []byte) (Ref, error) {
	if len(data) > 4*MaxRefBytes { // spacing and escapes may lengthen the canonical form, within reason
		return Ref{}, &Error{Kind: Invalid, Op: "ref: parse", Detail: fmt.Sprintf("is %d bytes, at most %d are allowed", len(data), 4*MaxRefBytes)}
	}
	f, err := parseRef(string(data)) // the strings are parts of one copy, which the ref does not keep
	if err != nil {
		return Ref{}, err
	}
	return newRef(f, len(data)) // nothing of the canonical form can be said with fewer bytes
}

func parseRef(text string) (RefFields, error) {
	p := refParser{data: text}
	return p.ref()
}

type refParser struct {
	data string
	pos  int
}

func (p *refParser) fail(format string, args ...any) error {
	return &Error{Kind: Invalid, Op: "ref: parse", Detail: fmt.Sprintf("byte %d: ", p.pos) + fmt.Sprintf(format, args...)}
}

func (p *refParser) space() {
	for p.pos < len(p.data) {
		switch p.data[p.pos] {
		case ' ', '\t', '\n', '\r':
			p.pos++
		default:
			return
		}
	}
}

// peek returns the next byte that is not space, or 0 at the end.
func (p *refParser) peek() byte {
	p.space()
	if p.pos == len(p.data) {
		return 0
	}
	return p.data[p.pos]
}

func (p *refParser) expect(c byte) error {
	if got := p.peek(); got != c {
		if got == 0 {
			return p.fail("ends where %q is wanted", c)
		}
		return p.fail("found %q where %q is wanted", got, c)
	}
	p.pos++
	return nil
}

// object calls field for every name of an object; list calls item for every element of an array.
func (p *refParser) object(field func(name string) error) error {
	if err := p.expect('{'); err != nil {
		return err
	}
	return p.sequence('}', func() error {
		name, err := p.str()
		if err != nil {
			return err
		}
		if err := p.expect(':'); err != nil {
			return err
		}
		return field(name)
	})
}

func (p *refParser) list(item func() error) error {
	if err := p.expect('['); err != nil {
		return err
	}
	return p.sequence(']', item)
}

func (p *refParser) sequence(end byte, item func() error) error {
	if p.peek() == end {
		p.pos++
		return nil
	}
	for {
		if err := item(); err != nil {
			return err
		}
		if p.peek() == end {
			p.pos++
			return nil
		}
		if err := p.expect(','); err != nil {
			return err
		}
	}
}

func (p *refParser) integer() (int64, error) {
	p.peek()
	start := p.pos
	for p.pos < len(p.data) && p.data[p.pos] >= '0' && p.data[p.pos] <= '9' {
		p.pos++
	}
	digits := p.data[start:p.pos]
	if next := p.peek(); len(digits) == 0 || len(digits) > 1 && digits[0] == '0' || next != ',' && next != '}' && next != ']' {
		return 0, p.fail("want a non-negative integer in plain digits")
	}
	n, err := strconv.ParseInt(digits, 10, 64)
	if err != nil || n >= maxInteger {
		return 0, p.fail("the integer %.24s is 2^53 or more", digits)
	}
	return n, nil
}

func (p *refParser) str() (string, error) {
	if err := p.expect('"'); err != nil {
		return "", err
	}
	start := p.pos
	for p.pos < len(p.data) { // the usual string has no escape and can be taken as it is
		switch c := p.data[p.pos]; {
		case c == '"':
			s := p.data[start:p.pos]
			if !utf8.ValidString(s) {
				return "", p.fail("the string is not valid UTF-8")
			}
			p.pos++
			return s, nil
		case c == '\\':
			return p.escaped(start)
		case c < 0x20:
			return "", p.fail("the string contains a raw control character")
		}
		p.pos++
	}
	return "", p.fail("ends inside a string")
}

// escaped goes on with a string whose first escape is at p.pos.
func (p *refParser) escaped(start int) (string, error) {
	b := append([]byte(nil), p.data[start:p.pos]...)
	for p.pos < len(p.data) {
		c := p.data[p.pos]
		p.pos++
		switch {
		case c == '"':
			if !utf8.Valid(b) {
				return "", p.fail("the string is not valid UTF-8")
			}
			return string(b), nil
		case c < 0x20:
			return "", p.fail("the string contains a raw control character")
		case c != '\\':
			b = append(b, c)
			continue
		}
		if p.pos == len(p.data) {
			break
		}
		c = p.data[p.pos]
		p.pos++
		switch c {
		case '"', '\\', '/':
			b = append(b, c)
		case 'b':
			b = append(b, '\b')
		case 'f':
			b = append(b, '\f')
		case 'n':
			b = append(b, '\n')
		case 'r':
			b = append(b, '\r')
		case 't':
			b = append(b, '\t')
		case 'u':
			r, ok := p.hex4()
			if ok && utf16.IsSurrogate(r) {
				ok = false
				if p.pos+1 < len(p.data) && p.data[p.pos] == '\\' && p.data[p.pos+1] == 'u' {
					p.pos += 2
					var low rune
					if low, ok = p.hex4(); ok {
						r = utf16.DecodeRune(r, low)
						ok = r != utf8.RuneError
					}
				}
			}
			if !ok {
				return "", p.fail("the string has a broken \\u escape")
			}
			b = utf8.AppendRune(b, r)
		default:
			return "", p.fail("the string has the unknown escape \\%q", c)
		}
	}
	return "", p.fail("ends inside a string")
}

func (p *refParser) hex4() (rune, bool) {
	if p.pos+4 > len(p.data) {
		return 0, false
	}
	var r rune
	for _, c := range p.data[p.pos : p.pos+4] {
		switch {
		case c >= '0' && c <= '9':
			c -= '0'
		case c >= 'a' && c <= 'f':
			c -= 'a' - 10
		case c >= 'A' && c <= 'F':
			c -= 'A' - 10
		default:
			return 0, false
		}
		r = r<<4 | c
	}
	p.pos += 4
	return r, true
}

// fieldSet keeps which of a fixed list of names were seen.
type fieldSet struct {
	names []string
	seen  uint32
}

func (s *fieldSet) mark(p *refParser, name string) error {
	for i, n := range s.names {
		if n == name {
			if s.seen&(1<<i) != 0 {
				return p.fail("the field %q is there twice", name)
			}
			s.seen |= 1 << i
			return nil
		}
	}
	return p.fail("unknown field %q", printable(name, 60))
}

func (s *fieldSet) complete(p *refParser) error {
	for i, n := range s.names {
		if s.seen&(1<<i) == 0 {
			return p.fail("the field %q is missing", n)
		}
	}
	return nil
}

var (
	refFieldNames = []string{"sample_id", "run_id", "store_uri", "generation", "features", "algorithm", "schema_version", "num_tokens",
		"estimated_bytes", "target_model_version", "draft_weight_version", "attributes"}
	featureFieldNames = []string{"name", "key", "shape", "dtype"}
)

func (p *refParser) ref() (f RefFields, err error) {
	set := fieldSet{names: refFieldNames}
	err = p.object(func(name string) (err error) {
		if err := set.mark(p, name); err != nil {
			return err
		}
		switch name {
		case "sample_id":
			f.SampleID, err = p.str()
		case "run_id":
			f.RunID, err = p.str()
		case "store_uri":
			f.StoreURI, err = p.str()
		case "generation":
			f.Generation, err = p.str()
		case "features":
			f.Features, err = p.features()
		case "algorithm":
			var s string
			s, err = p.str()
			f.Algorithm = Algorithm(s)
		case "schema_version":
			f.SchemaVersion, err = p.integer()
		case "num_tokens":
			f.NumTokens, err = p.integer()
		case "estimated_bytes":
			f.EstimatedBytes, err = p.integer()
		case "target_model_version":
			f.TargetModelVersion, err = p.str()
		case "draft_weight_version":
			f.DraftWeightVersion, err = p.str()
		case "attributes":
			f.Attributes, err = p.attributes()
		}
		return err
	})
	if err != nil {
		return f, err
	}
	if err := set.complete(p); err != nil {
		return f, err
	}
	if p.peek() != 0 || p.pos != len(p.data) {
		return f, p.fail("there is more after the ref")
	}
	return f, nil
}

func (p *refParser) features() (features []RefFeature, err error) {
	err = p.list(func() error {
		if len(features) == maxFeatures {
			return p.fail("more than %d features", maxFeatures)
		}
		var f RefFeature
		set := fieldSet{names: featureFieldNames}
		err := p.object(func(name string) (err error) {
			if err := set.mark(p, name); err != nil {
				return err
			}
			switch name {
			case "name":
				f.Name, err = p.str()
			case "key":
				f.Key, err = p.str()
			case "shape":
				err = p.list(func() error {
					if len(f.Shape) == maxRank {
						return p.fail("a shape of more than %d axes", maxRank)
					}
					d, err := p.integer()
					if f.Shape == nil {
						f.Shape = make([]int64, 0, 3) // as most have, or less
					}
					f.Shape = append(f.Shape, d)
					return err
				})
			case "dtype":
				var s string
				if s, err = p.str(); err == nil {
					if f.DType, err = ParseDType(s); err != nil {
						err = p.fail("%v", err)
					}
				}
			}
			return err
		})
		if err != nil {
			return err
		}
		if features == nil {
			features = make([]RefFeature, 0, 6) // as most have, or less
		}
		features = append(features, f)
		return set.complete(p)
	})
	return features, err
}

func (p *refParser) attributes() (map[string]string, error) {
	m := map[string]string{}
	err := p.object(func(name string) error {
		if _, twice := m[name]; twice {
			return p.fail("the attribute %q is there twice", printable(name, 60))
		}
		if len(m) == maxAttributes {
			return p.fail("more than %d attributes", maxAttributes)
		}
		v, err := p.str()
		m[name] = v
		return err
	})
	return m, err
}
