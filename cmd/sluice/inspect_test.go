package main

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/hex"
	"math"
	"os"
	"strconv"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/store/dirstore"
)

// sampleStore makes a store with caps in DIR: "a" claimed by queue-1, "b" a dead letter of it, "c" unclaimed. With "nan", one value of a is NaN and one infinite. With "live", the session stays open until
// the script ends, holding a pin on c, a released sample "d", and a reservation.
func sampleStore(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) == 0 {
		ts.Fatalf("usage: samplestore DIR [nan] [live]")
	}
	has := func(word string) bool { return bytes.Contains([]byte(" "+joined(args[1:])+" "), []byte(" "+word+" ")) }
	ctx := context.Background()
	s, err := dirstore.Open(ts.MkAbs(args[0]), &dirstore.Options{Caps: sluice.Caps{MaxBytes: 8 << 10, MaxSamples: 8}, Verify: true})
	ts.Check(err)
	ts.Defer(func() { ts.Check(s.Close()) })
	put := func(id string, nan bool) sluice.Ref {
		const S, H = 4, 8
		hidden := make([]float32, S*H)
		for i := range hidden {
			hidden[i] = float32(i) - 8
		}
		if nan {
			hidden[3], hidden[5] = float32(math.NaN()), float32(math.Inf(1))
		}
		ints := func(v ...int64) sluice.Tensor { return sluice.TensorOf(sluice.Int64, v, 1, S) }
		ref, err := s.Put(ctx, &sluice.Sample{SampleID: id, RunID: "run-1", Algorithm: sluice.EAGLE3, SchemaVersion: 1, NumTokens: S,
			Attributes: map[string]string{"shift": "0", "aux_layers": "hf:1,2", "last_norm": "post"},
			Features: []sluice.Feature{
				{Name: "input_ids", Tensor: ints(5, 6, 7, 8)}, {Name: "attention_mask", Tensor: ints(1, 1, 1, 1)}, {Name: "loss_mask", Tensor: ints(0, 0, 1, 1)},
				{Name: "aux_hidden_states", Tensor: sluice.NewTensor(sluice.BFloat16, 1, S, 2*H)},
				{Name: "last_hidden_states", Tensor: sluice.TensorOf(sluice.Float32, hidden, 1, S, H)},
			}}, sluice.Reservation{})
		ts.Check(err)
		return ref
	}
	a, b, c := put("a", has("nan")), put("b", false), put("c", false)
	ts.Check(s.Claim(a, "queue-1"))
	ts.Check(s.Claim(b, "queue-1"))
	ts.Check(s.MarkDead(b, "queue-1", true))
	if !has("live") {
		ts.Check(s.Close())
		return
	}
	hold := func(ref sluice.Ref) {
		tensors, err := s.Get(ctx, ref)
		ts.Check(err)
		ts.Defer(func() { ts.Check(tensors.Release(ctx)) })
	}
	d := put("d", false)
	hold(c)
	hold(d)
	ts.Check(s.Abort(ctx, d))
	_, err = s.Reserve(ctx, 1000)
	ts.Check(err)
}

func joined(words []string) (s string) {
	for _, w := range words {
		s += " " + w
	}
	return s
}

// editBytes damages and makes binary files: bytes flip FILE AT, with AT from the end if negative; bytes cut FILE SIZE; bytes safetensors FILE HEADER HEX.
func editBytes(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) < 3 {
		ts.Fatalf("usage: bytes flip|cut|safetensors FILE ...")
	}
	path := ts.MkAbs(args[1])
	number := func() int64 {
		n, err := strconv.ParseInt(args[2], 10, 64)
		ts.Check(err)
		return n
	}
	switch args[0] {
	case "flip":
		f, err := os.OpenFile(path, os.O_RDWR, 0) // in place: the store knows the inode
		ts.Check(err)
		at := number()
		if at < 0 {
			info, err := f.Stat()
			ts.Check(err)
			at += info.Size()
		}
		b := make([]byte, 1)
		_, err = f.ReadAt(b, at)
		ts.Check(err)
		_, err = f.WriteAt([]byte{b[0] ^ 1}, at)
		ts.Check(err)
		ts.Check(f.Close())
	case "cut":
		ts.Check(os.Truncate(path, number()))
	case "safetensors":
		data, err := hex.DecodeString(args[3])
		ts.Check(err)
		file := binary.LittleEndian.AppendUint64(nil, uint64(len(args[2])))
		ts.Check(os.WriteFile(path, append(append(file, args[2]...), data...), 0o600))
	default:
		ts.Fatalf("bytes: unknown word %q", args[0])
	}
}
