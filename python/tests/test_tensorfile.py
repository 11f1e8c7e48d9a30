"""Tensor files: the service's layout to the byte, read by the stock package and the reverse, and no copies."""

from __future__ import annotations

import gc
import json
import mmap
import random
import struct
import sys
import tracemalloc
import types
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sluice import dtypes, tensorfile
from sluice.errors import CorruptError, InvalidError, NotFoundError, UnsupportedError
from sluice.refs import FeatureSpec
from sluice.tensorfile import decode, encode, parse_header, specs_of

from .interpreter import run_python

ROOT = Path(__file__).parents[2]
LAYOUTS = sorted((ROOT / "testdata" / "layouts").glob("*.safetensors"))
OTHERS = sorted(
    [*(ROOT / "stream" / "testdata" / "golden").glob("*.safetensors"), *(ROOT / "target" / "tinyllama").glob("**/*.safetensors")]
)

IN_NUMPY = tuple(n for n in dtypes.NAMES if n not in ("bfloat16", "float8_e4m3fn", "float8_e5m2"))


def joined(tensors: dict[str, Any], metadata: dict[str, str] | None = None) -> bytearray:
    header, parts = encode(tensors, metadata or {})
    return bytearray(header + b"".join(parts))


def raw(tensor: Any) -> bytes:
    """Return the bytes of a tensor of any framework, by way of what encode does not use."""
    if isinstance(tensor, np.ndarray):
        return tensor.tobytes()
    import torch

    assert isinstance(tensor, torch.Tensor)
    if tensor.numel() == 0:
        return b""
    return bytes(tensor.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8).tolist())


def file_of(header: str | bytes, n: int = 0) -> bytes:
    """Return a file with the given JSON, unpadded, and n bytes of data."""
    text = header.encode() if isinstance(header, str) else header
    return struct.pack("<Q", len(text)) + text + bytes(n)


# --- layout ---


@pytest.mark.parametrize("path", LAYOUTS, ids=lambda p: p.stem)
def test_golden_layouts_come_back_whatever_the_order(path: Path) -> None:
    data = bytearray(path.read_bytes())
    header = parse_header(data)
    tensors: dict[str, Any] = {}
    for name in header.entries:
        try:
            tensors |= decode(data, [name], "numpy")
        except UnsupportedError:
            try:
                tensors |= decode(data, [name], "torch")
            except UnsupportedError as e:
                pytest.skip(f"no framework here has every dtype of this file: {e}")
    for order in (list(tensors), list(reversed(tensors))):
        assert joined({name: tensors[name] for name in order}, header.metadata) == data


def test_the_golden_layouts_are_all_here() -> None:
    assert {p.stem for p in LAYOUTS} >= {"awkward", "common", "every-dtype", "metadata-alone", "nothing", "sample"}
    assert len(OTHERS) > 40


