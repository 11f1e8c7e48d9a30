"""Schema documents: what the samples of an algorithm must look like.

A schema is data, never code: which features a sample has, their dtypes and axes, which of them a batch has shifted, which attributes its
ref must carry. The service hands out the document of each run (`spec.schema` of GET /v1/runs/{run}); the built-in ones are the files in the
repository's folder schemas/, which `builtin` has. Nothing in this package knows an algorithm by name.
"""

from __future__ import annotations

import functools
import json
import logging
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from . import dtypes
from .errors import InvalidError, SchemaError

if TYPE_CHECKING:
    from .refs import SampleRef

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

_MAX_INTEGER = 1 << 53
_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._:-]{0,199}")
_AXIS = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,30}")
_FACTOR = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,30}|[1-9][0-9]{0,9}")

ROLES = (
    "input_ids",
    "attention_mask",
    "loss_mask",
    "aux",
    "last",
    "logits",
    "target_probs",
    "position_mask",
    "position_ids",
    "seq_lens",
    "doc_remaining",
)
"""Where a producer takes a feature from, so that nothing outside a schema has to know an algorithm by name."""


@dataclass(frozen=True)
class SchemaFeature:
    """A feature that samples of a schema have or may have."""

    name: str
    source: str
    """The role it is taken from ("from" in the document); empty for a feature that only its owner's producer knows how to make."""
    axes: tuple[str, ...]
    """Names of the axes, outermost first. S is the sequence, along which batches are padded and packed."""
    dtypes: tuple[str, ...]
    required: bool
    shift: bool
    """A batch has this feature shifted left by one along S, zero at the tail."""
    norm: str
    """The norm state, "pre" or "post", that the role last is taken in; empty elsewhere."""
    final_layer_norm: str
    """The norm state that the role aux has for the target's final layer; empty means "pre"."""

    @property
    def in_rows(self) -> bool:
        """Whether its axes begin with [B,S]."""
        return self.axes[:2] == ("B", "S")

    @property
    def is_mask(self) -> bool:
        """Whether it says which positions count in the loss."""
        return self.source in ("loss_mask", "position_mask")


@dataclass(frozen=True)
class Encoding:
    """One way in which a sample can carry its supervision: a set of features that belong together."""

    name: str
    features: tuple[str, ...]


@dataclass(frozen=True)
class AttributeRule:
    """What an attribute of a ref must look like."""

    name: str
    required: bool
    required_with: str
    """Required in samples that have this feature."""
    pattern: str
    """A regular expression, in RE2's syntax, that the whole value matches."""
    counts: str
    """The axis whose length is the number of entries, separated by commas, behind the value's "prefix:"."""
    matches: Callable[[str], object] | None
    """The pattern as Python checks it; None where there is none, or Python has no expression for it."""


