"""Samples to batches: the one place where anything is shifted, normed, padded or packed.

Samples are stored unshifted: row t of every feature belongs to position t, and the attribute "shift" of the ref says "0". In a batch, each
feature that the schema flags has moved left by one along the sequence, zeros at the tail:

    input_ids  10 11 12 13 14 15  becomes  11 12 13 14 15 0
    loss_mask   0  0  0  1  1  1  becomes   0  0  1  1  1 0

Samples that come shifted say "1" and are taken as they are, mask and all; a second shift is an error. Whether the last hidden state is
before or behind the target's final norm is settled here too: where the schema wants it behind ("post") and the sample says "pre", it is
normed if there is a FinalNorm, and refused if there is none.

The first token of a document is predicted by nothing, so it never counts as supervised. Rows that were packed by the producer are shifted
over the whole row, but the masks become 0 in each document's last slot, so that no document supervises the first token of the next. Where
samples are packed here, each row's real tokens are shifted before they are joined, and nothing crosses at all.

Everything follows the run's schema document and no algorithm's name, and does exactly what the Go package stream does. Tensors are torch's
or numpy's; a batch has what its samples have.
"""

from __future__ import annotations

import math
import mmap
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from . import dtypes
from .errors import CorruptError, InvalidError, SchemaError, SluiceError, UnsupportedError
from .schema import Schema, SchemaFeature, spec_text
from .tensorfile import Tensor

if TYPE_CHECKING:
    import torch

    from .refs import SampleRef

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Sample:
    """One sample as `collate` takes it."""

    ref: SampleRef
    tensors: Mapping[str, Tensor]
    """All features of the ref, in its order."""
    pad: bool = False
    """It stands in for another one: its rows are in the batch, but their loss_mask and position_mask are 0 and they count nowhere."""
    shift: str | None = None
    """How the tensors are aligned, "0" or "1", or None for what the ref says. A function that collates gets samples that say "1" where the
    batch is shifted; handing them to `collate` again is an error."""
    last_norm: str | None = None
    """The norm state of the last hidden state as it is in the tensors, or None for what the ref says. A function that collates gets samples
    that say "post" where they were normed, so that nothing norms them again."""
    lease: Any = None
    """The lease that it came by; the batch says it again."""
    window: Any = None
    """The lease's place in a window, where the run deals out windows."""


@dataclass(frozen=True)
class BatchSample:
    """Where a sample lies in a batch, and how it came."""

    ref: SampleRef
    pad: bool = False
    row: int = 0
    """The batch row in which the sample begins."""
    column: int = 0
    """And the column, where samples are packed."""
    lease: Any = None
    window: Any = None


@dataclass(frozen=True)
class FinalNorm:
    """The target's final norm, an RMSNorm: x / sqrt(mean(x^2) + eps) * weight. It makes a post-norm state, which the head multiplies, of
    the residual stream after the last layer."""

    weight: Tensor
    """[H]: float32, bfloat16 or float16."""
    eps: float


class Batch(Mapping[str, Tensor]):
    """What a trainer steps on: the collated tensors, [B,S,...], under the schema's names.

    It is a mapping from names to tensors, so `model(**batch)` works; `batch["input_ids"]` and `batch.input_ids` are the same. A feature
    whose name is that of another attribute or method is to be had by `batch[name]` only. The tensors may be written to; some may be views
    of a sample's memory (`aliases`).
    """

    tensors: dict[str, Tensor]
    samples: tuple[BatchSample, ...]
    """In the order in which they were collated."""
    num_tokens: int
    """Attended tokens (supervised ones where the schema has no attention mask), stand-ins left out."""
    supervised_tokens: int
    """Stand-ins and the first tokens of documents, which nothing predicts, are left out. Samples that came shifted are counted as their
    loss_mask has it."""
    shifted: bool
    """Whether the features that the schema flags are shifted left by one; False where it flags none."""
    last_norm: str | None
    """The norm state of the last hidden states; None where the samples have none (or both), or one of them does not say."""
    aliases: bool
    """Whether a tensor shares memory with a sample."""

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        samples: Sequence[BatchSample] = (),
        *,
        num_tokens: int = 0,
        supervised_tokens: int = 0,
        shifted: bool = False,
        last_norm: str | None = None,
        aliases: bool = False,
    ) -> None:
        self.tensors = dict(tensors)
        self.samples = tuple(samples)
        self.num_tokens = num_tokens
        self.supervised_tokens = supervised_tokens
        self.shifted = shifted
        self.last_norm = last_norm
        self.aliases = aliases

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def __getattr__(self, name: str) -> Tensor:
        # Only for names that are no attribute. A batch that is being unpickled has no tensors yet.
        tensors = self.__dict__.get("tensors", {})
        try:
            tensor: Tensor = tensors[name]
        except KeyError:
            raise AttributeError(f"a batch of {', '.join(tensors) or 'nothing'} has no {name!r}") from None
        return tensor

    def __eq__(self, other: object) -> bool:
        return self is other  # tensors do not compare to a bool

    __hash__ = object.__hash__

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name}: {_spec_of(name, t)}" for name, t in self.tensors.items())
        counts = f"{len(self.samples)} samples, {self.num_tokens} tokens, {self.supervised_tokens} supervised"
        return f"Batch({counts}, shifted={self.shifted}, {shapes})"

    @property
    def refs(self) -> tuple[SampleRef, ...]:
        """The samples' refs, in their order."""
        return tuple(s.ref for s in self.samples)

    @property
    def pads(self) -> tuple[bool, ...]:
        """Which of the samples are stand-ins, in their order."""
        return tuple(s.pad for s in self.samples)

    @property
    def window(self) -> Any:
        """The first sample's place in its window, or None where the run deals out none. A loader's batches do not reach from one window
        into the next."""
        return self.samples[0].window if self.samples else None

    @property
    def nbytes(self) -> int:
        """The size of all tensors in bytes."""
        return sum(nbytes_of(t) for t in self.tensors.values())

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """Return the batch with its tensors on a device, by `Tensor.to`; those of numpy become torch's. Raises UnsupportedError where torch
        is not installed."""
        torch = dtypes.torch_module()
        if torch is None:
            raise UnsupportedError("torch is not installed", op="batch: to", subject=str(device))
        moved: dict[str, Tensor] = {}
        for name, t in self.tensors.items():
            moved[name] = (torch.from_numpy(t) if isinstance(t, np.ndarray) else t).to(device, non_blocking=non_blocking)
        return self.replace(moved, aliases=self.aliases and any(_shares(moved[n], t) for n, t in self.tensors.items()))

    def clone(self) -> Batch:
        """Return a copy that shares no memory with the samples, to keep beyond the next batch."""
        return self.replace({name: t.copy() if isinstance(t, np.ndarray) else t.clone() for name, t in self.tensors.items()}, aliases=False)

    def replace(self, tensors: Mapping[str, Tensor], *, aliases: bool) -> Batch:
        """Return a batch that says the same of other tensors."""
        return Batch(
            tensors,
            self.samples,
            num_tokens=self.num_tokens,
            supervised_tokens=self.supervised_tokens,
            shifted=self.shifted,
            last_norm=self.last_norm,
            aliases=aliases,
        )


