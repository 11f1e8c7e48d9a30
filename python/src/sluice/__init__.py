"""The trainers' side of Sluice: samples of a frozen target model, streamed to those who train a draft model.

    with sluice.connect("http://host:port", run="r1") as run:
        for batch in run.loader(batch=4):
            ...
            run.step()

The names of the reference API (NeMo AutoModel's ``speculative.streaming``) are here too, with the same signatures.
"""

from __future__ import annotations

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

__version__ = "0.1.0"

__all__ = [
    "AbortedError", "Client", "ClosedError", "ConflictError", "Consumer", "CorruptError", "DeadLetter", "Delivery", "DeniedError", "DuplicateError", "FeatureAlgorithm", "FeatureSpec",
    "FeatureStore", "FullError", "InvalidError", "Lease", "NoSpaceError", "NotFoundError", "Position", "Producer", "Reservation", "Run", "RunQueue", "RunStore", "SampleRef", "SchemaError",
    "SettleResult", "Settlement", "SluiceError", "StaleError", "StoreHandle", "StoreHealth", "TargetFaultError", "UnavailableError", "UnsupportedError", "VisibilityTimeout", "WaitTimeoutError",
    "WedgedError", "WindowSlot", "assert_no_tensors", "connect", "consumer_name", "local", "LocalClient",
]
