package queue

import "github.com/sluice-ml/sluice"

// requestKey names a call that may be repeated: its kind, who made it, and the id that it brought.
type requestKey struct {
	kind        byte // a(cquire), s(ettle), r(eserve)
	name        string
	incarnation int64
	member      int
	id          string
}

// request is the result of such a call.
type request struct {
	key     requestKey
	at      int64
	lsn     uint64
	weight  int
	leases  []*lease
	results []sluice.SettleResult
	room    sluice.Reservation
	done    chan struct{} // while the call waits: a repetition waits for it rather than beside it
	next    *request
}

// requestMemory remembers results for a while. What it holds is bounded by weight, the number of leases and results in it.
type requestMemory struct {
	byKey      map[requestKey]*request
	head, tail *request // oldest first
	weight     int
}

func (m *requestMemory) init() { m.byKey = map[requestKey]*request{} }

func (m *requestMemory) find(key requestKey, now int64) *request {
	r := m.byKey[key]
	if r == nil || r.done == nil && r.at < now-int64(memory) {
		return nil
	}
	return r
}

func (m *requestMemory) add(key requestKey, now int64) *request {
	r := &request{key: key, at: now, weight: 1}
	m.weight++
	m.byKey[key] = r
	m.append(r)
	return r
}

func (m *requestMemory) append(r *request) {
	if m.tail == nil {
		m.head = r
	} else {
		m.tail.next = r
	}
	m.tail = r
}

func (m *requestMemory) addLease(key requestKey, l *lease, now int64) {
	r := m.byKey[key]
	if r == nil {
		r = m.add(key, now)
	}
	r.at = now
	r.leases = append(r.leases, l)
	r.weight++
	m.weight++
}

// remove lets go of a call that came to nothing; its place in the line is swept later.
func (m *requestMemory) remove(r *request) {
	if m.byKey[r.key] == r {
		delete(m.byKey, r.key)
	}
}

// forget lets go of a few at a time; calls that still wait go to the end of the line.
func (m *requestMemory) forget(old int64) {
	for range 8 {
		r := m.head
		if r == nil || m.weight <= memoryCount && r.at >= old {
			return
		}
		if m.head = r.next; m.head == nil {
			m.tail = nil
		}
		r.next = nil
		if r.done != nil {
			r.at = old + int64(memory)
			m.append(r)
			continue
		}
		m.weight -= r.weight
		m.remove(r)
	}
}

func checkRequestID(id string) error {
	if len(id) > 200 {
		return &sluice.Error{Kind: sluice.Invalid, Op: "queue", Detail: "the request id is longer than 200 bytes"}
	}
	return nil
}

func (q *Queue) applyResults(r *resultsRecord) {
	key := requestKey{'s', r.Consumer, r.Incarnation, r.Member, r.Request}
	e := q.requests.byKey[key]
	if e == nil {
		e = q.requests.add(key, r.At)
	}
	e.results = append([]sluice.SettleResult(nil), r.Results...)
	e.at = r.At
	e.weight += len(r.Results)
	q.requests.weight += len(r.Results)
}
