"""Safetensors bytes to tensors and back, without copies.

The layout that encode gives is the service's own, to the byte: the header is padded so that data begins at a multiple of 64 bytes, tensors
whose size is a
multiple of 64 come first, then wider elements before narrower ones, then names in byte order. Reading is strict, since a header is input
from strangers, and takes what
the stock packages write. Hosts are little-endian.
"""

from __future__ import annotations

import json
import mmap
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, Union, cast

import numpy as np
import numpy.typing as npt

from . import dtypes
from .errors import CorruptError, InvalidError, NotFoundError, SluiceError, UnsupportedError
from .refs import FeatureSpec

if TYPE_CHECKING:
    import torch

__all__ = ["CHECKSUMS_KEY", "MAX_HEADER", "REF_KEY", "Buffer", "Entry", "Header", "Tensor", "decode", "encode", "parse_header", "specs_of"]

Tensor: TypeAlias = Union["torch.Tensor", npt.NDArray[Any]]
Buffer: TypeAlias = bytes | bytearray | memoryview | mmap.mmap | npt.NDArray[np.uint8]

REF_KEY = "sluice.ref"
"""Metadata key of the canonical JSON of the sample's ref."""
CHECKSUMS_KEY = "sluice.crc32c"
"""Metadata key of the tensors' checksums."""
MAX_HEADER = 100_000_000
"""Largest length of a header, in bytes, that the format allows."""

_MAX_ITEMS = 1 << 20
_ALIGNMENT = 64
_LENGTH_BYTES = 8
_MAX_RANK = 16
_MAX_INT64 = (1 << 63) - 1
_METADATA = "__metadata__"

# Bits an element of the format's dtypes that no feature has: such tensors are listed, but cannot be decoded.
_FOREIGN_BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "C64": 64}