@pytest.mark.parametrize("path", LAYOUTS + OTHERS, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_every_file_of_the_repository_reads_as_the_stock_package_reads_it(path: Path) -> None:
    stock = pytest.importorskip("safetensors")
    with stock.safe_open(path, "np") as f:
        metadata, names = f.metadata(), set(f.keys())
    data = bytearray(path.read_bytes())
    header = parse_header(data)
    assert (header.metadata, set(header.entries), header.size) == (metadata or {}, names, len(data))
    deserialized = dict(stock.deserialize(bytes(data)))
    for name, e in header.entries.items():
        assert data[header.data_start + e.start : header.data_start + e.end] == deserialized[name]["data"]
        assert (list(e.shape), e.dtype) == (deserialized[name]["shape"], dtypes.name_of_tag(deserialized[name]["dtype"]))


def test_the_header_is_padded_and_sorted() -> None:
    header, parts = encode(
        {"b": np.zeros(3, np.uint8), "a": np.zeros((2, 4), np.int64), 'q"': np.array(0, np.float32), "none": np.zeros((0, 2))},
        {"z": "1", "a": "2\n"},
    )
    text = (
        '{"__metadata__":{"a":"2\\u000a","z":"1"},"a":{"dtype":"I64","shape":[2,4],"data_offsets":[0,64]},'
        '"none":{"dtype":"F64","shape":[0,2],"data_offsets":[64,64]},"q\\"":{"dtype":"F32","shape":[],"data_offsets":[64,68]},'
        '"b":{"dtype":"U8","shape":[3],"data_offsets":[68,71]}}'
    )
    assert header[8:].rstrip(b" ").decode() == text
    assert len(header) % 64 == 0
    assert int.from_bytes(header[:8], "little") == len(header) - 8
    assert [len(p) for p in parts] == [64, 4, 3]
    parsed = parse_header(header, len(header) + 71)
    assert list(parsed.entries) == ["a", "none", 'q"', "b"]
    assert (parsed.data_start, parsed.size, parsed.metadata) == (len(header), len(header) + 71, {"a": "2\n", "z": "1"})
    assert (parsed.entries["b"].start, parsed.entries["b"].end, parsed.entries["b"].nbytes) == (68, 71, 3)


# --- round trips ---


def random_arrays(rng: random.Random, names: tuple[str, ...]) -> dict[str, np.ndarray[Any, Any]]:
    made = {}
    for i in range(rng.randrange(8)):
        name = rng.choice(names)
        shape = tuple(rng.choice([0, 1, 1, 2, 3, 5, 8, 16]) for _ in range(rng.randrange(5)))
        n = int(np.prod(shape)) * dtypes.itemsize(name)
        data = bytes(rng.randrange(2 if name == "bool" else 256) for _ in range(n))
        made[f"{rng.choice('aZ_é漢😀')}{i}"] = np.frombuffer(data, dtypes.numpy_dtype(name)).reshape(shape)
    return made


def strided(rng: random.Random, array: Any) -> Any:
    """Return an array of the same elements that lies otherwise in memory."""
    if not array.ndim:
        return array
    axes = list(range(array.ndim))
    rng.shuffle(axes)
    turned = np.ascontiguousarray(array.transpose(axes)).transpose(np.argsort(axes))
    if rng.random() < 0.5:
        turned = turned[::-1].copy()[::-1]
    if rng.random() < 0.5:
        wide = np.repeat(turned, 2, axis=-1)
        turned = wide[..., ::2]
    assert np.array_equal(turned.view(), array, equal_nan=array.dtype.kind == "f")
    return turned


def test_numpy_arrays_of_any_shape_and_strides_round_trip() -> None:
    rng = random.Random(7)
    for _ in range(200):
        arrays = random_arrays(rng, IN_NUMPY)
        metadata = {f"k{i}": rng.choice(["", "é\n", '"\\']) for i in range(rng.randrange(3))}
        data = joined({n: strided(rng, a) for n, a in arrays.items()}, metadata)
        assert data == joined(arrays, metadata)
        assert parse_header(data).metadata == metadata
        names = list(arrays)
        rng.shuffle(names)
        back = decode(data, names, "numpy")
        assert list(back) == names
        for name in names:
            got, want = back[name], arrays[name]
            assert (got.dtype, got.shape, raw(got)) == (want.dtype, want.shape, raw(want))


def test_torch_tensors_of_any_shape_and_strides_round_trip() -> None:
    torch = pytest.importorskip("torch")
    rng = random.Random(8)
    known = tuple(n for n in dtypes.NAMES if hasattr(torch, n))
    for _ in range(200):
        tensors, wants = {}, {}
        for i in range(rng.randrange(6)):
            name = rng.choice(known)
            shape = [rng.choice([0, 1, 1, 2, 3, 5, 16]) for _ in range(rng.randrange(4))]
            n = int(np.prod(shape)) * dtypes.itemsize(name)
            data = bytearray(rng.randrange(2 if name == "bool" else 256) for _ in range(n))
            flat = torch.frombuffer(data, dtype=getattr(torch, name)) if n else torch.empty(0, dtype=getattr(torch, name))
            tensor = flat.reshape(shape)
            wants[f"t{i}"] = (tensor.dtype, tensor.shape, bytes(data))
            if tensor.dim() >= 2 and n:
                tensor = tensor.transpose(0, 1).contiguous().transpose(0, 1)
                if rng.random() < 0.5:
                    tensor = torch.stack([tensor, tensor], dim=-1)[..., 1]
            tensors[f"t{i}"] = tensor
        names = list(tensors)
        rng.shuffle(names)
        back = decode(joined(tensors), names, "torch")
        assert list(back) == names
        for name in names:
            assert (back[name].dtype, back[name].shape, raw(back[name])) == wants[name]


def test_torch_is_taken_where_it_is_installed() -> None:
    torch = pytest.importorskip("torch")
    data = joined({"x": np.arange(3)})
    assert isinstance(decode(data, ["x"])["x"], torch.Tensor)
    assert isinstance(decode(data, ["x"], "numpy")["x"], np.ndarray)


def test_without_torch_everything_works_on_numpy() -> None:
    run_python("""
        sys.modules["torch"] = None
        import numpy as np
        from sluice import tensorfile, errors
        header, parts = tensorfile.encode({"x": np.arange(6, dtype=np.int16).reshape(2, 3)}, {"k": "v"})
        data = bytearray(header + b"".join(parts))
        x = tensorfile.decode(data, ["x"])["x"]
        assert isinstance(x, np.ndarray) and x.tolist() == [[0, 1, 2], [3, 4, 5]]
        assert tensorfile.specs_of({"x": x})["x"].dtype == "int16"
        try:
            tensorfile.decode(data, ["x"], "torch")
        except errors.UnsupportedError as e:
            assert "torch is not installed" in str(e)
        else:
            raise SystemExit("tensors of no torch")
    """)


def test_numpy_work_does_not_import_torch() -> None:
    run_python("""
        import numpy as np
        from sluice import tensorfile
        header, parts = tensorfile.encode({"x": np.arange(6)}, {})
        tensorfile.decode(bytearray(header + b"".join(parts)), ["x"], "numpy")
        assert "torch" not in sys.modules
    """)


# --- the stock package ---


def test_the_stock_package_reads_what_we_write() -> None:
    stock = pytest.importorskip("safetensors.torch")
    torch = pytest.importorskip("torch")
    tensors = {n: torch.arange(6).reshape(2, 3).to(getattr(torch, n)) for n in ("bfloat16", "float16", "float64", "int8", "bool", "int64")}
    tensors |= {"scalar": torch.tensor(3.5), "empty": torch.zeros(2, 0, 3), 'odd "\\\n\x01é\u2028': torch.ones(3, dtype=torch.uint8)}
    read = stock.load(bytes(joined(tensors, {"sluice.ref": '{"a":"b"}', "line\n": "\x01"})))
    assert read.keys() == tensors.keys()
    for name, t in tensors.items():
        assert read[name].dtype == t.dtype
        assert torch.equal(read[name], t)


def test_we_read_what_the_stock_package_writes() -> None:
    stock = pytest.importorskip("safetensors.torch")
    torch = pytest.importorskip("torch")
    tensors = {n: torch.arange(6).reshape(2, 3).to(getattr(torch, n)) for n in ("bfloat16", "float16", "float64", "int8", "bool", "int64")}
    tensors |= {"scalar": torch.tensor(3.5), "empty": torch.zeros(2, 0, 3)}
    data = bytearray(stock.save(tensors, {"a": "b\n"}))
    assert parse_header(data).metadata == {"a": "b\n"}
    read = decode(data, list(tensors), "torch")
    for name, t in tensors.items():
        assert read[name].dtype == t.dtype
        assert torch.equal(read[name], t)


# --- no copies ---


def test_encode_gives_out_the_memory_of_contiguous_tensors() -> None:
    array = np.arange(64, dtype=np.int64)
    part = encode({"x": array.reshape(8, 8)}, {})[1][0]
    assert np.shares_memory(np.frombuffer(part, np.uint8), array)
    assert (part.format, part.ndim, part.nbytes) == ("B", 1, 512)
    torch = pytest.importorskip("torch")
    for tensor in (torch.ones(4, 16, dtype=torch.bfloat16), torch.ones(3, 8, requires_grad=True), torch.ones(4, 4)[1:3], torch.tensor(1.0)):
        part = encode({"x": tensor}, {})[1][0]
        assert np.frombuffer(part, np.uint8).ctypes.data == tensor.data_ptr()
        assert part.nbytes == tensor.numel() * tensor.element_size()


def test_what_encode_gives_out_keeps_the_tensor_alive() -> None:
    torch = pytest.importorskip("torch")
    made: list[Any] = [np.full(1000, 7, np.uint8), torch.full((1000,), 7, dtype=torch.uint8)]
    parts = [encode({"x": made.pop()}, {})[1][0] for _ in range(2)]
    gc.collect()
    noise = [np.zeros(1000, np.uint8) for _ in range(100)]
    assert all(bytes(p) == b"\x07" * 1000 for p in parts)
    assert len(noise) == 100


def test_encode_copies_no_bytes_of_a_large_tensor() -> None:
    array = np.ones(32 << 20, np.uint8)
    tracemalloc.start()
    header, parts = encode({"x": array}, {})
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20
    assert parts[0].nbytes == 32 << 20


@pytest.mark.parametrize("framework", ["torch", "numpy"])
def test_decode_gives_out_the_buffer_and_writes_go_through(framework: Any) -> None:
    if framework == "torch":
        pytest.importorskip("torch")
    data = joined({"x": np.arange(64, dtype=np.int32), "y": np.zeros(3, np.int8)})
    start = parse_header(data).data_start
    tensors = decode(data, ["y", "x"], framework)
    tensors["x"][1] = -1
    data[start] = 9
    assert data[start + 4 : start + 8] == b"\xff\xff\xff\xff"
    assert tensors["x"][0] == 9


def test_every_dtype_of_torch_is_writable_in_place() -> None:
    torch = pytest.importorskip("torch")
    for name in (n for n in dtypes.NAMES if hasattr(torch, n)):
        data = joined({"x": torch.zeros(2, 3).to(getattr(torch, name)), "s": torch.zeros(()).to(getattr(torch, name))})
        tensors: dict[str, Any] = decode(data, ["x", "s"], "torch")
        before = bytes(data)
        tensors["x"].fill_(1)
        tensors["s"].fill_(1)
        assert data != before
        assert decode(data, ["s"], "torch")["s"].item() == 1


@pytest.mark.parametrize("framework", ["torch", "numpy"])
def test_a_mapping_ends_with_its_last_tensor_and_not_before(framework: Any, tmp_path: Path) -> None:
    if framework == "torch":
        pytest.importorskip("torch")
    path = tmp_path / "x.safetensors"
    path.write_bytes(joined({"x": np.arange(1000), "y": np.ones(5, np.float32), "b": np.ones(3, bool)}))
    with open(path, "rb") as f:
        mapping = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_COPY)
    tensors: dict[str, Any] = decode(mapping, ["x", "y", "b"], framework)
    with pytest.raises(BufferError):
        mapping.close()
    ended = weakref.ref(mapping)
    del mapping
    part = tensors.pop("x")[10:20]
    tensors.clear()
    gc.collect()
    assert ended() is not None
    part[0] = -7
    assert part.tolist() == [-7, *range(11, 20)]
    del part
    gc.collect()
    assert ended() is None
    assert decode(bytearray(path.read_bytes()), ["x"], framework)["x"][10] == 10, "a private mapping was written to the file"


