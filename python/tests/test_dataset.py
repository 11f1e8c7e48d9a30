"""A run behind torch's DataLoader."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

import sluice

from .conftest import Service
from .samples import fill, ids, wait_until

torch = pytest.importorskip("torch")
data = pytest.importorskip("torch.utils.data")


@pytest.fixture
def run(service: Service, run_id: str) -> Any:
    with sluice.connect(service.socket, run=run_id, create={"algorithm": "eagle3", "max_bytes": 1 << 26, "visibility_timeout": 20}) as r:
        yield r


def loader_of(dataset: Any, **more: Any) -> Any:
    return data.DataLoader(dataset, batch_size=None, collate_fn=dataset.whole, **more)


def test_in_the_trainers_process_it_is_a_loader_and_steps_work(run: sluice.Run) -> None:
    fill(run, 5)
    taken = []
    for batch in loader_of(run.dataset(batch=2, ack="step", timeout=20)):
        assert torch.is_tensor(batch["input_ids"])
        taken.append(ids(batch))
        run.step()
    assert taken == [["s-0", "s-1"], ["s-2", "s-3"], ["s-4"]]
    assert run.status()["acked"] == 5


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_worker_is_a_consumer_of_its_own_and_owns_nothing_of_its_parent(run: sluice.Run, method: str) -> None:
    fill(run, 7)
    mine = run.loader(batch=1, ack="step", prefetch=0, timeout=20)
    assert ids(next(mine)) == ["s-0"]
    it = iter(loader_of(run.dataset(batch=2, timeout=60), num_workers=1, multiprocessing_context=method, timeout=60))
    batches = [next(it) for _ in range(3)]
    assert [ids(b) for b in batches] == [["s-1", "s-2"], ["s-3", "s-4"], ["s-5", "s-6"]]
    assert float(batches[1]["aux_hidden_states"].sum()) == (3 + 4) * 6 * 12
    mine.step()  # only now is it the end: what this process holds may still fail
    assert list(it) == []
    status = run.status()
    assert (status["acked"], status["stale"], status["outstanding"]) == (7, 0, 0)


def test_more_than_one_worker_is_refused(run: sluice.Run) -> None:
    """A DataLoader asks its workers in turn. One that has heard nothing of the end waits for what another holds, which that one settles when it is asked again: never."""
    fill(run, 4)
    with pytest.raises(sluice.InvalidError, match="num_workers.* is 2, and workers that are asked in turn would wait for each other"):
        list(loader_of(run.dataset(batch=2, timeout=60), num_workers=2, multiprocessing_context="fork", timeout=60))
    assert run.status()["pending"] == 4


def test_a_worker_that_ends_early_gives_its_leases_back(run: sluice.Run) -> None:
    fill(run, 12)
    it = iter(loader_of(run.dataset(batch=2, timeout=60), num_workers=1, multiprocessing_context="fork", prefetch_factor=1, timeout=60))
    next(it)
    del it
    wait_until(lambda: run.status()["outstanding"] == 0, "the leases to be back")
    status = run.status()
    assert status["acked"] + status["pending"] == 12
    assert status["failed"] == 0


def test_the_loaders_own_conversion_keeps_the_tensors(run: sluice.Run) -> None:
    fill(run, 2)
    (batch,) = data.DataLoader(run.dataset(batch=2, timeout=20), batch_size=None)
    assert tuple(batch["input_ids"].shape) == (2, 6)


def test_what_no_step_reaches_is_refused_in_a_worker(run: sluice.Run) -> None:
    with pytest.raises(sluice.InvalidError, match="no step of the trainer reaches a worker"):
        list(loader_of(run.dataset(ack="step"), num_workers=1, multiprocessing_context="fork", timeout=60))


def test_windows_go_through_a_worker(client: sluice.Client, run_id: str) -> None:
    run = client.create_run(run_id, algorithm="eagle3", max_bytes=1 << 26, largest_sample=1 << 16, ranks=1, per_rank=2)
    fill(run, 4)
    batches = list(loader_of(run.dataset(batch=2, timeout=60), num_workers=1, multiprocessing_context="fork", timeout=60))
    assert [ids(b) for b in batches] == [["s-0", "s-1"], ["s-2", "s-3"]]
    run.close()


def test_a_pickled_dataset_makes_a_session_of_its_own(run: sluice.Run) -> None:
    fill(run, 3)
    dataset = pickle.loads(pickle.dumps(run.dataset(batch=2, timeout=20)))
    sessions = run.client.status()["sessions"]
    it = iter(dataset)
    assert ids(next(it)) == ["s-0", "s-1"]
    assert run.client.status()["sessions"] == sessions + 1
    assert [ids(b) for b in it] == [["s-2"]]
    wait_until(lambda: run.client.status()["sessions"] == sessions, "its session to end")
    assert run.status()["acked"] == 3
