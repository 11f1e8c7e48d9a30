"""Refs: the tensor-free description of a sample, which travels on the control plane while the tensors stay in a store.

A ref is checked once, when it is made, and cannot change afterwards, to the depths. Its canonical JSON is the same to the byte as that of
the
service, and what the service refuses is refused here too.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import numpy as np

from . import dtypes
from .errors import InvalidError, UnsupportedError

__all__ = ["MAX_REF_BYTES", "FeatureAlgorithm", "FeatureSpec", "FrozenDict", "SampleRef", "assert_no_tensors"]

K = TypeVar("K")
V = TypeVar("V")

MAX_REF_BYTES = 64 << 10
"""Bound of the canonical form of a ref, in bytes."""

_MAX_INTEGER = 1 << 53  # below it, an integer survives a reader that keeps it in a float64
_MAX_INT64 = (1 << 63) - 1
_MAX_RANK = 16
_MAX_FEATURES = 64
_MAX_ATTRIBUTES = 64

_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._:-]{0,199}\Z")
_ID_FORM = '[A-Za-z0-9_][A-Za-z0-9._:-]{0,199} without ".."'
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_SURROGATE = re.compile("[\ud800-\udfff]")


class FeatureAlgorithm(enum.Enum):
    """Which draft family produced a sample. The value is the stable name on the wire. A run with a schema of its own has another name, a
    str."""

    EAGLE3 = "eagle3"
    DFLASH = "dflash"
    DSPARK = "dspark"


class FrozenDict(dict[K, V]):
    """A dict that cannot be changed. It equals a plain dict with the same items, and is hashable if its values are; `dict(frozen)` is a
    copy to change."""

    __slots__ = ()

    def _refuse(self, *_args: object, **_kwargs: object) -> NoReturn:
        raise TypeError("the dict belongs to a ref, which cannot be changed; change a copy: dict(...)")

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))

    def __copy__(self) -> FrozenDict[K, V]:
        return self

    def __deepcopy__(self, _memo: dict[int, Any]) -> FrozenDict[K, V]:
        return self

    def __reduce__(self) -> tuple[type[FrozenDict[K, V]], tuple[dict[K, V]]]:
        return type(self), (dict(self),)


@dataclass(frozen=True, eq=False, repr=False)
class FeatureSpec:
    """Shape and dtype of one feature.

    shape: axes in the producer's order, outermost first; () is a scalar of one element. At most 16 axes, each 0 or more, fewer than 2^53
        bytes together.
    dtype: given as torch.dtype, numpy dtype or name ("bfloat16"). Read back, it is the torch.dtype; a str, the name, where torch is not
        installed or has no such dtype.
    dtype_name: the name, always.

    Raises InvalidError (a ValueError). Making, comparing, hashing, showing and pickling one do not import torch; reading dtype does.
    """

    shape: tuple[int, ...]
    dtype: Any

    def __post_init__(self) -> None:
        name = dtypes.name_of(self.__dict__.pop("dtype"))  # comes back at the first read, by __getattr__
        shape = _shape(self.shape)
        self.__dict__.update(shape=shape, _name=name, _nbytes=_checked_bytes(shape, name))

    if not TYPE_CHECKING:  # a type checker knows the attributes, and shall refuse others

        def __getattr__(self, name: str) -> Any:
            if name != "dtype":
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            try:
                dtype = self.dtype_name if dtypes.torch_module() is None else dtypes.torch_dtype(self.dtype_name)
            except UnsupportedError:  # documented: the name, where torch has no such dtype
                dtype = self.dtype_name
            self.__dict__["dtype"] = dtype
            return dtype

    @property
    def dtype_name(self) -> str:
        """Name of the dtype, such as "bfloat16"."""
        name: str = self.__dict__["_name"]
        return name

    @property
    def nbytes(self) -> int:
        """Size of the feature in bytes."""
        n: int = self.__dict__["_nbytes"]
        return n

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, FeatureSpec):
            return NotImplemented
        return self.shape == other.shape and self.dtype_name == other.dtype_name

    def __hash__(self) -> int:
        return hash((self.shape, self.dtype_name))

    def __repr__(self) -> str:
        return f"{type(self).__name__}(shape={self.shape}, dtype={self.dtype_name!r})"

    def __reduce__(self) -> tuple[type[FeatureSpec], tuple[tuple[int, ...], str]]:
        return type(self), (self.shape, self.dtype_name)


@dataclass(frozen=True, eq=False)
class SampleRef:
    """The tensor-free description of one produced sample.

    sample_id, run_id: [A-Za-z0-9_][A-Za-z0-9._:-]{0,199} without "..", unique in the store.
    store_uri: the store that holds the tensors.
    feature_keys: the key under which the store keeps each feature: "<sample_id>/<name>" by the stores of this package.
    feature_specs: shape and dtype of each feature, in the producer's order, which is part of the value. The same names in the same order
        as feature_keys.
    algorithm: the schema's name: a FeatureAlgorithm, or a str for a schema of the run's own. "eagle3" becomes FeatureAlgorithm.EAGLE3.
    schema_version: from 1.
    num_tokens: sum of the attention mask, or of the loss mask where there is none.
    estimated_bytes: sum of the features' bytes, exactly.
    target_model_version, draft_weight_version: of the weights, "0" at first.
    generation: fresh for every put, so that a ref never reads a later put of the same id. "" in a ref made by hand, which has no JSON form.
    attributes: what else must be right, such as shift and aux_layers; the schema says which.

    It is hashable, picklable and copyable; its dicts refuse changes. Refs are equal if every field is, the features' order included.
    Raises InvalidError (a ValueError) that names field and value.
    """

    sample_id: str
    run_id: str
    store_uri: str
    feature_keys: Mapping[str, str]
    feature_specs: Mapping[str, FeatureSpec]
    algorithm: FeatureAlgorithm | str
    schema_version: int
    num_tokens: int
    estimated_bytes: int
    target_model_version: str
    draft_weight_version: str
    generation: str = ""
    attributes: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        fields = self.__dict__
        fields["algorithm"] = self._algorithm()
        self._check_texts()
        for name, least in (("schema_version", 1), ("num_tokens", 0), ("estimated_bytes", 0)):
            fields[name] = self._integer(name, least)
        self._check_features()
        self._check_attributes()
        size = len(self._canonical())
        if size > MAX_REF_BYTES:
            raise self._bad(f"is {size} bytes in canonical form, at most {MAX_REF_BYTES} are allowed")

    def feature_names(self) -> tuple[str, ...]:
        """Return the names of the features in the producer's order."""
        return tuple(self.feature_specs)

    def to_json(self) -> bytes:
        """Return the canonical JSON, in UTF-8: the same bytes as the service's. Raises InvalidError for a ref without generation."""
        self._check_generation()
        return self._canonical()

    def wire(self) -> dict[str, Any]:
        """Return the ref as an object for a JSON body, its fields in canonical order. Raises InvalidError for a ref without generation."""
        self._check_generation()
        return self._object()

    @classmethod
    def from_json(cls, data: str | bytes) -> SampleRef:
        """Read a ref from JSON, fields in any order and with any spacing, but otherwise strictly.

        Field names match exactly and once, every field is there, unknown ones are refused, integers are plain digits. Raises InvalidError.
        """
        if not isinstance(data, (str, bytes, bytearray)):
            raise _unparsed(f"is a {type(data).__name__}, want str or bytes")
        limit = 4 * MAX_REF_BYTES  # spacing and escapes may lengthen the canonical form, within reason
        if len(data) > limit:
            raise _unparsed(f"is longer than {limit} bytes, which is what is allowed")
        try:
            raw = data.encode() if isinstance(data, str) else data
            text = raw.decode()
        except (UnicodeEncodeError, UnicodeDecodeError) as e:
            raise _unparsed(f"is not valid UTF-8: {e.reason} at {e.start}") from None
        if len(raw) > limit:
            raise _unparsed(f"is {len(raw)} bytes, at most {limit} are allowed")
        try:
            value = _DECODER.decode(text)
        except json.JSONDecodeError as e:
            raise _unparsed(f"is not JSON: {e}") from None
        except RecursionError:
            raise _unparsed("is nested too deep") from None
        return cls.from_wire(value)

    @classmethod
    def from_wire(cls, value: Mapping[str, Any]) -> SampleRef:
        """Read a ref from an object of a JSON body, as strictly as from_json. Raises InvalidError."""
        fields = dict(zip(_WIRE_FIELDS, _members(value, _WIRE_FIELDS, "ref"), strict=True))
        keys: dict[str, str] = {}
        specs: dict[str, FeatureSpec] = {}
        if not isinstance(fields["features"], list):
            raise _unparsed(f"features is {fields['features']!r:.80}, want an array")
        for i, item in enumerate(fields.pop("features")):
            name, key, shape, dtype = _members(item, _FEATURE_FIELDS, f"features[{i}]")
            if not isinstance(name, str):
                raise _unparsed(f"features[{i}].name is {name!r:.80}, want a string")
            if name in specs:
                raise _unparsed(f"features[{i}].name is {name!r:.80}, which another feature has too")
            if not isinstance(shape, list) or not isinstance(dtype, str):
                raise _unparsed(
                    f"features[{i}] has the shape {shape!r:.80} and the dtype {dtype!r:.80}, want an array of integers and a string"
                )
            keys[name] = key
            try:
                specs[name] = FeatureSpec(tuple(shape), dtype)
            except InvalidError as e:
                raise _unparsed(f"features[{i}]: {e.detail}") from None
        if not isinstance(fields["algorithm"], str):
            raise _unparsed(f"algorithm is {fields['algorithm']!r:.80}, want a string")
        if not isinstance(fields["attributes"], dict):
            raise _unparsed(f"attributes is {fields['attributes']!r:.80}, want an object")
        ref = cls(feature_keys=keys, feature_specs=specs, **fields)
        ref._check_generation()
        return ref

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SampleRef):
            return NotImplemented
        return self._key() == other._key()

    def __hash__(self) -> int:
        return hash((self.store_uri, self.sample_id, self.generation, self.run_id))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), tuple(getattr(self, f.name) for f in dataclasses.fields(self))

    def __copy__(self) -> SampleRef:
        return self

    def __deepcopy__(self, _memo: dict[int, Any]) -> SampleRef:
        return self

    def _key(self) -> tuple[Any, ...]:
        return (*(getattr(self, f.name) for f in dataclasses.fields(self)), self.feature_names())

    def _bad(self, detail: str) -> InvalidError:
        return InvalidError(detail, op="ref", subject=self.sample_id if _is_id(self.sample_id) else "")

    def _algorithm(self) -> FeatureAlgorithm | str:
        value = self.algorithm
        if isinstance(value, FeatureAlgorithm):
            return value
        if not _is_id(value):
            raise self._bad(f"algorithm is {value!r:.220}, want a FeatureAlgorithm or {_ID_FORM}")
        return _ALGORITHMS.get(value, value)

    def _check_texts(self) -> None:
        for name in ("sample_id", "run_id", "generation"):
            value = getattr(self, name)
            if not _is_id(value) and not (name == "generation" and value == ""):
                raise self._bad(f"{name} is {value!r:.220}, want {_ID_FORM}")
        for name in ("store_uri", "target_model_version", "draft_weight_version"):
            if fault := _text_fault(getattr(self, name), empty=False):
                raise self._bad(f"{name} {fault}")

    def _integer(self, name: str, least: int) -> int:
        value = getattr(self, name)
        if not _is_integer(value) or not least <= value < _MAX_INTEGER:
            raise self._bad(f"{name} is {value!r:.80}, want an integer of {least} or more and less than 2^53")
        return int(value)

    def _check_features(self) -> None:
        keys, specs = self.feature_keys, self.feature_specs
        for name, value in (("feature_keys", keys), ("feature_specs", specs)):
            if not isinstance(value, Mapping):
                raise self._bad(f"{name} is {value!r:.80}, want a dict")
            self.__dict__[name] = FrozenDict(value)
        if list(keys) != list(specs):
            raise self._bad(
                f"feature_keys has the names {list(keys)!r:.300}, feature_specs {list(specs)!r:.300}; want the same in the same order"
            )
        if not specs:
            raise self._bad("feature_specs is empty, want at least one feature")
        if len(specs) > _MAX_FEATURES:
            raise self._bad(f"feature_specs has {len(specs)} entries, at most {_MAX_FEATURES} are allowed")
        total = 0
        for name, spec in specs.items():
            if not _is_id(name):
                raise self._bad(f"feature_specs has the name {name!r:.220}, want {_ID_FORM}")
            if not isinstance(spec, FeatureSpec):
                raise self._bad(f"feature_specs[{name!r}] is {spec!r:.80}, want a FeatureSpec")
            if fault := _text_fault(keys[name], empty=False):
                raise self._bad(f"feature_keys[{name!r}] {fault}")
            total += spec.nbytes
        if total >= _MAX_INTEGER:
            raise self._bad("feature_specs: the features add up to 2^53 bytes or more")
        if total != self.estimated_bytes:
            raise self._bad(f"estimated_bytes is {self.estimated_bytes}, but the features add up to {total}")

    def _check_attributes(self) -> None:
        attributes = self.attributes
        if not isinstance(attributes, Mapping):
            raise self._bad(f"attributes is {attributes!r:.80}, want a dict")
        self.__dict__["attributes"] = FrozenDict(attributes)
        if len(attributes) > _MAX_ATTRIBUTES:
            raise self._bad(f"attributes has {len(attributes)} entries, at most {_MAX_ATTRIBUTES} are allowed")
        for key, value in attributes.items():
            if not _is_id(key):
                raise self._bad(f"attributes has the key {key!r:.220}, want {_ID_FORM}")
            if fault := _text_fault(value, empty=True):
                raise self._bad(f"attributes[{key!r}] {fault}")

    def _check_generation(self) -> None:
        if self.generation == "":
            raise self._bad("generation is '': a ref that no put has made has no JSON form")

    def _object(self) -> dict[str, Any]:
        return {
            "sample_id": self.sample_id,
            "run_id": self.run_id,
            "store_uri": self.store_uri,
            "generation": self.generation,
            "features": [
                {"name": name, "key": self.feature_keys[name], "shape": list(spec.shape), "dtype": spec.dtype_name}
                for name, spec in self.feature_specs.items()
            ],
            "algorithm": self.algorithm.value if isinstance(self.algorithm, FeatureAlgorithm) else self.algorithm,
            "schema_version": self.schema_version,
            "num_tokens": self.num_tokens,
            "estimated_bytes": self.estimated_bytes,
            "target_model_version": self.target_model_version,
            "draft_weight_version": self.draft_weight_version,
            "attributes": dict(sorted(self.attributes.items())),
        }

    def _canonical(self) -> bytes:
        return _ENCODER.encode(self._object()).encode()


