package queue

import (
	"cmp"
	"slices"
	"time"

	"github.com/sluice-ml/sluice"
)

// A snapshot is the whole state as records: what replaces a journal that has grown long.

type headerState struct {
	T          string      `json:"t"`
	Seq        int64       `json:"seq"`
	Count      counters    `json:"count"`
	Closed     bool        `json:"closed,omitempty"`
	Cause      string      `json:"cause,omitempty"`
	Kind       sluice.Kind `json:"kind,omitempty"`
	Targets    []string    `json:"targets,omitempty"`
	MinDraft   string      `json:"min_draft,omitempty"`
	Ranks      int         `json:"ranks,omitempty"`
	PerRank    int         `json:"per_rank,omitempty"`
	NextWindow int64       `json:"next_window,omitempty"`

	Timeout time.Duration `json:"timeout,omitempty"` // of leases, and the marks, if they were changed
	Marks   *marks        `json:"marks,omitempty"`
}

type samplesState struct {
	T    string        `json:"t"`
	List []sampleState `json:"list"`
}

type sampleState struct {
	Ref        *sluice.Ref `json:"ref,omitempty"`
	ID         string      `json:"id,omitempty"` // where there is no ref any more
	Generation string      `json:"generation,omitempty"`
	Seq        int64       `json:"seq"`
	Place      place       `json:"place"`
	Ending     ending      `json:"ending,omitempty"`
	At         int64       `json:"at,omitempty"`
	Fails      int32       `json:"fails,omitempty"`
	Expiries   int32       `json:"expiries,omitempty"`
	Deliveries int32       `json:"deliveries,omitempty"`
	Supervised int64       `json:"supervised,omitempty"`
	Freed      bool        `json:"freed,omitempty"`
	Older      bool        `json:"older,omitempty"` // its id was put again
	Reasons    []string    `json:"reasons,omitempty"`
}

type consumerState struct {
	T           string `json:"t"`
	Name        string `json:"name"`
	Incarnation int64  `json:"incarnation"`
	Rank        int    `json:"rank,omitempty"`
	Members     int    `json:"members,omitempty"`
	Left        bool   `json:"left,omitempty"`
	Delivered   int64  `json:"delivered,omitempty"`
	Acked       int64  `json:"acked,omitempty"`
}

type openWindow struct {
	T          string      `json:"t"`
	Number     int64       `json:"number"`
	Real       []int64     `json:"real"`
	Tokens     int64       `json:"tokens"`
	Supervised int64       `json:"supervised"`
	Spare      int64       `json:"spare,omitempty"`
	Slots      []slotState `json:"slots"`
}

type slotState struct {
	Seq       int64 `json:"seq,omitempty"`
	Delivered bool  `json:"delivered,omitempty"`
	Done      bool  `json:"done,omitempty"`
	Fails     int32 `json:"fails,omitempty"`
	Expiries  int32 `json:"expiries,omitempty"`
}

type leasesState struct {
	T    string       `json:"t"`
	List []leaseEntry `json:"list"`
}

type leaseEntry struct {
	Lease       sluice.LeaseID   `json:"lease"`
	Seq         int64            `json:"seq,omitempty"`
	Consumer    string           `json:"consumer"`
	Incarnation int64            `json:"incarnation"`
	Given       int64            `json:"given,omitempty"`
	Redelivery  int32            `json:"redelivery,omitempty"`
	Pad         bool             `json:"pad,omitempty"`
	Windowed    bool             `json:"windowed,omitempty"`
	Window      int64            `json:"window,omitempty"`
	Slot        int              `json:"slot,omitempty"`
	Verdicts    []sluice.Verdict `json:"verdicts,omitempty"`
	Reasons     []string         `json:"reasons,omitempty"`
	Timeout     time.Duration    `json:"timeout,omitempty"` // unless it is the run's
}

type gonePuts struct {
	T    string    `json:"t"`
	List []gonePut `json:"list"`
}

type gonePut struct {
	ID         string `json:"id"`
	Generation string `json:"generation"`
	Ending     ending `json:"ending,omitempty"`
	At         int64  `json:"at"`
}

