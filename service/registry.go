package service

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"reflect"
	"strings"
	"time"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/internal/wire"
)

// registryName is the journal of the list of runs; no run may have that name.
const registryName = "sluice:registry"

// registry is the list of runs, in a journal of its own. The service's admin lock guards it.
type registry struct {
	journals Journals
	journal  sluice.Journal // nil after a failure: it is opened again
	records  int            // since the last snapshot
	registered
}

// registered is what the registry's records add up to.
type registered struct {
	storeID   string
	storeDir  string // where it was
	storeDisk bool   // and whether that was a disk: what is in memory may be gone with it
	runs      map[string]*entry
}

// entry is a run in the registry.
type entry struct {
	created  time.Time
	spec     wire.RunSpec // as created, resolved
	now      wire.RunSpec // with what was changed since: shape, versions
	deleting bool         // what it left is being removed
}

// record is one change of the registry.
type record struct {
	T       string        `json:"t"` // store, create, change, delete, deleted
	StoreID string        `json:"store_id,omitempty"`
	Dir     string        `json:"dir,omitempty"`
	Disk    bool          `json:"disk,omitempty"`
	RunID   string        `json:"run_id,omitempty"`
	At      time.Time     `json:"at,omitzero"`
	Spec    *wire.RunSpec `json:"spec,omitempty"`
}

func openRegistry(ctx context.Context, journals Journals) (*registry, error) {
	g := &registry{journals: journals}
	return g, g.open(ctx)
}

func (g *registry) open(ctx context.Context) error {
	j, err := g.journals.Journal(ctx, registryName)
	if err != nil {
		return err
	}
	state, n := registered{runs: map[string]*entry{}}, 0
	err = j.Replay(ctx, func(r sluice.Record) error {
		var rec record
		if err := json.Unmarshal(r.Data, &rec); err != nil {
			return &sluice.Error{Kind: sluice.Corrupt, Op: "service: registry", Detail: "a record can't be read", Err: err}
		}
		n++
		return state.apply(&rec)
	})
	if err != nil {
		_ = j.Close()
		return err
	}
	g.journal, g.records, g.registered = j, n, state
	return nil
}

func (s *registered) apply(r *record) error {
	switch r.T {
	case "store":
		s.storeID, s.storeDir, s.storeDisk = r.StoreID, r.Dir, r.Disk
		return nil
	case "create":
		if r.Spec == nil {
			break
		}
		s.runs[r.RunID] = &entry{created: r.At, spec: *r.Spec, now: *r.Spec}
		return nil
	case "deleted":
		delete(s.runs, r.RunID)
		return nil
	case "change", "delete":
		e := s.runs[r.RunID]
		if e == nil || r.T == "change" && r.Spec == nil {
			break
		}
		if r.T == "delete" {
			e.deleting = true
		} else {
			e.now = *r.Spec
		}
		return nil
	}
	return &sluice.Error{Kind: sluice.Corrupt, Op: "service: registry", Subject: r.RunID, Detail: fmt.Sprintf("a record of the kind %q makes no sense here", plain(r.T))}
}

// write makes a change durable, and then true.
func (g *registry) write(ctx context.Context, r record) error {
	if g.journal == nil {
		if err := g.open(ctx); err != nil {
			return err
		}
	}
	data, err := json.Marshal(r)
	if err != nil {
		return err
	}
	if err := g.journal.Append(ctx, []sluice.Record{{Data: data}}); err != nil {
		_ = g.journal.Close()
		g.journal = nil // nobody knows whether the record is there; the next change finds out
		return &sluice.Error{Kind: sluice.Unavailable, Op: "service: registry", Subject: r.RunID, Detail: "the change could not be written", Hint: "ask again", Err: err}
	}
	if err := g.apply(&r); err != nil {
		return err
	}
	if g.records++; g.records > 1000+4*len(g.runs) {
		return g.compact(ctx)
	}
	return nil
}

func (g *registry) compact(ctx context.Context) error {
	snapshot := []record{{T: "store", StoreID: g.storeID, Dir: g.storeDir, Disk: g.storeDisk}}
	for id, e := range g.runs {
		snapshot = append(snapshot, record{T: "create", RunID: id, At: e.created, Spec: &e.spec})
		if differs(&e.spec, &e.now) != "" {
			snapshot = append(snapshot, record{T: "change", RunID: id, Spec: &e.now})
		}
		if e.deleting {
			snapshot = append(snapshot, record{T: "delete", RunID: id})
		}
	}
	records := make([]sluice.Record, len(snapshot))
	for i := range snapshot {
		data, err := json.Marshal(snapshot[i])
		if err != nil {
			return err
		}
		records[i].Data = data
	}
	if err := g.journal.Compact(ctx, records); err != nil {
		_ = g.journal.Close()
		g.journal = nil
		return nil //nolint:nilerr // the change itself is written; the next one opens the journal again, or says why it can't
	}
	g.records = len(records)
	return nil
}

func (g *registry) close() error {
	if g.journal == nil {
		return nil
	}
	return g.journal.Close()
}

// differs names the first field in which two specs differ, with both values, or is "". Both must be resolved.
func differs(have, want *wire.RunSpec) string {
	h, w := reflect.ValueOf(have).Elem(), reflect.ValueOf(want).Elem()
	for i := range h.NumField() {
		name, _, _ := strings.Cut(h.Type().Field(i).Tag.Get("json"), ",")
		a, errA := json.Marshal(h.Field(i).Interface())
		b, errB := json.Marshal(w.Field(i).Interface())
		if errA != nil || errB != nil || !bytes.Equal(a, b) {
			return fmt.Sprintf("%s is %s, not %s", name, shorten(a), shorten(b))
		}
	}
	return ""
}

func shorten(b []byte) string {
	if len(b) > 120 {
		return string(b[:120]) + "..."
	}
	return string(b)
}
