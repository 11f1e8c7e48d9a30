"""A producer over a Hugging Face causal language model: prompts in, samples of any algorithm out.

    with sluice.connect(run="r1") as run:
        producer = TransformersProducer(model, run, tokenizer)
        producer.run(JsonLines("prompts.jsonl"))

As a command, beside a trainer: ``python -m sluice.integrations.transformers --help``.

**Layers.** ``aux_layers`` are decoder layers in the "hf" numbering, and refs say them as ``hf:1,15,28``: i is the output of decoder layer i, counted from 0, which is the residual stream behind i+1
layers, Hugging Face's ``hidden_states[i + 1]`` and vLLM's id i+1; -1 is the embedding output, ``hidden_states[0]`` and vLLM's 0. For the last layer, N-1, it is the stream *before* the final norm,
vLLM's N. Hugging Face's ``hidden_states[N]`` is behind the norm instead, which is what the features of the role "last" hold, and what DSpark has for its aux layer N-1.

**Alignment.** Row t of every feature is position t; nothing is shifted (attribute shift "0").

Nothing here knows an algorithm by its name: what a sample has comes from the run's schema document.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import logging
import sys
import threading
import time
import uuid
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import dtypes
from ..errors import FullError, InvalidError, SchemaError, SluiceError, TargetFaultError, UnavailableError, UnsupportedError, WedgedError
from ..producer import Producer
from ..queue import MAX_BATCH, Position, Reservation
from ..refs import FeatureAlgorithm, FeatureSpec, SampleRef
from ..schema import Schema, SchemaFeature
from ..tensorfile import specs_of
from .prompts import TURNS, Ints, JsonLines, Prompt, Refusal, Row, bits, count_rows, integers, rows_of

if TYPE_CHECKING:
    import torch

    from ..client import Run

log = logging.getLogger("sluice")

_OP = "TransformersProducer"
_PROBE_TOKENS = 4
_SHOWN = 10  # refusals of each reason that are logged as warnings; all are counted
_WEDGE_PAUSE = 1.0  # seconds until a wedged run is asked again

_LAYERS = ("layers", "h", "blocks")
_NORMS = ("norm", "ln_f", "final_layernorm", "final_layer_norm", "norm_f")
_HEADS = ("lm_head", "embed_out", "output")
_INNER = ("model", "transformer", "gpt_neox", "backbone", "language_model", "text_model", "decoder", "module", "base_model")
# Settings that enter no arithmetic, so that a fingerprint must not depend on them.
_NOT_ARITHMETIC = ("_name_or_path", "transformers_version", "use_cache", "output_hidden_states", "output_attentions", "return_dict", "torch_dtype", "dtype", "architectures")

# One forward at a time a model, whoever asks: hooks would mix up batches otherwise.
_turns: weakref.WeakKeyDictionary[Any, threading.Lock] = weakref.WeakKeyDictionary()
_turns_lock = threading.Lock()
_TURN_SECONDS = 600.0


@contextlib.contextmanager
def _turn(model: Any) -> Iterator[None]:
    with _turns_lock:
        lock = _turns.setdefault(model, threading.Lock())
    if not lock.acquire(timeout=_TURN_SECONDS):
        raise UnavailableError(f"another forward of it has not ended for {_TURN_SECONDS:g} s", op="forward", subject=_name(model))
    try:
        yield
    finally:
        lock.release()


def default_aux_layers(layers: int) -> tuple[int, int, int]:
    """The three layers (low, middle, high) that EAGLE-3 trainers expect of a target of that many: 1, N//2-1 and N-4, in "hf" numbering. InvalidError below seven layers, where these are not three
    in ascending order."""
    if layers < 7:
        raise InvalidError(f"must be given: a target of {layers} layers is too shallow for the default", op=_OP, subject="aux_layers", hint=f"want some of -1 to {layers - 1}, each once")
    return 1, layers // 2 - 1, layers - 4


@dataclass
class Counts:
    """What a producer did since it was made. Times are in seconds."""

    samples: int = 0
    tokens: int = 0
    supervised_tokens: int = 0
    bytes: int = 0
    forwards: int = 0
    taken: int = 0  # rows that were passed over because the run has them already
    truncated: int = 0  # rows cut to max_tokens, refused ones among them
    refused: dict[str, int] = field(default_factory=dict)  # by reason
    waited_seconds: float = 0.0  # at the gate
    forward_seconds: float = 0.0  # in the target, waiting for its turn excluded
    put_seconds: float = 0.0


@dataclass(frozen=True)
class Parts:
    """Where a model has what the hooks need. ``base`` runs the layers and the norm without the head."""

    base: Any
    layers: Any
    norm: Any
    head: Any

    @staticmethod
    def of(model: Any, names: Mapping[str, str] | None = None) -> Parts:
        """Find them by the model's own structure; ``names`` are dotted paths in the model, for what it would not find."""
        names = dict(names or {})
        if strange := names.keys() - {"base", "layers", "norm", "head"}:
            raise InvalidError(f"names {min(strange)!r:.40}, want some of base, layers, norm, head", op=_OP, subject="parts")

        def named(part: str) -> Any:
            try:
                return model.get_submodule(names[part])
            except AttributeError:
                raise InvalidError(f"{part}: the model has no {names[part]!r:.80}", op=_OP, subject="parts") from None

        base = named("base") if "base" in names else _base(model)
        layers = named("layers") if "layers" in names else _first(base, _LAYERS)
        norm = named("norm") if "norm" in names else _first(base, _NORMS)
        head = named("head") if "head" in names else _head(model)
        for part, found in (("layers", layers), ("norm", norm), ("head", head)):
            if found is None:
                raise UnsupportedError(
                    f"has no {part} that is found in {type(model).__name__}, want the structure of a Llama (model.layers, model.norm, lm_head) or a like of it", op=_OP, subject="model",
                    hint=f"say where it is: parts={{{part!r}: 'dotted.path'}}",
                )
        return Parts(base, layers, norm, head)


def _first(module: Any, names: Sequence[str]) -> Any:
    children = dict(module.named_children())
    return next((children[name] for name in names if name in children), None)


def _base(model: Any) -> Any:
    """The module that has the decoder layers."""
    module = model
    for _ in range(8):
        if _first(module, _LAYERS) is not None:
            return module
        if (inner := _first(module, _INNER)) is None:
            break
        module = inner
    return model


def _head(model: Any) -> Any:
    given = model.get_output_embeddings() if callable(getattr(model, "get_output_embeddings", None)) else None
    return given if given is not None else _first(model, _HEADS)


