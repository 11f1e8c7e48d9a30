package access

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/internal/wire"
)

func mkfifo(path string) error { return syscall.Mkfifo(path, 0o600) }

func TestTheFirstStartMakesATokenARole(t *testing.T) {
	t.Parallel()
	dir := stateDir(t)
	if err := EnsureTokens(dir); err != nil {
		t.Fatal(err)
	}
	first, err := wire.ReadTokens(dir)
	if err != nil || len(first) != 3 {
		t.Fatalf("%d tokens, %v", len(first), err)
	}
	for i, r := range []Role{Producer, Consumer, Operator} {
		if tok := first[i]; tok.Role != string(r) || tok.Name != string(r) || tok.Run != "" || !wire.ValidTokenValue(tok.Value) || tok.Created.IsZero() {
			t.Errorf("%+v", tok)
		}
	}
	info, err := os.Stat(filepath.Join(dir, wire.TokensFile))
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("%v %v", info, err)
	}
	if err := EnsureTokens(dir); err != nil {
		t.Fatal(err)
	}
	if second, err := wire.ReadTokens(dir); err != nil || second[0].Value != first[0].Value {
		t.Errorf("the second start made others: %v", err)
	}
}

func TestTokensAreNotMadeAgainForWhoRevokedAll(t *testing.T) {
	t.Parallel()
	dir := stateDir(t)
	if err := EnsureTokens(dir); err != nil {
		t.Fatal(err)
	}
	for _, r := range []Role{Producer, Consumer, Operator} {
		if err := RevokeToken(dir, string(r)); err != nil {
			t.Fatal(err)
		}
	}
	if err := EnsureTokens(dir); err != nil {
		t.Fatal(err)
	}
	if tokens, err := wire.ReadTokens(dir); err != nil || len(tokens) != 0 {
		t.Errorf("%d tokens, %v", len(tokens), err)
	}
}

func TestTokensThatCannotBeMade(t *testing.T) {
	t.Parallel()
	dir := stateDir(t)
	if err := EnsureTokens(dir); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name string
		role Role
		run  string
		want error
	}{
		{"operator", Consumer, "", sluice.ErrDuplicate}, {"", Consumer, "", sluice.ErrInvalid}, {"a b", Consumer, "", sluice.ErrInvalid}, {"x\n", Consumer, "", sluice.ErrInvalid},
		{"x", "boss", "", sluice.ErrInvalid}, {"x", "", "", sluice.ErrInvalid}, {"x", Consumer, "../r", sluice.ErrInvalid},
	} {
		if _, err := CreateToken(dir, c.name, c.role, c.run); !errors.Is(err, c.want) {
			t.Errorf("%+v: %v", c, err)
		}
	}
	if err := RevokeToken(dir, "nobody"); !errors.Is(err, sluice.ErrNotFound) {
		t.Errorf("got %v", err)
	}
	if _, err := CreateToken(filepath.Join(dir, "none"), "x", Consumer, ""); !errors.Is(err, sluice.ErrNotFound) {
		t.Errorf("got %v", err)
	}
	if tokens, err := wire.ReadTokens(dir); err != nil || len(tokens) != 3 {
		t.Errorf("%d tokens, %v", len(tokens), err)
	}
}

func TestTwoWhoEditTokensLoseNone(t *testing.T) {
	t.Parallel()
	dir := stateDir(t)
	var all sync.WaitGroup
	for i := range 16 {
		all.Go(func() {
			if _, err := CreateToken(dir, fmt.Sprintf("t%d", i), Consumer, ""); err != nil {
				t.Error(err)
			}
			if i%2 == 0 {
				if err := RevokeToken(dir, fmt.Sprintf("t%d", i)); err != nil {
					t.Error(err)
				}
			}
		})
	}
	all.Wait()
	if tokens, err := wire.ReadTokens(dir); err != nil || len(tokens) != 8 {
		t.Errorf("%d tokens, %v", len(tokens), err)
	}
	left, err := os.ReadDir(dir)
	if err != nil || len(left) != 2 {
		t.Errorf("left behind: %v %v", left, err)
	}
}

func TestEveryTokenIsCompared(t *testing.T) {
	t.Parallel()
	k := &keyring{}
	for i := range 50 {
		k.keys = append(k.keys, key{sha256.Sum256(fmt.Append(nil, i)), Caller{Name: fmt.Sprint(i)}})
	}
	for i := range 50 {
		if c, ok := k.find(k.keys[i].digest); !ok || c.Name != fmt.Sprint(i) {
			t.Errorf("%d: %v %v", i, c, ok)
		}
		near := k.keys[i].digest
		near[i%len(near)] ^= 1 << (i % 8)
		if c, ok := k.find(near); ok {
			t.Errorf("%d: one bit away is %v", i, c)
		}
	}
	if _, ok := k.find(digest{}); ok {
		t.Error("the zero digest is somebody")
	}
}

func FuzzBearer(f *testing.F) {
	for _, s := range []string{"Bearer ABCDEFGHIJKLMNOPQRSTUVWXYZ", "bearer  x", "Basic dXNlcjpwYXNz", "Bearer", "", "Bearer\tABCDEFGHIJKLMNOPQRSTUVWXYZ", "Bearer ABCDEFGHIJKLMNOPQRSTUVWXYZ, Bearer x"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, header string) {
		token, given := bearer([]string{header})
		if !given {
			t.Fatal("a header that is there is not seen")
		}
		if token != "" && (!wire.ValidTokenValue(token) || !strings.EqualFold(header[:len("Bearer ")], "Bearer ") || !strings.Contains(header, token)) {
			t.Fatalf("%q gives %q", header, token)
		}
		if other, _ := bearer([]string{header, header}); other != "" {
			t.Fatal("two headers give a token")
		}
		h := http.Header{}
		h.Set("Authorization", header)
		if again, _ := bearer(h.Values("Authorization")); again != token {
			t.Fatalf("%q, then %q", token, again)
		}
	})
}
