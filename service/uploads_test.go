package service

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/internal/wire"
	"github.com/sluice-ml/sluice/safetensors"
)

func TestUncommittedSamplesGoWhenTheTimeOfTheirReservationIsOver(t *testing.T) {
	t.Parallel()
	b, clock := clocked(t, Options{})
	b.create("r1")
	res := do[wire.Reservations](b, "POST", "/v1/runs/r1/reserve", wire.Reserve{Bytes: []int64{sampleBytes, 500}}).Reservations
	clock.Advance(6 * time.Minute)
	b.upload("r1", "old", res[0].ID)
	kept := b.upload("r1", "kept", "")
	young := b.upload("r1", "young", "")
	b.commit("r1", kept)
	clock.Advance(5 * time.Minute)
	st := b.status("r1")
	if st.Health.ReservedBytes != 0 {
		t.Errorf("the reservation goes on: %+v", st.Health)
	}
	if st.Health.ResidentSamples != 2 || b.s.Abandoned() != 1 {
		t.Errorf("%d samples are here, %d went; want kept and young to be here", st.Health.ResidentSamples, b.s.Abandoned())
	}
	if r := b.commit("r1", young).Results[0]; r.Status != sluice.Enqueued {
		t.Errorf("commit: %+v", r)
	}
	clock.Advance(time.Hour)
	if st := b.status("r1"); st.Health.ResidentSamples != 2 || st.Pending != 2 {
		t.Errorf("committed samples went: %+v", st)
	}
}

func TestUncommittedSamplesOutliveARestartForAWhile(t *testing.T) {
	t.Parallel()
	b, clock := clocked(t, Options{})
	b.create("r1")
	first, second := b.upload("r1", "first", ""), b.upload("r1", "second", "")
	b.restart()
	if r := b.commit("r1", first).Results[0]; r.Status != sluice.Enqueued {
		t.Errorf("commit after a restart: %+v", r)
	}
	clock.Advance(9 * time.Minute)
	if h := b.status("r1").Health; h.ResidentSamples != 2 {
		t.Errorf("it went early: %+v", h)
	}
	clock.Advance(2 * time.Minute)
	if h := b.status("r1").Health; h.ResidentSamples != 1 || b.s.Abandoned() != 1 {
		t.Errorf("it did not go: %+v", h)
	}
	if r := b.commit("r1", second).Results[0]; r.Error == nil || r.Error.Code != "not_found" {
		t.Errorf("commit of what went: %+v", r)
	}
}

func TestAnUploadIsRepeatable(t *testing.T) {
	t.Parallel()
	b := newBed(t, Options{})
	b.create("r1")
	data := file(t, 1)
	send := func(generation string) answer {
		h := map[string]string{"Content-Type": binary, wire.SampleHeader: strings.Replace(fields, "{", `{"generation":"`+generation+`",`, 1)}
		return b.send("PUT", "/v1/runs/r1/samples/s-1", h, bytes.NewReader(data))
	}
	one, two := send("g1"), send("g1")
	if one.status != 201 || two.status != 201 || !bytes.Equal(one.body, two.body) {
		t.Errorf("%d %s, and again %d %s", one.status, one.body, two.status, two.body)
	}
	if three := send("g2"); three.problem.Code != "duplicate" {
		t.Errorf("another generation: %d %s", three.status, three.body)
	}
	if h := b.status("r1").Health; h.ResidentSamples != 1 {
		t.Errorf("health %+v", h)
	}
}

// A sender that stops in the middle, or whose bytes are not what it says, leaves nothing.
// An abort that names another store frees nothing, so the sample's time must go on.
func TestAnAbortOfAnotherStoreForgetsNothing(t *testing.T) {
	t.Parallel()
	b, clock := clocked(t, Options{})
	b.create("r1")
	ref := b.upload("r1", "s-1", "")
	elsewhere := strings.Replace(ref.Canonical(), ref.StoreURI(), "file:///elsewhere", 1)
	do[struct{}](b, "POST", "/v1/runs/r1/abort", `{"ref":`+elsewhere+`}`)
	if h := b.status("r1").Health; h.ResidentSamples != 1 {
		t.Fatalf("it is gone: %+v", h)
	}
	clock.Advance(11 * time.Minute)
	b.poll("the end of the sample's time", func() bool { return b.status("r1").Health.ResidentSamples == 0 })
}