class TransformersProducer:
    """Runs a causal language model over prompts, and puts a sample for each row into a run.

    ``model`` is a Hugging Face ``...ForCausalLM``, or any module of that structure: called with ``input_ids`` and ``attention_mask`` it returns logits (``.logits`` or the first of a tuple). It stays
    the caller's, and is left in the mode it was in. ``run`` has a schema; ``tokenizer`` is needed for prompts that are text or conversations.

    - ``aux_layers``: ids in "hf" numbering (see above), each once, kept in that order; or a str, "hf:1,15,28" or "vllm:2,16,29". By default :func:`default_aux_layers`.
    - ``supervision``: an encoding of the schema, such as "last_hidden_states", "logits" or "target_probs"; by default the schema's own (last_hidden_states in eagle3, none in dflash and dspark).
    - ``name`` and ``incarnation``: who the run knows this producer as; a newer incarnation takes over from an older one. The time if None.
    - ``batch_size``: rows a forward, right-padded to the longest.
    - ``max_tokens``: longer rows are cut to it, and counted. By default the model's own ``max_position_embeddings``, which is also the most it may be.
    - ``device``: moves the model there. None leaves it where it is, and puts the token ids where its input embeddings are.
    - ``dtype``: of the hidden states as stored; None stores them as the model has them. ``logits_dtype``: of logits and target_probs.
    - ``draft_vocab``: the draft's token ids in its order, for target_probs.
    - ``turns``: "each" makes a row of each assistant turn, "whole" one row of a conversation.
    - ``parts``: dotted paths of ``base``, ``layers``, ``norm``, ``head`` in models where they are not found.
    - ``fingerprint``: of the target's weights, for the attribute "target". None hashes configuration and all weights, which takes about a second a GB.
    - ``attributes``: more of them, for every sample. ``target_model_version``, ``draft_weight_version``: as the run's gates have them.
    - ``skip_bad``: counts prompts that break their form as refused ("bad"), instead of raising InvalidError.
    - ``max_faults``: how many rows in a row may be refused as not finite before TargetFaultError.
    - ``patience``: for how many seconds a wedged run is asked for room again before WedgedError.
    - ``on_refused``: is called with each :class:`Refusal`; without it they are logged.

    The construction runs the model on four tokens and compares: the head on the states that are taken for last must give the model's own logits, and hooked layers the hidden states that the model
    reports. What a sample says of itself is checked there, not believed.

    A context manager: it tells the run that the producer runs, and at the end that it is done, or failed. Methods are for one thread; several producers may share a model.

    Raises InvalidError (naming the argument), SchemaError (a dtype that the schema does not take), UnsupportedError (a structure that is not found, logits that are not the head's).
    """

    def __init__(
        self, model: Any, run: Run, tokenizer: Any = None, aux_layers: Sequence[int] | str | None = None, supervision: str | None = None, name: str = "p0", batch_size: int = 8,
        max_tokens: int | None = None, device: torch.device | str | None = None, dtype: torch.dtype | str | None = None, *, logits_dtype: torch.dtype | str = "float32",
        draft_vocab: Sequence[int] | None = None, turns: str = "each", parts: Mapping[str, str] | None = None, fingerprint: str | None = None, attributes: Mapping[str, str] | None = None,
        incarnation: int | None = None, target_model_version: str = "0", draft_weight_version: str = "0", skip_bad: bool = False, max_faults: int = 10, patience: float = 600.0,
        on_refused: Callable[[Refusal], None] | None = None,
    ) -> None:
        if dtypes.torch_module() is None:
            raise UnsupportedError("torch is not installed", op=_OP)
        if not hasattr(model, "named_children"):
            raise _invalid("model", f"is a {type(model).__name__}, want a torch.nn.Module")
        for argument, value, most in (("batch_size", batch_size, MAX_BATCH), ("max_faults", max_faults, 1 << 31)):
            if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= most:
                raise _invalid(argument, f"is {value!r:.40}, want an integer from 1 to {most}")
        if turns not in TURNS:
            raise _invalid("turns", f"is {turns!r:.40}, want one of {', '.join(TURNS)}")
        if not run.schema:
            raise _invalid("run", f"{run.run_id} takes samples of any schema, want one with a schema of its own")
        self.model, self._run, self.tokenizer = model, run, tokenizer
        self.schema = Schema.parse(run.schema)
        self.batch_size, self.turns = batch_size, turns
        self.counts = Counts()
        self._skip_bad, self._max_faults, self._patience, self._on_refused = skip_bad, max_faults, patience, on_refused
        self._versions = (target_model_version, draft_weight_version)
        self._session = uuid.uuid4().hex[:16]
        self._made = 0  # samples, for their ids
        self._faults = 0  # rows that were not finite, since the last that was
        if device is not None:
            model.to(device)
        self.device = _device_of(model)
        self.parts = Parts.of(model, parts)
        self.max_tokens = _max_tokens(model, max_tokens)
        self.aux_layers: tuple[int, ...] = ()
        self._plan = _Plan(self.schema, supervision)
        if self._plan.role("aux"):
            self.aux_layers = _aux_layers(aux_layers, len(self.parts.layers))
        elif aux_layers is not None:
            raise _invalid("aux_layers", f"is given, and the schema {self.schema.name} has no feature of aux layers")
        probe = _Probe(self)
        self.hidden_size, self.vocab_size, self._ids_below = probe.hidden_size, probe.vocab_size, _ids_below(model, probe.vocab_size)
        self._draft_vocab = _draft_vocab(draft_vocab, self.vocab_size, self._plan)
        self._dtype_of = {"last": probe.last_dtype, "aux": probe.aux_dtype}
        if dtype is not None:
            self._dtype_of = dict.fromkeys(self._dtype_of, dtypes.name_of(dtype))
        self._dtype_of |= dict.fromkeys(("logits", "target_probs"), dtypes.name_of(logits_dtype)) | {"position_mask": "bool"}
        for f in self._plan.features:
            if (d := self._dtype(f)) not in f.dtypes:
                raise SchemaError(f"would be {d}, and the schema {self.schema.name} takes {', '.join(f.dtypes)}", op=_OP, subject=f.name, hint="set dtype or logits_dtype")
        self._attributes = dict(attributes or {}) | self._own_attributes(fingerprint)
        self._producer = Producer(run, name, incarnation)

    def _own_attributes(self, fingerprint: str | None) -> dict[str, str]:
        if fingerprint is None:
            start = time.monotonic()
            fingerprint = target_fingerprint(self.model)
            log.info("the weights of %s were hashed in %.1f s", _name(self.model), time.monotonic() - start)
        own = {"shift": "0", "target": fingerprint}
        if self.tokenizer is not None:
            own["tokenizer"] = tokenizer_fingerprint(self.tokenizer)
        if self.aux_layers:
            own["aux_layers"] = "hf:" + ",".join(map(str, self.aux_layers))
        if last := self._plan.role("last"):
            own["last_norm"] = last.norm
        return own

    # -- what is known before a forward --------------------------------------------------------------------------------

    def _dtype(self, f: SchemaFeature) -> str:
        return self._dtype_of.get(f.source, "int64")

    def specs(self, tokens: int) -> dict[str, FeatureSpec]:
        """Shapes and dtypes of the features of a sample of that many tokens."""
        width = {"aux": len(self.aux_layers) * self.hidden_size, "last": self.hidden_size, "logits": self.vocab_size, "target_probs": len(self._draft_vocab), "position_mask": 1}
        return {f.name: FeatureSpec((1, tokens, width[f.source]) if f.source in width else (1, tokens), self._dtype(f)) for f in self._plan.features}

    def sample_bytes(self, tokens: int) -> int:
        """The exact size of a sample of that many tokens: what is reserved before the forward, and the ref's estimated_bytes."""
        return sum(spec.nbytes for spec in self.specs(tokens).values())

    def _admit(self, row: Row) -> _Admitted | Refusal:
        ids, mask = integers(row.input_ids, "input_ids", row.where), bits(row.loss_mask, "loss_mask", row.where)
        if len(ids) != len(mask):
            raise _invalid("loss_mask", f"has {len(mask)} entries, want {len(ids)} like input_ids", row)
        if len(ids) and not (0 <= int(ids.min()) and int(ids.max()) < self._ids_below):
            at = int(np.flatnonzero((ids < 0) | (ids >= self._ids_below))[0])
            raise _invalid("input_ids", f"entry {at} is {int(ids[at])}, want 0 to {self._ids_below - 1}", row)
        if self.max_tokens is not None and len(ids) > self.max_tokens:
            ids, mask = ids[:self.max_tokens], mask[:self.max_tokens]
            self.counts.truncated += 1
        if len(ids) < max(1, self.schema.min_tokens):
            return Refusal("short", f"{_where(row)}has {len(ids)} tokens, {self.schema.name} admits {max(1, self.schema.min_tokens)} or more", row.position)
        supervised = int(mask[1:].sum())  # nothing predicts the first
        if supervised < self.schema.min_supervised:
            return Refusal("unsupervised", f"{_where(row)}has {supervised} supervised tokens behind the first, {self.schema.name} admits {self.schema.min_supervised} or more", row.position)
        return self._describe(_Admitted(row, ids, mask, supervised))

    def _describe(self, a: _Admitted) -> _Admitted:
        """Everything of the sample but its tensors, held against the schema where a fault costs nothing."""
        a.sample_id = f"{self._run.run_id[:150].rstrip('.')}-{self._session}-{self._made}"
        self._made += 1
        a.attributes = self._attributes | {"supervised_tokens": str(a.supervised), "ids": "sha256:" + hashlib.sha256(a.ids.astype("<i8").tobytes()).hexdigest()[:32]}
        if p := a.row.position:
            a.attributes["source"] = f"{_printable(p.source)}@{p.epoch}/{p.index}"
        a.specs = self.specs(len(a.ids))
        a.num_tokens = len(a.ids) if self.schema.role("attention_mask") else int(a.mask.sum())
        a.nbytes = sum(spec.nbytes for spec in a.specs.values())
        self.schema.validate(SampleRef(
            sample_id=a.sample_id, run_id=self._run.run_id, store_uri=self._run.store.store_uri, feature_keys={name: f"{a.sample_id}/{name}" for name in a.specs}, feature_specs=a.specs,
            algorithm=_algorithm(self.schema.name), schema_version=self.schema.version, num_tokens=a.num_tokens, estimated_bytes=a.nbytes, target_model_version=self._versions[0],
            draft_weight_version=self._versions[1], generation="0" * 32, attributes=a.attributes,
        ))
        return a

    # -- the caller's side ---------------------------------------------------------------------------------------------

    def run(self, source: Iterable[Prompt], *, name: str | None = None, epochs: int = 1) -> Counts:
        """Produce a sample of every row of ``source``, ``epochs`` times over, and report to the run that this producer is done; or that it failed, if it did.

        ``name`` names the stream by all that fixes its order; by default ``source.name``, which :class:`JsonLines` has. With it every row's position is recorded along with the sample, counted from 0
        in the order of the rows (refused ones too), and a producer that starts again over the same source passes over what the run has taken. Without a name, it begins anew. For several
        epochs the source must be one that can be walked through again.

        Raises InvalidError for a prompt that breaks its form, and where not one row was admitted; TargetFaultError; ClosedError (the run takes no more); UnavailableError (the service is away).
        """
        if isinstance(epochs, bool) or not isinstance(epochs, int) or epochs < 1:
            raise InvalidError(f"is {epochs!r:.40}, want an integer above 0", op="run", subject="epochs")
        if isinstance(source, (str, Mapping)):
            raise InvalidError(f"is a {type(source).__name__}, want an iterable of prompts", op="run", subject="source")
        if epochs > 1 and iter(source) is source:
            raise InvalidError(f"is {epochs}, and the source can be walked through once only", op="run", subject="epochs", hint="give a list, or an object whose iter() begins anew")
        if name is None:
            name = getattr(source, "name", None)
        if name is not None and (not isinstance(name, str) or not name):
            raise InvalidError(f"is {name!r:.80}, want a string", op="run", subject="name")
        if name and self.turns != TURNS[0]:
            name += f"+turns={self.turns}"  # it fixes which row has which index
        with self:
            taken = self._producer.taken(name) if name else {}
            for epoch in range(epochs):
                self._all(self._rows(source, name, epoch, _Ranges(taken.get(epoch, []))))
            if not self.counts.samples and not self.counts.taken:
                raise InvalidError(f"gave no row that was admitted; refused: {self.counts.refused or 'none, there are no prompts'}", op="run", subject=name or "source")
        return self.counts

    def produce(self, rows: Iterable[Prompt] | Prompt) -> list[SampleRef]:
        """Make samples of rows or prompts and enqueue them, in order. Returns the refs of those that were admitted; :attr:`counts` has the others.

        The first call tells the run that the producer runs; :meth:`close`, or the end of a ``with`` block, that it is done. Errors are those of :meth:`run`.
        """
        prompts = [rows] if isinstance(rows, (Row, Refusal, str, Mapping)) else rows
        self._producer.start()
        return self._all(row for prompt in prompts for row in self._rows_of(prompt))

    def close(self, error: BaseException | str | None = None) -> None:
        """Report that the producer is done, or that it failed. The model and the run stay the caller's. Idempotent."""
        self._producer.close(error)

    def __enter__(self) -> TransformersProducer:
        self._producer.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._producer.__exit__(kind, error, trace)

    # -- rows ----------------------------------------------------------------------------------------------------------

    def _rows(self, source: Iterable[Prompt], name: str | None, epoch: int, taken: _Ranges) -> Iterator[Row | Refusal]:
        index = 0
        for prompt in source:
            count = count_rows(prompt, self.turns)
            wanted = [i for i in range(index, index + count) if i not in taken]
            self.counts.taken += count - len(wanted)
            if wanted:
                for i, row in enumerate(self._rows_of(prompt), index):
                    if i in taken:
                        continue
                    yield replace(row, position=Position(name, epoch, i)) if name else row
            index += count

    def _rows_of(self, prompt: Prompt) -> Iterator[Row | Refusal]:
        try:
            yield from rows_of(prompt, self.tokenizer, turns=self.turns)
        except InvalidError as e:
            yield Refusal("bad", f"{e.subject}: {e.detail}")

    def _all(self, rows: Iterator[Row | Refusal]) -> list[SampleRef]:
        pending: list[_Admitted] = []
        with ThreadPoolExecutor(1, thread_name_prefix="sluice-put") as worker:
            puts = _Puts(worker)
            try:
                for row in rows:
                    try:
                        admitted = row if isinstance(row, Refusal) else self._admit(row)
                    except InvalidError as e:
                        admitted = Refusal("bad", f"{e.subject}: {e.detail}", row.position)
                    if isinstance(admitted, Refusal):
                        self._refuse(admitted)
                        continue
                    pending.append(admitted)
                    if len(pending) == self.batch_size:
                        pending = self._some(pending, puts)
                while pending:
                    pending = self._some(pending, puts)
            finally:
                self._settle(puts)  # what was computed is stored, whatever ended the rows
        return puts.refs

    def _refuse(self, refusal: Refusal) -> None:
        if refusal.reason == "bad" and not self._skip_bad:
            raise InvalidError(refusal.detail, op="produce", hint="skip_bad passes such prompts over")
        n = self.counts.refused[refusal.reason] = self.counts.refused.get(refusal.reason, 0) + 1
        if self._on_refused is not None:
            self._on_refused(refusal)
        else:
            log.log(logging.WARNING if n <= _SHOWN else logging.DEBUG, "producer %s refuses a row (%s, the %d. of these): %s", self._producer.name, refusal.reason, n, refusal.detail)

    # -- one forward ---------------------------------------------------------------------------------------------------

    def _some(self, pending: list[_Admitted], puts: _Puts) -> list[_Admitted]:
        """One forward over as many of the first rows as the run has room for; returns the others. Its samples are put while the next forward runs, and no more than these: memory holds two batches."""
        rooms = self._reserve([a.nbytes for a in pending])
        batch = pending[:len(rooms)]
        try:
            made = self._forward(batch)
            self._settle(puts)
            for a, tensors in zip(batch, made, strict=True):
                room = rooms.pop(0)
                if tensors is None:
                    self._give_back([room])
                else:
                    puts.waiting.append((puts.worker.submit(self._put, a, tensors, room), a, room))
                tensors = None
        except BaseException:
            self._give_back(rooms)
            raise
        return pending[len(batch):]

    def _settle(self, puts: _Puts) -> None:
        """Wait for the puts, and count them. The first that failed is raised, and those behind it are given up."""
        while puts.waiting:
            future, a, _ = puts.waiting.popleft()
            try:
                ref, seconds = future.result()
            except BaseException:
                self._give_back([room for other, _, room in puts.waiting if other.cancel()])
                puts.waiting.clear()
                raise
            puts.refs.append(ref)
            self.counts.samples += 1
            self.counts.tokens += a.num_tokens
            self.counts.supervised_tokens += a.supervised
            self.counts.bytes += ref.estimated_bytes
            self.counts.put_seconds += seconds

    def _reserve(self, sizes: list[int]) -> list[Reservation]:
        start = time.monotonic()
        wedged: float | None = None
        try:
            while True:
                try:
                    return self._producer.reserve_many(sizes)
                except WedgedError as e:
                    wedged = wedged or time.monotonic()
                    if time.monotonic() - wedged > self._patience:
                        raise
                    log.warning("producer %s goes on waiting for room: %s", self._producer.name, str(e))
                    time.sleep(_WEDGE_PAUSE)
        finally:
            self.counts.waited_seconds += time.monotonic() - start

    def _give_back(self, rooms: list[Reservation]) -> None:
        if not rooms:
            return
        try:
            self._run.queue.unreserve(*(r.id for r in rooms))
        except SluiceError as e:
            log.debug("producer %s: reservations end with the session: %s", self._producer.name, str(e))

    def _forward(self, batch: list[_Admitted]) -> Iterator[dict[str, Any] | None]:
        """The features of each row; None for one that was refused, since what came out is not finite."""
        import torch

        lengths = [len(a.ids) for a in batch]
        ids = np.zeros((len(batch), max(lengths)), np.int64)
        mask = np.zeros_like(ids)
        for i, a in enumerate(batch):
            ids[i, :lengths[i]], mask[i, :lengths[i]] = a.ids, 1
        capture = _Capture(self.parts, self.hidden_size, lengths, self._wanted(), {role: dtypes.torch_dtype(d) for role, d in self._dtype_of.items()})
        try:
            logits = capture.run(self.model, torch.from_numpy(ids).to(self.device), torch.from_numpy(mask).to(self.device), self._plan.logits)
        except SluiceError:
            raise
        except Exception as e:
            hint = "lower batch_size or max_tokens" if isinstance(e, MemoryError) or "out of memory" in str(e) else ""
            raise TargetFaultError(f"the forward of {len(batch)} rows of {ids.shape[1]} tokens failed: {type(e).__name__}: {e}"[:1000], op="forward", subject=_name(self.model), hint=hint) from e
        self.counts.forwards += 1
        self.counts.forward_seconds += capture.seconds
        if self._plan.logits and (logits is None or tuple(logits.shape) != (*ids.shape, self.vocab_size)):
            raise TargetFaultError(f"logits are {None if logits is None else list(logits.shape)}, want {[*ids.shape, self.vocab_size]}", op="forward", subject=_name(self.model))
        return self._features(batch, capture, logits)

    def _wanted(self) -> _Wanted:
        aux, last = self._plan.role("aux"), self._plan.role("last")
        return _Wanted(self.aux_layers, aux is not None and aux.final_layer_norm == "post", last.norm if last else "")

    def _features(self, batch: list[_Admitted], capture: _Capture, logits: Any) -> Iterator[dict[str, Any] | None]:
        import torch

        for i, a in enumerate(batch):
            with torch.no_grad():
                tensors = self._build(a, capture.take(i), None if logits is None else logits[i:i + 1, :len(a.ids)])
            # The stored values are looked at: what was narrowed may be finite no longer.
            strange = next((f.name for f in self._plan.features if f.source in ("aux", "last", "logits", "target_probs") and not bool(torch.isfinite(tensors[f.name]).all())), None)
            if strange is None:
                if (specs := specs_of(tensors)) != a.specs:
                    raise TargetFaultError(f"the features are {specs}, want {a.specs}"[:1000], op="forward", subject=_name(self.model))
                self._faults = 0
                yield {name: t.cpu() for name, t in tensors.items()}  # here, since another thread has another stream
                continue
            at = [int(n) for n in (~torch.isfinite(tensors[strange])).nonzero()[0]]
            detail = f"{_where(a.row)}{strange} as {self._dtype(self.schema.feature(strange) or self._plan.features[0])} is not finite at token {at[1]}, element {at[2]}"
            self._faults += 1
            self._refuse(Refusal("not_finite", detail, a.row.position))
            if self._faults >= self._max_faults:
                raise TargetFaultError(f"{self._faults} rows in a row are not finite, the last: {detail}", op="forward", subject=_name(self.model))
            yield None

    def _build(self, a: _Admitted, states: dict[str, Any], logits: Any) -> dict[str, Any]:
        import torch

        out: dict[str, Any] = {}
        for f in self._plan.features:
            kind = dtypes.torch_dtype(self._dtype(f))
            if f.source == "input_ids":
                out[f.name] = torch.from_numpy(a.ids)[None]
            elif f.source == "attention_mask":
                out[f.name] = torch.ones((1, len(a.ids)), dtype=torch.int64)
            elif f.source == "loss_mask":
                out[f.name] = torch.from_numpy(a.mask)[None]
            elif f.source in ("aux", "last"):
                out[f.name] = states[f.source]
            elif f.source == "logits":
                out[f.name] = logits.to(kind)
            elif f.source == "target_probs":
                chosen = torch.as_tensor(self._draft_vocab, device=logits.device)
                finite = torch.isfinite(logits).all()  # a softmax hides an infinity outside of the draft's vocabulary, and one below zero inside
                out[f.name] = torch.where(finite, logits[..., chosen].float().softmax(-1), torch.nan).to(kind)
            elif f.source == "position_mask":
                inside = torch.zeros(self.vocab_size, dtype=torch.bool, device=logits.device)
                inside[torch.as_tensor(self._draft_vocab, device=logits.device)] = True
                supervised = torch.from_numpy(a.mask).to(logits.device) == 1
                out[f.name] = (inside[logits.argmax(-1)] & supervised)[..., None]
        return out

    def _put(self, a: _Admitted, tensors: dict[str, Any], room: Reservation) -> tuple[SampleRef, float]:
        """In the worker's thread."""
        start = time.monotonic()

        def put(reservation: Reservation | None) -> SampleRef:
            return self._producer.put(
                a.sample_id, tensors, num_tokens=a.num_tokens, attributes=a.attributes, positions=[a.row.position] if a.row.position else (), reservation=reservation,
                target_model_version=self._versions[0], draft_weight_version=self._versions[1],
            )

        try:
            ref = put(room)
        except FullError as e:
            # The reservation is gone, since its time was over or the service was started anew, and its room was given to others. What was computed waits at the gate once more.
            log.info("producer %s: %s; the sample %s waits for room again", self._producer.name, str(e), a.sample_id)
            ref = put(None)
        return ref, time.monotonic() - start


