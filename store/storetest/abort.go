package storetest

import (
	"testing"

	"github.com/sluice-ml/sluice"
)

var abortTests = []test{
	{"AbortFreesWhatNobodyOwns", 0, func(t *testing.T, k *kit) {
		s := k.open(t, roomy)
		ref, kept := mustPut(t, s, eagle("s-1", 1)), mustPut(t, s, eagle("s-2", 2))
		for range 2 { // the second finds nothing, which is what was asked for
			noError(t, "Abort", s.Abort(bg, ref))
			wantHealth(t, "after Abort", s, held(kept))
			wantListed(t, "after Abort", s, kept)
		}
		_, err := s.Get(bg, ref)
		wantError(t, "Get after Abort", err, sluice.ErrNotFound)
		mustPut(t, s, eagle("s-1", 3))
	}},
	{"AbortOfAPinnedSampleKeepsItsBytesForTheHolder", 0, func(t *testing.T, k *kit) {
		s := k.open(t, roomy)
		sample := sampleSized("s-1", 1, 70_000)
		ref := mustPut(t, s, sample)
		ts := mustGet(t, s, ref)
		noError(t, "Abort", s.Abort(bg, ref))
		_, err := s.Get(bg, ref)
		wantError(t, "Get after Abort", err, sluice.ErrNotFound)
		wantListed(t, "after Abort", s)
		wantHealth(t, "aborted but pinned", s, held(ref))
		again := mustPut(t, s, sampleSized("s-1", 2, 70_000))
		wantFeatures(t, "the holder's tensors", ts.Features, sample.Features)
		noError(t, "Release", s.Release(bg, ts.Handle))
		if !k.h.Detached {
			wantHealth(t, "aborted, released but mapped", s, held(ref, again))
		}
		wantFeatures(t, "the holder's tensors", ts.Features, sample.Features)
		noError(t, "Tensors.Close", ts.Close())
		wantHealth(t, "after Tensors.Close", s, held(again))
		wantRead(t, s, again, sampleSized("s-1", 2, 70_000).Features)
	}},
	{"AbortOfAPinnedSampleWithClosedTensorsWaitsForTheRelease", 0, func(t *testing.T, k *kit) {
		s := k.open(t, roomy)
		ref := mustPut(t, s, eagle("s-1", 1))
		ts := mustGet(t, s, ref)
		noError(t, "Tensors.Close", ts.Close())
		noError(t, "Abort", s.Abort(bg, ref))
		wantHealth(t, "aborted but pinned", s, held(ref))
		noError(t, "Release", s.Release(bg, ts.Handle))
		wantHealth(t, "at the end", s, held())
	}},
	{"AbortOfAClaimedSampleIsRefused", claims, func(t *testing.T, k *kit) {
		s := k.openClaims(t, roomy)
		ref := mustPut(t, s, eagle("s-1", 1))
		noError(t, "Claim", s.Claim(ref, "queue-1"))
		before := look(t, s)
		wantError(t, "Abort of a claimed sample", s.Abort(bg, ref), sluice.ErrConflict, `"s-1"`, "queue-1")
		before.wantSame(t, "a refused Abort", s)
		wantRead(t, s, ref, eagle("s-1", 1).Features)
	}},
}
