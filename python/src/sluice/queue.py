"""The control plane: the queue of a run, through the service. It carries refs, never tensors."""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import quote

from .answers import count, fields, flag, items, lease_id, run_path, seconds, text, understood
from .errors import AbortedError, CorruptError, InvalidError, SluiceError, StaleError, WaitTimeoutError, from_problem
from .refs import SampleRef
from .transport import SLICE_SECONDS, Cancel, Transport, new_id

log = logging.getLogger("sluice")

T = TypeVar("T")

MAX_BATCH = 1024
_ABORT_POLL_SECONDS = 0.05  # how often abort_when is asked

_lease_ids = itertools.count(1)


def _next_lease_id() -> int:
    return next(_lease_ids)


@dataclass(frozen=True)
class VisibilityTimeout:
    """How long a lease lives unless it is renewed or settled, in seconds."""

    seconds: float = 30.0

    def __post_init__(self) -> None:
        if isinstance(self.seconds, bool) or not isinstance(self.seconds, (int, float)) or not 0 < self.seconds < float("inf"):
            raise InvalidError(f"is {self.seconds!r}, want a number of seconds above 0", op="VisibilityTimeout", subject="seconds")


@dataclass(frozen=True)
class WindowSlot:
    """Which place of which window a lease fills."""

    number: int  # of the window, from 0
    rank: int  # whose share it is
    slot: int  # place in that share, from 0
    pad: bool = False  # a stand-in: its sample is in the window already, so it must not count in the loss
    tokens: int = 0  # in the whole window, pads left out
    supervised_tokens: int = 0


@dataclass(frozen=True)
class Lease:
    """A ref that one consumer holds. ``deadline`` is on the clock of :func:`time.monotonic`, and never later than the service's; ``lease_id`` is the service's 128-bit id."""

    ref: SampleRef
    deadline: float
    visibility_timeout: VisibilityTimeout
    redelivery_count: int = 0
    lease_id: int = field(default_factory=_next_lease_id)
    window: WindowSlot | None = None
    consumer: Consumer | None = None  # who was given it, and so may settle it

    @property
    def wire_id(self) -> str:
        return f"{self.lease_id:032x}"


@dataclass(frozen=True)
class Consumer:
    """Who acquires and settles. A newer incarnation of a name takes over at once. ``member`` of ``members`` is its place in a replica group, which shares every sample."""

    name: str
    incarnation: int = 0
    rank: int = 0
    member: int = 0
    members: int = 0

    def wire(self) -> dict[str, Any]:
        return {k: v for k, v in (("name", self.name), ("incarnation", self.incarnation), ("rank", self.rank), ("member", self.member), ("members", self.members)) if v or k == "name"}


@dataclass(frozen=True)
class Position:
    """Where a row comes from in the prompt stream."""

    source: str
    epoch: int
    index: int


@dataclass(frozen=True)
class Reservation:
    """Room for one sample. It ends by itself after ``expires_seconds``, or with its session, unless it is used."""

    id: str
    bytes: int
    expires_seconds: float


@dataclass(frozen=True)
class Delivery:
    """What an acquire came to: leases; nothing yet (no lease and no end); or the end, with its cause if that was not the regular one."""

    leases: tuple[Lease, ...] = ()
    end: bool = False
    cause: SluiceError | None = None


@dataclass(frozen=True)
class Settlement:
    """What became of a lease. ``verdict`` is "ack", "fail", "fail_permanent" or "return"."""

    lease_id: int
    verdict: str
    reason: str = ""


@dataclass(frozen=True)
class SettleResult:
    """``status`` is "settled", "already_settled" (as ``as_``), "renewed" or "stale"; ``dead`` says that the sample became a dead letter by it."""

    lease_id: int
    status: str
    as_: str = ""
    dead: bool = False