class _Puts:
    """Samples on their way into the run, in order."""

    def __init__(self, worker: ThreadPoolExecutor) -> None:
        self.worker = worker
        self.waiting: deque[tuple[Future[tuple[SampleRef, float]], _Admitted, Reservation]] = deque()
        self.refs: list[SampleRef] = []


@dataclass
class _Admitted:
    row: Row
    ids: Ints
    mask: Ints
    supervised: int
    sample_id: str = ""
    num_tokens: int = 0
    nbytes: int = 0
    specs: dict[str, FeatureSpec] = field(default_factory=dict)
    attributes: dict[str, str] = field(default_factory=dict)


class _Ranges:
    """Positions as the run lists them: ranges from the first index to behind the last, in order."""

    def __init__(self, ranges: list[tuple[int, int]]) -> None:
        self._edges = np.asarray(ranges, np.int64).reshape(-1, 2)

    def __contains__(self, index: int) -> bool:
        at = int(np.searchsorted(self._edges[:, 0], index, side="right")) - 1
        return at >= 0 and index < int(self._edges[at, 1])


class _Plan:
    """Which features samples have, in the schema's order."""

    def __init__(self, schema: Schema, supervision: str | None) -> None:
        encoding = schema.default if supervision is None else supervision
        wanted = {f.name for f in schema.features if f.required}
        if encoding:
            found = next((e for e in schema.encodings if e.name == encoding), None)
            if found is None:
                raise _invalid("supervision", f"is {encoding!r:.60}, want {' or '.join(e.name for e in schema.encodings) or 'None'}: the schema {schema.name} has no other")
            wanted |= set(found.features)
        self.features = [f for f in schema.features if f.name in wanted]
        for f in self.features:
            if f.source in ("", "position_ids", "seq_lens", "doc_remaining"):
                raise UnsupportedError("is nothing that this producer can make: it has no role, or describes packing", op=_OP, subject=f.name)
        if sum(f.source == "last" for f in self.features) > 1:
            raise UnsupportedError("the last hidden state is wanted before and behind the norm, and the attribute last_norm can say one", op=_OP, subject=schema.name)
        self.logits = any(f.source in ("logits", "target_probs", "position_mask") for f in self.features)

    def role(self, role: str) -> SchemaFeature | None:
        return next((f for f in self.features if f.source == role), None)


