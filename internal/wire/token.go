package wire

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"github.com/sluice-ml/sluice"
)

// Token is a secret that lets its bearer call the service over TCP, in one role and, if it names a run, for that run alone.
type Token struct {
	Name    string    `json:"name"`
	Role    string    `json:"role"` // producer, consumer or operator
	Run     string    `json:"run,omitempty"`
	Value   string    `json:"value"` // never printed, logged or put into a URL or an argument
	Created time.Time `json:"created"`
}

// Lengths of a token's value. The service makes them of 26 random letters and digits, 130 bits.
const (
	minTokenBytes = 26
	maxTokenBytes = 256
)

// ValidTokenValue says whether s has the form of a token: letters, digits, - and _, between 26 and 256 of them.
func ValidTokenValue(s string) bool {
	if len(s) < minTokenBytes || len(s) > maxTokenBytes {
		return false
	}
	for i := range len(s) {
		c := s[i]
		if (c < 'a' || c > 'z') && (c < 'A' || c > 'Z') && (c < '0' || c > '9') && c != '-' && c != '_' {
			return false
		}
	}
	return true
}

// maxTokensFile is what a tokens file may have: some 20,000 tokens.
const maxTokensFile = 4 << 20

type tokensFile struct {
	Tokens []Token `json:"tokens"`
}

// ParseTokens reads a [TokensFile]. Its errors (ErrCorrupt) tell places and names, never what might be a secret.
func ParseTokens(data []byte) ([]Token, error) {
	bad := func(detail string) ([]Token, error) {
		return nil, &sluice.Error{Kind: sluice.Corrupt, Op: "tokens", Detail: detail, Hint: "make tokens with `sluice token create`; if the file is lost, remove it, and the service makes a new one"}
	}
	var f tokensFile
	d := json.NewDecoder(bytes.NewReader(data))
	d.DisallowUnknownFields()
	if err := d.Decode(&f); err != nil {
		return bad("the file is not JSON of the form {\"tokens\":[{\"name\",\"role\",\"run\",\"value\",\"created\"}]}") // err may quote what the file holds
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return bad("the file goes on behind its JSON object")
	}
	names, values := map[string]bool{}, map[string]bool{}
	for i, t := range f.Tokens {
		wrong := "" // entries are numbered, not named: a name may be a value in the wrong place
		switch {
		case sluice.ValidateID(t.Name) != nil:
			wrong = "has no valid name"
		case names[t.Name]:
			wrong = "has the name of another one"
		case t.Role != "producer" && t.Role != "consumer" && t.Role != "operator":
			wrong = "has no valid role, want producer, consumer or operator"
		case t.Run != "" && sluice.ValidateID(t.Run) != nil:
			wrong = "names no valid run"
		case !ValidTokenValue(t.Value):
			wrong = "has no valid value, want 26 to 256 letters, digits, - and _"
		case values[t.Value]:
			wrong = "has the value of another one"
		}
		if wrong != "" {
			return bad(fmt.Sprintf("token %d of %d %s", i+1, len(f.Tokens), wrong))
		}
		names[t.Name], values[t.Value] = true, true
	}
	return f.Tokens, nil
}

// FormatTokens is the content of a [TokensFile].
func FormatTokens(tokens []Token) ([]byte, error) {
	data, err := json.MarshalIndent(tokensFile{tokens}, "", "  ")
	return append(data, '\n'), err
}

// ReadTokens reads the tokens of the service whose state is in dir: a client on its host finds its own there. The file must be the caller's own, and nobody else's to read.
func ReadTokens(dir string) ([]Token, error) {
	path := filepath.Join(dir, TokensFile)
	f, err := OpenPrivate(path, false)
	if err != nil {
		return nil, err
	}
	defer f.Close() //nolint:errcheck // nothing was written
	data, err := io.ReadAll(io.LimitReader(f, maxTokensFile+1))
	if err != nil {
		return nil, &sluice.Error{Kind: sluice.Unavailable, Op: "tokens", Subject: path, Err: err}
	}
	if len(data) > maxTokensFile {
		return nil, &sluice.Error{Kind: sluice.Corrupt, Op: "tokens", Subject: path, Detail: "has more than 4 MiB"}
	}
	tokens, err := ParseTokens(data)
	var e *sluice.Error
	if errors.As(err, &e) {
		e.Subject = path
	}
	return tokens, err
}

