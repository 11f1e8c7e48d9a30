"""What a :class:`sluice.Loader` runs on: it leases samples ahead, makes batches of them, keeps the leases alive and settles them. Not public; loader.py is.

Two threads of its own start with the first batch that is asked for and end with close: one fetches ahead, one renews leases. They hold no reference to the Loader, so that one that nobody
has any more gives its leases back.
"""

from __future__ import annotations

import copy
import logging
import os
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

from . import threads
from .collate import Batch, Collator, Identity, Sample
from .device import DeviceRing, Transfer
from .errors import ClosedError, CorruptError, InvalidError, NotFoundError, SchemaError, SluiceError, StaleError, TargetFaultError, UnavailableError, WaitTimeoutError, WedgedError
from .queue import Consumer, Lease, RunQueue, Settlement, WindowSlot
from .refs import SampleRef
from .store import RunStore, StoreHandle
from .transport import SLICE_SECONDS, Cancel, Cancelled, Transport, new_id

if TYPE_CHECKING:
    from .tensorfile import Tensor

log = logging.getLogger("sluice")

CLOSE_SECONDS = 5.0
"""All that close takes: who ends does not wait for a service that is away."""
_GRACE_SECONDS = 0.002  # an answer that is about to come is not given up for being asked as one who is not in need
_LOOK_SECONDS = 1.0  # how often a thread that waits looks whether its session still stands
_UNWIND_SECONDS = 1.0  # that an exception has from its loop to the end of the run
_REASON_BYTES = 4096

FINGERPRINTS = ("target", "tokenizer")
"""Attributes of refs that say what the samples were made by."""

Skip = Callable[[SampleRef, BaseException], bool]


@dataclass(frozen=True)
class Settings:
    """What a stream was told, checked."""

    batch: int
    prefetch: int
    ack: str  # "next", "step" or "checkpoint"
    ring: DeviceRing | None  # to the device, if there is one
    renew_every: float | None
    max_idle: float
    patience: float
    skip: Skip
    max_skips: int
    clock: Callable[[], float]


@dataclass
class Counts:
    """What has happened since the loader was made; times in seconds."""

    batches: int = 0
    samples: int = 0  # in batches that were handed out, stand-ins left out
    tokens: int = 0
    supervised_tokens: int = 0
    bytes: int = 0  # read from the store
    fetch_seconds: float = 0.0  # spent reading it
    collate_seconds: float = 0.0
    wait_seconds: float = 0.0  # by the trainer, for a batch to be ready
    pads: int = 0
    redelivered: int = 0
    acked: int = 0
    failed: int = 0
    returned: int = 0
    skipped: int = 0  # samples that were passed over
    stale: int = 0  # settlements that came too late: somebody else has the sample
    lost: int = 0  # leases that ran out or were taken over while they were held
    dropped: int = 0  # batches that were not handed out because a lease of theirs was lost

    def add(self, other: Counts) -> None:
        for f in fields(self):
            setattr(self, f.name, getattr(self, f.name) + getattr(other, f.name))


@dataclass
class _Held:
    """A lease that is not settled."""

    lease: Lease
    until: float  # by time.monotonic
    life: float  # seconds that it was given
    lost: bool = False


@dataclass(eq=False)
class _Piece:
    """A leased sample that was read."""

    lease: Lease
    sample: Sample | None
    handle: StoreHandle | None
    kind: int = 0  # of the samples that may be in one batch with it


@dataclass(eq=False)
class _Open:
    """A batch that was handed out and is not settled."""

    pieces: list[_Piece]
    stepped: bool = False


@dataclass(eq=False)
class _Made:
    """What the fetching thread hands over: a batch, an error, or the end."""

    batch: Batch | None = None
    transfer: Transfer | None = None  # of a batch that is on its way to a device
    pieces: list[_Piece] = field(default_factory=list)
    error: BaseException | None = None
    end: bool = False
    moves: int = 0  # at the end: the stream's moves before the queue was asked


