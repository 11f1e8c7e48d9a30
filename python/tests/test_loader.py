from __future__ import annotations

from collections.abc import Iterator

import pytest

import sluice

from .samples import fill, ids, put, tensors, wait_until


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


def test_leaving_the_run_by_an_exception_fails_the_batch(client: sluice.Client, run_id: str) -> None:
    with pytest.raises(ZeroDivisionError), client.create_run(run_id, algorithm="eagle3", max_bytes=1 << 26) as run:
        fill(run, 4)
        for _ in run.loader(batch=2, ack="step"):
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
