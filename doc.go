// Package sluice is the domain of Sluice: the channel between a large frozen target model and the trainers of a small draft model in
// speculative-decoding training. It holds the words and the contracts, and imports nothing but the standard library; reading it is understanding the system.
//
// The target's supervision (hidden states, logits) is cut into samples. Each sample is split in two: its tensors go into a [Store], the data plane; its [Ref],
// which describes them and carries none, goes through a [Queue], the control plane. Producers and consumers run at their own pace, and a [Gate] paces the producers
// between two marks *before* they spend a forward on a sample that has no room.
//
//	target -> Producer --reserve--> Gate
//	              |--put tensors--> Store <--get, release--|
//	              |--put ref------> Queue --lease, settle--> Loader -> trainer
//
// What makes that safe:
//
//   - A sample has at most one claim, its queue's, and any number of pins, the handles. Its bytes are free when neither is left.
//   - A lease is a right with an end: it runs out by itself, and its random id makes a late settlement harmless.
//   - Every put has a fresh generation, so that a ref never reads a later put of the same id.
//   - What silently ruins training (layer numbering, norm state, shift, packing) is data: a [Schema] says what a sample must say of itself, and refs that do not are refused.
//
// The backends live in folders of their own (store/, queue/, target/) and pass the conformance suites beside them; package stream joins them into a
// producer, a pipeline and a loader.
//
// Errors are *[Error] values with a closed set of kinds; act on the kind with [errors.Is].
package sluice
