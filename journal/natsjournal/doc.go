// Package natsjournal keeps the journals of queues on NATS JetStream.
//
// [Open] runs a JetStream server inside the process, over a directory of its own and with no port; [Connect] uses one that runs elsewhere. Either way the
// result is a [Journals]: all journals of one service, one a run, each a stream of its own, so that runs neither wait for each other nor share a tail.
//
// # What a message holds
//
// Appends that come while a message is on its way go together into the next one, so that one sync serves many callers. A message carries its place in the
// stream, its writer and a checksum, and asks the server to store it at that place and no other. What does not fit into one message is cut: the parts come
// first, and the last piece makes them count. Records that are lazy wait a moment for company and nobody waits for them.
//
// A snapshot is written the same way, and its last piece, under a subject of its own, is what makes it replace all that came before. Only then is that purged;
// a crash anywhere leaves either the old records or the snapshot.
//
// # Who may write
//
// A directory is owned by the process that holds its lock, which dies with it; a second one is refused (ErrConflict) and told who the first is. At a server
// elsewhere the owner of a prefix renews a record; a second service is refused while that is renewed, and takes over when it has lapsed or was given up. To
// open a journal is to write a message that names the new writer: since every message asks for its place, an earlier writer that was only asleep finds the
// place taken and stores nothing (ErrStale). The same question answers whether a message whose reply was lost has arrived, so none is ever written twice.
//
// # What survives
//
// With [Process], what was acknowledged survives the death of the process; with [Power], a power cut. At a server elsewhere its own settings decide
// (sync_interval, and the replicas of a stream). Beside an embedded server lies, for every journal, the place up to which it was acknowledged: a journal that ends before that,
// or that has a gap, is refused as corrupt rather than replayed with a hole. A disk that is full fails the append (ErrNoSpace) and the journal with it; opening it again, once there is
// room, goes on from what was acknowledged.
package natsjournal
