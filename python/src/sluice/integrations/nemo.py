"""NeMo AutoModel's own streaming classes on a Sluice service.

    from nemo_automodel.components.speculative.streaming import AsyncFeaturePipeline, FeatureDataLoader, FeatureProducer
    from sluice.integrations.nemo import SluiceFeatureStore, SluiceSampleRefQueue

    store = SluiceFeatureStore(sluice.SharedDirFeatureStore("/data/stream"))
    queue = SluiceSampleRefQueue(store)

The store is a FeatureStore of AutoModel's, the queue has the interface of its SampleRefQueue: its producer, pipeline, loader and trainer take them unchanged. Refs, specs, enum, leases, handles and
health go in and come out as AutoModel's own classes.

AutoModel's batches are shifted and look at no attribute that says so. What its producer puts says ``shift`` "1"; what comes from a producer of Sluice, unshifted, is shifted by
:meth:`SluiceFeatureStore.get`. AutoModel counts the padding of a packed row to its last document, Sluice to none: ``seq_lens`` is converted both ways.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlencode

import sluice

from ..collate import Collator, Sample
from ..errors import AbortedError, ClosedError, InvalidError, UnsupportedError
from ..reference import LeaseKeeper, SampleRefQueue, ServiceFeatureStore
from ..schema import builtin
from ..tensorfile import Tensor

try:
    from nemo_automodel.components.speculative import streaming as nemo
except ImportError as e:
    raise ImportError(f"sluice.integrations.nemo needs the streaming package of NeMo AutoModel (nemo_automodel), which can't be imported: {e}", name=e.name) from e

if TYPE_CHECKING:
    import torch

_GENERATION = "generation"
_ATTRIBUTE = "attribute."


def to_nemo(ref: sluice.SampleRef) -> Any:
    """AutoModel's ref of a ref. What AutoModel has no field for, generation and attributes, is in the key of the first feature, so that the ref finds its sample again however it was copied.

    Raises UnsupportedError for an algorithm that AutoModel has not.
    """
    algorithm = getattr(ref.algorithm, "value", ref.algorithm)
    if algorithm not in {a.value for a in nemo.FeatureAlgorithm}:
        raise UnsupportedError(f"is of {algorithm}, which NeMo AutoModel does not know", op="nemo", subject=ref.sample_id)
    said = urlencode([(_GENERATION, ref.generation), *((_ATTRIBUTE + name, value) for name, value in ref.attributes.items())])
    keys = dict(ref.feature_keys)
    first = ref.feature_names()[0]
    keys[first] = f"{keys[first]}#{said}"
    return nemo.SampleRef(
        sample_id=ref.sample_id, run_id=ref.run_id, store_uri=ref.store_uri, feature_keys=keys, feature_specs={n: nemo.FeatureSpec(shape=s.shape, dtype=s.dtype) for n, s in ref.feature_specs.items()},
        algorithm=nemo.FeatureAlgorithm(algorithm), schema_version=ref.schema_version, num_tokens=ref.num_tokens, estimated_bytes=ref.estimated_bytes,
        target_model_version=ref.target_model_version, draft_weight_version=ref.draft_weight_version,
    )


def from_nemo(ref: Any) -> sluice.SampleRef:
    """The ref of AutoModel's ref, which :func:`to_nemo` made. Raises InvalidError for another one: it does not say which put it means."""
    if not isinstance(ref, nemo.SampleRef):
        raise InvalidError(f"is a {type(ref).__name__}, want NeMo AutoModel's SampleRef", op="nemo", subject="ref")
    keys = dict(ref.feature_keys)
    first = next(iter(keys), "")
    keys[first], _, query = keys.get(first, "").rpartition("#")
    said = dict(parse_qsl(query, keep_blank_values=True))
    if _GENERATION not in said:
        raise InvalidError("is no ref of a Sluice store: it has no generation", op="nemo", subject=str(ref.sample_id))
    return sluice.SampleRef(
        ref.sample_id, ref.run_id, ref.store_uri, keys, {n: sluice.FeatureSpec(tuple(s.shape), s.dtype) for n, s in ref.feature_specs.items()}, sluice.FeatureAlgorithm(ref.algorithm.value),
        ref.schema_version, ref.num_tokens, ref.estimated_bytes, ref.target_model_version, ref.draft_weight_version, generation=said.pop(_GENERATION),
        attributes={name.removeprefix(_ATTRIBUTE): value for name, value in said.items()},
    )