@dataclass(frozen=True)
class Entry:
    """One tensor of a file. start and end bound its bytes, counted from the first byte of data. dtype is a name of dtypes.NAMES, or the
    tag of the file, such as
    "F8_E8M0", for a tensor whose dtype no feature may have."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        """Size of the data in bytes."""
        return self.end - self.start


@dataclass(frozen=True)
class Header:
    """What a file says about itself: its entries in the order of their data, which they cover exactly, its metadata, and the offset of the
    first byte of data."""

    entries: dict[str, Entry]
    metadata: dict[str, str] = field(default_factory=dict)
    data_start: int = 0

    @property
    def size(self) -> int:
        """Size of the whole file in bytes."""
        return self.data_start + max((e.end for e in self.entries.values()), default=0)


def parse_header(buffer: Buffer, size: int | None = None) -> Header:
    """Read the header of a file of size bytes. buffer is the beginning of the file, at least to the end of the header; without size, it is
    the whole file.

    No length is believed before it was checked. Raises CorruptError for whatever is no valid file: duplicate names, unknown fields, holes
    and overlaps in the data,
    shapes that overflow or disagree with their bytes, a file longer or shorter than its header says.
    """
    view = _bytes_of(buffer)
    if size is None:
        size = len(view)
    if min(size, len(view)) < _LENGTH_BYTES:
        raise _corrupt(f"is {max(0, min(size, len(view)))} bytes long, want at least the {_LENGTH_BYTES} of the header length", "file")
    length = int.from_bytes(view[:_LENGTH_BYTES], "little")
    if length > MAX_HEADER:
        raise _corrupt(f"is {length}, want at most {MAX_HEADER}", "header length")
    if length > size - _LENGTH_BYTES:
        raise _corrupt(f"is {length}, but only {size - _LENGTH_BYTES} bytes follow it in the file", "header length")
    if length > len(view) - _LENGTH_BYTES:
        raise _corrupt(f"is {length} bytes long, only {len(view) - _LENGTH_BYTES} of them are here", "header")
    try:
        text = str(view[_LENGTH_BYTES : _LENGTH_BYTES + length], "utf-8")
    except UnicodeDecodeError as e:
        raise _corrupt(f"is not valid UTF-8 at byte {e.start}", "header") from None
    entries, metadata = _Scanner(text).header()
    header = Header(_cover(entries), metadata, _LENGTH_BYTES + length)
    if header.size != size:
        raise _corrupt(f"is {size - header.data_start} bytes long, but the tensors end at byte {header.size - header.data_start}", "data")
    return header


def encode(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> tuple[bytes, list[memoryview]]:
    """Lay out tensors as a file: its header, then the tensors' bytes in the order in which they lie in the file, without empty ones.

    The bytes are the tensors' own memory where they are contiguous and on the CPU, else a copy; big-endian numpy arrays are converted. So
    the tensors must not change until the bytes are
    written. Raises InvalidError for what is no dense tensor of a known dtype, for a name that is not UTF-8 or is "__metadata__", and for
    metadata that are not strings.
    """
    specs = specs_of(tensors)
    for key, value in metadata.items():
        if not isinstance(key, str) or not isinstance(value, str) or not _is_utf8(key) or not _is_utf8(value):
            raise _invalid(f"has {key!r:.80}: {value!r:.80}, want two strings of valid UTF-8", "metadata")
    if len(tensors) > _MAX_ITEMS or len(metadata) >= _MAX_ITEMS:
        raise _invalid(f"are {len(tensors)} with {len(metadata)} keys of metadata, want at most {_MAX_ITEMS}", "tensors")
    order = sorted(specs, key=lambda name: (specs[name].nbytes % _ALIGNMENT != 0, -dtypes.itemsize(specs[name].dtype_name), name))
    members = []
    if metadata:
        members.append(f"{_quoted(_METADATA)}:{{{','.join(f'{_quoted(k)}:{_quoted(metadata[k])}' for k in sorted(metadata))}}}")
    end = 0
    for name in order:
        spec = specs[name]
        start, end = end, end + spec.nbytes
        if end > _MAX_INT64 - 2 * MAX_HEADER:
            raise _invalid(f"begins at byte {start} and takes {spec.nbytes} more, which overflows", name)
        shape = ",".join(map(str, spec.shape))
        members.append(f'{_quoted(name)}:{{"dtype":"{dtypes.tag(spec.dtype_name)}","shape":[{shape}],"data_offsets":[{start},{end}]}}')
    text = f"{{{','.join(members)}}}".encode()
    text += b" " * (-(_LENGTH_BYTES + len(text)) % _ALIGNMENT)
    if len(text) > MAX_HEADER:
        raise _invalid(f"is {len(text)} bytes long, want at most {MAX_HEADER}", "header")
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text, [_memory(tensors[name]) for name in order if specs[name].nbytes]


def decode(
    buffer: Buffer, names: Sequence[str], framework: Literal["torch", "numpy"] | None = None, *, header: Header | None = None
) -> dict[str, Tensor]:
    """Make the named tensors of a file, in that order, over the buffer that holds the whole file. header is what parse_header gave for it,
    if that was asked before.

    framework is "torch" or "numpy"; None takes torch where it is installed. Nothing is copied, but for a tensor that is not aligned to its
    elements, which no file of this package has. Each tensor keeps the buffer
    alive (a mapping ends with its last tensor), and what is written to it is written to the buffer. Over a buffer that is read-only, numpy
    arrays are read-only.

    Raises CorruptError for what is no valid file, NotFoundError for a tensor that is not there, UnsupportedError for a dtype that the
    framework does not have, and InvalidError
    for torch over a read-only buffer, since torch has no tensors that cannot be written.
    """
    if framework not in (None, "torch", "numpy"):
        raise _invalid(f"is {framework!r:.80}, want 'torch', 'numpy' or None", "framework")
    torch = None if framework == "numpy" else dtypes.torch_module()
    if framework == "torch" and torch is None:
        raise UnsupportedError("torch is not installed", op="tensorfile: decode")
    header = header or parse_header(buffer)
    data = np.frombuffer(buffer, np.uint8)
    if data.size != header.size:
        raise _invalid(f"is {data.size} bytes long, the header is of a file of {header.size}", "buffer")
    if torch is not None and not data.flags.writeable:
        raise _invalid(
            "is read-only, and torch has no tensors that cannot be written",
            "buffer",
            hint='pass a bytearray or a private mapping, or framework="numpy"',
        )
    tensors: dict[str, Tensor] = {}
    for name in names:
        entry = header.entries.get(name)
        if entry is None:
            raise NotFoundError(
                f"is not in the file, which has {list(header.entries)!r:.300}", op="tensorfile: decode", subject=_shown(name)
            )
        if entry.dtype not in dtypes.NAMES:
            raise UnsupportedError(f"has the dtype {entry.dtype}, which no feature may have", op="tensorfile: decode", subject=_shown(name))
        part = data[header.data_start + entry.start : header.data_start + entry.end]
        tensors[name] = _array(part, entry) if torch is None else _torch_tensor(torch, part, entry)
    return tensors


def specs_of(tensors: Mapping[str, Tensor]) -> dict[str, FeatureSpec]:
    """Return shape and dtype of each tensor, in the mapping's order. Raises InvalidError for what is no dense tensor of a known dtype."""
    specs = {}
    for name, tensor in tensors.items():
        if not isinstance(name, str) or not _is_utf8(name) or name == _METADATA:
            raise _invalid(f"is the name of a tensor, want another string of valid UTF-8 than {_METADATA!r}", f"{name!r:.80}")
        if fault := _tensor_fault(tensor):
            raise _invalid(fault, name)
        try:
            specs[name] = FeatureSpec(tuple(tensor.shape), tensor.dtype)
        except InvalidError as e:
            raise _invalid(e.detail, name) from None
    return specs


