// Package client reaches a Sluice service from Go: what a run's producers and trainers hold is a [sluice.Store] and a [sluice.Queue] that happen to be elsewhere, so that
// package stream runs on them as it does in one process.
//
//	c, err := client.Dial(ctx, client.Options{})      // the service of this host, or $SLUICE_URL
//	defer c.Close()
//	run, err := c.Open(ctx, "r1")
//	store, queue := run.Store(), run.Queue()
//
// # Two planes
//
// Refs, leases and settlements are small JSON calls. Tensors take the shortest way there is. A client that reads in a file beside the store the same random id that the service names sees
// the same files: it maps samples under a shared lock, copying nothing, and writes them in one pass into a staging directory, from where the service takes them by name. Any other
// client uploads a file as a stream, and downloads it in parallel ranges into one aligned buffer, going on at the byte where a connection broke, and compares the crc32c of every feature. Why
// samples are not mapped is logged when a run is opened.
//
// # When the service does not answer
//
// Every call carries an id, a generation or an incarnation that makes it safe to say twice, and is said again with growing pauses when its answer was lost, or when the service says that
// it can't answer now, until the context ends or [Options].Patience is over. Then it is ErrUnavailable: a service that restarts is never the end of a stream. A cancelled context
// reaches the service; what a cancelled acquire was given while its answer was on its way is its answer, and what a cancelled reserve was given goes back before the call ends.
//
// # Sessions
//
// A client is one session of the service. It holds a connection open that says it lives; when that is gone for longer than the service's grace (5 s), as after a crash,
// reservations and pins go and the leases of its consumers return to the head. [Client.Close] does the same at once. Tensors that were handed out stay valid until they are closed, whatever happens to
// the service or the session: the kernel keeps a mapping's lock, and a file is overwritten by nobody who does not have it alone.
//
// # Time
//
// Leases come with the time they have left. Their Deadline is by this host's clock, which need not agree with the service's, and counts from when they were asked for and
// the time that the service says it waited: it is never too late, however long the answer was under way.
//
// # Errors
//
// They are those of the contracts, as the service found them: kind, operation, subject and detail cross the wire. ErrDenied is a missing or unknown token or a role that does not suffice,
// ErrUnavailable nobody who answers.
package client