CollateFunction = Callable[[Sequence[Sample]], Mapping[str, Tensor]]


def collate(
    schema: Mapping[str, Any] | Schema,
    samples: Sequence[Sample],
    how: str | CollateFunction = "pad",
    *,
    pad_to_multiple: int = 1,
    max_tokens: int = 0,
    final_norm: FinalNorm | None = None,
) -> Batch:
    """Make one batch of samples of one schema; the same as `Collator(schema, how, ...)(samples)`, which see."""
    return Collator(schema, how, batch=len(samples), pad_to_multiple=pad_to_multiple, max_tokens=max_tokens, final_norm=final_norm)(samples)


class Collator:
    """Joins samples to batches, in one of these ways (`how`):

    "pad"
        joins samples along the batch axis and pads every feature at the right end of S with zeros, to the longest sample, rounded up to
        `pad_to_multiple`. All samples must have the same features. One sample that needs neither shift nor padding is handed on without a
        copy. The schema must have a feature with the axes [B,S,...], and for batches of more than one sample a B in front of every required
        feature.
    "pack"
        puts the real tokens of the samples into one row, in order, and opens another row where `max_tokens` (0: no bound) would be
        exceeded; rows are padded to a multiple of `pad_to_multiple`. position_ids restart with every document, seq_lens lists the
        documents, filled up with zeros, and doc_remaining counts the real tokens that a document still has behind each one. Each row of a
        sample is shifted by itself before it is packed. The schema must have the packing features; samples may be packed already.
    "none"
        takes batches of one sample and pads nothing. It takes any schema.
    a function
        gets the samples, shifted and normed already, so that nothing is left to do wrong, and returns the batch's tensors by name. It may
        change what it gets. It takes any schema.

    The arguments are checked once, here: SchemaError where the schema is none, or one that can't be joined in this way in batches of
    `batch` samples; InvalidError for an argument. `final_norm` norms last hidden states that the schema wants post-norm, of samples that
    say that theirs are pre-norm; without it such samples are refused. Its weight is copied.
    """

    def __init__(
        self,
        schema: Mapping[str, Any] | Schema,
        how: str | CollateFunction = "pad",
        *,
        batch: int = 1,
        pad_to_multiple: int = 1,
        max_tokens: int = 0,
        final_norm: FinalNorm | None = None,
    ) -> None:
        for name, value, least in (("pad_to_multiple", pad_to_multiple, 1), ("max_tokens", max_tokens, 0)):
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise InvalidError(f"is {value!r:.40}, want {least} or more", op="collate", subject=name)
        if not callable(how) and how not in ("pad", "pack", "none"):
            raise InvalidError(f'is {how!r:.40}, want "pad", "pack", "none" or a function', op="collate", subject="how")
        if max_tokens and how != "pack":
            raise InvalidError(f'is {max_tokens}, and only "pack" bounds the tokens of a row', op="collate", subject="max_tokens")
        if pad_to_multiple > 1 and how not in ("pad", "pack"):
            raise InvalidError(f'is {pad_to_multiple}, and only "pad" and "pack" pad', op="collate", subject="pad_to_multiple")
        self.schema = Schema.parse(schema)
        self.how = how
        self._multiple = pad_to_multiple
        self._max_tokens = max_tokens
        self._norm = None if final_norm is None else _RMSNorm(final_norm)
        self._check(batch)

    def __call__(self, samples: Sequence[Sample]) -> Batch:
        """Make one batch. It may share memory with the samples.

        Raises SchemaError where a ref breaks the schema, where samples disagree in what must not be mixed (target or tokenizer fingerprint,
        and every attribute that the schema names: layers, norm), where their features don't fit together, or where one would be shifted
        twice; CorruptError where tensors differ from their ref. Where one sample is at fault the exception's attribute `index` says which.
        """
        if not samples:
            raise InvalidError("wants at least one sample", op="collate")
        self._check(len(samples))
        items: list[_Item] = []
        identity = Identity(self.schema)
        for i, sample in enumerate(samples):
            with _at(i):
                items.append(_Item(self.schema, self._norm, sample))
                identity.check(sample.ref)
            identity.adopt(sample.ref)
        for i, item in enumerate(items):
            with _at(i):
                item.norm(self._norm)
        if callable(self.how):
            joined = self._call(self.how, items)
        elif self.how == "pack":
            joined = self._pack(items)
        else:
            joined = self._pad(items, self._multiple)
        return self._batch(items, joined)

    def check(self, sample: Sample) -> None:
        """Raise what a batch of this sample alone would raise for what its ref and its tensors' specs say, without making one."""
        _Item(self.schema, self._norm, sample)

    def _batch(self, items: Sequence[_Item], joined: _Joined) -> Batch:
        samples = []
        num_tokens = supervised = 0
        last_norm = items[0].last_norm
        for i, item in enumerate(items):
            s = item.sample
            row, column = joined.places[i] if joined.places else (0, 0)
            samples.append(BatchSample(s.ref, s.pad, row, column, s.lease, s.window))
            if item.last_norm != last_norm:
                last_norm = None
            if not s.pad:
                num_tokens += s.ref.num_tokens
                with _at(i):
                    supervised += item.supervised(self.schema, joined.lengths[i] if joined.lengths else None)
        return Batch(
            joined.tensors,
            samples,
            num_tokens=num_tokens,
            supervised_tokens=supervised,
            shifted=self.schema.shifts,
            last_norm=last_norm,
            aliases=joined.aliases,
        )

    # Which schemas can be joined.

    def _check(self, n: int) -> None:
        if self.how == "pad":
            if not any(f.in_rows for f in self.schema.features):
                raise SchemaError(
                    "has no feature with the axes [B,S,...], so its samples have no rows to pad",
                    op="collate: pad",
                    subject=self.schema.name,
                    hint='let a function join them, or take batches of one by "none"',
                )
            for f in self.schema.features:
                if n > 1 and f.required and f.axes[:1] != ("B",):
                    raise _no_batch_axis(f)
        elif self.how == "pack":
            self._check_pack()
        elif self.how == "none" and n > 1:
            raise InvalidError(
                f'is {n}, and "none" makes batches of one sample',
                op="collate",
                subject="batch",
                hint='join samples by "pad", "pack" or a function',
            )

    def _check_pack(self) -> None:
        schema = self.schema
        for role in _PACKED_ROLES:
            f = schema.role(role)
            if f is None or f.name not in schema.packing:
                raise SchemaError(
                    f"is no packing feature of the schema {schema.name}, so its samples can't be packed", op="collate: pack", subject=role
                )
            if "int64" not in f.dtypes:
                raise SchemaError("can't be int64", op="collate: pack", subject=f.name)
        for f in schema.features:
            if f.source not in _PACKED_ROLES and f.name in schema.packing:
                raise SchemaError(
                    f"is a packing feature of the schema {schema.name}, and nothing says how it is made of several samples",
                    op="collate: pack",
                    subject=f.name,
                )
            if f.source != "seq_lens" and not f.in_rows:
                raise SchemaError(f"has the axes [{' '.join(f.axes)}], want [B,S,...]", op="collate: pack", subject=f.name)

    # Padding.

    def _pad(self, items: Sequence[_Item], multiple: int) -> _Joined:
        first = items[0].sample
        places, rows, cols = [], 0, 0
        for i, item in enumerate(items):
            places.append((rows, 0))
            rows += item.rows
            cols = max(cols, item.cols)
            with _at(i):
                _same_features(first, item.sample, items[0].tensors, item.tensors)
        cols = _up_to(cols, multiple)
        tensors, aliases = {}, False
        for name in items[0].tensors:
            f = self.schema.feature(name)
            assert f is not None  # the ref was checked against the schema
            tensors[name], shared = _pad_feature(f, items, cols)
            aliases = aliases or shared
        return _Joined(tensors, places, None, aliases)

    # A function.

    def _call(self, function: CollateFunction, items: Sequence[_Item]) -> _Joined:
        samples = []
        for i, item in enumerate(items):
            with _at(i):
                one = self._pad([item], 1)
            samples.append(replace(item.sample, tensors=one.tensors, shift="1" if self.schema.shifts else "0", last_norm=item.last_norm))
        out = function(samples)
        if not isinstance(out, Mapping):
            raise InvalidError(f"returned a {type(out).__name__}, want a mapping of names to tensors", op="collate function")
        for name, t in out.items():
            if not isinstance(name, str):
                raise InvalidError(f"returned the name {name!r:.60}, want a str", op="collate function")
            _spec_of(name, t)
        return _Joined(dict(out), [], None, True)  # what it returns may be the samples' own memory

    # Packing.

    def _pack(self, items: Sequence[_Item]) -> _Joined:
        layout = self._lay(items)
        contents = []
        for i, item in enumerate(items):
            contents.append({name: t for name, t in item.tensors.items() if name not in self.schema.packing})
            with _at(i):
                _same_features(items[0].sample, item.sample, contents[0], contents[i])
                for name, t in contents[0].items():
                    other = contents[i][name]
                    if tuple(t.shape[2:]) != tuple(other.shape[2:]):
                        raise _other_spec("collate: pack", name, item.sample, other, items[0].sample, t)
        tensors: dict[str, Tensor] = {}
        for name, t in contents[0].items():
            f = self.schema.feature(name)
            assert f is not None  # the ref was checked against the schema
            out = _zeros(t, (layout.rows, layout.cols, *t.shape[2:]))
            for s in layout.segments:
                item = items[s.item]
                moved = int(item.shift and f.shift)
                out[s.out, s.col : s.col + s.n - moved] = contents[s.item][name][s.row, moved : s.n]
                if f.is_mask:
                    _silence(out[s.out : s.out + 1, s.col : s.col + s.n], item.sample.pad, bool(moved), [s.docs])
            tensors[name] = out
        like = next(iter(contents[0].values())) if contents[0] else next(iter(items[0].tensors.values()))
        tensors.update(self._packing(layout, like))
        return _Joined(tensors, layout.places, layout.lengths, False)

    def _lay(self, items: Sequence[_Item]) -> _Layout:
        """Put the rows of all items in their places."""
        layout = _Layout()
        row = col = row_docs = 0
        for i, item in enumerate(items):
            with _at(i):
                lengths = item.lengths(self.schema)
                for r, n in enumerate(lengths):
                    if 0 < self._max_tokens < n:
                        raise item.bad(f"row {r} has {n} tokens, and packed rows hold {self._max_tokens} at most", "collate: pack")
            layout.lengths.append(lengths)
            for r, n in enumerate(lengths):
                docs = [n] if item.docs is None else item.docs[r]
                if 0 < self._max_tokens < col + n:
                    row, col, row_docs = row + 1, 0, 0
                if r == 0:
                    layout.places.append((row, col))
                if n == 0:
                    continue
                layout.segments.append(_Segment(i, r, n, docs, row, col))
                col += n
                row_docs += len(docs)
                layout.cols, layout.docs = max(layout.cols, col), max(layout.docs, row_docs)
        if not layout.segments:
            with _at(0):
                raise items[0].bad("has no real token, and nor have the others of its batch", "collate: pack")
        layout.cols = _up_to(layout.cols, self._multiple)
        layout.rows = row + 1
        return layout

    def _packing(self, layout: _Layout, like: Tensor) -> dict[str, Tensor]:
        """Make the three features that describe the rows, in the schema's order."""
        made = {
            "position_ids": np.zeros((layout.rows, layout.cols), np.int64),
            "seq_lens": np.zeros((layout.rows, layout.docs), np.int64),
            "doc_remaining": np.zeros((layout.rows, layout.cols), np.int64),
        }
        used = [0] * layout.rows
        for s in layout.segments:
            at = s.col
            for n in s.docs:
                made["seq_lens"][s.out, used[s.out]] = n
                used[s.out] += 1
                made["position_ids"][s.out, at : at + n] = np.arange(n)
                made["doc_remaining"][s.out, at : at + n] = np.arange(n - 1, -1, -1)
                at += n
        return {f.name: _ints_like(made[f.source], like) for f in self.schema.features if f.source in made}


