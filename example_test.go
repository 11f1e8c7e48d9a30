package sluice_test

import (
	"errors"
	"fmt"

	"github.com/sluice-ml/sluice"
)

func ExampleParseRef() {
	ref, err := sluice.ParseRef([]byte(`{"sample_id":"r1-0-17","run_id":"r1","store_uri":"mem:1","generation":"6f1c","features":[
		{"name":"hidden_states","key":"r1-0-17/hidden_states","shape":[1,2,8],"dtype":"bfloat16"},
		{"name":"input_ids","key":"r1-0-17/input_ids","shape":[1,2],"dtype":"int64"}],
		"algorithm":"mine","schema_version":1,"num_tokens":2,"estimated_bytes":48,"target_model_version":"0","draft_weight_version":"0","attributes":{"shift":"0"}}`))
	if err != nil {
		fmt.Println(err)
		return
	}
	shift, _ := ref.Attribute("shift")
	fmt.Println(ref)
	fmt.Println(ref.FeatureNames(), "shift", shift)
	// Output:
	// r1/r1-0-17 (mine, 2 features, 2 tokens, 48 bytes)
	// [hidden_states input_ids] shift 0
}

func ExampleSchema_Validate() {
	schema, err := sluice.ParseSchema([]byte(`{"name": "mine", "version": 1,
		"features": [
			{"name": "hidden_states", "from": "aux", "axes": ["B", "S", "K*H"], "dtypes": ["float32"], "required": true},
			{"name": "input_ids", "from": "input_ids", "axes": ["B", "S"], "dtypes": ["int64"], "required": true}],
		"attributes": [{"name": "aux_layers", "required": true, "pattern": "hf:[0-9]+(,[0-9]+)*", "counts": "K"}]}`))
	if err != nil {
		fmt.Println(err)
		return
	}
	sample := sluice.Sample{SampleID: "s-1", RunID: "r", Algorithm: "mine", SchemaVersion: 1, NumTokens: 2,
		Attributes: map[string]string{"aux_layers": "hf:1,3,4"},
		Features: []sluice.Feature{
			{Name: "hidden_states", Tensor: sluice.NewTensor(sluice.Float32, 1, 2, 8)},
			{Name: "input_ids", Tensor: sluice.TensorOf(sluice.Int64, []int64{5, 6}, 1, 2)},
		}}
	fields, err := sample.RefFields("mem:1", sluice.NewGeneration())
	if err != nil {
		fmt.Println(err)
		return
	}
	ref, err := sluice.NewRef(fields)
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(schema.Validate(ref))
	// Output:
	// schema mine "s-1": feature "hidden_states" is float32[1,2,8]: axis K*H is 8, which is no multiple of 3
}

func ExampleAssertNoTensors() {
	message := map[string]any{"refs": []any{"s-1", sluice.NewTensor(sluice.Float32, 4)}}
	fmt.Println(sluice.AssertNoTensors(message, "message"))
	// Output:
	// assert no tensors "message["refs"][1]": a tensor (sluice.Tensor); the control plane carries refs only
}

func ExampleError() {
	_, err := sluice.Caps{MaxBytes: 1 << 30, HighWatermarkBytes: 2 << 30}.Resolve()
	fmt.Println(errors.Is(err, sluice.ErrInvalid), sluice.KindOf(err))
	fmt.Println(err)
	// Output:
	// true invalid
	// caps "high_watermark_bytes": is 2147483648, want 1 to max_bytes (1073741824)
}

func ExampleRunConfig_Resolve() {
	schema, err := sluice.SchemaOf(sluice.EAGLE3)
	if err != nil {
		fmt.Println(err)
		return
	}
	run := sluice.RunConfig{RunID: "r1", Schema: schema, Caps: sluice.Caps{MaxSamples: 8}, Windows: &sluice.Windows{Ranks: 2, PerRank: 2, Prefetch: 1}}
	_, err = run.Resolve()
	fmt.Println(err)
	// Output:
	// run "r1": max_samples is 8, but 2 windows of 4 samples and one more hold 9 samples; set it to 9 or more
}