@dataclass(frozen=True)
class DeadLetter:
    """A sample that was given up, with the reasons, oldest first. One whose bytes were ``freed`` can't be requeued."""

    ref: SampleRef
    since: str
    fails: int
    expiries: int
    reasons: tuple[str, ...]
    freed: bool


class RunQueue:
    """The queue of one run. Made by :class:`sluice.Run`; every method may be called from any thread.

    A call that finds the service away asks again for as long as the client's patience says, and then raises UnavailableError; that is never the end of the stream.
    """

    def __init__(self, transport: Transport, run_id: str, visibility_timeout: float) -> None:
        self._t = transport
        self._run = run_path(run_id)
        self.run_id = run_id
        self.visibility_timeout = VisibilityTimeout(visibility_timeout)

    # -- producers -----------------------------------------------------------------------------------------------------

    def reserve(
        self, nbytes: int, *, timeout: float | None = None, producer: tuple[str, int] | None = None, abort_when: Callable[[], bool] | None = None, cancel: Cancel | None = None,
    ) -> Reservation:
        """Wait at the run's gate for room for one sample of ``nbytes`` bytes: the backpressure in front of the target's forward.

        ``timeout`` is in seconds; None waits as long as the run lives. Raises WaitTimeoutError, AbortedError (``abort_when`` became true), FullError (larger than the cap), ClosedError,
        WedgedError (nothing can move: it says who holds what).
        """
        return self.reserve_many([nbytes], timeout=timeout, producer=producer, abort_when=abort_when, cancel=cancel)[0]

    def reserve_many(
        self, sizes: Sequence[int], *, timeout: float | None = None, producer: tuple[str, int] | None = None, abort_when: Callable[[], bool] | None = None, cancel: Cancel | None = None,
    ) -> list[Reservation]:
        """Wait at the gate for room for the first of several samples; the others come with it as far as there is room for them at once.

        So there is one reservation at least, for each of ``sizes`` from the first on until there was no room, and whoever makes several samples in one forward never waits for room while it holds
        some. Sizes are in bytes, 1024 at most. Arguments and errors are those of :meth:`reserve`.
        """
        sizes = list(sizes)
        if not 0 < len(sizes) <= MAX_BATCH:
            raise InvalidError(f"has {len(sizes)} entries, want 1 to {MAX_BATCH}", op="reserve", subject="sizes")
        body: dict[str, Any] = {"bytes": sizes, "request_id": new_id()}  # one id for all slices: it keeps the place in the line
        if producer:
            body["producer"] = _producer(producer)
        until = _until(timeout)
        asked = False
        try:
            while True:
                if abort_when is not None and abort_when():
                    raise AbortedError("abort_when became true while the producer waited at the gate", op="reserve", subject=self.run_id)
                wait = _slice(until, _ABORT_POLL_SECONDS if abort_when is not None else SLICE_SECONDS)
                asked = True
                got = self._reserved(self._t.call("POST", f"{self._run}/reserve", body | {"wait_seconds": wait}, wait=wait, cancel=cancel))
                if got:
                    return got
                if until is not None and time.monotonic() >= until:
                    raise WaitTimeoutError(f"no room for {sizes[0]} bytes within {timeout} s", op="reserve", subject=self.run_id, hint="`sluice status` says who holds what")
        except SluiceError as e:
            if asked and isinstance(e, (AbortedError, WaitTimeoutError)):
                self._unreserve_asked(body)
            raise
        except BaseException:  # the caller's own, such as ^C
            if asked:
                self._unreserve_asked(body)
            raise

    def _reserved(self, answer: Any) -> list[Reservation]:
        return understood(
            "reserve", self.run_id,
            lambda: [Reservation(text(r["id"]), count(r["bytes"]), seconds(r["expires_seconds"])) for r in items(fields(answer)["reservations"])],
        )

    def _unreserve_asked(self, body: dict[str, Any], again: bool = True) -> None:
        """It may have been granted meanwhile: asking again with the same id tells, and what comes is given back."""
        try:
            got = self._reserved(self._t.give_back("POST", f"{self._run}/reserve", body | {"wait_seconds": 0}))
            if got:
                self._t.give_back("POST", f"{self._run}/unreserve", {"reservations": [r.id for r in got]})
            elif again:
                self._t.owe(lambda: self._unreserve_asked(body, again=False))  # the call may be on its way yet, and come in behind this
        except SluiceError as e:
            log.debug("run %s: a reservation that nobody waited for ends by itself: %s", self.run_id, str(e))

    def unreserve(self, *ids: str, promptly: bool = False) -> None:
        """Give reservations, named by their ids, back. What is not there is passed over. ``promptly`` takes 5 s at most, however patient the client is."""
        call = self._t.give_back if promptly else self._t.call
        for part in _chunks(ids):
            call("POST", f"{self._run}/unreserve", {"reservations": list(part)})

    def put(self, ref: SampleRef, *, positions: Iterable[Position] = (), producer: tuple[str, int] | None = None) -> str:
        """Enqueue a stored sample. Returns "enqueued", "already" (a repetition), "settled" (it was trained on) or "gated" (a version gate dropped it)."""
        (result,) = self.put_many([(ref, tuple(positions))], producer=producer)
        if isinstance(result, SluiceError):
            raise result
        return result

    def put_many(self, items: Sequence[tuple[SampleRef, Sequence[Position]]], *, producer: tuple[str, int] | None = None) -> list[str | SluiceError]:
        """Enqueue several, in order, with one record for all. Each has its own answer: a status, or the error it would have raised."""
        out: list[str | SluiceError] = []
        for part in _chunks(items):
            body: dict[str, Any] = {"items": [_item(ref, positions) for ref, positions in part]}
            if producer:
                body["producer"] = _producer(producer)
            out += self._committed(self._t.call("POST", f"{self._run}/commit", body), len(part))
        return out

    def _committed(self, answer: Any, want: int) -> list[str | SluiceError]:
        results = understood("put", self.run_id, lambda: [
            from_problem(dict(fields(r["error"]))) if fields(r).get("error") else text(r["status"]) for r in items(fields(answer)["results"])
        ])
        return self._counted(results, want, "put")

    def put_blocks_until_below(
        self, ref: SampleRef, *, positions: Iterable[Position] = (), producer: tuple[str, int] | None = None, abort_when: Callable[[], bool] | None = None, timeout: float | None = None,
        poll: float = _ABORT_POLL_SECONDS,
    ) -> str:
        """Enqueue when the gate is open, or at once while consumers starve. ``abort_when`` is asked every ``poll`` seconds. Raises WaitTimeoutError, AbortedError, ClosedError."""
        body: dict[str, Any] = {"items": [_item(ref, positions)], "below": True}
        if producer:
            body["producer"] = _producer(producer)
        until = _until(timeout)
        while True:
            if abort_when is not None and abort_when():
                raise AbortedError("abort_when became true while the put waited at the gate", op="put", subject=ref.sample_id)
            wait = _slice(until, min(poll, SLICE_SECONDS) if abort_when is not None else SLICE_SECONDS)
            answer = self._t.call("POST", f"{self._run}/commit", body | {"wait_seconds": wait}, wait=wait)
            if not understood("put", ref.sample_id, lambda: flag(fields(answer).get("paused", False))):  # noqa: B023  it is called here
                (result,) = self._committed(answer, 1)
                if isinstance(result, SluiceError):
                    raise result
                return result
            if until is not None and time.monotonic() >= until:
                raise WaitTimeoutError(f"the gate did not open within {timeout} s", op="put", subject=ref.sample_id)

    def report(self, producer: tuple[str, int], state: str, cause: str | BaseException = "", *, cancel: Cancel | None = None) -> None:
        """A named producer says that it is "running", "done" or "failed" (with a cause that consumers get behind the drain)."""
        body: dict[str, Any] = {"producer": _producer(producer), "state": state}
        if cause:
            body["cause"] = _said(cause)
        self._t.call("POST", f"{self._run}/report", body, cancel=cancel)

    def taken(self, source: str) -> dict[int, list[tuple[int, int]]]:
        """Which positions of a source were committed: by epoch, ranges from the first index to behind the last."""
        try:
            asked = quote(source, safe="")
        except (TypeError, ValueError) as e:
            raise InvalidError(f"is {source!r:.200}, want a string of valid UTF-8", op="taken", subject="source") from e
        answer = self._t.call("GET", f"{self._run}/positions?source={asked}")
        return understood("taken", self.run_id, lambda: {count(t["epoch"]): [(count(a), count(b)) for a, b in items(t["ranges"])] for t in items(fields(answer)["taken"])})

    # -- consumers -----------------------------------------------------------------------------------------------------

    def acquire(
        self, consumer: Consumer, *, max: int = 1, timeout: float | None = 0.0, ahead: bool = False, cancel: Cancel | None = None, patience: float | None = None, request_id: str = "",
    ) -> Delivery:
        """Lease up to ``max`` samples, waiting up to ``timeout`` seconds for the first; None waits as long as the run lives.
        ``ahead`` says that they are not needed yet, so that the run does not count as starving.

        A caller who gives a ``request_id`` asks again under it when his call was cancelled, and gets the leases of an answer that was lost; his call waits for SLICE_SECONDS at most.

        Raises StaleError when a newer incarnation has taken over, WedgedError when nothing can move, and UnavailableError.
        """
        until = _until(timeout)
        while True:
            wait = _slice(until, SLICE_SECONDS)
            body: dict[str, Any] = {"consumer": consumer.wire(), "max": min(max, MAX_BATCH), "wait_seconds": wait, "request_id": request_id or new_id()}
            if ahead:
                body["ahead"] = True
            sent = time.monotonic()
            try:
                answer = self._t.call("POST", f"{self._run}/acquire", body, wait=wait, cancel=cancel, patience=patience)
                delivery = self._delivery(consumer, answer, sent)
            except SluiceError:
                raise
            except BaseException:  # it was cancelled, or the caller's own, such as ^C
                if not request_id:
                    self._hand_back(consumer, body)
                raise
            if delivery.leases or delivery.end or request_id or until is not None and time.monotonic() >= until:
                return delivery

    def _delivery(self, consumer: Consumer, answer: Any, sent: float) -> Delivery:
        return understood("acquire", self.run_id, lambda: self._leased(consumer, fields(answer), sent))

    def _leased(self, consumer: Consumer, answer: Mapping[str, Any], sent: float) -> Delivery:
        # Counted from when the call began: however long its answer took, no lease is thought to live when it does not.
        given = sent + seconds(answer.get("waited_seconds", 0))
        leases = []
        for lease in items(answer["leases"]):
            w = lease.get("window")
            slot = WindowSlot(
                count(w["number"]), count(w["rank"]), count(w["slot"]), flag(w.get("pad", False)), count(w.get("tokens", 0)), count(w.get("supervised_tokens", 0))
            ) if w else None
            leases.append(Lease(
                SampleRef.from_wire(lease["ref"]), given + seconds(lease["time_left_seconds"]), self.visibility_timeout, count(lease.get("redelivery", 0)), lease_id(lease["id"]), slot, consumer,
            ))
        cause = answer.get("cause")
        return Delivery(tuple(leases), flag(answer["end"]), from_problem(dict(fields(cause))) if cause else None)

    def _hand_back(self, consumer: Consumer, body: dict[str, Any], again: bool = True) -> None:
        """Return what an acquire was given whose answer was not waited for: asking again with the same id tells what that was."""
        try:
            asked = body | {"wait_seconds": 0, "ahead": True}  # nobody starves for it
            delivery = self._delivery(consumer, self._t.give_back("POST", f"{self._run}/acquire", asked), time.monotonic())
            if delivery.leases:
                back = [{"lease": lease.wire_id, "verdict": "return"} for lease in delivery.leases]
                self._t.give_back("POST", f"{self._run}/settle", {"consumer": consumer.wire(), "settlements": back, "request_id": new_id()})
            elif again and not delivery.end:
                self._t.owe(lambda: self._hand_back(consumer, body, again=False))  # the call may be on its way yet, and come in behind this
        except SluiceError as e:
            log.debug("run %s: what a broken acquire was given returns when it runs out, or with the session: %s", self.run_id, str(e))

    def settle(self, consumer: Consumer, settlements: Sequence[Settlement], *, cancel: Cancel | None = None, patience: float | None = None) -> list[SettleResult]:
        """Ack, fail or return leases, with one call for all. A stale lease changes nothing and says so."""
        results: list[SettleResult] = []
        for part in _chunks(settlements):
            asked = [{"lease": f"{s.lease_id:032x}", "verdict": s.verdict} | ({"reason": s.reason} if s.reason else {}) for s in part]
            answer = self._t.call("POST", f"{self._run}/settle", {"consumer": consumer.wire(), "settlements": asked, "request_id": new_id()}, cancel=cancel, patience=patience)
            results += self._counted(self._results("settle", answer), len(part), "settle")
        return results

    def ack(self, consumer: Consumer, *leases: Lease) -> list[SettleResult]:
        """:meth:`settle` leases as trained on, which frees their samples. :func:`raise_stale` makes an error of those that were too late."""
        return self.settle(consumer, [Settlement(lease.lease_id, "ack") for lease in leases])

    def renew(self, consumer: Consumer, leases: Sequence[Lease] | None = None, *, cancel: Cancel | None = None, patience: float | None = None) -> list[SettleResult]:
        """Give leases their full time again; all that the consumer holds if None."""
        body: dict[str, Any] = {"consumer": consumer.wire()}
        if leases is None:
            return self._results("renew", self._t.call("POST", f"{self._run}/renew", body, cancel=cancel, patience=patience))
        results: list[SettleResult] = []
        for part in _chunks(leases):
            answer = self._t.call("POST", f"{self._run}/renew", body | {"leases": [lease.wire_id for lease in part]}, cancel=cancel, patience=patience)
            results += self._counted(self._results("renew", answer), len(part), "renew")
        return results

    def _results(self, op: str, answer: Any) -> list[SettleResult]:
        return understood(op, self.run_id, lambda: [
            SettleResult(lease_id(r["lease"]), text(r["status"]), text(r.get("as", "")), flag(r.get("dead", False))) for r in items(fields(answer)["results"])
        ])

    def leave(self, consumer: Consumer, *, patience: float | None = None) -> None:
        """End a consumer: its leases return to the head."""
        self._t.call("POST", f"{self._run}/leave", {"consumer": consumer.wire()}, patience=patience)

    # -- both ----------------------------------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """The run's counters, holders and who waits for whom, as ``sluice status --json`` has them."""
        answer = self._t.call("GET", f"{self._run}/status")
        return understood("status", self.run_id, lambda: dict(fields(answer)))

    def pending_count(self) -> int:
        """Samples that wait to be acquired."""
        status = self.status()
        return understood("status", self.run_id, lambda: count(status["pending"]))

    def outstanding_count(self) -> int:
        """Samples that are leased and not settled."""
        status = self.status()
        return understood("status", self.run_id, lambda: count(status["outstanding"]))

    @property
    def is_closed(self) -> bool:
        """Whether puts have ended. It asks the service."""
        status = self.status()
        return understood("status", self.run_id, lambda: flag(status["closed"]))

    def close(self, cause: str | BaseException | None = None) -> None:
        """End the puts, for everybody. What is pending drains; a cause reaches the consumers behind it."""
        self._t.call("POST", f"{self._run}/close", {"cause": _said(cause)} if cause else {})

    def reclaim_expired(self) -> int:
        """Take back what has run out. It happens by itself; this says how many it were now."""
        answer = self._t.call("POST", f"{self._run}/reclaim")
        return understood("reclaim", self.run_id, lambda: count(fields(answer)["reclaimed"]))

    def dead_letters(self) -> list[DeadLetter]:
        """What was given up, oldest first."""
        answer = self._t.call("GET", f"{self._run}/dead-letters")
        return understood("dead letters", self.run_id, lambda: [
            DeadLetter(SampleRef.from_wire(d["ref"]), text(d["since"]), count(d["fails"]), count(d["expiries"]), tuple(map(text, items(d["reasons"]))), flag(d["freed"]))
            for d in items(fields(answer)["dead_letters"])
        ])

    def requeue(self, *sample_ids: str) -> int:
        """Try dead letters again, with fresh budgets. Returns how many were found; where an answer was lost and the call was made again, how many were left to find."""
        return self._for_dead("requeue", sample_ids)

    def drop(self, *sample_ids: str) -> int:
        """Drop dead letters, which frees their bytes. Returns how many were found, as :meth:`requeue`."""
        return self._for_dead("drop", sample_ids)

    def _for_dead(self, what: str, sample_ids: Sequence[str]) -> int:
        found = 0
        for part in _chunks(sample_ids):
            answer = self._t.call("POST", f"{self._run}/dead-letters/{what}", {"sample_ids": list(part)})
            found += understood(what, self.run_id, lambda: count(fields(answer)["found"]))  # noqa: B023  it is called here
        return found

    def _counted(self, results: list[T], want: int, op: str) -> list[T]:
        if len(results) != want:
            raise CorruptError(
                f"the service answered with {len(results)} results, want {want}", op=op, subject=self.run_id, hint="do client and service have the same version?"
            )
        return results


