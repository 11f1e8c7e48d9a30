"""The producing side of the short way: a named producer of a run, which the run waits for."""

from __future__ import annotations

import functools
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from .admission import admit
from .errors import ClosedError, ConflictError, DuplicateError, InvalidError, SchemaError, SluiceError, StaleError
from .queue import Position, Reservation
from .refs import FeatureAlgorithm, SampleRef
from .schema import Schema
from .tensorfile import Tensor, specs_of
from .transport import Cancel, Cancelled

if TYPE_CHECKING:
    from .client import Run

log = logging.getLogger("sluice")

_ALIVE_SECONDS = 15.0  # between two signs of life; the run gives up on a producer after producer_timeout, 60 s


class Producer:
    """One named producer of a run.

    A context manager: the run is told that the producer runs, hears of it every 15 s, and at the end that it is done, or, when the block is left by an exception, that it failed and why. The run's
    queue closes when all producers that it declares are done. A newer incarnation of a name takes over from an older one.
    """

    def __init__(self, run: Run, name: str, incarnation: int | None = None) -> None:
        if not name:
            raise InvalidError("is empty", op="producer", subject="name")
        self.run = run
        self.name = name
        self.incarnation = time.time_ns() // 1_000_000 if incarnation is None else incarnation
        self._who = (name, self.incarnation)
        self._end = Cancel()
        self._pid = os.getpid()
        self._reported = False
        self._thread: threading.Thread | None = None

    def start(self) -> Producer:
        """Report that the producer runs, and go on doing so."""
        if self._end.cancelled:
            raise ConflictError("has ended; make a new one", op="producer", subject=self.name)
        if self._thread is None:
            self.run.queue.report(self._who, "running")
            self._thread = threading.Thread(target=self._live, name="sluice-producer", daemon=True)
            self._thread.start()
        return self

    def _live(self) -> None:
        while not self._end.wait(_ALIVE_SECONDS):
            try:
                self.run.queue.report(self._who, "running", cancel=self._end)
            except (ClosedError, StaleError, ConflictError, Cancelled):
                return  # the client was closed, a newer incarnation has taken over, or this one has ended
            except SluiceError as e:
                log.warning("producer %s of run %s can't say that it lives: %s", self.name, self.run.run_id, str(e))

    def taken(self, source: str) -> dict[int, list[tuple[int, int]]]:
        """Which positions of a source are enqueued already, by epoch, as ranges: a producer that starts again goes on behind them."""
        return self.run.queue.taken(source)

    def reserve(self, nbytes: int, *, timeout: float | None = None, abort_when: Callable[[], bool] | None = None) -> Reservation:
        """Wait at the run's gate for room for one sample of ``nbytes`` bytes. Do it before the target is run; see :meth:`RunQueue.reserve`."""
        return self.run.queue.reserve(nbytes, timeout=timeout, producer=self._who, abort_when=abort_when)

    def reserve_many(self, sizes: Sequence[int], *, timeout: float | None = None, abort_when: Callable[[], bool] | None = None) -> list[Reservation]:
        """Wait at the gate for room for the first of several samples, and take that for the others as far as it is there; see :meth:`RunQueue.reserve_many`."""
        return self.run.queue.reserve_many(sizes, timeout=timeout, producer=self._who, abort_when=abort_when)

    def put(
        self, sample_id: str, tensors: Mapping[str, Tensor], *, num_tokens: int | None = None, attributes: Mapping[str, str] | None = None, positions: Iterable[Position] = (),
        reservation: Reservation | None = None, timeout: float | None = None, algorithm: FeatureAlgorithm | str | None = None, target_model_version: str = "0", draft_weight_version: str = "0",
    ) -> SampleRef:
        """Store one sample and enqueue it. Without a reservation it waits at the gate first, for ``timeout`` seconds, or as long as the run lives.

        A reservation that is too small is given back, and one of the right size is waited for. What fails leaves nothing behind.

        A sample that is empty, or has a row with fewer tokens or supervised tokens than the run's schema admits (``min_tokens``, ``min_supervised``), is refused before anything is sent: SchemaError.
        A mixed run has no such rule. Else it raises what :meth:`RunQueue.reserve`, :meth:`RunStore.put` and :meth:`RunQueue.put` raise.
        """
        try:
            nbytes = sum(spec.nbytes for spec in specs_of(tensors).values())
            if self._schema is not None:
                admit(self._schema, sample_id, tensors, attributes if isinstance(attributes, Mapping) else {})
        except BaseException:
            if reservation is not None:
                self._give_back(reservation)
            raise
        if reservation is not None and reservation.bytes < nbytes:
            self.run.queue.unreserve(reservation.id)
            reservation = None
        if reservation is None:
            reservation = self.reserve(nbytes, timeout=timeout)
        try:
            ref = self.run.store.put(
                sample_id, tensors, None, algorithm, None, target_model_version, draft_weight_version, num_tokens, attributes=attributes, reservation=reservation.id
            )
        except BaseException as e:
            self._give_back(reservation)
            if isinstance(e, DuplicateError):
                e.hint = e.hint or "a producer that starts again asks producer.taken() which positions the run has, and goes on behind them"
            raise
        try:
            self.run.queue.put(ref, positions=positions, producer=self._who)
        except BaseException as e:
            self._tidy(lambda: self.run.store.abort(ref, promptly=True))
            if isinstance(e, SchemaError):
                e.hint = e.hint or self._counted(e, ref)
            raise
        return ref

    @functools.cached_property
    def _schema(self) -> Schema | None:
        """Of the run; None where it is mixed."""
        return Schema.parse(self.run.schema) if self.run.schema else None

    def _counted(self, error: SchemaError, ref: SampleRef) -> str:
        """Which attribute fixed the length of the axis that the service finds at fault; it names the axis alone."""
        axis = re.search(r": axis ([A-Za-z0-9_*]+) is ", error.detail)
        if axis is None or self._schema is None:
            return ""
        for rule in self._schema.attributes:
            if rule.counts in axis[1].split("*") and ":" in ref.attributes.get(rule.name, ""):
                return f'{rule.counts} is the number of entries of the attribute {rule.name}, which is "{ref.attributes[rule.name]:.80}"'
        return ""

    def _give_back(self, reservation: Reservation) -> None:
        self._tidy(lambda: self.run.queue.unreserve(reservation.id, promptly=True))

    def _tidy(self, work: Callable[[], None]) -> None:
        try:
            work()
        except SluiceError as e:
            log.debug("producer %s: what a failed put left ends by itself: %s", self.name, str(e))

    def close(self, error: BaseException | str | None = None) -> None:
        """Report that the producer is done, or that it failed. Idempotent; it may be called again if the service did not answer. The child of a fork reports nothing of its parent's."""
        if self._reported or self._pid != os.getpid():
            return
        self._end.cancel()
        if self._thread is not None:
            self._thread.join(5)
        if error is None:
            self.run.queue.report(self._who, "done")
        else:
            self.run.queue.report(self._who, "failed", error)
        self._reported = True

    def __enter__(self) -> Producer:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self.close(error)
        except SluiceError as e:
            if error is None:
                raise
            log.warning("producer %s could not report its failure: %s", self.name, str(e))