_PACKED_ROLES = ("position_ids", "seq_lens", "doc_remaining")

# Attributes that differ from sample to sample, whatever the schema says of them.
_OF_ONE_SAMPLE = ("shift", "source", "ids", "supervised_tokens", "row_lengths")


class Identity:
    """What samples that are trained on together have in common: fingerprints of target and tokenizer, and every attribute that the schema
    names."""

    def __init__(self, schema: Schema) -> None:
        self._names = list(dict.fromkeys(["target", "tokenizer", *(a.name for a in schema.attributes if a.name not in _OF_ONE_SAMPLE)]))
        self._values: dict[str, tuple[str, str]] = {}  # the value, and the sample that said so first
        self.version = ""
        """target_model_version of the sample that was adopted last."""

    def check(self, ref: SampleRef) -> None:
        """Compare a ref with what came before. Raises SchemaError, which names the attribute and both samples."""
        for name in self._names:
            value = ref.attributes.get(name)
            if value is None or name not in self._values:
                continue
            have, sample = self._values[name]
            if have != value:
                detail = f'attribute "{name}" is "{value}", but sample "{sample}" says "{have}"; they must not be mixed'
                raise SchemaError(detail, op="collate", subject=ref.sample_id)

    def adopt(self, ref: SampleRef) -> None:
        """Add what a ref says that was checked."""
        self.version = ref.target_model_version
        for name in self._names:
            value = ref.attributes.get(name)
            if value is not None:
                self._values.setdefault(name, (value, ref.sample_id))


