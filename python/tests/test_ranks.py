"""Processes that step together: data-parallel ranks with equal counts, and groups that share every sample."""

from __future__ import annotations

import multiprocessing
import sys
from typing import Any

import pytest

import sluice

from .conftest import Service
from .samples import fill, ids

SPAWN = multiprocessing.get_context("spawn")
WAIT = 90.0


def windows(client: sluice.Client, run_id: str, ranks: int, per_rank: int, **more: Any) -> sluice.Run:
    return client.create_run(run_id, algorithm="eagle3", max_bytes=1 << 26, largest_sample=1 << 16, ranks=ranks, per_rank=per_rank, prefetch_windows=1, visibility_timeout=20, **more)


def _train(url: str, run_id: str, barrier: Any, results: Any, options: dict[str, Any]) -> None:
    sys.modules["torch"] = None  # type: ignore[assignment]  # its import takes longer than the test, and numpy does as well here
    taken: list[list[str]] = []
    pads = 0
    try:
        with sluice.connect(url, run=run_id) as run:
            loader = run.loader(ack="step", timeout=WAIT, **options)
            for batch in loader:
                taken.append(ids(batch))
                pads += sum(batch.pads)
                barrier.wait(WAIT)  # what a collective does
                run.step()
            barrier.wait(WAIT)  # all ranks end after the same step, or this one hangs
            results.put((options["rank"], options.get("member", 0), taken, pads, loader.counts().skipped, loader.counts().stale))
    except BaseException as e:
        barrier.abort()
        results.put((options["rank"], options.get("member", 0), repr(e), 0, 0, 0))
        raise


def train(url: str, run_id: str, all_options: list[dict[str, Any]]) -> list[Any]:
    """Run a trainer for each of the options, in processes that step together. Returns what each took."""
    barrier, results = SPAWN.Barrier(len(all_options)), SPAWN.Queue()
    processes = [SPAWN.Process(target=_train, args=(url, run_id, barrier, results, o)) for o in all_options]
    for p in processes:
        p.start()
    try:
        got = [results.get(timeout=WAIT) for _ in processes]
    finally:
        for p in processes:
            p.join(20)
            p.kill()
            p.join(10)
    assert [p.exitcode for p in processes] == [0] * len(processes)
    assert all(not isinstance(r[2], str) for r in got), got
    return sorted(got)


def test_four_ranks_step_together_to_the_end_though_a_sample_is_corrupt(client: sluice.Client, service: Service, run_id: str) -> None:
    run = windows(client, run_id, 4, 2)
    refs = fill(run, 37)
    corrupt(run, refs[10])
    got = train(service.socket, run_id, [{"rank": r, "ranks": 4, "batch": 2, "prefetch": 1} for r in range(4)])
    taken = [i for r in got for batch in r[2] for i in batch]
    assert [len(r[2]) for r in got] == [5] * 4
    assert [[len(b) for b in r[2]] for r in got] == [[2] * 5] * 4
    assert set(taken) == {f"s-{i}" for i in range(37) if i != 10}
    assert sum(r[3] for r in got) == len(taken) - 36 == 4  # stand-ins for the corrupt one and for the three that lack in the tail
    assert sum(r[4] for r in got) == 1
    assert [d.ref.sample_id for d in run.queue.dead_letters()] == ["s-10"]
    assert run.status()["acked"] == 36


def test_members_of_a_group_get_every_sample_in_the_same_batches(client: sluice.Client, service: Service, run_id: str) -> None:
    run = client.create_run(run_id, algorithm="eagle3", max_bytes=1 << 26, visibility_timeout=20)
    fill(run, 11)
    got = train(service.socket, run_id, [{"rank": 0, "batch": 2, "consumer": "group", "members": 2, "member": m} for m in range(2)])
    assert got[0][2] == got[1][2] == [[f"s-{i}" for i in range(j, min(j + 2, 11))] for j in range(0, 11, 2)]
    assert [r[5] for r in got] == [0, 0]
    status = run.status()
    assert (status["acked"], status["redelivered"], status["outstanding"]) == (11, 0, 0)


