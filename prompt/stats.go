package prompt

import "maps"

// Reason says why a line gave no row. The texts are stable.
type Reason string

const (
	Taken        Reason = "taken"        // Options.Skip said that it was taken before
	Bad          Reason = "bad"          // a bad line, under SkipBad
	Long         Reason = "long"         // above MaxTokens, under SkipLong
	Short        Reason = "short"        // below MinTokens
	Unsupervised Reason = "unsupervised" // no supervised token is left, apart from the first, which nothing comes before
)

// Stats are a Reader's counts since Open.
type Stats struct {
	Lines      int64            // lines that were looked at, blank ones aside
	Bytes      int64            // bytes of the files read, at most EpochBytes an epoch
	EpochBytes int64            // size of all files: what one epoch reads
	Epoch      int64            // the epoch that is being read
	Batches    int64            // batches handed out
	Rows       int64            // rows (packed: documents) handed out
	Tokens     int64            // their tokens, without padding
	Supervised int64            // their tokens with a loss mask of 1
	Padding    int64            // padding handed out with them
	Truncated  int64            // rows cut at MaxTokens, whether they were then kept or not
	Skipped    map[Reason]int64 // lines that gave no row, by reason
}

// Bad is the number of bad lines that were skipped.
func (s Stats) Bad() int64 { return s.Skipped[Bad] }

// Stats returns the counts up to now. It may be called at any time, from any goroutine, and is not held up by Next.
func (r *Reader) Stats() Stats {
	r.statsMu.Lock()
	defer r.statsMu.Unlock()
	s := r.stats
	s.Bytes = r.bytes.Load()
	s.Skipped = maps.Clone(s.Skipped)
	return s
}
