from __future__ import annotations

import contextlib
import gc
import inspect
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator

import numpy as np
import pytest

import sluice
from sluice.loader import Loader
from sluice.stats import bottleneck_number
from sluice.transport import Cancel, Cancelled

from .conftest import ROOT, Service
from .samples import ATTRIBUTES, fill, ids, put, tensors, wait_until


@pytest.fixture
def run(client: sluice.Client, run_id: str) -> Iterator[sluice.Run]:
    with client.create_run(run_id, algorithm="eagle3", max_bytes=1 << 26, visibility_timeout=5) as r:
        yield r


def test_batches_come_in_order_and_are_acknowledged_by_the_next(run: sluice.Run) -> None:
    fill(run, 10)
    got = []
    for batch in run.loader(batch=4):
        got.append(ids(batch))
        assert batch["aux_hidden_states"].shape == (len(batch.samples), 6, 12)
    assert got == [["s-0", "s-1", "s-2", "s-3"], ["s-4", "s-5", "s-6", "s-7"], ["s-8", "s-9"]]
    status = run.status()
    assert (status["acked"], status["pending"], status["outstanding"], status["redelivered"]) == (10, 0, 0, 0)
    wait_until(lambda: run.store.counters()["resident_samples"] == 0, "every byte to be free")


# -- ack modes ---------------------------------------------------------------------------------------------------------


def test_step_acknowledges_all_batches_since_the_last_one(run: sluice.Run) -> None:
    fill(run, 6)
    loader = run.loader(batch=2, ack="step")
    next(loader)
    next(loader)
    assert run.status()["acked"] == 0
    run.step()
    assert run.status()["acked"] == 4
    next(loader)
    loader.step()
    assert run.status()["acked"] == 6
    assert next(loader, None) is None


def test_what_was_taken_without_a_step_is_returned_by_close_and_counts_nothing(run: sluice.Run) -> None:
    fill(run, 4)
    with run.loader(batch=2, ack="step") as loader:
        next(loader)
        loader.step()
        assert ids(next(loader)) == ["s-2", "s-3"]
    status = run.status()
    assert (status["acked"], status["pending"], status["outstanding"], status["failed"]) == (2, 2, 0, 0)
    assert [ids(b) for b in run.loader(batch=2)] == [["s-2", "s-3"]]


def test_checkpoint_acknowledges_and_a_step_only_makes_safe(client: sluice.Client, run_id: str) -> None:
    with client.create_run(run_id, algorithm="eagle3", max_bytes=1 << 26, largest_sample=1 << 16, steps_per_checkpoint=4, samples_per_step=2) as run:
        fill(run, 8)
        loader = run.loader(batch=2, ack="checkpoint")
        next(loader)
        next(loader)
        run.step()
        assert run.status()["acked"] == 0
        next(loader)
        run.fail("the last step blew up")
        status = run.status()
        assert (status["acked"], status["failed"]) == (0, 2)
        run.checkpoint()
        assert run.status()["acked"] == 4
        assert [ids(b) for b in loader] == [["s-6", "s-7"], ["s-4", "s-5"]]
        run.checkpoint()
        assert run.status()["acked"] == 8


def test_a_step_after_the_loop_settles_what_the_loop_took(run: sluice.Run) -> None:
    fill(run, 5)
    for _ in run.loader(batch=2, ack="step"):
        pass
    run.step()
    status = run.status()
    assert (status["acked"], status["outstanding"]) == (5, 0)
    wait_until(lambda: not run.status()["consumers"], "the consumer to leave")


def test_leaving_by_an_exception_fails_the_batch(run: sluice.Run) -> None:
    fill(run, 4)
    with pytest.raises(ZeroDivisionError), run.loader(batch=2) as loader:
        next(loader)
        raise ZeroDivisionError("the loss is nan")
    status = run.status()
    assert (status["acked"], status["failed"], status["outstanding"]) == (0, 2, 0)
    assert [ids(b) for b in run.loader(batch=2)] == [["s-2", "s-3"], ["s-0", "s-1"]]


@pytest.mark.parametrize("ack", ["next", "step"])
def test_leaving_the_run_by_an_exception_fails_the_batch(client: sluice.Client, run_id: str, ack: str) -> None:
    with pytest.raises(ZeroDivisionError), client.create_run(run_id, algorithm="eagle3", max_bytes=1 << 26) as run:
        fill(run, 4)
        for _ in run.loader(batch=2, ack=ack):  # nobody has the loader any more when the exception is through the loop
            raise ZeroDivisionError
    status = client.run(run_id).status()
    assert (status["acked"], status["failed"], status["outstanding"]) == (0, 2, 0)


def test_ctrl_c_returns_the_batch_and_counts_nothing(run: sluice.Run) -> None:
    fill(run, 2)
    with pytest.raises(KeyboardInterrupt), run.loader(batch=2) as loader:
        next(loader)
        raise KeyboardInterrupt
    status = run.status()
    assert (status["acked"], status["failed"], status["pending"], status["outstanding"]) == (0, 0, 2, 0)


