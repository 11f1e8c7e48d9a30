package main

import (
	"encoding/json"
	"fmt"
	"strings"

	"github.com/rogpeppe/go-internal/testscript"
)

// lastLine checks the last line of stdout: it must be one JSON object that has each "field=value" given, values as Go prints them.
func lastLine(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) == 0 {
		ts.Fatalf("usage: lastline field=value ...")
	}
	lines := strings.Split(strings.TrimRight(ts.ReadFile("stdout"), "\n"), "\n")
	var object map[string]any
	if err := json.Unmarshal([]byte(lines[len(lines)-1]), &object); err != nil {
		ts.Fatalf("the last line of stdout is no JSON object: %v\n%s", err, lines[len(lines)-1])
	}
	for _, arg := range args {
		field, want, _ := strings.Cut(arg, "=")
		if got := fmt.Sprint(object[field]); got != want {
			ts.Fatalf("%s is %s, want %s", field, got, want)
		}
	}
}
