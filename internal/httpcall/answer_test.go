package httpcall

import (
	"bufio"
	"bytes"
	"errors"
	"io"
	"net/http"
	"strings"
	"testing"
)

func read(data, method string) (Answer, bool, error) {
	return readAnswer(bufio.NewReaderSize(strings.NewReader(data), longestLine), method, 1<<16)
}

func TestAnswers(t *testing.T) {
	t.Parallel()
	for data, want := range map[string]struct {
		status int
		body   string
		whole  bool
	}{
		"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}":                                                                              {200, "{}", true},
		"HTTP/1.1 200\r\ncontent-length:2\r\n\r\n{}":                                                                                  {200, "{}", true},
		"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 2\r\n\r\n{}":                                                         {200, "{}", true},
		"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}H":                                                                             {200, "{}", false}, // nobody asked for that
		"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}":                                                         {200, "{}", false},
		"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: keep-alive\r\n\r\n{}":                                                    {200, "{}", true}, // as nginx says each time
		"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: keep-alive, close\r\n\r\n{}":                                             {200, "{}", false},
		"HTTP/1.0 200 OK\r\nContent-Length: 2\r\nConnection: keep-alive\r\n\r\n{}":                                                    {200, "{}", false},
		"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\n{}":                                                                              {200, "{}", false},
		"HTTP/1.1 200 OK\r\n\r\nto the end":                                                                                           {200, "to the end", false},
		"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\nX: 1\r\n\r\n":                               {200, "abcde", true},
		"HTTP/1.1 204 No Content\r\n\r\n":                                                                                             {204, "", true},
		"HTTP/1.1 304 Not Modified\r\nContent-Length: 7\r\n\r\n":                                                                      {304, "", true},
		"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\nHTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n": {404, "", true},
	} {
		a, whole, err := read(data, http.MethodPost)
		if err != nil || a.StatusCode != want.status || string(a.Body) != want.body || whole != want.whole {
			t.Errorf("%q: %v: got %d %q %v, want %+v", data, err, a.StatusCode, a.Body, whole, want)
		}
	}
	if a, whole, err := read("HTTP/1.1 404 Not Found\r\nContent-Type: application/problem+json\r\nContent-Length: 70000\r\n\r\n", http.MethodHead); err != nil || !whole || a.Type != "application/problem+json" {
		t.Errorf("to HEAD: %+v %v %v", a, whole, err)
	}
}

func TestWhatIsNoAnswer(t *testing.T) {
	t.Parallel()
	for _, data := range []string{
		"", "HTTP/1.1 200 OK\r\n", "HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\n{}", "HTTP/1.1 200 OK\nContent-Length: 0\n\n", "HTTP/2.0 200 OK\r\n\r\n", "SSH-2.0-x\r\n\r\n",
		"HTTP/1.1 20 OK\r\n\r\n", "HTTP/1.1 +20 OK\r\n\r\n", "HTTP/1.1 099 OK\r\n\r\n", "HTTP/1.1 101 Switching Protocols\r\n\r\n",
		"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n", "HTTP/1.1 200 OK\r\nContent-Length: +1\r\n\r\nx", "HTTP/1.1 200 OK\r\nContent-Length: 99999999999999999999\r\n\r\n",
		"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nxx", "HTTP/1.1 200 OK\r\nContent-Length: 1, 1\r\n\r\nx",
		"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Length: 1\r\n\r\n0\r\n\r\n",
		"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n", "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nno colon\r\n\r\n",
		"HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
		"HTTP/1.1 200 OK\r\n folded: 1\r\n\r\n", "HTTP/1.1 200 OK\r\nno colon\r\n\r\n", "HTTP/1.1 200 OK\r\nname : 1\r\n\r\n", "HTTP/1.1 200 OK\r\n: 1\r\n\r\n", "HTTP/1.1 200 OK\r\na: \x00\r\n\r\n",
		"HTTP/1.1 200 OK\r\nX: " + strings.Repeat("x", longestLine) + "\r\n\r\n", "HTTP/1.1 200 OK\r\n" + strings.Repeat("X: y\r\n", mostLines) + "\r\n",
		strings.Repeat("HTTP/1.1 100 Continue\r\n\r\n", mostInterim+1) + "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
	} {
		if a, whole, err := read(data, http.MethodPost); err == nil || whole || errors.Is(err, io.EOF) {
			t.Errorf("%q: %v: got %+v, %v", data, err, a, whole)
		}
	}
	if _, _, err := read("HTTP/1.1 200 OK\r\nContent-Length: 65537\r\n\r\n", http.MethodPost); !errors.Is(err, ErrTooLong) {
		t.Errorf("got %v", err)
	}
}

// What is accepted is read as net/http reads it.
func FuzzAnswer(f *testing.F) {
	for _, data := range []string{
		"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\nDate: Mon, 30 Nov 2026 05:00:00 GMT\r\n\r\n{}",
		"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n3\r\nabc\r\n0\r\n\r\n", "HTTP/1.0 404 No\r\n\r\nx",
		"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 204 No Content\r\n\r\n", "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
	} {
		f.Add([]byte(data), false)
		f.Add([]byte(data), true)
	}
	f.Fuzz(func(t *testing.T, data []byte, head bool) {
		method := http.MethodPost
		if head {
			method = http.MethodHead
		}
		a, whole, err := readAnswer(bufio.NewReaderSize(bytes.NewReader(data), longestLine), method, 1<<16)
		if err != nil {
			if whole {
				t.Error("an error leaves the connection to others")
			}
			return
		}
		r := bufio.NewReader(bytes.NewReader(data))
		resp, err := answerOf(r, method)
		if err != nil {
			t.Fatalf("net/http refuses %q: %v; it was read as %+v", data, err, a)
		}
		defer resp.Body.Close()
		body, err := io.ReadAll(resp.Body)
		if err != nil {
			t.Fatalf("net/http refuses the body of %q: %v; it was read as %+v", data, err, a)
		}
		if resp.StatusCode != a.StatusCode || resp.Header.Get("Content-Type") != a.Type || !bytes.Equal(body, a.Body) {
			t.Errorf("%q: got %+v, net/http has %d %q %q", data, a, resp.StatusCode, resp.Header.Get("Content-Type"), body)
		}
		if whole && (resp.Close || r.Buffered() > 0) {
			t.Errorf("%q: the connection is kept, and net/http would not: close %v, %d bytes behind it", data, resp.Close, r.Buffered())
		}
	})
}

// answerOf is net/http's reading of an answer.
func answerOf(r *bufio.Reader, method string) (*http.Response, error) {
	resp, err := http.ReadResponse(r, &http.Request{Method: method})
	if err == nil && resp.StatusCode/100 == 1 {
		return answerOf(r, method)
	}
	return resp, err
}
