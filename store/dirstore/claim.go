//go:build linux

package dirstore

import (
	"context"
	"time"

	"github.com/sluice-ml/sluice"
)

// Abort takes the sample away; who has it pinned or mapped keeps it until they give it back.
func (s *Store) Abort(_ context.Context, ref sluice.Ref) error {
	if err := s.enter(context.Background(), "abort"); err != nil {
		return err
	}
	defer s.life.RUnlock()
	if ref.StoreURI() != s.uri {
		return nil
	}
	return s.do(func(l *ledger) error {
		i, sl := l.published(ref.SampleID(), digest(ref.Generation()))
		switch {
		case sl == nil:
			return nil
		case sl.owner != 0:
			return &sluice.Error{Kind: sluice.Conflict, Op: "dirstore: abort", Subject: ref.SampleID(), Detail: "is claimed by " + l.ownerName(sl), Hint: "settle or drop it in that queue"}
		}
		l.evict(i)
		return nil
	})
}

// claimed makes a change to a published sample for an owner.
func (s *Store) claimed(op string, ref sluice.Ref, owner string, change func(l *ledger, i uint32, sl *slot) error) error {
	if err := s.enter(context.Background(), op); err != nil {
		return err
	}
	defer s.life.RUnlock()
	if err := s.claimable(op, ref, owner); err != nil {
		return err
	}
	return s.do(func(l *ledger) error {
		i, sl := l.published(ref.SampleID(), digest(ref.Generation()))
		if sl == nil {
			return notFound(op, ref)
		}
		return change(l, i, sl)
	})
}

// claimable says what is wrong with a claim whatever the ledger says.
func (s *Store) claimable(op string, ref sluice.Ref, owner string) error {
	if n := len(owner); n == 0 || n > maxOwnerBytes {
		return fail(sluice.Invalid, op, ref.SampleID(), "the owner is %d bytes long, want 1 to %d", n, maxOwnerBytes)
	}
	return s.known(op, ref)
}

// Claim takes the sample for an owner. It is kept in the ledger, beyond any session.
func (s *Store) Claim(ref sluice.Ref, owner string) error {
	return s.claimed("claim", ref, owner, func(l *ledger, _ uint32, sl *slot) error { return l.claim(sl, ref, owner) })
}

func (l *ledger) claim(sl *slot, ref sluice.Ref, owner string) error {
	if sl.owner != 0 {
		if have := l.ownerName(sl); have != owner {
			return fail(sluice.Conflict, "claim", ref.SampleID(), "is claimed by %s, not by %s", have, owner)
		}
		return nil
	}
	o, err := l.ownerIndex(owner, true)
	if err != nil {
		return err
	}
	l.point()
	sl.owner = o
	l.point()
	sl.flags &^= flTouched | flAdopted
	return nil
}

// atOnce is how many samples are claimed or unclaimed under the ledger's lock before others get their turn.
const atOnce = 64

// ClaimAll is Claim for many samples, with few changes of the ledger: the lock costs more than a claim. It returns an error, or nil, for each.
func (s *Store) ClaimAll(refs []sluice.Ref, owner string) []error {
	return s.forAll(refs, func(l *ledger, ref sluice.Ref) error {
		if err := s.claimable("claim", ref, owner); err != nil {
			return err
		}
		_, sl := l.published(ref.SampleID(), digest(ref.Generation()))
		if sl == nil {
			return notFound("claim", ref)
		}
		return l.claim(sl, ref, owner)
	})
}

// UnclaimAll is Unclaim for many samples, as ClaimAll is Claim.
func (s *Store) UnclaimAll(refs []sluice.Ref, owner string) []error {
	return s.forAll(refs, func(l *ledger, ref sluice.Ref) error {
		if ref.StoreURI() == s.uri && owner != "" {
			l.unclaim(ref, owner)
		}
		return nil
	})
}