def _shown(name: str) -> str:
    """Return the name of a tensor as it may stand in a message: files of strangers name theirs as they like."""
    return name if name.isprintable() and len(name) <= 80 else f"{name!r:.80}"


def _invalid(detail: str, subject: str, hint: str = "") -> InvalidError:
    return InvalidError(detail, op="tensorfile", subject=_shown(subject), hint=hint)


def _corrupt(detail: str, subject: str) -> CorruptError:
    return CorruptError(detail, op="tensorfile: parse", subject=_shown(subject))


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _bytes_of(buffer: Buffer) -> memoryview:
    view = memoryview(cast(Any, buffer))
    if not view.c_contiguous:
        raise _invalid("is not contiguous", "buffer")
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


def _is_torch(tensor: object) -> bool:
    torch = dtypes.loaded_torch()
    return torch is not None and isinstance(tensor, torch.Tensor)


def _tensor_fault(tensor: Any) -> str:
    """Say why this is no dense tensor, or "" if it is one."""
    if _is_torch(tensor):
        if str(tensor.layout) != "torch.strided":
            return f"is a tensor of the layout {tensor.layout}, want a dense one"
        if tensor.device.type == "meta":
            return "is a tensor on the meta device, which has no data"
        return ""
    if not isinstance(tensor, np.ndarray):
        return f"is a {type(tensor).__module__}.{type(tensor).__qualname__}, want a torch.Tensor or numpy.ndarray"
    if isinstance(tensor, np.ma.MaskedArray):
        return "is a masked array, want a plain one"
    return ""


def _memory(tensor: Any) -> memoryview:
    """Return the bytes of a tensor that is not empty, its own where that is possible."""
    if _is_torch(tensor):
        torch = dtypes.loaded_torch()
        assert torch is not None
        # Elements that numpy does not have pass as bytes. To be viewed so, a tensor must have an axis, and one of stride 1, which an axis
        # of length 1 need not have.
        dense = tensor.detach().cpu().resolve_neg().contiguous()
        array: npt.NDArray[Any] = dense.as_strided((dense.numel(),), (1,)).view(torch.uint8).numpy()
    else:
        array = np.asarray(tensor)
        if not array.dtype.isnative:
            array = array.astype(array.dtype.newbyteorder("="))
        array = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return memoryview(cast(Any, array))


_CARRIER = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}


def _aligned(part: npt.NDArray[np.uint8], width: int) -> npt.NDArray[np.uint8]:
    return part if part.ctypes.data % width == 0 else part.copy()


def _array(part: npt.NDArray[np.uint8], entry: Entry) -> npt.NDArray[Any]:
    dtype = dtypes.numpy_dtype(entry.dtype)
    return _aligned(part, dtype.itemsize).view(dtype).reshape(entry.shape)


