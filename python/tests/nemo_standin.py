"""A package with the interface of the reference API's page and the habits of its first implementation, to run Sluice's adapters under where NeMo AutoModel is not installed.

Its refs can be neither hashed nor pickled, its loader looks at no attribute, releases before it acks, and takes None of a closed queue for the end; its pipeline puts what it produced, and discards
it by get and release. All parameters that have a name on the page are keyword-only where AutoModel has them so.
"""

from __future__ import annotations

import abc
import enum
import itertools
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

_ids = itertools.count()


class FeatureAlgorithm(enum.Enum):
    EAGLE3 = "eagle3"
    DFLASH = "dflash"
    DSPARK = "dspark"


@dataclass(frozen=True)
class FeatureSpec:
    shape: tuple[int, ...]
    dtype: Any


@dataclass(frozen=True)
class SampleRef:
    sample_id: str
    run_id: str
    store_uri: str
    feature_keys: Mapping[str, str]
    feature_specs: Mapping[str, FeatureSpec]
    algorithm: FeatureAlgorithm
    schema_version: int
    num_tokens: int
    estimated_bytes: int
    target_model_version: str
    draft_weight_version: str

    def __post_init__(self) -> None:
        assert "://" in self.store_uri and isinstance(self.algorithm, FeatureAlgorithm)
        for name in ("feature_keys", "feature_specs"):
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))


class FeatureStore(abc.ABC):
    @abc.abstractmethod
    def put(
        self, sample_id: str, tensors: Any, *, run_id: str, algorithm: FeatureAlgorithm, schema_version: int, target_model_version: str, draft_weight_version: str, num_tokens: int
    ) -> SampleRef: ...

    @abc.abstractmethod
    def get(self, ref: SampleRef, device: Any = None) -> Any: ...

    @abc.abstractmethod
    def release(self, handle: StoreHandle) -> None: ...

    @abc.abstractmethod
    def gc(self) -> int: ...

    @abc.abstractmethod
    def health(self) -> StoreHealth: ...

    @abc.abstractmethod
    def close(self) -> None: ...


@dataclass(frozen=True)
class StoreHandle:
    store: FeatureStore
    sample_id: str
    ref: SampleRef
    handle_id: int = field(default_factory=lambda: next(_ids))


@dataclass(frozen=True)
class StoreHealth:
    resident_bytes: int
    capacity_bytes: int
    sample_count: int
    high_watermark_hit: bool
    low_watermark_hit: bool


@dataclass(frozen=True)
class VisibilityTimeout:
    seconds: float = 30.0


@dataclass(frozen=True)
class Lease:
    ref: SampleRef
    deadline: float
    visibility_timeout: VisibilityTimeout
    redelivery_count: int = 0
    lease_id: int = field(default_factory=lambda: next(_ids))


class FeatureProducer:
    def __init__(self, target_backend: Any, store: FeatureStore, *, run_id: str) -> None:
        self._target, self._store, self._run_id, self._n = target_backend, store, run_id, 0

    def produce(self, **fields: Any) -> SampleRef:
        tensors = self._target.generate_batch(**fields).tensors()
        self._n += 1
        ref = self._store.put(
            f"sample-{self._run_id}-{self._n}", tensors, run_id=self._run_id, algorithm=FeatureAlgorithm.EAGLE3, schema_version=1, target_model_version="0", draft_weight_version="0",
            num_tokens=int(fields["loss_mask"].sum()),
        )
        assert dict(ref.feature_specs) == {name: FeatureSpec(tuple(t.shape), t.dtype) for name, t in tensors.items()}
        return ref

    def discard(self, ref: SampleRef) -> None:
        self._store.release(self._store.get(ref)[1])


class AsyncFeaturePipeline:
    def __init__(self, producer: FeatureProducer, queue: Any, prompts: Any) -> None:
        self._producer, self._queue, self._prompts = producer, queue, prompts
        self._stop, self.error, self.thread = threading.Event(), None, threading.Thread(target=self._run, daemon=True)  # type: ignore[var-annotated]

    def _run(self) -> None:
        names = ("input_ids", "attention_mask", "loss_mask", "position_ids", "seq_lens", "doc_remaining")
        try:
            for prompt in self._prompts:
                ref = self._producer.produce(**dict(zip(names, prompt, strict=False)))
                try:
                    self._queue.put_blocks_until_below(ref, poll_interval=0.01, abort_when=self._stop.is_set)
                except RuntimeError as e:
                    self._producer.discard(ref)
                    if "aborted during shutdown" in str(e) or "closed while put was waiting" in str(e):
                        return
                    raise
        except BaseException as e:
            self.error = e
        finally:
            self._queue.close()

    def stop(self) -> None:
        self._stop.set()
        self.thread.join(30)
        assert not self.thread.is_alive()


class FeatureDataLoader:
    def __init__(self, queue: Any, store: FeatureStore) -> None:
        self._queue, self._store, self._lease, self._handle = queue, store, None, None

    def __iter__(self) -> FeatureDataLoader:
        return self

    def __next__(self) -> dict[str, Any]:
        self.settle()
        while (lease := self._queue.acquire()) is None:
            if self._queue.is_closed:
                raise StopIteration
            time.sleep(0.01)
        assert isinstance(lease, Lease) and lease.ref.algorithm is FeatureAlgorithm.EAGLE3
        tensors, self._handle = self._store.get(lease.ref)
        self._lease = lease
        got: dict[str, Any] = tensors
        return got

    def settle(self) -> None:
        if self._handle is not None:
            self._store.release(self._handle)
            self._queue.ack(self._lease)
            self._handle = self._lease = None