# -- hooks -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Wanted:
    aux_layers: tuple[int, ...]
    final_post: bool  # the aux layer N-1 is taken behind the final norm
    last: str  # "pre", "post" or ""


class _Capture:
    """The hooks of one forward. They copy each row's part of a state, without its padding, into the tensor that becomes the feature: nothing that the model does with its own tensors afterwards
    changes it, and no padded state is kept. A forward of another thread over the same model, which somebody else may run meanwhile, is none of theirs."""

    def __init__(self, parts: Parts, hidden_size: int, lengths: list[int], wanted: _Wanted, kinds: Mapping[str, torch.dtype] | None) -> None:
        self.seconds = 0.0
        self._thread = threading.get_ident()
        self._parts, self._hidden, self._lengths, self._wanted, self._kinds = parts, hidden_size, lengths, wanted, kinds
        self._states: dict[str, list[Any]] = {}
        self._fired: dict[int | str, int] = {}
        self.raw: dict[int | str, Any] = {}  # of the probe, which has no kinds yet

    def run(self, model: Any, ids: torch.Tensor, mask: torch.Tensor, logits: bool, **more: Any) -> Any:
        """One forward; the logits if they are wanted, which are not computed otherwise. With the probe, the model's whole output."""
        import torch

        with _turn(model), contextlib.ExitStack() as stack:
            stack.callback(_train, [m for m in model.modules() if m.training])
            model.eval()
            for hook in self._hooks():
                stack.callback(hook.remove)
            stack.enter_context(torch.no_grad())
            stack.enter_context(_no_autocast(torch, ids.device.type))
            start = time.monotonic()
            output = (model if logits else self._parts.base)(input_ids=ids, attention_mask=mask, use_cache=False, **more)
            self.seconds = time.monotonic() - start
        for layer, n in self._fired.items():
            if n != 1:
                raise TargetFaultError(f"{'the final norm' if layer == 'norm' else f'layer {layer}'} ran {n} times in a forward, want once", op="forward", subject=_name(model))
        if more:
            return output
        return _logits(output) if logits else None

    def take(self, row: int) -> dict[str, Any]:
        """The row's states, by role. They are handed over: nothing here keeps them."""
        out = {role: rows[row] for role, rows in self._states.items()}
        for rows in self._states.values():
            rows[row] = None
        return out

    def _hooks(self) -> Iterator[Any]:
        layers, wanted = self._parts.layers, self._wanted
        at_norm = [k for k, layer in enumerate(wanted.aux_layers) if layer == len(layers) - 1 and wanted.final_post]
        for k, layer in enumerate(wanted.aux_layers):
            if k not in at_norm:
                self._fired[layer] = 0
                yield _before(layers[0], self._keeper(layer, k)) if layer < 0 else layers[layer].register_forward_hook(_behind(self._keeper(layer, k)))
        if wanted.last or at_norm:
            self._fired["norm"] = 0

            def norm(_module: Any, given: tuple[Any, ...], out: Any) -> None:
                if threading.get_ident() != self._thread:
                    return
                if not given:
                    raise TargetFaultError("the final norm was given its state by a keyword", op="forward")
                self._fired["norm"] += 1
                if self._kinds is None:
                    self.raw |= {"pre": given[0].clone(), "norm": out.clone()}
                    return
                if wanted.last:
                    self._keep("last", out if wanted.last == "post" else given[0], 0)
                for k in at_norm:
                    self._keep("aux", out, k)

            yield self._parts.norm.register_forward_hook(norm)

    def _keeper(self, layer: int, block: int) -> Callable[[Any], None]:
        def keep(state: Any) -> None:
            if threading.get_ident() != self._thread:
                return
            state = state[0] if isinstance(state, (tuple, list)) else state
            self._fired[layer] += 1
            if self._kinds is None:
                self.raw[layer] = state.clone()
            else:
                self._keep("aux", state, block)

        return keep

    def _keep(self, role: str, state: Any, block: int) -> None:
        assert self._kinds is not None
        want = (len(self._lengths), max(self._lengths), self._hidden)
        if tuple(state.shape) != want:
            raise TargetFaultError(f"a state of the role {role} is {list(state.shape)}, want {list(want)}", op="forward")
        if role not in self._states:
            width = self._hidden * (len(self._wanted.aux_layers) if role == "aux" else 1)
            self._states[role] = [state.new_empty((1, n, width), dtype=self._kinds[role]) for n in self._lengths]
        for i, n in enumerate(self._lengths):
            self._states[role][i][0, :, block * self._hidden:(block + 1) * self._hidden].copy_(state[i, :n])