def _torch_tensor(torch: Any, part: npt.NDArray[np.uint8], entry: Entry) -> Tensor:
    dtype = dtypes.torch_dtype(entry.dtype)
    width = dtypes.itemsize(entry.dtype)
    # numpy in between, which holds an export of the buffer: torch.frombuffer does not keep a mapping from being closed under its tensors.
    carrier = _aligned(part, width).view(_CARRIER[width]).reshape(entry.shape)
    tensor: Tensor = torch.from_numpy(carrier).view(dtype)
    return tensor


_PLAIN = re.compile(r'[^\x00-\x1f"\\]*\Z')
_ESCAPED = re.compile(r'[\x00-\x1f"\\]')


def _quoted(text: str) -> str:
    if not _PLAIN.match(text):
        text = _ESCAPED.sub(lambda m: f"\\u{ord(m.group()):04x}" if m.group() < " " else "\\" + m.group(), text)
    return f'"{text}"'


def _cover(entries: dict[str, Entry]) -> dict[str, Entry]:
    """Put the entries in the order of their data, and check that they leave no hole and overlap nowhere."""
    ordered = sorted(entries.values(), key=lambda e: (e.start, e.end))
    end = 0
    for e in ordered:
        if e.start != end:
            fault = "it overlaps another tensor" if e.start < end else f"nothing covers the {e.start - end} bytes between"
            raise _corrupt(f"begins at byte {e.start} of the data, want {end}: {fault}", e.name)
        end = e.end
    return {e.name: e for e in ordered}


# A tensor as nearly every writer lists it, with nothing to unescape: the scanner reads whatever else there is, and is several times slower.
_USUAL = re.compile(
    r'"([^"\\\x00-\x1f]*)":\{"dtype":"([A-Z0-9_]*)","shape":\[((?:(?:0|[1-9][0-9]{0,15}),){0,15}(?:0|[1-9][0-9]{0,15})|)\],'
    r'"data_offsets":\[(0|[1-9][0-9]{0,15}),(0|[1-9][0-9]{0,15})\]\}'
)
_STRING = json.JSONDecoder()
_SPACE = re.compile(r"[ \t\n\r]*")
_NUMBERS = re.compile(r"\[([0-9 \t\n\r,]*)\]")
_NUMBER = re.compile(r"[ \t\n\r]*(0|[1-9][0-9]{0,18})[ \t\n\r]*\Z")