@dataclass
class _Joined:
    tensors: dict[str, Tensor]
    places: list[tuple[int, int]]
    """Row and column where each sample begins; empty is 0, 0."""
    lengths: list[list[int]] | None
    """Of each sample: how many tokens of its rows are in the batch; None is all of them."""
    aliases: bool


@dataclass
class _Segment:
    """One row of one sample in its place in the batch."""

    item: int
    row: int
    n: int
    """Real tokens."""
    docs: list[int]
    out: int
    col: int


@dataclass
class _Layout:
    segments: list[_Segment] = field(default_factory=list)
    places: list[tuple[int, int]] = field(default_factory=list)
    lengths: list[list[int]] = field(default_factory=list)
    rows: int = 0
    cols: int = 0
    docs: int = 0


class _Item:
    """A sample that was checked, with what collation needs to know of it."""

    def __init__(self, schema: Schema, norm: _RMSNorm | None, sample: Sample) -> None:
        self.sample = sample
        self.tensors = sample.tensors
        """The sample's, until the last hidden state is normed. The sample stays as it was: it may become part of another batch, if making
        this one fails."""
        self.rows = self.cols = 0
        self.docs: list[list[int]] | None = None
        """Of each row, where it is packed: lengths of its documents."""
        self.last_norm: str | None = None
        self.to_norm = ""
        """The feature that is still to be normed."""
        schema.validate(sample.ref)
        _check_tensors(sample)
        said = sample.ref.attributes.get("shift")
        if said is None and (not schema.shifts or all(a.name != "shift" for a in schema.attributes)):
            said = "0"  # nothing is shifted, or the schema does not speak of it
        if said not in ("0", "1"):
            raise self.bad(f'attribute "shift" is "{said or ""}", want "0" or "1"')
        if said == "1" and not schema.shifts:
            raise self.bad(f"says shift 1, but batches of {schema.name} are not shifted")
        if sample.shift is not None and sample.shift != said:
            raise self.bad(f"says shift {said}, and its features were shifted since; a second shift would misalign them")
        self.shift = said == "0" and schema.shifts
        """Whether flagged features still have to move."""
        self._read_norm(schema, norm)
        if not any(f.in_rows for f in schema.features):
            return  # "pad" and "pack" have refused the schema
        for name, t in self.tensors.items():
            f = schema.feature(name)
            if f is not None and f.in_rows:
                self.rows, self.cols = int(t.shape[0]), int(t.shape[1])
                break
        if not self.rows or not self.cols:
            raise self.bad("has no feature with the axes [B,S,...], or an empty one")
        self._read_docs(schema)

    def bad(self, detail: str, op: str = "collate") -> SchemaError:
        return SchemaError(detail, op=op, subject=self.sample.ref.sample_id)

    def _read_norm(self, schema: Schema, norm: _RMSNorm | None) -> None:
        """Compare the norm state that the sample speaks of with the one that the schema gives the feature: the head, or the loss, would be
        fed with the wrong states otherwise.

        A pre-norm state can be normed; nothing else can be mended. A sample that has both states can't say which one it speaks of.
        """
        said = self.sample.last_norm or self.sample.ref.attributes.get("last_norm")
        if not said:
            return
        last = aux = None
        for name in self.tensors:
            f = schema.feature(name)
            if f is None:
                continue
            if f.source == "last":
                if last is not None:
                    return
                last = f
            elif f.source == "aux" and f.final_layer_norm == "post":
                aux = f
        if last is None:
            return
        if said == last.norm:
            self.last_norm = said
            return
        wrong = f'attribute "last_norm" is "{said}", want "{last.norm}" for {last.name}'
        if said != "pre":
            raise self.bad(wrong)
        if aux is not None:
            # How many layers the target has is not known here, so nobody can tell whether there is a block to norm. Norming the last state
            # alone would make a batch that contradicts itself.
            raise self.bad(
                f"{wrong}; a FinalNorm does not help, since nothing says whether {aux.name} holds the final layer, "
                "which would have to be normed too: let the producer store both post-norm"
            )
        if norm is None:
            raise self.bad(f"{wrong}; a FinalNorm would make it so")
        norm.fits(self, last.name)
        self.last_norm, self.to_norm = last.norm, last.name

    def norm(self, norm: _RMSNorm | None) -> None:
        """Norm the last hidden state, if it is to be."""
        if self.to_norm and norm is not None:
            t = norm.apply(self.tensors[self.to_norm])
            if t is None:
                raise self.bad(f'feature "{self.to_norm}" is too large for float16 behind the FinalNorm')
            self.tensors = {**self.tensors, self.to_norm: t}
            self.to_norm = ""

    def _rows(self, f: SchemaFeature | None) -> Ints | None:
        """Return a mask's values [rows,cols], if the sample has it and it is int64."""
        t = None if f is None else self.tensors.get(f.name)
        if f is None or t is None or not self.rows or dtypes.name_of(t.dtype) != "int64":
            return None
        values = _ints(t)
        if values.size != self.rows * self.cols:
            raise self.bad(f"{f.name} is {_spec_of(f.name, t)}, want one value for each of {self.rows} rows of {self.cols} tokens")
        return values.reshape(self.rows, self.cols)

    def _read_docs(self, schema: Schema) -> None:
        """Read the documents of packed rows. Upstream counts the padding of a row to its last document; where an attention mask tells them
        apart, that is undone."""
        f = schema.role("seq_lens")
        t = None if f is None else self.tensors.get(f.name)
        if f is None or t is None:
            return
        if dtypes.name_of(t.dtype) != "int64" or len(t.shape) != 2 or t.shape[0] != self.rows:
            raise self.bad(f"{f.name} is {_spec_of(f.name, t)}, want int64 [{self.rows},docs]")
        lens, mask = _ints(t), self._rows(schema.role("attention_mask"))
        docs: list[list[int]] = []
        for r in range(self.rows):
            row: list[int] = []
            left = self.cols
            real = self.cols if mask is None else int(mask[r].sum())
            for n in lens[r].tolist():
                if n < 0 or n > left:
                    raise self.bad(f"{f.name} of row {r} has the length {n} where {left} of {self.cols} tokens are left")
                left -= n
                n = min(n, real)
                if n > 0:
                    row.append(n)
                real -= n
            docs.append(row)
        self.docs = docs

    def lengths(self, schema: Schema) -> list[int]:
        """Return the real tokens of each row: of its documents, its attention mask, or the attribute that stands for one."""
        if self.docs is not None:
            return [sum(row) for row in self.docs]
        mask = self._rows(schema.role("attention_mask"))
        if mask is not None:
            out = []
            for r, row in enumerate(mask != 0):
                n = int(np.count_nonzero(row))
                if not row[:n].all():
                    gap = int(np.argmin(row))
                    at = gap + int(np.argmax(row[gap:]))
                    raise self.bad(f"row {r} has a token after padding at {at}; rows must be padded at the right", op="collate: pack")
                out.append(n)
            return out
        listed = self.sample.ref.attributes.get("row_lengths")
        if listed is None:
            return [self.cols] * self.rows
        parts = listed.split(",")
        if len(parts) != self.rows:
            raise self.bad(f'attribute "row_lengths" has {len(parts)} entries, want {self.rows}', op="collate: pack")
        for p in parts:
            if re.fullmatch(r"[+-]?[0-9]{1,40}", p) is None or not 0 <= int(p) <= self.cols:
                raise self.bad(f'attribute "row_lengths" has the entry "{p:.60}", want 0 to {self.cols}', op="collate: pack")
        return [int(p) for p in parts]

    def supervised(self, schema: Schema, lengths: list[int] | None) -> int:
        """Count the tokens that the loss mask supervises in the batch, the first ones of documents left out. `lengths` says how many tokens
        of each row are in the batch.

        The mask of a sample that came shifted is taken as it is: which token a slot stands for was its producer's decision.
        """
        mask = self._rows(schema.role("loss_mask"))
        if mask is None:
            return 0
        total = 0
        for r, row in enumerate(mask):
            if lengths is not None:
                row = row[: lengths[r]]
            total += int(row.sum())
            if self.sample.ref.attributes.get("shift") == "1" or not len(row):
                continue
            at = 0
            for n in [1] if self.docs is None else self.docs[r]:
                total -= int(row[at])
                at += n
        return total


