"""The classes of the reference API (NeMo AutoModel's ``speculative.streaming``), on a Sluice service.

A program written against that API runs by changing its import. :class:`LocalFeatureStore` and :class:`SharedDirFeatureStore` start or join a private service by themselves, so the semantics of
store and queue are the service's own. What differs on purpose: leases run out by themselves, a lease that fails five times is a dead letter, a sample's bytes are freed by the ack of its lease and
its release in either order, the sample cap pauses a pipeline instead of ending it, and a batch whose loop was left by an exception is failed, not acked.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, cast

from . import service
from .batches import Eagle3TargetBatch
from .client import Client, Run, consumer_name
from .errors import ClosedError, ConflictError, FullError, InvalidError, NotFoundError, SluiceError, StaleError, UnavailableError
from .queue import Consumer, Lease, RunQueue, Settlement, VisibilityTimeout
from .refs import FeatureAlgorithm, SampleRef
from .store import FeatureStore, RunStore, StoreHandle, StoreHealth
from .tensorfile import Tensor

if TYPE_CHECKING:
    import torch

    PromptBatch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    PackedPromptBatch = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]

log = logging.getLogger("sluice")

_FEATURES = ("aux_hidden_states", "input_ids", "attention_mask", "loss_mask", "logits", "target_probs", "position_mask", "position_ids", "seq_lens", "doc_remaining")


# -- stores ----------------------------------------------------------------------------------------------------------------


class _PrivateStore(FeatureStore):
    """A store on a private service: one run of it, whose refs may be of any run id, algorithm and features."""

    def __init__(
        self, max_samples: int | None, max_bytes: int | None, high_watermark_bytes: int | None, low_watermark_bytes: int | None, *, op: str, key: str | None, run_id: str,
    ) -> None:
        caps = _caps(op, max_samples, max_bytes, high_watermark_bytes, low_watermark_bytes)
        self._op, self._caps = op, caps
        with service.private(key) as endpoint:
            self._client = Client(endpoint.url)
        try:
            self._run = self._open(run_id, caps)
        except BaseException:
            self._client.close()
            raise
        self._closed = False

    def _open(self, run_id: str, caps: dict[str, int]) -> Run:
        return self._client.create_run(run_id, mixed=True, **cast(Any, caps))

    @property
    def store_uri(self) -> str:  # type: ignore[override]
        return self._run.store.store_uri

    def put(
        self, sample_id: str, tensors: Mapping[str, Tensor], run_id: str, algorithm: FeatureAlgorithm = FeatureAlgorithm.EAGLE3, schema_version: int = 1, target_model_version: str = "0",
        draft_weight_version: str = "0", num_tokens: int = 0, *, attributes: Mapping[str, str] | None = None, reservation: str | None = None,
    ) -> SampleRef:
        """Store tensors under ``sample_id``, and return their ref. They are copied; the caller may go on changing its own.

        What the reference's put does not say is stated as unknown: ``attributes`` may say better (``shift``, ``aux_layers``, ``last_norm``). Raises MemoryError (over the cap, or out of room),
        ValueError (bad input, a duplicate id), RuntimeError (closed).
        """
        said = dict(attributes or {})
        if isinstance(algorithm, FeatureAlgorithm):
            said = {"shift": "1", "aux_layers": "unknown"} | said  # the reference's batches are shifted when they are put
        where = {str(device) for t in tensors.values() if (device := getattr(t, "device", None)) is not None}
        if len(where) == 1 and "cpu" not in where:
            said.setdefault("device", where.pop())
        return self._store("put").put(
            sample_id, tensors, run_id, algorithm, schema_version, target_model_version, draft_weight_version, num_tokens, attributes=said, reservation=reservation
        )

    def get(self, ref: SampleRef, device: torch.device | str | None = None) -> tuple[dict[str, Tensor], StoreHandle]:
        """The sample's tensors on ``device`` (None: where they were put from), in the order of its features, and the handle to release. KeyError if it is not here any more."""
        tensors, handle = self._store("get").get(ref, device if device is not None else ref.attributes.get("device"))
        return tensors, StoreHandle(self, handle.sample_id, handle.ref, handle.handle_id)

    def release(self, handle: StoreHandle) -> None:
        """Give up a pin. Idempotent, also after close."""
        if handle.store is self:
            self._run.store.release(StoreHandle(self._run.store, handle.sample_id, handle.ref, handle.handle_id))

    def abort(self, ref: SampleRef) -> None:
        """Free a sample whose ref never reached a queue, without reading it."""
        self._store("abort").abort(ref)

    def gc(self) -> int:
        """Free what nobody owns; it happens by itself, too. Returns how many samples that were."""
        return self._store("gc").gc()

    def health(self) -> StoreHealth:
        """Counters, against the marks that this store was made with."""
        counters = self._store("health").counters()
        used, samples = int(counters["resident_bytes"]), int(counters["resident_samples"])
        high, low = self._caps.get("high_watermark_bytes"), self._caps.get("low_watermark_bytes")
        return StoreHealth(used, self._caps.get("max_bytes", 0), samples, high is not None and used >= high, low is not None and used <= low)

    def close(self) -> None:
        """End the use of the store. Every later call but release raises RuntimeError. Tensors that were handed out stay valid. Idempotent."""
        if not self._closed:
            self._closed = True
            self._end()
            self._client.close()

    def _end(self) -> None:
        pass

    def _store(self, op: str) -> RunStore:
        if self._closed:
            raise ClosedError("the store is closed", op=op, subject=self._op)
        return self._run.store