def test_over_a_read_only_buffer_numpy_is_read_only_and_torch_refuses(tmp_path: Path) -> None:
    data = bytes(joined({"x": np.arange(4)}))
    x: Any = decode(data, ["x"], "numpy")["x"]
    assert not x.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        x[0] = 1
    pytest.importorskip("torch")
    with pytest.raises(InvalidError, match="is read-only, and torch"):
        decode(data, ["x"], "torch")


def test_a_tensor_that_is_not_aligned_is_copied() -> None:
    torch = pytest.importorskip("torch")
    text = '{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"b":{"dtype":"I64","shape":[2],"data_offsets":[1,17]}}'
    text += " " * (-(8 + len(text)) % 8)
    data = bytearray(file_of(text) + b"\x05" + struct.pack("<2q", 7, -8))
    for framework in ("numpy", "torch"):
        b: Any = decode(data, ["b"], framework)["b"]
        assert b.tolist() == [7, -8]
        address = b.data_ptr() if isinstance(b, torch.Tensor) else b.ctypes.data
        assert address % 8 == 0
        b[0] = 1
    assert data[-16:] == struct.pack("<2q", 7, -8)


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, lambda b: np.frombuffer(b, np.uint8), lambda b: memoryview(b).cast("b")])
def test_any_contiguous_buffer_will_do(kind: Any) -> None:
    data = kind(bytes(joined({"x": np.arange(4)})))
    assert decode(data, ["x"], "numpy")["x"].tolist() == [0, 1, 2, 3]