def _train(modules: list[Any]) -> None:
    for module in modules:
        module.training = True


def _behind(keep: Callable[[Any], None]) -> Callable[[Any, tuple[Any, ...], Any], None]:
    """A hook on what a module returns, which it leaves as it is."""

    def hook(_module: Any, _given: tuple[Any, ...], out: Any) -> None:
        keep(out)

    return hook


def _before(module: Any, keep: Callable[[Any], None]) -> Any:
    """A hook on what a module is given first, by place or, where torch tells, by keyword."""

    def place(_module: Any, given: tuple[Any, ...]) -> None:
        if not given:
            raise TargetFaultError("the first layer was given its state by a keyword, which this version of torch does not show", op="forward")
        keep(given[0])

    def either(module: Any, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        keep(given[0] if given else named["hidden_states"])

    try:
        return module.register_forward_pre_hook(either, with_kwargs=True)
    except TypeError:  # torch 1.13
        return module.register_forward_pre_hook(place)


def _no_autocast(torch: Any, device: str) -> contextlib.AbstractContextManager[Any]:
    try:
        off: contextlib.AbstractContextManager[Any] = torch.autocast(device, enabled=False)
    except RuntimeError:  # this torch has no autocast for that device
        return contextlib.nullcontext()
    return off


def _logits(output: Any) -> Any:
    logits = getattr(output, "logits", None)
    return logits if logits is not None else output[0]


class _Probe:
    """A forward over four tokens at the construction: what it says of sizes and dtypes, and whether hooks take what they say."""

    def __init__(self, p: TransformersProducer) -> None:
        import torch

        ids = torch.arange(_PROBE_TOKENS, device=p.device)[None]
        below = _ids_below(p.model, 0)
        if 0 < below < _PROBE_TOKENS:
            ids %= below
        ones = torch.ones_like(ids)
        aux = p.aux_layers or (len(p.parts.layers) - 1,)
        capture = _Capture(p.parts, 0, [_PROBE_TOKENS], _Wanted(aux, False, "post"), None)
        output = capture.run(p.model, ids, ones, True, output_hidden_states=True)
        logits = _logits(output)
        if not bool(torch.isfinite(logits).all()):
            raise TargetFaultError(f"the logits of the token ids {ids[0].tolist()} are not finite", op=_OP, subject=_name(p.model))
        last, pre = capture.raw["norm"], capture.raw["pre"]
        self.hidden_size, self.vocab_size = int(last.shape[-1]), int(logits.shape[-1])
        self.last_dtype = dtypes.name_of(last.dtype)
        kinds = {dtypes.name_of(capture.raw[layer].dtype) for layer in aux}
        if len(kinds) > 1:
            raise _invalid("dtype", f"must be given: the aux layers have the dtypes {', '.join(sorted(kinds))}")
        self.aux_dtype = kinds.pop()
        for layer in aux:
            if tuple(capture.raw[layer].shape) != tuple(last.shape):
                raise UnsupportedError(f"layer {layer} gives {list(capture.raw[layer].shape)}, the final norm {list(last.shape)}", op=_OP, subject=_name(p.model))
        self._numbering(p, capture, output, aux)
        if last_wanted := p._plan.role("last"):
            self._head(p, last, pre, logits, last_wanted)
        if not p._plan.logits:
            alone = _Capture(p.parts, 0, [_PROBE_TOKENS], _Wanted(aux, False, "post"), None)
            alone.run(p.model, ids, ones, False)
            if not _close(torch, alone.raw["norm"], last):
                raise UnsupportedError("the module with the layers gives other states when it is run without the head", op=_OP, subject=_name(p.model), hint="name it: parts={'base': 'dotted.path'}")

    def _numbering(self, p: TransformersProducer, capture: _Capture, output: Any, aux: tuple[int, ...]) -> None:
        """Hidden states that the model reports itself must be those that were hooked."""
        import torch

        reported = getattr(output, "hidden_states", None)
        if reported is None:
            return
        n = len(p.parts.layers)
        if len(reported) != n + 1:
            raise UnsupportedError(f"reports {len(reported)} hidden states, want {n + 1} of its {n} layers", op=_OP, subject=_name(p.model))
        for layer in aux:
            if layer < n - 1 and not _close(torch, capture.raw[layer], reported[layer + 1]):
                raise UnsupportedError(
                    f"what layer {layer} gives is not the hidden_states[{layer + 1}] that the model reports", op=_OP, subject=_name(p.model), hint="name the layers: parts={'layers': 'dotted.path'}",
                )

    def _head(self, p: TransformersProducer, last: Any, pre: Any, logits: Any, f: SchemaFeature) -> None:
        import torch

        with _turn(p.model), torch.no_grad(), _no_autocast(torch, p.device.type):
            if _close(torch, p.parts.head(last), logits):
                return
            fits = "; it gives them on the states before the norm, so the norm is applied elsewhere" if _close(torch, p.parts.head(pre), logits) else ""
        raise UnsupportedError(
            f"the head on the states behind the final norm does not give the model's logits{fits}", op=_OP, subject=_name(p.model),
            hint=f"a trainer that takes logits from {f.name} would learn something else: name norm and head by parts, or store logits or target_probs if the model changes its logits behind the head",
        )


def _close(torch: Any, a: Any, b: Any) -> bool:
    """Whether two runs of the same operations gave these: each element to two roundings of the dtype that is the less exact, and what sums in another order leave beside."""
    if tuple(a.shape) != tuple(b.shape):
        return False
    exact = max(torch.finfo(a.dtype).eps, torch.finfo(b.dtype).eps)
    a, b = a.detach().float().cpu(), b.detach().float().cpu()
    return bool(((a - b).abs() <= 2 * exact * b.abs() + min(1e-3, 100 * exact) * b.abs().max()).all())  # never for what is no number


# -- arguments -------------------------------------------------------------------------------------------------------------


def _invalid(argument: str, detail: str, row: Row | None = None) -> InvalidError:
    return InvalidError(f"{_where(row)}{detail}" if row else detail, op=_OP if row is None else "produce", subject=argument)


def _where(row: Row) -> str:
    p = row.position
    return f"{row.where}: " if row.where else f"row {p.index} of epoch {p.epoch}: " if p else ""


def _name(model: Any) -> str:
    return str(getattr(getattr(model, "config", None), "_name_or_path", "") or type(model).__name__)


def _printable(text: str) -> str:
    """A source's name as an attribute may have it."""
    return "".join(c if c.isprintable() else "?" for c in text).encode("utf-8", "replace")[:200].decode("utf-8", "ignore")


def _algorithm(name: str) -> FeatureAlgorithm | str:
    try:
        return FeatureAlgorithm(name)
    except ValueError:
        return name


def _embedding(model: Any) -> Any:
    get = getattr(model, "get_input_embeddings", None)
    return getattr(get(), "weight", None) if callable(get) else None


def _device_of(model: Any) -> torch.device:
    weight = _embedding(model)
    weight = weight if weight is not None else next(model.parameters(), None)
    if weight is None or weight.device.type == "meta":
        raise _invalid("device", "must be given: the model's input embeddings are on no device")
    device: torch.device = weight.device
    return device


def _ids_below(model: Any, otherwise: int) -> int:
    weight = _embedding(model)
    return int(weight.shape[0]) if weight is not None and weight.ndim == 2 else otherwise


def _max_tokens(model: Any, given: int | None) -> int | None:
    most = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    most = most if isinstance(most, int) and most > 0 else None
    if given is None:
        return most
    if isinstance(given, bool) or not isinstance(given, int) or given < 1 or most is not None and given > most:
        raise _invalid("max_tokens", f"is {given!r:.40}, want an integer from 1 to {most or '...'}: the model has no more positions")
    return given


def _aux_layers(given: Sequence[int] | str | None, n: int) -> tuple[int, ...]:
    if given is None:
        return default_aux_layers(n)
    shown = f"is {given if isinstance(given, str) else list(given)!r:.80}"
    want = f"want ids from -1 to {n - 1} in hf numbering (0 to {n} in vllm numbering), each once"
    ids: list[Any]
    if isinstance(given, str):
        numbering, colon, text = given.partition(":")
        try:
            ids = [int(part) - (numbering == "vllm") for part in (text if colon else given).split(",")]
        except ValueError:
            raise _invalid("aux_layers", f"{shown}, {want}") from None
        if colon and numbering not in ("hf", "vllm"):
            raise _invalid("aux_layers", f"{shown}, {want}")
    else:
        ids = list(given)
    if not ids or len(set(ids)) < len(ids) or any(isinstance(i, bool) or not isinstance(i, int) or not -1 <= i < n for i in ids):
        raise _invalid("aux_layers", f"{shown}, {want}")
    return tuple(ids)


def _draft_vocab(given: Sequence[int] | None, vocab: int, plan: _Plan) -> tuple[int, ...]:
    needs = plan.role("target_probs") or plan.role("position_mask")
    if needs is None:
        if given is not None:
            raise _invalid("draft_vocab", "is given, and no feature needs it; want supervision='target_probs'")
        return ()
    if given is None or not len(given):
        raise _invalid("draft_vocab", f"is empty; {needs.name} needs the draft's token ids")
    ids = integers(given, "draft_vocab", "draft_vocab")
    if int(ids.min()) < 0 or int(ids.max()) >= vocab or len(np.unique(ids)) < len(ids):
        raise _invalid("draft_vocab", f"has {len(ids)} ids from {int(ids.min())} to {int(ids.max())}, want some of 0 to {vocab - 1}, each once")
    return tuple(ids.tolist())


# -- fingerprints ----------------------------------------------------------------------------------------------------------


def target_fingerprint(model: Any) -> str:
    """A hash of the model's configuration and of the bytes of all its weights: where it is equal, outputs are. It reads every weight once, about a GB a second."""
    import torch

    digest = hashlib.sha256()
    config: Any = getattr(model, "config", None)
    settings = config.to_dict() if hasattr(config, "to_dict") else vars(config) if config is not None else {}
    digest.update(json.dumps({k: v for k, v in settings.items() if k not in _NOT_ARITHMETIC}, sort_keys=True, default=str).encode())
    for name, tensor in sorted(model.state_dict().items()):
        if not isinstance(tensor, torch.Tensor):
            continue
        if tensor.device.type == "meta":
            raise _invalid("fingerprint", f"must be given: the weight {name} is not in memory")
        digest.update(f"\0{name}\0{tensor.dtype}\0{list(tensor.shape)}\0".encode())
        if tensor.numel():
            digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return "sha256:" + digest.hexdigest()


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """A hash of a tokenizer's vocabulary, rules, special tokens and chat template."""
    digest = hashlib.sha256()
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        rules = json.loads(backend.to_str())
        rules.pop("truncation", None)  # these two are how it was last called
        rules.pop("padding", None)
    else:
        rules = tokenizer.get_vocab()
    special = {k: str(v) for k, v in getattr(tokenizer, "special_tokens_map", {}).items()}
    digest.update(json.dumps([rules, special, getattr(tokenizer, "chat_template", None)], sort_keys=True, default=str).encode())
    return "sha256:" + digest.hexdigest()


# -- the command -----------------------------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m sluice.integrations.transformers", description="Run a Hugging Face causal language model over prompts, and stream its hidden states into a run of a Sluice service.",
        epilog="A prompts file is JSON lines: {\"messages\": [{\"role\": ..., \"content\": ...}]}, {\"text\": ...} or {\"input_ids\": [...], \"loss_mask\": [...]}. "
        "Started again with the same files, it goes on behind what the run has taken. Exit status: 0 all rows were produced, 1 an error, 2 wrong arguments, 130 interrupted.",
    )
    where = p.add_argument_group("the run")
    where.add_argument("--run", required=True, metavar="ID", help="the run that samples go to; `sluice runs create` makes one")
    where.add_argument("--url", help="the service: http://host:port, https://host:port or unix:/path (default: $SLUICE_URL, or the service of this host)")
    where.add_argument("--token-file", metavar="FILE", help="holds the token that proves who calls over TCP")
    where.add_argument("--name", default="p0", help="of this producer in the run (default: %(default)s)")
    target = p.add_argument_group("the target")
    target.add_argument("--model", required=True, metavar="PATH", help="a folder or a name that transformers loads")
    target.add_argument("--device", help="cpu, cuda, cuda:1, ... (default: where transformers puts it, which is cpu)")
    target.add_argument("--device-map", metavar="MAP", help="spread the model over devices, as accelerate does: auto, balanced, ...")
    target.add_argument("--load-dtype", default="auto", metavar="DTYPE", help="load the weights as bfloat16, float16 or float32 (default: as they are stored)")
    target.add_argument("--target-version", default="0", metavar="V", help="target_model_version of the samples (default: %(default)s)")
    target.add_argument("--fingerprint", metavar="TEXT", help="of the weights, instead of a hash of all of them")
    prompts = p.add_argument_group("the prompts")
    prompts.add_argument("--prompts", required=True, nargs="+", metavar="FILE", help="JSONL files, in this order")
    prompts.add_argument("--turns", choices=TURNS, default="each", help="of a conversation: a row for each assistant turn, or the whole in one row (default: %(default)s)")
    prompts.add_argument("--epochs", type=int, default=1, metavar="N", help="passes over the prompts (default: %(default)s)")
    prompts.add_argument("--max-tokens", type=int, metavar="N", help="cut longer rows (default: the model's positions)")
    prompts.add_argument("--skip-bad", action="store_true", help="count lines that break their form, instead of ending with the first")
    samples = p.add_argument_group("the samples")
    samples.add_argument("--aux-layers", metavar="IDS", help=(
        "hf:1,15,28 or vllm:2,16,29: hf i is the output of decoder layer i from 0, vllm k the residual stream behind k layers "
        "(default: hf 1, N/2-1, N-4 of N layers)"
    ))
    samples.add_argument("--supervision", metavar="ENCODING", help="last_hidden_states, logits or target_probs, if the run's schema has it (default: the schema's own)")
    samples.add_argument("--draft-vocab", metavar="FILE", help="JSON list of the draft's token ids in its order, for target_probs")
    samples.add_argument("--dtype", metavar="DTYPE", help="of stored hidden states: bfloat16, float16 or float32 (default: as the model has them)")
    samples.add_argument("--logits-dtype", default="float32", metavar="DTYPE", help="of stored logits and probabilities (default: %(default)s)")
    samples.add_argument("--batch-size", type=int, default=8, metavar="N", help="rows a forward (default: %(default)s)")
    p.add_argument("--quiet", action="store_true", help="say errors only")
    return p


