package natsjournal

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/sluice-ml/sluice"
)

func mustOpen(t testing.TB, dir string, opts *Options) *Journals {
	t.Helper()
	js, err := Open(context.Background(), dir, opts)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { js.Close() })
	return js
}

func mustJournal(t testing.TB, js *Journals, name string) *journal {
	t.Helper()
	j, err := js.Journal(context.Background(), name)
	if err != nil {
		t.Fatal(err)
	}
	return j.(*journal)
}

func mustAppend(t testing.TB, j sluice.Journal, data ...string) {
	t.Helper()
	for _, d := range data {
		if err := j.Append(context.Background(), []sluice.Record{{Data: []byte(d)}}); err != nil {
			t.Fatal(err)
		}
	}
}

func contents(j sluice.Journal) ([]string, error) {
	var got []string
	err := j.Replay(context.Background(), func(r sluice.Record) error { got = append(got, string(r.Data)); return nil })
	return got, err
}

func TestASecondProcessIsRefusedAndToldWhoTheFirstIs(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	js := mustOpen(t, dir, nil)
	_, err := Open(t.Context(), dir, nil)
	if !errors.Is(err, sluice.ErrConflict) || !strings.Contains(err.Error(), js.Owner().String()) {
		t.Fatalf("got %v, want a refusal that names %v", err, js.Owner())
	}
	if err := js.Close(); err != nil {
		t.Fatal(err)
	}
	mustOpen(t, dir, nil)
}