class _RMSNorm:
    """A FinalNorm that was checked. It computes in float32, with the sum of squares in float64, one element after the other, and rounds
    once: bit for bit what the Go package does."""

    def __init__(self, norm: FinalNorm) -> None:
        def bad(detail: str) -> InvalidError:
            return InvalidError(detail, op="collate", subject="final_norm")

        name, shape = _name_and_shape("weight", norm.weight)
        if len(shape) != 1 or shape[0] == 0 or name not in _NORMED:
            raise bad(f"has a weight of {spec_text(name, shape)}, want float32, bfloat16 or float16 [H]")
        self.weight = _widen(norm.weight, name)
        if not np.isfinite(self.weight).all():
            raise bad(f"has a weight that is not finite at {int(np.argmin(np.isfinite(self.weight)))}")
        if not isinstance(norm.eps, (int, float)) or not 0 < norm.eps < math.inf:
            raise bad(f"has the eps {norm.eps!r:.40}, want more than 0")
        self.eps = float(norm.eps)

    def fits(self, item: _Item, feature: str) -> None:
        """Refuse states that the norm is not for."""
        t = item.tensors[feature]
        name, shape = _name_and_shape(feature, t)
        if name not in _NORMED:
            raise item.bad(f'feature "{feature}" is {spec_text(name, shape)}, and a FinalNorm takes float32, bfloat16 or float16')
        if shape[-1:] != (len(self.weight),):
            raise item.bad(f'feature "{feature}" is {spec_text(name, shape)}, and the FinalNorm has {len(self.weight)} weights')

    def apply(self, t: Tensor) -> Tensor | None:
        """Return the normed states, of the type of t, or None where float16 can't hold one. The input is not changed."""
        name, shape = _name_and_shape("", t)
        x = _widen(t, name).reshape(-1, len(self.weight))
        y = np.empty_like(x)
        with np.errstate(all="ignore"):
            for at in range(0, len(x), 64):  # so that the sums take little memory
                rows = x[at : at + 64]
                # cumsum adds in order, where sum adds in pairs.
                squares = np.cumsum(np.square(rows, dtype=np.float64), axis=1)[:, -1:]
                scale = (1 / np.sqrt(squares / len(self.weight) + self.eps)).astype(np.float32)
                y[at : at + 64] = rows * scale * self.weight
            narrow = _narrow(y, name)
            if name == "float16" and np.isfinite(x).all() and not np.isfinite(narrow.view(np.float16)).all():
                return None
        return _like(narrow.reshape(shape), name, t)