def test_a_buffer_with_holes_is_refused() -> None:
    with pytest.raises(InvalidError, match="is not contiguous"):
        parse_header(memoryview(bytes(100))[::2])


# --- what goes in ---


def test_big_endian_arrays_are_converted() -> None:
    for name in ("int16", "float64", "uint32"):
        array = np.array([[1, 2], [3, 250]]).astype(np.dtype(name).newbyteorder(">"))
        back: Any = decode(joined({"x": array}), ["x"], "numpy")["x"]
        assert back.dtype == np.dtype(name)
        assert back.dtype.isnative
        assert back.tolist() == array.tolist()


def test_negative_strides_broadcasts_and_views_keep_their_values() -> None:
    base = np.arange(24, dtype=np.int16).reshape(2, 3, 4)
    for view in (
        base[::-1],
        base[::2, ::3, ::4],
        base[:, ::-1, ::2],
        base.T,
        np.broadcast_to(np.int16(3), (2, 5)),
        np.array(base[1, 1, 1]),
        np.asfortranarray(base),
    ):
        back = decode(joined({"x": view}), ["x"], "numpy")["x"]
        assert back.shape == view.shape
        assert np.array_equal(back, view)
    torch = pytest.importorskip("torch")
    t = torch.arange(24).reshape(2, 3, 4)
    lazily_negated = torch.imag(torch.tensor([1 + 2j, 3 - 4j]).conj())
    assert lazily_negated.is_neg()
    for tensor in (
        t.permute(2, 0, 1),
        t.flip(0),
        t[:, :, 1],
        t.expand(5, 2, 3, 4),
        t.float().requires_grad_() * 2,
        lazily_negated,
        t.narrow(2, 1, 2),
        t[::2, ::3, ::4],
    ):
        got: Any = decode(joined({"x": tensor}), ["x"], "torch")["x"]
        assert torch.equal(got, tensor.detach().contiguous())