class Stream:
    """The machine behind one loader. Methods may be called from any thread, one at a time: another call waits."""

    def __init__(self, run_id: str, transport: Transport, queue: RunQueue, store: RunStore, consumer: Consumer, collator: Collator, settings: Settings) -> None:
        self.run_id, self.consumer, self.settings = run_id, consumer, settings
        self.transport, self._queue, self._store, self._collator = transport, queue, store, collator
        self.pid = os.getpid()
        self._call = threading.RLock()  # of the method that runs; reentrant, since a signal handler may close
        self._stop = Cancel()  # ends the fetching
        self._end = Cancel()  # ends all calls and the renewing
        self._threads: list[threading.Thread] = []

        # Of the method that runs.
        self._owed = False  # a permit was given for a batch that was not received yet
        self._current: list[_Piece] = []  # whose memory the trainer has
        self.open: list[_Open] = []  # handed out and not settled, oldest first
        self.done = False
        self.retired = False  # the loader is gone; what is open waits for the run's step or end
        self._ends_at: float | None = None  # and no longer than this, by time.monotonic
        self.settled_window: int | None = None
        self.settled_samples = 0

        # Of the fetching thread; close takes over when that has ended.
        self._parts: list[_Piece] = []  # samples read but not in a batch yet
        self.identity = Identity(collator.schema)
        self.version = ""  # target_model_version of the last sample
        self.fingerprints: dict[str, str] = {}  # of the samples of that version
        self._expected = False  # they are of a loaded state, and no sample was compared with them yet
        self._kinds = 0  # times that identity changed
        self._skips = 0
        # Places of windows whose samples were passed over: the queue fills each again, ahead of all later windows. In a group it does when all members have passed over it.
        self._owing: set[tuple[int, int]] = set()

        self._cv = threading.Condition(threading.RLock())  # guards what follows; reentrant for a signal handler
        self._permits = 0
        self._ready: deque[_Made] = deque()
        self._held: dict[int, _Held] = {}
        self._last_call = settings.clock()
        self._calling = 0
        self._waiting = False  # the trainer waits, and no batch is ready
        self._recall: Cancel | None = None  # ends the acquire that is out: what it says of waiting is no longer so
        self._moves = 0  # times that leases ended: an end that was seen before may be none since
        self.closing = False
        self._fatal: SluiceError | None = None  # why nothing more is acquired; never raised itself, since it would keep the frames that it went through, and the loader with them
        self._counts = Counts()

    # -- calls of the trainer ------------------------------------------------------------------------------------------

    def own(self) -> None:
        """Refuse the child of a fork: leases, pins and threads are its parent's."""
        if os.getpid() != self.pid:
            raise ClosedError(
                f"belongs to process {self.pid}, and this is {os.getpid()}, a child of it that owns nothing of its leases", op="loader", subject=self.consumer.name,
                hint="make a loader in this process with run.loader(), or let run.dataset() do it",
            )

    @contextmanager
    def _entered(self) -> Iterator[None]:
        self.own()
        with self._call:
            with self._cv:
                self._calling += 1
                self._last_call = self.settings.clock()
            try:
                if self.closing:
                    raise self._closed()
                yield
            finally:
                with self._cv:
                    self._calling -= 1
                    self._last_call = self.settings.clock()

    def touch(self) -> None:
        self.own()
        with self._cv:
            self._last_call = self.settings.clock()

    def _closed(self) -> ClosedError:
        return ClosedError("was closed", op="loader", subject=self.consumer.name)

    def _why_ended(self) -> SluiceError:
        """An error to raise, of its own each time."""
        return self._closed() if self._fatal is None else copy.copy(self._fatal)

    def next(self, timeout: float | None) -> Batch | None:
        """The next batch; None is the end."""
        made: _Made | None = None
        with self._entered():
            if not self._threads:
                self._start()
            if self.settings.ack == "next":
                self._ack_open()
            self._let_go()
            begin = time.monotonic()
            until = None if timeout is None else begin + timeout
            try:
                while True:
                    made = self._receive(until, timeout)
                    if made.batch is not None:
                        if not self._still_held(made.pieces):
                            self._drop(made.pieces)
                            continue
                        return self._hand_out(made.batch if made.transfer is None else made.transfer.take(), made.pieces)
                    if made.end:
                        with self._cv:
                            moved = made.moves != self._moves
                        if moved:
                            # It was the end for one that held leases which have ended since, and may have been failed. Only the queue knows whether they or others' come back.
                            continue
                        if made.error is None:
                            return None
                    assert made.error is not None
                    raise made.error
            finally:
                made = None  # an error's traceback has this frame, and with it the loader: it must not have the error in turn
                with self._cv:
                    self._wait(False)
                    self._counts.wait_seconds += time.monotonic() - begin

    def _start(self) -> None:
        with self._cv:
            self._permits = self.settings.prefetch
        self.transport.work_later()  # it takes over what a finalizer leaves to be done
        self.transport.on_return.append(self._back)
        self._threads.append(threads.start(self._fetch, "sluice-fetch", self._stop_fetching))
        renewing = threading.Thread(target=self._renew, name="sluice-renew", daemon=True)
        self._threads.append(renewing)
        renewing.start()

    def _stop_fetching(self) -> None:
        self._stop.cancel()
        with self._cv:
            if self._recall is not None:
                self._recall.cancel()
            self._cv.notify_all()

    def _receive(self, until: float | None, timeout: float | None) -> _Made:
        with self._cv:
            if not self._ready and self._recall is None:
                self._wait(True)  # before the permit, so that what is asked for it says so at once
            if not self._owed:
                self._permits += 1
                self._owed = True
                self._cv.notify_all()
            if not self._ready and not self._waiting:
                self._cv.wait_for(lambda: self._ready or self.closing, _GRACE_SECONDS)
            while not self._ready:
                if self.closing:
                    raise self._closed()
                if not self._threads[0].is_alive():
                    raise self._why_ended()
                self._wait(True)
                left = _LOOK_SECONDS if until is None else min(_LOOK_SECONDS, until - time.monotonic())
                if left <= 0:
                    break
                self._cv.wait(left)
            if self._ready:
                self._owed = False
                return self._ready.popleft()
        raise WaitTimeoutError(f"no batch came within {timeout:g} s; {self._bottleneck()}", op="loader", subject=self.run_id, hint="`sluice status` says more")

    def _bottleneck(self) -> str:
        from .stats import bounded_status  # it is asked for rarely

        try:
            return f"the run's bottleneck is {bounded_status(self.transport, self.run_id)['bottleneck']}"
        except SluiceError as e:
            return f"the service does not say why: {e}"

    def _wait(self, waiting: bool) -> None:
        """Note whether the trainer waits. An acquire that is out said the opposite: it is given up, and asked again. The caller holds the lock."""
        if self._waiting != waiting:
            self._waiting = waiting
            if self._recall is not None:
                self._recall.cancel()

    def consume_now(self) -> None:
        with self._entered():
            if self.settings.ack == "next":
                self._ack_open()
            self._let_go()

    def step(self) -> None:
        with self._entered():
            if self.settings.ack == "checkpoint":
                for o in self.open:
                    o.stepped = True
            else:
                self._ack_open()
            self._let_go()
        self._finish_retired()

    def checkpoint(self) -> None:
        with self._entered():
            self._ack_open()
            self._let_go()
        self._finish_retired()

    def fail(self, cause: object) -> None:
        with self._entered():
            self._fail_open(cause)
            self._let_go()
        self._finish_retired()

    def counts(self) -> tuple[Counts, int]:
        """A copy, and how many leases are held."""
        with self._cv:
            copy = Counts()
            copy.add(self._counts)
            return copy, len(self._held)

    # -- ends ----------------------------------------------------------------------------------------------------------

    def close(self, verdict: str = "return", cause: object = None) -> None:
        """End it: what is open gets the verdict ("ack", "fail" or "return"), what was made ahead is returned. Takes CLOSE_SECONDS at most, then UnavailableError. Idempotent; it may be called
        again after a failure."""
        if os.getpid() != self.pid or self.done:
            return
        until = time.monotonic() + CLOSE_SECONDS
        with self._cv:
            self.closing = True
        self._stop_fetching()
        self._end.cancel()
        if not self._call.acquire(timeout=CLOSE_SECONDS):
            raise self._unclosed("another call has not ended")
        try:
            if self.done:
                return
            if not self._join(self._threads, until):
                raise self._unclosed("a call to the service has not ended")
            pieces = self._take_ahead() + self._current
            self._current = []
            if self.settings.ring is not None:
                self.settings.ring.close(_left(until))
            try:
                self._settle_all(verdict, cause, until)
            except UnavailableError as e:
                raise self._unclosed(str(e)) from e
            except (StaleError, ClosedError, NotFoundError):
                pass  # the successor has the leases, or they went with the session, or with the run
            finally:
                if pieces:
                    self.transport.soon(lambda: self._free(pieces))
            self.open = []
            self.done = True
            if self._threads:
                self.transport.on_return.remove(self._back)
        finally:
            self._call.release()

    def _settle_all(self, verdict: str, cause: object, until: float) -> None:
        if not self._threads or self.transport.closed:
            return  # nothing was leased, or it went with the session
        if verdict == "ack":
            self._ack_open(_left(until))
        elif verdict == "fail":
            self._fail_open(cause, _left(until))
        self._settle(list(self._held), "return", patience=_left(until))
        self.open = []
        self._queue.leave(self.consumer, patience=_left(until))

    def _unclosed(self, why: str) -> UnavailableError:
        return UnavailableError(
            f"could not give everything back within {CLOSE_SECONDS:g} s: {why}", op="loader: close", subject=self.consumer.name,
            hint="leases that are left run out by themselves, or end with the session, and their samples come again",
        )

    def _join(self, ours: Sequence[threading.Thread], until: float) -> bool:
        for thread in ours:
            if thread is not threading.current_thread():
                thread.join(max(0.0, until - time.monotonic()))
        return not any(t.is_alive() for t in ours if t is not threading.current_thread())

    def _take_ahead(self) -> list[_Piece]:
        """What was read and not handed out. The fetching thread has ended."""
        pieces, self._parts = self._parts, []
        with self._cv:
            while self._ready:
                pieces += self._ready.popleft().pieces
        return pieces

    def retire(self) -> None:
        """Nobody has the loader any more. What was made ahead is returned. Batches that the trainer took wait for the run's step or end: the loop may have been left by an exception, on its way to the
        end of the run, which fails them. In mode "next", where no step need come, they are returned soon.

        Runs in the transport's thread."""
        if os.getpid() != self.pid or self.done or self.closing:
            return
        try:
            until = time.monotonic() + CLOSE_SECONDS
            self._stop_fetching()
            if not self.open:
                self.close()
                return
            if self.settings.ack == "next":
                self._ends_at = time.monotonic() + _UNWIND_SECONDS
            if not self._call.acquire(timeout=CLOSE_SECONDS):
                raise self._unclosed("another call has not ended")
            try:
                if not self._join(self._threads[:1], until):
                    raise self._unclosed("a call to the service has not ended")
                kept = {p.lease.lease_id for o in self.open for p in o.pieces}
                self._free(self._take_ahead())
                with self._cv:
                    ahead = [i for i in self._held if i not in kept]
                self._settle(ahead, "return", patience=_left(until))
            finally:
                self._call.release()
        except SluiceError as e:
            log.warning("run %s: the leases of a loader that is gone: %s", self.run_id, str(e))

    def _finish_retired(self) -> None:
        if self.retired and not self.open:
            self.close()

    def _end_retired(self) -> None:
        try:
            self.close()
        except SluiceError as e:
            log.warning("run %s: the leases of a loader that is gone: %s", self.run_id, str(e))

    # -- batches of the trainer ----------------------------------------------------------------------------------------

    def _hand_out(self, batch: Batch, pieces: list[_Piece]) -> Batch:
        self._current = [p for p in pieces if p.handle is not None]
        self.open.append(_Open(pieces))
        with self._cv:
            c = self._counts
            c.batches += 1
            c.tokens += batch.num_tokens
            c.supervised_tokens += batch.supervised_tokens
            for p in pieces:
                if p.lease.window is not None and p.lease.window.pad:
                    c.pads += 1
                    continue
                c.samples += 1
                c.redelivered += p.lease.redelivery_count > 0
        return batch

    def _let_go(self) -> None:
        """Give up the pins of the batch that the trainer had, behind its back. Tensors that it kept stay valid."""
        if self._current:
            pieces, self._current = self._current, []
            self.transport.soon(lambda: self._free(pieces))

    def _free(self, pieces: list[_Piece]) -> None:
        """Give up pins, with one call for all. The leases stay."""
        handles = []
        for p in pieces:
            if p.handle is not None:
                handles.append(p.handle)
            p.handle = p.sample = None
        if not handles:
            return
        try:
            self._store.release_many(handles)
        except SluiceError as e:
            log.warning("run %s: pins are given up later: %s", self.run_id, str(e))

    def _still_held(self, pieces: list[_Piece]) -> bool:
        """Whether no lease of a batch made ahead was lost in the meantime."""
        now = time.monotonic()
        with self._cv:
            held = [self._held.get(p.lease.lease_id) for p in pieces]
        return all(h is not None and not h.lost and now < h.until for h in held)

    def _drop(self, pieces: list[_Piece]) -> None:
        """Give back a batch that others may be training on already."""
        self._free(pieces)
        ours = []
        with self._cv:
            self._counts.dropped += 1
            for p in pieces:
                h = self._held.get(p.lease.lease_id)
                if h is not None and h.lost:
                    del self._held[p.lease.lease_id]
                elif h is not None:
                    ours.append(p.lease.lease_id)
        self._settle(ours, "return")

    def _ack_open(self, patience: float | None = None) -> None:
        batches = self.open
        self._settle([p.lease.lease_id for o in batches for p in o.pieces], "ack", patience=patience)
        self.open = []
        for o in batches:
            for p in o.pieces:
                w = p.lease.window
                if w is not None:
                    self.settled_window = max(w.number, -1 if self.settled_window is None else self.settled_window)
                self.settled_samples += w is None or not w.pad

    def _fail_open(self, cause: object, patience: float | None = None) -> None:
        failed = [o for o in self.open if not o.stepped]
        self._settle([p.lease.lease_id for o in failed for p in o.pieces], "fail", _reason(cause), patience=patience)
        self.open = [o for o in self.open if o.stepped]

    def _settle(self, ids: Sequence[int], verdict: str, reason: str = "", patience: float | None = None) -> None:
        """Settle leases with one call. That a lease is stale is no error: someone else has the sample."""
        if not ids:
            return
        ending = patience is not None
        try:
            results = self._queue.settle(
                self.consumer, [Settlement(i, verdict, reason) for i in ids], cancel=None if ending else self._end, patience=patience if ending else self.settings.patience,
            )
        except Cancelled:
            raise self._closed() from None
        except StaleError as e:
            self._taken_over(e)
            raise
        stale = 0
        with self._cv:
            self._moves += 1
            c = self._counts
            for i in ids:
                self._held.pop(i, None)
            for r in results:
                became = r.as_ or verdict  # a call that was interrupted may have settled it before
                if r.status == "stale":
                    stale += 1
                elif became == "ack":
                    c.acked += 1
                elif became == "return":
                    c.returned += 1
                else:
                    c.failed += 1
            c.stale += stale
        if stale:
            log.warning("run %s: %d leases of %s had run out or were taken over before their %s; their samples come again", self.run_id, stale, self.consumer.name, verdict)

    def _taken_over(self, error: StaleError) -> None:
        """Forget all leases: a newer incarnation of the consumer has them."""
        with self._cv:
            lost = len(self._held)
            self._counts.lost += lost
            self._held.clear()
            self._fatal = copy.copy(error)
        if lost:
            log.warning("run %s: %d leases of %s were taken over: %s", self.run_id, lost, self.consumer.name, str(error))

    # -- the fetching thread -------------------------------------------------------------------------------------------

    def _fetch(self) -> None:
        """Make batches, one for each permit."""
        while True:
            with self._cv:
                while not self._permits and not self._stopping():
                    self._cv.wait(_LOOK_SECONDS)
                if self._stopping():
                    self._fatal = self._why_ended()
                    self._cv.notify_all()
                    return
                self._permits -= 1
            try:
                made = self._make()
            except BaseException as e:  # also of a function of the caller's; what it left behind is returned at close
                _clear(e)
                made = _Made(error=e)
            with self._cv:
                self._wait(False)
                self._ready.append(made)
                self._cv.notify_all()
            del made  # its memory is the trainer's now

    def _stopping(self) -> bool:
        return self._stop.cancelled or self.transport.closed

    def _make(self) -> _Made:
        """One batch of the parts that are there and of what is acquired."""
        while True:
            n, complete = self._group()
            if complete:
                made = self._collate(n)
                if made is not None:
                    return made
                continue
            # A window opens as a whole, so what lacks now of the batch's window comes no more, unless others of a group have still to pass over what this one has; and the next
            # window may not open before this one is settled.
            rest = n > 0 and self._parts[0].lease.window is not None and (self.consumer.members < 2 or not self._owes(self._parts[0].lease, 0))
            most = max(self.settings.batch - n, 1)
            leases, made = self._acquire(most, not rest)
            self._filled(leases, most)
            if not leases and made is not None and not (n > 0 and (made.end or isinstance(made.error, WedgedError))):
                return made
            if not leases:
                part = self._collate(n)
                if part is not None:
                    return part  # the end, or the wedge, will be there again
                continue
            self._compare(leases)
            for i, lease in enumerate(leases):
                try:
                    self._join_parts(self._load(lease))
                    self._skips = 0
                except Exception as e:
                    if self._stopping():
                        return _Made(error=self._closed())
                    try:
                        self._give_up([lease], e)
                    except BaseException:
                        # The others of this answer were not looked at. They are returned unused.
                        self._settle([x.lease_id for x in leases[i + 1:]], "return")
                        raise

    def expect(self, version: str, fingerprints: dict[str, str]) -> None:
        """What a loaded state says of the samples. Before the first batch."""
        self.version, self.fingerprints, self._expected = version, fingerprints, True

    def _compare(self, leases: Sequence[Lease]) -> None:
        """Refuse a stream whose first sample is not what the loaded state was made on."""
        if not self._expected:
            return
        ref = leases[0].ref
        for name, want in self.fingerprints.items():
            have = ref.attributes.get(name)
            if have is not None and have != want and ref.target_model_version == self.version:
                error = InvalidError(
                    f"is {have!r:.80} in the sample {ref.sample_id!r}, and {want!r:.80} in the state that was loaded; both are of target_model_version {self.version!r}", op="loader", subject=name,
                )
                with self._cv:
                    self._fatal = copy.copy(error)
                self._settle([x.lease_id for x in leases], "return")
                raise error
        self._expected = False

    def _group(self) -> tuple[int, bool]:
        """How many parts at the head go into one batch: at most batch, of one window and one kind; and whether no more can join."""
        n, parts = 0, self._parts
        while n < len(parts) and n < self.settings.batch:
            if parts[n].kind != parts[0].kind or _other_window(parts[0].lease, parts[n].lease):
                return n, not self._owes(parts[0].lease, 0)
            n += 1
        return n, n == self.settings.batch and not self._owes(parts[0].lease, 1)

    def _owes(self, lease: Lease, before: int) -> bool:
        """Whether the queue owes a place in the window that is so many before the lease's, or in an earlier one."""
        return lease.window is not None and any(number <= lease.window.number - before for number, _ in self._owing)

    def _filled(self, leases: Sequence[Lease], asked: int) -> None:
        """Note which places the answer to an acquire fills. A consumer by itself is given what there is for them first, so that what it is not given then comes no more: as a stand-in that
        failed too often."""
        every = len(leases) == asked
        for lease in leases:
            if lease.window is None or _place(lease.window) not in self._owing:
                every = False
            else:
                self._owing.remove(_place(lease.window))
        if not every and self.consumer.members < 2:
            self._owing.clear()

    def _join_parts(self, piece: _Piece) -> None:
        """Put a part behind those of its window and of earlier ones."""
        at, w = len(self._parts), piece.lease.window
        while at > 0 and w is not None and (before := self._parts[at - 1].lease.window) is not None and before.number > w.number:
            at -= 1
        self._parts.insert(at, piece)

    def _acquire(self, most: int, patient: bool) -> tuple[Sequence[Lease], _Made | None]:
        """Wait for leases, or take what there is. The end and errors come as made, and nothing as neither.

        While the trainer does not wait it asks ahead, so that a run whose trainer is at work counts neither as wedged nor as waiting for samples. When that changes the call is given up and asked
        again under the same id, which gets the leases of an answer that was lost on the way.
        """
        request = new_id()
        while True:
            with self._cv:
                if self._fatal is not None:
                    return (), _Made(error=self._why_ended())
                if self._stopping():
                    return (), _Made(error=self._closed())
                moves, ahead = self._moves, not self._waiting
                recall = self._recall = Cancel()
            begin = time.monotonic()
            try:
                delivery = self._queue.acquire(
                    self.consumer, max=most, timeout=SLICE_SECONDS if patient else 0.0, ahead=ahead, cancel=recall, patience=self.settings.patience, request_id=request,
                )
            except Cancelled:
                continue
            except WedgedError as e:
                if not ahead:
                    return (), _Made(error=e)
                # The queue tells all who wait of a wedge; the trainer hears of it when it waits itself, if there still is one by then.
                delivery = None
            except StaleError as e:
                self._taken_over(e)
                return (), _Made(error=e)
            except SluiceError as e:
                return (), _Made(error=e)
            finally:
                with self._cv:
                    self._recall = None
            if delivery is not None:
                if delivery.leases:
                    self._hold(delivery.leases)
                    return delivery.leases, None
                if delivery.end:
                    return (), _Made(end=True, moves=moves, error=None if delivery.cause is None else _cut_off(delivery.cause, self.run_id))
                if not patient:
                    return (), None
            request = new_id()
            if time.monotonic() - begin < 0.05:
                self._stop.wait(0.05)  # the queue has waited already; if it did not, this must not become a spin

    def _hold(self, leases: Sequence[Lease]) -> None:
        now = time.monotonic()
        with self._cv:
            for lease in leases:
                self._held[lease.lease_id] = _Held(lease, lease.deadline, max(lease.deadline - now, 0.01))

    def _load(self, lease: Lease) -> _Piece:
        """Read a leased sample and check it. What it fails on keeps no pin."""
        ref = lease.ref
        begin = time.monotonic()
        tensors, handle = self._get(ref)
        with self._cv:
            self._counts.fetch_seconds += time.monotonic() - begin
            self._counts.bytes += ref.estimated_bytes
        piece = _Piece(lease, Sample(ref, tensors, pad=lease.window is not None and lease.window.pad, lease=lease, window=lease.window), handle)
        del tensors
        try:
            self._collator.check(piece.sample)  # type: ignore[arg-type]
            self._identify(piece)
        except BaseException:
            self._free([piece])
            raise
        return piece

    def _get(self, ref: SampleRef) -> tuple[dict[str, Tensor], StoreHandle]:
        begin, pause = time.monotonic(), 0.05
        while True:
            try:
                return self._store.get(ref)
            except UnavailableError as e:
                if self._stopping() or self.transport.dead or time.monotonic() - begin >= self.settings.patience:
                    raise
                log.info("run %s: reading %s is tried again: %s", self.run_id, ref.sample_id, str(e))
                self._stop.wait(pause)
                pause = min(2 * pause, 5.0)

    def _identify(self, piece: _Piece) -> None:
        """Compare what the sample says with those before it. The parts that are there are of an incomplete batch, and the sample would join them."""
        ref = piece.lease.ref
        try:
            self.identity.check(ref)
        except SchemaError as e:
            if ref.target_model_version == self.identity.version:
                raise SchemaError(
                    f"{e.detail}; both are of target_model_version {ref.target_model_version!r}, with which alone it may change", op=e.op, subject=e.subject,
                ) from None
            if self._parts and piece.lease.window is not None and not _other_window(self._parts[-1].lease, piece.lease):
                raise SchemaError(
                    f"{e.detail} in one batch, and a run with windows can't split it; the target must change between windows", op=e.op, subject=e.subject,
                ) from None
            self.identity = Identity(self._collator.schema)
            self._kinds += 1
            self.fingerprints = {}
        self.identity.adopt(ref)
        self.version = ref.target_model_version
        self.fingerprints.update({name: ref.attributes[name] for name in FINGERPRINTS if name in ref.attributes})
        piece.kind = self._kinds

    def _give_up(self, leases: Sequence[Lease], cause: BaseException) -> None:
        """Fail leases whose samples could not become part of a batch: for good where no try can succeed. Raises the cause if that is not to be passed over."""
        verdict = "fail_permanent" if isinstance(cause, (CorruptError, SchemaError)) else "fail"
        try:
            self._settle([x.lease_id for x in leases], verdict, _reason(cause))
        except SluiceError as e:
            raise e from cause
        for lease in leases:
            w = lease.window
            if w is not None and (not w.pad or verdict != "fail_permanent"):  # the place of such a stand-in stays empty
                self._owing.add(_place(w))
        self._skips += 1
        ref = leases[0].ref
        if self._skips > self.settings.max_skips or not self.settings.skip(ref, cause):
            raise cause
        with self._cv:
            self._counts.skipped += len(leases)
        log.warning("run %s: %s was passed over: %s", self.run_id, ref.sample_id if len(leases) == 1 else f"{len(leases)} samples", str(cause))

    def _collate(self, n: int) -> _Made | None:
        """Make a batch of the first n parts. Where that fails on one of them, it alone is failed and the others stay; otherwise all n are. None says that this was passed over, and the batch must
        be filled again."""
        pieces = self._parts[:n]
        begin = time.monotonic()
        try:
            batch = self._collator([p.sample for p in pieces if p.sample is not None])
        except Exception as e:
            index = e.__dict__.get("index")
            bad = pieces if index is None else [pieces[index]]
            self._parts = [p for p in self._parts if p not in bad]
            self._free(bad)
            self._give_up([p.lease for p in bad], e)
            return None
        self._parts = self._parts[n:]
        for p in pieces:
            p.sample = None  # the batch has what it needs of the memory
        if not batch.aliases:
            self._free(pieces)  # everything was copied; the claim keeps the sample for another try
        with self._cv:
            self._counts.collate_seconds += time.monotonic() - begin
        return _Made(batch, self._send(batch, pieces), pieces)

    def _send(self, batch: Batch, pieces: list[_Piece]) -> Transfer | None:
        """Begin the way to the device. Pins are given up behind the copy's event."""
        if self.settings.ring is None:
            return None
        sent = [_Piece(p.lease, None, p.handle) for p in pieces]
        try:
            transfer = self.settings.ring.put(batch, lambda: self._free(sent), timeout=self.settings.patience)
        except BaseException:
            self._free(pieces)
            self._settle([p.lease.lease_id for p in pieces], "return")
            raise
        for p in pieces:
            p.handle = None
        return transfer

    # -- the renewing thread -------------------------------------------------------------------------------------------

    def _renew(self) -> None:
        """Keep leases alive while the trainer is."""
        dormant, last = False, time.monotonic()
        every = self.settings.renew_every or self._queue.visibility_timeout.seconds / 3
        while not self._end.wait(min(every, _LOOK_SECONDS)) and not self.transport.closed and not self.transport.dead:
            if self._ends_at is not None and time.monotonic() >= self._ends_at:
                self._end_retired()
                return
            with self._cv:
                live = [h for h in self._held.values() if not h.lost]
                every = self.settings.renew_every or min((h.life / 3 for h in live), default=every)
                if time.monotonic() - last < every:
                    continue
                last = time.monotonic()
                idle = self._calling == 0 and self.settings.clock() - self._last_call >= self.settings.max_idle
            if idle and live and not dormant:
                log.warning(
                    "run %s: the trainer has made no call for %.0f s: its %d leases are no longer renewed, and their samples go to others", self.run_id, self.settings.max_idle, len(live)
                )
            dormant = idle
            if live and not idle:
                self._renew_once(live)

    def _back(self) -> None:
        """The service is there again. One that was killed has forgotten leases: what was made ahead of them is not to be trained on, since it comes again."""
        with self._cv:
            live = [h for h in self._held.values() if not h.lost]
        if live and os.getpid() == self.pid:
            self._renew_once(live)

    def _renew_once(self, leases: list[_Held]) -> None:
        begin = time.monotonic()
        try:
            results = self._queue.renew(self.consumer, [h.lease for h in leases], cancel=self._end, patience=min(h.life for h in leases) / 3)
        except (Cancelled, ClosedError):
            return
        except StaleError as e:
            self._taken_over(e)
            return
        except SluiceError as e:
            log.warning("run %s: %d leases were not renewed, and are tried again: %s", self.run_id, len(leases), str(e))
            return
        lost = 0
        with self._cv:
            for r in results:
                h = self._held.get(r.lease_id)
                if h is None:
                    continue
                if r.status == "renewed":
                    h.until = begin + h.life
                elif r.status != "already_settled":  # which a call of ours did, whose answer is still on its way
                    h.lost = True
                    lost += 1
            self._counts.lost += lost
            self._moves += lost > 0
        if lost:
            log.warning("run %s: %d leases of %s have run out; their samples come again", self.run_id, lost, self.consumer.name)


