package torture

import (
	"fmt"
	"math"
	"slices"
	"strings"
)

// audit is what the processes' books prove, joined. It knows nothing of what the service counts.
type audit struct {
	Produced    int64 `json:"produced"`    // positions with a sample in the queue
	Acked       int64 `json:"acked"`       // of these: trained on, and the service said so, or would have said so to a process that was killed while it asked
	Redelivered int64 `json:"redelivered"` // deliveries after the first of their sample
	Dead        int64 `json:"dead"`        // accounted for as dead letters
	Unanswered  int64 `json:"unanswered"`  // of those acked, the ones that rest on an ack without an answer alone
	Early       int64 `json:"early"`       // leases that ended early with a killed service, whose samples somebody else acked meanwhile
	Lost        int64 `json:"lost"`        // neither
	DoubleAcked int64 `json:"double_acked"`
	Forgotten   int64 `json:"forgotten_acks"` // delivered again after the service had confirmed an ack
	Repeated    int64 `json:"repeated"`       // positions that are in the queue as more than one sample
	Wrong       int64 `json:"wrong_rows"`     // read, and other than produced
	Missing     int64 `json:"missing"`        // could not be read although the lease was alive
	Trouble     int64 `json:"trouble"`        // errors that nothing explains
	InUpload    int64 `json:"killed_in_upload"`

	put, got map[string]int64 // samples by producer, deliveries by consumer
	findings []string
}

const mostFindings = 50

func (a *audit) find(format string, args ...any) {
	if len(a.findings) < mostFindings {
		a.findings = append(a.findings, fmt.Sprintf(format, args...))
	}
}

// clean says that nothing is wrong.
func (a *audit) clean() bool {
	return a.Lost+a.DoubleAcked+a.Forgotten+a.Repeated+a.Wrong+a.Missing+a.Trouble == 0
}

// position names a place in the prompt stream.
type position struct {
	source string
	index  int64
}

// sampleBook is what all processes say of one put.
type sampleBook struct {
	id, generation string
	at             position

	asked     bool // a commit was tried
	confirmed bool // the service said that it is in the queue, or that it was
	gated     bool

	leases   map[string]*leaseBook
	ackedBy  []string // leases whose ack the service confirmed
	ackedAt  int64    // when the first of these answers came
	ackedNo  int      // and which delivery that was
	maybe    bool     // an ack without an answer that tells: its process was killed, or the service was, or the disk was full meanwhile
	asks     []ackAsked
	deadSaid bool // a settlement was answered "dead"
}

type leaseBook struct {
	id         string
	redelivery int
	asked      int64
	verdict    string
}

// ackAsked is an ack that was asked for, whatever came of it.
type ackAsked struct {
	lease string
	at    int64
}

// ackedBefore reports whether somebody with another lease had asked for an ack by then.
func (s *sampleBook) ackedBefore(lease string, at int64) bool {
	return slices.ContainsFunc(s.asks, func(a ackAsked) bool { return a.lease != lease && a.at <= at })
}

// span is a time in which the service was being killed, or had a full disk. What was asked and not answered meanwhile may have happened, and a lease that was given a moment
// before may be forgotten.
type span struct{ from, to int64 }

// upsets are the spans, in order.
type upsets []span

func (u upsets) between(from, to int64) bool {
	return slices.ContainsFunc(u, func(s span) bool { return s.from <= to && s.to >= from })
}

// upsetsOf finds them in the torture's own book. One without an end lasts.
func upsetsOf(lines []line) (u upsets) {
	open := map[op]int{}
	for i := range lines {
		l := &lines[i]
		switch {
		case l.Op != opKill && l.Op != opFull:
		case !l.End:
			open[l.Op] = len(u)
			u = append(u, span{l.At, math.MaxInt64})
		default:
			if at, ok := open[l.Op]; ok {
				u[at].to = l.At
			}
		}
	}
	return u
}

// unanswered is the ack that a process has asked for and does not know the answer of.
type unanswered struct {
	sample *sampleBook
	lease  string
	since  int64
}

// finalDead is what the service lists as dead at the end, and who says that it took a position: evidence that comes from questions put to it, not from its counters.
type testimony struct {
	dead  map[string]string // sample id to generation
	taken map[position]bool
}

