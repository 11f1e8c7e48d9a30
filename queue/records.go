package queue

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"strconv"
	"strings"

	"github.com/sluice-ml/sluice"
)

// The records. Their exported fields are what a journal keeps; the others spare the running queue the look-ups that a replay does.

type putRecord struct {
	T         string            `json:"t"`
	Ref       sluice.Ref        `json:"ref"`
	Seq       int64             `json:"seq"`
	Producer  string            `json:"producer,omitempty"`
	Positions []sluice.Position `json:"positions,omitempty"`
	At        int64             `json:"at"`
	Gated     bool              `json:"gated,omitempty"`

	s *sample
}

type leaseRecord struct {
	T           string         `json:"t"`
	Lease       sluice.LeaseID `json:"lease"`
	Seq         int64          `json:"seq"`
	Consumer    string         `json:"consumer"`
	Incarnation int64          `json:"incarnation"`
	Rank        int            `json:"rank,omitempty"`
	Member      int            `json:"member,omitempty"`
	Members     int            `json:"members,omitempty"`
	Request     string         `json:"request,omitempty"`
	At          int64          `json:"at"`
	Windowed    bool           `json:"windowed,omitempty"`
	Window      int64          `json:"window,omitempty"`
	Slot        int            `json:"slot,omitempty"`
	Pad         bool           `json:"pad,omitempty"`

	s    *sample
	c    *consumer
	slot *slot
}

// endRecord is the end of a lease and what became of its sample. As is what it was settled as; empty if it ran out or was taken back.
type endRecord struct {
	T           string         `json:"t"`
	Lease       sluice.LeaseID `json:"lease"`
	Seq         int64          `json:"seq"`
	Consumer    string         `json:"consumer"`
	Incarnation int64          `json:"incarnation"`
	As          sluice.Verdict `json:"as,omitempty"`
	How         string         `json:"how"`
	Fails       int32          `json:"fails,omitempty"`
	Expiries    int32          `json:"expiries,omitempty"`
	Reason      string         `json:"reason,omitempty"`
	At          int64          `json:"at"`
	Windowed    bool           `json:"windowed,omitempty"`
	Window      int64          `json:"window,omitempty"`
	Slot        int            `json:"slot,omitempty"`
	Pad         bool           `json:"pad,omitempty"`

	l    *lease
	s    *sample
	slot *slot
}

type memberRecord struct {
	T       string         `json:"t"`
	Lease   sluice.LeaseID `json:"lease"`
	Member  int            `json:"member"`
	Verdict sluice.Verdict `json:"verdict"`
	Reason  string         `json:"reason,omitempty"`

	l *lease
}

type giveRecord struct {
	T        string         `json:"t"`
	Consumer string         `json:"consumer"`
	Member   int            `json:"member"`
	Lease    sluice.LeaseID `json:"lease"`
	Request  string         `json:"request,omitempty"`
	At       int64          `json:"at"`
}

type consumerRecord struct {
	T           string `json:"t"`
	Name        string `json:"name"`
	Incarnation int64  `json:"incarnation"`
	Rank        int    `json:"rank,omitempty"`
	Members     int    `json:"members,omitempty"`
	Left        bool   `json:"left,omitempty"`
}

type resultsRecord struct {
	T           string                `json:"t"`
	Consumer    string                `json:"consumer"`
	Incarnation int64                 `json:"incarnation"`
	Member      int                   `json:"member,omitempty"`
	Request     string                `json:"request"`
	At          int64                 `json:"at"`
	Results     []sluice.SettleResult `json:"results"`
}

type producerRecord struct {
	T           string               `json:"t"`
	Name        string               `json:"name"`
	Incarnation int64                `json:"incarnation"`
	State       sluice.ProducerState `json:"state"`
}

type closeRecord struct {
	T     string      `json:"t"`
	Cause string      `json:"cause,omitempty"`
	Kind  sluice.Kind `json:"kind,omitempty"`

	cause error
}

type gatesRecord struct {
	T        string   `json:"t"`
	Targets  []string `json:"targets,omitempty"`
	MinDraft string   `json:"min_draft,omitempty"`
}

type windowRecord struct {
	T      string  `json:"t"`
	Number int64   `json:"number"`
	Seqs   []int64 `json:"seqs"`

	picked []*sample
}

type skipRecord struct {
	T      string `json:"t"`
	Window int64  `json:"window"`
	Slot   int    `json:"slot"`

	slot *slot
}

