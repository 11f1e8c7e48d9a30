package sluice

import (
	"hash/maphash"
	"maps"
	"slices"
	"strings"
	"sync/atomic"
)

// Thousands of refs may wait in a queue at once, and those of a run are alike in all but the id, the generation and the length. Each therefore takes from one that was made before it what is the
// same in both, and keeps nothing of the text that it was parsed from. That is for memory alone: a ref says the same whatever it shares.

// lately holds the last refs: each at a place that its run and its number of tokens give, on which the shapes hang. Those that meet at one place share less.
var (
	lately     [4096]atomic.Pointer[refData]
	latelySeed = maphash.MakeSeed()
)

// shrink returns what a ref of these fields keeps: a deep copy, with the key left empty of every feature whose key is the sample's id, a slash and the feature's name.
func (f *RefFields) shrink() *refData {
	at := &lately[(maphash.String(latelySeed, f.RunID)+uint64(f.NumTokens))%uint64(len(lately))]
	last := at.Load()
	if last == nil {
		last = &noRef
	}
	d := &refData{f: *f}
	text := f.SampleID + f.Generation
	d.f.SampleID, d.f.Generation = text[:len(f.SampleID)], text[len(f.SampleID):]
	differs := false
	share := func(s, have string) string {
		if s == have {
			return have
		}
		differs = true
		return strings.Clone(s)
	}
	like := &last.f
	d.f.RunID, d.f.StoreURI, d.f.Algorithm = share(f.RunID, like.RunID), share(f.StoreURI, like.StoreURI), Algorithm(share(string(f.Algorithm), string(like.Algorithm)))
	d.f.TargetModelVersion, d.f.DraftWeightVersion = share(f.TargetModelVersion, like.TargetModelVersion), share(f.DraftWeightVersion, like.DraftWeightVersion)
	if len(f.Attributes) > 0 && maps.Equal(f.Attributes, like.Attributes) {
		d.f.Attributes = like.Attributes
	} else {
		d.f.Attributes = f.shrinkAttributes(like)
		differs = true
	}
	if f.sameFeatures(like) {
		d.f.Features = like.Features
	} else {
		d.f.Features = f.shrinkFeatures(like)
		differs = true
	}
	if differs {
		at.Store(d)
	}
	return d
}

// sameFeatures reports whether the features are those of a ref, to the keys.
func (f *RefFields) sameFeatures(like *RefFields) bool {
	if len(f.Features) != len(like.Features) {
		return false
	}
	for i := range f.Features {
		ft, have := &f.Features[i], &like.Features[i]
		if ft.Name != have.Name || !ft.Equal(have.Spec) || have.Key != "" || !f.plain(ft) {
			return false
		}
	}
	return true
}

// shrinkAttributes copies the attributes, with as few strings as can be.
func (f *RefFields) shrinkAttributes(like *RefFields) map[string]string {
	if len(f.Attributes) == 0 {
		return maps.Clone(f.Attributes)
	}
	m := make(map[string]string, len(f.Attributes))
	for k, have := range like.Attributes {
		switch v, ok := f.Attributes[k]; {
		case !ok:
		case v == have:
			m[k] = have
		default:
			m[k] = strings.Clone(v)
		}
	}
	for k, v := range f.Attributes {
		if _, ok := m[k]; !ok {
			m[strings.Clone(k)] = strings.Clone(v)
		}
	}
	return m
}

// shrinkFeatures copies the features with one array for all shapes, and as few strings as can be.
func (f *RefFields) shrinkFeatures(like *RefFields) []RefFeature {
	axes := 0
	for i := range f.Features {
		axes += len(f.Features[i].Shape)
	}
	list, shapes := slices.Clone(f.Features), make([]int64, 0, axes)
	for i := range list {
		ft := &list[i]
		if i < len(like.Features) && like.Features[i].Name == ft.Name {
			ft.Name = like.Features[i].Name
		} else {
			ft.Name = strings.Clone(ft.Name)
		}
		from := len(shapes)
		shapes = append(shapes, ft.Shape...)
		if ft.Shape = shapes[from:len(shapes):len(shapes)]; len(ft.Shape) == 0 {
			ft.Shape = nil
		}
		if f.plain(ft) {
			ft.Key = ""
		} else {
			ft.Key = strings.Clone(ft.Key)
		}
	}
	return slices.Clip(list)
}

// plain reports whether the key of a feature is the usual one.
func (f *RefFields) plain(ft *RefFeature) bool {
	n := len(f.SampleID)
	return len(ft.Key) == n+1+len(ft.Name) && ft.Key[:n] == f.SampleID && ft.Key[n] == '/' && ft.Key[n+1:] == ft.Name
}

// key is a feature's key, in fields that were shrunk.
func (f *RefFields) key(ft *RefFeature) string {
	if ft.Key == "" {
		return f.SampleID + "/" + ft.Name
	}
	return ft.Key
}

// equal compares fields that were shrunk.
func (f *RefFields) equal(g *RefFields) bool {
	return f.SampleID == g.SampleID && f.Generation == g.Generation && f.RunID == g.RunID && f.StoreURI == g.StoreURI && f.Algorithm == g.Algorithm && f.SchemaVersion == g.SchemaVersion &&
		f.NumTokens == g.NumTokens && f.EstimatedBytes == g.EstimatedBytes && f.TargetModelVersion == g.TargetModelVersion && f.DraftWeightVersion == g.DraftWeightVersion &&
		slices.EqualFunc(f.Features, g.Features, func(a, b RefFeature) bool { return a.Name == b.Name && a.Key == b.Key && a.Equal(b.Spec) }) && maps.Equal(f.Attributes, g.Attributes)
}
