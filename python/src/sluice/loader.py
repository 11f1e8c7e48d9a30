"""Batches of a run for a trainer: fetched ahead, kept alive while it trains, settled when it says so."""

from __future__ import annotations

import logging
import math
import os
import sys
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

from . import dtypes
from .collate import Batch, CollateFunction, Collator, FinalNorm
from .device import ring_for
from .errors import ConflictError, InvalidError, SluiceError
from .queue import Consumer
from .refs import _is_id
from .stream import FINGERPRINTS, Counts, Settings, Skip, Stream, passed_over

if TYPE_CHECKING:
    import torch

    from .client import Run

log = logging.getLogger("sluice")

ACK_MODES = ("next", "step", "checkpoint")
_STATE_VERSION = 1


class Loader:
    """An iterator over batches, and a context manager. Made by :meth:`sluice.Run.loader`, which says what the arguments are.

    Leaving the ``with`` block regularly is :meth:`close`. Leaving it by an exception fails the batches that were taken and not settled, so that they come again; by Ctrl-C, SystemExit
    or the like they are returned, which counts against no sample. A loader that nobody has any more gives back what it fetched ahead; batches that were taken in the modes "step" and
    "checkpoint" then wait for the next step or checkpoint of the run or its end, and in "next" they are returned a second later.

    Methods may be called from any thread; one runs at a time. A child of a fork can't use its parent's loaders: ClosedError.
    """

    def __init__(
        self, run: Run, *, rank: int = 0, ranks: int = 1, batch: int = 1, collate: str | CollateFunction = "pad", pad_to_multiple: int = 1, max_tokens: int = 0, prefetch: int = 2,
        ack: str = "next", device: torch.device | str | None = None, consumer: str | None = None, incarnation: int | None = None, members: int = 1, member: int = 0,
        timeout: float | None = None, progress: bool = False, final_norm: FinalNorm | None = None, skip: Skip | None = None, max_skips: int = 100,
        schema: Mapping[str, Any] | None = None, renew_every: float | None = None, max_idle: float = 1800.0, patience: float = 600.0, clock: Callable[[], float] = time.monotonic,
    ) -> None:
        for name, value, least, most in (
            ("rank", rank, 0, 1 << 20), ("ranks", ranks, 1, 1 << 20), ("batch", batch, 1, 1 << 20), ("prefetch", prefetch, 0, 1 << 10), ("members", members, 1, 1 << 16),
            ("member", member, 0, 1 << 16), ("max_skips", max_skips, 0, 1 << 53),
        ):
            _whole(name, value, least, most)
        if incarnation is not None:
            _whole("incarnation", incarnation, 0, (1 << 53) - 1)
        for name, number, zero in (("timeout", timeout, True), ("renew_every", renew_every, False), ("max_idle", max_idle, False), ("patience", patience, False)):
            if number is not None:
                _seconds(name, number, zero)
        if ack not in ACK_MODES:
            raise _bad("ack", f"is {ack!r:.40}, want next, step or checkpoint")
        if rank >= ranks:
            raise _bad("rank", f"is {rank} of {ranks} ranks, want 0 to {ranks - 1}")
        if member >= members:
            raise _bad("member", f"is {member} of {members} members, want 0 to {members - 1}")
        if members > 1 and consumer is None:
            raise _bad("consumer", f"is missing: the {members} members of a group share every sample under one name", "give all of them the same")
        if consumer is not None and (not _is_id(consumer)):
            raise _bad("consumer", f'is {consumer!r:.80}, want [A-Za-z0-9_][A-Za-z0-9._:-]{{0,199}} without ".."')
        if skip is not None and not callable(skip):
            raise _bad("skip", f"is {skip!r:.40}, want a function of a ref and an error")
        spec = run.refresh()
        _check_windows(spec, rank, ranks, batch)
        if ack == "checkpoint" and not spec.get("steps_per_checkpoint"):
            raise _bad(
                "ack", f'is "checkpoint", but the run {run.run_id!r} declares no steps a checkpoint, so nobody has checked that its caps hold the samples of so many steps',
                "create the run with steps_per_checkpoint= (without windows samples_per_step= too), or let ack be next or step",
            )
        dtypes.torch_module()  # here and now, if it is there: the first import takes long
        document = schema or spec.get("schema")
        if not document:
            raise _bad("schema", f"is missing: the run {run.run_id!r} is mixed and has none of its own", "give the document of the samples that the batches are made of")
        collator = Collator(document, collate, batch=batch, pad_to_multiple=pad_to_multiple, max_tokens=max_tokens, final_norm=final_norm)
        settings = Settings(
            batch=batch, prefetch=prefetch, ack=ack, ring=ring_for(device, prefetch + 1), renew_every=renew_every, max_idle=max_idle, patience=patience,
            skip=skip or passed_over, max_skips=max_skips, clock=clock,
        )
        from .client import consumer_name

        who = Consumer(consumer or consumer_name(), incarnation or 0, rank, member, members if members > 1 else 0)
        self.run = run
        self._ranks, self._members, self._timeout = ranks, members, timeout
        self._stream = Stream(run.run_id, run.client._t, run.queue, run.store, who, collator, settings)
        self._progress = _Progress(run.run_id) if progress and sys.stderr is not None and sys.stderr.isatty() else None
        run._take(self._stream)
        self._gone = weakref.finalize(self, _retire, self._stream)
        self._gone.atexit = False  # the session ends with the process, and returns them

    @property
    def consumer(self) -> Consumer:
        """Who acquires: name, incarnation, rank, member."""
        return self._stream.consumer

    # -- batches -------------------------------------------------------------------------------------------------------

    def __iter__(self) -> Loader:
        return self

    def __next__(self) -> Batch:
        batch = self.next(self._timeout)
        if batch is None:
            raise StopIteration
        return batch

    def next(self, timeout: float | None = None) -> Batch | None:
        """The next batch, or None at the end of the stream. In mode "next" it acknowledges the one before.

        Waits for ``timeout`` seconds, or for as long as the stream lives, also while the service restarts. What came late is there for the next call. The end may come while batches are open: settle
        them, and call again if one was failed.

        Raises WaitTimeoutError, with the run's bottleneck; the producer's error (TargetFaultError or its class), behind everything that was produced, if the stream was cut off;
        StaleError when a newer incarnation of the consumer took over; WedgedError when nothing can move; the error of a sample that ``skip`` does not pass over, after which it may be called
        again; UnavailableError when ``patience`` is through; ClosedError.
        """
        if timeout is not None:
            _seconds("timeout", timeout, True)
        batch = self._stream.next(timeout)
        if self._progress is not None:
            self._progress.show(self._stream.counts()[0], end=batch is None)
        return batch

    def step(self) -> None:
        """The optimizer has made a step with all batches taken so far. Acknowledges them; in mode "checkpoint" they only become safe from a later failure."""
        self._stream.step()

    def checkpoint(self) -> None:
        """The trainer's state, with all batches taken so far in it, is safe. Acknowledges them in every mode."""
        self._stream.checkpoint()

    def fail(self, cause: object = None) -> None:
        """Fail the batches that were taken and not settled, those of finished steps left out: their samples come again, behind the others, until their budget is used up."""
        self._stream.fail(cause)

    def consume_now(self) -> None:
        """Give up the last batch's pins at once, and in mode "next" acknowledge it, without taking another one. Idempotent."""
        self._stream.consume_now()

    def touch(self) -> None:
        """A sign of life of a trainer that does without the loader for long: leases are renewed for ``max_idle`` seconds after the last call."""
        self._stream.touch()

    def counts(self) -> Counts:
        """What this loader did so far."""
        return self._stream.counts()[0]

    # -- ends ----------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the loader regularly: in mode "next" the last batch is acknowledged; in the others what has no step or checkpoint behind it is returned, and so is what was made ahead.

        Takes 5 s at most, then UnavailableError; what could not be given back runs out by itself, or ends with the session. Idempotent.
        """
        end_stream(self._stream, None)
        self._ended()

    def _ended(self) -> None:
        self._gone.detach()
        if self._progress is not None:
            self._progress.show(self._stream.counts()[0], end=True)

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        end_stream(self._stream, error)
        self._ended()

    # -- state ---------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What a trainer saves with its checkpoint, of plain types: who consumes, what the samples were made by, and how far it came. The queue itself knows which samples are settled."""
        s = self._stream
        s.own()
        schema = s._collator.schema
        return {
            "version": _STATE_VERSION, "run_id": s.run_id, "schema": schema.name, "schema_version": schema.version, "consumer": s.consumer.name, "incarnation": s.consumer.incarnation,
            "rank": s.consumer.rank, "ranks": self._ranks, "member": s.consumer.member, "members": self._members, "batch": s.settings.batch, "ack": s.settings.ack,
            "target_model_version": s.version, **{name: s.fingerprints.get(name) for name in FINGERPRINTS},
            "settled_window": s.settled_window, "settled_samples": s.settled_samples,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on as the consumer of a saved state, one incarnation later, which takes over from the old one at once. Before the first batch; else ConflictError.

        A state of another run, schema, rank, batch or mode is refused: InvalidError, whose subject is the field. Where the samples have another fingerprint of target or tokenizer than the
        state says, under the same target_model_version, the first batch raises InvalidError for the field.
        """
        s = self._stream
        s.own()
        if s._threads or s.closing:
            raise ConflictError("the loader has begun; load the state before its first batch", op="load_state_dict", subject=s.consumer.name)
        mine = self.state_dict()
        for name in mine:
            if name not in state:
                raise InvalidError("is missing in the state", op="load_state_dict", subject=name)
        for name in state:
            if name not in mine:
                raise InvalidError("is no field of a loader's state", op="load_state_dict", subject=str(name)[:60])
        for name in ("version", "run_id", "schema", "schema_version", "rank", "ranks", "member", "members", "batch", "ack"):
            if state[name] != mine[name] or type(state[name]) is not type(mine[name]):
                raise InvalidError(f"is {state[name]!r:.80} in the state, and {mine[name]!r} here", op="load_state_dict", subject=name)
        for name in ("incarnation", "settled_samples"):
            _whole(name, state[name], 0, (1 << 53) - 2, "load_state_dict")
        if state["settled_window"] is not None:
            _whole("settled_window", state["settled_window"], 0, (1 << 53) - 1, "load_state_dict")
        if not _is_id(state["consumer"]):
            raise InvalidError(f"is {state['consumer']!r:.80}, want the name of a consumer", op="load_state_dict", subject="consumer")
        for name in ("target_model_version", *FINGERPRINTS):
            if state[name] is not None and not isinstance(state[name], str):
                raise InvalidError(f"is {state[name]!r:.80}, want a string", op="load_state_dict", subject=name)
        s.consumer = replace(s.consumer, name=state["consumer"], incarnation=max(state["incarnation"] + 1, s.consumer.incarnation))
        s.expect(str(state["target_model_version"] or ""), {name: state[name] for name in FINGERPRINTS if state[name] is not None})
        s.settled_window, s.settled_samples = state["settled_window"], state["settled_samples"]


def end_stream(stream: Stream, error: BaseException | None) -> None:
    """Close a stream as the way of leaving wants it."""
    if error is None:
        stream.close("ack" if stream.settings.ack == "next" and not stream.retired else "return")
        return
    try:
        if isinstance(error, Exception):
            stream.close("fail", error)
        else:
            stream.close("return")  # Ctrl-C and the like are no sample's fault
    except SluiceError as e:
        log.warning("run %s: %s", stream.run_id, str(e))  # the error that is on its way says more


def _retire(stream: Stream) -> None:
    """A finalizer, which may run anywhere: it takes no lock."""
    if os.getpid() == stream.pid:
        stream.retired = True
        stream.transport.soon(stream.retire)


def _check_windows(spec: Mapping[str, Any], rank: int, ranks: int, batch: int) -> None:
    windows = spec.get("windows")
    run_id = spec["run_id"]
    if not windows:
        if ranks > 1:
            raise _bad(
                "ranks", f"is {ranks}, but the run {run_id!r} deals out no windows, without which ranks get unequal counts and their collectives hang",
                f"create it with ranks={ranks} and per_rank=, or leave rank and ranks out for consumers that do not step together",
            )
        return
    if ranks != windows["ranks"]:
        raise _bad("ranks", f"is {ranks}, but the run {run_id!r} deals out windows for {windows['ranks']} ranks", "change the run with Run.reshape(ranks, per_rank) while no lease is out")
    if windows["per_rank"] % batch:
        raise _bad("batch", f"is {batch}, which does not divide the {windows['per_rank']} samples that a rank has of each window", "a batch does not reach into the next window")


def _bad(subject: str, detail: str, hint: str = "") -> InvalidError:
    return InvalidError(detail, op="loader", subject=subject, hint=hint)


def _whole(name: str, value: object, least: int, most: int, op: str = "loader") -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise InvalidError(f"is {value!r:.40}, want a whole number from {least} to {most}", op=op, subject=name)


def _seconds(name: str, value: object, zero: bool) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value) or value < 0 or not zero and value == 0:
        raise _bad(name, f"is {value!r:.40}, want a number of seconds, {'0 or more' if zero else 'more than 0'}")


class _Progress:
    """One line on a terminal, drawn at most a few times a second."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._begin = time.monotonic()
        self._drawn = 0.0
        self._ended = False

    def show(self, c: Counts, end: bool) -> None:
        now = time.monotonic()
        if self._ended or not end and now - self._drawn < 0.2:
            return
        self._drawn, self._ended = now, end
        seconds = max(now - self._begin, 1e-9)
        line = f"{self._run_id}: {c.batches} batches, {c.samples} samples, {c.tokens / seconds:,.0f} tokens/s, waited {100 * c.wait_seconds / seconds:.0f} %"
        if c.skipped:
            line += f", {c.skipped} skipped"
        sys.stderr.write(f"\r\x1b[K{line}" + ("\n" if end else ""))
        sys.stderr.flush()
