// Package stream joins a target, a store and a queue: what the target computes on one side becomes batches for a trainer on the other.
//
//	Source -> Producer (admit, reserve, forward, check, put) -> Pipeline -> Queue
//	Queue -> Loader (acquire, get, check, collate) -> Batch -> trainer -> ack
//
// Nothing here knows an algorithm by name. A [sluice.Schema] says which outputs of the target become which features, which rows are worth a
// sample, what is shifted in a batch, and which attributes a sample must carry; a new schema document is a new algorithm.
//
// # Alignment
//
// Samples are stored unshifted: row t of every feature belongs to position t, and the attribute "shift" says "0". The one place where anything is
// shifted, padded or packed is [Collate]. There a feature that the schema flags moves left by one along the sequence, zeros at the tail:
//
//	input_ids  10 11 12 13 14 15  becomes  11 12 13 14 15 0
//	loss_mask   0  0  0  1  1  1  becomes   0  0  1  1  1 0
//
// Samples of other producers that come shifted say "1" and are taken as they are, mask and all. Where the schema declares no attribute "shift", or shifts no feature, a sample that says nothing
// says "0".
//
// Norm is settled in the same place. A sample says in the attribute "last_norm" whether its last hidden state is "pre" or "post" the target's final norm. Where the schema wants
// post and the sample says pre, the state is normed if there is a [FinalNorm], once, and refused if there is none.
//
// # Rows, documents and what is supervised
//
// The first token of a document is predicted by nothing, so it never counts as supervised. Rows that were packed by the producer are shifted over the whole row, as upstream
// does, but loss_mask and position_mask become 0 in each document's last slot, so that no document supervises the first token of the next. Where
// the loader packs, each row's real tokens are shifted before they are joined, and nothing crosses at all.
//
// Upstream itself leaves the boundaries as they fall: in the packed rows that it shifted, a document's last slot may supervise the next one's first token. Such rows are
// trained on as their masks have it, and [Batch].SupervisedTokens counts what the masks supervise.
//
// # Ownership
//
// A [Batch] belongs to the caller of [Loader.Next] until the next call that settles it; then its tensors are gone. Its leases are
// renewed behind the trainer's back for as long as the trainer shows signs of life. Every sample ends in exactly one of three ways: acknowledged, failed, or returned unused.
//
// # Endings
//
// A [Pipeline] that runs out of prompts tells the queue so, and consumers see [io.EOF] behind the drain. One that fails tells the queue why, and consumers get that error
// instead: an epoch that was cut off by a failure never looks like a complete one. A deliberate [Pipeline.Stop] is no failure but a regular end: the queue closes without a cause, when
// all of the run's producers have ended, and consumers see io.EOF behind what was enqueued. Whoever stops a pipeline for another to go on in its place says so by PipelineOptions.LeaveOpen.
// Whatever was produced but did not reach the queue is taken out of the store again.
//
// Ending does not wait for a service that is away: [Loader.Close] and [Loader.CloseWithError] take 5 seconds in all, also under a context without a deadline; a [Pipeline] that is
// stopped gives 5 seconds to taking a sample back and 5 to its last report. Leases that were not given back run out by themselves, or end with their client's session. A program that
// ends by [os/signal.NotifyContext] calls its stop once the context is done, so that a second ^C ends it at once.
//
// All errors are [*sluice.Error] values, or wrap one, or are the context's. Retries, skips and losses are reported as [Event] values.
package stream
