package access

import (
	"sync"
	"time"
)

const (
	failBurst   = 20              // failed tries that an address has at once
	failEvery   = 3 * time.Second // and then one in this time
	maxFailures = 4096            // addresses remembered; beyond that, all new ones count as one

	sweepFailures = failBurst * failEvery // by then the oldest are forgiven
)

// failures counts failed tries by where they come from.
type failures struct {
	mu    sync.Mutex
	from  map[string]*allowance
	swept time.Time
}

// allowance is full again when the time of its debt is over.
type allowance struct{ clear time.Time }

// allow notes a failed try and says whether it is one that may be answered as such.
func (f *failures) allow(from string) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	now := time.Now()
	if f.from == nil {
		f.from = map[string]*allowance{}
	}
	if now.Sub(f.swept) >= sweepFailures {
		f.swept = now
		for k, a := range f.from {
			if a.clear.Before(now) {
				delete(f.from, k)
			}
		}
	}
	if f.from[from] == nil && len(f.from) >= maxFailures {
		from = "others"
	}
	a := f.from[from]
	if a == nil {
		a = &allowance{}
		f.from[from] = a
	}
	if a.clear.Before(now) {
		a.clear = now
	}
	if a.clear.Sub(now) > (failBurst-1)*failEvery {
		return false
	}
	a.clear = a.clear.Add(failEvery)
	return true
}