def test_a_loop_left_by_break_gives_everything_back_when_the_loader_is_gone(run: sluice.Run) -> None:
    fill(run, 8)
    for _ in run.loader(batch=2):
        break
    wait_until(lambda: run.status()["outstanding"] == 0, "the leases to be back")
    status = run.status()
    assert (status["acked"], status["pending"], status["returned"] > 0, status["failed"]) == (0, 8, True, 0)


@pytest.fixture
def no_collection() -> Iterator[None]:
    """What is freed is freed since nobody refers to it."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize("error", [sluice.SchemaError, sluice.StaleError, sluice.TargetFaultError, sluice.WaitTimeoutError])
def test_a_loop_left_by_an_error_gives_everything_back_when_the_loader_is_gone(run: sluice.Run, error: type[sluice.SluiceError]) -> None:
    if error is sluice.SchemaError:  # one dtype, and then another
        half = {name: t.astype(np.float16) if t.dtype == np.float32 else t for name, t in tensors(0).items()}
        run.queue.put(run.store.put("s-0", half, attributes=ATTRIBUTES))
        fill(run, 11, start=1, close=False)
    else:
        fill(run, 4, close=False)
    if error is sluice.TargetFaultError:
        run.queue.close("the target broke")
    loader = run.loader(batch=4, consumer="c", timeout=0.2 if error is sluice.WaitTimeoutError else 20)
    gone = weakref.ref(loader)
    newer: list[sluice.Lease] = []
    try:
        for _ in loader:
            if error is sluice.StaleError:
                newer += run.queue.acquire(sluice.Consumer("c", 1), max=4, timeout=5.0).leases
    except error:
        pass
    else:
        raise AssertionError("it ended in order")
    del loader
    assert gone() is None
    if error in (sluice.SchemaError, sluice.WaitTimeoutError):
        wait_until(lambda: run.status()["outstanding"] == 0, "the leases to be back")


def test_closing_the_run_gives_back_what_a_loop_left(client: sluice.Client, run_id: str) -> None:
    with client.create_run(run_id, algorithm="eagle3", max_bytes=1 << 26) as run:
        fill(run, 8)
        loader = run.loader(batch=2, ack="step")
        for _ in loader:
            break
    status = client.run(run_id).status()
    assert (status["acked"], status["pending"], status["outstanding"], status["failed"]) == (0, 8, 0, 0)
    with pytest.raises(sluice.ClosedError):
        next(loader)


# -- the end, and errors ------------------------------------------------------------------------------------------------


def test_a_producers_failure_is_raised_behind_what_was_produced(run: sluice.Run) -> None:
    fill(run, 3, close=False)
    run.queue.close("CUDA out of memory at layer 3")
    loader = run.loader(batch=2)
    assert [ids(next(loader)), ids(next(loader))] == [["s-0", "s-1"], ["s-2"]]
    with pytest.raises(sluice.TargetFaultError, match="CUDA out of memory"):
        next(loader)


def test_a_timeout_says_what_the_run_waits_for_and_loses_nothing(run: sluice.Run) -> None:
    loader = run.loader(batch=1)
    with pytest.raises(sluice.WaitTimeoutError, match="no batch came within 0.3 s; the run's bottleneck is "):
        loader.next(timeout=0.3)
    put(run, 0)
    assert ids(next(loader)) == ["s-0"]


def test_a_wait_is_seen_by_the_run_and_fetching_ahead_is_not(run: sluice.Run) -> None:
    put(run, 0)
    loader = run.loader(batch=1, prefetch=2)
    next(loader)
    wait_until(lambda: loader._stream._recall, "the prefetch to ask")
    assert run.status()["consumers_waiting"] == 0
    with pytest.raises(sluice.WaitTimeoutError):
        loader.next(timeout=0.2)
    assert run.status()["consumer_waited_seconds"] > 0.1


def test_batches_that_cannot_be_made_release_pins_and_fail_leases(run: sluice.Run) -> None:
    fill(run, 2)

    def bad(_: object) -> dict[str, object]:
        raise LookupError("no such column")

    loader = run.loader(batch=2, collate=bad)  # type: ignore[arg-type]
    with pytest.raises(LookupError, match="no such column"):
        next(loader)
    wait_until(lambda: run.status()["failed"] >= 2, "the leases to fail")
    loader.close()
    wait_until(lambda: not run.store._pins, "the pins to be given up")


def test_gone_and_corrupt_samples_are_passed_over_and_counted(run: sluice.Run, service: object) -> None:
    refs = fill(run, 4)
    site = run.store._site
    assert site is not None
    path = f"{site.dir}/{refs[1].sample_id}.safetensors"
    with open(path, "r+b") as f:
        f.seek(8)
        f.write(b"not a header")
    loader = run.loader(batch=2)
    assert [ids(b) for b in loader] == [["s-0", "s-2"], ["s-3"]]
    assert loader.counts().skipped == 1
    assert run.queue.dead_letters()[0].ref.sample_id == "s-1"
    assert run.stats()["skipped"] == 1.0
    assert run.stats()["dead"] == 1.0


def test_skip_decides(run: sluice.Run) -> None:
    refs = fill(run, 2)
    site = run.store._site
    assert site is not None
    with open(f"{site.dir}/{refs[0].sample_id}.safetensors", "r+b") as f:
        f.write(b"\xff" * 8)
    loader = run.loader(batch=1, skip=lambda ref, error: False)
    with pytest.raises(sluice.CorruptError):
        next(loader)
    assert ids(next(loader)) == ["s-1"]


def test_a_changed_target_splits_batches_and_a_silent_change_is_refused(run: sluice.Run) -> None:
    put(run, 0, target="a")
    put(run, 1, target="a")
    put(run, 2, target="b", version="1")
    put(run, 3, target="c", version="1")
    run.queue.close()
    loader = run.loader(batch=4)
    with pytest.raises(sluice.SchemaError, match='attribute "target" is "c"'):
        next(loader)  # an error comes as soon as it is found; what was read before it is still there
    assert [ids(b) for b in loader] == [["s-0", "s-1"], ["s-2"]]


@pytest.mark.parametrize(
    ("field", "arguments"),
    [
        ("rank", {"rank": -1}), ("rank", {"rank": 1}), ("rank", {"rank": True}), ("ranks", {"ranks": 0}), ("ranks", {"rank": 1, "ranks": 4}), ("batch", {"batch": 0}),
        ("batch", {"batch": 1.5}), ("how", {"collate": "stack"}), ("pad_to_multiple", {"pad_to_multiple": -2}), ("max_tokens", {"max_tokens": 7}), ("prefetch", {"prefetch": -1}),
        ("ack", {"ack": "epoch"}), ("ack", {"ack": "checkpoint"}), ("consumer", {"consumer": "a b"}), ("consumer", {"consumer": ""}), ("consumer", {"members": 2}),
        ("incarnation", {"incarnation": -1}), ("members", {"members": 0}), ("member", {"members": 2, "member": 2, "consumer": "g"}), ("timeout", {"timeout": -1}),
        ("timeout", {"timeout": float("nan")}), ("skip", {"skip": "corrupt"}), ("max_skips", {"max_skips": -1}), ("renew_every", {"renew_every": 0}), ("max_idle", {"max_idle": 0}),
        ("patience", {"patience": float("inf")}),
    ],
)
def test_bad_arguments_name_the_field(run: sluice.Run, field: str, arguments: dict[str, object]) -> None:
    with pytest.raises(sluice.InvalidError) as e:
        run.loader(**arguments)  # type: ignore[arg-type]
    assert e.value.subject == field


def test_a_run_without_a_loader_has_nothing_to_step(run: sluice.Run) -> None:
    with pytest.raises(sluice.ConflictError, match="no loader"):
        run.step()


def test_tensors_stay_valid_and_writable_after_the_step(run: sluice.Run) -> None:
    fill(run, 2)
    kept = []
    for batch in run.loader(batch=1, collate="none", ack="step"):
        kept.append(batch)
        run.step()
    run.step()
    wait_until(lambda: run.status()["acked"] == 2, "the acks")
    for i, batch in enumerate(kept):
        t = batch["aux_hidden_states"]
        assert float(t.sum()) == i * t.shape[1] * t.shape[2]
        t[...] = 7
        assert tensors(i)["aux_hidden_states"].shape == tuple(t.shape)


# -- time and others ----------------------------------------------------------------------------------------------------


def test_leases_are_renewed_while_the_trainer_trains(client: sluice.Client, run_id: str) -> None:
    with client.create_run(run_id, algorithm="eagle3", max_bytes=1 << 26, visibility_timeout=0.6) as run:
        fill(run, 2)
        loader = run.loader(batch=1, ack="step")
        next(loader)
        time.sleep(1.5)  # it must be longer than a lease lives
        loader.step()
        status = run.status()
        assert (status["acked"], status["expired"], loader.counts().stale) == (1, 0, 0)


def test_what_was_made_ahead_and_ran_out_is_not_handed_out(client: sluice.Client, run_id: str) -> None:
    """Others may be training on it already."""
    with client.create_run(run_id, algorithm="eagle3", max_bytes=1 << 26, visibility_timeout=1) as run:
        fill(run, 4)
        loader = run.loader(batch=1, ack="step", prefetch=2, renew_every=600, timeout=20)
        next(loader)
        loader.step()
        wait_until(lambda: run.status()["outstanding"] == 2, "two batches to be made ahead")
        wait_until(lambda: run.status()["outstanding"] == 0, "their leases to run out")
        got = []
        for batch in loader:
            got.append((ids(batch)[0], batch.samples[0].lease.redelivery_count))
            loader.step()
        counts = loader.counts()
        assert sorted(got) == [("s-1", 1), ("s-2", 1), ("s-3", 0)]
        assert (counts.dropped, counts.acked) == (2, 4)
        figures = run.stats()
        assert (figures["redelivered"], figures["acked"], figures["samples"], figures["held"]) == (2.0, 4.0, 4.0, 0.0)
        assert run.status()["acked"] == 4


def test_renewal_ends_with_the_trainers_silence_and_comes_back_with_it(client: sluice.Client, run_id: str, caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    with client.create_run(run_id, algorithm="eagle3", max_bytes=1 << 26, visibility_timeout=0.6) as run:
        fill(run, 1)
        loader = Loader(run, batch=1, ack="step", clock=lambda: now[0])
        next(loader)
        now[0] += 1799
        time.sleep(1.2)
        assert run.status()["expired"] == 0
        loader.touch()
        now[0] += 1799
        time.sleep(1.2)
        assert run.status()["expired"] == 0
        now[0] += 1.5
        wait_until(lambda: run.status()["expired"] == 1, "the lease to run out")
        assert "the trainer has made no call for 1800 s" in caplog.text
        loader.step()
        assert loader.counts().stale == 1
        assert run.status()["acked"] == 0
        assert ids(next(loader)) == ["s-0"]


def test_two_consumers_share_the_stream_and_none_gets_what_the_other_has(run: sluice.Run) -> None:
    fill(run, 40)
    got: dict[str, list[str]] = {"a": [], "b": []}

    def train(name: str) -> None:
        for batch in run.loader(batch=2, consumer=name, timeout=30):
            got[name] += ids(batch)

    threads = [threading.Thread(target=train, args=(name,)) for name in got]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert sorted(got["a"] + got["b"]) == sorted(f"s-{i}" for i in range(40))
    assert run.status()["acked"] == 40


def test_a_newer_incarnation_takes_over_and_the_older_is_stale(run: sluice.Run) -> None:
    fill(run, 4)
    old = run.loader(batch=2, consumer="t", incarnation=1, ack="step", prefetch=0)
    assert ids(next(old)) == ["s-0", "s-1"]
    new = run.loader(batch=2, consumer="t", incarnation=2)
    assert ids(next(new)) == ["s-0", "s-1"]
    with pytest.raises(sluice.StaleError, match="incarnation 1 was superseded by 2"):
        old.step()
    with pytest.raises(sluice.StaleError):
        next(old)
    old.close()
    assert [ids(b) for b in new] == [["s-2", "s-3"]]
    assert run.status()["acked"] == 4


def test_a_restart_of_the_service_in_the_middle_loses_nothing(own_service: Service) -> None:
    with sluice.connect(own_service.socket, run="r", create={"algorithm": "eagle3", "max_bytes": 1 << 26, "visibility_timeout": 5}) as run:
        fill(run, 60)
        acked: list[str] = []
        taken: list[str] = []
        loader = run.loader(batch=3, ack="step", timeout=60)
        for n, batch in enumerate(loader):
            taken += ids(batch)
            if n in (3, 9):
                own_service.kill()
                own_service.start()
            run.step()
            acked += ids(batch)
        assert set(acked) == {f"s-{i}" for i in range(60)}
        status = run.status()
        assert (status["acked"], status["pending"], status["outstanding"], status["dead"]) == (60, 0, 0, 0)
        # A service that is killed forgets leases. What was trained on twice is what the acknowledgement was told to be stale, and no more: of each kill the batch that the trainer had, and those
        # made ahead that it took before the loader heard of it.
        twice, stale = len(taken) - len(set(taken)), loader.counts().stale
        assert twice == stale, (twice, stale, taken)
        assert stale <= 2 * 3 * (1 + 2), taken


def test_a_step_survives_a_service_that_is_away(own_service: Service) -> None:
    with sluice.connect(own_service.socket, run="r", create={"algorithm": "eagle3", "max_bytes": 1 << 26}) as run:
        fill(run, 4)
        loader = run.loader(batch=2, ack="step")
        next(loader)
        own_service.kill()
        starter = threading.Timer(1.0, own_service.start)
        starter.start()
        loader.step()
        starter.join(30)
        assert run.status()["acked"] + loader.counts().stale == 2
        rest = [i for b in loader for i in ids(b)]
        run.step()
        assert {"s-2", "s-3"} <= set(rest)
        assert run.status()["acked"] == 4


def test_close_while_the_service_is_away_takes_five_seconds_and_says_so(own_service: Service) -> None:
    run = sluice.connect(own_service.socket, run="r", create={"algorithm": "eagle3", "max_bytes": 1 << 26})
    try:
        fill(run, 8)
        loader = run.loader(batch=2)
        next(loader)
        own_service.kill()
        begin = time.monotonic()
        with pytest.raises(sluice.UnavailableError, match="could not give everything back within 5 s"):
            loader.close()
        assert time.monotonic() - begin < 8
        figures = run.stats()
        assert (figures["service_up"], figures["bottleneck"], figures["batches"]) == (0.0, -1.0, 1.0)
        assert run.bottleneck().startswith("not known: ")
        assert time.monotonic() - begin < 12
    finally:
        with pytest.raises(sluice.UnavailableError):
            run.close()


# -- state --------------------------------------------------------------------------------------------------------------


def test_a_state_goes_on_as_the_same_consumer_one_incarnation_later(run: sluice.Run) -> None:
    fill(run, 6, target="sha256:aa", tokenizer="sha256:bb")
    loader = run.loader(batch=2, ack="step", consumer="t")
    next(loader)
    loader.step()
    next(loader)
    state = json.loads(json.dumps(loader.state_dict()))
    assert state == {
        "version": 1, "run_id": run.run_id, "schema": "eagle3", "schema_version": 1, "consumer": "t", "incarnation": 0, "rank": 0, "ranks": 1, "member": 0, "members": 1, "batch": 2,
        "ack": "step", "target_model_version": "0", "target": "sha256:aa", "tokenizer": "sha256:bb", "settled_window": None, "settled_samples": 2,
    }
    resumed = run.loader(batch=2, ack="step")
    resumed.load_state_dict(state)
    assert (resumed.consumer.name, resumed.consumer.incarnation) == ("t", 1)
    assert resumed.state_dict() == state | {"incarnation": 1}
    assert ids(next(resumed)) == ["s-2", "s-3"]
    with pytest.raises(sluice.ConflictError):
        resumed.load_state_dict(state)
    with pytest.raises(sluice.StaleError):
        loader.step()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("version", 2), ("run_id", "other"), ("schema", "dflash"), ("schema_version", 2), ("rank", 1), ("ranks", 2), ("member", 1), ("members", 2), ("batch", 4), ("ack", "next"),
        ("incarnation", -1), ("incarnation", "1"), ("settled_samples", 1.5), ("settled_window", "x"), ("consumer", "a b"), ("target", 3), ("batch", True), ("extra", 1),
    ],
)
def test_a_state_that_does_not_fit_is_refused_by_field(run: sluice.Run, field: str, value: object) -> None:
    loader = run.loader(batch=1, ack="step")
    with pytest.raises(sluice.InvalidError) as e:
        loader.load_state_dict(loader.state_dict() | {field: value})
    assert e.value.subject == field
    lacking = loader.state_dict()
    del lacking["consumer"]
    with pytest.raises(sluice.InvalidError, match="is missing in the state"):
        loader.load_state_dict(lacking)


@pytest.mark.parametrize("field", ["target", "tokenizer"])
def test_a_state_of_another_target_is_refused_at_the_first_batch_and_gives_its_leases_back(run: sluice.Run, field: str) -> None:
    fill(run, 2, **{field: "sha256:new"})
    loader = run.loader(batch=2)
    loader.load_state_dict(loader.state_dict() | {"target_model_version": "0", field: "sha256:old"})
    with pytest.raises(sluice.InvalidError, match="sha256:old") as e:
        next(loader)
    assert e.value.subject == field
    status = run.status()
    assert (status["failed"], status["dead"], status["pending"]) == (0, 0, 2)


def test_a_target_that_was_synced_anew_since_the_state_is_no_mismatch(run: sluice.Run) -> None:
    fill(run, 2, version="7", target="sha256:new")
    loader = run.loader(batch=2)
    loader.load_state_dict(loader.state_dict() | {"target_model_version": "6", "target": "sha256:old"})
    assert len(ids(next(loader))) == 2
    assert loader.state_dict()["target"] == "sha256:new"


# -- figures ------------------------------------------------------------------------------------------------------------


def test_stats_are_flat_floats_of_the_loaders_and_the_run(run: sluice.Run) -> None:
    fill(run, 6, close=False)
    loader = run.loader(batch=2, ack="step")
    for _ in range(2):
        next(loader)
        run.step()
    figures = run.stats()
    assert all(type(v) is float for v in figures.values())
    assert {k: figures[k] for k in ("batches", "samples", "tokens", "supervised_tokens", "acked", "redelivered", "dead", "stale", "service_up", "bottleneck")} == {
        "batches": 2.0, "samples": 4.0, "tokens": 24.0, "supervised_tokens": 20.0, "acked": 4.0, "redelivered": 0.0, "dead": 0.0, "stale": 0.0, "service_up": 1.0, "bottleneck": 0.0,
    }
    assert figures["fetch_gb_per_second"] > 0
    assert figures["resident_bytes"] > 0
    assert figures["target_tokens_per_second"] > 0
    assert run.bottleneck().startswith("none: ")
    loader.close()
    assert run.stats()["batches"] == 2.0
    next(run.loader(batch=2))
    assert run.stats()["batches"] == 3.0


def test_stats_are_the_same_flat_floats_without_a_loader_and_without_a_service(own_service: Service) -> None:
    run = sluice.connect(own_service.socket, run="r", create={"algorithm": "eagle3", "max_bytes": 1 << 26}, patience=0.5)
    fill(run, 1, close=False)
    producers = run.stats()
    own_service.kill()
    dead = run.stats()
    run.close()
    closed = run.stats()
    for figures in (producers, dead, closed):
        assert set(figures) == set(producers)
        assert all(type(v) is float for v in figures.values())
    assert (producers["service_up"], producers["pending"], producers["batches"]) == (1.0, 1.0, 0.0)
    for figures in (dead, closed):
        assert (figures["service_up"], figures["pending"], figures["bottleneck"]) == (0.0, 1.0, -1.0)


def test_the_time_that_the_trainer_waits_is_counted(run: sluice.Run) -> None:
    loader = run.loader(batch=1, ack="step", prefetch=0)
    begin = time.monotonic()
    with pytest.raises(sluice.WaitTimeoutError):
        loader.next(timeout=0.3)
    took = time.monotonic() - begin
    assert 0.3 <= run.stats()["wait_seconds"] <= took
    fill(run, 1)
    assert loader.next(timeout=20) is not None
    assert 0 < run.stats()["fetch_seconds"] < run.stats()["wait_seconds"]


@pytest.mark.parametrize(
    ("sentence", "number"), [("none: of 3s", 0), ("the target: consumers waited", 1), ("the trainer: producers", 2), ("balanced: x", 3), ("wedged: y", 4), ("a missing rank: z", 5), ("some", -1)]
)
def test_a_bottleneck_has_a_number(sentence: str, number: float) -> None:
    assert bottleneck_number(sentence) == number


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_one_line_on_a_terminal_and_nothing_elsewhere(run: sluice.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(run, 4)
    for stream, said in ((io.StringIO(), False), (_Terminal(), True)):
        monkeypatch.setattr("sys.stderr", stream)
        with run.loader(batch=1, progress=True) as loader:
            next(loader)
            next(loader)
        text = stream.getvalue()
        assert bool(text) is said
    assert text.count("\n") == 1
    assert "2 batches, 2 samples" in text


# -- processes ----------------------------------------------------------------------------------------------------------


def test_a_forked_child_can_not_use_its_parents_loader_and_its_end_settles_nothing(run: sluice.Run) -> None:
    fill(run, 8)
    loader = run.loader(batch=2, ack="step")
    next(loader)
    before = run.status()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            for call in (lambda: next(loader), loader.step, run.step, loader.state_dict):
                try:
                    call()
                except sluice.ClosedError as e:
                    code = 0 if "owns nothing" in str(e) else 2
                if code:
                    break
            loader.close()
            del loader, call
            own = run.loader(batch=1)
            code = code or (0 if ids(own.next(timeout=20)) else 3)
            run.close()
        finally:
            os._exit(code)
    assert wait_until(lambda: os.waitpid(pid, os.WNOHANG)[1:] if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) else None, "the child", 40) == (0,)
    loader.step()
    status = run.status()
    assert (status["acked"] - before["acked"], status["stale"]) == (2 + 1, 0)  # the child's own batch, by its regular close
    assert len([ids(b) for b in loader]) == 3
    run.step()
    assert run.status()["acked"] == 8


INTERRUPTED = """
import sys, sluice
with sluice.connect(sys.argv[1], run=sys.argv[2]) as run:
    for batch in run.loader(batch=2, ack=sys.argv[3]):
        print("took", flush=True)