MASKED: Any = np.zeros(2).view(np.ma.MaskedArray)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ([1, 2], "x: is a builtins.list, want a torch.Tensor or numpy.ndarray"),
        (1.5, "is a builtins.float"),
        (np.float32(1), "is a numpy.float32"),
        (None, "is a builtins.NoneType"),
        (np.zeros(2, complex), "dtype is dtype..complex128.., want one of"),
        (np.array([None]), "dtype is dtype..O"),
        (np.zeros(2, "M8[s]"), "dtype is"),
        (np.zeros(2, [("a", "i4")]), "dtype is"),
        (MASKED, "is a masked array"),
        (np.zeros((1,) * 17, np.int8), "shape has 17 axes"),
    ],
)
def test_what_is_no_dense_tensor_is_refused_by_name(bad: Any, message: str) -> None:
    for call in (lambda t: encode(t, {}), specs_of):
        with pytest.raises(InvalidError, match=message):
            call({"x": bad})


def test_tensors_of_torch_without_dense_data_are_refused() -> None:
    torch = pytest.importorskip("torch")
    for bad, message in [
        (torch.zeros(2, 2).to_sparse(), "layout torch.sparse_coo"),
        (torch.zeros(2, device="meta"), "meta device"),
        (torch.zeros(2, dtype=torch.complex64), "dtype is torch.complex64"),
        (torch.quantize_per_tensor(torch.zeros(2), 1.0, 0, torch.quint8), "dtype is torch.quint8"),
    ]:
        with pytest.raises(InvalidError, match=message):
            encode({"x": bad}, {})