_NORMED = ("float32", "bfloat16", "float16")


def _widen(t: Tensor, name: str) -> npt.NDArray[np.float32]:
    """Return a copy of the values as float32, on the CPU."""
    if name == "float32":
        return np.array(_numpy(t), np.float32)
    if name == "float16":
        return _numpy(t).astype(np.float32)
    return (_bits(t).astype(np.uint32) << 16).view(np.float32)


def _narrow(x: npt.NDArray[np.float32], name: str) -> npt.NDArray[Any]:
    """Round to the nearest, ties to even; bfloat16 as the bits of one."""
    if name == "float32":
        return x
    if name == "float16":
        return x.astype(np.float16)
    bits = x.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + (bits >> 16 & np.uint32(1))) >> 16
    return np.where(np.isnan(x), bits >> 16 | np.uint32(0x40), rounded).astype(np.uint16)


def _bits(t: Tensor) -> npt.NDArray[np.uint16]:
    """Return the bits of a bfloat16 tensor."""
    if isinstance(t, np.ndarray):
        return np.ascontiguousarray(t).view(np.uint16)
    torch: Any = dtypes.torch_module()
    bits: npt.NDArray[np.uint16] = t.detach().cpu().contiguous().view(torch.int16).numpy().view(np.uint16)
    return bits