class _Scanner:
    """Reads the part of JSON that a header consists of, one member at a time: json.loads would let the last of two equal names win, and
    build whatever a header of 100 MB asks for before
    anything could be checked."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.pos = 0
        self.subject = "header"

    def fail(self, detail: str) -> CorruptError:
        return _corrupt(f"{detail} (at character {self.pos} of the header)", self.subject)

    def header(self) -> tuple[dict[str, Entry], dict[str, str]]:
        if not self.text.startswith("{"):
            raise self.fail(f"starts with {self.text[:1]!r}, want '{{'")
        entries: dict[str, Entry] = {}
        metadata: dict[str, str] | None = None
        first = True
        self.take("{")
        while self.member(first):
            first = False
            self.subject = "header"
            usual = _USUAL.match(self.text, self.pos)
            if usual and usual.group(1) == _METADATA:
                usual = None
            name = usual.group(1) if usual else self.key()
            self.subject = name
            if name == _METADATA:
                if metadata is not None:
                    raise self.fail("is there twice, want it once")
                metadata = self.strings()
                continue
            if name in entries:
                raise self.fail("is there twice, want each name once")
            if len(entries) == _MAX_ITEMS:
                raise self.fail(f"is one tensor more than the {_MAX_ITEMS} that are allowed")
            entries[name] = self.usual(usual) if usual else self.entry(name)
        self.subject = "header"
        if self.text[self.pos :].strip(" "):
            raise self.fail("has more behind its closing '}', want nothing but spaces")
        return entries, metadata or {}

    def take(self, c: str) -> bool:
        self.space()
        if self.text.startswith(c, self.pos):
            self.pos += 1
            return True
        return False

    def space(self) -> None:
        m = _SPACE.match(self.text, self.pos)
        assert m is not None  # it matches nothing too
        self.pos = m.end()

    def member(self, first: bool) -> bool:
        if self.take("}"):
            return False
        if not first and not self.take(","):
            raise self.fail("wants ',' or '}'")
        return True

    def open(self, want: str) -> None:
        if not self.take("{"):
            raise self.fail(f"wants {want}")

    def key(self) -> str:
        name = self.string()
        if not self.take(":"):
            raise self.fail("wants ':'")
        return name

    def string(self) -> str:
        self.space()
        if not self.text.startswith('"', self.pos):
            raise self.fail("wants a string")
        try:
            value, self.pos = _STRING.raw_decode(self.text, self.pos)
        except json.JSONDecodeError as e:
            raise self.fail(f"has a bad string: {e.msg}") from None
        assert isinstance(value, str)
        if not _is_utf8(value):
            raise self.fail("has half of a surrogate pair")
        return value

    def strings(self) -> dict[str, str]:
        found: dict[str, str] = {}
        self.open("an object of strings")
        while self.member(not found):
            key = self.key()
            if key in found:
                raise self.fail(f"has the key {key!r:.80} twice, want each once")
            if len(found) == _MAX_ITEMS:
                raise self.fail(f"has more than {_MAX_ITEMS} keys")
            found[key] = self.string()
        return found

    def integers(self, what: str, most: int) -> tuple[int, ...]:
        self.space()
        m = _NUMBERS.match(self.text, self.pos)
        if m is None:
            raise self.fail(f"wants {what} as an array of integers of 0 or more")
        inner = m.group(1)
        if inner.count(",") >= most:
            raise self.fail(f"{what} has more than {most} numbers")
        numbers = []
        for part in inner.split(",") if inner.strip(" \t\n\r") else ():
            n = _NUMBER.match(part)
            if n is None or int(n.group(1)) > _MAX_INT64:
                raise self.fail(f"{what} has {part!r:.60}, want an integer from 0 to {_MAX_INT64}")
            numbers.append(int(n.group(1)))
        self.pos = m.end()
        return tuple(numbers)

    def entry(self, name: str) -> Entry:
        fields: dict[str, Any] = {}
        self.open("an object with dtype, shape and data_offsets")
        while self.member(not fields):
            key = self.key()
            if key in fields:
                raise self.fail(f"has {key} twice, want it once")
            if key == "dtype":
                fields[key] = self.string()
            elif key == "shape":
                fields[key] = self.integers(key, _MAX_RANK)
            elif key == "data_offsets":
                fields[key] = self.integers(key, 2)
            else:
                raise self.fail(f"has a field {key!r:.80}, want dtype, shape and data_offsets only")
        for key in ("dtype", "shape", "data_offsets"):
            if key not in fields:
                raise self.fail(f"has no {key}")
        tag, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
        if len(offsets) != 2:
            raise self.fail(f"data_offsets has {len(offsets)} numbers, want begin and end")
        return self.checked(name, tag, shape, *offsets)

    def usual(self, m: re.Match[str]) -> Entry:
        name, tag, shape, start, end = m.groups()
        self.pos = m.end()
        return self.checked(name, tag, tuple(map(int, shape.split(","))) if shape else (), int(start), int(end))

    def checked(self, name: str, tag: str, shape: tuple[int, ...], start: int, end: int) -> Entry:
        dtype, nbytes = self.size(tag, shape)
        if end - start != nbytes:
            raise self.fail(f"data_offsets is [{start},{end}], {end - start} bytes, want {nbytes} for {tag}{list(shape)}")
        return Entry(name, dtype, shape, start, end)

    def size(self, tag: str, shape: tuple[int, ...]) -> tuple[str, int]:
        """Return the dtype of a tag, and the size in bytes of a tensor with that shape."""
        bits = _FOREIGN_BITS.get(tag)
        try:
            if bits is None:
                dtype = dtypes.name_of_tag(tag)
                return dtype, FeatureSpec(shape, dtype).nbytes
            total = FeatureSpec(shape, "uint8").nbytes * bits
        except SluiceError as e:
            raise self.fail(e.detail) from None
        if total % 8:
            raise self.fail(f"{tag}{list(shape)} is {total} bits, want whole bytes")
        return tag, total // 8
