package queue

import (
	"github.com/sluice-ml/sluice"
)

// place says where a sample is.
type place uint8

const (
	claiming place = iota // its put is asking the store for the claim
	returned              // the three pending lists, in the order in which they are served
	fresh
	retry
	slotted // waiting in an open window
	leased
	dead
	gone // acked, dropped, gated: only the generation is remembered, for a while; but see kept
)

const pendingLists = int(retry) + 1

// ending says why a sample is gone.
type ending uint8

const (
	acked ending = iota
	droppedByHand
	gatedOut
	tailDropped
	forgotten // a dead letter beyond the list
)

// sample is what the queue knows of one put.
type sample struct {
	ref        sluice.Ref // zero once the claim was given up
	id, gen    string
	key        uint64 // putKey of those
	seq        int64  // put order
	bytes      int64
	tokens     int64
	supervised int64
	at         int64 // when it died or went
	lsn        uint64

	prev, next *sample // of the list that it is in

	lease *lease // its own live lease
	slot  *slot  // its place in an open window
	info  *rare

	fails, expiries, deliveries int32
	gates                       uint32 // the version gates that it was checked against
	pads                        int32  // pad leases on it
	place                       place
	ending                      ending
	spare                       bool // keeps its claim for the pads of its window
	freed                       bool // the claim was given up
	kept                        bool // gone, but the claim was not
}

// rare holds what few samples need.
type rare struct {
	reasons []string
	claimed chan struct{} // closed when the claim was decided; for a put of the same id meanwhile
	busy    bool          // somebody makes its store calls
	calls   []storeCall   // those still to be made
}

func (s *sample) rare() *rare {
	if s.info == nil {
		s.info = new(rare)
	}
	return s.info
}

func (s *sample) reasons() []string {
	if s.info == nil {
		return nil
	}
	return s.info.reasons
}

// live reports whether the sample is pending, leased or dead with its bytes.
func (s *sample) live() bool { return s.place != gone && (s.place != dead || !s.freed) }

func (q *Queue) newSample(ref sluice.Ref) *sample {
	s := q.spareSample
	if s == nil {
		s = new(sample)
	}
	q.spareSample = nil
	*s = sample{ref: ref, id: ref.SampleID(), gen: ref.Generation(), bytes: ref.EstimatedBytes(), tokens: ref.NumTokens()}
	s.key = q.putKey(s.id, s.gen)
	return s
}

// sampleList is a doubly linked list of samples; a sample is in one at most.
type sampleList struct {
	head, tail *sample
	n          int
}

func (l *sampleList) pushBack(s *sample) {
	s.prev, s.next = l.tail, nil
	if l.tail == nil {
		l.head = s
	} else {
		l.tail.next = s
	}
	l.tail = s
	l.n++
}

func (l *sampleList) pushFront(s *sample) {
	s.prev, s.next = nil, l.head
	if l.head == nil {
		l.tail = s
	} else {
		l.head.prev = s
	}
	l.head = s
	l.n++
}

func (l *sampleList) remove(s *sample) {
	if s.prev == nil {
		l.head = s.next
	} else {
		s.prev.next = s.next
	}
	if s.next == nil {
		l.tail = s.prev
	} else {
		s.next.prev = s.prev
	}
	s.prev, s.next = nil, nil
	l.n--
}