def corrupt(run: sluice.Run, *refs: sluice.SampleRef) -> None:
    site = run.store._site
    assert site is not None
    for ref in refs:
        with open(f"{site.dir}/{ref.sample_id}.safetensors", "r+b") as f:
            f.seek(8)
            f.write(b"XXXXXXXX")


def test_members_of_a_group_make_the_same_batches_where_samples_are_corrupt(client: sluice.Client, service: Service, run_id: str) -> None:
    """A place is filled again when all members have passed over it: until then neither goes on to the next window."""
    run = windows(client, run_id, 1, 4)
    refs = fill(run, 12)
    corrupt(run, refs[1], refs[3], refs[6])
    got = train(service.socket, run_id, [{"rank": 0, "batch": 2, "consumer": "group", "members": 2, "member": m} for m in range(2)])
    assert got[0][2] == got[1][2]
    assert [len(b) for b in got[0][2]] == [2] * 6
    assert [{int(i.removeprefix("s-")) // 4 for i in b} for b in got[0][2]] == [{0}, {0}, {1}, {1}, {2}, {2}]
    assert [(r[3], r[4], r[5]) for r in got] == [(3, 3, 0)] * 2  # stand-ins, passed over, stale
    assert {d.ref.sample_id for d in run.queue.dead_letters()} == {"s-1", "s-3", "s-6"}
    assert run.status()["acked"] == 9


def test_a_stand_in_does_not_count_in_the_loss(client: sluice.Client, run_id: str) -> None:
    with windows(client, run_id, 2, 2) as run:
        fill(run, 3)
        batches = [run.loader(rank=r, ranks=2, batch=2, timeout=20).next(timeout=20) for r in range(2)]
        assert all(b is not None for b in batches)
        pads = [p for b in batches if b is not None for p in b.pads]
        assert sorted(pads) == [False, False, False, True]
        for b in batches:
            assert b is not None
            for row, s in enumerate(b.samples):
                assert bool(b["loss_mask"][row].sum() == 0) is s.pad
            assert b.num_tokens == 6 * (2 - sum(b.pads))
        assert run.stats()["pads"] == 1.0


def test_ranks_that_are_not_the_runs_are_refused_with_both_numbers(client: sluice.Client, run_id: str) -> None:
    with windows(client, run_id, 4, 2) as run:
        with pytest.raises(sluice.InvalidError, match=r"is 2, but the run .* deals out windows for 4 ranks \(.*reshape") as e:
            run.loader(rank=1, ranks=2)
        assert e.value.subject == "ranks"
        other = client.run(run_id)
        other.reshape(2, 3)
        assert run.loader(rank=1, ranks=2, batch=3).consumer.rank == 1
        with pytest.raises(sluice.InvalidError, match="is 2, which does not divide the 3 samples") as e:
            run.loader(rank=1, ranks=2, batch=2)
        assert e.value.subject == "batch"


def test_ranks_without_windows_are_refused(client: sluice.Client, run_id: str) -> None:
    with client.create_run(run_id, algorithm="eagle3", max_bytes=1 << 26) as run, pytest.raises(sluice.InvalidError, match="deals out no windows"):
        run.loader(rank=0, ranks=2)


def test_the_state_tells_the_last_settled_window(client: sluice.Client, run_id: str) -> None:
    with windows(client, run_id, 1, 2) as run:
        fill(run, 6)
        loader = run.loader(batch=2, ack="step", prefetch=0, timeout=20)
        next(loader)
        next(loader)
        assert loader.state_dict()["settled_window"] is None
        loader.step()
        next(loader)
        state = loader.state_dict()
        assert (state["settled_window"], state["settled_samples"]) == (1, 4)
        resumed = run.loader(batch=2, ack="step", timeout=20)
        resumed.load_state_dict(state)
        batch = next(resumed)
        assert batch.window.number == 2
        assert ids(batch) == ["s-4", "s-5"]
