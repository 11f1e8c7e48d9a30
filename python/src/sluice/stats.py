"""Figures of a run for a logger: what the loaders of this process did, and what the service says of the whole run."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from .answers import run_path
from .errors import SluiceError
from .transport import Transport, new_id

if TYPE_CHECKING:
    from .stream import Counts

STATUS_SECONDS = 2.0
"""How long figures wait for a service that does not answer."""
BOTTLENECKS = ("none", "the target", "the trainer", "balanced", "wedged", "a missing rank")
"""What the figure "bottleneck" counts: 0 nobody waits, 1 consumers wait for the target's samples, 2 producers wait for the trainer, 3 both wait alike, 4 nothing can move, 5 a
data-parallel rank has no consumer and the others wait. -1: not known."""
_RATE_SECONDS = 1.0  # over less than that a rate is noise


def bounded_status(transport: Transport, run_id: str) -> dict[str, Any]:
    """The run's status, by one attempt. Raises UnavailableError soon."""

    def once() -> dict[str, Any]:
        answer: dict[str, Any] = transport._attempt("GET", f"{run_path(run_id)}/status", None, new_id(), STATUS_SECONDS)
        return answer

    return transport.repeat(once, patience=0.0)


class Figures:
    """Makes the figures of one run. Rates are over the time between two calls, at least a second apart."""

    def __init__(self, transport: Transport, run_id: str) -> None:
        self._t, self._run_id = transport, run_id
        self._status: dict[str, Any] = {}
        self._at = 0.0
        self._base: tuple[float, float, float] | None = None
        self._rates = (0.0, 0.0)

    def status(self) -> dict[str, Any]:
        """The run's status, or the last that is known, with the reason under "unavailable"."""
        try:
            status = bounded_status(self._t, self._run_id)
        except SluiceError as e:
            return {**self._status, "unavailable": str(e)}
        if not status.get("unavailable"):
            self._status, self._at = status, time.monotonic()
        return status if not status.get("unavailable") else {**self._status, "unavailable": status["unavailable"]}

    def bottleneck(self) -> str:
        status = self.status()
        return f"not known: {status['unavailable']}" if status.get("unavailable") else str(status["bottleneck"])

    def figures(self, counts: Iterable[tuple[Counts, int]]) -> dict[str, float]:
        from .stream import Counts

        mine, held = Counts(), 0
        for c, n in counts:
            mine.add(c)
            held += n
        status = self.status()
        target, trainer = self._tokens(status)
        health = status.get("health", {})
        return {
            "wait_seconds": mine.wait_seconds,
            "fetch_seconds": mine.fetch_seconds,
            "fetch_gb_per_second": mine.bytes / mine.fetch_seconds / 1e9 if mine.fetch_seconds > 0 else 0.0,
            "collate_seconds": mine.collate_seconds,
            "batches": float(mine.batches),
            "samples": float(mine.samples),
            "tokens": float(mine.tokens),
            "supervised_tokens": float(mine.supervised_tokens),
            "pads": float(mine.pads),
            "redelivered": float(mine.redelivered),
            "skipped": float(mine.skipped),
            "acked": float(mine.acked),
            "stale": float(mine.stale),
            "lost": float(mine.lost),
            "held": float(held),
            "resident_bytes": float(health.get("resident_bytes", 0)),
            "resident_samples": float(health.get("resident_samples", 0)),
            "pending": float(status.get("pending", 0)),
            "outstanding": float(status.get("outstanding", 0)),
            "dead": float(status.get("dead", 0)),
            "target_tokens_per_second": target,
            "trainer_tokens_per_second": trainer,
            "producer_paused_seconds": float(status.get("producer_paused_seconds", 0)),
            "consumer_waited_seconds": float(status.get("consumer_waited_seconds", 0)),
            "bottleneck": -1.0 if status.get("unavailable") else bottleneck_number(str(status["bottleneck"])),
            "service_up": 0.0 if status.get("unavailable") else 1.0,
        }

    def _tokens(self, status: dict[str, Any]) -> tuple[float, float]:
        if not self._status or status.get("unavailable"):
            return 0.0, 0.0
        now, put, acked = self._at, float(status["tokens_put"]), float(status["tokens_acked"])
        if self._base is None:
            elapsed = float(status["elapsed_seconds"])
            self._rates = (put / elapsed, acked / elapsed) if elapsed > 0 else (0.0, 0.0)
            self._base = now, put, acked
        elif now - self._base[0] >= _RATE_SECONDS:
            seconds = now - self._base[0]
            self._rates = (put - self._base[1]) / seconds, (acked - self._base[2]) / seconds
            self._base = now, put, acked
        return self._rates


def bottleneck_number(sentence: str) -> float:
    """The number of a bottleneck's sentence, which begins with one of BOTTLENECKS and a colon."""
    head = sentence.partition(":")[0]
    return float(BOTTLENECKS.index(head)) if head in BOTTLENECKS else -1.0
