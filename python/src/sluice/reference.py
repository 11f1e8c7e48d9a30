"""The classes of the reference API (NeMo AutoModel's ``speculative.streaming``), on a Sluice service.

A program written against that API runs by changing its import. :class:`LocalFeatureStore` and :class:`SharedDirFeatureStore` start or join a private service by themselves, so the semantics of
store and queue are the service's own. What differs on purpose: leases run out by themselves, a lease that fails five times is a dead letter, a sample's bytes are freed by the ack of its lease and
its release in either order, the sample cap pauses a pipeline instead of ending it, and a batch whose loop was left by an exception is failed, not acked.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
import threading
import time
import uuid
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, cast

from . import batches, dtypes, service, threads
from .answers import run_path
from .batches import Eagle3TargetBatch
from .client import Client, Run, consumer_name
from .collate import Collator, Sample
from .errors import AbortedError, ClosedError, ConflictError, DuplicateError, FullError, InvalidError, NotFoundError, SchemaError, SluiceError, StaleError, UnavailableError, WaitTimeoutError
from .queue import Consumer, Lease, Reservation, RunQueue, Settlement, VisibilityTimeout
from .refs import FeatureAlgorithm, SampleRef
from .schema import builtin
from .store import FeatureStore, RunStore, StoreHandle, StoreHealth
from .tensorfile import Tensor, specs_of

if TYPE_CHECKING:
    import torch

    PromptBatch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    PackedPromptBatch = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]

log = logging.getLogger("sluice")

_GIVE_UP_SECONDS = 5.0  # how long a close asks a private service that is gone
_LEAVING_SECONDS = 10.0  # how long a new queue waits for the consumers of a stream that has ended
_IDLE_RENEWAL_SECONDS = 30 * 60.0  # a trainer that made no call for so long keeps no lease


# -- stores ----------------------------------------------------------------------------------------------------------------


class ServiceFeatureStore(FeatureStore):
    """The reference API's store on a run of any service, so that its queue, producer, pipeline and loader work there too.

        with sluice.Client("http://host:port") as client:
            store = ServiceFeatureStore(client.create_run("r1", mixed=True, max_bytes=64 << 30))

    It uses the run and its client, and closes neither. A run with a schema takes samples of that schema only.
    """

    def __init__(self, run: Run) -> None:
        if not isinstance(run, Run):
            raise InvalidError(f"is a {type(run).__name__}, want a sluice.Run", op=type(self).__name__, subject="run")
        self._adopt(run)

    def _adopt(self, run: Run) -> None:
        self._run = run
        self._caps: dict[str, int] = dict(run.spec["caps"])  # as the store was opened; a queue may have marks of its own
        self._pid = os.getpid()
        self._closed = False

    @property
    def store_uri(self) -> str:  # type: ignore[override]
        return self._run.store.store_uri

    def put(
        self, sample_id: str, tensors: Mapping[str, Tensor], run_id: str, algorithm: FeatureAlgorithm = FeatureAlgorithm.EAGLE3, schema_version: int = 1, target_model_version: str = "0",
        draft_weight_version: str = "0", num_tokens: int = 0, *, attributes: Mapping[str, str] | None = None, reservation: str | None = None,
    ) -> SampleRef:
        """Store tensors under ``sample_id``, and return their ref. They are copied; the caller may go on changing its own.

        ``attributes`` are the ref's. What the reference's put cannot say has defaults: samples are shifted, as the reference's batches are (``shift`` "1"), and their ``aux_layers`` are "unknown".
        ``reservation`` is the id of one from :meth:`sluice.RunQueue.reserve`. Raises MemoryError (over the cap, or out of room), ValueError (bad input, a duplicate id, a feature that the
        algorithm requires is missing), RuntimeError (closed).
        """
        store = self._store("put")
        if not isinstance(tensors, Mapping):
            raise InvalidError(f"is a {type(tensors).__name__}, want a mapping of names to tensors", op="put", subject="tensors")
        said = dict(attributes or {})
        if isinstance(algorithm, FeatureAlgorithm):
            schema = builtin(algorithm.value)
            missing = [f.name for f in schema.features if f.required and f.name not in tensors]
            if missing:
                has = ", ".join(map(str, tensors)) or "nothing"
                raise InvalidError(f"lack {', '.join(missing)}, which {algorithm.value} requires; they are {has}", op="put", subject=f"tensors of {sample_id!r:.220}")
            said.setdefault("shift", "1" if schema.shifts else "0")
            said.setdefault("aux_layers", "unknown")
        self._note(said, tensors)

        def put() -> SampleRef:
            return store.put(sample_id, tensors, run_id, algorithm, schema_version, target_model_version, draft_weight_version, num_tokens, attributes=said, reservation=reservation)

        try:
            return put()
        except FullError:
            store.settle_memory()  # what the caller has just dropped is room
            return put()

    def _note(self, said: dict[str, str], tensors: Mapping[str, Tensor]) -> None:
        pass

    def get(self, ref: SampleRef, device: torch.device | str | None = None) -> tuple[dict[str, Tensor], StoreHandle]:
        """The sample's tensors on ``device``, in the order of its features, and the handle to release. They may be written to.

        Raises KeyError (it is not here any more, or never was), RuntimeError (its bytes are not what the ref says; closed).
        """
        store = self._store("get")
        if not isinstance(ref, SampleRef):
            raise InvalidError(f"is a {type(ref).__name__}, want a SampleRef", op="get", subject="ref")
        tensors, handle = store.get(ref, device)
        return tensors, StoreHandle(self, handle.sample_id, handle.ref, handle.handle_id)

    def release(self, handle: StoreHandle) -> None:
        """Give up a pin. Idempotent, also after close. Tensors that are still referenced stay valid, and their bytes count until they are gone."""
        if not isinstance(handle, StoreHandle):
            raise InvalidError(f"is a {type(handle).__name__}, want a StoreHandle", op="release", subject="handle")
        if handle.store is self:
            self._run.store.release(StoreHandle(self._run.store, handle.sample_id, handle.ref, handle.handle_id))

    def abort(self, ref: SampleRef) -> None:
        """Free a sample whose ref never reached a queue, without reading it. ConflictError if it did."""
        self._store("abort").abort(ref)

    def gc(self) -> int:
        """Free what nobody owns; it happens by itself, too. Returns how many samples that were."""
        return self._store("gc").gc()

    def health(self) -> StoreHealth:
        """Counters, against the marks in bytes that this store was opened with."""
        counters = self._store("health").counters()
        used, samples = int(counters["resident_bytes"]), int(counters["resident_samples"])
        high, low = self._caps.get("high_watermark_bytes") or None, self._caps.get("low_watermark_bytes")
        return StoreHealth(used, self._caps.get("max_bytes", 0), samples, high is not None and used >= high, high is not None and low is not None and used <= low)

    def close(self) -> None:
        """End the use of the store. Every later call but release raises RuntimeError. Tensors that were handed out stay valid. Idempotent; in the child of a fork it changes nothing for the parent."""
        if not self._closed:
            self._closed = True
            self._end()

    def _end(self) -> None:
        pass

    def _store(self, op: str) -> RunStore:
        if self._closed:
            raise ClosedError("the store is closed", op=op, subject=type(self).__name__)
        return self._run.store

    def _may_keep(self, ref: SampleRef) -> bool:
        """Whether there is room for another sample of that size, if this one's memory and what this process keeps already are kept for long."""
        most_samples, most_bytes = self._caps.get("max_samples") or 0, self._caps.get("max_bytes") or 0
        kept = self._run.store.kept()
        return not (0 < most_samples < len(kept) + 2 or 0 < most_bytes < sum(r.estimated_bytes for r in kept) + 2 * ref.estimated_bytes)