@pytest.mark.parametrize("name", ["__metadata__", "\ud800", 7, None])
def test_a_bad_name_is_refused(name: Any) -> None:
    with pytest.raises(InvalidError, match="is the name of a tensor"):
        encode({name: np.zeros(1)}, {})


@pytest.mark.parametrize("metadata", [{"a": 1}, {1: "a"}, {"a": "\ud800"}, {"\udfff": ""}, {"a": None}])
def test_bad_metadata_is_refused(metadata: Any) -> None:
    with pytest.raises(InvalidError, match="want two strings"):
        encode({}, metadata)


def test_a_header_above_the_formats_bound_is_refused() -> None:
    with pytest.raises(InvalidError, match="want at most 100000000"):
        encode({}, {"a": "x" * tensorfile.MAX_HEADER})


def test_specs_say_shape_and_dtype_in_order() -> None:
    torch = pytest.importorskip("torch")
    specs = specs_of({"b": torch.zeros(2, 3, dtype=torch.bfloat16), "a": np.zeros((), ">i8"), "c": np.zeros((0, 4), bool)})
    assert list(specs.items()) == [
        ("b", FeatureSpec((2, 3), "bfloat16")),
        ("a", FeatureSpec((), "int64")),
        ("c", FeatureSpec((0, 4), "bool")),
    ]


# --- what comes in ---


def test_a_missing_tensor_is_not_found() -> None:
    with pytest.raises(KeyError) as e:
        decode(joined({"x": np.zeros(1)}), ["y"], "numpy")
    assert isinstance(e.value, NotFoundError)
    assert "y" in str(e.value)
    assert "'x'" in str(e.value)


def test_an_unknown_framework_is_refused() -> None:
    with pytest.raises(InvalidError, match="is 'jax', want"):
        decode(joined({}), [], "jax")  # type: ignore[arg-type]


def test_dtypes_that_the_framework_lacks_are_unsupported(monkeypatch: pytest.MonkeyPatch) -> None:
    data = bytearray(
        file_of('{"x":{"dtype":"F8_E5M2","shape":[2],"data_offsets":[0,2]},"y":{"dtype":"F4","shape":[2],"data_offsets":[2,3]}}', 3)
    )
    header = parse_header(data)
    assert [(e.dtype, e.nbytes) for e in header.entries.values()] == [("float8_e5m2", 2), ("F4", 1)]
    with pytest.raises(UnsupportedError, match="y: has the dtype F4"):
        decode(data, ["y"], "numpy")
    torch = pytest.importorskip("torch")
    monkeypatch.delattr(torch, "float8_e5m2", raising=False)
    with pytest.raises(UnsupportedError, match="float8_e5m2"):
        decode(data, ["x"], "torch")


ONE = '{"x":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}'