type settledLeases struct {
	T    string         `json:"t"`
	List []settledLease `json:"list"`
}

type settledLease struct {
	Lease       sluice.LeaseID `json:"lease"`
	Consumer    string         `json:"consumer"`
	Incarnation int64          `json:"incarnation"`
	As          sluice.Verdict `json:"as"`
	Dead        bool           `json:"dead,omitempty"`
	At          int64          `json:"at"`
}

type shareState struct {
	T     string     `json:"t"`
	Rank  int        `json:"rank"`
	Slots [][2]int64 `json:"slots"`
}

// endedLeases are those of groups that some members may yet be given.
type endedLeases struct {
	T    string       `json:"t"`
	List []endedLease `json:"list"`
}

type endedLease struct {
	Lease      sluice.LeaseID     `json:"lease"`
	Consumer   string             `json:"consumer"`
	Ref        sluice.Ref         `json:"ref"`
	Redelivery int32              `json:"redelivery,omitempty"`
	Window     *sluice.WindowSlot `json:"window,omitempty"`
}

type logState struct {
	T        string           `json:"t"`
	Consumer string           `json:"consumer"`
	Base     int64            `json:"base"`
	Cursor   []int64          `json:"cursor"`
	Leases   []sluice.LeaseID `json:"leases"`
}

type producerStateRecord struct {
	T           string               `json:"t"`
	Name        string               `json:"name"`
	Incarnation int64                `json:"incarnation"`
	State       sluice.ProducerState `json:"state"`
	Put         int64                `json:"put"`
}

type takenState struct {
	T     string       `json:"t"`
	Taken sluice.Taken `json:"taken"`
}

type requestState struct {
	T           string                `json:"t"`
	Kind        string                `json:"kind"`
	Name        string                `json:"name"`
	Incarnation int64                 `json:"incarnation"`
	Member      int                   `json:"member,omitempty"`
	ID          string                `json:"id"`
	At          int64                 `json:"at"`
	Leases      []sluice.LeaseID      `json:"leases,omitempty"`
	Results     []sluice.SettleResult `json:"results,omitempty"`
}

// chunk bounds the entries of one record of a snapshot, so that no record is large.
const chunk = 200

// header is what a journal begins with. What of it may change while the run goes on wins over the RunConfig.
func (q *Queue) header() headerState {
	h := headerState{T: "snap", Seq: q.seq, Count: q.count, Closed: q.closed, Targets: q.cfg.TargetVersions, MinDraft: q.cfg.MinDraftVersion, NextWindow: q.windows.next, Timeout: q.timeout, Marks: q.room.marks.Load()}
	if q.cause != nil {
		h.Cause, h.Kind = clean(q.cause.Error(), 4096), sluice.KindOf(q.cause)
	}
	if q.windows.on {
		h.Ranks, h.PerRank = q.windows.ranks, q.windows.perRank
	}
	return h
}

