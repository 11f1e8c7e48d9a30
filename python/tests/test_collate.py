"""Batches are what PyTorch made of the same samples, and what the contract says."""

from __future__ import annotations

import copy
import json
import pickle
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sluice.collate as collate_module
from sluice import dtypes
from sluice.collate import Batch, BatchSample, Collator, FinalNorm, Identity, Sample, collate
from sluice.errors import CorruptError, InvalidError, SchemaError
from sluice.refs import SampleRef
from sluice.schema import Schema
from sluice.tensorfile import specs_of

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = sorted((ROOT / "stream" / "testdata" / "golden").glob("*.safetensors"))
torch: Any = dtypes.torch_module()
FRAMEWORKS = ["numpy"] if torch is None else ["torch", "numpy"]


def document(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((ROOT / "schemas" / f"{name}.json").read_text())
    return loaded


EAGLE3 = document("eagle3")


# The golden files.


def has_ml_dtypes() -> bool:
    try:
        dtypes.numpy_dtype("bfloat16")
    except NotImplementedError:
        return False
    return True


def tensor(framework: str, dtype: str, shape: Sequence[int], data: bytes) -> Any:
    """A tensor of raw bytes. Where numpy has no bfloat16, float16 of the same bits stands for it: whatever is only moved must keep them."""
    if framework == "torch":
        raw = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.zeros(0, dtype=torch.uint8)
        return raw.view(dtypes.torch_dtype(dtype)).reshape(tuple(shape))
    if dtype == "bfloat16" and not has_ml_dtypes():
        dtype = "float16"
    return np.frombuffer(bytearray(data), dtypes.numpy_dtype(dtype)).reshape(shape)


def raw(t: Any) -> bytes:
    if isinstance(t, np.ndarray):
        return t.tobytes()
    return bytes(t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


def read_golden(path: Path, framework: str) -> tuple[dict[str, str], dict[str, Any]]:
    data = path.read_bytes()
    (n,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + n])
    meta: dict[str, str] = header.pop("__metadata__")
    tensors = {}
    for name, e in header.items():
        start, end = e["data_offsets"]
        tensors[name] = tensor(framework, dtypes.name_of_tag(e["dtype"]), e["shape"], data[8 + n + start : 8 + n + end])
    return meta, tensors


def ref_of(tensors: Mapping[str, Any], schema: Mapping[str, Any], **fields: Any) -> SampleRef:
    specs = specs_of(tensors)
    given: dict[str, Any] = {
        "sample_id": "s",
        "run_id": "r",
        "store_uri": "mem:test",
        "feature_keys": {name: f"s/{name}" for name in specs},
        "feature_specs": specs,
        "algorithm": schema["name"],
        "schema_version": schema["version"],
        "num_tokens": 0,
        "estimated_bytes": sum(len(raw(t)) for t in tensors.values()),
        "target_model_version": "0",
        "draft_weight_version": "0",
        "generation": "g",
    }
    return SampleRef(**{**given, **fields})


def golden_samples(meta: Mapping[str, str], tensors: Mapping[str, Any], schema: Mapping[str, Any]) -> list[Sample]:
    samples = []
    counted = "attention_mask" if any(f["name"] == "attention_mask" for f in schema["features"]) else "loss_mask"
    for i in range(int(meta["samples"])):
        features = {name: tensors[f"sample.{i}.{name}"] for name in json.loads(meta["order"])}
        attributes = {"shift": meta["shift"], "last_norm": meta.get("last_norm") or "post", "aux_layers": f"hf:{meta['aux_layers']}"}
        if counted == "loss_mask":
            attributes["row_lengths"] = ",".join(str(n) for n in tensors[f"prompt.{i}.attention_mask"].sum(-1).tolist())
        num_tokens = int(tensors[f"prompt.{i}.{counted}"].sum())
        ref = ref_of(features, schema, sample_id=f"s{i}", num_tokens=num_tokens, attributes=attributes)
        samples.append(Sample(ref, features))
    return samples


def golden_arguments(meta: Mapping[str, str], tensors: Mapping[str, Any]) -> dict[str, Any]:
    arguments: dict[str, Any] = {"how": "pad", "pad_to_multiple": max(1, int(meta["pad_to"]))}
    if meta["mode"] in ("joined", "repacked"):
        arguments.update(how="pack", max_tokens=int(meta["limit"]))
    if "final_norm" in tensors:
        arguments["final_norm"] = FinalNorm(tensors["final_norm"], float(meta["epsilon"]))
    return arguments


def test_all_golden_files_are_there() -> None:
    assert len(GOLDEN) >= 46


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("path", GOLDEN, ids=lambda p: p.stem)
def test_batches_are_what_pytorch_makes(path: Path, framework: str) -> None:
    if "norm-bfloat16" in path.stem and framework == "numpy" and not has_ml_dtypes():
        pytest.skip("numpy has no bfloat16 to compute with")
    meta, tensors = read_golden(path, framework)
    schema = document(meta["algorithm"])
    b = collate(schema, golden_samples(meta, tensors, schema), **golden_arguments(meta, tensors))
    want = {name.removeprefix("batch."): t for name, t in tensors.items() if name.startswith("batch.")}
    assert set(b) == set(want)
    for name, t in want.items():
        assert (dtypes.name_of(b[name].dtype), tuple(b[name].shape)) == (dtypes.name_of(t.dtype), tuple(t.shape)), name
        if "final_norm" in tensors and name == "last_hidden_states":
            # The script norms with torch's own sum and rsqrt in float32: to the unit in the last place, or 1e-6 of float32.
            if dtypes.name_of(t.dtype) == "float32":
                np.testing.assert_allclose(np.asarray(b[name]), np.asarray(t), rtol=1e-6, atol=0)
            else:
                assert np.abs(ordered(raw(b[name])) - ordered(raw(t))).max() <= 1
        else:
            assert raw(b[name]) == raw(t), name
    assert b.shifted == (meta["algorithm"] == "eagle3")
    assert b.last_norm == ("post" if meta["algorithm"] == "dspark" or meta["encoding"] == "last_hidden_states" else None)
    assert (b.num_tokens, b.supervised_tokens) == (int(meta["tokens"]), int(meta["supervised"]))
    if b.shifted:
        assert b.supervised_tokens == int(b.loss_mask.sum())


def ordered(data: bytes) -> Any:
    """Bits of bfloat16, so that neighbours differ by 1 and both zeros are equal."""
    bits = np.frombuffer(data, np.uint16).astype(np.int64)
    return np.where(bits >= 0x8000, 0x8000 - bits, bits)


# Samples made by hand.


Change = Callable[[dict[str, Any], dict[str, str]], None]


def sample_of(
    rows: Sequence[Sequence[int]],
    loss: Sequence[int],
    *,
    id: str = "s",
    framework: str = FRAMEWORKS[0],
    change: Change | None = None,
    pad: bool = False,
) -> Sample:
    """An unpacked eagle3 sample of rows of ids, all attended, whose states are made of the ids."""
    ids = np.array(rows, np.int64)
    arrays: dict[str, Any] = {
        "aux_hidden_states": np.repeat(ids[..., None] * 10, 3, -1).astype(np.float32) + np.arange(3, dtype=np.float32),
        "input_ids": ids,
        "attention_mask": np.ones_like(ids),
        "loss_mask": np.repeat(np.array([loss], np.int64), len(rows), 0),
        "last_hidden_states": ids[..., None].astype(np.float32),
    }
    attributes = {"shift": "0", "aux_layers": "hf:1,2,3", "last_norm": "post", "target": "t1", "tokenizer": "k1"}
    if change is not None:
        change(arrays, attributes)
    tensors = {name: torch.from_numpy(a) if framework == "torch" else a for name, a in arrays.items()}
    return Sample(ref_of(tensors, EAGLE3, sample_id=id, num_tokens=ids.size, attributes=attributes), tensors, pad=pad)


def saying(**attributes: str) -> Change:
    return lambda _, have: have.update(attributes)


def packed_of(shift: str, attended: int, lens: Sequence[int], ids: Sequence[int], id: str = "p", loss: Sequence[int] = ()) -> Sample:
    """A sample of one packed row of documents of the given lengths, of which so many tokens are attended."""

    def pack(arrays: dict[str, Any], attributes: dict[str, str]) -> None:
        attributes["shift"] = shift
        arrays["attention_mask"][:, attended:] = 0
        arrays["position_ids"] = np.zeros((1, len(ids)), np.int64)
        arrays["seq_lens"] = np.array([lens], np.int64)
        arrays["doc_remaining"] = np.zeros((1, len(ids)), np.int64)

    return sample_of([ids], loss or [0] * len(ids), id=id, change=pack)


def values(t: Any) -> list[Any]:
    listed: list[Any] = t.reshape(-1).tolist()
    return listed


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_shifting_moves_what_the_schema_flags_and_nothing_else(framework: str) -> None:
    b = collate(EAGLE3, [sample_of([[10, 11, 12, 13, 14, 15]], [0, 0, 0, 1, 1, 1], framework=framework)])
    assert values(b.input_ids) == [11, 12, 13, 14, 15, 0]
    assert values(b.loss_mask) == [0, 0, 1, 1, 1, 0]
    assert values(b.attention_mask) == [1, 1, 1, 1, 1, 1]
    assert values(b.last_hidden_states) == [11, 12, 13, 14, 15, 0]
    assert values(b.aux_hidden_states)[:4] == [100, 101, 102, 110]
    assert (b.shifted, b.num_tokens, b.supervised_tokens) == (True, 6, 3)
    assert isinstance(b.input_ids, np.ndarray) == (framework == "numpy")


@pytest.mark.parametrize("how", ["pad", "none"])
def test_one_sample_that_needs_nothing_done_is_handed_on(how: str) -> None:
    s = sample_of([[11, 12, 0]], [0, 1, 0], change=saying(shift="1"))
    b = collate(EAGLE3, [s], how)
    for name, t in s.tensors.items():
        assert b[name] is t
    assert b.aliases and list(b) == list(s.tensors)
    clone = b.clone()
    clone.input_ids[0, 0] = 99
    assert int(s.tensors["input_ids"][0, 0]) == 11 and not clone.aliases


def test_a_second_shift_is_an_error() -> None:
    seen: list[Sample] = []

    def keep(samples: Sequence[Sample]) -> Mapping[str, Any]:
        seen.extend(samples)
        return samples[0].tensors

    b = collate(EAGLE3, [sample_of([[1, 2, 3]], [0, 1, 1])], keep)
    assert seen[0].shift == "1" and values(seen[0].tensors["input_ids"]) == [2, 3, 0] and values(b.input_ids) == [2, 3, 0]
    with pytest.raises(SchemaError, match="says shift 0, and its features were shifted since; a second shift would misalign them"):
        collate(EAGLE3, seen)
    dflash = document("dflash")
    tensors: dict[str, Any] = {
        "hidden_states": np.zeros((1, 2, 4), np.float32),
        **{name: np.zeros((1, 2), np.int64) for name in ("input_ids", "attention_mask", "loss_mask")},
    }
    s = Sample(ref_of(tensors, dflash, attributes={"shift": "1", "aux_layers": "unknown"}), tensors)
    with pytest.raises(SchemaError, match="says shift 1, but batches of dflash are not shifted"):
        collate(dflash, [s])


@pytest.mark.parametrize("attribute, value", [("target", "t2"), ("tokenizer", "k2"), ("aux_layers", "hf:1,2,4")])
def test_what_must_not_be_mixed_is_named_twice(attribute: str, value: str) -> None:
    a = sample_of([[1, 2]], [0, 1], id="first")
    b = sample_of([[1, 2]], [0, 1], id="second", change=saying(**{attribute: value}))
    with pytest.raises(SchemaError) as e:
        collate(EAGLE3, [a, b])
    assert all(part in str(e.value) for part in ("first", "second", value))
    assert vars(e.value)["index"] == 1
    identity = Identity(Schema.parse(EAGLE3))
    identity.adopt(a.ref)
    with pytest.raises(SchemaError):
        identity.check(b.ref)


def test_attributes_of_one_sample_may_differ_in_a_batch() -> None:
    schema = {
        "name": "x",
        "version": 1,
        "features": [{"name": "ids", "from": "input_ids", "axes": ["B", "S"], "dtypes": ["int64"], "required": True}],
        "attributes": [{"name": n, "required": True} for n in ("shift", "source", "ids", "supervised_tokens", "row_lengths")],
    }
    samples = []
    for i in "01":
        tensors = {"ids": np.zeros((1, 2), np.int64)}
        attributes = {"shift": "0", "source": f"set@0/{i}", "ids": i, "supervised_tokens": i, "row_lengths": "2"}
        samples.append(Sample(ref_of(tensors, schema, sample_id=f"s{i}", attributes=attributes), tensors))
    assert collate(schema, samples)["ids"].shape == (2, 2)


# The norm of the last hidden state.


ONE = np.ones(1, np.float32)


def states(last_norm: str, *x: float, id: str = "s", dtype: Any = np.float32) -> Sample:
    def set_states(arrays: dict[str, Any], attributes: dict[str, str]) -> None:
        attributes["last_norm"] = last_norm
        arrays["last_hidden_states"] = np.array(x, dtype).reshape(1, len(x), 1)

    return sample_of([[1, 2, 3][: len(x)]], [0, 1, 1][: len(x)], id=id, change=set_states)


def test_states_of_another_norm_than_the_schemas_are_refused() -> None:
    with pytest.raises(SchemaError) as e:
        collate(EAGLE3, [states("post", 1, 2, id="a"), states("pre", 1, 2, id="b")])
    assert e.value.subject == "b" and vars(e.value)["index"] == 1
    assert all(part in e.value.detail for part in ("last_norm", "pre", "post", "last_hidden_states", "FinalNorm"))
    with pytest.raises(SchemaError, match="2 weights"):
        collate(EAGLE3, [states("pre", 1, 2)], final_norm=FinalNorm(np.ones(2, np.float32), 1e-6))
    residual = copy.deepcopy(EAGLE3)
    next(f for f in residual["features"] if f["name"] == "last_hidden_states")["norm"] = "pre"
    with pytest.raises(SchemaError, match='is "post", want "pre"') as e:
        collate(residual, [states("post", 1, 2)], final_norm=FinalNorm(ONE, 1e-6))
    assert "FinalNorm" not in str(e.value)


def test_pre_norm_states_are_normed_once_and_post_norm_states_never() -> None:
    two = FinalNorm(ONE * 2, 1e-12)
    ways: list[Any] = ["pad", "pack", lambda samples: samples[0].tensors]
    for how in ways:
        pre = states("pre", 1, 2, 3)
        for _ in range(2):  # the sample itself stays as it was
            b = collate(EAGLE3, [pre], how, final_norm=two)
            assert values(b.last_hidden_states) == [2, 2, 0] and b.last_norm == "post"
        b = collate(EAGLE3, [states("post", 1, 2, 3)], how, final_norm=two)
        assert values(b.last_hidden_states) == [2, 3, 0] and b.last_norm == "post"


def test_what_a_function_got_normed_is_not_normed_again() -> None:
    schema = {
        "name": "x",
        "version": 1,
        "features": [{"name": "last", "from": "last", "norm": "post", "axes": ["B", "S", "H"], "dtypes": ["float32"], "required": True}],
    }
    tensors = {"last": np.array([[[3, 4], [1, 1]]], np.float32)}
    norm = FinalNorm(np.array([2, 1], np.float32), 1e-9)
    seen: list[Sample] = []

    def keep(samples: Sequence[Sample]) -> Mapping[str, Any]:
        seen.extend(samples)
        return samples[0].tensors

    collate(schema, [Sample(ref_of(tensors, schema, attributes={"last_norm": "pre"}), tensors)], keep, final_norm=norm)
    b = collate(schema, seen, final_norm=norm)
    np.testing.assert_allclose(values(b["last"]), [6 / 12.5**0.5, 4 / 12.5**0.5, 2, 1], rtol=1e-6)


def test_a_pre_norm_sample_with_a_post_norm_final_layer_is_refused() -> None:
    schema = document("dspark")
    tensors: dict[str, Any] = {
        "target_hidden_states": np.zeros((1, 2, 2), np.float32),
        "target_last_hidden_states": np.zeros((1, 2, 1), np.float32),
        "input_ids": np.zeros((1, 2), np.int64),
        "loss_mask": np.zeros((1, 2), np.int64),
    }
    s = Sample(ref_of(tensors, schema, attributes={"shift": "0", "aux_layers": "hf:0,5", "last_norm": "pre"}), tensors)
    with pytest.raises(SchemaError) as e:
        collate(schema, [s], final_norm=FinalNorm(ONE, 1e-6))
    assert all(
        part in str(e.value) for part in ("target_last_hidden_states", "target_hidden_states", "final layer", "FinalNorm does not help")
    )


@pytest.mark.parametrize(
    "weight, eps",
    [
        (np.ones((2, 2), np.float32), 1e-6),
        (np.ones(2, np.int64), 1e-6),
        (np.ones(0, np.float32), 1e-6),
        (np.array([1, np.nan], np.float32), 1e-6),
        ([1.0], 1e-6),
        (ONE, 0.0),
        (ONE, -1.0),
        (ONE, float("nan")),
        (ONE, float("inf")),
    ],
)
def test_impossible_final_norms_are_refused(weight: Any, eps: float) -> None:
    with pytest.raises(InvalidError):
        Collator(EAGLE3, final_norm=FinalNorm(weight, eps))


def test_a_normed_state_that_float16_cannot_hold_is_refused() -> None:
    s = states("pre", 1, 2, dtype=np.float16)
    assert values(collate(EAGLE3, [s], final_norm=FinalNorm(ONE * np.float32(0.5), 1e-6)).last_hidden_states) == [0.5, 0]
    with pytest.raises(SchemaError, match="too large for float16"):
        collate(EAGLE3, [s], final_norm=FinalNorm(ONE * np.float32(1e5), 1e-6))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_norm_adds_squares_in_order_and_rounds_once(dtype: str) -> None:
    if dtype == "bfloat16" and torch is None and not has_ml_dtypes():
        pytest.skip("numpy has no bfloat16 to compute with")
    framework = "torch" if torch is not None else "numpy"
    rng = np.random.default_rng(7)
    h, n = 333, 70
    x32 = (rng.standard_normal((n, h)) * 10.0 ** rng.integers(-2, 3, (n, 1))).astype(np.float32)
    weight = rng.uniform(-1, 2, h).astype(np.float32)
    eps = 1e-5
    if dtype == "bfloat16":
        stored = (x32.view(np.uint32) >> 16).astype(np.uint16)
        x32 = (stored.astype(np.uint32) << 16).view(np.float32)
    else:
        stored = x32.astype(dtype)
        x32 = stored.astype(np.float32)
    expected = np.empty_like(x32)
    for r in range(n):
        total = 0.0
        for v in x32[r].tolist():
            total += v * v
        scale = np.float32(1 / (total / h + eps) ** 0.5)
        for i in range(h):
            expected[r, i] = x32[r, i] * scale * weight[i]
    schema = {
        "name": "x",
        "version": 1,
        "features": [{"name": "last", "from": "last", "norm": "post", "axes": ["B", "S", "H"], "dtypes": [dtype], "required": True}],
    }
    tensors = {"last": tensor(framework, dtype, (1, n, h), stored.tobytes())}
    b = collate(schema, [Sample(ref_of(tensors, schema, attributes={"last_norm": "pre"}), tensors)], final_norm=FinalNorm(weight, eps))
    if dtype == "bfloat16":
        rounded = torch.from_numpy(expected).to(torch.bfloat16) if framework == "torch" else expected.astype(dtypes.numpy_dtype(dtype))
        assert raw(b["last"]) == raw(rounded)
    else:
        assert raw(b["last"]) == expected.astype(dtype).tobytes()


# What counts, and where it lies.


@pytest.mark.parametrize("seed", range(60))
def test_what_counts_as_supervised_is_what_the_mask_supervises(seed: int) -> None:
    rng = np.random.default_rng(seed)
    packed = bool(rng.integers(2))
    samples = []
    for i in range(rng.integers(1, 4)):
        shift = str(rng.integers(2))
        lens = rng.integers(1, 5, rng.integers(1, 5)).tolist()
        real = sum(lens)
        cols = real + int(rng.integers(0, 4))
        loss = rng.integers(0, 2, cols)
        if shift == "0":
            loss[real:] = 0  # of what came shifted, padding may be supervised
        if packed:
            samples.append(packed_of(shift, real, lens, [0] * cols, id=f"s{i}", loss=loss.tolist()))
        else:

            def attend(arrays: dict[str, Any], attributes: dict[str, str], shift: str = shift, real: int = real) -> None:
                attributes["shift"] = shift
                arrays["attention_mask"][:, real:] = 0

            samples.append(sample_of([[0] * cols], loss.tolist(), id=f"s{i}", change=attend))
    for b in (collate(EAGLE3, samples, "pad", pad_to_multiple=4), collate(EAGLE3, samples, "pack", max_tokens=20)):
        assert b.supervised_tokens == int(b.loss_mask.sum())


def test_padding_fills_with_zeros_up_to_the_multiple() -> None:
    samples = [sample_of([[1, 2, 3], [4, 5, 6]], [0, 1, 1], id="a"), sample_of([[7, 8, 9, 10, 11]], [0, 1, 1, 1, 1], id="b")]
    b = collate(EAGLE3, samples, pad_to_multiple=4)
    assert tuple(b.input_ids.shape) == (3, 8)
    assert values(b.input_ids) == [2, 3, 0, 0, 0, 0, 0, 0, 5, 6, 0, 0, 0, 0, 0, 0, 8, 9, 10, 11, 0, 0, 0, 0]
    assert values(b.attention_mask) == [1, 1, 1, 0, 0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 0, 0, 0]
    assert [(s.row, s.column) for s in b.samples] == [(0, 0), (2, 0)] and not b.aliases


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_padding_is_zero_and_alike_whatever_the_memory_held(framework: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def one(n: int) -> Sample:
        arrays: dict[str, Any] = {
            "aux_hidden_states": np.full((1, n, 6), n, np.float32), "input_ids": np.arange(1, n + 1, dtype=np.int64)[None], "attention_mask": np.ones((1, n), np.int64),
            "loss_mask": np.ones((1, n), np.int64), "last_hidden_states": np.full((1, n, 2), n, np.float32),
        }
        tensors = arrays if framework == "numpy" else {name: torch.from_numpy(a) for name, a in arrays.items()}
        return Sample(ref_of(tensors, EAGLE3, attributes={"shift": "0", "aux_layers": "hf:1,2,3", "last_norm": "post"}), tensors)

    def both() -> Batch:
        return collate(EAGLE3, [one(3), one(5)], pad_to_multiple=8)

    plain = both()
    fresh = collate_module._empty

    def dirty(like: Any, shape: Sequence[int]) -> Any:
        memory = fresh(like, shape)
        memory[...] = 85
        return memory

    monkeypatch.setattr(collate_module, "_empty", dirty)
    assert {name: raw(t) for name, t in both().items()} == {name: raw(t) for name, t in plain.items()}
    monkeypatch.setattr(collate_module, "_HUGE_BYTES", 1)
    huge = both()
    assert {name: raw(t) for name, t in huge.items()} == {name: raw(t) for name, t in plain.items()}
    assert [values(row)[3:] for row in plain["input_ids"]] == [[0, 0, 0, 0, 0], [5, 0, 0, 0, 0]]
    assert all(t.dtype == plain[name].dtype for name, t in huge.items())


def test_packing_restarts_positions_and_leaks_nothing() -> None:
    samples = [sample_of([[1, 2, 3]], [1, 1, 1], id="a"), sample_of([[4, 5]], [1, 1], id="b"), sample_of([[6, 7]], [1, 1], id="c")]
    b = collate(EAGLE3, samples, "pack", max_tokens=6, pad_to_multiple=4)
    want = {
        "input_ids": [2, 3, 0, 5, 0, 0, 0, 0, 7, 0, 0, 0, 0, 0, 0, 0],
        "loss_mask": [1, 1, 0, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0],
        "attention_mask": [1, 1, 1, 1, 1, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0],
        "position_ids": [0, 1, 2, 0, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0],
        "doc_remaining": [2, 1, 0, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0],
        "seq_lens": [3, 2, 2, 0],
    }
    for name, expected in want.items():
        assert values(b[name]) == expected, name
    assert [(s.row, s.column) for s in b.samples] == [(0, 0), (0, 3), (1, 0)]


def test_padding_that_was_counted_to_a_document_is_not_packed() -> None:
    b = collate(EAGLE3, [packed_of("1", 5, [2, 6], [1, 2, 3, 4, 5, 0, 0, 0], "a"), packed_of("1", 2, [2], [6, 7], "b")], "pack")
    assert values(b.input_ids) == [1, 2, 3, 4, 5, 6, 7]
    assert values(b.seq_lens) == [2, 3, 2]
    assert values(b.position_ids) == [0, 1, 0, 1, 2, 0, 1]
    assert values(b.doc_remaining) == [1, 0, 2, 1, 0, 1, 0]


def test_a_row_without_a_real_token_takes_no_place() -> None:
    def empty(arrays: dict[str, Any], _: dict[str, str]) -> None:
        arrays["attention_mask"][:] = 0

    nothing = sample_of([[8, 9]], [0, 0], id="e", change=empty)
    b = collate(EAGLE3, [sample_of([[1, 2]], [0, 1], id="a"), nothing, sample_of([[3, 4]], [0, 1], id="b")], "pack")
    assert values(b.seq_lens) == [2, 2]
    with pytest.raises(SchemaError, match="no real token"):
        collate(EAGLE3, [nothing], "pack")


@pytest.mark.parametrize("how", ["pad", "pack"])
def test_a_stand_in_counts_nowhere(how: str) -> None:
    real, pad = sample_of([[1, 2, 3]], [0, 1, 1], id="a"), sample_of([[4, 5, 6]], [0, 1, 1], id="b", pad=True)
    b = collate(EAGLE3, [real, pad], how)
    assert values(b.loss_mask) == [1, 1, 0, 0, 0, 0]
    assert (b.num_tokens, b.supervised_tokens, b.pads) == (3, 2, (False, True))
    assert values(pad.tensors["loss_mask"]) == [0, 1, 1]


def test_a_stand_in_alone_counts_nowhere_even_where_nothing_is_shifted() -> None:
    schema = document("dflash")
    tensors: dict[str, Any] = {
        "hidden_states": np.zeros((1, 2, 4), np.float32),
        "input_ids": np.zeros((1, 2), np.int64),
        "attention_mask": np.zeros((1, 2), np.int64),
        "loss_mask": np.array([[0, 1]]),
    }
    s = Sample(ref_of(tensors, schema, attributes={"shift": "0", "aux_layers": "unknown"}), tensors, pad=True)
    b = collate(schema, [s])
    assert values(b.loss_mask) == [0, 0] and not b.shifted and b.hidden_states is tensors["hidden_states"]


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("dtype", dtypes.NAMES)
def test_moves_keep_every_type(dtype: str, framework: str) -> None:
    try:
        _ = dtypes.torch_dtype(dtype) if framework == "torch" else dtypes.numpy_dtype(dtype)
    except NotImplementedError as e:
        pytest.skip(str(e))
    feature = {"name": "f", "axes": ["B", "S", "W"], "dtypes": [dtype], "shift": True}
    schema = {"name": "x", "version": 1, "features": [feature]}
    step = 2 * dtypes.itemsize(dtype)
    samples, rows = [], []
    for i, cols in enumerate((5, 3)):
        data = bytes((i + k) % 2 if dtype == "bool" else 1 + (31 * i + 7 * k) % 250 for k in range(cols * step))
        tensors = {"f": tensor(framework, dtype, (1, cols, 2), data)}
        samples.append(Sample(ref_of(tensors, schema, sample_id=f"s{i}"), tensors))
        rows.append(data[step:].ljust(6 * step, b"\0"))
    assert raw(collate(schema, samples, pad_to_multiple=6)["f"]) == b"".join(rows)


# What is refused.


def test_the_sample_at_fault_is_told_by_its_index() -> None:
    good = sample_of([[1, 2]], [0, 1], id="a")

    def widen(arrays: dict[str, Any], _: dict[str, str]) -> None:
        arrays["aux_hidden_states"], arrays["last_hidden_states"] = np.zeros((1, 2, 6), np.float32), np.zeros((1, 2, 2), np.float32)

    wide = sample_of([[1, 2]], [0, 1], id="b", change=widen)
    half = sample_of([[1, 2]], [0, 1], id="c", change=lambda a, _: a.update(last_hidden_states=np.zeros((1, 2, 1), np.float16)))

    def supervise_otherwise(arrays: dict[str, Any], _: dict[str, str]) -> None:
        del arrays["last_hidden_states"]
        arrays["logits"] = np.zeros((1, 2, 5), np.float32)

    logits = sample_of([[1, 2]], [0, 1], id="d", change=supervise_otherwise)
    for how in ("pad", "pack"):
        for bad in (wide, half, logits):
            with pytest.raises(SchemaError) as e:
                collate(EAGLE3, [good, good, bad], how)
            assert vars(e.value)["index"] == 2 and bad.ref.sample_id in str(e.value)


def test_tensors_that_are_not_what_the_ref_promises_are_corrupt() -> None:
    s = sample_of([[1, 2]], [0, 1])
    names = list(s.tensors)
    short = {name: s.tensors[name] for name in names[:4]}
    swapped = {name: s.tensors[name] for name in reversed(names)}
    longer = {**s.tensors, "input_ids": sample_of([[1, 2, 3]], [0, 1, 1]).tensors["input_ids"]}
    for tensors in (short, swapped, longer):
        with pytest.raises(CorruptError):
            collate(EAGLE3, [Sample(s.ref, tensors)])
    with pytest.raises(InvalidError, match="want a torch tensor or a numpy array"):
        collate(EAGLE3, [Sample(s.ref, {**s.tensors, "input_ids": [[1, 2]]})])  # type: ignore[dict-item]


@pytest.mark.skipif(torch is None, reason="torch is not installed")
def test_torch_and_numpy_are_not_mixed_within_a_batch() -> None:
    with pytest.raises(InvalidError, match='"aux_hidden_states" is a ndarray, but sample "s" has a Tensor'):
        collate(EAGLE3, [sample_of([[1, 2]], [0, 1], framework="torch"), sample_of([[1, 2]], [0, 1], framework="numpy")])


def test_samples_of_two_dtypes_name_the_feature_both_samples_and_who_mends_it() -> None:
    def one(name: str, dtype: type) -> Sample:
        ids = np.ones((1, 3), np.int64)
        tensors: dict[str, Any] = {
            "aux_hidden_states": np.ones((1, 3, 6), dtype), "input_ids": ids, "attention_mask": ids, "loss_mask": ids, "last_hidden_states": np.ones((1, 3, 2), dtype),
        }
        return Sample(ref_of(tensors, EAGLE3, sample_id=name, attributes={"shift": "0", "aux_layers": "hf:1,2,3", "last_norm": "post"}), tensors)

    with pytest.raises(SchemaError) as caught:
        collate(EAGLE3, [one("a", np.float32), one("b", np.float16)])
    assert (caught.value.subject, caught.value.detail) == ("b", 'feature "aux_hidden_states" is float16[1,3,6], but sample "a" has float32[1,3,6]')
    assert "let the producer cast" in caught.value.hint


@pytest.mark.parametrize("lens", [[2, 3], [-1, 2]])
def test_lengths_that_do_not_fit_their_row_are_refused(lens: list[int]) -> None:
    with pytest.raises(SchemaError, match="seq_lens of row 0"):
        collate(EAGLE3, [packed_of("0", 4, lens, [1, 2, 3, 4])])


def test_packing_refuses_what_it_cannot_place() -> None:
    with pytest.raises(SchemaError, match="row 0 has 3 tokens, and packed rows hold 2 at most"):
        collate(EAGLE3, [sample_of([[1, 2, 3]], [0, 1, 1])], "pack", max_tokens=2)

    def left(arrays: dict[str, Any], _: dict[str, str]) -> None:
        arrays["attention_mask"][0, 0] = 0

    with pytest.raises(SchemaError, match="row 0 has a token after padding at 1; rows must be padded at the right"):
        collate(EAGLE3, [sample_of([[1, 2, 3]], [0, 1, 1], change=left)], "pack")
    bare = {"name": "x", "version": 1, "features": [{"name": "ids", "from": "input_ids", "axes": ["B", "S"], "dtypes": ["int64"]}]}
    with pytest.raises(SchemaError, match="position_ids"):
        Collator(bare, "pack")
    tree = copy.deepcopy(EAGLE3)
    tree["features"].append({"name": "tree", "axes": ["B", "S"], "dtypes": ["int64"]})
    tree["packing"].append("tree")
    with pytest.raises(SchemaError, match="tree"):
        Collator(tree, "pack")


@pytest.mark.parametrize("listed, wrong", [("2", "1 entries"), ("2,4", '"4"'), ("2,x", '"x"'), ("2,-1", '"-1"')])
def test_row_lengths_stand_for_an_attention_mask(listed: str, wrong: str) -> None:
    schema = document("dspark")
    tensors: dict[str, Any] = {
        "target_hidden_states": np.zeros((2, 3, 2), np.float32),
        "target_last_hidden_states": np.zeros((2, 3, 2), np.float32),
        "input_ids": np.array([[1, 2, 3], [4, 5, 6]]),
        "loss_mask": np.ones((2, 3), np.int64),
    }
    attributes = {"shift": "0", "aux_layers": "hf:1", "last_norm": "post"}
    good = Sample(ref_of(tensors, schema, attributes={**attributes, "row_lengths": "3,1"}), tensors)
    assert values(collate(schema, [good], "pack").input_ids) == [1, 2, 3, 4]
    with pytest.raises(SchemaError, match=wrong):
        collate(schema, [Sample(ref_of(tensors, schema, attributes={**attributes, "row_lengths": listed}), tensors)], "pack")


@pytest.mark.parametrize(
    "subject, arguments",
    [
        ("pad_to_multiple", {"pad_to_multiple": -4}),
        ("pad_to_multiple", {"pad_to_multiple": 0}),
        ("pad_to_multiple", {"pad_to_multiple": 1.5}),
        ("pad_to_multiple", {"how": "none", "pad_to_multiple": 8}),
        ("max_tokens", {"how": "pack", "max_tokens": -1}),
        ("max_tokens", {"how": "pad", "max_tokens": 8}),
        ("how", {"how": "stack"}),
        ("how", {"how": None}),
        ("batch", {"how": "none", "batch": 2}),
    ],
)
def test_impossible_arguments_are_refused_by_name(subject: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(InvalidError) as e:
        Collator(EAGLE3, **arguments)
    assert e.value.subject == subject
    with pytest.raises(InvalidError):
        collate(EAGLE3, [])


def test_what_a_function_returns_must_be_named_tensors() -> None:
    s = sample_of([[1, 2]], [0, 1])
    returned: list[Any] = [None, [1], {"x": [1, 2]}, {1: np.zeros(1)}]
    for value in returned:
        with pytest.raises(InvalidError):
            collate(EAGLE3, [s], lambda _, value=value: value)  # type: ignore[misc]
    with pytest.raises(ZeroDivisionError):
        collate(EAGLE3, [s], lambda _: {"x": np.zeros(1 // 0)})


def test_a_schema_without_rows_is_for_functions_and_batches_of_one() -> None:
    schema = {"name": "x", "version": 1, "features": [{"name": "f", "axes": ["N"], "dtypes": ["int64"], "required": True}]}
    tensors = {"f": np.arange(3)}
    samples = [Sample(ref_of(tensors, schema), tensors)] * 2
    with pytest.raises(SchemaError, match="no rows to pad"):
        collate(schema, samples)
    assert values(collate(schema, samples[:1], "none")["f"]) == [0, 1, 2]
    assert values(collate(schema, samples, lambda some: {"f": np.concatenate([s.tensors["f"] for s in some])})["f"]) == [0, 1, 2, 0, 1, 2]


def test_roles_with_other_axes_than_their_usual_ones_are_no_crash() -> None:
    lens = {"name": "x", "version": 1, "features": [{"name": "l", "from": "seq_lens", "axes": ["N"], "dtypes": ["int64"]}]}
    tensors: dict[str, Any] = {"l": np.array([2, 3])}
    assert values(collate(lens, [Sample(ref_of(tensors, lens), tensors)], "none")["l"]) == [2, 3]
    mask = {
        "name": "x",
        "version": 1,
        "features": [
            {"name": "ids", "axes": ["B", "S"], "dtypes": ["int64"]},
            {"name": "loss", "from": "loss_mask", "axes": ["B"], "dtypes": ["int64"]},
        ],
    }
    tensors = {"ids": np.zeros((2, 3), np.int64), "loss": np.zeros(2, np.int64)}
    with pytest.raises(SchemaError, match=r"loss is int64\[2\], want one value for each of 2 rows of 3 tokens"):
        collate(mask, [Sample(ref_of(tensors, mask), tensors)])


# The batch.


def test_a_batch_is_a_mapping_with_attributes() -> None:
    s = Sample(**{**vars(sample_of([[1, 2]], [0, 1])), "lease": "a lease", "window": {"number": 3}})
    b = collate(EAGLE3, [s])
    assert b.input_ids is b["input_ids"] and "input_ids" in b and "logits" not in b and len(b) == 5
    assert b.refs == (s.ref,) and b.samples[0].lease == "a lease" and b.window == {"number": 3}
    assert b.nbytes == s.ref.estimated_bytes
    with pytest.raises(AttributeError, match="no 'logits'"):
        _ = b.logits
    with pytest.raises(KeyError):
        _ = b["logits"]
    assert dict(**b).keys() == b.tensors.keys()
    assert "int64[1,2]" in repr(b) and "shifted=True" in repr(b)
    again = pickle.loads(pickle.dumps(copy.copy(b)))
    assert values(again.input_ids) == values(b.input_ids) and again.samples == b.samples and again.shifted
    assert Batch({}).window is None and Batch({}, [BatchSample(s.ref)]).pads == (False,)


@pytest.mark.skipif(torch is None, reason="torch is not installed")
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_to_moves_every_tensor(framework: str) -> None:
    b = collate(EAGLE3, [sample_of([[1, 2]], [0, 1], framework=framework)])
    moved = b.to("cpu")
    assert all(isinstance(t, torch.Tensor) for t in moved.values()) and values(moved.input_ids) == values(b.input_ids)
    assert (moved.num_tokens, moved.supervised_tokens, moved.shifted, moved.last_norm, moved.samples) == (2, 1, True, "post", b.samples)
    assert moved.aliases  # aux_hidden_states is still the sample's
    away: Any = moved.to("meta")
    assert away.input_ids.device.type == "meta" and not away.aliases
