package fakeclock

import (
	"slices"
	"testing"
	"time"
)

func TestClockCallsWhatFallsDueInOrder(t *testing.T) {
	c := New()
	start := c.Now()
	var calls []string
	c.AfterFunc(3*time.Second, func() { calls = append(calls, "third") })
	c.AfterFunc(time.Second, func() {
		calls = append(calls, "first at "+c.Now().Sub(start).String())
		c.AfterFunc(time.Second, func() { calls = append(calls, "second") })
	})
	stop := c.AfterFunc(time.Second, func() { t.Error("a stopped call ran") })
	if !stop() || stop() {
		t.Error("stop: want true, then false")
	}
	late := c.AfterFunc(5*time.Second, func() { calls = append(calls, "late") })
	c.Advance(4 * time.Second)
	if want := []string{"first at 1s", "second", "third"}; !slices.Equal(calls, want) {
		t.Errorf("calls are %q, want %q", calls, want)
	}
	if got := c.Now().Sub(start); got != 4*time.Second {
		t.Errorf("the clock stands at %v", got)
	}
	c.Advance(time.Second)
	if late() || len(calls) != 4 {
		t.Errorf("calls are %q", calls)
	}
}
