// Package prompt makes the token rows that a target is run on out of what people have: JSONL files.
//
// A line is either token ids that are final, with the mask of the tokens that supervise the draft,
//
//	{"input_ids":[1,15,7,9],"loss_mask":[0,0,1,1]}
//
// or, for targets that tokenise ([sluice.Tokenizer]), a conversation under the name conversations or messages, with turns
// written as role and content or, as ShareGPT does, as from and value:
//
//	{"messages":[{"role":"user","content":"Hi"},{"role":"assistant","content":"Hello!"}]}
//	{"conversations":[{"from":"human","value":"Hi"},{"from":"gpt","value":"Hello!"}]}
//
// Other fields are ignored, save one: where a line of ids has an attention_mask, the padding at its right end is cut off, since padding that
// is taken for tokens makes training data that looks right and is not. Field names match exactly, and a field that is given twice is an error.
//
// # Order and positions
//
// Files are streamed. Nothing but one line (or, with Shuffle, one bounded buffer) is ever held, and the first row comes at once, however
// large the files are. With Shuffle the files are cut into blocks, the blocks are visited in an order drawn from the seed
// and the epoch, and the lines pass through a buffer from which they are drawn at random. The order depends on nothing else than the files' names and
// sizes, the seed, the epoch and the three shuffle options; it is the same on every machine. Each line comes exactly once an epoch.
//
// Every row carries its [sluice.Position]: the fingerprint of all that fixes the order, the epoch, and the ordinal of the line in that
// order. Bad lines have ordinals too, so that mending a policy, a limit or the batching never moves a position. A producer that restarts opens the same files with
// Options.Skip, which is asked before a line is parsed, and with Options.FirstEpoch, which saves it from reading the epochs that are through.
//
// # From rows to batches
//
// A row is truncated (or skipped) at MaxTokens, and skipped and counted if it is shorter than MinTokens or leaves nothing to learn. What is admitted goes into
// batches of Rows rows, padded at the right. Bucket puts rows of similar length together, PackTokens puts several documents into one
// row. A batch never mixes epochs, nothing that was admitted is lost, and the grouping is as deterministic as the order.
//
// # Errors
//
// All errors are [sluice.Error] values. A bad line is ErrInvalid and names file, line, field, value and expectation; by default it ends the stream, with
// SkipBad it is counted and reported to Options.OnSkip. A tokenizer's error of another kind than ErrInvalid is no bad line: it ends the stream under its own kind. A file that cannot be opened is ErrNotFound, ErrDenied or ErrInvalid at [Open]; one that shrinks, grows or
// disappears afterwards is ErrCorrupt or ErrNotFound, since positions in it would lie. An epoch without any usable row is ErrInvalid rather than an end of data.
package prompt
