"""The queue of a run, through a real service."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest

import sluice
from sluice.queue import Consumer, Position, Settlement, raise_stale
from sluice.transport import Cancel, Cancelled

from .test_store import SCHEMA, sample

NBYTES = 3 * 4 * 4 + 3 * 8


@pytest.fixture
def run(client: sluice.Client, run_id: str) -> Any:
    with client.create_run(run_id, schema=SCHEMA, max_bytes=64 << 20, visibility_timeout=30) as r:
        yield r
    client.delete_run(run_id)


def put(run: sluice.Run, *ids: str) -> list[sluice.SampleRef]:
    refs = [run.store.put(i, sample(), num_tokens=3) for i in ids]
    assert set(run.queue.put_many([(ref, ()) for ref in refs])) <= {"enqueued", "already"}  # the latter if an answer was lost
    return refs


def test_first_deliveries_in_put_order(run: sluice.Run) -> None:
    refs = put(run, "a", "b", "c")
    leases = run.queue.acquire(Consumer("x"), max=10, timeout=5).leases
    assert [lease.ref for lease in leases] == refs
    assert (run.queue.pending_count(), run.queue.outstanding_count()) == (0, 3)
    assert all(0 < lease.deadline - time.monotonic() <= 30 for lease in leases)
    run.queue.ack(Consumer("x"), *leases)
    assert run.queue.outstanding_count() == 0


def test_an_empty_queue_is_not_the_end_and_a_closed_one_is(run: sluice.Run) -> None:
    nothing = run.queue.acquire(Consumer("x"), timeout=0)
    assert nothing == sluice.Delivery()
    run.queue.close()
    assert run.queue.is_closed
    assert run.queue.acquire(Consumer("x"), timeout=5).end
    with pytest.raises(RuntimeError):
        run.queue.put(run.store.put("late", sample(), num_tokens=3))


def test_a_cause_comes_behind_the_drain(run: sluice.Run) -> None:
    put(run, "a")
    run.queue.close(RuntimeError("the target fell over"))
    (lease,) = run.queue.acquire(Consumer("x"), timeout=5).leases
    run.queue.ack(Consumer("x"), lease)
    end = run.queue.acquire(Consumer("x"), timeout=5)
    assert end.end and end.cause is not None and "the target fell over" in str(end.cause)


def test_a_put_wakes_a_waiting_acquire(run: sluice.Run) -> None:
    ref = run.store.put("a", sample(), num_tokens=3)
    later = threading.Timer(0.2, lambda: run.queue.put(ref))
    later.start()
    began = time.monotonic()
    assert run.queue.acquire(Consumer("x"), timeout=20).leases[0].ref == ref
    assert time.monotonic() - began < 10
    later.join(20)


def test_settling_twice_and_stale(run: sluice.Run) -> None:
    put(run, "a", "b")
    a, b = run.queue.acquire(Consumer("x"), max=2, timeout=5).leases
    assert [r.status for r in run.queue.ack(Consumer("x"), a)] == ["settled"]
    (again,) = run.queue.settle(Consumer("x"), [Settlement(a.lease_id, "fail", "too late")])
    assert (again.status, again.as_) == ("already_settled", "ack")
    stranger = run.queue.settle(Consumer("y"), [Settlement(b.lease_id, "ack"), Settlement(12345, "ack")])
    assert [r.status for r in stranger] == ["stale", "stale"]
    with pytest.raises(sluice.StaleError):
        raise_stale(stranger, "ack")
    assert run.queue.outstanding_count() == 1


def test_fail_comes_back_behind_and_dies_at_its_budget(run: sluice.Run, repeated: bool) -> None:
    put(run, "a")
    for n in range(5):
        (lease,) = run.queue.acquire(Consumer("x"), timeout=5).leases
        assert lease.redelivery_count == n
        (result,) = run.queue.settle(Consumer("x"), [Settlement(lease.lease_id, "fail", f"reason {n}")])
    assert result.dead
    (dead,) = run.queue.dead_letters()
    assert dead.ref.sample_id == "a" and dead.reasons[-1] == "reason 4" and dead.fails == 5
    assert run.queue.requeue("a", "nobody") == (0 if repeated else 1)
    (lease,) = run.queue.acquire(Consumer("x"), timeout=5).leases
    run.queue.settle(Consumer("x"), [Settlement(lease.lease_id, "fail_permanent", "hopeless")])
    assert run.queue.drop("a") == (0 if repeated else 1)
    assert run.store.counters()["resident_bytes"] == 0


def test_a_return_counts_nothing_and_comes_first(run: sluice.Run) -> None:
    put(run, "a", "b")
    (lease,) = run.queue.acquire(Consumer("x"), timeout=5).leases
    run.queue.settle(Consumer("x"), [Settlement(lease.lease_id, "return")])
    (again,) = run.queue.acquire(Consumer("x"), timeout=5).leases
    assert again.ref.sample_id == "a"
    run.queue.leave(Consumer("x"))
    assert run.queue.outstanding_count() == 0


def test_leases_run_out_by_themselves_unless_renewed(client: sluice.Client, run_id: str) -> None:
    run = client.create_run(run_id, schema=SCHEMA, max_bytes=64 << 20, visibility_timeout=0.6)
    put(run, "kept", "lost")
    kept, lost = run.queue.acquire(Consumer("x"), max=2, timeout=5).leases
    stop = time.monotonic() + 1.5
    while time.monotonic() < stop:
        assert [r.status for r in run.queue.renew(Consumer("x"), [kept])] == ["renewed"]
        time.sleep(0.1)
    (again,) = run.queue.acquire(Consumer("y"), timeout=5).leases
    assert again.ref == lost.ref
    assert [r.status for r in run.queue.ack(Consumer("x"), kept, lost)] == ["settled", "stale"]


def test_a_newer_incarnation_takes_over(run: sluice.Run) -> None:
    put(run, "a")
    (old,) = run.queue.acquire(Consumer("x", 1), timeout=5).leases
    (new,) = run.queue.acquire(Consumer("x", 2), timeout=5).leases
    assert new.ref == old.ref
    with pytest.raises(sluice.StaleError):
        run.queue.acquire(Consumer("x", 1), timeout=0)
    assert [r.status for r in run.queue.ack(Consumer("x", 2), new)] == ["settled"]


def test_a_cancelled_acquire_gives_back_what_it_was_given(run: sluice.Run) -> None:
    cancel = Cancel()
    threading.Timer(0.2, cancel.cancel).start()
    with pytest.raises(Cancelled):
        run.queue.acquire(Consumer("x"), timeout=30, cancel=cancel)
    put(run, "a")
    (lease,) = run.queue.acquire(Consumer("y"), timeout=5).leases
    run.queue.ack(Consumer("y"), lease)


def test_the_gate_makes_producers_wait_and_says_when_it_gave_up(client: sluice.Client, run_id: str, repeated: bool) -> None:
    run = client.create_run(run_id, schema=SCHEMA, max_bytes=4 * NBYTES, high_watermark_bytes=2 * NBYTES, low_watermark_bytes=NBYTES)
    put(run, "a", "b")
    with pytest.raises(TimeoutError, match="no room"):
        run.queue.reserve(NBYTES, timeout=0.2)
    tries = iter(range(3))
    with pytest.raises(sluice.AbortedError):
        run.queue.reserve(NBYTES, abort_when=lambda: next(tries, None) is None)
    with pytest.raises(sluice.FullError):
        run.queue.reserve(5 * NBYTES, timeout=5)
    leases = run.queue.acquire(Consumer("x"), max=2, timeout=5).leases
    later = threading.Timer(0.2, lambda: run.queue.ack(Consumer("x"), *leases))
    later.start()
    room = run.queue.reserve(NBYTES, timeout=20)
    later.join(20)
    ref = run.store.put("c", sample(), num_tokens=3, reservation=room.id)
    assert run.queue.put(ref) == ("already" if repeated else "enqueued")
    assert run.store.counters()["reserved_bytes"] == 0
    other = run.queue.reserve(NBYTES, timeout=5)
    run.queue.unreserve(other.id, other.id)
    assert run.store.counters()["reserved_bytes"] == 0


def test_put_blocks_until_below(client: sluice.Client, run_id: str, repeated: bool) -> None:
    run = client.create_run(run_id, schema=SCHEMA, max_bytes=4 * NBYTES, high_watermark_bytes=2 * NBYTES, low_watermark_bytes=NBYTES)
    put(run, "a", "b")
    ref = run.store.put("c", sample(), num_tokens=3)
    with pytest.raises(TimeoutError):
        run.queue.put_blocks_until_below(ref, timeout=0.2)
    with pytest.raises(RuntimeError, match="abort_when"):
        run.queue.put_blocks_until_below(ref, abort_when=lambda: True)
    leases = run.queue.acquire(Consumer("x"), max=2, timeout=5).leases
    later = threading.Timer(0.2, lambda: run.queue.ack(Consumer("x"), *leases))
    later.start()
    assert run.queue.put_blocks_until_below(ref, timeout=20) == ("already" if repeated else "enqueued")
    later.join(20)
    assert run.queue.put_blocks_until_below(ref, timeout=20) == "already"


def test_positions_tell_what_was_taken(run: sluice.Run) -> None:
    for i in (0, 1, 5):
        run.queue.put(run.store.put(f"s{i}", sample(), num_tokens=3), positions=[Position("prompts", 0, i)])
    assert run.queue.taken("prompts") == {0: [(0, 2), (5, 6)]}
    assert run.queue.taken("others") == {}


def test_named_producers_end_the_run(run: sluice.Run) -> None:
    run.queue.report(("p", 1), "running")
    put(run, "a")
    run.queue.report(("p", 1), "done")
    (lease,) = run.queue.acquire(Consumer("x"), timeout=5).leases
    run.queue.ack(Consumer("x"), lease)
    end = run.queue.acquire(Consumer("x"), timeout=5)
    assert end.end and end.cause is None


def test_a_failed_producer_is_the_cause(run: sluice.Run) -> None:
    run.queue.report(("p", 1), "running")
    run.queue.report(("p", 1), "failed", "out of memory")
    end = run.queue.acquire(Consumer("x"), timeout=5)
    assert end.end and "out of memory" in str(end.cause)


def test_windows_deal_equal_shares(client: sluice.Client, run_id: str) -> None:
    run = client.create_run(run_id, schema=SCHEMA, max_bytes=64 << 20, ranks=2, per_rank=2, largest_sample=1 << 10)
    put(run, "a", "b", "c", "d")
    for rank in (0, 1):
        leases = run.queue.acquire(Consumer(f"r{rank}", rank=rank), max=4, timeout=5).leases
        assert [(lease.window.number, lease.window.rank, lease.window.slot) for lease in leases if lease.window] == [(0, rank, 0), (0, rank, 1)]
        assert {lease.window.tokens for lease in leases if lease.window} == {12}


@pytest.mark.parametrize("seconds", [0, -1, float("inf"), float("nan"), True, "30"])
def test_a_visibility_timeout_is_a_positive_number(seconds: Any) -> None:
    with pytest.raises(ValueError, match="seconds"):
        sluice.VisibilityTimeout(seconds)


@pytest.mark.parametrize(
    ("spec", "says"), [
        ({}, "caps"), ({"max_bytes": -1}, "max_bytes"), ({"max_bytes": 100, "high_watermark_bytes": 200}, "high_watermark"), ({"max_bytes": 100, "visibility_timeout": -1}, "visibility_timeout"),
        ({"max_bytes": 100, "algorithm": "eagle3"}, "both algorithm and schema"),
    ],
)
def test_a_bad_run_is_refused_by_field(client: sluice.Client, run_id: str, spec: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError) as caught:
        client.create_run(run_id, **({"schema": SCHEMA} | spec))
    assert says in str(caught.value)


def test_an_unknown_algorithm_is_not_found(client: sluice.Client, run_id: str) -> None:
    with pytest.raises(KeyError, match="eagle9"):
        client.create_run(run_id, algorithm="eagle9", max_bytes=100)


def test_a_run_is_joined_and_not_changed(client: sluice.Client, run_id: str) -> None:
    client.create_run(run_id, schema=SCHEMA, max_bytes=1 << 20)
    client.create_run(run_id, schema=SCHEMA, max_bytes=1 << 20)
    with pytest.raises(sluice.SluiceError, match="max_bytes") as caught:
        client.create_run(run_id, schema=SCHEMA, max_bytes=2 << 20)
    assert caught.value.code in ("conflict", "duplicate")
    assert run_id in client.runs()
    client.delete_run(run_id)
    with pytest.raises(KeyError):
        client.run(run_id)


def test_no_thread_is_needed_by_hand(service: Any, run_id: str) -> None:
    """The short way: connect makes the run, and its with block ends all."""
    with sluice.connect(service.socket, run=run_id, create={"schema": SCHEMA, "max_bytes": 1 << 20}) as run:
        put(run, "a")
        (lease,) = run.queue.acquire(Consumer("x"), timeout=5).leases
        assert isinstance(np.asarray(run.store.get(lease.ref)[0]["input_ids"]), np.ndarray)
    with sluice.connect(service.socket, run=run_id) as run:  # the session's leases came back with its end
        (again,) = run.queue.acquire(Consumer("y"), timeout=5).leases
        assert again.ref == lease.ref
        run.queue.ack(Consumer("y"), again)