// forAll makes a change for each of the refs, some under one lock.
func (s *Store) forAll(refs []sluice.Ref, change func(*ledger, sluice.Ref) error) []error {
	errs := make([]error, len(refs))
	refuse := func(from int, err error) []error {
		for i := from; i < len(errs); i++ {
			errs[i] = err
		}
		return errs
	}
	if err := s.enter(context.Background(), "claims"); err != nil {
		return refuse(0, err)
	}
	defer s.life.RUnlock()
	for done := 0; done < len(refs); {
		err := s.do(func(l *ledger) error {
			for end := min(done+atOnce, len(refs)); done < end; done++ {
				errs[done] = change(l, refs[done])
			}
			return nil
		})
		if err != nil {
			return refuse(done, err)
		}
	}
	return errs
}

// MarkDead moves a claimed sample to the dead letters, or back.
func (s *Store) MarkDead(ref sluice.Ref, owner string, dead bool) error {
	return s.claimed("mark dead", ref, owner, func(l *ledger, _ uint32, sl *slot) error {
		switch have := l.ownerName(sl); have {
		case owner:
		case "":
			return fail(sluice.Conflict, "mark dead", ref.SampleID(), "is claimed by nobody, want %s", owner)
		default:
			return fail(sluice.Conflict, "mark dead", ref.SampleID(), "is claimed by %s, not by %s", have, owner)
		}
		l.setDead(sl, dead)
		return nil
	})
}

// Unclaim gives a claim up.
func (s *Store) Unclaim(ref sluice.Ref, owner string) error {
	if err := s.enter(context.Background(), "unclaim"); err != nil {
		return err
	}
	defer s.life.RUnlock()
	if ref.StoreURI() != s.uri || owner == "" {
		return nil
	}
	return s.do(func(l *ledger) error { l.unclaim(ref, owner); return nil })
}

func (l *ledger) unclaim(ref sluice.Ref, owner string) {
	i, sl := l.published(ref.SampleID(), digest(ref.Generation()))
	if sl == nil || sl.owner == 0 || l.ownerName(sl) != owner {
		return
	}
	l.setDead(sl, false)
	sl.flags |= flTouched
	l.point()
	sl.owner = 0
	l.point()
	l.settle(i)
}

// Samples reads the ref of every sample from its file. What cannot be read is left out, and logged.
func (s *Store) Samples(ctx context.Context) ([]sluice.SampleInfo, error) {
	return s.SamplesExcept(ctx, func(string) bool { return false })
}

// SamplesExcept is Samples without those whose id the function knows: to list one is to read the head of its file, so who has claimed thousands need not read them all.
func (s *Store) SamplesExcept(ctx context.Context, known func(id string) bool) ([]sluice.SampleInfo, error) {
	if err := s.enter(ctx, "samples"); err != nil {
		return nil, err
	}
	defer s.life.RUnlock()
	if err := s.checkDirectory("samples"); err != nil {
		return nil, err
	}
	type entry struct {
		id         string
		generation [16]byte
		info       sluice.SampleInfo
	}
	var entries []entry
	if err := s.do(func(l *ledger) error {
		for i := range l.slotTop {
			if sl := l.slot(i); sl.state == stPublished && !known(sl.name()) {
				entries = append(entries, entry{sl.name(), sl.generation, sluice.SampleInfo{Owner: l.ownerName(sl), Dead: sl.flags&flDead != 0, Pins: int(sl.pins), Put: time.Unix(0, sl.put)}})
			}
		}
		return nil
	}); err != nil {
		return nil, err
	}
	infos := make([]sluice.SampleInfo, 0, len(entries))
	for _, e := range entries {
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		ref, _, err := s.readRef(e.id)
		switch {
		case err != nil:
			s.log.Warn("dirstore: a sample can't be listed", "dir", s.dir, "sample", e.id, "error", err)
		case digest(ref.Generation()) == e.generation: // otherwise it was freed and put again meanwhile
			e.info.Ref = ref
			infos = append(infos, e.info)
		}
	}
	return infos, nil
}
