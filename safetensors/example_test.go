package safetensors_test

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/safetensors"
)

func Example() {
	dir, err := os.MkdirTemp("", "")
	if err != nil {
		panic(err)
	}
	defer os.RemoveAll(dir)
	f, err := os.Create(filepath.Join(dir, "r1-0-17.safetensors"))
	if err != nil {
		panic(err)
	}
	defer f.Close()

	features := []sluice.Feature{
		{Name: "input_ids", Tensor: sluice.TensorOf(sluice.Int64, []int64{10, 11, 12}, 1, 3)},
		{Name: "loss_mask", Tensor: sluice.TensorOf(sluice.Int64, []int64{0, 1, 1}, 1, 3)},
	}
	layout, err := safetensors.NewLayout(features, map[string]string{"producer": "example"})
	if err != nil {
		panic(err)
	}
	if err := layout.WriteFile(f, 0, features); err != nil {
		panic(err)
	}

	m, err := safetensors.Map(f, layout.Size())
	if err != nil {
		panic(err)
	}
	defer m.Close()
	ids, err := m.Feature("input_ids")
	if err != nil {
		panic(err)
	}
	fmt.Println(ids.Spec, sluice.View[int64](ids.Tensor), m.Header().Metadata)
	// Output: int64[1,3] [10 11 12] map[producer:example]
}

// The whole layout is known before the target has computed anything.
func ExampleNewLayout() {
	layout, err := safetensors.NewLayout([]sluice.Feature{
		{Name: "input_ids", Tensor: sluice.Tensor{Spec: sluice.Spec{Shape: []int64{1, 2048}, DType: sluice.Int64}}},
		{Name: "last_hidden_states", Tensor: sluice.Tensor{Spec: sluice.Spec{Shape: []int64{1, 2048, 4096}, DType: sluice.BFloat16}}},
	}, nil)
	if err != nil {
		panic(err)
	}
	at, _ := layout.Offset("last_hidden_states")
	fmt.Println(layout.Size(), at)
	// Output: 16793792 16576
}

// Data that moves by other means gets its checksums afterwards: the header's length does not depend on them.
func ExampleLayout_HeaderWithChecksums() {
	features := []sluice.Feature{{Name: "input_ids", Tensor: sluice.TensorOf(sluice.Int64, []int64{10, 11, 12}, 3)}}
	layout, err := safetensors.NewChecksummedLayout(features, nil)
	if err != nil {
		panic(err)
	}
	file := make([]byte, layout.Size())
	at, _ := layout.Offset("input_ids")
	copy(file[at:], features[0].Data)
	head, err := layout.HeaderWithChecksums(map[string]uint32{"input_ids": safetensors.Checksum(features[0].Data)})
	if err != nil {
		panic(err)
	}
	copy(file, head)

	m, err := safetensors.Read(bytes.NewReader(file), layout.Size())
	if err != nil {
		panic(err)
	}
	fmt.Println(m.Verify())
	// Output: true <nil>
}

func ExampleParseHeader() {
	header := `{"logits":{"dtype":"F32","shape":[2,2],"data_offsets":[0,12]}}`
	file := append([]byte{byte(len(header)), 0, 0, 0, 0, 0, 0, 0}, header...)
	_, err := safetensors.ParseHeader(file, int64(len(file))+12)
	fmt.Println(err)
	fmt.Println(errors.Is(err, sluice.ErrCorrupt))
	// Output:
	// safetensors: parse "logits": data_offsets is [0,12], 12 bytes, want 16 for F32[2,2]
	// true
}

func ExampleEncodeChecksums() {
	fmt.Println(safetensors.EncodeChecksums(map[string]uint32{"loss_mask": 1, "input_ids": safetensors.Checksum([]byte("123456789"))}))
	// Output: {"input_ids":"e3069283","loss_mask":"00000001"}
}

// A layout streams to anything that takes bytes, here a buffer in place of a connection; the reader asks for the order
// it wants.
func ExampleLayout_Stream() {
	features := []sluice.Feature{
		{Name: "loss_mask", Tensor: sluice.TensorOf(sluice.Int64, []int64{0, 1, 1}, 1, 3)},
		{Name: "aux_hidden_states", Tensor: sluice.TensorOf(sluice.BFloat16, []uint16{1, 2, 3}, 1, 3, 1)},
	}
	layout, err := safetensors.NewLayout(features, nil)
	if err != nil {
		panic(err)
	}
	var conn bytes.Buffer
	n, err := layout.Stream(&conn, features)
	if err != nil {
		panic(err)
	}
	m, err := safetensors.Read(bytes.NewReader(conn.Bytes()), n)
	if err != nil {
		panic(err)
	}
	got, err := m.Features([]string{"aux_hidden_states", "loss_mask"})
	if err != nil {
		panic(err)
	}
	for _, f := range got {
		fmt.Println(f.Name, f.Spec)
	}
	// Output:
	// aux_hidden_states bfloat16[1,3,1]
	// loss_mask int64[1,3]
}

// Offsets in a header count from DataStart, so that a single tensor can be fetched by a range of the file.
func ExampleMapping_Header() {
	features := []sluice.Feature{{Name: "input_ids", Tensor: sluice.TensorOf(sluice.Int64, []int64{10, 11, 12}, 3)}}
	layout, err := safetensors.NewLayout(features, map[string]string{"producer": "example"})
	if err != nil {
		panic(err)
	}
	var file bytes.Buffer
	if _, err := layout.Stream(&file, features); err != nil {
		panic(err)
	}
	m, err := safetensors.Read(bytes.NewReader(file.Bytes()), int64(file.Len()))
	if err != nil {
		panic(err)
	}
	defer m.Close()
	h := m.Header()
	e, _ := h.Find("input_ids")
	fmt.Println(e.RawDType, e.Spec.Shape, h.DataStart+e.Begin, e.Bytes(), h.Metadata)
	// Output: I64 [3] 128 24 map[producer:example]
}