def test_stock_headers_in_other_spellings_are_read() -> None:
    text = '{ "x"\n:\t{"shape" : [ 2 ,\r1],"data_offsets":[0,4] , "dt\\u0079pe":"BF16"}, "__metadata__":{ } ,'
    text += '"e":{"dtype":"F32","shape":[0],"data_offsets":[4,4]}}  '
    header = parse_header(file_of(text, 4))
    assert [(e.name, e.dtype, e.shape) for e in header.entries.values()] == [("x", "bfloat16", (2, 1)), ("e", "float32", (0,))]
    assert list(
        parse_header(
            file_of('{"b":{"dtype":"U8","shape":[1],"data_offsets":[1,2]},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', 2)
        ).entries
    ) == ["a", "b"]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is 0 bytes long, want at least the 8"),
        (bytes(7), "is 7 bytes long"),
        (bytes(8), "starts with ''"),
        (struct.pack("<Q", 100_000_001) + bytes(100), "header length: is 100000001, want at most 100000000"),
        (struct.pack("<Q", 2**64 - 1) + bytes(100), "is 18446744073709551615"),
        (struct.pack("<Q", 50) + b"{}", "is 50, but only 2 bytes follow"),
        (file_of(" {}"), "starts with ' '"),
        (file_of("[]"), r"starts with '\['"),
        (file_of(b"{\xff}"), "not valid UTF-8 at byte 1"),
        (file_of("{"), "wants a string"),
        (file_of("{}x"), "has more behind"),
        (file_of("{}\n"), "has more behind"),
        (file_of("{}{}"), "has more behind"),
        (file_of("{},"), "has more behind"),
        (file_of("{x:1}"), "wants a string"),
        (file_of('{"x" 1}'), "wants ':'"),
        (file_of('{"x":1}'), "wants an object with dtype"),
        (file_of('{"x":{}}'), "x: has no dtype"),
        (file_of(ONE[:-1] + ",}", 2), "wants a string"),
        (file_of(ONE[:-1] + "," + ONE[1:], 2), "x: is there twice"),
        (file_of('{"__metadata__":{},"__metadata__":{}}'), "is there twice"),
        (file_of('{"__metadata__":{"a":"","a":""}}'), "has the key 'a' twice"),
        (file_of('{"__metadata__":{"a":1}}'), "wants a string"),
        (file_of('{"__metadata__":null}'), "wants an object of strings"),
        (file_of(ONE.replace('"x"', '"__metadata__"'), 2), "__metadata__: wants a string"),
        (file_of('{"\\ud800":{}}'), "half of a surrogate pair"),
        (file_of('{"\\q":{}}'), "has a bad string"),
        (file_of('{"a\nb":{}}'), "has a bad string"),
        (file_of('{"a'), "has a bad string"),
        (file_of(ONE.replace("U8", "U7"), 2), "dtype tag is 'U7'"),
        (file_of(ONE.replace("U8", "u8"), 2), "dtype tag is 'u8'"),
        (file_of(ONE.replace('"U8"', "8"), 2), "wants a string"),
        (file_of(ONE.replace('"shape"', '"Shape"'), 2), "has a field 'Shape'"),
        (file_of(ONE.replace('"shape"', '"dtype":"U8","shape"'), 2), "has dtype twice"),
        (file_of(ONE.replace('"shape":[2],', ""), 2), "has no shape"),
        (file_of(ONE.replace(',"data_offsets":[0,2]', ""), 2), "has no data_offsets"),
        (file_of(ONE.replace("[2]", "[-2]"), 2), "wants shape as an array"),
        (file_of(ONE.replace("[2]", "[2.0]"), 2), "wants shape as an array"),
        (file_of(ONE.replace("[2]", "[2e0]"), 2), "wants shape as an array"),
        (file_of(ONE.replace("[2]", "[true]"), 2), "wants shape as an array"),
        (file_of(ONE.replace("[2]", "[[2]]"), 2), "wants shape as an array"),
        (file_of(ONE.replace("[2]", "[\u0662]"), 2), "wants shape as an array"),
        (file_of(ONE.replace("[2]", "[02]"), 2), "shape has '02'"),
        (file_of(ONE.replace("[2]", "[1 2]"), 2), "shape has '1 2'"),
        (file_of(ONE.replace("[2]", "[2,]"), 2), "shape has ''"),
        (file_of(ONE.replace("[2]", "[,2]"), 2), "shape has ''"),
        (file_of(ONE.replace("[2]", "[9223372036854775808]"), 2), "shape has '9223372036854775808'"),
        (file_of(ONE.replace("[2]", "[9007199254740992]"), 2), r"less than 2\^53"),
        (file_of(ONE.replace("[2]", "[1000000000000,1000000000000]"), 2), "overflows"),
        (file_of(ONE.replace("[2]", "[" + "1," * 16 + "2]"), 2), "more than 16 numbers"),
        (file_of(ONE.replace("[0,2]", "[0]"), 2), "data_offsets has 1 numbers"),
        (file_of(ONE.replace("[0,2]", "[]"), 2), "data_offsets has 0 numbers"),
        (file_of(ONE.replace("[0,2]", "[0,1,2]"), 2), "more than 2 numbers"),
        (file_of(ONE.replace("[0,2]", "[2,0]"), 2), r"data_offsets is \[2,0\], -2 bytes"),
        (file_of(ONE.replace("[0,2]", "[0,3]"), 3), "3 bytes, want 2 for U8"),
        (file_of(ONE.replace("[0,2]", "[1,3]"), 3), "begins at byte 1 of the data, want 0: nothing covers"),
        (file_of(ONE, 1), "is 1 bytes long, but the tensors end at byte 2"),
        (file_of(ONE, 3), "is 3 bytes long, but the tensors end at byte 2"),
        (
            file_of(ONE[:-1] + ',"y":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}}', 3),
            "y: begins at byte 1 of the data, want 2: it overlaps",
        ),
        (file_of('{"x":{"dtype":"F4","shape":[3],"data_offsets":[0,2]}}', 2), "is 12 bits, want whole bytes"),
    ],
)
def test_what_is_no_valid_file_is_corrupt(data: bytes, message: str) -> None:
    with pytest.raises(CorruptError, match=message) as e:
        parse_header(data)
    assert isinstance(e.value, RuntimeError)
    assert len(str(e.value)) < 600
    with pytest.raises(CorruptError):
        decode(bytearray(data), [], "numpy")


