"""The trainers' side of Sluice: samples of a frozen target model, streamed to those who train a draft model.

    with sluice.connect("http://host:port", run="r1") as run:
        for batch in run.loader(batch=4):
            ...
            run.step()

The names of the reference API (NeMo AutoModel's ``speculative.streaming``) are here too, with the same signatures.
"""

from __future__ import annotations

import importlib
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
    from .collate import Batch, BatchSample, FinalNorm
    from .loader import Loader
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

_LAZY = {
    **dict.fromkeys(
        (
            "AsyncFeaturePipeline", "Eagle3TargetBackend", "Eagle3TargetBatch", "FeatureDataLoader", "FeatureProducer", "LocalFeatureStore", "PromptSource", "SampleRefQueue",
            "ServiceFeatureStore", "SharedDirFeatureStore",
        ), "reference",
    ),
    "Batch": "collate", "BatchSample": "collate", "FinalNorm": "collate", "Loader": "loader",
}


def __getattr__(name: str) -> Any:
    """What not every program needs is imported at its first use: collation and all is more than a producer elsewhere wants."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f".{_LAZY[name]}", __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})


__all__ = [
    "AbortedError", "AsyncFeaturePipeline", "Batch", "BatchSample", "Client", "ClosedError", "ConflictError", "Consumer", "CorruptError", "DeadLetter", "Delivery", "DeniedError", "DuplicateError",
    "Eagle3TargetBackend", "Eagle3TargetBatch", "FeatureAlgorithm", "FeatureDataLoader", "FeatureProducer", "FeatureSpec", "FeatureStore", "FinalNorm", "FullError", "InvalidError", "Lease",
    "Loader", "LocalClient", "LocalFeatureStore", "NoSpaceError", "NotFoundError", "Position", "Producer", "PromptSource", "Reservation", "Run", "RunQueue", "RunStore", "SampleRef",
    "SampleRefQueue", "SchemaError", "ServiceFeatureStore", "SettleResult", "Settlement", "SharedDirFeatureStore", "SluiceError", "StaleError", "StoreHandle", "StoreHealth", "TargetFaultError",
    "UnavailableError", "UnsupportedError", "VisibilityTimeout", "WaitTimeoutError", "WedgedError", "WindowSlot", "assert_no_tensors", "connect", "consumer_name", "local",
]
