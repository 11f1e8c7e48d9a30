// Package torture is `sluice torture`: real processes over a real service, killed at random while samples flow, and an audit of what they say.
//
// A process writes down what it is about to do before it does it, and what came of it when it knows, in a book of its own that no kill can tear. When all is over the
// books are joined. They, and not the service's counters, say whether every sample that was put was acked or is accounted for as dead, whether one was acked under two
// leases, whether an ack was forgotten, whether anybody read other bytes than were produced. Then the directories must be empty.
//
// The content of a sample follows from its id, so that a reader can tell whether it has the right one without asking anybody.
//
// An audit that cannot fail proves nothing, so the service has hidden faults (forget an ack, lose a ref, free a sample early) that must turn it red; a test turns them on.
package torture
