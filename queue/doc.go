// Package queue is the control plane of a run: the one state machine behind sluice.Queue. It decides who trains on which sample, when a
// sample is tried again, when it is given up, and when the stream is over; it never touches a tensor.
//
// # How it works
//
// Everything lives in memory behind one mutex. A call is a command: it is checked against the state, and what it decides is written down as records
// (a put, a lease, the end of a lease, a window). Applying a record is the only thing that changes the state that must survive, so replaying a
// journal is the same code as running. Records say what was decided, in absolute terms ("retry, third fail"), never what was asked: a replay decides nothing,
// and it comes out right although the journal may have lost records marked lazy.
//
// With a [sluice.Journal] a reply waits until the records it rests on are durable. Whatever calls come in while an Append is under way share
// the next one. What must not happen before a record is durable (freeing bytes, above all) happens after it. When the journal fails, the
// queue answers ErrUnavailable until it is opened again. Without a journal nothing is encoded.
//
// # Order
//
// There are three lists of pending samples, served in this order: returned unused, waiting for the first try, to be tried again. Leases of one
// timeout run out in the order in which they were given or renewed, so a plain list for each timeout that is in use serves as the timing structure. One
// timer is armed, at the earliest deadline of whatever kind. A waiting acquire is handed its lease by whoever makes one available; nothing polls
// and nobody wakes in vain.
//
// # Windows
//
// In a run with windows, samples are dealt in put order: the place i of a window belongs to rank i mod ranks, so that every rank's share is in put order too. No rank gets
// anything of a window before every rank was given all of its share of the window before, hence delivered counts never differ by more than one rank's
// share of a window. At most 1 + Prefetch windows (or StepsPerCheckpoint + Prefetch) are open at once. A place whose sample died is filled by leasing
// another sample of the window again, marked as pad; for this, one sample of an open window keeps its claim after its ack. If all samples of a window
// are dead, each place has been delivered once and the rest of it is skipped, for all ranks alike.
//
// # What is decided here because the contract leaves it open
//
// A replica group's lease ends when all members have spoken, by the severest verdict: a permanent failure over a failure over a return over an ack. The
// bytes that a pad needs stay claimed until its lease has ended. Requeued dead letters are dealt to later windows. A member of a
// group that has settled its part of every lease is told of the end only when no lease is left, since another member may still fail one. Consumers that have
// left stay known, as a fence against their old incarnations, until a thousand others have left after them. See also the fields of [Options].
package queue