def _load(args: argparse.Namespace) -> tuple[Any, Any]:
    try:
        import transformers
    except ModuleNotFoundError as e:
        raise UnsupportedError(f"{e.name} is not installed", op="load", subject=args.model, hint="pip install transformers jinja2") from None
    options: dict[str, Any] = {"torch_dtype": "auto" if args.load_dtype == "auto" else dtypes.torch_dtype(args.load_dtype)}
    if args.device_map:
        options["device_map"] = args.device_map
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(args.model, **options)
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
        except Exception as e:  # whatever it lacks: rows of token ids need none, and the first row of another kind says so
            log.warning("%s comes without a tokenizer, so prompts must be token ids: %s", args.model, " ".join(str(e).split())[:200])
            tokenizer = None
    except (OSError, ValueError, ImportError) as e:
        raise InvalidError(f"transformers can't load it: {' '.join(str(e).split())[:500]}", op="load", subject=args.model) from e
    return model, tokenizer


def _draft_ids(path: str | None) -> list[int] | None:
    if path is None:
        return None
    try:
        with open(path, "rb") as file:
            ids = json.load(file)
    except (OSError, ValueError) as e:
        raise InvalidError(f"can't be read: {e}", op="draft vocabulary", subject=path) from None
    if not isinstance(ids, list):
        raise InvalidError("holds no JSON list", op="draft vocabulary", subject=path)
    return ids


