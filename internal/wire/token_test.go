package wire

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sluice-ml/sluice"
)

const someToken = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"

func TestTokensFilesThatAreNone(t *testing.T) {
	t.Parallel()
	entry := func(name, role, run, value string) string {
		return `{"name":"` + name + `","role":"` + role + `","run":"` + run + `","value":"` + value + `","created":"2026-01-02T03:04:05Z"}`
	}
	good := entry("op", "operator", "", someToken)
	if tokens, err := ParseTokens([]byte(`{"tokens":[` + good + `]}`)); err != nil || len(tokens) != 1 {
		t.Fatal(err)
	}
	for name, text := range map[string]string{
		"nothing":         "",
		"another value":   "[]",
		"half":            `{"tokens":[` + good,
		"two objects":     `{"tokens":[]}{"tokens":[]}`,
		"unknown field":   `{"tokens":[],"` + someToken + `":1}`,
		"a number":        `{"tokens":[{"value":12345}]}`,
		"no name":         `{"tokens":[` + entry("", "operator", "", someToken) + `]}`,
		"name and value":  `{"tokens":[` + entry(someToken, "operator", "", "op") + `]}`,
		"unknown role":    `{"tokens":[` + entry("op", "root", "", someToken) + `]}`,
		"no run":          `{"tokens":[` + entry("op", "operator", "a/b", someToken) + `]}`,
		"a short value":   `{"tokens":[` + entry("op", "operator", "", someToken[1:]) + `]}`,
		"a long value":    `{"tokens":[` + entry("op", "operator", "", strings.Repeat("a", 257)) + `]}`,
		"a value of more": `{"tokens":[` + entry("op", "operator", "", someToken+" "+someToken) + `]}`,
		"same names":      `{"tokens":[` + good + `,` + entry("op", "consumer", "", someToken+"2") + `]}`,
		"same values":     `{"tokens":[` + good + `,` + entry("c", "consumer", "", someToken) + `]}`,
	} {
		_, err := ParseTokens([]byte(text))
		if !errors.Is(err, sluice.ErrCorrupt) {
			t.Errorf("%s: %v", name, err)
		} else if strings.Contains(err.Error(), someToken[:8]) {
			t.Errorf("%s: the message holds a secret: %v", name, err)
		}
	}
}

func FuzzParseTokens(f *testing.F) {
	f.Add([]byte(`{"tokens":[{"name":"op","role":"operator","run":"r1","value":"` + someToken + `","created":"2026-01-02T03:04:05Z"}]}`))
	f.Add([]byte(`{"tokens":null}`))
	f.Add([]byte(`{"tokens":[{}]} `))
	f.Fuzz(func(t *testing.T, data []byte) {
		tokens, err := ParseTokens(data)
		if err != nil {
			if !errors.Is(err, sluice.ErrCorrupt) {
				t.Fatal(err)
			}
			return
		}
		again, err := FormatTokens(tokens)
		if err != nil {
			return // a year that RFC 3339 does not have
		}
		back, err := ParseTokens(again)
		if err != nil || len(back) != len(tokens) {
			t.Fatalf("%d tokens, then %d: %v", len(tokens), len(back), err)
		}
		for i := range back {
			if back[i].Value != tokens[i].Value || back[i].Name != tokens[i].Name || back[i].Role != tokens[i].Role || back[i].Run != tokens[i].Run {
				t.Fatalf("%d is another", i)
			}
		}
	})
}

func TestSecretFilesThatAreRefused(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	path := func(name string) string { return filepath.Join(dir, name) }
	if err := errors.Join(os.WriteFile(path("good"), []byte(someToken+"\n"), 0o600), os.WriteFile(path("open"), []byte(someToken), 0o644), os.WriteFile(path("group"), []byte(someToken), 0o640),
		os.WriteFile(path("two"), []byte(someToken+"\n"+someToken), 0o600), os.WriteFile(path("empty"), nil, 0o600), os.Symlink("good", path("link")), os.Symlink("open", path("bad link")), os.Mkdir(path("dir"), 0o700)); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]error{"good": nil, "link": nil, "open": sluice.ErrDenied, "group": sluice.ErrDenied, "bad link": sluice.ErrDenied, "dir": sluice.ErrDenied, "none": sluice.ErrNotFound, "two": sluice.ErrCorrupt, "empty": sluice.ErrCorrupt} {
		token, err := ReadToken(path(name))
		if want == nil && (err != nil || token != someToken) || want != nil && !errors.Is(err, want) {
			t.Errorf("%s: %q %v", name, token, err)
		}
		if err != nil && strings.Contains(err.Error(), someToken[:8]) {
			t.Errorf("%s: the message holds the secret: %v", name, err)
		}
	}
	if f, err := OpenPrivate(path("link"), false); !errors.Is(err, sluice.ErrDenied) {
		t.Errorf("a link where none may be: %v %v", f, err)
	}
	if os.Geteuid() == 0 { // only root can give files away
		if err := os.Chown(path("good"), 12345, -1); err != nil {
			t.Fatal(err)
		}
		if _, err := ReadToken(path("good")); !errors.Is(err, sluice.ErrDenied) {
			t.Errorf("another user's file: %v", err)
		}
	}
}