type shapeRecord struct {
	T       string `json:"t"`
	Ranks   int    `json:"ranks"`
	PerRank int    `json:"per_rank"`
}

type dropRecord struct {
	T   string `json:"t"`
	Seq int64  `json:"seq"`
	Why ending `json:"why"`
	At  int64  `json:"at"`

	s *sample
}

type freedRecord struct {
	T   string `json:"t"`
	Seq int64  `json:"seq"`

	s *sample
}

type requeueRecord struct {
	T   string `json:"t"`
	Seq int64  `json:"seq"`

	s *sample
}

// lostRecord: the store of a recovered queue has the sample no more.
type lostRecord struct {
	T      string `json:"t"`
	Seq    int64  `json:"seq"`
	Reason string `json:"reason"`
	At     int64  `json:"at"`

	s *sample
}

func encode(v any) []byte {
	switch r := v.(type) { // the records of every cycle
	case putRecord:
		return r.encode()
	case leaseRecord:
		return r.encode()
	case endRecord:
		return r.encode()
	}
	data, err := json.Marshal(v)
	if err != nil {
		panic(err) // every record is made of plain fields
	}
	return data
}

// encode writes what encoding/json would: that looks through every byte of the ref again, which is most of the record and canonical already.
func (r *putRecord) encode() []byte {
	b := r.Ref.AppendCanonical(append(make([]byte, 0, 1024), `{"t":"put","ref":`...))
	b = strconv.AppendInt(append(b, `,"seq":`...), r.Seq, 10)
	if r.Producer != "" {
		b = append(append(b, `,"producer":`...), encode(r.Producer)...)
	}
	if len(r.Positions) > 0 {
		b = append(append(b, `,"positions":`...), encode(r.Positions)...)
	}
	b = strconv.AppendInt(append(b, `,"at":`...), r.At, 10)
	if r.Gated {
		b = append(b, `,"gated":true`...)
	}
	return append(b, '}')
}

// recordWriter writes the fields of a record as encoding/json would: in batches that was the largest part of what a queue did.
type recordWriter []byte

func (w *recordWriter) text(field, v string, always bool) {
	if v == "" && !always {
		return
	}
	*w = append(append(*w, field...), '"')
	for i := range len(v) {
		if c := v[i]; c < 0x20 || c >= 0x7f || strings.IndexByte(`"\<>&`, c) >= 0 {
			*w = append((*w)[:len(*w)-1-i], encode(v)...)
			return
		}
		*w = append(*w, v[i])
	}
	*w = append(*w, '"')
}

func (w *recordWriter) number(field string, v int64, always bool) {
	if v != 0 || always {
		*w = strconv.AppendInt(append(*w, field...), v, 10)
	}
}

func (w *recordWriter) flag(field string, v bool) {
	if v {
		*w = append(append(*w, field...), "true"...)
	}
}

func (w *recordWriter) lease(id sluice.LeaseID) {
	*w = append(hex.AppendEncode(append(*w, `,"lease":"`...), id[:]), '"')
}

func (r *leaseRecord) encode() []byte {
	w := append(make(recordWriter, 0, 192), `{"t":"lease"`...)
	w.lease(r.Lease)
	w.number(`,"seq":`, r.Seq, true)
	w.text(`,"consumer":`, r.Consumer, true)
	w.number(`,"incarnation":`, r.Incarnation, true)
	w.number(`,"rank":`, int64(r.Rank), false)
	w.number(`,"member":`, int64(r.Member), false)
	w.number(`,"members":`, int64(r.Members), false)
	w.text(`,"request":`, r.Request, false)
	w.number(`,"at":`, r.At, true)
	w.flag(`,"windowed":`, r.Windowed)
	w.number(`,"window":`, r.Window, false)
	w.number(`,"slot":`, int64(r.Slot), false)
	w.flag(`,"pad":`, r.Pad)
	return append(w, '}')
}

func (r *endRecord) encode() []byte {
	w := append(make(recordWriter, 0, 192), `{"t":"end"`...)
	w.lease(r.Lease)
	w.number(`,"seq":`, r.Seq, true)
	w.text(`,"consumer":`, r.Consumer, true)
	w.number(`,"incarnation":`, r.Incarnation, true)
	w.text(`,"as":`, string(r.As), false)
	w.text(`,"how":`, r.How, true)
	w.number(`,"fails":`, int64(r.Fails), false)
	w.number(`,"expiries":`, int64(r.Expiries), false)
	w.text(`,"reason":`, r.Reason, false)
	w.number(`,"at":`, r.At, true)
	w.flag(`,"windowed":`, r.Windowed)
	w.number(`,"window":`, r.Window, false)
	w.number(`,"slot":`, int64(r.Slot), false)
	w.flag(`,"pad":`, r.Pad)
	return append(w, '}')
}