class LocalFeatureStore(_PrivateStore):
    """A store of this process, in memory. One private service serves all of a process, and ends by itself after it.

    ``max_samples`` and ``max_bytes`` are hard caps, None for none; one of them must be set. Producers pause at ``high_watermark_bytes`` and go on at ``low_watermark_bytes``.
    """

    def __init__(
        self, max_samples: int | None = 64, max_bytes: int | None = 256 * 1024 * 1024, high_watermark_bytes: int | None = 192 * 1024 * 1024, low_watermark_bytes: int | None = 64 * 1024 * 1024,
    ) -> None:
        super().__init__(max_samples, max_bytes, high_watermark_bytes, low_watermark_bytes, op="LocalFeatureStore", key=None, run_id=f"local-{uuid.uuid4().hex}")

    def _end(self) -> None:
        with contextlib.suppress(NotFoundError, UnavailableError):  # what is in the memory of a service that is gone is gone
            self._client.delete_run(self._run.run_id)


class SharedDirFeatureStore(_PrivateStore):
    """A store in a directory, for all processes of this host that name it: they join one private service, which keeps its socket and journal elsewhere and ends 10 s after its last client.

    Samples are safetensors files, and stay when everybody has closed: the next one to open the directory finds them. The caps are those of whoever opened it first; who brings others is warned.
    """

    def __init__(
        self, directory: str, max_samples: int | None = 64, max_bytes: int | None = 256 * 1024 * 1024, high_watermark_bytes: int | None = 192 * 1024 * 1024,
        low_watermark_bytes: int | None = 64 * 1024 * 1024,
    ) -> None:
        os.makedirs(directory, mode=0o700, exist_ok=True)
        self.directory = os.path.realpath(directory)
        super().__init__(max_samples, max_bytes, high_watermark_bytes, low_watermark_bytes, op="SharedDirFeatureStore", key=self.directory, run_id="shared")

    def _open(self, run_id: str, caps: dict[str, int]) -> Run:
        try:
            return super()._open(run_id, caps)
        except SluiceError as e:
            if e.code not in ("duplicate", "conflict"):
                raise
            run = self._client.run(run_id)
            theirs = run.spec["caps"]
            other = [f"{k} is {theirs.get(k) or None}, not {caps.get(k)}" for k in ("max_samples", "max_bytes") if (theirs.get(k) or None) != caps.get(k)]
            if other:
                warnings.warn(f"{self.directory} is open with other caps, which count: {'; '.join(other)}", stacklevel=4)
            return run