// snapshot copies the state. The caller holds mu; encoding is left for later, without it.
func (q *Queue) snapshot() []any {
	out := []any{q.header()}

	var samples samplesState
	flush := func(least int) {
		if len(samples.List) > least {
			samples.T = "snap-samples"
			out = append(out, samples)
			samples = samplesState{}
		}
	}
	add := func(s *sample) {
		st := sampleState{
			Seq: s.seq, Place: s.place, Ending: s.ending, At: s.at, Fails: s.fails, Expiries: s.expiries, Deliveries: s.deliveries,
			Supervised: s.supervised, Freed: s.freed, Older: q.byID[s.id] != s, Reasons: slices.Clone(s.reasons()),
		}
		if s.ref.IsZero() {
			st.ID, st.Generation = s.id, s.gen
		} else {
			ref := s.ref
			st.Ref = &ref
		}
		samples.List = append(samples.List, st)
		flush(chunk - 1)
	}
	for i := range q.lists {
		for s := q.lists[i].head; s != nil; s = s.next {
			add(s)
		}
	}
	for _, w := range q.windows.open {
		for i := range w.slots {
			if s := w.slots[i].s; s != nil && s.place == slotted {
				add(s)
			}
		}
	}
	names := make([]string, 0, len(q.consumers))
	for name := range q.consumers {
		names = append(names, name)
	}
	slices.Sort(names)
	for _, name := range names {
		for l := q.consumers[name].first; l != nil; l = l.cnext {
			if !l.pad {
				add(l.s)
			}
		}
	}
	for _, list := range []*sampleList{&q.deadFreed, &q.deadKept, &q.kept} {
		for s := list.head; s != nil; s = s.next {
			add(s)
		}
	}
	flush(0)

	for _, c := range q.consumersInOrder(names) {
		out = append(out, consumerState{T: "snap-consumer", Name: c.name, Incarnation: c.incarnation, Rank: c.rank, Members: c.members, Left: c.left, Delivered: c.delivered, Acked: c.acked})
	}
	for _, w := range q.windows.open {
		st := openWindow{T: "snap-window", Number: w.number, Tokens: w.tokens, Supervised: w.supervised}
		if w.spare != nil {
			st.Spare = w.spare.seq
		}
		for _, s := range w.real {
			st.Real = append(st.Real, s.seq)
		}
		for i := range w.slots {
			sl := &w.slots[i]
			x := slotState{Delivered: sl.delivered, Done: sl.done, Fails: sl.fails, Expiries: sl.expiries}
			if sl.s != nil {
				x.Seq = sl.s.seq
			}
			st.Slots = append(st.Slots, x)
		}
		out = append(out, st)
	}

	var leases leasesState
	flushLeases := func(least int) {
		if len(leases.List) > least {
			leases.T = "snap-leases"
			out = append(out, leases)
			leases = leasesState{}
		}
	}
	addLease := func(l *lease) {
		st := leaseEntry{
			Lease: l.id, Seq: l.s.seq, Consumer: l.c.name, Incarnation: l.incarnation, Given: l.given, Redelivery: l.redelivery, Pad: l.pad,
		}
		if l.slot != nil {
			st.Windowed, st.Window, st.Slot = true, l.slot.w.number, l.slot.index
		}
		if g := l.group; g != nil {
			st.Verdicts, st.Reasons = slices.Clone(g.verdicts), slices.Clone(g.reasons)
		}
		if l.line.timeout != q.cfg.VisibilityTimeout {
			st.Timeout = l.line.timeout
		}
		leases.List = append(leases.List, st)
		flushLeases(chunk - 1)
	}
	for _, name := range names {
		for l := q.consumers[name].first; l != nil; l = l.cnext {
			addLease(l)
		}
	}
	flushLeases(0)
	for part := range slices.Chunk(q.rememberedPuts(), chunk) {
		out = append(out, gonePuts{"snap-gone", part})
	}
	for part := range slices.Chunk(q.rememberedLeases(), chunk) {
		out = append(out, settledLeases{"snap-settled", part})
	}

	if q.windows.on {
		for i := range q.shares {
			st := shareState{T: "snap-share", Rank: i}
			for sl := q.shares[i].slots.head; sl != nil; sl = sl.next {
				st.Slots = append(st.Slots, [2]int64{sl.w.number, int64(sl.index)})
			}
			if len(st.Slots) > 0 {
				out = append(out, st)
			}
		}
	}
	requests := q.answeredRequests()
	for part := range slices.Chunk(q.endedLeases(names, requests), chunk) {
		out = append(out, endedLeases{"snap-ended", part})
	}
	for _, name := range names {
		if c := q.consumers[name]; c.members > 1 {
			st := logState{T: "snap-log", Consumer: name, Base: c.base, Cursor: slices.Clone(c.cursor)}
			for _, l := range c.log {
				st.Leases = append(st.Leases, l.id)
			}
			out = append(out, st)
		}
	}
	producers := make([]string, 0, len(q.producers))
	for name := range q.producers {
		producers = append(producers, name)
	}
	slices.Sort(producers)
	for _, name := range producers {
		p := q.producers[name]
		out = append(out, producerStateRecord{T: "snap-producer", Name: name, Incarnation: p.incarnation, State: p.state, Put: p.put})
	}
	streams := make([]stream, 0, len(q.taken))
	for st := range q.taken {
		streams = append(streams, st)
	}
	slices.SortFunc(streams, func(a, b stream) int { return cmp.Or(cmp.Compare(a.source, b.source), cmp.Compare(a.epoch, b.epoch)) })
	for _, st := range streams {
		for part := range slices.Chunk(q.taken[st].ranges(), 16*chunk) {
			out = append(out, takenState{"snap-taken", sluice.Taken{Source: st.source, Epoch: st.epoch, Ranges: part}})
		}
	}
	for _, r := range requests {
		st := requestState{T: "snap-request", Kind: string(r.key.kind), Name: r.key.name, Incarnation: r.key.incarnation, Member: r.key.member, ID: r.key.id, At: r.at, Results: slices.Clone(r.results)}
		for _, l := range r.leases {
			if l.answers(q.consumers[r.key.name]) {
				st.Leases = append(st.Leases, l.id)
			}
		}
		if len(st.Leases)+len(st.Results) > 0 {
			out = append(out, st)
		}
	}
	return out
}

