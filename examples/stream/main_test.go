package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestTheProgramOfTheREADMERuns(t *testing.T) {
	file := filepath.Join(t.TempDir(), "prompts.jsonl")
	line := `{"messages":[{"role":"user","content":"Hi"},{"role":"assistant","content":"Yo"}]}` + "\n"
	if err := os.WriteFile(file, []byte(strings.Repeat(line, 6)), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := run(t.Context(), file); err != nil {
		t.Fatal(err)
	}
	if err := run(t.Context(), file+".not"); err == nil {
		t.Error("a missing file is no error")
	}
}
