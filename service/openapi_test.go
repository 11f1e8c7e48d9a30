package service

import (
	"bytes"
	"flag"
	"os"
	"testing"
)

var update = flag.Bool("update", false, "write docs/openapi.yaml")

const committedDocument = "../docs/openapi.yaml"

func TestCommittedDocumentIsTheOneThatIsServed(t *testing.T) {
	t.Parallel()
	b := newBed(t, Options{})
	a := b.send("GET", "/openapi.yaml", nil, nil)
	if a.status != 200 {
		t.Fatalf("%d %s", a.status, a.body)
	}
	if *update {
		if err := os.WriteFile(committedDocument, a.body, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(committedDocument)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(a.body, want) {
		t.Errorf("%s is not what is served; run: make openapi", committedDocument)
	}
}