func corrupt(detail string) error {
	return &sluice.Error{Kind: sluice.Corrupt, Op: "queue: replay", Detail: detail}
}

// replay applies one record of a journal.
func (q *Queue) replay(data []byte) error {
	kind, ok := bytes.CutPrefix(data, []byte(`{"t":"`))
	end := bytes.IndexByte(kind, '"')
	if !ok || end < 0 {
		return corrupt("a record does not say what it is: " + clean(string(data), 80))
	}
	if q.bySeq == nil {
		q.bySeq = map[int64]*sample{}
	}
	f := replayers[string(kind[:end])]
	if f == nil {
		return corrupt("unknown record " + clean(string(data), 80) + "; was it written by a newer version?")
	}
	return f(q, data)
}

// replayer decodes a record, finds what it speaks of, and applies it.
func replayer[R any](f func(q *Queue, r *R) error) func(*Queue, []byte) error {
	return func(q *Queue, data []byte) error {
		r := new(R)
		if err := json.Unmarshal(data, r); err != nil {
			return &sluice.Error{Kind: sluice.Corrupt, Op: "queue: replay", Detail: "a record cannot be read: " + clean(string(data), 80), Err: err}
		}
		return f(q, r)
	}
}

var replayers map[string]func(*Queue, []byte) error