@dataclass(frozen=True)
class Schema:
    """A schema document that was read by `Schema.parse`. Immutable."""

    name: str
    version: int
    features: tuple[SchemaFeature, ...]
    rule: str
    """How many encodings a sample has: "exactly_one", "at_most_one", or empty where there are none."""
    default: str
    encodings: tuple[Encoding, ...]
    packing: tuple[str, ...]
    """Features of packed samples: all of these or none."""
    attributes: tuple[AttributeRule, ...]
    min_tokens: int
    min_supervised: int
    _by_name: dict[str, SchemaFeature] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_by_name", {f.name: f for f in self.features})

    @staticmethod
    def parse(document: Mapping[str, Any] | Schema) -> Schema:
        """Read a schema document, as json.loads gives it. A Schema is returned as it is. Raises SchemaError, which names the field."""
        return document if isinstance(document, Schema) else _parse(document)

    def feature(self, name: str) -> SchemaFeature | None:
        """Return the feature with the given name, or None."""
        return self._by_name.get(name)

    def role(self, role: str) -> SchemaFeature | None:
        """Return the feature that is taken from the given role, or None."""
        return next((f for f in self.features if f.source == role), None)

    @property
    def shifts(self) -> bool:
        """Whether batches of the schema are shifted."""
        return any(f.shift for f in self.features)

    def packed(self, ref: SampleRef) -> bool:
        """Report whether the ref carries the schema's packing features."""
        return bool(self.packing) and self.packing[0] in ref.feature_specs

    def validate(self, ref: SampleRef) -> None:
        """Raise SchemaError for the first thing in which the ref does not agree with the schema."""
        try:
            self._validate(ref)
        except _Disagreement as e:
            raise SchemaError(e.args[0], op=f"schema {self.name}", subject=ref.sample_id) from None

    def encoding_of(self, ref: SampleRef) -> str:
        """Return the name of the supervision encoding that the ref carries, or "" if it has none. Raises SchemaError where it has not as
        many as the rule says."""
        try:
            return self._encoding_of(ref)
        except _Disagreement as e:
            raise SchemaError(e.args[0], op=f"schema {self.name}", subject=ref.sample_id) from None

    def _validate(self, ref: SampleRef) -> None:
        algorithm = algorithm_of(ref)
        if algorithm != self.name or ref.schema_version != self.version:
            raise _Disagreement(f"is a sample of {algorithm} version {ref.schema_version}, want {self.name} version {self.version}")
        specs = ref.feature_specs
        for f in self.features:
            if f.required and f.name not in specs:
                raise _Disagreement(f'lacks the required feature "{f.name}"')
        axes: dict[str, int] = {}
        for rule in self.attributes:
            _check_attribute(rule, ref, axes)
        described: list[tuple[SchemaFeature, tuple[int, ...], str]] = []
        for name, spec in specs.items():
            known, shape, dtype = self.feature(name), tuple(spec.shape), dtypes.name_of(spec.dtype)
            if known is None:
                raise _Disagreement(f'has the feature "{name}", which the schema does not know')
            if dtype not in known.dtypes:
                raise _Disagreement(f'feature "{name}" is {dtype}, want one of [{" ".join(known.dtypes)}]')
            if len(shape) != len(known.axes):
                raise _Disagreement(f'feature "{name}" is {spec_text(dtype, shape)}, want the axes [{",".join(known.axes)}]')
            described.append((known, shape, dtype))
        _check_axes(described, axes)
        n = sum(name in specs for name in self.packing)
        if n not in (0, len(self.packing)):
            raise _Disagreement(f"has {n} of the packing features [{' '.join(self.packing)}], want all or none")
        self._encoding_of(ref)

    def _encoding_of(self, ref: SampleRef) -> str:
        found = ""
        for e in self.encodings:
            n = sum(name in ref.feature_specs for name in e.features)
            if n == 0:
                continue
            if n < len(e.features):
                raise _Disagreement(f'has {n} of the features [{" ".join(e.features)}] of the supervision "{e.name}", want all or none')
            if found:
                raise _Disagreement(f'has the supervision "{found}" and "{e.name}", want one')
            found = e.name
        if not found and self.rule == "exactly_one":
            raise _Disagreement(f"has no supervision, want exactly one of [{' '.join(e.name for e in self.encodings)}]")
        return found


class _Disagreement(Exception):
    """What a ref has wrong."""


@functools.cache
def builtin(name: str) -> Schema:
    """Return a schema that the service has built in, by its name. Raises InvalidError for another name."""
    folder = Path(__file__).with_name("schemas")
    known = sorted(path.stem for path in folder.glob("*.json"))
    if name not in known:
        raise InvalidError(f"is {name!r:.80}, want one of {', '.join(known)}", op="schema", subject="name")
    return Schema.parse(json.loads((folder / f"{name}.json").read_bytes()))


def algorithm_of(ref: SampleRef) -> str:
    """Return the wire string of the ref's algorithm, which need not be one of the enum."""
    return str(getattr(ref.algorithm, "value", ref.algorithm))


def spec_text(dtype: str, shape: Sequence[int]) -> str:
    """Show a spec as bfloat16[1,2048,4096]."""
    return f"{dtype}[{','.join(map(str, shape))}]"


def _check_attribute(rule: AttributeRule, ref: SampleRef, axes: dict[str, int]) -> None:
    value = ref.attributes.get(rule.name)
    if value is None:
        if rule.required or rule.required_with and rule.required_with in ref.feature_specs:
            raise _Disagreement(f'lacks the required attribute "{rule.name}"')
        return
    if rule.matches is not None and not rule.matches(value):
        raise _Disagreement(f'attribute "{rule.name}" is "{value[:60]}", want {rule.pattern}')
    _, colon, entries = value.partition(":")
    if colon and rule.counts:  # a value that lists nothing, such as "unknown", binds nothing
        axes[rule.counts] = entries.count(",") + 1