def passed_over(_: SampleRef, error: BaseException) -> bool:
    """What is skipped unless the caller says otherwise."""
    return isinstance(error, (CorruptError, NotFoundError))


def _place(w: WindowSlot) -> tuple[int, int]:
    return w.number, w.slot


def _other_window(a: Lease, b: Lease) -> bool:
    return a.window is not None and b.window is not None and a.window.number != b.window.number


def _left(until: float) -> float:
    return max(0.0, until - time.monotonic())


def _reason(cause: object) -> str:
    if cause is None:
        return "failed by the trainer"
    text = str(cause) or type(cause).__name__
    if isinstance(cause, BaseException) and not isinstance(cause, SluiceError):
        text = f"{type(cause).__name__}: {cause}" if str(cause) else type(cause).__name__
    return text.encode("utf-8", "replace")[:_REASON_BYTES].decode("utf-8", "ignore")


def _clear(error: BaseException | None) -> None:
    """Let go of the tensors that the frames of an error's tracebacks hold: their memory ends with the last of them."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _cut_off(cause: SluiceError, run_id: str) -> SluiceError:
    """The error of a stream that was closed with a cause."""
    cls = TargetFaultError if type(cause) is SluiceError else type(cause)
    return cls(f"the stream was cut off: {cause}", op="loader", subject=run_id)
