package httpcall

import (
	"bufio"
	"bytes"
	"errors"
	"io"
	"net/http"
	"net/http/httputil"
	"strconv"
)

const (
	longestLine = 8 << 10 // bytes of a line of an answer's headers
	mostLines   = 256     // of those headers
	mostInterim = 8       // answers of 1xx before the one that counts
)

// Answer is what the server said.
type Answer struct {
	StatusCode int
	Type       string // the Content-Type
	Body       []byte
}

// ErrTooLong is for an answer that is longer than the call lets it be.
var ErrTooLong = errors.New("the answer is too long")

func malformed(what string) error { return errors.New("the answer is no HTTP/1.1: " + what) }

// head is what matters of an answer before its body.
type head struct {
	status    int
	mediaType string
	length    int64 // -1 if it is not told
	chunked   bool
	old       bool // HTTP/1.0
	close     bool // there is no other answer behind it
}

// readAnswer reads the answer to a call of a method. It reports whether it ended where the next one begins. It accepts less than net/http does, and reads what it accepts as that does: FuzzAnswer.
func readAnswer(r *bufio.Reader, method string, most int64) (a Answer, whole bool, err error) {
	h, err := readHead(r)
	for i := 0; err == nil && h.status/100 == 1 && h.status != http.StatusSwitchingProtocols && i < mostInterim; i++ {
		h, err = readHead(r)
	}
	if err != nil {
		return a, false, unexpected(err)
	}
	a = Answer{StatusCode: h.status, Type: h.mediaType}
	switch {
	case h.status/100 == 1:
		return a, false, malformed("status " + strconv.Itoa(h.status))
	case method == http.MethodHead || h.status == http.StatusNoContent || h.status == http.StatusNotModified: // no body
	case h.chunked:
		if a.Body, err = readUpTo(httputil.NewChunkedReader(r), most); err == nil {
			err = readFields(r, func(_, _ []byte) error { return nil }) // the trailers
		}
	case h.length > most:
		err = ErrTooLong
	case h.length >= 0:
		a.Body = make([]byte, h.length)
		_, err = io.ReadFull(r, a.Body)
	default:
		a.Body, err = readUpTo(r, most)
		h.close = true // it ended with the connection
	}
	return a, err == nil && !h.close && r.Buffered() == 0, unexpected(err)
}

// readUpTo reads to the end.
func readUpTo(r io.Reader, most int64) ([]byte, error) {
	data, err := io.ReadAll(io.LimitReader(r, most+1))
	if err == nil && int64(len(data)) > most {
		err = ErrTooLong
	}
	return data, err
}

// unexpected is an end in the middle of an answer.
func unexpected(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}

// readLine reads a line, without its end. It is valid until the next one is read.
func readLine(r *bufio.Reader) ([]byte, error) {
	line, err := r.ReadSlice('\n')
	if errors.Is(err, bufio.ErrBufferFull) {
		return nil, malformed("a line of its headers is too long")
	}
	if err != nil {
		return nil, err
	}
	line, ok := bytes.CutSuffix(line, []byte("\r\n"))
	if !ok {
		return nil, malformed("a line of its headers has no end")
	}
	return line, nil
}

func readHead(r *bufio.Reader) (*head, error) {
	h := &head{length: -1}
	line, err := readLine(r)
	if err != nil {
		return h, err
	}
	version, rest, _ := bytes.Cut(line, []byte(" "))
	code, _, _ := bytes.Cut(rest, []byte(" "))
	switch string(version) {
	case "HTTP/1.1":
	case "HTTP/1.0":
		h.old, h.close = true, true
	default:
		return h, malformed("its first line")
	}
	status, ok := digits(code)
	if !ok || len(code) != 3 || status < 100 {
		return h, malformed("its status")
	}
	h.status = int(status)
	return h, readFields(r, h.header)
}

// readFields reads headers or trailers and the empty line behind them.
func readFields(r *bufio.Reader, each func(name, value []byte) error) error {
	for range mostLines {
		line, err := readLine(r)
		if err != nil || len(line) == 0 {
			return err
		}
		name, value, ok := bytes.Cut(line, []byte(":"))
		if !ok || len(name) == 0 || !token(name) {
			return malformed("the name of a header")
		}
		value = bytes.Trim(value, " \t")
		for _, b := range value {
			if b < ' ' && b != '\t' || b == 0x7f {
				return malformed("the value of a header")
			}
		}
		if err := each(name, value); err != nil {
			return err
		}
	}
	return malformed("it has too many headers")
}

func (h *head) header(name, value []byte) error {
	switch {
	case is(name, "Content-Length"):
		n, ok := digits(value)
		if !ok || h.length >= 0 && h.length != n || h.chunked {
			return malformed("its Content-Length")
		}
		h.length = n
	case is(name, "Transfer-Encoding"):
		if !is(value, "chunked") || h.chunked || h.length >= 0 || h.old {
			return malformed("its Transfer-Encoding")
		}
		h.chunked = true
	case is(name, "Connection") && !is(value, "keep-alive"): // which proxies say each time
		h.close = true // whatever else it says: there is nothing to say between us
	case is(name, "Content-Type") && h.mediaType == "":
		if h.mediaType = "application/json"; string(value) != h.mediaType { // as nearly always, without a copy
			h.mediaType = string(value)
		}
	}
	return nil
}

// is compares without regard to case.
func is(a []byte, b string) bool { return len(a) == len(b) && bytes.EqualFold(a, []byte(b)) }

// digits is a decimal number without a sign.
func digits(p []byte) (n int64, ok bool) {
	if len(p) == 0 || len(p) > 18 {
		return 0, false
	}
	for _, d := range p {
		if d < '0' || d > '9' {
			return 0, false
		}
		n = n*10 + int64(d-'0')
	}
	return n, true
}

// token reports whether a name is one of RFC 9110.
func token(name []byte) bool {
	for _, b := range name {
		switch {
		case 'a' <= b && b <= 'z', 'A' <= b && b <= 'Z', '0' <= b && b <= '9', bytes.IndexByte([]byte("!#$%&'*+-.^_`|~"), b) >= 0:
		default:
			return false
		}
	}
	return true
}