def _check_axes(described: Sequence[tuple[SchemaFeature, tuple[int, ...], str]], axes: dict[str, int]) -> None:
    """Bind axis names to lengths: plain names first, then products, which may settle one unknown factor each; again for as long as that
    binds another name, since it may be the missing one of a product that was looked at before."""
    products, bound, some = False, -1, False
    while not products or some and len(axes) > bound:
        if products:
            bound = len(axes)
        for f, shape, dtype in described:
            for axis, n in zip(f.axes, shape, strict=True):
                product = "*" in axis
                some = some or product
                if product != products:
                    continue
                known, unknown = 1, ""
                for factor in axis.split("*"):
                    length = int(factor) if factor[0].isdigit() else axes.get(factor)
                    if length is None:
                        unknown = "*" if unknown else factor  # two unknown factors: any length will do
                    elif length > 0 and known > _MAX_INTEGER // length:
                        raise _Disagreement(f'feature "{f.name}": axis {axis} is too long')
                    else:
                        known *= length
                if unknown == "*":
                    continue
                if not unknown and n != known:
                    detail = f"axis {axis} is {n}, want {known} as elsewhere in the sample"
                    raise _Disagreement(f'feature "{f.name}" is {spec_text(dtype, shape)}: {detail}')
                if unknown and (known == 0 or n % known):
                    detail = f"axis {axis} is {n}, which is no multiple of {known}"
                    raise _Disagreement(f'feature "{f.name}" is {spec_text(dtype, shape)}: {detail}')
                if unknown:
                    axes[unknown] = n // known
        products = True


class _Object:
    """One object of the document, whose fields are taken by name and type. Fields that nobody takes are refused: one that this version does
    not know may change what a batch is."""

    def __init__(self, value: object, at: str, subject: str = "") -> None:
        self.at, self.subject = at, subject
        if not isinstance(value, Mapping):
            raise self.bad("", f"is a {type(value).__name__}, want an object")
        self.left = dict(value)

    def bad(self, field: str, detail: str) -> SchemaError:
        where = ".".join(p for p in (self.at, field) if p)
        return SchemaError(f"{where} {detail}" if where else detail, op="schema: parse", subject=self.subject)

    def take(self, field: str, kind: type[_T], default: _T) -> _T:
        value = self.left.pop(field, default)
        if not isinstance(value, kind) or isinstance(value, bool) and kind is not bool:
            raise self.bad(field, f"is {value!r:.60}, want {kind.__name__}")
        return value

    def texts(self, field: str) -> tuple[str, ...]:
        value = self.left.pop(field, ())
        if not isinstance(value, (list, tuple)) or not all(isinstance(v, str) for v in value):
            raise self.bad(field, f"is {value!r:.60}, want a list of strings")
        return tuple(value)

    def objects(self, field: str) -> list[_Object]:
        value = self.left.pop(field, ())
        if not isinstance(value, (list, tuple)):
            raise self.bad(field, f"is {value!r:.60}, want a list of objects")
        return [_Object(v, f"{self.at + '.' if self.at else ''}{field}[{i}]", self.subject) for i, v in enumerate(value)]

    def end(self) -> None:
        for name in self.left:
            raise self.bad(str(name)[:60], "is no field of a schema")


def _parse(document: Mapping[str, Any]) -> Schema:
    top = _Object(document, "")
    name = top.take("name", str, "")
    top.subject = name
    if not _valid_id(name):
        raise top.bad("name", f"is {name!r:.60}, want [A-Za-z0-9_][A-Za-z0-9._:-]{{0,199}}")
    version = top.take("version", int, 0)
    if not 1 <= version < _MAX_INTEGER:
        raise top.bad("version", f"is {version}, want 1 or more")
    features: list[SchemaFeature] = []
    for o in top.objects("features"):
        features.append(_parse_feature(o, features))
    if not features:
        raise top.bad("features", "has no entries")
    optional = {f.name for f in features if not f.required}
    supervision = _Object(top.take("supervision", dict, {}), "supervision", name)
    rule, default = supervision.take("rule", str, ""), supervision.take("default", str, "")
    encodings: list[Encoding] = []
    for o in supervision.objects("encodings"):
        e = Encoding(o.take("name", str, ""), o.texts("features"))
        o.end()
        if not e.name or not e.features or any(e.name == other.name for other in encodings):
            raise o.bad("", "wants a name of its own and at least one feature")
        if strange := [n for n in e.features if n not in optional]:
            raise o.bad("features", f"names {strange[0]!r:.60}, which is not an optional feature")
        encodings.append(e)
    supervision.end()
    if encodings and rule not in ("exactly_one", "at_most_one") or not encodings and (rule or default):
        raise supervision.bad("rule", f"is {rule!r:.40}, want exactly_one or at_most_one with encodings, and nothing without")
    if default and all(e.name != default for e in encodings) or rule == "exactly_one" and not default:
        raise supervision.bad("default", f"is {default!r:.40}, which is no encoding")
    packing = top.texts("packing")
    if strange := [n for n in packing if n not in optional]:
        raise top.bad("packing", f"names {strange[0]!r:.60}, which is not an optional feature")
    attributes: list[AttributeRule] = []
    for o in top.objects("attributes"):
        attributes.append(_parse_attribute(o, features, attributes))
    admission = _Object(top.take("admission", dict, {}), "admission", name)
    least = admission.take("min_tokens", int, 0), admission.take("min_supervised", int, 0)
    if min(least) < 0:
        raise admission.bad("", f"has the count {min(least)}, want 0 or more")
    admission.end()
    top.end()
    return Schema(name, version, tuple(features), rule, default, tuple(encodings), packing, tuple(attributes), *least)