_ALGORITHMS = {a.value: a for a in FeatureAlgorithm}
_WIRE_FIELDS = (
    "sample_id", "run_id", "store_uri", "generation", "features", "algorithm", "schema_version", "num_tokens", "estimated_bytes",
    "target_model_version", "draft_weight_version", "attributes",
)  # fmt: skip
_FEATURE_FIELDS = ("name", "key", "shape", "dtype")

# The texts of a ref have no control characters, so that this escapes the quote and the backslash alone.
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), check_circular=False)


def _unparsed(detail: str) -> InvalidError:
    return InvalidError(detail, op="ref: parse")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise _unparsed(f"the field {next(n for n in names if names.count(n) > 1)!r:.80} is there twice")
    return found


def _plain_integer(digits: str) -> int:
    if digits.startswith("-"):
        raise _unparsed(f"found {digits:.24}, want a non-negative integer in plain digits")
    if len(digits) > 16 or int(digits) >= _MAX_INTEGER:  # the length first: int takes square time
        raise _unparsed(f"the integer {digits:.24} is 2^53 or more")
    return int(digits)


def _no_number(text: str) -> NoReturn:
    raise _unparsed(f"found {text:.24}, want a non-negative integer in plain digits")


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_int=_plain_integer, parse_float=_no_number, parse_constant=_no_number)