def _like(x: npt.NDArray[Any], name: str, t: Tensor) -> Tensor:
    """Return the values, or the bits of bfloat16 ones, as a tensor of t's kind, type and device."""
    if isinstance(t, np.ndarray):
        return x.view(t.dtype) if name == "bfloat16" else x
    torch: Any = dtypes.torch_module()
    out: Tensor = (torch.from_numpy(x.view(np.int16)).view(torch.bfloat16) if name == "bfloat16" else torch.from_numpy(x)).to(t.device)
    return out


def _numpy(t: Tensor) -> npt.NDArray[Any]:
    return t if isinstance(t, np.ndarray) else t.detach().cpu().numpy()


def _ints(t: Tensor) -> Ints:
    return _numpy(t).astype(np.int64, copy=False)


def _ints_like(x: Ints, like: Tensor) -> Tensor:
    """Return int64 values as a tensor of the kind and on the device of another."""
    if isinstance(like, np.ndarray):
        return x
    torch: Any = dtypes.torch_module()
    out: Tensor = torch.from_numpy(x).to(like.device)
    return out


_HUGE_BYTES = 4 << 20  # what pays for a mapping of its own


def _empty(like: Tensor, shape: Sequence[int]) -> Any:
    """Return memory of the kind, type and device of another tensor, with whatever is in it.

    Much memory comes in huge pages where there are some: to touch it for the first time by small ones takes twice as long as to fill it.
    """
    nbytes = math.prod(shape) * (like.itemsize if isinstance(like, np.ndarray) else like.element_size())
    huge = nbytes >= _HUGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE") and (isinstance(like, np.ndarray) or like.device.type == "cpu")
    if huge:
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):  # a kernel without them: then by small ones
            memory.madvise(mmap.MADV_HUGEPAGE)
    if isinstance(like, np.ndarray):
        return np.frombuffer(memory, like.dtype).reshape(shape) if huge else np.empty(shape, like.dtype)
    torch = dtypes.torch_module()
    assert torch is not None
    if huge:
        return torch.frombuffer(memory, dtype=like.dtype).reshape(tuple(shape))
    return torch.empty(tuple(shape), dtype=like.dtype, device=like.device)


def _zeros(like: Tensor, shape: Sequence[int]) -> Any:
    """Return zeros of the kind, type and device of another tensor."""
    if isinstance(like, np.ndarray):
        return np.zeros(shape, like.dtype)
    torch: Any = dtypes.torch_module()
    return torch.zeros(tuple(shape), dtype=like.dtype, device=like.device)


def nbytes_of(t: Tensor) -> int:
    """Return the size of a tensor in bytes."""
    return t.nbytes if isinstance(t, np.ndarray) else t.numel() * t.element_size()


def _shares(a: Tensor, b: Tensor) -> bool:
    """Report whether a tensor that was made of another one may be its memory."""
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return True
    return bool(a.device == b.device and a.data_ptr() == b.data_ptr())


def _is_tensor(t: object) -> bool:
    return isinstance(t, np.ndarray) or dtypes.is_torch_dtype(getattr(t, "dtype", None))


def _name_and_shape(feature: str, t: object) -> tuple[str, tuple[int, ...]]:
    if not _is_tensor(t):
        raise InvalidError(f"is a {type(t).__name__}, want a torch tensor or a numpy array", op="collate", subject=feature)
    tensor: Any = t
    return dtypes.name_of(tensor.dtype), tuple(int(n) for n in tensor.shape)


def _spec_of(feature: str, t: object) -> str:
    return spec_text(*_name_and_shape(feature, t))


