package main

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"
)

func TestMain(m *testing.M) {
	testscript.Main(m, map[string]func(){"sluice": main})
}

// TestScripts runs the command as a person would: testdata/script has a file a story. $MODEL is a folder with a tiny Llama of 64 token ids.
func TestScripts(t *testing.T) {
	model, err := filepath.Abs("../../target/tinyllama/testdata/tiny-untied")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(model); err != nil {
		t.Fatal(err)
	}
	testscript.Run(t, testscript.Params{
		Dir: "testdata/script",
		Setup: func(env *testscript.Env) error {
			env.Setenv("MODEL", model)
			return nil
		},
		Condition: func(cond string) (bool, error) {
			if cond == "root" {
				return os.Geteuid() == 0, nil
			}
			return false, fmt.Errorf("there is no condition %q", cond) // a misspelt one must not skip a script in silence
		},
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			"lastline": lastLine, "await": await, "awaitready": awaitReady, "endpoint": endpoint, "nosecrets": noSecrets,
			"samplestore": sampleStore, "bytes": editBytes,
		},
	})
}