"""


@pytest.mark.parametrize(("ack", "n"), [("step", 4), ("next", 2)])
def test_ctrl_c_in_a_program_gives_the_leases_back_at_once(run: sluice.Run, service: Service, ack: str, n: int) -> None:
    fill(run, n, close=False)
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, service.socket, run.run_id, ack], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        assert process.stdout is not None
        for _ in range(n // 2):
            assert process.stdout.readline() == b"took\n"  # now it waits for a batch that does not come
        wait_until(lambda: run.status()["consumers_waiting"], "the program to wait")
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait(10)
    assert b"KeyboardInterrupt" in err
    status = run.status()
    # In mode "next" the batch was acknowledged when the next one was asked for.
    assert (status["outstanding"], status["failed"], status["pending"], status["acked"]) == ((0, 0, 4, 0) if ack == "step" else (0, 0, 0, 2))
    assert status["consumers"] == []


def test_no_thread_is_left_when_the_client_is_closed_first(service: Service, run_id: str) -> None:
    client = sluice.Client(service.socket)
    run = client.create_run(run_id, algorithm="eagle3", max_bytes=1 << 26)
    fill(run, 2, close=False)
    loader = run.loader(batch=1)
    next(loader)
    client.close()
    with pytest.raises(sluice.ClosedError):
        while True:
            next(loader)
    run.close()


def test_nothing_is_left_of_a_loop_however_it_ends(service: Service, run_id: str) -> None:
    """Descriptors, mappings (and with them the locks on their files), threads, leases, pins and what is staged."""
    ends: list[type[BaseException] | None] = [None, ValueError, KeyboardInterrupt]

    def held() -> tuple[int, int, int]:
        with open("/proc/self/maps") as f:
            maps = sum(".safetensors" in line for line in f)
        return len(os.listdir("/proc/self/fd")), maps, sum(t.name.startswith("sluice") for t in threading.enumerate())

    def loop(number: int, end: type[BaseException] | None) -> dict[str, object]:
        with contextlib.suppress(ValueError, KeyboardInterrupt), sluice.connect(
            service.socket, run=f"{run_id}-{number}", create={"algorithm": "eagle3", "max_bytes": 1 << 26, "visibility_timeout": 600},
        ) as run:
            fill(run, 9)
            for i, batch in enumerate(run.loader(batch=2, ack="step", prefetch=2)):
                assert batch["input_ids"].shape == (len(batch.samples), 6)
                run.step()
                if i == 1 and end is not None:
                    next(run.loader(batch=1))  # one more, in the middle of it
                    raise end
        del batch, run
        gc.collect()
        with sluice.Client(service.socket) as after:
            status = wait_until(lambda: (s := after.run(f"{run_id}-{number}").status())["outstanding"] == 0 and s, "the leases to be back")
            assert status["consumers"] == []
            assert status["health"]["resident_samples"] == status["pending"] + status["dead"]
            assert not os.listdir(after.run(f"{run_id}-{number}").store._info["staging_dir"])
            after.delete_run(f"{run_id}-{number}")
        return dict(status)

    loop(0, None)  # what the first one imports and opens stays
    before = held()
    assert before[1:] == (0, 0)
    for number, end in enumerate(ends * 3, 1):
        status = loop(number, end)
        assert status["acked"] == (9 if end is None else 4)
    wait_until(lambda: held() == before, f"as much as before: {before}")


# -- ways of use --------------------------------------------------------------------------------------------------------


def test_the_short_way_as_the_page_has_it(service: Service, client: sluice.Client, run_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLUICE_STATE", str(service.state))  # where the token of a service of this host lies
    client.create_run(run_id, algorithm="eagle3", max_bytes=1 << 26, largest_sample=1 << 16, ranks=1, per_rank=4, prefetch_windows=2)
    fill(client.run(run_id), 8)
    r, w, got, logged = 0, 1, [], []
    assert service.url.startswith("http://")
    with sluice.connect(service.url, run=run_id) as run:
        for batch in run.loader(rank=r, ranks=w, batch=4, collate="pad", prefetch=2, ack="step"):
            got.append((ids(batch), tuple(batch["aux_hidden_states"].shape)))
            run.step()
            logged.append(run.stats()["acked"])
    assert got == [([f"s-{i}" for i in range(4)], (4, 6, 12)), ([f"s-{i}" for i in range(4, 8)], (4, 6, 12))]
    assert logged == [4.0, 8.0]
    assert client.run(run_id).status()["acked"] == 8


def test_on_another_host_it_is_the_same(remote: sluice.Client, run_id: str) -> None:
    with remote.create_run(run_id, algorithm="eagle3", max_bytes=1 << 26) as run:
        fill(run, 5)
        assert [ids(b) for b in run.loader(batch=2, timeout=20)] == [["s-0", "s-1"], ["s-2", "s-3"], ["s-4"]]
        assert run.status()["acked"] == 5
        assert run.stats()["fetch_gb_per_second"] > 0


def test_a_trainer_that_holds_what_the_producer_needs_hears_that_it_is_wedged(client: sluice.Client, run_id: str) -> None:
    with client.create_run(run_id, algorithm="eagle3", max_bytes=1 << 26, max_samples=2, visibility_timeout=30) as run:
        fill(run, 2, close=False)
        loader = run.loader(batch=1, ack="step", prefetch=1)
        next(loader)
        next(loader)
        cancel = Cancel()

        def produce() -> None:
            with contextlib.suppress(Cancelled, sluice.WedgedError):
                run.queue.reserve(100, cancel=cancel)

        producer = threading.Thread(target=produce)
        producer.start()
        try:
            with pytest.raises(sluice.WedgedError):
                loader.next(timeout=30)
        finally:
            cancel.cancel()
            producer.join(20)
        run.step()
        put(run, 2)
        assert ids(loader.next(timeout=20)) == ["s-2"]


def test_two_loaders_of_a_run_step_together(run: sluice.Run) -> None:
    fill(run, 4)
    a, b = run.loader(batch=1, ack="step", prefetch=0, timeout=20), run.loader(batch=1, ack="step", prefetch=0, timeout=20)
    next(a)
    next(b)
    next(b)
    run.step()
    assert run.status()["acked"] == 3


def test_another_thread_may_close_it_while_it_waits(run: sluice.Run) -> None:
    loader = run.loader(batch=1)
    closer = threading.Timer(0.3, loader.close)
    closer.start()
    with pytest.raises(sluice.ClosedError):
        loader.next(timeout=30)
    closer.join(10)
    wait_until(lambda: not run.status()["consumers"], "the consumer to leave")


def test_consume_now_acknowledges_without_taking_another(run: sluice.Run) -> None:
    fill(run, 2)
    loader = run.loader(batch=1, timeout=20)
    next(loader)
    loader.consume_now()
    loader.consume_now()
    assert run.status()["acked"] == 1


@pytest.mark.parametrize("ack", ["next", "step"])
def test_close_gives_up_the_pins_of_what_it_took_and_made_ahead(run: sluice.Run, ack: str) -> None:
    fill(run, 6)
    loader = run.loader(batch=1, ack=ack, prefetch=3, timeout=20)
    next(loader)
    wait_until(lambda: run.status()["outstanding"] == 4, "three batches to be made ahead")
    wait_until(lambda: len(loader._stream._ready) == 3, "and to be read")
    loader.close()
    other = sluice.Consumer("other")  # in the same session, which therefore does not end
    while (delivery := run.queue.acquire(other, max=8, timeout=5)).leases:
        run.queue.settle(other, [sluice.Settlement(x.lease_id, "ack") for x in delivery.leases])
    assert delivery.end
    wait_until(lambda: run.store.counters()["resident_samples"] == 0, "every byte to be free")


def test_a_regular_close_acknowledges_the_last_batch_in_mode_next(run: sluice.Run) -> None:
    fill(run, 4)
    with run.loader(batch=2, timeout=20) as loader:
        next(loader)
    loader.close()
    assert (run.status()["acked"], run.status()["pending"]) == (2, 2)


def test_a_mixed_run_needs_a_schema(client: sluice.Client, run_id: str) -> None:
    schema = dict(client.create_run(run_id, algorithm="eagle3", max_bytes=1 << 20).schema)
    with client.create_run(run_id + "m", mixed=True, max_bytes=1 << 26) as run:
        with pytest.raises(sluice.InvalidError, match="is mixed") as e:
            run.loader()
        assert e.value.subject == "schema"
        assert run.loader(schema=schema).consumer.name.startswith("consumer-")


def test_the_page_names_every_argument_method_and_figure(run: sluice.Run) -> None:
    page = (ROOT / "docs" / "python-loader.md").read_text()
    loader = run.loader()
    signature = inspect.signature(sluice.Run.loader)
    said = page[page.index("Run.loader("):page.index(") -> Loader")].replace("\n", " ")
    defaults = [f"{p.name}={p.default!r}".replace("'", '"') for p in signature.parameters.values() if p.name != "self"]
    assert " ".join(said.removeprefix("Run.loader(*,").split()) == ", ".join(defaults)
    for owner, names in (("Loader", [n for n in vars(Loader) if not n.startswith("_")]), ("Run", ["dataset", "step", "checkpoint", "fail", "stats", "bottleneck", "reshape", "close"])):
        assert [n for n in names if f"{owner}.{n}" not in page] == []
    assert [k for k in run.stats() if f"`{k}`" not in page] == []
    assert [k for k in loader.state_dict() if f"`{k}`" not in page] == []


def test_a_step_reaches_every_loader_though_one_was_taken_over(run: sluice.Run) -> None:
    fill(run, 4)
    old = run.loader(batch=1, ack="step", consumer="t", incarnation=1, prefetch=0, timeout=20)
    next(old)
    new = run.loader(batch=2, ack="step", consumer="t", incarnation=2, prefetch=0, timeout=20)
    next(new)
    with pytest.raises(sluice.StaleError, match="superseded"):
        run.step()
    assert run.status()["acked"] == 2
    del old  # nobody hears of what it lost any more
    next(new)
    run.step()
    assert run.status()["acked"] == 4


def test_a_service_that_hangs_does_not_hang_the_figures(own_service: Service) -> None:
    with sluice.connect(own_service.socket, run="r", create={"algorithm": "eagle3", "max_bytes": 1 << 26}) as run:
        fill(run, 3, close=False)
        loader = run.loader(batch=1, ack="step", prefetch=0)
        next(loader)
        assert run.stats()["pending"] == 2.0
        assert own_service.process is not None
        own_service.process.send_signal(signal.SIGSTOP)
        try:
            pid = own_service.process.pid
            wait_until(lambda: os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT), "all its threads to stand")
            begin = time.monotonic()
            figures = run.stats()
            assert time.monotonic() - begin < 6
            assert (figures["service_up"], figures["pending"], figures["batches"]) == (0.0, 2.0, 1.0)
            with pytest.raises(sluice.WaitTimeoutError, match="the service does not say why"):
                loader.next(timeout=0.2)
        finally:
            own_service.process.send_signal(signal.SIGCONT)
        assert loader.next(timeout=20) is not None


def test_a_renewal_that_meets_an_ack_on_its_way_loses_nothing(run: sluice.Run) -> None:
    """A step whose call the service has taken, and whose answer the loader has not seen yet, while the other thread renews."""
    fill(run, 2)
    with run.loader(batch=2, ack="step", prefetch=0, timeout=20) as loader:
        next(loader)
        held = list(loader._stream._held.values())
        assert [r.status for r in run.queue.ack(loader.consumer, *(h.lease for h in held))] == ["settled", "settled"]
        loader._stream._renew_once(held)
        assert loader.counts().lost == 0
        loader.step()
        assert (loader.counts().acked, loader.counts().stale) == (2, 0)