def stale(results: Iterable[SettleResult]) -> list[SettleResult]:
    """Those whose lease was not theirs any more."""
    return [r for r in results if r.status == "stale"]


def raise_stale(results: Iterable[SettleResult], op: str) -> None:
    """Raise StaleError if one of the results is."""
    if lost := stale(results):
        raise StaleError(f"{len(lost)} of the leases ran out or were taken over, nothing changed for them", op=op, subject=f"{lost[0].lease_id:032x}")


def _said(cause: str | BaseException) -> str:
    """A cause for the wire: never empty, or the end would look like the regular one."""
    text = cause if isinstance(cause, str) else f"{type(cause).__name__}: {cause}" if str(cause) else type(cause).__name__  # that of ^C says nothing more
    plain = " ".join(text.split())[:1024].encode("utf-8", "replace").decode()  # names of files may hold what is no UTF-8
    return plain or "unknown"


def _until(timeout: float | None) -> float | None:
    """When a wait ends, on the clock of time.monotonic."""
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or math.isnan(timeout):
        raise InvalidError(f"is {timeout!r}, want a number of seconds or None", subject="timeout")
    return time.monotonic() + timeout


def _slice(until: float | None, most: float) -> float:
    if until is None:
        return most
    return round(max(0.0, min(most, until - time.monotonic())), 3)


def _producer(p: tuple[str, int]) -> dict[str, Any]:
    return {"name": p[0], "incarnation": p[1]} if p[1] else {"name": p[0]}


def _item(ref: SampleRef, positions: Iterable[Position]) -> dict[str, Any]:
    where = [{"source": p.source, "epoch": p.epoch, "index": p.index} for p in positions]
    return {"ref": ref.wire(), "positions": where} if where else {"ref": ref.wire()}


def _chunks(items: Sequence[Any]) -> Iterable[Sequence[Any]]:
    for at in range(0, len(items), MAX_BATCH):
        yield items[at:at + MAX_BATCH]