def _members(value: Any, names: tuple[str, ...], what: str) -> tuple[Any, ...]:
    if not isinstance(value, Mapping):
        raise _unparsed(f"{what} is {value!r:.80}, want an object")
    for name in value:
        if name not in names:
            raise _unparsed(f"{what} has the unknown field {name!r:.80}")
    for name in names:
        if name not in value:
            raise _unparsed(f"{what} lacks the field {name!r}")
    return tuple(value[name] for name in names)


def _is_id(value: object) -> bool:
    return isinstance(value, str) and _ID.match(value) is not None and ".." not in value


def _text_fault(value: object, *, empty: bool) -> str:
    """Say what is wrong with a free string of the wire, or "" if nothing is."""
    if not isinstance(value, str):
        return f"is {value!r:.80}, want a str"
    if not value and not empty:
        return "is empty"
    if found := _CONTROL.search(value):
        return f"contains the control character {found.group()!r}"
    if found := _SURROGATE.search(value):
        return f"is not valid UTF-8: it contains the surrogate {found.group()!r}"
    return ""


def _is_integer(value: object) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _shape(shape: Iterable[Any]) -> tuple[int, ...]:
    if not isinstance(shape, (tuple, list)):
        raise InvalidError(f"shape is {shape!r:.80}, want a tuple of integers", op="spec")
    for i, d in enumerate(shape):
        if not _is_integer(d):
            raise InvalidError(f"shape[{i}] is {d!r:.80}, want an integer", op="spec")
    return tuple(int(d) for d in shape)


