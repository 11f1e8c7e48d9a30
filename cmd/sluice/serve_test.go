package main

import (
	"context"
	"io"
	"net/http"
	"os"
	"strings"
	"time"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/sluice-ml/sluice/internal/wire"
)

// await waits until a file is there.
func await(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 1 {
		ts.Fatalf("usage: await file")
	}
	for end := time.Now().Add(time.Minute); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		if _, err := os.Stat(ts.MkAbs(args[0])); err == nil {
			return
		}
	}
	ts.Fatalf("%s does not appear", args[0])
}

// awaitReady waits until all runs of the service of a state directory are open.
func awaitReady(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 1 {
		ts.Fatalf("usage: awaitready state")
	}
	call, err := (&serviceFlags{state: ts.MkAbs(args[0])}).dial(io.Discard)
	ts.Check(err)
	for end := time.Now().Add(time.Minute); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		var s wire.ServiceStatus
		ts.Check(call.do(context.Background(), http.MethodGet, "/v1/status", nil, &s))
		if s.Ready {
			return
		}
	}
	ts.Fatalf("%s is not ready", args[0])
}

// endpoint sets $URL and $CA to what the service of a state directory says of itself.
func endpoint(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 1 {
		ts.Fatalf("usage: endpoint state")
	}
	e, err := wire.ReadEndpoint(ts.MkAbs(args[0]))
	ts.Check(err)
	ts.Setenv("URL", e.URL)
	ts.Setenv("CA", e.CAFile)
}

// noSecrets checks that no token of a state directory is in any of the files.
func noSecrets(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) < 2 {
		ts.Fatalf("usage: nosecrets state file...")
	}
	tokens, err := wire.ReadTokens(ts.MkAbs(args[0]))
	ts.Check(err)
	if len(tokens) == 0 {
		ts.Fatalf("there are no tokens")
	}
	for _, file := range args[1:] {
		text := ts.ReadFile(file)
		for _, t := range tokens {
			if strings.Contains(text, t.Value) {
				ts.Fatalf("the token %s is in %s", t.Name, file)
			}
		}
	}
}
