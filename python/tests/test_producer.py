"""A named producer, through a real service."""

from __future__ import annotations

import threading
from typing import Any

import pytest

import sluice
from sluice.queue import Consumer, Position

from .test_admission import ATTRIBUTES, eagle3
from .test_queue import NBYTES
from .test_store import SCHEMA, sample


@pytest.fixture
def run(client: sluice.Client, run_id: str) -> Any:
    with client.create_run(run_id, schema=SCHEMA, max_bytes=4 * NBYTES, high_watermark_bytes=2 * NBYTES, low_watermark_bytes=NBYTES) as r:
        yield r
    client.delete_run(run_id)


def drain(run: sluice.Run) -> tuple[list[str], sluice.SluiceError | None]:
    ids: list[str] = []
    while True:
        delivery = run.queue.acquire(Consumer("x"), max=8, timeout=20)
        if delivery.end:
            return ids, delivery.cause
        assert delivery.leases, "nothing came within 20 s"
        ids += [lease.ref.sample_id for lease in delivery.leases]
        run.queue.ack(Consumer("x"), *delivery.leases)


def test_more_than_the_cap_flows_through_and_the_run_ends(run: sluice.Run) -> None:
    def produce() -> None:
        with run.producer("p") as p:
            for i in range(20):
                p.put(f"s{i}", sample(), num_tokens=3, positions=[Position("prompts", 0, i)], timeout=20)

    thread = threading.Thread(target=produce)
    thread.start()
    ids, cause = drain(run)
    thread.join(20)
    assert ids == [f"s{i}" for i in range(20)] and cause is None
    assert run.producer("p").taken("prompts") == {0: [(0, 20)]}
    counters = run.store.counters()
    assert counters["resident_bytes"] == counters["reserved_bytes"] == 0


def test_an_exception_reaches_the_consumers(run: sluice.Run) -> None:
    with pytest.raises(RuntimeError), run.producer("p") as p:
        p.put("s", sample(), num_tokens=3)
        raise RuntimeError("out of prompts")
    ids, cause = drain(run)
    assert ids == ["s"] and cause is not None and "out of prompts" in str(cause)


def test_a_reservation_made_before_the_forward_is_used_or_changed(run: sluice.Run) -> None:
    with run.producer("p") as p:
        room = p.reserve(NBYTES, timeout=5)
        p.put("exact", sample(), num_tokens=3, reservation=room)
        assert run.store.counters()["reserved_bytes"] == 0
        run.queue.ack(Consumer("x"), *run.queue.acquire(Consumer("x"), timeout=5).leases)
        small = p.reserve(1, timeout=5)
        p.put("larger", sample(), num_tokens=3, reservation=small, timeout=5)
        assert run.store.counters()["reserved_bytes"] == 0


def test_a_refused_put_leaves_nothing(run: sluice.Run) -> None:
    with run.producer("p") as p:
        p.put("s", sample(), num_tokens=3)
        with pytest.raises(ValueError, match="s"):
            p.put("s", sample(), num_tokens=3)
        with pytest.raises(ValueError, match="shape|schema|axes|hidden_states"):
            p.put("t", {"input_ids": sample()["input_ids"]}, num_tokens=3)
        counters = run.store.counters()
        assert (counters["resident_samples"], counters["reserved_bytes"]) == (1, 0)


def test_what_the_schema_does_not_admit_is_refused_before_anything_is_sent(client: sluice.Client, run_id: str) -> None:
    run = client.create_run(run_id, algorithm="eagle3", max_bytes=1 << 20)
    with run.producer("p") as p:
        for name, n, why in (("empty", 0, "without a token"), ("short", 1, "has 1 tokens, eagle3 admits 2 or more")):
            room = p.reserve(1 << 10, timeout=5)
            with pytest.raises(sluice.SchemaError, match=why) as caught:
                p.put(name, eagle3(n), attributes=ATTRIBUTES, reservation=room)
            assert caught.value.subject == name
        counters = run.store.counters()
        assert (counters["resident_samples"], counters["reserved_bytes"]) == (0, 0)
        p.put("good", eagle3(2), attributes=ATTRIBUTES)
    client.delete_run(run_id)


def test_an_attribute_that_fixes_an_axis_is_named_with_the_axis(client: sluice.Client, run_id: str) -> None:
    run = client.create_run(run_id, algorithm="eagle3", max_bytes=1 << 20)
    with run.producer("p") as p, pytest.raises(sluice.SchemaError) as caught:
        p.put("s", eagle3(4), attributes=ATTRIBUTES | {"aux_layers": "hf:1,2"})
    assert caught.value.hint == 'K is the number of entries of the attribute aux_layers, which is "hf:1,2"' and "axis K*H is 24, want 16" in caught.value.detail
    client.delete_run(run_id)


def test_a_taken_id_points_at_the_positions_that_the_run_has(run: sluice.Run) -> None:
    with run.producer("p") as p:
        p.put("s", sample(), num_tokens=3)
        with pytest.raises(sluice.DuplicateError, match=r"producer\.taken\(\)"):
            p.put("s", sample(), num_tokens=3)


def test_an_interrupt_is_a_cause_without_an_empty_tail(run: sluice.Run) -> None:
    with pytest.raises(KeyboardInterrupt), run.producer("p"):
        raise KeyboardInterrupt
    _, cause = drain(run)
    assert cause is not None and cause.detail.endswith("KeyboardInterrupt")


def test_a_newer_incarnation_takes_over(run: sluice.Run) -> None:
    old = run.producer("p", 1).start()
    new = run.producer("p", 2).start()
    with pytest.raises(sluice.StaleError):
        old.put("s", sample(), num_tokens=3, timeout=5)
    new.put("s", sample(), num_tokens=3, timeout=5)
    new.close()
    with pytest.raises(sluice.SluiceError):
        old.close()
    assert drain(run) == (["s"], None)
    with pytest.raises(RuntimeError, match="ended"):
        new.start()


def test_of_several_reservations_those_come_at_once_that_there_is_room_for(run: sluice.Run) -> None:
    with run.producer("p") as p:
        rooms = p.reserve_many([NBYTES] * 9, timeout=5)
        assert 1 <= len(rooms) <= 4 and len({r.id for r in rooms}) == len(rooms)
        assert run.store.counters()["reserved_bytes"] == NBYTES * len(rooms)
        with pytest.raises(sluice.WaitTimeoutError):
            p.reserve_many([4 * NBYTES, 1], timeout=0.05)
        run.queue.unreserve(*(r.id for r in rooms))
        assert [r.bytes for r in p.reserve_many([NBYTES, 1], timeout=5)] == [NBYTES, 1]
        with pytest.raises(ValueError, match="sizes"):
            p.reserve_many([])