def _checked_bytes(shape: tuple[int, ...], name: str) -> int:
    """Return the size in bytes. A zero axis makes it zero, but the others must not overflow either: readers multiply in any order."""
    if len(shape) > _MAX_RANK:
        raise InvalidError(f"shape has {len(shape)} axes, at most {_MAX_RANK} are allowed", op="spec")
    n = dtypes.itemsize(name)
    for i, d in enumerate(shape):
        if not 0 <= d < _MAX_INTEGER:
            raise InvalidError(f"shape[{i}] is {d}, want 0 or more and less than 2^53", op="spec")
        n *= d or 1
    if n > _MAX_INT64:
        raise InvalidError(f"the product of shape {list(shape)} overflows", op="spec")
    if 0 in shape:
        return 0
    if n >= _MAX_INTEGER:
        raise InvalidError(f"{name}{list(shape)} is {n} bytes, want less than 2^53", op="spec")
    return n


_GUARD_DEPTH = 32
_GUARD_NUMBERS = 16
_GUARD_BYTES = 4 << 10
_GUARD_PLAIN = (type(None), bool, int, float)
_GUARD_BUILTIN = (str, bytes, list, tuple, dict)  # no tensors themselves, which need not be asked


def assert_no_tensors(obj: Any, path: str = "ref") -> None:
    """Check that obj carries no tensors, at any depth, and nothing that could hide one: the guard of the control plane.

    It walks dataclasses (attributes that are no field too), dicts with str keys, lists and tuples, at most 32 deep. It lets pass None,
    bool, int, float, str and bytes up to 4 KiB,
    torch dtypes and Enum members. It refuses tensors and whatever quacks like one, lists and tuples with more than 16 numbers, cycles,
    sets and every other object.
    Raises InvalidError (a ValueError) that names where it sits: ref.features[2].key.
    """
    _walk(obj, path, 0, set())


