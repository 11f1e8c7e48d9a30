package main

import (
	"bytes"
	"encoding/json"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sluice-ml/sluice"
)

// Every command with --json says in JSON why there is no other object, in one line, and a sentence on stderr.
func TestEveryCommandWithJSONFailsInJSON(t *testing.T) {
	t.Setenv("SLUICE_URL", "")
	t.Setenv("SLUICE_TOKEN_FILE", "")
	empty := t.TempDir() // of no service
	nowhere := filepath.Join(empty, "nowhere")
	for _, c := range []struct {
		args string
		kind sluice.Kind
	}{
		{"status --state " + empty, sluice.Unavailable},
		{"status r1 --watch --state " + empty, sluice.Unavailable},
		{"runs --state " + empty, sluice.Unavailable},
		{"runs list --state " + empty, sluice.Unavailable},
		{"runs describe r1 --state " + empty, sluice.Unavailable},
		{"runs create r1 --algorithm dflash --state " + empty, sluice.Unavailable},
		{"runs create r1 --spec " + nowhere, sluice.Invalid},
		{"runs configure r1 --reopen --state " + empty, sluice.Unavailable},
		{"runs close r1 --state " + empty, sluice.Unavailable},
		{"runs delete r1 --yes --state " + empty, sluice.Unavailable},
		{"dead-letters r1 --state " + empty, sluice.Unavailable},
		{"dead-letters r1 drop --all --state " + empty, sluice.Unavailable},
		{"token list --state " + nowhere, sluice.NotFound},
		{"inspect " + nowhere, sluice.NotFound},
		{"inspect " + empty, sluice.NotFound},
		{"plan", sluice.Invalid},
		{"demo --ranks 0", sluice.Invalid},
		{"bench --only (", sluice.Invalid},
		{"torture --duration 1s", sluice.Invalid},
	} {
		var stdout, stderr bytes.Buffer
		status := Main(append(strings.Fields(c.args), "--json"), &stdout, &stderr)
		var object map[string]string
		if err := json.Unmarshal(stdout.Bytes(), &object); err != nil || strings.Count(stdout.String(), "\n") != 1 {
			t.Errorf("%s: stdout is no line of JSON (%v): %q", c.args, err, stdout.String())
			continue
		}
		if status != 1 || len(object) != 2 || object["error"] == "" || object["kind"] != string(c.kind) {
			t.Errorf("%s: status %d and %v, want 1 and an error of the kind %s", c.args, status, object, c.kind)
		}
		if !strings.Contains(stderr.String(), "sluice: "+object["error"]) {
			t.Errorf("%s: stderr does not say so: %q", c.args, stderr.String())
		}
	}
	// What has no other line of JSON has none of these either.
	var stdout, stderr bytes.Buffer
	if status := Main([]string{"status", "--state", empty}, &stdout, &stderr); status != 1 || stdout.Len() > 0 {
		t.Errorf("without --json: status %d, stdout %q", status, stdout.String())
	}
	if status := Main([]string{"dead-letters", "r1", "eat", "--json"}, &stdout, &stderr); status != 2 || stdout.Len() > 0 {
		t.Errorf("a wrong command line: status %d, stdout %q", status, stdout.String())
	}
}