// answeredRequests lists, oldest first, the requests whose answers a restart keeps: a reservation ends with its process.
func (q *Queue) answeredRequests() (list []*request) {
	for r := q.requests.head; r != nil; r = r.next {
		if r.done == nil && q.requests.byKey[r.key] == r && r.key.kind != 'r' {
			list = append(list, r)
		}
	}
	return list
}

// endedLeases lists those that are not out, but in the log of a group or the answer to a member.
func (q *Queue) endedLeases(names []string, requests []*request) (list []endedLease) {
	known := map[*lease]bool{}
	add := func(l *lease) {
		if l.ended && !known[l] {
			known[l] = true
			list = append(list, endedLease{l.id, l.c.name, l.group.ref, l.redelivery, l.group.window})
		}
	}
	for _, name := range names {
		for _, l := range q.consumers[name].log {
			add(l)
		}
	}
	for _, r := range requests {
		for _, l := range r.leases {
			if l.answers(q.consumers[r.key.name]) {
				add(l)
			}
		}
	}
	return list
}

// consumersInOrder lists those that are here by name, and then those that have left, as they left.
func (q *Queue) consumersInOrder(names []string) []*consumer {
	list := make([]*consumer, 0, len(names))
	for _, name := range names {
		if c := q.consumers[name]; !c.left {
			list = append(list, c)
		}
	}
	for e := q.departed.Front(); e != nil; e = e.Next() {
		list = append(list, e.Value.(*consumer))
	}
	return list
}

func (q *Queue) loadHeader(h *headerState) error {
	if len(q.bySeq) > 0 {
		return corrupt("a snapshot in the middle of a journal")
	}
	q.seq, q.count = h.Seq, h.Count
	if h.Closed {
		q.applyClose(&closeRecord{Cause: h.Cause, Kind: h.Kind})
	}
	q.setGates(h.Targets, h.MinDraft)
	q.applyConfig(&configRecord{Timeout: h.Timeout, Marks: h.Marks})
	if (h.Ranks > 0) != q.windows.on {
		return corrupt("the journal is of a run with windows and this is one without, or the reverse")
	}
	if q.windows.on {
		w := *q.cfg.Windows
		w.Ranks, w.PerRank = h.Ranks, h.PerRank
		if err := w.Validate(); err != nil {
			return corrupt("impossible windows")
		}
		q.setShape(&w)
		q.windows.next, q.windows.dealing = h.NextWindow, h.NextWindow
	}
	return nil
}