func TestHalfAnUploadIsNeverSeen(t *testing.T) {
	t.Parallel()
	b := newBed(t, Options{})
	b.create("r1")
	res := do[wire.Reservations](b, "POST", "/v1/runs/r1/reserve", wire.Reserve{Bytes: []int64{sampleBytes}}).Reservations[0]
	data := file(t, 1)
	for _, cut := range []int{0, 4, 8, 60, len(data) - 1} {
		ctx, cancel := context.WithCancel(context.Background())
		pr, pw := io.Pipe()
		go func() { pw.Write(data[:cut]); cancel(); pw.CloseWithError(errors.New("gone")) }()
		req, err := http.NewRequestWithContext(ctx, http.MethodPut, b.srv.URL+"/v1/runs/r1/samples/s-1?reservation="+res.ID, pr)
		if err != nil {
			t.Fatal(err)
		}
		req.ContentLength = int64(len(data))
		req.Header.Set(wire.SampleHeader, fields)
		if resp, err := b.srv.Client().Do(req); err == nil {
			resp.Body.Close()
		}
		b.poll("the end of the upload", func() bool { return b.status("r1").Health.StagingBytes == 0 })
		if h := b.status("r1").Health; h.ResidentSamples != 0 || h.ReservedBytes != sampleBytes || h.ReservedSamples != 1 {
			t.Errorf("cut at %d: %+v", cut, h)
		}
	}
	short := b.send("PUT", "/v1/runs/r1/samples/s-1?reservation="+res.ID, map[string]string{wire.SampleHeader: fields}, bytes.NewReader(data[:len(data)-1]))
	if short.problem.Code != "corrupt" {
		t.Errorf("short: %d %s", short.status, short.body)
	}
	sum := func(trailer string) answer {
		req, err := http.NewRequest(http.MethodPut, b.srv.URL+"/v1/runs/r1/samples/s-1?reservation="+res.ID, io.MultiReader(bytes.NewReader(data)))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set(wire.SampleHeader, fields)
		req.Trailer = http.Header{wire.ChecksumTrailer: {trailer}}
		resp, err := b.srv.Client().Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		body, err := io.ReadAll(resp.Body)
		if err != nil {
			t.Fatal(err)
		}
		return answer{status: resp.StatusCode, body: body}
	}
	if a := sum("00000000"); a.status != 422 {
		t.Errorf("a wrong checksum: %d %s", a.status, a.body)
	}
	if h := b.status("r1").Health; h.ResidentSamples != 0 || h.ReservedBytes != sampleBytes {
		t.Errorf("after all that: %+v", h)
	}
	b.upload("r1", "s-1", res.ID)
	if h := b.status("r1").Health; h.ResidentSamples != 1 || h.ReservedBytes != 0 {
		t.Errorf("in the end: %+v", h)
	}
}

func TestAStagedFileBecomesASample(t *testing.T) {
	t.Parallel()
	b := newBed(t, Options{})
	run := b.create("r1")
	stage := func(name string) {
		if err := os.WriteFile(run.Store.StagingDir+"/"+name, file(t, 1), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	f := wire.SampleFields{Algorithm: "mine", NumTokens: 2, Features: []string{"hidden_states", "input_ids"}}
	stage("a")
	ref := do[wire.Stored](b, "POST", "/v1/runs/r1/stage", wire.Stage{File: "a", SampleID: "s-1", Fields: &f}).Ref
	stage("b")
	c := do[wire.Commits](b, "POST", "/v1/runs/r1/commit", wire.Commit{Items: []wire.CommitItem{
		{Ref: &ref}, {Stage: &wire.Stage{File: "b", SampleID: "s-2", Fields: &f}}, {Stage: &wire.Stage{File: "c", SampleID: "s-3", Fields: &f}}}}).Results
	if c[0].Status != sluice.Enqueued || c[1].Status != sluice.Enqueued || c[1].Ref == nil || c[2].Error == nil || c[2].Error.Code != "not_found" {
		t.Errorf("committed %+v", c)
	}
	left, err := os.ReadDir(run.Store.StagingDir)
	if err != nil || len(left) != 0 {
		t.Errorf("left in the staging directory: %v, %v", left, err)
	}
	for _, name := range []string{"..", ".", "", "x/y", "/etc/passwd", "../r1/x"} {
		b.wants("invalid", "POST", "/v1/runs/r1/stage", wire.Stage{File: name, SampleID: "s-4", Fields: &f})
	}
	if err := os.Symlink("/etc/passwd", run.Store.StagingDir+"/link"); err != nil {
		t.Fatal(err)
	}
	b.wants("denied", "POST", "/v1/runs/r1/stage", wire.Stage{File: "link", SampleID: "s-4", Fields: &f})
}

func TestOldStagedFilesAreRemoved(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ reservation, age, within time.Duration }{
		{0, 11 * time.Minute, 61 * time.Second},
		{8 * time.Second, 9 * time.Second, 9 * time.Second}, // what lives for less than a minute is looked for more often
	} {
		b, clock := clocked(t, Options{ReservationTime: c.reservation})
		run := b.create("r1")
		old, young := run.Store.StagingDir+"/old", run.Store.StagingDir+"/young"
		for _, f := range []string{old, young} {
			if err := os.WriteFile(f, nil, 0o600); err != nil {
				t.Fatal(err)
			}
		}
		past := time.Now().Add(-c.age)
		if err := os.Chtimes(old, past, past); err != nil {
			t.Fatal(err)
		}
		clock.Advance(c.within)
		if _, err := os.Stat(old); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("the old one: %v", err)
		}
		if _, err := os.Stat(young); err != nil {
			t.Errorf("the young one: %v", err)
		}
	}
}