def _walk(obj: Any, path: str, depth: int, above: set[int]) -> None:
    kind = type(obj)

    def fail(detail: str) -> NoReturn:
        raise InvalidError(detail, op="assert no tensors", subject=path)

    if depth > _GUARD_DEPTH:
        fail(f"nested more than {_GUARD_DEPTH} deep")
    if kind in _GUARD_PLAIN or kind in (SampleRef, FeatureSpec):  # those two were checked when they were made
        return
    if kind not in _GUARD_BUILTIN and _quacks(obj):
        fail(f"a tensor ({kind.__module__}.{kind.__qualname__}); the control plane carries refs only")
    if dtypes.is_torch_dtype(obj):
        return
    if id(obj) in above:
        fail("a cycle")
    above.add(id(obj))
    if isinstance(obj, enum.Enum):
        _walk(obj.value, f"{path}.value", depth + 1, above)
        above.remove(id(obj))
        return
    walked: set[str] = set()
    if isinstance(obj, (str, bytes, bytearray)):
        size = len(obj.encode("utf-8", "surrogatepass")) if isinstance(obj, str) else len(obj)
        if size > _GUARD_BYTES:
            fail(f"{size} bytes ({kind.__name__}), at most {_GUARD_BYTES} are allowed")
    elif isinstance(obj, (list, tuple)):
        numbers = sum(isinstance(item, (int, float, complex)) for item in obj)
        if numbers > _GUARD_NUMBERS:
            fail(f"{numbers} numbers ({kind.__name__}), at most {_GUARD_NUMBERS} are allowed")
        for i, item in enumerate(obj):
            _walk(item, f"{path}[{i}]", depth + 1, above)
    elif isinstance(obj, (dict, MappingProxyType)):
        for key, value in obj.items():
            if not isinstance(key, str):
                fail(f"a dict with the key {key!r:.80}, want str keys")
            if len(key) > _GUARD_BYTES:
                fail(f"a key of {len(key)} characters, at most {_GUARD_BYTES} are allowed")
            _walk(value, f"{path}[{json.dumps(key, ensure_ascii=not key.isprintable())}]", depth + 1, above)
    elif isinstance(obj, (set, frozenset)):
        fail(f"a set ({kind.__name__})")
    elif dataclasses.is_dataclass(obj) and not isinstance(obj, type):
        for f in dataclasses.fields(obj):
            walked.add(f.name)
            if hasattr(obj, f.name):
                _walk(getattr(obj, f.name), f"{path}.{f.name}", depth + 1, above)
    elif not isinstance(obj, (int, float)):
        fail(f"an opaque object ({kind.__module__}.{kind.__qualname__})")
    for name, value in getattr(obj, "__dict__", {}).items():  # a tensor hides on a str as well as on a dataclass
        if name not in walked:
            _walk(value, f"{path}.{name}", depth + 1, above)
    above.remove(id(obj))


def _quacks(obj: object) -> bool:
    if isinstance(obj, np.ndarray):
        return True
    if any(hasattr(obj, name) for name in ("__cuda_array_interface__", "__dlpack__")):
        return True
    return all(hasattr(obj, name) for name in ("data_ptr", "is_cuda", "numel"))