class SluiceFeatureStore(nemo.FeatureStore):  # type: ignore[misc]
    """A FeatureStore of AutoModel's on a store of the reference API (:class:`sluice.LocalFeatureStore`, :class:`sluice.SharedDirFeatureStore`, :class:`sluice.ServiceFeatureStore`) or a run of any
    service, mixed or of an algorithm that AutoModel has."""

    def __init__(self, store: ServiceFeatureStore | sluice.Run) -> None:
        self._store = store if isinstance(store, ServiceFeatureStore) else ServiceFeatureStore(store)
        self._collators: dict[str, Collator] = {}
        self._handles: dict[int, sluice.StoreHandle] = {}
        self._lock = threading.Lock()

    @property
    def store_uri(self) -> str:
        return self._store.store_uri

    def put(
        self, sample_id: str, tensors: Mapping[str, Tensor], run_id: str, algorithm: Any = nemo.FeatureAlgorithm.EAGLE3, schema_version: int = 1, target_model_version: str = "0",
        draft_weight_version: str = "0", num_tokens: int = 0, *, attributes: Mapping[str, str] | None = None,
    ) -> Any:
        """As :meth:`sluice.ServiceFeatureStore.put`: its errors are those of AutoModel's stores. Returns AutoModel's SampleRef."""
        if not isinstance(algorithm, nemo.FeatureAlgorithm):
            raise InvalidError(f"is {algorithm!r:.80}, want NeMo AutoModel's FeatureAlgorithm", op="put", subject="algorithm")
        if isinstance(tensors, Mapping):
            tensors = _unfolded(tensors)
        return to_nemo(self._store.put(
            sample_id, tensors, run_id, sluice.FeatureAlgorithm(algorithm.value), schema_version, target_model_version, draft_weight_version, num_tokens, attributes=attributes,
        ))

    def get(self, ref: Any, device: torch.device | str | None = None) -> tuple[dict[str, Tensor], Any]:
        """As :meth:`sluice.ServiceFeatureStore.get`, shifted and with the padding of packed rows as AutoModel has it. Returns AutoModel's StoreHandle. They are copies where tensors that are kept for
        long would leave no room for another sample."""
        ours = from_nemo(ref)
        tensors, handle = self._store.get(ours, device)
        try:
            tensors = _folded(self._shifted(ours, tensors))
            if not self._store._may_keep(ours):
                tensors = {name: t.copy() if not hasattr(t, "clone") else t.clone() for name, t in tensors.items()}
            theirs = nemo.StoreHandle(store=self, sample_id=ref.sample_id, ref=ref)
        except BaseException:
            self._store.release(handle)
            raise
        with self._lock:
            self._handles[theirs.handle_id] = handle
        return tensors, theirs

    def _shifted(self, ref: sluice.SampleRef, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        schema = builtin(str(getattr(ref.algorithm, "value", ref.algorithm)))
        if not schema.shifts or ref.attributes.get("shift") == "1":
            return tensors
        collator = self._collators.setdefault(schema.name, Collator(schema, "pad"))
        return collator([Sample(ref, tensors)]).tensors

    def release(self, handle: Any) -> None:
        """Give up a pin. Idempotent; a handle of another store is passed over."""
        if not isinstance(handle, nemo.StoreHandle):
            raise InvalidError(f"is a {type(handle).__name__}, want NeMo AutoModel's StoreHandle", op="release", subject="handle")
        if handle.store is self:
            with self._lock:
                ours = self._handles.get(handle.handle_id)
                if ours is None or ours.sample_id != handle.sample_id:
                    return
                del self._handles[handle.handle_id]
            self._store.release(ours)

    def abort(self, ref: Any) -> None:
        """Free a sample whose ref never reached a queue, without reading it."""
        self._store.abort(from_nemo(ref))

    def gc(self) -> int:
        return self._store.gc()

    def health(self) -> Any:
        return _health(self._store.health())

    def close(self) -> None:
        """End the use of the store. Idempotent."""
        self._store.close()


class SluiceSampleRefQueue:
    """The queue of a :class:`SluiceFeatureStore`, with the interface of AutoModel's SampleRefQueue: see :class:`sluice.SampleRefQueue`, whose arguments and errors it has.

    AutoModel's loader renews no lease, and here leases run out by themselves. So a lease is renewed for as long as its object is referenced and not settled, 30 minutes at most, unless
    ``renew`` is False.
    """

    def __init__(
        self, store: SluiceFeatureStore, visibility_timeout: Any = None, high_watermark_bytes: int | None = None, low_watermark_bytes: int | None = None,
        on_pause: Callable[[Any], None] | None = None, on_resume: Callable[[Any], None] | None = None, *, renew: bool = True,
    ) -> None:
        if not isinstance(store, SluiceFeatureStore):
            raise InvalidError(f"is a {type(store).__name__}, want a SluiceFeatureStore", op="SluiceSampleRefQueue", subject="store")
        if visibility_timeout is not None and not isinstance(visibility_timeout, nemo.VisibilityTimeout):
            raise InvalidError(f"is {visibility_timeout!r:.80}, want NeMo AutoModel's VisibilityTimeout", op="SluiceSampleRefQueue", subject="visibility_timeout")
        timeout = None if visibility_timeout is None else sluice.VisibilityTimeout(visibility_timeout.seconds)
        self._queue = SampleRefQueue(store._store, timeout, high_watermark_bytes, low_watermark_bytes, _told(on_pause), _told(on_resume))
        self._timeout = nemo.VisibilityTimeout(seconds=self._queue._vt.seconds)
        self._keeper = LeaseKeeper(self._queue) if renew else None

    def put(self, ref: Any) -> None:
        self._queue.put(from_nemo(ref))

    def put_blocks_until_below(self, ref: Any, poll_interval: float = 0.05, abort_when: Callable[[], bool] | None = None) -> None:
        try:
            self._queue.put_blocks_until_below(from_nemo(ref), poll_interval, abort_when)
        except AbortedError as e:
            # AutoModel's pipeline knows by these words, here and below, that it was stopped, and did not fail.
            raise AbortedError(f"aborted during shutdown: {e.detail}", op=e.op, subject=e.subject) from e
        except ClosedError as e:
            raise ClosedError(f"closed while put was waiting: {e.detail}", op=e.op, subject=e.subject) from e

    def acquire(self, poll_interval: float = 0.05) -> Any:
        """AutoModel's Lease, or None: see :meth:`sluice.SampleRefQueue.acquire`."""
        ours = self._queue.acquire(poll_interval)
        if ours is None:
            if self._keeper is not None:
                self._keeper.rest()
            return None
        lease = nemo.Lease(ref=to_nemo(ours.ref), deadline=ours.deadline, visibility_timeout=self._timeout, redelivery_count=ours.redelivery_count, lease_id=ours.lease_id)
        object.__setattr__(lease, "_sluice", ours)  # it is frozen, and has no field for it
        if self._keeper is not None:
            self._keeper.keep(lease, ours)
        return lease

    def ack(self, lease: Any) -> None:
        self._queue.ack(self._settled("ack", lease))

    def fail(self, lease: Any) -> None:
        self._queue.fail(self._settled("fail", lease))

    def _settled(self, op: str, lease: Any) -> sluice.Lease:
        ours = getattr(lease, "_sluice", None)
        if not isinstance(ours, sluice.Lease):
            raise InvalidError(f"is a {type(lease).__name__} that this queue has not given", op=op, subject="lease")
        if self._keeper is not None:
            self._keeper.drop(ours.lease_id)
        return ours

    def reclaim_expired(self) -> int:
        return self._queue.reclaim_expired()

    def pending_count(self) -> int:
        return self._queue.pending_count()

    def outstanding_count(self) -> int:
        return self._queue.outstanding_count()

    def close(self) -> None:
        self._queue.close()

    @property
    def is_closed(self) -> bool:
        return self._queue.is_closed


def _told(call: Callable[[Any], None] | None) -> Callable[[sluice.StoreHealth], None] | None:
    if call is None or not callable(call):
        return call  # which the queue refuses by name
    return lambda health: call(_health(health))


def _health(health: sluice.StoreHealth) -> Any:
    return nemo.StoreHealth(**dataclasses.asdict(health))


def _unfolded(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """seq_lens without the padding of a row, which AutoModel counts to its last document."""
    lengths, mask = tensors.get("seq_lens"), tensors.get("attention_mask")
    if lengths is None or mask is None or len(lengths.shape) != 2 or len(mask.shape) != 2 or len(lengths) != len(mask):
        return tensors
    beyond = lengths.cumsum(1) - mask.sum(1)[:, None]
    return {**tensors, "seq_lens": (lengths - beyond.clip(min=0)).clip(min=0)}


def _folded(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """And with it again: AutoModel wants the lengths of a row to add up to the row."""
    lengths = tensors.get("seq_lens")
    if lengths is None or "input_ids" not in tensors:
        return tensors
    width = int(tensors["input_ids"].shape[1])
    for row in lengths:
        documents = [i for i, n in enumerate(row.tolist()) if n > 0]
        row[documents[-1] if documents else 0] += width - int(row.sum())
    return tensors