// OwnToken is the operator's token of the service whose state is in dir, and the certificate to trust for it, if url is that service's address: what lies there is for no other address. Both are
// empty if it is not.
func OwnToken(dir, url string) (token, caFile string, err error) {
	e, err := ReadEndpoint(dir)
	if errors.Is(err, sluice.ErrUnavailable) || err == nil && (e.URL == "" || e.URL != url) {
		return "", "", nil
	}
	if err != nil {
		return "", "", err
	}
	tokens, err := ReadTokens(dir)
	if err != nil {
		return "", "", err
	}
	for _, t := range tokens {
		if t.Role == "operator" && t.Run == "" {
			return t.Value, e.CAFile, nil
		}
	}
	return "", e.CAFile, nil
}

// ReadToken reads a file that holds one token and nothing else, such as $SLUICE_TOKEN_FILE names. It may be reached through symbolic links, as secrets that an orchestrator mounts
// are, but nobody else may have access to it.
func ReadToken(path string) (string, error) {
	f, err := OpenPrivate(path, true)
	if err != nil {
		return "", err
	}
	defer f.Close() //nolint:errcheck // nothing was written
	data, err := io.ReadAll(io.LimitReader(f, maxTokenBytes+3))
	if err != nil {
		return "", &sluice.Error{Kind: sluice.Unavailable, Op: "token", Subject: path, Err: err}
	}
	token := string(bytes.TrimSpace(data))
	if !ValidTokenValue(token) {
		return "", &sluice.Error{Kind: sluice.Corrupt, Op: "token", Subject: path, Detail: "holds no token, want 26 to 256 letters, digits, - and _ and nothing else"}
	}
	return token, nil
}

// OpenPrivate opens a file that holds a secret. It is refused (ErrDenied) unless it is a regular file that belongs to this user (or to root) and that nobody else has access to; and if
// it is a symbolic link, unless links says that it may be one.
func OpenPrivate(path string, links bool) (*os.File, error) {
	flags := syscall.O_CLOEXEC | syscall.O_NONBLOCK // a named pipe must not hold us
	if !links {
		flags |= syscall.O_NOFOLLOW
	}
	f, err := os.OpenFile(path, os.O_RDONLY|flags, 0)
	refuse := func(detail, hint string) (*os.File, error) {
		if f != nil {
			_ = f.Close() // nothing was read
		}
		return nil, &sluice.Error{Kind: sluice.Denied, Op: "secret file", Subject: path, Detail: detail, Hint: hint}
	}
	switch {
	case errors.Is(err, syscall.ELOOP):
		return refuse("is a symbolic link, want a regular file", "")
	case errors.Is(err, fs.ErrNotExist):
		return nil, &sluice.Error{Kind: sluice.NotFound, Op: "secret file", Subject: path, Err: err}
	case err != nil:
		return nil, &sluice.Error{Kind: sluice.Denied, Op: "secret file", Subject: path, Err: err}
	}
	info, err := f.Stat()
	if err != nil {
		return refuse(err.Error(), "")
	}
	owner, ok := info.Sys().(*syscall.Stat_t)
	switch {
	case !info.Mode().IsRegular():
		return refuse("is a "+kindOf(info.Mode())+", want a regular file", "")
	case !ok || (int(owner.Uid) != os.Geteuid() && owner.Uid != 0):
		return refuse("belongs to another user", "")
	case info.Mode().Perm()&0o077 != 0:
		return refuse("has the mode "+info.Mode().Perm().String()+", which lets others at it", "chmod 600 it, and make new tokens if others could read it")
	}
	return f, nil
}

func kindOf(m fs.FileMode) string {
	switch {
	case m.IsDir():
		return "directory"
	case m&fs.ModeNamedPipe != 0:
		return "named pipe"
	case m&fs.ModeSocket != 0:
		return "socket"
	}
	return "device"
}