// examine joins the books.
func examine(lines []line, t testimony) *audit {
	a := &audit{put: map[string]int64{}, got: map[string]int64{}}
	upset := upsetsOf(lines)
	asking := map[string]*unanswered{}  // by process
	samples := map[string]*sampleBook{} // by id and generation
	get := func(l *line) *sampleBook {
		key := l.Sample + "\x00" + l.Generation
		s := samples[key]
		if s == nil {
			s = &sampleBook{id: l.Sample, generation: l.Generation, leases: map[string]*leaseBook{}}
			samples[key] = s
		}
		return s
	}
	storing := map[string]bool{} // by process: a store without an outcome yet
	for i := range lines {
		l := &lines[i]
		process := fmt.Sprintf("%s.%d", l.Who, l.Inc)
		if q := asking[process]; q != nil && l.Lease != q.lease && l.Op != opTrouble {
			delete(asking, process) // it went on without an answer, which no process does
		}
		switch l.Op {
		case opStore:
			storing[process] = !l.End
		case opCommit:
			s := get(l)
			s.asked = true
			if !l.End {
				s.at = position{l.Source, l.Index}
				continue
			}
			switch l.Status {
			case "enqueued", "already", "settled":
				s.confirmed = true
				a.put[l.Who]++
			case "gated":
				s.confirmed, s.gated = true, true
			}
		case opDeliver:
			s := get(l)
			a.got[l.Who]++
			s.leases[l.Lease] = &leaseBook{id: l.Lease, redelivery: l.Redelivery, asked: l.Asked}
			if l.Redelivery > 0 {
				a.Redelivered++
			}
		case opRead:
			switch l.Status {
			case statusOK:
			case statusWrong:
				a.Wrong++
				a.find("%s: %s read other bytes than were produced: %s", l.Sample, l.Who, l.Text)
			default:
				s := get(l)
				lease := s.leases[l.Lease]
				switch {
				case l.LeftNanos <= 0: // the lease may have run out when the answer came
				case lease != nil && s.ackedBefore(l.Lease, l.At) && upset.between(lease.asked, l.At):
					a.Early++
				default:
					a.Missing++
					a.find("%s: %s holds the lease %s and can't read it: %s %s", l.Sample, l.Who, l.Lease, l.Status, l.Text)
				}
			}
		case opSettle:
			s := get(l)
			lease := s.leases[l.Lease]
			if lease == nil {
				a.Trouble++
				a.find("%s: %s settles the lease %s, which no book says was delivered", l.Sample, l.Who, l.Lease)
				continue
			}
			if !l.End {
				lease.verdict = l.Text
				if l.Text == "ack" {
					s.asks = append(s.asks, ackAsked{l.Lease, l.At})
					if asking[process] == nil {
						asking[process] = &unanswered{s, l.Lease, l.At}
					}
				}
				continue
			}
			if q := asking[process]; q != nil {
				// The first attempt may have done it, and its answer be lost; later ones then find no such lease.
				s.maybe = s.maybe || (l.Status == "unavailable" || l.Status == "stale") && upset.between(q.since, l.At)
				if l.Status != "unavailable" {
					delete(asking, process)
				}
			}
			if l.Dead {
				s.deadSaid = true
			}
			if l.Text == "ack" && (l.Status == "settled" || l.Status == "already_settled as ack") {
				if !slices.Contains(s.ackedBy, l.Lease) {
					s.ackedBy = append(s.ackedBy, l.Lease)
				}
				if s.ackedAt == 0 {
					s.ackedAt, s.ackedNo = l.At, lease.redelivery
				}
			}
		case opTrouble:
			a.Trouble++
			a.find("%s: %s %s", l.Who, l.Status, l.Text)
		}
	}
	for _, q := range asking { // killed while they waited for the answer
		q.sample.maybe = true
	}
	for _, busy := range storing {
		if busy {
			a.InUpload++
		}
	}

	inQueue := map[position][]*sampleBook{}
	for _, s := range samples {
		if s.asked && (s.confirmed || len(s.leases) > 0 || t.dead[s.id] == s.generation) {
			inQueue[s.at] = append(inQueue[s.at], s)
		}
		if len(s.leases) > 0 && !s.asked {
			a.Trouble++
			a.find("%s: was delivered and never committed", s.id)
		}
		if n := len(s.ackedBy); n > 1 {
			a.DoubleAcked++
			a.find("%s: acked under %d leases: %s", s.id, n, strings.Join(s.ackedBy, ", "))
		}
		if len(s.ackedBy) > 0 && t.dead[s.id] == s.generation {
			a.Forgotten++
			a.find("%s: its ack under %s was confirmed, and it is a dead letter at the end", s.id, s.ackedBy[0])
		}
		for _, l := range s.leases {
			if s.ackedAt != 0 && l.id != s.ackedBy[0] && (l.redelivery > s.ackedNo || l.asked > s.ackedAt) {
				a.Forgotten++
				a.find("%s: its ack under %s (delivery %d) was confirmed, and it was delivered again as %s (delivery %d)", s.id, s.ackedBy[0], s.ackedNo, l.id, l.redelivery)
			}
		}
	}
	// A position that the queue says it took, and of which a commit was tried, counts although its producer was killed before it knew.
	for _, s := range samples {
		if s.asked && t.taken[s.at] && len(inQueue[s.at]) == 0 {
			inQueue[s.at] = append(inQueue[s.at], s)
		}
	}
	for at, in := range inQueue {
		a.Produced++
		if len(in) > 1 {
			a.Repeated++
			a.find("%s/%d: is in the queue %d times, as %s", at.source, at.index, len(in), in[0].id)
		}
		acked, maybe, dead := false, false, false
		for _, s := range in {
			acked = acked || len(s.ackedBy) > 0
			maybe = maybe || s.maybe
			dead = dead || s.deadSaid || t.dead[s.id] == s.generation || s.gated
		}
		switch {
		case acked:
			a.Acked++
		case dead:
			a.Dead++
		case maybe:
			a.Acked++
			a.Unanswered++
		default:
			a.Lost++
			a.find("%s/%d: %s was put and is neither acked nor dead; deliveries: %d", at.source, at.index, in[0].id, len(in[0].leases))
		}
	}
	for at := range t.taken {
		if len(inQueue[at]) == 0 {
			a.Trouble++
			a.find("%s/%d: the queue says that it took it, and no book has a commit of it", at.source, at.index)
		}
	}
	return a
}