def _caps(op: str, max_samples: int | None, max_bytes: int | None, high: int | None, low: int | None) -> dict[str, int]:
    given = {"max_samples": max_samples, "max_bytes": max_bytes, "high_watermark_bytes": high, "low_watermark_bytes": low}
    for name, value in given.items():
        least = 0 if name == "low_watermark_bytes" else 1
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
            raise InvalidError(f"is {value!r}, want an integer of at least {least}, or None", op=op, subject=name)
    if max_samples is None and max_bytes is None:
        raise InvalidError("are both None, want at least one of them", op=op, subject="max_samples and max_bytes")
    if high is not None and low is not None and low >= high:
        raise InvalidError(f"is {low}, want less than high_watermark_bytes ({high})", op=op, subject="low_watermark_bytes")
    if max_bytes is not None:
        # The reference's default marks ignore a smaller cap, and then never pause anybody.
        if high is not None and high > max_bytes:
            given["high_watermark_bytes"] = max(1, max_bytes * 3 // 4)
        if low is not None and low >= (given["high_watermark_bytes"] or max_bytes):
            given["low_watermark_bytes"] = max_bytes // 4
    return {name: value for name, value in given.items() if value is not None}


# -- queue -----------------------------------------------------------------------------------------------------------------


class SampleRefQueue:
    """The queue of a store, with leases, acks and fails. Safe to call from many threads, and from every process that has the store.

    ``visibility_timeout`` is how long a lease lives unless it is settled; 30 s by default. The marks, if given, take the place of the store's. ``on_pause`` and ``on_resume`` are called, outside
    every lock, when a producer in :meth:`put_blocks_until_below` begins to wait, and when it goes on.

    A store has one queue at a time: a second object is another door to it. Once it is closed and drained, a new one opens it again.
    """

    def __init__(
        self, store: FeatureStore, visibility_timeout: VisibilityTimeout | None = None, high_watermark_bytes: int | None = None, low_watermark_bytes: int | None = None,
        on_pause: Callable[[StoreHealth], None] | None = None, on_resume: Callable[[StoreHealth], None] | None = None,
    ) -> None:
        if high_watermark_bytes is not None and low_watermark_bytes is not None and low_watermark_bytes >= high_watermark_bytes:
            raise InvalidError(f"is {low_watermark_bytes}, want less than high_watermark_bytes ({high_watermark_bytes})", op="SampleRefQueue", subject="low_watermark_bytes")
        self._store = store
        self._run = _run_of(store)
        self._vt = visibility_timeout or VisibilityTimeout()
        self._on_pause, self._on_resume = on_pause, on_resume
        self._queue: RunQueue = self._run.queue
        self._consumer = Consumer(consumer_name("queue"))
        self._lock = threading.Lock()
        self._paused = False
        self._run.configure(visibility_timeout=self._vt.seconds, high_watermark_bytes=high_watermark_bytes, low_watermark_bytes=low_watermark_bytes, reopen=True)

    def put(self, ref: SampleRef) -> None:
        """Enqueue a ref, whatever the marks say. A repetition is no error. RuntimeError if the queue is closed, KeyError if the store has not the sample, ValueError for a ref of another store."""
        self._queue.put(ref)

    def put_blocks_until_below(self, ref: SampleRef, poll_interval: float = 0.05, abort_when: Callable[[], bool] | None = None) -> None:
        """Enqueue a ref, waiting while the store is above its marks; never while consumers have nothing. ``abort_when`` is asked every ``poll_interval`` seconds.

        RuntimeError if the queue is closed, or ``abort_when`` became true.
        """
        _positive("put_blocks_until_below", "poll_interval", poll_interval)
        try:
            self._queue.put_blocks_until_below(ref, timeout=0.0)
        except TimeoutError:
            self._turn(True)
            self._queue.put_blocks_until_below(ref, abort_when=abort_when, poll=poll_interval)
        self._turn(False)

    def _turn(self, paused: bool) -> None:
        with self._lock:
            changed, self._paused = self._paused != paused, paused
        call = self._on_pause if paused else self._on_resume
        if changed and call is not None:
            call(self._store.health())

    def acquire(self, poll_interval: float = 0.05) -> Lease | None:
        """Lease the next ref, waiting up to ``poll_interval`` seconds for it. None if there is none yet, or, when :attr:`is_closed`, no more.

        If the run was closed with a cause, as by a pipeline whose producer failed, that is raised behind the drain.
        """
        _positive("acquire", "poll_interval", poll_interval)
        return self._deliver(poll_interval)[0]

    def _deliver(self, seconds: float) -> tuple[Lease | None, bool]:
        """A lease, or none and whether that is the end."""
        delivery = self._queue.acquire(self._consumer, timeout=seconds)
        if delivery.leases:
            return delivery.leases[0], False
        if delivery.cause is not None:
            raise delivery.cause
        return None, delivery.end

    def ack(self, lease: Lease) -> None:
        """The sample was consumed: its bytes go when its handles are released. The ack of a lease that ran out changes nothing and is logged."""
        self._settle(lease, "ack", "")

    def fail(self, lease: Lease) -> None:
        """Give the ref back for another try, behind those that wait for their first. The fifth fail makes it a dead letter."""
        self._settle(lease, "fail", "failed by the consumer")

    def _settle(self, lease: Lease, verdict: str, reason: str) -> None:
        (result,) = self._queue.settle(self._consumer, [Settlement(lease.lease_id, verdict, reason)])
        if result.status == "stale":
            log.warning("%s of a stale lease of %s: it ran out, nothing was changed", verdict, lease.ref.sample_id)

    def _renew(self, lease: Lease) -> bool:
        return self._queue.renew(self._consumer, [lease])[0].status == "renewed"

    def reclaim_expired(self) -> int:
        """Take back leases that ran out. That happens by itself; this tells how many it were now."""
        return self._queue.reclaim_expired()

    def pending_count(self) -> int:
        return self._queue.pending_count()

    def outstanding_count(self) -> int:
        return self._queue.outstanding_count()

    def close(self, cause: str | BaseException | None = None) -> None:
        """End the puts. What is pending drains. A cause is raised to the consumers behind the drain."""
        self._queue.close(cause)

    @property
    def is_closed(self) -> bool:
        """Whether the queue is closed: then a None from :meth:`acquire` is the end."""
        return self._queue.is_closed


def _run_of(store: FeatureStore) -> Run:
    run = getattr(store, "_run", None)
    if not isinstance(run, Run):
        raise InvalidError(f"is a {type(store).__name__}, want a LocalFeatureStore or a SharedDirFeatureStore", op="SampleRefQueue", subject="store")
    return run


def _positive(op: str, name: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise InvalidError(f"is {value!r}, want a number of seconds above 0", op=op, subject=name)


# -- producer --------------------------------------------------------------------------------------------------------------


class Eagle3TargetBackend(Protocol):
    """What a producer needs of a target."""

    def generate_batch(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, loss_mask: torch.Tensor, **packing: torch.Tensor) -> Any: ...


class FeatureProducer:
    """Runs a target once a call, and puts its supervision into a store. One thread at a time drives it; many may share a store.

    ``target_backend`` has ``generate_batch(input_ids, attention_mask, loss_mask, ...)``, which returns an object with the fields of :class:`Eagle3TargetBatch`. ``sample_id_factory`` makes the ids;
    the default's are unique across processes and restarts, and hold the run id and the call's number.
    """

    def __init__(
        self, target_backend: Any, store: FeatureStore, run_id: str, algorithm: FeatureAlgorithm | None = None, target_model_version: str = "0", draft_weight_version: str = "0",
        sample_id_factory: Callable[[int], str] | None = None,
    ) -> None:
        if not callable(getattr(target_backend, "generate_batch", None)):
            raise InvalidError(f"is a {type(target_backend).__name__} without generate_batch()", op="FeatureProducer", subject="target_backend")
        self._backend, self._store, self._run_id = target_backend, store, run_id
        self._algorithm = algorithm if algorithm is not None else FeatureAlgorithm.EAGLE3
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
        """Run the target on one prompt batch ([B,S] tensors), and store what it says. The packing fields are all three or none.

        Raises MemoryError (over the cap: wait for the store to drain), ValueError (bad input; a batch without what the algorithm needs), and what the target raises.
        """
        return self._put(self._forward(input_ids, attention_mask, loss_mask, position_ids, seq_lens, doc_remaining), None)

    def _forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, loss_mask: torch.Tensor, position_ids: torch.Tensor | None, seq_lens: torch.Tensor | None, doc_remaining: torch.Tensor | None,
    ) -> dict[str, Tensor]:
        packing = {"position_ids": position_ids, "seq_lens": seq_lens, "doc_remaining": doc_remaining}
        given = {name: t for name, t in packing.items() if t is not None}
        if given and len(given) != 3:
            raise InvalidError(f"are given without {', '.join(sorted(packing.keys() - given.keys()))}, want all three or none", op="produce", subject=", ".join(given))
        for name, t in (("attention_mask", attention_mask), ("loss_mask", loss_mask), ("position_ids", position_ids), ("doc_remaining", doc_remaining)):
            if t is not None and tuple(t.shape) != tuple(input_ids.shape):
                raise InvalidError(f"has the shape {list(t.shape)}, input_ids has {list(input_ids.shape)}", op="produce", subject=name)
        if seq_lens is not None and (seq_lens.ndim != 2 or seq_lens.shape[0] != input_ids.shape[0]):
            raise InvalidError(f"has the shape {list(seq_lens.shape)}, want [B,docs] with B = {input_ids.shape[0]}", op="produce", subject="seq_lens")
        batch = self._backend.generate_batch(input_ids, attention_mask, loss_mask, **given)
        return {name: t for name in _FEATURES if (t := getattr(batch, name, None)) is not None}

    def _put(self, tensors: dict[str, Tensor], reservation: str | None) -> SampleRef:
        if self._algorithm is FeatureAlgorithm.EAGLE3:
            _check_supervision(tensors)
        mask = tensors.get("attention_mask", tensors.get("loss_mask"))
        if mask is None:
            raise InvalidError("has neither attention_mask nor loss_mask", op="produce", subject="the target's batch")
        n, self._sample_seq = self._sample_seq, self._sample_seq + 1
        more: dict[str, Any] = {"reservation": reservation} if reservation else {}
        ref = self._store.put(
            self._sample_id_factory(n), tensors, self._run_id, self._algorithm, 1, self._target_version, self._draft_version, int(mask.sum()), **more
        )
        if ids := int(tensors["input_ids"].shape[0] * tensors["input_ids"].shape[1]):
            self._bytes_per_token = ref.estimated_bytes / ids
        return ref

    def discard(self, ref: SampleRef) -> None:
        """Free a sample whose ref will not be enqueued, without reading it back."""
        if isinstance(self._store, (_PrivateStore, RunStore)):
            self._store.abort(ref)
            return
        with contextlib.suppress(KeyError):
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


def _check_supervision(tensors: Mapping[str, Tensor]) -> None:
    missing = [name for name in ("aux_hidden_states", "input_ids", "attention_mask", "loss_mask") if name not in tensors]
    if missing:
        raise InvalidError(f"lacks {', '.join(missing)}", op="produce", subject="the target's batch")
    if ("logits" in tensors) == ("target_probs" in tensors):
        raise InvalidError("wants exactly one of logits and target_probs", op="produce", subject="the target's batch")
    if ("target_probs" in tensors) != ("position_mask" in tensors):
        raise InvalidError("wants target_probs and position_mask together", op="produce", subject="the target's batch")


# -- pipeline --------------------------------------------------------------------------------------------------------------


class PromptSource(Protocol):
    """Supplies the next prompt batch: (input_ids, attention_mask, loss_mask), six fields when packed, or None when there are no more."""

    def __call__(self) -> PromptBatch | PackedPromptBatch | None: ...


class AsyncFeaturePipeline:
    """Runs a producer in a thread of its own, so that the target's forward and the draft's step overlap.

    Single use: start, then stop or join. When the source ends, or the producer fails, the queue is closed, with the failure as its cause; consumers get that behind the drain, and :meth:`stop` and
    :meth:`join` raise it. What was produced but not enqueued is taken out of the store again. Leases are the trainer's.
    """

    def __init__(
        self, producer: FeatureProducer, queue: SampleRefQueue, prompt_source: PromptSource | Iterator[PromptBatch | PackedPromptBatch | torch.Tensor], poll_interval: float = 0.1,
        stop_on_exhausted: bool = True,
    ) -> None:
        _positive("AsyncFeaturePipeline", "poll_interval", poll_interval)
        if not callable(prompt_source) and not hasattr(prompt_source, "__next__"):
            raise InvalidError(f"is a {type(prompt_source).__name__}, want a callable or an iterator", op="AsyncFeaturePipeline", subject="prompt_source")
        self._producer, self._queue = producer, queue
        self._poll_interval, self._stop_on_exhausted = poll_interval, stop_on_exhausted
        self._iterator: Iterator[Any] | None = None if callable(prompt_source) else prompt_source
        self._prompt_source: Callable[[], Any] = prompt_source if callable(prompt_source) else self._pull_from_iterator
        self._stop_event = threading.Event()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._lock = threading.Lock()

    def _pull_from_iterator(self) -> Any:
        assert self._iterator is not None
        return next(self._iterator, None)

    def start(self) -> None:
        """Start the thread. A second call while it runs does nothing; once it has ended, RuntimeError: a closed queue cannot be opened again by its pipeline."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="streaming-async-producer", daemon=True)
                self._thread.start()
            elif not self._thread.is_alive():
                raise ConflictError("a pipeline is for one use: its queue is closed. Make a new pipeline, and a new queue over the store", op="AsyncFeaturePipeline.start")

    def _run(self) -> None:
        try:
            while not self._stop_event.is_set():
                prompt = self._prompt_source()
                if prompt is None:
                    if self._stop_on_exhausted:
                        return
                    self._stop_event.wait(self._poll_interval)
                    continue
                self._one(_prompt(prompt))
        except BaseException as e:
            if not (self._stop_event.is_set() and isinstance(e, ClosedError)):
                self._error = e
        finally:
            with contextlib.suppress(ClosedError, NotFoundError):
                self._queue.close(self._error)

    def _one(self, prompt: tuple[torch.Tensor, ...]) -> None:
        room = self._reserve(int(self._producer._bytes_per_token * prompt[0].shape[0] * prompt[0].shape[1])) if isinstance(self._producer, FeatureProducer) else None
        try:
            if isinstance(self._producer, FeatureProducer):
                fields = list(prompt) + [None] * (6 - len(prompt))
                tensors = self._producer._forward(*fields)  # type: ignore[arg-type]
                nbytes = sum(int(t.numel() * t.element_size()) for t in cast("dict[str, Any]", tensors).values())
                if room is None or nbytes > room[1]:
                    room = self._exchange(room, nbytes)
                if room is None:
                    return  # stopped
                ref = self._producer._put(tensors, room[0])
            else:
                ref = self._producer.produce(*prompt)
            room = None
        finally:
            if room is not None:
                self._queue._queue.unreserve(room[0])
        try:
            self._queue.put_blocks_until_below(ref, abort_when=self._stop_event.is_set)
        except BaseException:
            with contextlib.suppress(ConflictError, KeyError):
                self._producer.discard(ref)
            if not self._stop_event.is_set():
                raise

    def _reserve(self, nbytes: int) -> tuple[str, int] | None:
        """Wait at the gate, before the target is run: for as many bytes as the last sample suggests."""
        if nbytes <= 0:
            return None
        try:
            r = self._queue._queue.reserve(nbytes, abort_when=self._stop_event.is_set)
        except FullError:
            return None  # the guess is larger than the cap; what the sample really has decides
        return r.id, r.bytes

    def _exchange(self, room: tuple[str, int] | None, nbytes: int) -> tuple[str, int] | None:
        if room is not None:
            self._queue._queue.unreserve(room[0])
        r = self._queue._queue.reserve(nbytes, abort_when=self._stop_event.is_set)
        return r.id, r.bytes

    def stop(self, join_timeout: float | None = 10.0) -> None:
        """Tell the thread to end, also where it waits at the gate, and join it. Raises what the thread failed with; RuntimeError if it did not end within ``join_timeout`` seconds."""
        self._stop_event.set()
        self._end(join_timeout)

    def join(self, timeout: float | None = None) -> None:
        """Wait for the thread to end by itself. Raises what it failed with."""
        self._end(timeout)

    def _end(self, timeout: float | None) -> None:
        if self._thread is not None:
            self._thread.join(timeout)
            if self._thread.is_alive():
                raise ConflictError(f"its thread did not end within {timeout} s: the target or the prompt source has not returned", op="AsyncFeaturePipeline")
        if self._error is not None:
            raise self._error

    def __enter__(self) -> AsyncFeaturePipeline:
        self.start()
        return self

    def __exit__(self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        try:
            self.stop()
        except BaseException:
            if exc is None:
                raise
            log.warning("the pipeline failed as well: %r", self._error)


def _prompt(item: Any) -> tuple[torch.Tensor, ...]:
    if hasattr(item, "shape"):
        import torch

        ones = torch.ones_like(item)
        return item, ones, ones.clone()
    fields = tuple(item) if isinstance(item, (tuple, list)) else ()
    if len(fields) not in (3, 6):
        what = f"has {len(fields)} fields" if fields else f"is a {type(item).__name__}"
        raise InvalidError(f"{what}, want (input_ids, attention_mask, loss_mask), six fields with position_ids, seq_lens and doc_remaining, or a tensor", op="prompt", subject="batch")
    if len(fields) == 6:
        rows, width = fields[0].shape
        if tuple(fields[3].shape) != (rows, width) or tuple(fields[5].shape) != (rows, width):
            raise InvalidError("position_ids, seq_lens and doc_remaining come in another order: the first and the last have the shape of input_ids", op="prompt", subject="batch")
        if int(fields[4].sum()) > rows * width or bool((fields[3] < 0).any()):
            raise InvalidError(f"holds lengths that add up to {int(fields[4].sum())}, there are {rows * width} tokens", op="prompt", subject="seq_lens")
    return fields


# -- loader ----------------------------------------------------------------------------------------------------------------


class FeatureDataLoader:
    """Iterates over :class:`Eagle3TargetBatch`, one sample each.

    A batch is acked on the next pull, by :meth:`consume_now`, or at a regular :meth:`close`; a ``with`` block that is left by an exception fails it. Its lease is renewed meanwhile. The
    iteration ends when the queue is closed and drained; if it was closed with a cause, that is raised. ``algorithm`` is what every ref is checked against; EAGLE-3 by default.
    """

    def __init__(self, queue: SampleRefQueue, store: FeatureStore, algorithm: FeatureAlgorithm | None = None, acquire_poll_interval: float = 0.05) -> None:
        _positive("FeatureDataLoader", "acquire_poll_interval", acquire_poll_interval)
        self._queue, self._store = queue, store
        self._algorithm = algorithm if algorithm is not None else FeatureAlgorithm.EAGLE3
        self._poll = acquire_poll_interval
        self._pending_handle: StoreHandle | None = None
        self._pending_lease: Lease | None = None
        self._closed = False
        self._checked: set[Any] = set()
        self._renewer: threading.Thread | None = None
        self._wake = threading.Event()
        self._lock = threading.Lock()

    def __iter__(self) -> FeatureDataLoader:
        return self

    def __next__(self) -> Eagle3TargetBatch:
        self._release_pending()
        while not self._closed:
            lease, end = self._queue._deliver(self._poll)
            if end:
                break
            if lease is None:
                continue
            try:
                self._check(lease.ref)
                tensors, handle = self._store.get(lease.ref)
                batch = Eagle3TargetBatch.from_sample(lease.ref, tensors)
            except BaseException:
                self._queue.fail(lease)
                raise
            self._hold(lease, handle)
            return batch
        raise StopIteration

    def _check(self, ref: SampleRef) -> None:
        if ref.algorithm != self._algorithm:
            raise InvalidError(f"is of {getattr(ref.algorithm, 'value', ref.algorithm)}, the loader is for {self._algorithm.value}", op="FeatureDataLoader", subject=ref.sample_id)
        alike = (ref.algorithm, ref.schema_version, tuple((name, spec.dtype_name, spec.shape) for name, spec in ref.feature_specs.items()), tuple(sorted(ref.attributes.items())))
        if alike not in self._checked:
            _run_of(self._store).client.check(ref, algorithm=self._algorithm.value)
            if len(self._checked) > 1000:
                self._checked.clear()
            self._checked.add(alike)

    def _hold(self, lease: Lease, handle: StoreHandle) -> None:
        with self._lock:
            self._pending_lease, self._pending_handle = lease, handle
        if self._renewer is None:
            self._renewer = threading.Thread(target=self._renew, name="sluice-renewer", daemon=True)
            self._renewer.start()

    def _renew(self) -> None:
        """Keep the batch's lease alive for as long as the trainer has it, 30 minutes at most."""
        last: Lease | None = None
        since = time.monotonic()
        while not self._wake.wait(self._queue._vt.seconds / 3):
            with self._lock:
                lease = self._pending_lease
            if lease is not last:
                last, since = lease, time.monotonic()
            if lease is None or time.monotonic() - since > 30 * 60:
                continue
            try:
                if not self._queue._renew(lease):
                    log.warning("the lease of %s ran out while the trainer had it: the sample will be trained on again", lease.ref.sample_id)
            except (UnavailableError, StaleError) as e:
                log.warning("the lease of %s could not be renewed: %s", lease.ref.sample_id, e)
            except ClosedError:
                return

    def _take(self) -> tuple[Lease | None, StoreHandle | None]:
        with self._lock:
            lease, handle = self._pending_lease, self._pending_handle
            self._pending_lease = self._pending_handle = None
        return lease, handle

    def _release_pending(self) -> None:
        lease, handle = self._take()
        if lease is not None and handle is not None:
            self._queue.ack(lease)
            self._store.release(handle)

    def consume_now(self) -> None:
        """Ack the batch that was yielded last, and release its memory, before the next pull. Idempotent."""
        self._release_pending()

    def close(self) -> None:
        """Ack the last batch and end the iteration. Idempotent."""
        self._end(None)

    def _end(self, error: BaseException | None) -> None:
        already, self._closed = self._closed, True
        self._wake.set()
        if self._renewer is not None:
            self._renewer.join(5)
        if error is None:
            self._release_pending()
            if not already:
                with contextlib.suppress(ClosedError, NotFoundError):
                    self._queue.close()
            return
        lease, handle = self._take()
        if lease is not None and handle is not None:
            self._queue.fail(lease)
            self._store.release(handle)

    def __enter__(self) -> FeatureDataLoader:
        return self

    def __exit__(self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self._end(exc)


__all__ = [
    "AsyncFeaturePipeline", "Eagle3TargetBackend", "Eagle3TargetBatch", "FeatureDataLoader", "FeatureProducer", "LocalFeatureStore", "PromptSource", "SampleRefQueue", "SharedDirFeatureStore",
]
