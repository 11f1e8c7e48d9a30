package main

import (
	"context"
	"strings"
	"testing"

	"github.com/sluice-ml/sluice/internal/demo"
)

// It replaces what the command runs, so it is not parallel.
func TestDemoEndsWithZeroOnlyIfTheStreamWasRight(t *testing.T) {
	defer func(f func(context.Context, demo.Options) (*demo.Result, error)) { runDemo = f }(runDemo)
	good := demo.Result{Produced: 3, Acked: 3, Parity: "bit-exact", StepsPerRank: []int64{1}}
	for name, tc := range map[string]struct {
		spoil func(*demo.Result)
		want  int
	}{
		"right":  {func(*demo.Result) {}, 0},
		"lost":   {func(r *demo.Result) { r.Lost = 1 }, 1},
		"parity": {func(r *demo.Result) { r.Parity = "s-1: differs" }, 1},
		"dead":   {func(r *demo.Result) { r.Dead = 1 }, 1},
	} {
		r := good
		tc.spoil(&r)
		runDemo = func(context.Context, demo.Options) (*demo.Result, error) { return &r, nil }
		var stdout, stderr strings.Builder
		if got := Main([]string{"demo", "--json"}, &stdout, &stderr); got != tc.want || tc.want != 0 && !strings.Contains(stderr.String(), "the stream was not right") || !strings.HasPrefix(stdout.String(), "{") || strings.Count(stdout.String(), "\n") != 1 {
			t.Errorf("%s: status %d, want %d\n%s%s", name, got, tc.want, stdout.String(), stderr.String())
		}
	}
}