def _command(args: argparse.Namespace) -> None:
    from ..client import connect

    source = JsonLines(*args.prompts)
    draft_vocab = _draft_ids(args.draft_vocab)
    with connect(args.url, run=args.run, token_file=args.token_file) as run:
        model, tokenizer = _load(args)
        producer = TransformersProducer(
            model, run, tokenizer, args.aux_layers, args.supervision, args.name, args.batch_size, args.max_tokens, args.device, args.dtype, logits_dtype=args.logits_dtype, draft_vocab=draft_vocab,
            turns=args.turns, fingerprint=args.fingerprint, target_model_version=args.target_version, skip_bad=args.skip_bad,
        )
        log.info("run %s: producer %s samples %s at aux layers %s, %d bytes a token", run.run_id, args.name, _name(model), list(producer.aux_layers), producer.sample_bytes(1))
        c = producer.run(source, epochs=args.epochs)
        log.info(
            "%d samples, %d tokens, %d bytes; %d rows taken before, %d cut, refused: %s; %.1f s at the gate, %.1f s in the target, %.1f s storing", c.samples, c.tokens, c.bytes, c.taken, c.truncated,
            c.refused or "none", c.waited_seconds, c.forward_seconds, c.put_seconds,
        )


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Returns its exit status."""
    args = _parser().parse_args(argv)
    logging.basicConfig(format="%(message)s", stream=sys.stderr)
    log.setLevel(logging.ERROR if args.quiet else logging.INFO)
    try:
        _command(args)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except (SluiceError, OSError) as e:
        print(f"error: {' '.join(str(e).split())}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
