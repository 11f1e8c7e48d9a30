package queuetest

import "github.com/sluice-ml/sluice"

var schema = func() *sluice.Schema {
	s, err := sluice.ParseSchema([]byte(`{"name":"bytes","version":1,"features":[{"name":"x","axes":["N"],"dtypes":["bool"],"required":true}]}`))
	if err != nil {
		panic(err)
	}
	return s
}()

// Schema is the schema of the samples that this package makes: one feature x of bytes.
func Schema() *sluice.Schema { return schema }

// NewRef returns a ref of a sample of the given size in a generation of its own; edit, if not nil, may change its fields.
func NewRef(storeURI, runID, id string, bytes int64, edit func(*sluice.RefFields)) sluice.Ref {
	f := sluice.RefFields{
		SampleID: id, RunID: runID, StoreURI: storeURI, Generation: sluice.NewGeneration(),
		Features:  []sluice.RefFeature{{Name: "x", Key: "x", Spec: sluice.Spec{Shape: []int64{bytes}, DType: sluice.Bool}}},
		Algorithm: "bytes", SchemaVersion: 1, NumTokens: 10, EstimatedBytes: bytes, TargetModelVersion: "0", DraftWeightVersion: "0",
	}
	if edit != nil {
		edit(&f)
	}
	ref, err := sluice.NewRef(f)
	if err != nil {
		panic(err)
	}
	return ref
}

// NewSample returns a sample of the given size for a store's Put.
func NewSample(runID, id string, bytes int64) *sluice.Sample {
	return &sluice.Sample{
		SampleID: id, RunID: runID, Algorithm: "bytes", SchemaVersion: 1, NumTokens: 10,
		Features: []sluice.Feature{{Name: "x", Tensor: sluice.NewTensor(sluice.Bool, bytes)}},
	}
}
