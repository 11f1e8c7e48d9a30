package service

import (
	"bytes"
	"encoding/json"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/internal/wire"
	"github.com/sluice-ml/sluice/safetensors"
	"github.com/sluice-ml/sluice/service/access"
)

// uploadWith uploads a sample that the fields describe.
func (b *bed) uploadWith(run, id, fields string) answer {
	b.t.Helper()
	return b.send(http.MethodPut, "/v1/runs/"+run+"/samples/"+id, map[string]string{"Content-Type": binary, wire.SampleHeader: fields}, bytes.NewReader(file(b.t, sampleNumber.Add(1))))
}

func (b *bed) createMixed(run string) wire.Run {
	b.t.Helper()
	return do[wire.Run](b, "POST", "/v1/runs", wire.RunSpec{RunID: run, Mixed: true, Caps: wire.Caps{MaxBytes: 1 << 20}})
}

func TestAMixedRunCarriesWhatAnyRunAndSchemaMade(t *testing.T) {
	t.Parallel()
	b := newBed(t, Options{})
	for range 2 { // creating it again is success
		if r := b.createMixed("m"); !r.Spec.Mixed || len(r.Spec.Schema) != 0 {
			t.Fatalf("described as %+v, want mixed and no schema", r.Spec)
		}
	}
	b.wants("conflict", "POST", "/v1/runs", wire.RunSpec{RunID: "m", Algorithm: "eagle3", Caps: wire.Caps{MaxBytes: 1 << 20}})
	b.wants("invalid", "POST", "/v1/runs", wire.RunSpec{RunID: "n", Algorithm: "eagle3", Mixed: true, Caps: wire.Caps{MaxBytes: 1 << 20}})
	a := b.uploadWith("m", "s-1", `{"run_id":"upstream","algorithm":"dflash","schema_version":9,"num_tokens":2,"generation":"g1"}`)
	if a.status != http.StatusCreated {
		t.Fatalf("upload: %d %s", a.status, a.body)
	}
	var st wire.Stored
	if err := json.Unmarshal(a.body, &st); err != nil {
		t.Fatal(err)
	}
	if st.Ref.RunID() != "upstream" || st.Ref.SchemaVersion() != 9 {
		t.Errorf("stored %s", st.Ref.Canonical())
	}
	if again := b.uploadWith("m", "s-1", `{"run_id":"upstream","algorithm":"dflash","schema_version":9,"num_tokens":2,"generation":"g1"}`); again.status != http.StatusCreated {
		t.Errorf("the same again: %d %s", again.status, again.body)
	}
	if a := b.uploadWith("m", "s-2", `{"algorithm":"dflash","num_tokens":2}`); a.problem.Code != "invalid" || !strings.Contains(a.problem.Detail, "run_id is missing") {
		t.Errorf("without a run_id: %d %s", a.status, a.body)
	}
	if r := b.commit("m", st.Ref).Results[0]; r.Status != sluice.Enqueued {
		t.Fatalf("commit: %+v", r)
	}
	b.restart()
	if r := b.commit("m", st.Ref).Results[0]; r.Status != sluice.AlreadyPut {
		t.Errorf("commit after a restart: %+v", r)
	}
	if r := do[wire.Run](b, "GET", "/v1/runs/m", nil); !r.Spec.Mixed || r.Status.Pending != 1 {
		t.Errorf("after a restart: %+v", r)
	}
	d := b.acquire("m", 1)
	if len(d.Leases) != 1 || !d.Leases[0].Ref.Equal(st.Ref) {
		t.Fatalf("acquired %+v", d)
	}
	do[wire.Pinned](b, "POST", "/v1/runs/m/pins", wire.Pin{Ref: st.Ref})
	b.settle("m", sluice.Ack, d.Leases...)
	if a := b.send("GET", "/", nil, nil); a.status != http.StatusOK { // the dashboard, too, is shown with such a run
		t.Errorf("dashboard: %d", a.status)
	}
}