def _check_tensors(sample: Sample) -> None:
    """Raise CorruptError for the first difference between what the ref promises and the tensors: names, order, shapes, dtypes."""

    def bad(detail: str) -> CorruptError:
        return CorruptError(detail, op="collate", subject=sample.ref.sample_id)

    specs = sample.ref.feature_specs
    if len(sample.tensors) != len(specs):
        raise bad(f"has {len(sample.tensors)} features, the ref promises {len(specs)}")
    for i, ((name, t), (want, spec)) in enumerate(zip(sample.tensors.items(), specs.items(), strict=True)):
        if name != want:
            raise bad(f'feature {i} is "{name}", the ref promises "{want}"')
        if _is_tensor(t) and t.dtype is spec.dtype and t.shape == spec.shape:
            continue  # the usual case, fast
        got, promised = _name_and_shape(name, t), (dtypes.name_of(spec.dtype), tuple(spec.shape))
        if got != promised:
            raise bad(f'feature "{name}" is {spec_text(*got)}, the ref promises {spec_text(*promised)}')


def _same_features(first: Sample, sample: Sample, a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> None:
    """Refuse tensors of a sample that are not the same features, of the same types, as the first one's."""
    if len(a) != len(b):
        raise _other_features(first, sample)
    for (name, x), (other, y) in zip(a.items(), b.items(), strict=True):
        if name != other:
            raise _other_features(first, sample)
        if isinstance(x, np.ndarray) != isinstance(y, np.ndarray):
            detail = f'feature "{name}" is a {type(y).__name__}, but sample "{first.ref.sample_id}" has a {type(x).__name__}'
            raise InvalidError(detail, op="collate", subject=sample.ref.sample_id)
        if x.dtype != y.dtype or len(x.shape) != len(y.shape):
            raise _other_spec("collate", name, sample, y, first, x)


def _other_features(first: Sample, sample: Sample) -> SchemaError:
    detail = f'has the features [{" ".join(sample.tensors)}], but sample "{first.ref.sample_id}" has [{" ".join(first.tensors)}]'
    return SchemaError(detail, op="collate", subject=sample.ref.sample_id)


def _other_spec(op: str, feature: str, sample: Sample, t: Tensor, first: Sample, other: Tensor) -> SchemaError:
    detail = f'feature "{feature}" is {_spec_of(feature, t)}, but sample "{first.ref.sample_id}" has {_spec_of(feature, other)}'
    hint = "" if t.dtype == other.dtype else "let the producer cast: in all samples of a batch a feature has one dtype"
    return SchemaError(detail, op=op, subject=sample.ref.sample_id, hint=hint)


@contextmanager
def _at(index: int) -> Iterator[None]:
    """Say of an error which sample of the batch is at fault."""
    try:
        yield
    except SluiceError as e:
        e.__dict__["index"] = index
        raise


def _no_batch_axis(f: SchemaFeature) -> SchemaError:
    return SchemaError("has no batch axis, so samples can't be joined; use a batch of 1 or a function", op="collate", subject=f.name)


def _up_to(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def _grows(f: SchemaFeature) -> int:
    """Tell along which axis a feature is padded: S, or the documents of seq_lens; -1 for none."""
    if f.source == "seq_lens" and len(f.axes) > 1:
        return 1
    return f.axes.index("S") if "S" in f.axes else -1


def _pad_feature(f: SchemaFeature, items: Sequence[_Item], cols: int) -> tuple[Tensor, bool]:
    """Join one feature of all items. The second value says that the result is an item's own memory."""
    first = items[0].tensors[f.name]
    axis, several = _grows(f), len(items) > 1
    shape = [int(n) for n in first.shape]
    if axis >= 0:
        shape[axis] = 0
    if several:
        if f.axes[:1] != ("B",):
            raise _no_batch_axis(f)
        shape[0] = 0
    moved = False
    for i, item in enumerate(items):
        t = item.tensors[f.name]
        for a, n in enumerate(t.shape):
            if a == 0 and several:
                shape[0] += int(n)
            elif a == axis:
                shape[a] = max(shape[a], int(n))
            elif shape[a] != n:
                with _at(i):
                    raise _other_spec("collate", f.name, item.sample, t, items[0].sample, first)
        moved = moved or item.shift and f.shift or item.sample.pad and f.is_mask
    if axis >= 0 and f.axes[axis] == "S" and cols > 0:  # it is 0 where no feature has rows, and the sample is alone
        shape[axis] = cols
    if not several and not moved and shape == list(first.shape):
        return first, True
    out = _empty(first, shape)
    row = 0
    for item in items:
        t = item.tensors[f.name]
        dst = out
        if several:
            dst = out[row : row + int(t.shape[0])]
            row += int(t.shape[0])
        shifted = item.shift and f.shift
        if axis < 0:
            dst[...] = t
        else:
            have, left = int(t.shape[axis]), int(shifted)
            before: tuple[slice, ...] = (slice(None),) * axis
            end = max(have - left, 0)
            dst[before + (slice(0, end),)] = t[before + (slice(left, have),)]
            dst[before + (slice(end, None),)] = 0  # and nothing else: to zero all of it first takes longer than the copy
        if f.is_mask:
            _silence(dst, item.sample.pad, shifted, item.docs)
    return out, False


def _silence(mask: Any, pad: bool, shifted: bool, docs: Sequence[Sequence[int]] | None) -> None:
    """Zero a mask [rows,S,...] where it must not count: everywhere for a stand-in, in the last slot of each document of a packed row that
    was shifted here."""
    if pad:
        mask[...] = 0
    elif shifted and docs is not None:
        for r, row in enumerate(docs):
            at = 0
            for n in row:
                at += n
                mask[r, at - 1] = 0