func init() {
	replayers = map[string]func(*Queue, []byte) error{
		"put": replayer(func(q *Queue, r *putRecord) error {
			if r.Ref.IsZero() {
				return corrupt("a put has no ref")
			}
			r.s = q.newSample(r.Ref)
			q.name(r.s, q.byID[r.s.id])
			q.bySeq[r.Seq] = r.s
			q.now = max(q.now, r.At)
			q.applyPut(nil, r)
			return nil
		}),
		"lease": replayer(func(q *Queue, r *leaseRecord) error {
			if r.s = q.bySeq[r.Seq]; r.s == nil {
				return corrupt("a lease of an unknown sample")
			}
			if r.s.place == gone && !r.Pad || r.s.place == dead {
				return nil
			}
			r.c = q.replayConsumer(r.Consumer, r.Incarnation, r.Rank, r.Members)
			if r.Member < 0 || r.Member >= max(r.c.members, 1) {
				return corrupt("a lease for a member that the group has not")
			}
			var err error
			if r.slot, err = q.replaySlot(r.Windowed, r.Window, r.Slot); err != nil {
				return err
			}
			q.applyLease(r)
			return nil
		}),
		"end": replayer(func(q *Queue, r *endRecord) error {
			if r.s = q.bySeq[r.Seq]; r.s == nil {
				return corrupt("the end of a lease of an unknown sample")
			}
			var err error
			if r.slot, err = q.replaySlot(r.Windowed, r.Window, r.Slot); err != nil {
				return err
			}
			if r.s.place == gone && !r.Pad {
				return nil
			}
			q.now = max(q.now, r.At)
			as, ok := codeOf(r.As)
			if !ok && r.As != "" {
				return corrupt("the end of a lease by an unknown verdict")
			}
			r.l = q.leaseByID(r.Lease)
			q.applyEnd(nil, r)
			if r.l == nil && r.As != "" {
				c := q.replayConsumer(r.Consumer, r.Incarnation, 0, 0)
				q.rememberLease(outcome{r.Lease, c.number, r.Incarnation, r.At, 0, as, r.How == howDead})
			}
			return nil
		}),
		"member": replayer(func(q *Queue, r *memberRecord) error {
			if r.l = q.leaseByID(r.Lease); r.l == nil || r.l.group == nil || r.Member < 0 || r.Member >= len(r.l.group.verdicts) {
				return nil // the lease has ended
			}
			q.applyMember(r)
			return nil
		}),
		"give": replayer(func(q *Queue, r *giveRecord) error {
			c := q.consumers[r.Consumer]
			if c == nil || r.Member < 0 || r.Member >= len(c.cursor) {
				return corrupt("a lease given to an unknown member")
			}
			if l := c.behind(r.Member); l != nil {
				q.applyGive(r, c, l)
			}
			return nil
		}),
		"consumer": replayer(func(q *Queue, r *consumerRecord) error {
			if r.Members < 0 || r.Members > maxMembers {
				return corrupt("a group of an impossible size")
			}
			q.applyConsumer(r)
			return nil
		}),
		"results":  replayer(func(q *Queue, r *resultsRecord) error { q.applyResults(r); return nil }),
		"producer": replayer(func(q *Queue, r *producerRecord) error { q.applyProducer(r); return nil }),
		"close":    replayer(func(q *Queue, r *closeRecord) error { q.applyClose(r); return nil }),
		"config": replayer(func(q *Queue, r *configRecord) error {
			if r.Timeout < 0 {
				return corrupt("an impossible timeout")
			}
			q.applyConfig(r)
			return nil
		}),
		"gates": replayer(func(q *Queue, r *gatesRecord) error { q.setGates(r.Targets, r.MinDraft); return nil }),
		"window": replayer(func(q *Queue, r *windowRecord) error {
			if !q.windows.on || len(r.Seqs) > q.windows.ranks*q.windows.perRank {
				return corrupt("a window that does not fit the run: was the journal written with other windows?")
			}
			for _, seq := range r.Seqs {
				s := q.bySeq[seq]
				if s == nil || int(s.place) >= pendingLists || s.place == claiming {
					return corrupt("a window of samples that do not wait")
				}
				r.picked = append(r.picked, s)
			}
			q.applyWindow(r)
			return nil
		}),
		"skip": replayer(func(q *Queue, r *skipRecord) (err error) {
			if r.slot, err = q.replaySlot(true, r.Window, r.Slot); err == nil && !r.slot.done {
				q.applySkip(nil, r)
			}
			return err
		}),
		"shape": replayer(func(q *Queue, r *shapeRecord) error {
			if !q.windows.on || r.Ranks < 1 || r.PerRank < 1 || r.Ranks > 1<<20 || r.PerRank > 1<<20 {
				return corrupt("an impossible shape")
			}
			q.applyShape(nil, r)
			return nil
		}),
		"drop": replayer(func(q *Queue, r *dropRecord) error {
			if r.s = q.bySeq[r.Seq]; r.s != nil && r.s.place != gone {
				q.applyDrop(nil, r)
			}
			return nil
		}),
		"freed": replayer(func(q *Queue, r *freedRecord) error {
			if r.s = q.bySeq[r.Seq]; r.s != nil && r.s.place == dead && !r.s.freed {
				q.applyFreed(nil, r)
			}
			return nil
		}),
		"requeue": replayer(func(q *Queue, r *requeueRecord) error {
			if r.s = q.bySeq[r.Seq]; r.s != nil && r.s.place == dead {
				q.applyRequeue(nil, r)
			}
			return nil
		}),
		"lost": replayer(func(q *Queue, r *lostRecord) error {
			if r.s = q.bySeq[r.Seq]; r.s != nil && !r.s.freed {
				q.applyLost(nil, r)
			}
			return nil
		}),
		"snap":          replayer((*Queue).loadHeader),
		"snap-samples":  replayer((*Queue).loadSamples),
		"snap-consumer": replayer((*Queue).loadConsumer),
		"snap-window":   replayer((*Queue).loadWindow),
		"snap-leases":   replayer((*Queue).loadLeases),
		"snap-gone":     replayer((*Queue).loadGone),
		"snap-settled":  replayer((*Queue).loadSettled),
		"snap-share":    replayer((*Queue).loadShare),
		"snap-ended":    replayer((*Queue).loadEnded),
		"snap-log":      replayer((*Queue).loadLog),
		"snap-producer": replayer((*Queue).loadProducer),
		"snap-taken":    replayer((*Queue).loadTaken),
		"snap-request":  replayer((*Queue).loadRequest),
	}
}

// replayConsumer finds a consumer whose own record may have been lost.
func (q *Queue) replayConsumer(name string, incarnation int64, rank, members int) *consumer {
	c := q.consumers[name]
	if c == nil || c.incarnation < incarnation {
		q.applyConsumer(&consumerRecord{Name: name, Incarnation: incarnation, Rank: rank, Members: members})
		c = q.consumers[name]
	}
	return c
}

func (q *Queue) replaySlot(windowed bool, number int64, index int) (*slot, error) {
	if !windowed {
		return nil, nil
	}
	w := q.window(number)
	if w == nil || index < 0 || index >= len(w.slots) {
		return nil, corrupt("a place in a window that is not open")
	}
	return &w.slots[index], nil
}
