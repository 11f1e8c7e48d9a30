// Package service is the daemon: runs that many processes and machines share over HTTP.
//
// A [Service] owns a state directory, with a journal for every run, and a store root, with a folder of sample files for every run. Over both it keeps one queue and one store a run, and it answers the
// calls that package wire has the words of: a run is created, room is reserved, a sample is uploaded or staged, committed, leased, read, settled.
//
// What it knows survives it. Runs are listed in a journal of their own; refs, leases, dead letters, windows and positions are in those of the queues; sample files explain
// themselves. A service that was killed starts again on what lies there: runs open side by side, each answers as soon as it is open, and until then it is unavailable, which is never the
// end of a stream.
//
// What callers hold beside leases (reservations, samples that were uploaded and not committed, pins) lives in memory and has an end: that of the session, a client process that holds
// a connection open, or a time. Samples that were found uncommitted after a restart get that time too.
//
// The handler has no door. Whoever serves it finds out who calls, with package access, and every operation says which roles it is for.
//
// Every failure is answered with a problem document and a stable code. Bad input is never a 500 and changes nothing.
package service