func TestAnOrdinaryRunTakesNoOtherRunID(t *testing.T) {
	t.Parallel()
	b := newBed(t, Options{})
	b.create("r1")
	if a := b.uploadWith("r1", "s-1", `{"run_id":"upstream","algorithm":"mine","num_tokens":2}`); a.problem.Code != "invalid" || !strings.Contains(a.problem.Detail, `run_id is "upstream", want "r1"`) {
		t.Errorf("%d %s", a.status, a.body)
	}
	if a := b.uploadWith("r1", "s-1", `{"run_id":"r1","algorithm":"mine","num_tokens":2}`); a.status != http.StatusCreated {
		t.Errorf("%d %s", a.status, a.body)
	}
}

func TestAFileStagedIntoAMixedRunSaysItsRunItself(t *testing.T) {
	t.Parallel()
	b := newBed(t, Options{})
	run := b.createMixed("m")
	fs := features(1)
	stage := func(name, runID string, fields *wire.SampleFields) answer {
		t.Helper()
		s := sluice.Sample{SampleID: name, RunID: runID, Algorithm: "dspark", SchemaVersion: 1, NumTokens: 2, Features: fs}
		f, err := s.RefFields(run.Store.URI, sluice.NewGeneration())
		if err != nil {
			t.Fatal(err)
		}
		ref, err := sluice.NewRef(f)
		if err != nil {
			t.Fatal(err)
		}
		layout, err := safetensors.NewLayout(fs, map[string]string{safetensors.RefKey: ref.Canonical()})
		if err != nil {
			t.Fatal(err)
		}
		out, err := os.OpenFile(filepath.Join(run.Store.StagingDir, name), os.O_RDWR|os.O_CREATE, 0o600)
		if err != nil {
			t.Fatal(err)
		}
		if err := layout.WriteFile(out, 0, fs); err != nil {
			t.Fatal(err)
		}
		if err := out.Close(); err != nil {
			t.Fatal(err)
		}
		return b.try("POST", "/v1/runs/m/stage", wire.Stage{File: name, SampleID: name, Fields: fields})
	}
	if a := stage("s-1", "upstream", nil); a.status != http.StatusCreated || !bytes.Contains(a.body, []byte(`"run_id":"upstream"`)) {
		t.Errorf("%d %s", a.status, a.body)
	}
	if a := stage("s-2", "upstream", &wire.SampleFields{RunID: "other", Algorithm: "dspark"}); a.problem.Code != "invalid" || !strings.Contains(a.problem.Detail, "run_id") {
		t.Errorf("with another run_id beside: %d %s", a.status, a.body)
	}
}

func TestARefIsHeldAgainstASchema(t *testing.T) {
	t.Parallel()
	b := newBed(t, Options{})
	b.create("r1")
	ref := b.upload("r1", "s-1", "")
	for _, role := range []access.Role{access.Producer, access.Consumer, access.Operator} {
		b.as.Role = role
		if a := b.try("POST", "/v1/check", wire.Judge{Ref: ref, Schema: json.RawMessage(testSchema)}); a.status != http.StatusNoContent {
			t.Errorf("%s: %d %s", role, a.status, a.body)
		}
	}
	if p := b.wants("schema", "POST", "/v1/check", wire.Judge{Ref: ref, Algorithm: "eagle3"}); p.Status != http.StatusUnprocessableEntity || !strings.Contains(p.Detail, "eagle3") {
		t.Errorf("%+v", p)
	}
	b.wants("invalid", "POST", "/v1/check", wire.Judge{Ref: ref})
	b.wants("invalid", "POST", "/v1/check", wire.Judge{Ref: ref, Algorithm: "eagle3", Schema: json.RawMessage(testSchema)})
	b.wants("invalid", "POST", "/v1/check", `{"algorithm":"eagle3"}`)
	b.wants("invalid", "POST", "/v1/check", wire.Judge{Ref: ref, Schema: json.RawMessage(`{"name":""}`)})
	b.wants("invalid", "POST", "/v1/check", wire.Judge{Ref: ref, Algorithm: "nobody"})
}
