// Package dirstore is a [sluice.ClaimStore] in a directory that the processes of one host share: on tmpfs, ext4, xfs, btrfs or overlay. Samples are
// safetensors files, one each, readable by any safetensors library; get maps them privately, so nothing is copied.
//
//	s, err := dirstore.Open("/dev/shm/sluice/r1", &dirstore.Options{Caps: sluice.Caps{MaxBytes: 8 << 30}})
//
// Who holds what is written in a ledger, a file in the directory that every session maps: a slot a sample or reservation, an entry a pin, and
// totals. So all processes see one truth at once: a release here is room there. Changes are made under a file lock, [Store.Health] reads the totals without it.
//
// Every Open is a session: a lock that the kernel drops when the process dies, however it dies. Whoever finds a session's lock gone ends it:
// its pins, reservations and half-written files go, the samples that it had put and nobody claimed are freed by GC after 60 s, and those that are claimed stay. A
// session that closes leaves its samples in the same way. Claims belong to a name, not to a session. DESIGN.md in this folder has the layout and the argument
// for a kill at any instruction.
//
// A mapping is no snapshot: it shows what the file holds. So a published file is never written to while anyone may have it mapped. A reader takes a shared lock
// on the file before it maps, and the kernel keeps that lock as long as the mapping; on overlay, where it does not, the store keeps the
// descriptor instead, and Open finds out which by trying. A freed file is kept and overwritten by a later put, which is half as fast
// again as a fresh one, only under the exclusive lock and if every handle and mapping of it was given back by its own session. Readers from outside, such as the Python
// package, take no lock: they must hold flock(LOCK_SH) on the file, or a handle, while they have it mapped.
//
// Samples also come in as safetensors streams ([Store.Receive]) and as files that a process of this host wrote ([Store.Adopt]), and are lent to readers outside of
// the process ([Store.Lend]): that is what a service is built on.
//
// On disks every feature carries a crc32c, which the first get after a restart checks; a restart is an Open that finds no other session. tmpfs carries none, unless
// Options.Verify asks for it or the sample came as a stream. Options.Durability says whether a put survives a power cut. The ledger itself is not synced: what it lost to a power cut is found again
// in the files, as samples without an owner, which a recovering queue may claim for a day.
//
// GC removes half-written files of dead sessions, unclaimed samples of sessions that have been gone for 60 s, files without an owner after a day, and
// files whose unlink failed before. It does not touch files that are not ours: other names, and safetensors files that carry no ref.
//
// The directory must be ours and 0700; files are 0600. A network file system is refused, since neither locks nor the mapped ledger can be trusted across hosts: run the service
// there. The package works on Linux only; elsewhere Open fails with ErrUnsupported.
//
// Two limits: a process that is stopped (SIGSTOP) in the microseconds in which it holds the ledger's lock stops the others until it goes on or is killed; and the directory has
// one name, so a container that mounts it elsewhere sees another store URI.
package dirstore