def test_a_header_alone_is_enough_with_the_size_of_the_file() -> None:
    data = bytes(joined({"x": np.zeros(1000)}))
    start = parse_header(data).data_start
    assert parse_header(data[:start], len(data)) == parse_header(data) == parse_header(data[: start + 5], len(data))
    with pytest.raises(CorruptError, match=f"is {start - 8} bytes long, only 56 of them are here"):
        parse_header(data[:64], len(data))
    with pytest.raises(CorruptError, match="but the tensors end"):
        parse_header(data[:start], len(data) - 1)
    with pytest.raises(CorruptError, match="want at least the 8"):
        parse_header(data, 3)


def test_a_header_that_was_read_before_is_not_read_again() -> None:
    data = joined({"x": np.arange(4)})
    header = parse_header(data)
    data[8 : header.data_start] = b" " * (header.data_start - 8)
    assert decode(data, ["x"], "numpy", header=header)["x"].tolist() == [0, 1, 2, 3]
    for other in (data[:-1], data + b"x"):
        with pytest.raises(InvalidError, match="the header is of a file of"):
            decode(other, ["x"], "numpy", header=header)


def test_names_of_strangers_are_not_echoed_raw() -> None:
    for name in ("\\u001b[2J", "x" * 5000):
        with pytest.raises(CorruptError) as e:
            parse_header(file_of(f'{{"{name}":1}}'))
        assert "\x1b" not in str(e.value)
        assert len(str(e.value)) < 300


def test_a_hostile_header_takes_no_more_memory_than_its_size() -> None:
    text = b'{"x":{"dtype":"U8","shape":[' + b"1," * 2_000_000 + b"1]"
    nested = b'{"x":' + b"[" * 4_000_000
    tracemalloc.start()
    try:
        for bad in (text, nested):
            data = file_of(bad)
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            with pytest.raises(CorruptError):
                parse_header(data)
            assert tracemalloc.get_traced_memory()[1] - before < 3 * len(data)
    finally:
        tracemalloc.stop()


def test_random_damage_is_corrupt_or_leaves_a_valid_file() -> None:
    rng = random.Random(9)
    good = bytes(joined({"a": np.zeros((2, 3), np.int16), "b": np.zeros(5, np.uint8), "c": np.zeros(())}, {"k": 'v"\n'}))
    head = parse_header(good).data_start
    refused = 0
    for _ in range(3000):
        data = bytearray(good)
        for _ in range(rng.randrange(1, 4)):
            at = rng.randrange(head)
            if rng.random() < 0.5:
                data[at] = rng.randrange(256)
            else:
                data[at : at + 1] = bytes([rng.choice(b'{}[]",:0123456789\\eU8')])
        try:
            header = parse_header(data)
        except CorruptError:
            refused += 1
            continue
        assert header.size == len(data)
        assert sum(e.nbytes for e in header.entries.values()) == header.size - header.data_start
        assert json.loads(data[8 : header.data_start])
    assert refused > 1000


def test_a_torch_that_another_thread_is_importing_is_not_there_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", types.ModuleType("torch"))
    assert tensorfile.specs_of({"x": np.zeros((1, 2), np.float32)})["x"].nbytes == 8