func TestChecksumsAreThoseOfTheFeatures(t *testing.T) {
	t.Parallel()
	b := newBed(t, Options{})
	run := b.create("r1")
	if err := os.WriteFile(run.Store.StagingDir+"/a", file(t, 1), 0o600); err != nil {
		t.Fatal(err)
	}
	fs := wire.SampleFields{Algorithm: "mine", NumTokens: 2, Features: []string{"hidden_states", "input_ids"}}
	ref := do[wire.Stored](b, "POST", "/v1/runs/r1/stage", wire.Stage{File: "a", SampleID: "s-1", Fields: &fs}).Ref
	want := map[string]string{}
	for _, f := range features(1) {
		want[f.Name] = fmt.Sprintf("%08x", safetensors.Checksum(f.Data))
	}
	path := sampleURL(ref) + "/checksums"
	for range 2 {
		if got := do[wire.Checksums](b, "GET", path+"?generation="+ref.Generation(), nil).Checksums; !maps.Equal(got, want) {
			t.Errorf("checksums %v, want %v", got, want)
		}
	}
	if p := do[wire.Pinned](b, "POST", "/v1/runs/r1/pins", wire.Pin{Ref: ref}); !maps.Equal(p.Checksums, want) {
		t.Errorf("a small sample is pinned with the checksums %v, want %v", p.Checksums, want)
	}
	b.wants("invalid", "GET", path, nil)
	b.wants("not_found", "GET", path+"?generation=other", nil)
	b.wants("not_found", "GET", "/v1/runs/r1/samples/s-2/checksums?generation="+ref.Generation(), nil)
}

func TestPinsKeepBytesUntilTheyAreReleased(t *testing.T) {
	t.Parallel()
	b := newBed(t, Options{})
	b.create("r1")
	b.put("r1", "s-1")
	d := b.acquire("r1", 1)
	ref := d.Leases[0].Ref
	handle := newID()
	for range 2 { // the call is repeatable
		p := do[wire.Pinned](b, "POST", "/v1/runs/r1/pins", wire.Pin{Ref: ref, Handle: handle})
		if p.Handle != handle || p.File != "s-1.safetensors" || len(p.Checksums) != 2 {
			t.Errorf("pinned %+v", p)
		}
	}
	b.settle("r1", sluice.Ack, d.Leases...)
	if h := b.status("r1").Health; h.ResidentSamples != 1 {
		t.Errorf("an ack freed a pinned sample: %+v", h)
	}
	do[struct{}](b, "POST", "/v1/runs/r1/release", wire.Release{Handles: []string{newID()}})
	do[struct{}](b, "POST", "/v1/runs/r1/release", wire.Release{Handles: []string{handle}})
	do[struct{}](b, "POST", "/v1/runs/r1/release", wire.Release{Handles: []string{handle}})
	if h := b.status("r1").Health; h.ResidentSamples != 0 {
		t.Errorf("a release freed nothing: %+v", h)
	}
	b.wants("not_found", "POST", "/v1/runs/r1/pins", wire.Pin{Ref: ref})

	b.put("r1", "s-2")
	d = b.acquire("r1", 1)
	p := do[wire.Pinned](b, "POST", "/v1/runs/r1/pins", wire.Pin{Ref: d.Leases[0].Ref, Map: true})
	b.settle("r1", sluice.Ack, d.Leases...)
	do[struct{}](b, "POST", "/v1/runs/r1/release", wire.Release{Handles: []string{p.Handle}, Keep: true})
	if h := b.status("r1").Health; h.ResidentSamples != 1 {
		t.Errorf("a release that keeps the mapping freed it: %+v", h)
	}
	do[struct{}](b, "POST", "/v1/runs/r1/release", wire.Release{Handles: []string{p.Handle}})
	if h := b.status("r1").Health; h.ResidentSamples != 0 {
		t.Errorf("unmapped, it is here yet: %+v", h)
	}
}
