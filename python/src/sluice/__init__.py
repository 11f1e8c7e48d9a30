"""The trainers' side of Sluice: samples of a frozen target model, streamed to those who train a draft model.

    with sluice.connect("http://host:port", run="r1") as run:
        for batch in run.loader(batch=4):
            ...
            run.step()

The names of the reference API (NeMo AutoModel's ``speculative.streaming``) are here too, with the same signatures.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .client import Client, Run, connect, consumer_name
from .errors import (
    AbortedError,
    ClosedError,
    ConflictError,
    CorruptError,
    DeniedError,
    DuplicateError,
    FullError,
    InvalidError,
    NoSpaceError,
    NotFoundError,
    SchemaError,
    SluiceError,
    StaleError,
    TargetFaultError,
    UnavailableError,
    UnsupportedError,
    WaitTimeoutError,
    WedgedError,
)
from .producer import Producer
from .queue import Consumer, DeadLetter, Delivery, Lease, Position, Reservation, RunQueue, Settlement, SettleResult, VisibilityTimeout, WindowSlot
from .refs import FeatureAlgorithm, FeatureSpec, SampleRef, assert_no_tensors
from .service import LocalClient, local
from .store import FeatureStore, RunStore, StoreHandle, StoreHealth

if TYPE_CHECKING:
    from .batches import Eagle3TargetBatch
    from .reference import (
        AsyncFeaturePipeline,
        Eagle3TargetBackend,
        FeatureDataLoader,
        FeatureProducer,
        LocalFeatureStore,
        PromptSource,
        SampleRefQueue,
        ServiceFeatureStore,
        SharedDirFeatureStore,
    )

__version__ = "0.1.0"

_REFERENCE = {
    "AsyncFeaturePipeline", "Eagle3TargetBackend", "Eagle3TargetBatch", "FeatureDataLoader", "FeatureProducer", "LocalFeatureStore", "PromptSource", "SampleRefQueue", "ServiceFeatureStore",
    "SharedDirFeatureStore",
}


def __getattr__(name: str) -> Any:
    """The classes of the reference API, imported at their first use: collation and all is more than a producer elsewhere needs."""
    if name not in _REFERENCE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import reference

    value = globals()[name] = getattr(reference, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_REFERENCE})


__all__ = [
    "AsyncFeaturePipeline", "Eagle3TargetBackend", "Eagle3TargetBatch", "FeatureDataLoader", "FeatureProducer", "LocalFeatureStore", "PromptSource", "SampleRefQueue", "ServiceFeatureStore",
    "SharedDirFeatureStore",
    "AbortedError", "Client", "ClosedError", "ConflictError", "Consumer", "CorruptError", "DeadLetter", "Delivery", "DeniedError", "DuplicateError", "FeatureAlgorithm", "FeatureSpec",
    "FeatureStore", "FullError", "InvalidError", "Lease", "NoSpaceError", "NotFoundError", "Position", "Producer", "Reservation", "Run", "RunQueue", "RunStore", "SampleRef", "SchemaError",
    "SettleResult", "Settlement", "SluiceError", "StaleError", "StoreHandle", "StoreHealth", "TargetFaultError", "UnavailableError", "UnsupportedError", "VisibilityTimeout", "WaitTimeoutError",
    "WedgedError", "WindowSlot", "assert_no_tensors", "connect", "consumer_name", "local", "LocalClient",
]