func (q *Queue) loadSamples(r *samplesState) error {
	for i := range r.List {
		st := &r.List[i]
		var s *sample
		if st.Ref != nil {
			s = q.newSample(*st.Ref)
		} else {
			s = &sample{id: st.ID, gen: st.Generation, key: q.putKey(st.ID, st.Generation)}
		}
		s.seq, s.place, s.ending, s.at, s.fails, s.expiries, s.deliveries = st.Seq, st.Place, st.Ending, st.At, st.Fails, st.Expiries, st.Deliveries
		s.supervised, s.freed, s.gates = st.Supervised, st.Freed, q.gates
		if len(st.Reasons) > 0 {
			s.rare().reasons = st.Reasons
		}
		if st.Older {
			q.older[s.id] = append(q.older[s.id], s)
		} else {
			q.name(s, q.byID[s.id])
		}
		q.bySeq[s.seq] = s
		switch s.place {
		case returned, fresh, retry:
			q.pend(s, s.place)
		case slotted:
			q.pending++
		case leased:
		case dead:
			if s.freed {
				q.deadFreed.pushBack(s)
			} else {
				q.deadKept.pushBack(s)
				q.deadBytes += s.bytes
			}
		case gone:
			s.kept = true
			q.kept.pushBack(s)
		default:
			return corrupt("a sample that is nowhere")
		}
	}
	return nil
}

func (q *Queue) loadConsumer(r *consumerState) error {
	if r.Members < 0 || r.Members > maxMembers {
		return corrupt("a group of an impossible size")
	}
	q.applyConsumer(&consumerRecord{Name: r.Name, Incarnation: r.Incarnation, Rank: r.Rank, Members: r.Members, Left: r.Left})
	c := q.consumers[r.Name]
	c.delivered, c.acked = r.Delivered, r.Acked
	return nil
}

func (q *Queue) loadWindow(r *openWindow) error {
	if !q.windows.on || len(r.Slots) != q.windows.ranks*q.windows.perRank {
		return corrupt("a window of another size")
	}
	w := &window{number: r.Number, slots: make([]slot, len(r.Slots)), tokens: r.Tokens, supervised: r.Supervised}
	for i := range r.Slots {
		st, sl := &r.Slots[i], &w.slots[i]
		sl.w, sl.index, sl.delivered, sl.done, sl.fails, sl.expiries = w, i, st.Delivered, st.Done, st.Fails, st.Expiries
		if !sl.delivered {
			w.undelivered++
		}
		if !sl.done {
			w.unresolved++
		}
		if st.Seq != 0 {
			s := q.bySeq[st.Seq]
			if s == nil {
				return corrupt("a window of an unknown sample")
			}
			sl.s, s.slot = s, sl
		}
	}
	for _, seq := range r.Real {
		s := q.bySeq[seq]
		if s == nil { // its memory has faded; it can be no pad any more
			s = &sample{seq: seq, place: gone, freed: true}
		}
		w.real = append(w.real, s)
	}
	if r.Spare != 0 {
		s := q.bySeq[r.Spare]
		if s == nil {
			return corrupt("a window without the sample that it keeps")
		}
		w.spare, s.spare = s, true
	}
	q.windows.open = append(q.windows.open, w)
	q.advance()
	return nil
}

func (q *Queue) loadLeases(r *leasesState) error {
	for i := range r.List {
		st := &r.List[i]
		c := q.consumers[st.Consumer]
		if c == nil {
			return corrupt("a lease of an unknown consumer")
		}
		q.order++
		l := &lease{id: st.Lease, c: c, incarnation: st.Incarnation, given: st.Given, order: q.order, redelivery: st.Redelivery, pad: st.Pad}
		q.leases[key(l.id)] = l
		if l.s = q.bySeq[st.Seq]; l.s == nil {
			return corrupt("a lease of an unknown sample")
		}
		slot, err := q.replaySlot(st.Windowed, st.Window, st.Slot)
		if err != nil {
			return err
		}
		if l.slot = slot; slot != nil {
			slot.lease = l
		}
		if st.Verdicts != nil {
			if len(st.Verdicts) != c.members {
				return corrupt("a lease of a group of another size")
			}
			g := &groupLease{ref: l.s.ref, verdicts: st.Verdicts, reasons: st.Reasons}
			if slot != nil {
				g.window = slot.view(q, l.pad)
			}
			for _, v := range g.verdicts {
				if v == "" {
					g.left++
				}
			}
			l.group = g
		}
		if l.pad {
			l.s.pads++
		} else {
			l.s.lease = l
			q.out++
		}
		if st.Timeout < 0 {
			return corrupt("a lease with an impossible timeout")
		}
		q.expiry.push(l, q.now, cmp.Or(st.Timeout, q.cfg.VisibilityTimeout))
		c.hold(l)
		q.share(c).out++
	}
	return nil
}

