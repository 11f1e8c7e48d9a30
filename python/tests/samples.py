"""Samples for tests of the loader."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

import sluice

ATTRIBUTES = {"shift": "0", "aux_layers": "hf:1,2,3", "last_norm": "post"}


def tensors(i: int, tokens: int = 6, hidden: int = 4) -> dict[str, np.ndarray[Any, Any]]:
    """An eagle3 sample whose every value says which it is."""
    return {
        "aux_hidden_states": np.full((1, tokens, 3 * hidden), i, np.float32), "input_ids": np.arange(1, tokens + 1, dtype=np.int64)[None] + 1000 * i,
        "attention_mask": np.ones((1, tokens), np.int64), "loss_mask": np.ones((1, tokens), np.int64), "last_hidden_states": np.full((1, tokens, hidden), i, np.float32),
    }


def put(run: sluice.Run, i: int, *, tokens: int = 6, hidden: int = 4, version: str = "0", **attributes: str) -> sluice.SampleRef:
    ref = run.store.put(f"s-{i}", tensors(i, tokens, hidden), target_model_version=version, attributes=ATTRIBUTES | attributes)
    run.queue.put(ref)
    return ref


def fill(run: sluice.Run, n: int, *, start: int = 0, close: bool = True, **more: Any) -> list[sluice.SampleRef]:
    refs = [put(run, i, **more) for i in range(start, start + n)]
    if close:
        run.queue.close()
    return refs


def ids(batch: Any) -> list[str]:
    return [s.ref.sample_id for s in batch.samples]


def wait_until(true: Callable[[], Any], what: str, seconds: float = 20.0) -> Any:
    """Bounded: what the other side does soon."""
    until = time.monotonic() + seconds
    while not (value := true()):
        assert time.monotonic() < until, f"waited {seconds} s for {what}"
        time.sleep(0.01)
    return value