class _PrivateStore(ServiceFeatureStore):
    """A store on a service that this process starts or joins: a mixed run of it."""

    def __init__(self, max_samples: int | None, max_bytes: int | None, high_watermark_bytes: int | None, low_watermark_bytes: int | None, *, directory: str | None, run_id: str) -> None:
        caps = _caps(type(self).__name__, max_samples, max_bytes, high_watermark_bytes, low_watermark_bytes)
        def start() -> service.Endpoint:
            return service.private(directory, idle=service.IDLE_SECONDS)

        with start() as endpoint:
            self._client = Client(endpoint.url)
            # What is in a directory is there for another service; what was in memory is gone.
            service.watch(self._client, endpoint, start if directory is not None else None)
        try:
            self._adopt(self._open(run_id, caps, endpoint.binary is not None))
        except BaseException:
            self._client.close()
            raise
        self._finalizer = weakref.finalize(self, _abandon, self._client, self._transient, os.getpid())
        self._finalizer.atexit = False  # the session ends with the process, and the service after it

    def _open(self, run_id: str, caps: dict[str, int], started: bool) -> Run:
        return self._client.create_run(run_id, mixed=True, visibility_timeout=VisibilityTimeout().seconds, **cast(Any, caps))

    @property
    def _transient(self) -> str:
        """The run that ends with the store; empty if it stays."""
        return ""

    def _end(self) -> None:
        self._finalizer.detach()
        if self._pid == os.getpid():
            _delete(self._client, self._transient)
        self._client.close()


class LocalFeatureStore(_PrivateStore):
    """A store of this process, in memory. One private service serves all of a process, and ends by itself after it.

    ``max_samples`` and ``max_bytes`` are hard caps, None for none; one of them must be set. Producers pause at ``high_watermark_bytes`` and go on at ``low_watermark_bytes``; in samples, at three
    and one quarter of ``max_samples``. Marks that a smaller ``max_bytes`` leaves no room for become three and one quarter of it.

    It belongs to its process: it cannot be pickled. The child of a fork may put, get and close, in a session of its own; the parent's handles and leases stay the parent's.
    """

    def __init__(
        self, max_samples: int | None = 64, max_bytes: int | None = 256 * 1024 * 1024, high_watermark_bytes: int | None = 192 * 1024 * 1024, low_watermark_bytes: int | None = 64 * 1024 * 1024,
    ) -> None:
        super().__init__(max_samples, max_bytes, high_watermark_bytes, low_watermark_bytes, directory=None, run_id=f"local-{uuid.uuid4().hex}")

    @property
    def _transient(self) -> str:
        return self._run.run_id

    def _note(self, said: dict[str, str], tensors: Mapping[str, Tensor]) -> None:
        devices = [str(getattr(t, "device", "cpu")) for t in tensors.values()]
        if set(devices) != {"cpu"}:
            said.setdefault("devices", ",".join(devices))  # in the order of the features

    def get(self, ref: SampleRef, device: torch.device | str | None = None) -> tuple[dict[str, Tensor], StoreHandle]:
        """As :meth:`ServiceFeatureStore.get`; without a ``device`` each tensor is on the one that it was put from."""
        tensors, handle = super().get(ref, device)
        if device is None and "devices" in ref.attributes:
            for name, where in zip(ref.feature_names(), ref.attributes["devices"].split(","), strict=True):
                tensors[name] = cast(Any, tensors[name]).to(where)
        return tensors, handle

    def __reduce__(self) -> Any:
        raise TypeError("a LocalFeatureStore belongs to its process and can't be pickled; processes share a SharedDirFeatureStore")


class SharedDirFeatureStore(_PrivateStore):
    """A store in a directory, for all processes of this host that name it: they join one private service, whose socket is elsewhere, and which ends 10 s after its last client.

    Samples are safetensors files under ``directory``/store. What is in the queue stays when everybody has closed: the next one to open the directory finds it, leases and all. A sample that was
    put and not enqueued goes a minute after its process. The caps are those of whoever opened it first, for as long as anything is in it; who brings others is warned. Pickled, it is the
    directory: whoever unpickles it opens it again.
    """

    def __init__(
        self, directory: str, max_samples: int | None = 64, max_bytes: int | None = 256 * 1024 * 1024, high_watermark_bytes: int | None = 192 * 1024 * 1024,
        low_watermark_bytes: int | None = 64 * 1024 * 1024,
    ) -> None:
        if not isinstance(directory, (str, os.PathLike)) or not os.fspath(directory):
            raise InvalidError(f"is {directory!r:.80}, want the path of a directory", op="SharedDirFeatureStore", subject="directory")
        self._arguments = (os.fspath(directory), max_samples, max_bytes, high_watermark_bytes, low_watermark_bytes)
        _caps("SharedDirFeatureStore", *self._arguments[1:])  # before anything is made
        try:
            os.makedirs(directory, mode=0o700, exist_ok=True)
        except OSError as e:
            raise InvalidError(f"is {os.fspath(directory)!r}, which can't be made: {e.strerror}", op="SharedDirFeatureStore", subject="directory") from e
        self.directory = os.path.realpath(directory)
        super().__init__(max_samples, max_bytes, high_watermark_bytes, low_watermark_bytes, directory=self.directory, run_id="shared")

    def _open(self, run_id: str, caps: dict[str, int], started: bool) -> Run:
        if started:
            with contextlib.suppress(NotFoundError):
                status = self._client.run(run_id).status()
                if not (status["pending"] or status["outstanding"] or status["dead"] or status["health"]["resident_samples"]):
                    self._client.delete_run(run_id)  # nothing is in it and nobody is there: the caps may be others
        try:
            return super()._open(run_id, caps, started)
        except (DuplicateError, ConflictError):
            run = self._client.run(run_id)
        theirs = run.spec["caps"]
        other = [f"{name} is {theirs.get(name) or None}, not {caps.get(name)}" for name in ("max_samples", "max_bytes") if (theirs.get(name) or None) != caps.get(name)]
        if other:
            warnings.warn(f"{self.directory} is open with other caps, which count: {'; '.join(other)}", stacklevel=4)
        return run

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._arguments