func (q *Queue) loadGone(r *gonePuts) error {
	for _, g := range r.List {
		q.rememberPut(q.putKey(g.ID, g.Generation), g.ID, g.Generation, bygone{at: g.At, ending: g.Ending})
	}
	return nil
}

func (q *Queue) loadSettled(r *settledLeases) error {
	for _, l := range r.List {
		c := q.consumers[l.Consumer]
		if c == nil {
			return corrupt("a settled lease of an unknown consumer")
		}
		as, ok := codeOf(l.As)
		if !ok {
			return corrupt("a lease settled by an unknown verdict")
		}
		q.rememberLease(outcome{id: l.Lease, consumer: c.number, incarnation: l.Incarnation, at: l.At, as: as, dead: l.Dead})
	}
	return nil
}

func (q *Queue) loadShare(r *shareState) error {
	for _, at := range r.Slots {
		sl, err := q.replaySlot(true, at[0], int(at[1]))
		if err != nil {
			return err
		}
		q.line(sl, false)
	}
	return nil
}

func (q *Queue) loadEnded(r *endedLeases) error {
	if q.endedByID == nil {
		q.endedByID = map[sluice.LeaseID]*lease{}
	}
	for _, st := range r.List {
		c := q.consumers[st.Consumer]
		if c == nil || st.Ref.IsZero() {
			return corrupt("a lease that has ended, of an unknown consumer or sample")
		}
		q.endedByID[st.Lease] = &lease{
			id: st.Lease, c: c, incarnation: c.incarnation, redelivery: st.Redelivery, ended: true, group: &groupLease{ref: st.Ref, window: st.Window},
		}
	}
	return nil
}

// snapshotLease finds a lease that the snapshot described, or nil.
func (q *Queue) snapshotLease(id sluice.LeaseID) *lease {
	if l := q.leaseByID(id); l != nil {
		return l
	}
	return q.endedByID[id]
}

func (q *Queue) loadLog(r *logState) error {
	c := q.consumers[r.Consumer]
	if c == nil || len(r.Cursor) != c.members {
		return corrupt("the log of an unknown group")
	}
	c.base, c.cursor = r.Base, r.Cursor
	for _, id := range r.Leases {
		l := q.snapshotLease(id)
		if l == nil || l.c != c || l.group == nil {
			return corrupt("the log of a group with a lease that it never had")
		}
		c.log = append(c.log, l)
	}
	return nil
}

func (q *Queue) loadProducer(r *producerStateRecord) error {
	q.applyProducer(&producerRecord{Name: r.Name, Incarnation: r.Incarnation, State: r.State})
	q.producers[r.Name].put = r.Put
	return nil
}

func (q *Queue) loadTaken(r *takenState) error {
	st := stream{r.Taken.Source, r.Taken.Epoch}
	if q.taken[st] == nil {
		q.taken[st] = new(rangeSet)
	}
	for _, x := range r.Taken.Ranges {
		q.taken[st].addRange(x[0], x[1])
	}
	return nil
}

func (q *Queue) loadRequest(r *requestState) error {
	if len(r.Kind) != 1 {
		return corrupt("a request of an unknown kind")
	}
	key := requestKey{r.Kind[0], r.Name, r.Incarnation, r.Member, r.ID}
	for _, id := range r.Leases {
		if l := q.snapshotLease(id); l != nil {
			l.requested = true
			q.requests.addLease(key, l, r.At)
		}
	}
	if len(r.Results) > 0 {
		q.applyResults(&resultsRecord{Consumer: r.Name, Incarnation: r.Incarnation, Member: r.Member, Request: r.ID, At: r.At, Results: r.Results})
	}
	return nil
}