def _valid_id(text: str) -> bool:
    return _ID.fullmatch(text) is not None and ".." not in text


def _parse_feature(o: _Object, before: Sequence[SchemaFeature]) -> SchemaFeature:
    f = SchemaFeature(
        name=o.take("name", str, ""),
        source=o.take("from", str, ""),
        axes=o.texts("axes"),
        dtypes=o.texts("dtypes"),
        required=o.take("required", bool, False),
        shift=o.take("shift", bool, False),
        norm=o.take("norm", str, ""),
        final_layer_norm=o.take("final_layer_norm", str, ""),
    )
    o.end()
    if not _valid_id(f.name) or any(f.name == g.name for g in before):
        raise o.bad("name", f"is {f.name!r:.60}, want a valid name of its own")
    if f.source and f.source not in ROLES:
        raise o.bad("from", f"is {f.source!r:.60}, want one of {' '.join(ROLES)}")
    if f.source and any(f.source == g.source and f.norm == g.norm for g in before):
        raise o.bad("from", f"is {f.source}, which another feature takes too")
    if not f.dtypes or any(d not in dtypes.NAMES for d in f.dtypes):
        raise o.bad("dtypes", f"is {list(f.dtypes)!r:.80}, want some of {' '.join(dtypes.NAMES)}")
    if len(f.axes) > 16 or any(_FACTOR.fullmatch(factor) is None for axis in f.axes for factor in axis.split("*")):
        raise o.bad("axes", f"is {list(f.axes)!r:.80}, want at most 16 names or numbers, joined by *")
    if (f.source == "last") != (f.norm != "") or f.norm not in ("", "pre", "post"):
        raise o.bad("norm", f'is {f.norm!r:.20}, want "pre" or "post" on the role last and nothing elsewhere')
    if f.final_layer_norm and (f.source != "aux" or f.final_layer_norm not in ("pre", "post")):
        raise o.bad("final_layer_norm", f'is {f.final_layer_norm!r:.20}, want "pre" or "post" on the role aux and nothing elsewhere')
    if f.shift and f.axes[1:2] != ("S",):
        raise o.bad("shift", "is true, but the second axis is not S")
    return f


def _parse_attribute(o: _Object, features: Sequence[SchemaFeature], before: Sequence[AttributeRule]) -> AttributeRule:
    name, required, required_with = o.take("name", str, ""), o.take("required", bool, False), o.take("required_with", str, "")
    pattern, counts = o.take("pattern", str, ""), o.take("counts", str, "")
    o.end()
    if not _valid_id(name) or any(name == a.name for a in before):
        raise o.bad("name", f"is {name!r:.60}, want a valid name of its own")
    if required_with and all(f.name != required_with for f in features):
        raise o.bad("required_with", f"is {required_with!r:.60}, which is no feature")
    if counts and _AXIS.fullmatch(counts) is None:
        raise o.bad("counts", f"is {counts!r:.60}, want the name of an axis")
    if len(pattern) > 500:
        raise o.bad("pattern", f"has {len(pattern)} characters, want at most 500")
    matches = None
    if pattern:
        # The language is RE2's, which Python has nearly the whole of. What it lacks is left to the service, which checked the ref when it
        # was put.
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # a class such as [[:alpha:]] means something else in Python, which says so by a warning
                matches = re.compile(pattern, re.ASCII).fullmatch
        except (re.error, Warning) as e:
            _log.warning(
                "schema: the pattern %r of the attribute %r has no like in Python (%s); the service alone checks it", pattern, name, str(e)
            )
    return AttributeRule(name, required, required_with, pattern, counts, matches)