def _delete(client: Client, run_id: str) -> None:
    if run_id:
        with contextlib.suppress(NotFoundError, UnavailableError):  # what is in the memory of a service that is gone is gone
            client._t.call("DELETE", run_path(run_id), patience=_GIVE_UP_SECONDS)


def _abandon(client: Client, run_id: str, pid: int) -> None:
    """Close what a store that was dropped without a close has left. In a thread: a garbage collection must not wait for a service."""

    def end() -> None:
        try:
            _delete(client, run_id)
        except SluiceError as e:
            log.warning("the run of a store that was dropped can't be deleted, and stays until the process ends: %s", str(e))
        client.close()

    if pid == os.getpid():
        threading.Thread(target=end, name="sluice-abandon", daemon=True).start()


def _caps(op: str, max_samples: int | None, max_bytes: int | None, high: int | None, low: int | None) -> dict[str, int]:
    given = {"max_samples": max_samples, "max_bytes": max_bytes, "high_watermark_bytes": high, "low_watermark_bytes": low}
    for name, value in given.items():
        _bytes(op, name, value)
    if max_samples is None and max_bytes is None:
        raise InvalidError("are both None, want at least one of them", op=op, subject="max_samples and max_bytes")
    _hysteresis(op, high, low)
    if max_bytes is not None:
        # The reference's default marks ignore a smaller cap, and then never pause anybody.
        if high is not None and high > max_bytes:
            given["high_watermark_bytes"] = max(1, max_bytes * 3 // 4)
        if low is not None and low >= (given["high_watermark_bytes"] or max_bytes):
            given["low_watermark_bytes"] = max_bytes // 4
    return {name: value for name, value in given.items() if value is not None}


def _bytes(op: str, name: str, value: int | None) -> None:
    least = 0 if name == "low_watermark_bytes" else 1
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
        raise InvalidError(f"is {value!r:.80}, want an integer of at least {least}, or None", op=op, subject=name)


def _hysteresis(op: str, high: int | None, low: int | None) -> None:
    if high is not None and low is not None and low >= high:
        raise InvalidError(f"is {low}, want less than high_watermark_bytes ({high})", op=op, subject="low_watermark_bytes")


# -- queue -----------------------------------------------------------------------------------------------------------------


class _Mine(threading.local):
    """What a thread that acquires has of a queue. A thread is a consumer of its own: what it has leased another one waits for."""

    def __init__(self) -> None:  # called in each thread
        self.pid = 0
        self.consumer = Consumer("none")
        self.names: set[str] = set()  # of its consumers, loaders that it pulls among them
        self.more_may_come = False  # its last acquire got nothing, and that was not the end

    def own(self) -> Consumer:
        if self.pid != os.getpid():  # also in the child of a fork
            self.pid, self.consumer, self.more_may_come = os.getpid(), Consumer(consumer_name("queue")), False
            self.names = {self.consumer.name}
        return self.consumer


class SampleRefQueue:
    """The queue of a store, with leases, acks and fails. Safe to call from many threads, and from every process that has the store.

    ``visibility_timeout`` is how long a lease lives unless it is settled; 30 s by default. The marks, if given, take the place of the store's. ``on_pause`` and ``on_resume`` are called, outside
    every lock, when a producer begins to wait for the consumers, and when it goes on.

    A store has one queue at a time: a second object is another door to it. Once it is closed and drained, and no other process consumes from it, a new object opens it again.
    """

    def __init__(
        self, store: FeatureStore, visibility_timeout: VisibilityTimeout | None = None, high_watermark_bytes: int | None = None, low_watermark_bytes: int | None = None,
        on_pause: Callable[[StoreHealth], None] | None = None, on_resume: Callable[[StoreHealth], None] | None = None,
    ) -> None:
        op = "SampleRefQueue"
        self._run = _store_of(op, store)._run
        if visibility_timeout is not None and not isinstance(visibility_timeout, VisibilityTimeout):
            raise InvalidError(f"is {visibility_timeout!r:.80}, want a VisibilityTimeout", op=op, subject="visibility_timeout")
        _bytes(op, "high_watermark_bytes", high_watermark_bytes)
        _bytes(op, "low_watermark_bytes", low_watermark_bytes)
        _hysteresis(op, high_watermark_bytes, low_watermark_bytes)
        for name, call in (("on_pause", on_pause), ("on_resume", on_resume)):
            if call is not None and not callable(call):
                raise InvalidError(f"is {call!r:.80}, want a callable", op=op, subject=name)
        self._store = cast(ServiceFeatureStore, store)
        self._on_pause, self._on_resume = on_pause, on_resume
        self._queue: RunQueue = self._run.queue
        self._mine = _Mine()
        self._lock = threading.Lock()
        self._paused = False
        self._cause: BaseException | None = None  # what a pipeline of this process closed it with
        self._configure(visibility_timeout, high_watermark_bytes, low_watermark_bytes)
        self._vt = self._queue.visibility_timeout

    def _configure(self, timeout: VisibilityTimeout | None, high: int | None, low: int | None) -> None:
        own, change = self._store._caps, dict[str, Any]()
        if isinstance(self._store, LocalFeatureStore):  # of nobody else: what is left out is what the store has
            timeout = timeout or VisibilityTimeout()
            high = own.get("high_watermark_bytes") if high is None else high
            low = own.get("low_watermark_bytes") if low is None else low
        if timeout is not None:
            change["visibility_timeout"] = timeout.seconds
        if high is not None:
            change["high_watermark_bytes"] = high = min(high, own.get("max_bytes") or high)
            low = min(own.get("low_watermark_bytes", 0), high // 3) if low is None else low
        if low is not None:
            change["low_watermark_bytes"] = low if high is None or low < high else high // 3
        if change:
            self._run.configure(**change)
        self._reopen()

    def _reopen(self) -> None:
        """Begin a new stream in a queue that is closed and drained. Not while another process has yet to hear the end of the last one; one that has just ended is seen for some seconds more."""
        ours = f"-{os.uname().nodename.split('.')[0]}-{os.getpid()}-"
        until = time.monotonic() + _LEAVING_SECONDS
        while (status := self._run.status())["closed"] and not (status["pending"] or status["outstanding"]):
            others = [c["name"] for c in status["consumers"] if ours not in c["name"]]
            if not others:
                try:
                    self._run.configure(reopen=True)
                except ConflictError as e:
                    log.warning("the queue is closed and stays so: %s", str(e))  # it deals out windows, or another process was faster
                return
            if time.monotonic() >= until:
                log.warning("the queue is closed and stays so, since other processes consume from it: %s", ", ".join(others))
                return
            time.sleep(0.05)

    def put(self, ref: SampleRef) -> None:
        """Enqueue a ref, whatever the marks say. A repetition is no error. RuntimeError if the queue is closed, KeyError if the store has not the sample, ValueError for a ref of another store."""
        self._queue.put(_ref("put", ref))

    def put_blocks_until_below(self, ref: SampleRef, poll_interval: float = 0.05, abort_when: Callable[[], bool] | None = None) -> None:
        """Enqueue a ref, waiting while the store is above its marks; never while consumers have nothing, nor where this thread is the only consumer. ``abort_when`` is asked every ``poll_interval``
        seconds.

        RuntimeError if the queue is closed, or ``abort_when`` became true.
        """
        _positive("put_blocks_until_below", "poll_interval", poll_interval)
        if abort_when is not None and not callable(abort_when):
            raise InvalidError(f"is {abort_when!r:.80}, want a callable", op="put_blocks_until_below", subject="abort_when")
        _ref("put_blocks_until_below", ref)
        try:
            self._queue.put_blocks_until_below(ref, timeout=0.0, abort_when=abort_when)
        except WaitTimeoutError:
            if self._alone():
                self._queue.put(ref)  # whoever could make room is in this call
                return
            self._turn(True)
            self._queue.put_blocks_until_below(ref, abort_when=abort_when, poll=poll_interval)
        self._turn(False)

    def _alone(self) -> bool:
        """Whether all consumers are this thread's."""
        consumers = {c["name"] for c in self._queue.status()["consumers"]}
        if not consumers:
            log.info("a put waits for the store to fall below its marks, and nobody consumes yet")
        return bool(consumers) and consumers <= self._mine.names

    def _reserve(self, nbytes: int, abort_when: Callable[[], bool]) -> Reservation:
        """Wait at the gate for room, as a put would, before there is anything to put."""
        try:
            room = self._queue.reserve(nbytes, timeout=0.0, abort_when=abort_when)
        except WaitTimeoutError:
            self._turn(True)
            room = self._queue.reserve(nbytes, abort_when=abort_when)
        self._turn(False)
        return room

    def _turn(self, paused: bool) -> None:
        with self._lock:
            changed, self._paused = self._paused != paused, paused
        call = self._on_pause if paused else self._on_resume
        if changed and call is not None:
            try:
                call(self._store.health())
            except Exception:
                log.exception("%s failed; the queue goes on", "on_pause" if paused else "on_resume")

    def acquire(self, poll_interval: float = 0.05) -> Lease | None:
        """Lease the next ref, waiting up to ``poll_interval`` seconds for it. None if there is none yet, or, when :attr:`is_closed`, no more.

        If the queue was closed with a cause, as by a pipeline whose producer failed, that is raised behind the drain.
        """
        _positive("acquire", "poll_interval", poll_interval)
        lease, end = self._deliver(self._mine.own(), poll_interval)
        self._mine.more_may_come = lease is None and not end
        return lease

    def _deliver(self, consumer: Consumer, seconds: float) -> tuple[Lease | None, bool]:
        """A lease, or none and whether that is the end."""
        delivery = self._queue.acquire(consumer, timeout=seconds)
        if delivery.leases:
            return delivery.leases[0], False
        try:
            if delivery.cause is not None:
                raise delivery.cause from self._cause
            return None, delivery.end
        finally:
            del delivery  # the error's traceback has this frame, which must not have the error in turn

    def ack(self, lease: Lease) -> None:
        """The sample was consumed: its bytes go when its handles are released. The ack of a lease that ran out changes nothing and is logged."""
        self._settle(lease, "ack", "")

    def fail(self, lease: Lease) -> None:
        """Give the ref back for another try, behind those that wait for their first. The fifth fail makes it a dead letter."""
        self._settle(lease, "fail", "failed by the consumer")

    def _settle(self, lease: Lease, verdict: str, reason: str) -> None:
        if not isinstance(lease, Lease):
            raise InvalidError(f"is a {type(lease).__name__}, want a Lease", op=verdict, subject="lease")
        (result,) = self._queue.settle(lease.consumer or self._mine.own(), [Settlement(lease.lease_id, verdict, reason)])
        if result.status == "stale":
            log.warning("%s of a stale lease of %s: it ran out, nothing was changed", verdict, lease.ref.sample_id)
        elif result.dead:
            log.warning("%s is a dead letter: %s", lease.ref.sample_id, reason)

    def _renew(self, lease: Lease) -> bool:
        return self._queue.renew(lease.consumer or self._mine.own(), [lease])[0].status == "renewed"

    def reclaim_expired(self) -> int:
        """Take back leases that ran out. That happens by itself; this tells how many it were now."""
        return self._queue.reclaim_expired()

    def pending_count(self) -> int:
        """How many refs wait for a lease."""
        return self._queue.pending_count()

    def outstanding_count(self) -> int:
        """How many refs are leased."""
        return self._queue.outstanding_count()

    def close(self, *, cause: str | BaseException | None = None) -> None:
        """End the puts, for everybody. What is pending drains. A ``cause`` is raised to the consumers behind the drain."""
        if isinstance(cause, BaseException):
            self._cause = cause
        self._queue.close(cause)
        self._mine.more_may_come = False

    @property
    def is_closed(self) -> bool:
        """Whether the queue is closed. To a thread whose last :meth:`acquire` got None while more could come (a lease of another consumer may fail), it says so only when nothing can come any
        more: None and ``is_closed`` are the end."""
        status = self._queue.status()
        return bool(status["closed"]) and (not self._mine.more_may_come or not (status["pending"] or status["outstanding"]))


class LeaseKeeper:
    """Renews leases for as long as somebody refers to what they were handed out as, 30 minutes at most: so a trainer that is slow loses none, and one that hangs or has dropped it keeps none."""

    def __init__(self, queue: SampleRefQueue) -> None:
        self._queue = queue
        self._held: dict[int, tuple[weakref.ref[Any], Lease, float, float]] = {}  # what it was handed out as, when, and a third of the time that it was given, in seconds
        self._every = math.inf  # how long the thread waits now
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()

    def keep(self, held: Any, lease: Lease) -> None:
        """Renew a lease while ``held`` lives, which may be the lease itself."""
        wake, now = self._wake, time.monotonic()
        third = max(lease.deadline - now, 0.01) / 3
        with self._lock:
            self._held[lease.lease_id] = (weakref.ref(held, lambda _: wake.set()), dataclasses.replace(lease), now, third)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="sluice-renewer", daemon=True)
                self._thread.start()
            elif third < self._every:
                wake.set()

    def drop(self, lease_id: int) -> None:
        """It is settled."""
        with self._lock:
            self._held.pop(lease_id, None)

    def rest(self) -> None:
        """End the thread if there is nothing to renew: by itself it finds that out at the next renewal."""
        with self._lock:
            idle = self._thread is not None and not self._held
        if idle:
            self._wake.set()

    def end(self) -> None:
        """Renew nothing any more. Returns when the thread has ended, which may begin again."""
        with self._lock:
            self._held.clear()
            thread = self._thread
        self._wake.set()
        if thread is not None and self._pid == os.getpid():
            thread.join(_GIVE_UP_SECONDS)

    def _run(self) -> None:
        while True:
            with self._lock:
                # A lease may have been given less than the queue gives now, and a renewal gives it as much again.
                self._every = min((third for *_, third in self._held.values()), default=self._queue._vt.seconds / 3)
            self._wake.wait(self._every)
            self._wake.clear()
            now = time.monotonic()
            with self._lock:
                self._held = {i: h for i, h in self._held.items() if h[0]() is not None and now - h[2] < _IDLE_RENEWAL_SECONDS}
                if not self._held:
                    self._thread, self._every = None, math.inf
                    return
                leases = [lease for _, lease, *_ in self._held.values()]
            for lease in leases:
                if not self._renew(lease):
                    self.drop(lease.lease_id)

    def _renew(self, lease: Lease) -> bool:
        try:
            if self._queue._renew(lease):
                return True
        except UnavailableError as e:
            log.warning("the lease of %s could not be renewed: %s", lease.ref.sample_id, str(e))
            return not self._queue._run.client._t.dead
        except (ClosedError, NotFoundError, StaleError):
            return False
        with self._lock:
            unsettled = lease.lease_id in self._held
        if unsettled:
            log.warning("the lease of %s ran out while the trainer had it: the sample will be trained on again", lease.ref.sample_id)
        return False


def _store_of(op: str, store: object) -> ServiceFeatureStore:
    if not isinstance(store, ServiceFeatureStore):
        raise InvalidError(f"is a {type(store).__name__}, want a LocalFeatureStore, a SharedDirFeatureStore or a ServiceFeatureStore", op=op, subject="store")
    return store


def _queue_of(op: str, queue: object) -> SampleRefQueue:
    if not isinstance(queue, SampleRefQueue):
        raise InvalidError(f"is a {type(queue).__name__}, want a SampleRefQueue", op=op, subject="queue")
    return queue


def _ref(op: str, ref: SampleRef) -> SampleRef:
    if not isinstance(ref, SampleRef):
        raise InvalidError(f"is a {type(ref).__name__}, want a SampleRef", op=op, subject="ref")
    return ref


def _positive(op: str, name: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
        raise InvalidError(f"is {value!r:.80}, want a number of seconds above 0", op=op, subject=name)


# -- producer --------------------------------------------------------------------------------------------------------------


class Eagle3TargetBackend(Protocol):
    """What a producer needs of a target. ``packing`` is position_ids, seq_lens and doc_remaining, or nothing."""

    def generate_batch(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, loss_mask: torch.Tensor, **packing: torch.Tensor) -> Any: ...


class FeatureProducer:
    """Runs a target once a call, and puts its supervision into a store. One thread at a time drives it; many may share a store.

    ``target_backend`` has ``generate_batch(input_ids, attention_mask, loss_mask, ...)``, which returns an object with the fields of :class:`Eagle3TargetBatch`, or those of ``algorithm``'s schema.
    ``algorithm`` is EAGLE-3 by default. ``sample_id_factory`` makes the id of the n-th call, from 1; the default's are unique across processes and restarts, and hold the run id and n.
    """

    def __init__(
        self, target_backend: Any, store: FeatureStore, run_id: str, algorithm: FeatureAlgorithm | None = None, target_model_version: str = "0", draft_weight_version: str = "0",
        sample_id_factory: Callable[[int], str] | None = None,
    ) -> None:
        op = "FeatureProducer"
        if not callable(getattr(target_backend, "generate_batch", None)):
            raise InvalidError(f"is a {type(target_backend).__name__} without generate_batch()", op=op, subject="target_backend")
        if not isinstance(store, FeatureStore):
            raise InvalidError(f"is a {type(store).__name__}, want a FeatureStore", op=op, subject="store")
        if algorithm is not None and not isinstance(algorithm, FeatureAlgorithm):
            raise InvalidError(f"is {algorithm!r:.80}, want a FeatureAlgorithm", op=op, subject="algorithm")
        for name, text in (("run_id", run_id), ("target_model_version", target_model_version), ("draft_weight_version", draft_weight_version)):
            if not isinstance(text, str) or not text:
                raise InvalidError(f"is {text!r:.80}, want a str that is not empty", op=op, subject=name)
        if sample_id_factory is not None and not callable(sample_id_factory):
            raise InvalidError(f"is {sample_id_factory!r:.80}, want a callable", op=op, subject="sample_id_factory")
        self._backend, self._store, self._run_id = target_backend, store, run_id
        self._algorithm = algorithm if algorithm is not None else FeatureAlgorithm.EAGLE3
        self._schema = builtin(self._algorithm.value)
        self._target_version, self._draft_version = target_model_version, draft_weight_version
        self._start = uuid.uuid4().hex[:12]
        self._sample_id_factory = sample_id_factory or self._default_sample_id
        self._sample_seq = 0
        self._bytes_per_token = 0.0  # of the last sample: what the next is guessed by

    def _default_sample_id(self, n: int) -> str:
        return f"sample-{self._run_id}-{self._start}-{n}"

    def produce(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, loss_mask: torch.Tensor, position_ids: torch.Tensor | None = None, seq_lens: torch.Tensor | None = None,
        doc_remaining: torch.Tensor | None = None,
    ) -> SampleRef:
        """Run the target on one prompt batch ([B,S] tensors, seq_lens [B,docs]), and store what it says. The packing fields are all three or none.

        Raises MemoryError (over the cap: wait for the store to drain), ValueError (bad input; a batch that is not the algorithm's), and what the target raises.
        """
        return self._put(*self._forward(input_ids, attention_mask, loss_mask, position_ids, seq_lens, doc_remaining), None)

    def _forward(self, *fields: torch.Tensor | None) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Run the target. Returns tensors, and the attributes that the batch has itself."""
        given = {name: t for name, t in zip(_PROMPT_FIELDS, fields, strict=True) if t is not None}
        _check_prompt("produce", given)
        torch = dtypes.torch_module()
        with torch.no_grad() if torch is not None else contextlib.nullcontext():
            batch = self._backend.generate_batch(**given)
        tensors = {f.name: t for f in self._schema.features if (t := getattr(batch, f.name, None)) is not None}
        return tensors, batch.attributes() if isinstance(batch, Eagle3TargetBatch) else {}

    def _put(self, tensors: dict[str, Tensor], attributes: dict[str, str], reservation: str | None) -> SampleRef:
        if self._algorithm is FeatureAlgorithm.EAGLE3:
            batches.check_names(tensors)
        mask = tensors.get("attention_mask", tensors.get("loss_mask"))
        self._sample_seq += 1
        sample_id, tokens = self._sample_id_factory(self._sample_seq), 0 if mask is None else int(mask.sum())
        more: dict[str, Any] = {}
        if isinstance(self._store, ServiceFeatureStore):
            more = {"attributes": attributes, "reservation": reservation}
            self._check(sample_id, tensors, attributes, tokens)
        ref = self._store.put(
            sample_id, tensors, run_id=self._run_id, algorithm=self._algorithm, schema_version=self._schema.version, target_model_version=self._target_version,
            draft_weight_version=self._draft_version, num_tokens=tokens, **more,
        )
        if ids := int(tensors["input_ids"].shape[0] * tensors["input_ids"].shape[1]):
            self._bytes_per_token = ref.estimated_bytes / ids
        return ref

    def _check(self, sample_id: str, tensors: dict[str, Tensor], attributes: dict[str, str], tokens: int) -> None:
        """Hold the batch against the schema before it is stored: no loader could take it otherwise."""
        specs = specs_of(tensors)
        said = {"shift": "1" if self._schema.shifts else "0", "aux_layers": "unknown", **attributes}
        try:
            self._schema.validate(SampleRef(
                sample_id, self._run_id, self._store.store_uri, {name: name for name in specs}, specs, self._algorithm, self._schema.version, tokens, sum(s.nbytes for s in specs.values()),
                self._target_version, self._draft_version, attributes=said,
            ))
        except SchemaError as e:
            raise SchemaError(e.detail, op="produce", subject="the target's batch") from None

    def discard(self, ref: SampleRef) -> None:
        """Free a sample whose ref will not be enqueued, without reading it back. What is gone already is no error."""
        with contextlib.suppress(KeyError):
            if isinstance(self._store, (ServiceFeatureStore, RunStore)):
                self._store.abort(ref)
            else:
                self._store.release(self._store.get(ref)[1])

    def get_input_embeddings(self) -> Any:
        """The target's input embedding module."""
        return self._backend.get_input_embeddings()

    def set_vocab_mapping(self, selected_token_ids: torch.Tensor, selected_token_mask: torch.Tensor) -> None:
        """Hand the draft's vocabulary to the target."""
        self._backend.set_vocab_mapping(selected_token_ids, selected_token_mask)

    def close(self) -> None:
        """Release what the target holds; the producer holds nothing."""
        if callable(close := getattr(self._backend, "close", None)):
            close()


_PROMPT_FIELDS = ("input_ids", "attention_mask", "loss_mask", "position_ids", "seq_lens", "doc_remaining")
_PACKING = _PROMPT_FIELDS[3:]


def _check_prompt(op: str, fields: Mapping[str, Any]) -> None:
    """Refuse a prompt batch whose fields don't go together."""
    ids = fields["input_ids"]
    for name, t in fields.items():
        if getattr(t, "ndim", None) != 2:
            what = f"has the shape {list(t.shape)}" if hasattr(t, "shape") else f"is a {type(t).__name__}"
            raise InvalidError(f"{what}, want a tensor with two axes", op=op, subject=name)
        if t.shape[0] != ids.shape[0] or name != "seq_lens" and t.shape[1] != ids.shape[1]:
            raise InvalidError(f"has the shape {list(t.shape)}, input_ids has {list(ids.shape)}", op=op, subject=name)
    packing = [name for name in _PACKING if name in fields]
    if len(packing) not in (0, 3):
        raise InvalidError(f"are given without {', '.join(n for n in _PACKING if n not in packing)}, want all three or none", op=op, subject=", ".join(packing))
    if packing:
        real, lengths, positions = fields["attention_mask"].sum(1).tolist(), fields["seq_lens"].tolist(), fields["position_ids"].tolist()
        for row, docs in enumerate(lengths):
            _check_docs(op, row, docs, positions[row], int(real[row]))


def _check_docs(op: str, row: int, docs: list[int], positions: list[int], real: int) -> None:
    """The padding of a row may count to its last document, as the reference's packing has it."""
    at = 0
    for i, n in enumerate(docs):
        if n < 0 or at + n > len(positions):
            raise InvalidError(f"is {n} in entry {i} of row {row}, where {len(positions) - at} of {len(positions)} tokens are left (are packing fields swapped?)", op=op, subject="seq_lens")
        if positions[at:at + n][:max(0, real - at)] != list(range(min(n, max(0, real - at)))):
            raise InvalidError(f"does not count from 0 in document {i} of row {row}, at {at} (are packing fields swapped?)", op=op, subject="position_ids")
        at += n
    if at < real:
        raise InvalidError(f"adds up to {at} in row {row}, and {real} tokens are attended", op=op, subject="seq_lens")


# -- pipeline --------------------------------------------------------------------------------------------------------------


class PromptSource(Protocol):
    """Supplies the next prompt batch: (input_ids, attention_mask, loss_mask), six fields when packed, or None when there are no more."""

    def __call__(self) -> PromptBatch | PackedPromptBatch | None: ...


class AsyncFeaturePipeline:
    """Runs a producer in a thread of its own, so that the target's forward and the draft's step overlap.

    Single use: start, then stop or join. When the source ends, or the producer fails, the queue is closed, with the failure as its cause; consumers get that behind the drain, and :meth:`stop`
    raises it. The thread waits for room before it runs the target. What was produced and not enqueued is taken out of the store again. Leases are the trainer's. A queue that somebody else closes
    ends the pipeline, which is no failure.
    """

    def __init__(
        self, producer: FeatureProducer, queue: SampleRefQueue, prompt_source: PromptSource | Iterator[PromptBatch | PackedPromptBatch | torch.Tensor], poll_interval: float = 0.1,
        stop_on_exhausted: bool = True,
    ) -> None:
        op = "AsyncFeaturePipeline"
        for name in ("produce", "discard"):
            if not callable(getattr(producer, name, None)):
                raise InvalidError(f"is a {type(producer).__name__} without {name}()", op=op, subject="producer")
        self._queue = _queue_of(op, queue)
        if not callable(prompt_source) and not hasattr(prompt_source, "__next__"):
            raise InvalidError(f"is a {type(prompt_source).__name__}, want a callable or an iterator", op=op, subject="prompt_source")
        _positive(op, "poll_interval", poll_interval)
        if not isinstance(stop_on_exhausted, bool):
            raise InvalidError(f"is {stop_on_exhausted!r:.80}, want a bool", op=op, subject="stop_on_exhausted")
        self._producer = producer
        self._poll_interval, self._stop_on_exhausted = poll_interval, stop_on_exhausted
        self._iterator: Iterator[Any] | None = None if callable(prompt_source) else prompt_source
        self._prompt_source: Callable[[], Any] = prompt_source if callable(prompt_source) else self._pull_from_iterator
        self._stop_event = threading.Event()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._guess = 1  # bytes of a sample of a producer that has its own produce

    def _pull_from_iterator(self) -> Any:
        assert self._iterator is not None
        return next(self._iterator, None)

    def start(self) -> None:
        """Start the thread. A second call while it runs does nothing; once it has ended, RuntimeError: a closed queue cannot be opened again by its pipeline."""
        with self._lock:
            if self._thread is None and not self._stop_event.is_set():
                self._thread = threads.start(self._run, "streaming-async-producer", self._stop_event.set)
            elif self._thread is None or not self._thread.is_alive():
                raise ConflictError("a pipeline is for one use: its queue is closed. Make a new pipeline, and a new queue over the store", op="AsyncFeaturePipeline.start")

    def _run(self) -> None:
        try:
            while not self._stop_event.is_set():
                prompt = self._prompt_source()
                if prompt is None:
                    if self._stop_on_exhausted:
                        break
                    self._stop_event.wait(self._poll_interval)
                    continue
                self._one(_prompt(prompt))
        except BaseException as e:
            if isinstance(e, AbortedError) and self._stop_event.is_set():
                pass  # it was stopped while it waited
            elif isinstance(e, ClosedError) and self._ended():
                log.info("the queue was closed while its pipeline ran, which ends the pipeline")
            else:
                self._error = e
                log.warning("the pipeline's producer has failed, and its queue is closed: %s", repr(e))
        try:
            self._queue.close(cause=self._error)
        except (ClosedError, NotFoundError):
            pass  # the store was closed, and the queue with it
        except BaseException as e:
            self._error = self._error or e

    def _ended(self) -> bool:
        try:
            return self._queue.is_closed
        except (ClosedError, NotFoundError):
            return self._stop_event.is_set()

    def _one(self, prompt: tuple[torch.Tensor, ...]) -> None:
        # A producer that has its own produce() is not given room: it waits at the gate like the others, and puts by the caps.
        whole = type(self._producer).produce is not FeatureProducer.produce or not isinstance(self._producer._store, ServiceFeatureStore)
        room = _Room(self._queue, self._stop_event.is_set)
        with room:
            if whole:
                room.take(self._guess)
                room.give_back()
                ref = self._producer.produce(**dict(zip(_PROMPT_FIELDS, prompt, strict=False)))
                self._guess = ref.estimated_bytes
            else:
                room.take(int(self._producer._bytes_per_token * prompt[0].shape[0] * prompt[0].shape[1]))
                tensors, attributes = self._producer._forward(*prompt, *[None] * (6 - len(prompt)))
                room.take(sum(spec.nbytes for spec in specs_of(tensors).values()))
                ref = self._producer._put(tensors, attributes, room.use())
        try:
            if self._stop_event.is_set():
                raise AbortedError("stopped", op="AsyncFeaturePipeline", subject=ref.sample_id)
            self._queue.put(ref)
        except BaseException:
            self._producer.discard(ref)
            raise

    def stop(self, join_timeout: float | None = 10.0) -> None:
        """Tell the thread to end, also where it waits at the gate, and join it for up to ``join_timeout`` seconds. Raises what the thread failed with. A thread that is in its target or prompt source
        for longer is logged, and ends when it comes back. Idempotent."""
        self._stop_event.set()
        if self._thread is not None:
            self._thread.join(join_timeout)
            if self._thread.is_alive():
                log.warning("the pipeline's thread has not ended within %s s: its target or its prompt source has not returned", join_timeout)
        if self._error is not None:
            raise self._error

    def join(self, timeout: float | None = None) -> None:
        """Wait up to ``timeout`` seconds (None: as long as it takes) for the thread to end by itself. It raises nothing: :meth:`stop` does."""
        if self._thread is not None:
            self._thread.join(timeout)

    def __enter__(self) -> AsyncFeaturePipeline:
        self.start()
        return self

    def __exit__(self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        try:
            self.stop()
        except BaseException:
            if exc is None:
                raise
            log.warning("the pipeline failed as well: %s", repr(self._error))


class _Room:
    """Room for one sample, asked for before the target runs and again when its size is known. It is given back unless it is used."""

    def __init__(self, queue: SampleRefQueue, stopped: Callable[[], bool]) -> None:
        self._queue, self._stopped = queue, stopped
        self._got: Reservation | None = None
        self._until = 0.0

    def take(self, nbytes: int) -> None:
        """Wait until there is room for so many bytes. FullError if that is more than the cap, unless it is a guess."""
        nbytes = max(1, nbytes)
        if self._got is not None and nbytes <= self._got.bytes and time.monotonic() < self._until:
            return
        first = self._got is None
        self.give_back()
        try:
            self._got = self._queue._reserve(nbytes, self._stopped)
        except FullError:
            if not first:
                raise
            self._got = self._queue._reserve(1, self._stopped)  # the guess was wrong, or the sample will be refused when its size is known
        self._until = time.monotonic() + self._got.expires_seconds / 2

    def use(self) -> str:
        assert self._got is not None
        return self._got.id

    def give_back(self) -> None:
        got, self._got = self._got, None
        if got is not None:
            self._queue._queue.unreserve(got.id)

    def __enter__(self) -> None:
        pass

    def __exit__(self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        try:
            self.give_back()  # what was used is not there any more, which is no error
        except SluiceError as e:
            if exc is None and not isinstance(e, (ClosedError, NotFoundError)):
                raise
            log.debug("a reservation was not given back, and ends by itself: %s", str(e))


def _prompt(item: Any) -> tuple[torch.Tensor, ...]:
    """A prompt batch of what the source gave."""
    if hasattr(item, "shape"):
        ones = (item == item).long() if hasattr(item, "long") else (item == item).astype("int64")
        fields: tuple[Any, ...] = (item, ones, ones.clone() if hasattr(ones, "clone") else ones.copy())
    else:
        fields = tuple(item) if isinstance(item, (tuple, list)) else ()
    if len(fields) not in (3, 6):
        what = f"has {len(fields)} fields" if isinstance(item, (tuple, list)) else f"is a {type(item).__name__}"
        raise InvalidError(f"{what}, want (input_ids, attention_mask, loss_mask), six fields with position_ids, seq_lens and doc_remaining, or a tensor", op="prompt", subject="batch")
    _check_prompt("prompt", dict(zip(_PROMPT_FIELDS, fields, strict=False)))
    return fields


# -- loader ----------------------------------------------------------------------------------------------------------------


class FeatureDataLoader:
    """Iterates over :class:`Eagle3TargetBatch`, one sample each, shifted: a sample that is stored unshifted (``shift`` "0") is shifted here, one that came shifted is handed on as it is.

    A batch is acked on the next pull, by :meth:`consume_now`, or at a regular :meth:`close`; a ``with`` block that is left by an exception fails it. Its lease is renewed meanwhile, until the
    trainer has made no call for 30 minutes. The iteration ends when the queue is closed and drained; if it was closed with a cause, that is raised. A sample of another algorithm is failed and
    ValueError raised; one that breaks its schema, or whose bytes are bad, becomes a dead letter. ``algorithm`` is EAGLE-3, the only one that has this batch: :meth:`sluice.Run.loader` is for all.

    A batch's memory is the sample's, without a copy, and counts in the store until the last of its tensors is gone: in ``for batch in loader`` the loop keeps one until it has the next. A trainer may
    keep batches: where what is kept would leave no room for another sample, a batch is a copy.
    """

    def __init__(self, queue: SampleRefQueue, store: FeatureStore, algorithm: FeatureAlgorithm | None = None, acquire_poll_interval: float = 0.05) -> None:
        op = "FeatureDataLoader"
        self._queue, self._store = _queue_of(op, queue), _store_of(op, store)
        if self._store.store_uri != queue._store.store_uri:
            raise InvalidError(f"is {self._store.store_uri}, and the queue is that of {queue._store.store_uri}", op=op, subject="store")
        if algorithm not in (None, FeatureAlgorithm.EAGLE3):
            hint = "run.loader() makes batches of every algorithm" if isinstance(algorithm, FeatureAlgorithm) else ""
            raise InvalidError(f"is {algorithm!r:.80}, want FeatureAlgorithm.EAGLE3 or None", op=op, subject="algorithm", hint=hint)
        _positive(op, "acquire_poll_interval", acquire_poll_interval)
        self._algorithm = FeatureAlgorithm.EAGLE3
        self._collate = Collator(builtin(self._algorithm.value), "pad")
        self._poll = acquire_poll_interval
        self._consumer = Consumer(consumer_name("loader"))
        self._pending_handle: StoreHandle | None = None
        self._pending_lease: Lease | None = None
        self._keeper = LeaseKeeper(self._queue)
        self._pid = os.getpid()
        self._closed = False
        self._lock = threading.Lock()

    def __iter__(self) -> FeatureDataLoader:
        return self

    def __next__(self) -> Eagle3TargetBatch:
        self._queue._mine.names.add(self._consumer.name)
        try:
            self._release_pending()
            while not self._closed:
                lease, end = self._queue._deliver(self._consumer, self._poll)
                if lease is not None:
                    return self._batch(lease)
                if end:
                    break
        except BaseException:
            self._keeper.end()
            raise
        self._keeper.end()
        raise StopIteration

    def _batch(self, lease: Lease) -> Eagle3TargetBatch:
        ref, handle = lease.ref, None
        try:
            if ref.algorithm != self._algorithm:
                raise InvalidError(f"is of {getattr(ref.algorithm, 'value', ref.algorithm)}, the loader is for {self._algorithm.value}", op="FeatureDataLoader", subject=ref.sample_id)
            self._collate.schema.validate(ref)
            tensors, handle = self._store.get(ref)
            batch = self._collate([Sample(ref, tensors)])
            made = Eagle3TargetBatch.from_batch(batch if self._store._may_keep(ref) else batch.clone())
        except BaseException as e:
            verdict = "fail_permanent" if isinstance(e, SluiceError) and e.code in ("schema", "corrupt") else "fail"
            try:
                self._queue._settle(lease, verdict, str(e)[:1000])
            finally:
                if handle is not None:
                    self._store.release(handle)
            raise
        with self._lock:
            self._pending_lease, self._pending_handle = lease, handle
        self._keeper.keep(lease, lease)
        return made

    def _take(self) -> tuple[Lease | None, StoreHandle | None]:
        with self._lock:
            lease, handle = self._pending_lease, self._pending_handle
            self._pending_lease = self._pending_handle = None
        return (lease, handle) if self._pid == os.getpid() else (None, None)  # in the child of a fork it is the parent's

    def _release_pending(self) -> None:
        self._settle_pending("ack", "")

    def _settle_pending(self, verdict: str, reason: str) -> None:
        lease, handle = self._take()
        if lease is not None and handle is not None:
            self._keeper.drop(lease.lease_id)
            try:
                self._queue._settle(lease, verdict, reason)
            finally:
                self._store.release(handle)

    def consume_now(self) -> None:
        """Ack the batch that was yielded last, and release its memory, before the next pull. Idempotent."""
        self._release_pending()

    def close(self) -> None:
        """Ack the last batch, end the iteration and close the queue. Idempotent."""
        self._end(None)

    def _end(self, error: BaseException | None) -> None:
        already, self._closed = self._closed, True
        self._keeper.end()
        try:
            if error is None:
                self._release_pending()
            else:
                self._settle_pending("fail", f"{type(error).__name__}: {error}"[:1000])
        finally:
            if not already and self._pid == os.getpid():
                with contextlib.suppress(ClosedError, NotFoundError):  # the store was closed, and the queue with it
                    self._queue.close()

    def __enter__(self) -> FeatureDataLoader:
        return self

    def __exit__(self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self._end(exc)


__all__ = [
    "AsyncFeaturePipeline", "Eagle3TargetBackend", "Eagle3TargetBatch", "FeatureDataLoader", "FeatureProducer", "LocalFeatureStore", "PromptSource", "SampleRefQueue", "ServiceFeatureStore",
    "SharedDirFeatureStore",
]
