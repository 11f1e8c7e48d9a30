"""Batches go to a device behind the trainer's back, and pins are given up behind the copy's event."""

from __future__ import annotations

import numpy as np
import pytest

import sluice
from sluice.device import DeviceRing

from .samples import fill, ids, tensors, wait_until
from .test_device import FakeBackend


class NumpyBackend(FakeBackend):
    def stage(self, buffer: object, offset: int, tensor: object) -> object:
        return super().stage(buffer, offset, np.asarray(tensor))


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> NumpyBackend:
    backend = NumpyBackend()
    monkeypatch.setattr("sluice.loader.ring_for", lambda device, slots: DeviceRing(backend, slots) if device is not None else None)
    return backend


@pytest.fixture
def run(client: sluice.Client, run_id: str) -> object:
    with client.create_run(run_id, algorithm="eagle3", max_bytes=1 << 26, visibility_timeout=20) as r:
        yield r


def test_pins_are_given_up_behind_the_copys_event_and_not_before(run: sluice.Run, backend: NumpyBackend) -> None:
    fill(run, 1)
    loader = run.loader(batch=1, device="cuda", ack="step", timeout=20)
    batch = next(loader)
    loader.step()
    assert any(p.held for p in run.store._pins.values()), "the device has not copied yet"
    backend.run()
    assert next(loader, None) is None
    loader.close()
    wait_until(lambda: not run.store._pins, "the pins to be given up")
    assert np.array_equal(batch["aux_hidden_states"], tensors(0)["aux_hidden_states"])
    assert run.status()["acked"] == 1


def test_copies_are_made_ahead_and_each_batch_is_its_own(run: sluice.Run, backend: NumpyBackend) -> None:
    fill(run, 8)
    loader = run.loader(batch=2, prefetch=2, device="cuda", timeout=20)
    batch = next(loader)
    wait_until(lambda: loader._stream._ready and len(loader._stream._ready) == 2, "two batches ahead")
    kept = [batch]
    for batch in _running(loader, backend):
        kept.append(batch)
    assert [ids(b) for b in kept] == [["s-0", "s-1"], ["s-2", "s-3"], ["s-4", "s-5"], ["s-6", "s-7"]]
    for n, b in enumerate(kept):
        assert [float(row[0, 0]) for row in b["aux_hidden_states"]] == [2.0 * n, 2.0 * n + 1]


def _running(loader: sluice.Loader, backend: NumpyBackend):  # type: ignore[no-untyped-def]
    while True:
        backend.run()
        batch = loader.next(timeout=20)
        if batch is None:
            return
        yield batch


def test_a_device_without_room_returns_the_leases_and_says_so(run: sluice.Run, backend: NumpyBackend) -> None:
    fill(run, 2)
    backend.room = 10
    loader = run.loader(batch=2, device="cuda", prefetch=0, timeout=20)
    with pytest.raises(MemoryError, match="no room for pinned memory"):
        next(loader)
    status = run.status()
    assert (status["failed"], status["pending"], status["outstanding"]) == (0, 2, 0)
    loader.close()
    wait_until(lambda: not run.store._pins, "the pins to be given up")


def test_without_a_gpu_a_cuda_device_is_refused(run: sluice.Run) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(sluice.UnsupportedError, match="finds no GPU"):
        run.loader(device="cuda")
    with pytest.raises(sluice.InvalidError):
        run.loader(device="no such device")