// Before a new owner reads anything the one before can write nothing more, though nobody has opened its journals again and it has not noticed.
func TestATakeoverFencesAllJournals(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	srv := startServer(t, nil)
	asleep := errors.New("asleep")
	earlier, err := Connect(ctx, srv.ClientURL(), &Options{Lapse: 300 * time.Millisecond, step: func(what string) error {
		if what == "renew" {
			return asleep
		}
		return nil
	}})
	if err != nil {
		t.Fatal(err)
	}
	defer earlier.Close()
	a, b := mustJournal(t, earlier, "a"), mustJournal(t, earlier, "b")
	mustAppend(t, a, "x")
	later, err := Connect(ctx, srv.ClientURL(), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer later.Close()
	for _, j := range []*journal{a, b} {
		if err := j.line.cause(); err != nil {
			t.Fatalf("it has noticed: %v", err)
		}
		if err := j.Append(ctx, []sluice.Record{{Data: []byte("stale")}}); !errors.Is(err, sluice.ErrStale) {
			t.Errorf("append to %s: %v, want stale", j.name, err)
		}
	}
	if got, err := contents(mustJournal(t, later, "a")); err != nil || !slices.Equal(got, []string{"x"}) {
		t.Errorf("%q, %v", got, err)
	}
}

func TestAPrefixThatWasGivenUpIsFreeAtOnce(t *testing.T) {
	t.Parallel()
	srv := startServer(t, nil)
	for range 3 {
		begin := time.Now()
		js, err := Connect(t.Context(), srv.ClientURL(), &Options{Lapse: time.Hour})
		if err != nil {
			t.Fatal(err)
		}
		if d := time.Since(begin); d > time.Minute {
			t.Errorf("it took %v", d)
		}
		mustAppend(t, mustJournal(t, js, "a"), "x")
		if err := js.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

func TestPrefixesShareAServer(t *testing.T) {
	t.Parallel()
	srv := startServer(t, nil)
	for _, prefix := range []string{"a", "a-b", "A"} {
		js, err := Connect(t.Context(), srv.ClientURL(), &Options{Prefix: prefix})
		if err != nil {
			t.Fatal(err)
		}
		defer js.Close()
		mustAppend(t, mustJournal(t, js, "b:c.d"), prefix)
		if names, err := js.List(t.Context()); err != nil || !slices.Equal(names, []string{"b:c.d"}) {
			t.Errorf("%s: %q, %v", prefix, names, err)
		}
	}
}

func TestListAndDelete(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	js := mustOpen(t, t.TempDir(), nil)
	if names, err := js.List(ctx); err != nil || len(names) > 0 {
		t.Fatal(names, err)
	}
	all := []string{"_", "a", "a-b", "a.b", "a:b", strings.Repeat("x", 200)}
	for _, name := range all {
		mustAppend(t, mustJournal(t, js, name), name)
	}
	if names, err := js.List(ctx); err != nil || !slices.Equal(names, all) {
		t.Fatal(names, err)
	}
	for _, name := range []string{"", "a/b", "a*", "a..b", strings.Repeat("x", 201)} {
		if _, err := js.Journal(ctx, name); !errors.Is(err, sluice.ErrInvalid) {
			t.Errorf("journal %q: %v", name, err)
		}
		if err := js.Delete(ctx, name); !errors.Is(err, sluice.ErrInvalid) {
			t.Errorf("delete %q: %v", name, err)
		}
	}
	j := mustJournal(t, js, "a")
	if err := js.Delete(ctx, "a"); err != nil {
		t.Fatal(err)
	}
	if err := js.Delete(ctx, "a"); !errors.Is(err, sluice.ErrNotFound) {
		t.Errorf("a second delete: %v", err)
	}
	if err := j.Append(ctx, []sluice.Record{{}}); !errors.Is(err, sluice.ErrClosed) {
		t.Errorf("append to a deleted journal: %v", err)
	}
	j = mustJournal(t, js, "a")
	if got, err := contents(j); err != nil || len(got) > 0 {
		t.Errorf("a journal of a name that was deleted holds %q, %v", got, err)
	}
	if err := js.Close(); err != nil {
		t.Fatal(err)
	}
	for what, err := range map[string]error{"append": j.Append(ctx, []sluice.Record{{}}), "delete": js.Delete(ctx, "a")} {
		if !errors.Is(err, sluice.ErrClosed) {
			t.Errorf("%s after the end: %v", what, err)
		}
	}
	if _, err := js.List(ctx); !errors.Is(err, sluice.ErrClosed) {
		t.Errorf("list after the end: %v", err)
	}
}

// Two hundred runs at once, each with its own tail.
func TestManyJournals(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	js := mustOpen(t, dir, nil)
	const n = 200
	for i := range n {
		mustAppend(t, mustJournal(t, js, fmt.Sprint("run", i)), fmt.Sprint("first of ", i))
	}
	if err := js.Close(); err != nil {
		t.Fatal(err)
	}
	js = mustOpen(t, dir, nil)
	for i := range n {
		if got, err := contents(mustJournal(t, js, fmt.Sprint("run", i))); err != nil || !slices.Equal(got, []string{fmt.Sprint("first of ", i)}) {
			t.Fatalf("run %d holds %q, %v", i, got, err)
		}
	}
}

// A group commit is one message however many appends it serves.
func TestAppendsThatWaitShareAMessage(t *testing.T) {
	t.Parallel()
	gate := make(chan struct{})
	js := mustOpen(t, t.TempDir(), &Options{step: func(what string) error {
		if what == "purge" {
			<-gate
		}
		return nil
	}})
	j := mustJournal(t, js, "a")
	compacted := make(chan error)
	go func() { compacted <- j.Compact(t.Context(), nil) }()
	const callers = 50
	appended := make(chan error, callers)
	for i := range callers {
		go func() { appended <- j.Append(t.Context(), []sluice.Record{{Data: fmt.Append(nil, i)}}) }()
	}
	for { // until all wait behind the snapshot, which is held up
		j.mu.Lock()
		n := j.queued
		j.mu.Unlock()
		if n >= callers*2 {
			break
		}
		time.Sleep(time.Millisecond)
	}
	close(gate)
	if err := <-compacted; err != nil {
		t.Fatal(err)
	}
	for range callers {
		if err := <-appended; err != nil {
			t.Fatal(err)
		}
	}
	info, err := j.stream.Info(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if n := info.State.LastSeq - 2; n > 2 { // behind the claim and the snapshot
		t.Errorf("%d appends took %d messages", callers, n)
	}
}

func TestALostReplyAppendsNothingTwice(t *testing.T) {
	t.Parallel()
	srv := startServer(t, nil)
	js, err := Connect(t.Context(), srv.ClientURL(), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer js.Close()
	j := mustJournal(t, js, "a")
	var want []string
	for i := range 60 {
		want = append(want, fmt.Sprint(i))
		broken := make(chan error)
		go func() { // the connection breaks somewhere in the append
			time.Sleep(time.Duration(rand.IntN(300)) * time.Microsecond)
			broken <- js.line.nc.ForceReconnect()
		}()
		mustAppend(t, j, want[i])
		if err := <-broken; err != nil {
			t.Fatal(err)
		}
	}
	if got, err := contents(mustJournal(t, js, "a")); err != nil || !slices.Equal(got, want) {
		t.Errorf("%d of %d records came back: %v; %q", len(got), len(want), err, got)
	}
}

func TestAServerThatComesBackIsWaitedFor(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	srv := startServer(t, func(o *server.Options) { o.StoreDir = dir })
	port := srv.Addr().String()[strings.LastIndex(srv.Addr().String(), ":")+1:]
	js, err := Connect(t.Context(), srv.ClientURL(), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer js.Close()
	j := mustJournal(t, js, "a")
	mustAppend(t, j, "before")
	srv.Shutdown()
	srv.WaitForShutdown()
	appended := make(chan error, 1)
	go func() { appended <- j.Append(t.Context(), []sluice.Record{{Data: []byte("meanwhile")}}) }()
	select {
	case err := <-appended:
		t.Fatalf("appended without a server: %v", err)
	case <-time.After(50 * time.Millisecond):
	}
	startServer(t, func(o *server.Options) {
		o.StoreDir = dir
		fmt.Sscan(port, &o.Port)
	})
	if err := <-appended; err != nil {
		t.Fatal(err)
	}
	if got, err := contents(mustJournal(t, js, "a")); err != nil || !slices.Equal(got, []string{"before", "meanwhile"}) {
		t.Errorf("%q, %v", got, err)
	}
}

func TestAServerThatStaysAwayIsUnavailable(t *testing.T) {
	t.Parallel()
	srv := startServer(t, nil)
	js, err := Connect(t.Context(), srv.ClientURL(), &Options{Patience: 100 * time.Millisecond, Lapse: 300 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	defer js.Close()
	j := mustJournal(t, js, "a")
	srv.Shutdown()
	srv.WaitForShutdown()
	for range 2 {
		if err := j.Append(t.Context(), []sluice.Record{{}}); !errors.Is(err, sluice.ErrUnavailable) {
			t.Fatalf("got %v, want unavailable", err)
		}
	}
	if _, err := Connect(t.Context(), srv.ClientURL(), nil); !errors.Is(err, sluice.ErrUnavailable) {
		t.Fatalf("got %v, want unavailable", err)
	}
}

func TestATokenThatIsWrongIsDenied(t *testing.T) {
	t.Parallel()
	srv := startServer(t, func(o *server.Options) { o.Authorization = "right" })
	_, err := Connect(t.Context(), srv.ClientURL(), &Options{Token: "wrong"})
	if !errors.Is(err, sluice.ErrDenied) || strings.Contains(err.Error(), "wrong") {
		t.Errorf("got %v, want denied, without the token", err)
	}
	js, err := Connect(t.Context(), srv.ClientURL(), &Options{Token: "right"})
	if err != nil {
		t.Fatal(err)
	}
	js.Close()
}

func TestAURLThatIsNoneIsRefusedWithoutItsPassword(t *testing.T) {
	t.Parallel()
	for _, url := range []string{"nats://u:the secret@127.0.0.1:1", "nats://u:%secret@127.0.0.1:1", "nats://u:secret@127.0.0.1:1,nats://u:secret@[::1"} {
		_, err := Connect(t.Context(), url, nil)
		if !errors.Is(err, sluice.ErrInvalid) || strings.Contains(err.Error(), "secret") {
			t.Errorf("%s: %v, want invalid, without the password", url, err)
		}
	}
}

func TestReplicasNeedACluster(t *testing.T) {
	t.Parallel()
	srv := startServer(t, nil)
	if _, err := Connect(t.Context(), srv.ClientURL(), &Options{Replicas: 3}); !errors.Is(err, sluice.ErrInvalid) {
		t.Errorf("three replicas on one server: %v, want invalid", err)
	}
}

func TestAnAccountThatIsFullIsNoSpace(t *testing.T) {
	t.Parallel()
	srv := startServer(t, func(o *server.Options) { o.JetStreamMaxStore = 3 << 20 })
	js, err := Connect(t.Context(), srv.ClientURL(), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer js.Close()
	mustAppend(t, mustJournal(t, js, "ballast"), strings.Repeat("x", 400_000))
	j := mustJournal(t, js, "a")
	var want []string
	for i := 0; ; i++ {
		data := fmt.Sprint(i, strings.Repeat("x", 400_000))
		err := j.Append(t.Context(), []sluice.Record{{Data: []byte(data)}})
		if err == nil {
			want = append(want, data)
			continue
		}
		if !errors.Is(err, sluice.ErrNoSpace) || i == 0 {
			t.Fatalf("append %d: %v, want no space", i, err)
		}
		if err := j.Append(t.Context(), []sluice.Record{{}}); !errors.Is(err, sluice.ErrNoSpace) {
			t.Fatalf("a journal that failed goes on: %v", err)
		}
		break
	}
	if _, err := js.Journal(t.Context(), "a"); !errors.Is(err, sluice.ErrNoSpace) {
		t.Fatalf("open: %v, want no space", err)
	}
	if err := js.Delete(t.Context(), "ballast"); err != nil {
		t.Fatal(err)
	}
	j = mustJournal(t, js, "a")
	if got, err := contents(j); err != nil || !slices.Equal(got, want) {
		t.Fatalf("%d of %d, %v", len(got), len(want), err)
	}
	// A snapshot makes room.
	if err := j.Compact(t.Context(), []sluice.Record{{Data: []byte("small")}}); err != nil {
		t.Fatal(err)
	}
	for range 4 {
		mustAppend(t, j, want[0])
	}
}

func TestOptionsAreChecked(t *testing.T) {
	t.Parallel()
	for _, o := range []Options{{Prefix: "a.b"}, {Prefix: strings.Repeat("x", 33)}, {Durability: 7}, {Replicas: 3}, {Token: "t"}, {Lapse: -1}, {Lapse: 2}} {
		if _, err := Open(t.Context(), t.TempDir(), &o); !errors.Is(err, sluice.ErrInvalid) {
			t.Errorf("open with %+v: %v", o, err)
		}
	}
	for _, o := range []Options{{Prefix: "a b"}, {Durability: Power}, {Replicas: 6}, {Patience: -1}} {
		if _, err := Connect(t.Context(), "nats://127.0.0.1:1", &o); !errors.Is(err, sluice.ErrInvalid) {
			t.Errorf("connect with %+v: %v", o, err)
		}
	}
}

// Whatever byte of the server's files is damaged, a journal comes back whole or is called corrupt.
func TestDamageIsNeverSilent(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	js := mustOpen(t, dir, nil)
	j := mustJournal(t, js, "a")
	mustAppend(t, j, "old")
	if err := j.Compact(t.Context(), []sluice.Record{{Data: []byte("snapshot")}, {Data: bytes.Repeat([]byte("s"), 700_000)}}); err != nil {
		t.Fatal(err)
	}
	want := []string{"snapshot", strings.Repeat("s", 700_000)}
	for i := range 40 {
		want = append(want, fmt.Sprint("record ", i))
		mustAppend(t, j, want[len(want)-1])
	}
	if err := js.Close(); err != nil {
		t.Fatal(err)
	}
	outcomes := map[string]int{}
	for round := range 60 {
		copied := t.TempDir()
		if err := os.CopyFS(copied, os.DirFS(dir)); err != nil {
			t.Fatal(err)
		}
		var files []string
		err := fs.WalkDir(os.DirFS(copied), "jetstream", func(path string, d fs.DirEntry, err error) error {
			if err == nil && !d.IsDir() {
				files = append(files, filepath.Join(copied, path))
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		what := damage(t, files, round)
		js, err := Open(t.Context(), copied, nil)
		var got []string
		if err == nil {
			var j sluice.Journal
			if j, err = js.Journal(t.Context(), "a"); err == nil {
				got, err = contents(j)
			}
			if err := js.Close(); err != nil {
				t.Error(err)
			}
		}
		switch {
		case err == nil && slices.Equal(got, want):
			outcomes["whole"]++
		case err == nil:
			t.Fatalf("%s: %d of %d records came back, and no error", what, len(got), len(want))
		case !errors.Is(err, sluice.ErrCorrupt):
			t.Fatalf("%s: %v, want corrupt", what, err)
		default:
			outcomes["corrupt"]++
		}
	}
	if outcomes["whole"] == 0 || outcomes["corrupt"] == 0 {
		t.Errorf("outcomes %v", outcomes)
	}
}

// damage damages one of the files and says how.
func damage(t *testing.T, files []string, round int) string {
	t.Helper()
	path := files[rand.IntN(len(files))]
	if round%2 == 0 {
		path = files[slices.IndexFunc(files, func(p string) bool { return strings.HasSuffix(p, ".blk") })]
	}
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	how := rand.IntN(4)
	at := rand.IntN(len(data) + 1)
	if round%3 == 0 {
		at = len(data) - rand.IntN(min(len(data), 3000)) // where the small records are
	}
	what := ""
	switch {
	case how == 0:
		what, data = fmt.Sprintf("cut to %d of %d", at, len(data)), data[:at]
	case how == 1:
		what, data = "removed", nil
	case at < len(data):
		what = fmt.Sprintf("byte %d of %d", at, len(data))
		data[at] ^= byte(1 + rand.IntN(255))
	}
	if data == nil {
		err = os.Remove(path)
	} else {
		err = os.WriteFile(path, data, 0o600)
	}
	if err == nil && rand.IntN(2) == 0 { // as after a kill: the server looks through its blocks
		what += " without index"
		os.Remove(filepath.Join(filepath.Dir(path), "index.db"))
	}
	if err != nil {
		t.Fatal(err)
	}
	return filepath.Base(path) + ": " + what
}

func TestADamagedJournalCanBeDeletedAndHarmsNoOther(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	dir := t.TempDir()
	js := mustOpen(t, dir, nil)
	mustAppend(t, mustJournal(t, js, "bad"), "x")
	mustAppend(t, mustJournal(t, js, "good"), "y")
	meta := filepath.Join(js.streamDir("bad"), "meta.inf")
	if err := js.Close(); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(meta, []byte("{}"), 0o600); err != nil {
		t.Fatal(err)
	}
	js = mustOpen(t, dir, nil)
	if names, err := js.List(ctx); err != nil || !slices.Equal(names, []string{"bad", "good"}) {
		t.Errorf("%q, %v", names, err)
	}
	if _, err := js.Journal(ctx, "bad"); !errors.Is(err, sluice.ErrCorrupt) {
		t.Errorf("got %v, want corrupt", err)
	}
	if got, err := contents(mustJournal(t, js, "good")); err != nil || len(got) != 1 {
		t.Errorf("the good one: %q, %v", got, err)
	}
	if err := js.Delete(ctx, "bad"); err != nil {
		t.Fatal(err)
	}
	j := mustJournal(t, js, "bad")
	if got, err := contents(j); err != nil || len(got) > 0 {
		t.Errorf("the bad one, made again: %q, %v", got, err)
	}
	mustAppend(t, j, "z")
}

// The server begins to delete by taking the description away. A death right then must not give the old messages to the next journal of the name.
func TestADeathInADeletionLeavesNothingToTheNextJournalOfTheName(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	js := mustOpen(t, dir, nil)
	mustAppend(t, mustJournal(t, js, "a:1"), "old", "older")
	mustAppend(t, mustJournal(t, js, "b"), "stays")
	stream, acked := js.streamDir("a:1"), js.ackedPath("a:1")
	if err := js.Close(); err != nil {
		t.Fatal(err)
	}
	for _, file := range []string{acked, filepath.Join(stream, "meta.inf")} { // in this order
		if err := os.Remove(file); err != nil {
			t.Fatal(err)
		}
	}
	js = mustOpen(t, dir, nil)
	if names, err := js.List(t.Context()); err != nil || !slices.Equal(names, []string{"b"}) {
		t.Errorf("%q, %v", names, err)
	}
	if got, err := contents(mustJournal(t, js, "a:1")); err != nil || len(got) > 0 {
		t.Errorf("a new journal holds %q, %v", got, err)
	}
	if got, err := contents(mustJournal(t, js, "b")); err != nil || !slices.Equal(got, []string{"stays"}) {
		t.Errorf("the other one holds %q, %v", got, err)
	}
}

// A death in the middle of the making of a journal leaves none, and no damage.
func TestAJournalThatWasNeverMadeIsNoDamage(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	js := mustOpen(t, dir, nil)
	mustAppend(t, mustJournal(t, js, "a"), "x")
	half := js.streamDir("half")
	if err := js.Close(); err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(filepath.Join(half, "msgs"), 0o700); err != nil {
		t.Fatal(err)
	}
	js = mustOpen(t, dir, nil)
	if names, err := js.List(t.Context()); err != nil || !slices.Equal(names, []string{"a"}) {
		t.Errorf("%q, %v", names, err)
	}
	mustAppend(t, mustJournal(t, js, "half"), "x")
}

// After the machine went down, durability process may have lost what was acknowledged, and only then.
func TestWhatAPowerCutTookIsLostWithProcessAndCorruptWithPower(t *testing.T) {
	t.Parallel()
	for _, d := range []Durability{Process, Power} {
		dir := t.TempDir()
		js := mustOpen(t, dir, nil)
		mustAppend(t, mustJournal(t, js, "a"), "x", "y")
		acked := js.ackedPath("a")
		if err := js.Close(); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(acked, append([]byte{9, 0, 0, 0, 0, 0, 0, 0}, "another boot"...), 0o600); err != nil {
			t.Fatal(err)
		}
		js = mustOpen(t, dir, &Options{Durability: d})
		_, err := js.Journal(t.Context(), "a")
		if d == Process && err != nil || d == Power && !errors.Is(err, sluice.ErrCorrupt) {
			t.Errorf("durability %d: %v", d, err)
		}
	}
}
