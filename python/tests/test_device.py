"""The ring keeps the bytes of every batch right, on a device whose stream runs when the test says so."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from sluice import dtypes
from sluice.collate import Batch
from sluice.device import DeviceRing, Transfer, ring_for, stage
from sluice.errors import ClosedError, InvalidError, UnavailableError, UnsupportedError

torch: Any = dtypes.torch_module()
MIB = 1 << 20


class FakeEvent:
    def __init__(self, stream: FakeBackend) -> None:
        self.reached = False
        self._stream = stream

    def query(self) -> bool:
        self._stream.asked.set()
        return self.reached


class FakeBackend:
    """A device of numpy arrays. Copies are made when `run` reaches them: from the pinned buffer as it is then."""

    def __init__(self, room: int = 1 << 40) -> None:
        self.queue: list[FakeEvent | tuple[Any, Any]] = []
        self.buffers: list[Any] = []
        self.room = room
        self.waited: list[FakeEvent] = []
        self.used: list[Any] = []
        self.followed: list[int] = []
        self.resident: list[Any] = []
        self.fail_start = -1
        self.asked = threading.Event()
        """Somebody asked whether an event was reached."""

    def allocate(self, nbytes: int) -> Any:
        if sum(b.nbytes for b in self.buffers) + nbytes > self.room:
            raise MemoryError("no room for pinned memory")
        self.buffers.append(np.full(nbytes, 0xEE, np.uint8))
        return self.buffers[-1]

    def free(self, buffer: Any) -> None:
        assert not any(isinstance(op, tuple) and np.shares_memory(op[0], buffer) for op in self.queue), "freed while the device reads it"
        self.buffers = [b for b in self.buffers if b is not buffer]
        buffer[:] = 0xDD

    def here(self, tensor: Any) -> bool:
        return any(tensor is t for t in self.resident)

    def stage(self, buffer: Any, offset: int, tensor: Any) -> Any:
        view = buffer[offset : offset + tensor.nbytes].view(tensor.dtype).reshape(tensor.shape)
        view[...] = tensor
        return view

    def start(self, staged: Any) -> Any:
        self.fail_start -= 1
        if self.fail_start == -1:
            raise RuntimeError("out of device memory")
        out = np.full_like(staged, 0x55)
        self.queue.append((staged, out))
        return out

    def follow(self) -> None:
        self.followed.append(len(self.queue))

    def record(self) -> FakeEvent:
        self.queue.append(FakeEvent(self))
        return self.queue[-1]  # type: ignore[return-value]

    def wait(self, event: Any) -> None:
        self.waited.append(event)

    def use(self, tensor: Any) -> None:
        self.used.append(tensor)

    def run(self, events: int = 1 << 30) -> None:
        """Let the stream go on past so many events."""
        while self.queue and events:
            op = self.queue.pop(0)
            if isinstance(op, tuple):
                op[1][...] = op[0]
            else:
                op.reached = True
                events -= 1


class LyingEvent(FakeEvent):
    def query(self) -> bool:
        return True


class LyingBackend(FakeBackend):
    """Its events say that they were reached, and they were not: what a ring that does not ask would be like."""

    def record(self) -> FakeEvent:
        self.queue.append(LyingEvent(self))
        return self.queue[-1]  # type: ignore[return-value]


def batch_of(seed: int, n: int = 100) -> Batch:
    rng = np.random.default_rng(seed)
    return Batch(
        {"aux": rng.standard_normal((1, n, 3)).astype(np.float32), "ids": rng.integers(0, 99, (1, n)), "mask": rng.random((1, n, 1)) < 0.5}
    )


def same(got: Batch, want: Batch) -> bool:
    return list(got) == list(want) and all(np.array_equal(got[k], want[k]) and got[k].dtype == want[k].dtype for k in want)


def test_a_batch_arrives_as_it_was() -> None:
    backend = FakeBackend()
    ring = DeviceRing(backend, 2)
    b = Batch(batch_of(1).tensors, num_tokens=100, supervised_tokens=7, shifted=True, aliases=True)
    got = ring.put(b).take()
    backend.run()
    assert same(got, b) and (got.num_tokens, got.supervised_tokens, got.shifted, got.aliases) == (100, 7, True, False)
    assert not any(np.shares_memory(got[k], b[k]) for k in b)


def test_a_slot_is_used_again_only_after_its_last_copy() -> None:
    backend = FakeBackend()
    ring = DeviceRing(backend, 1)
    a, b = batch_of(1), batch_of(2)
    first = ring.put(a)
    with pytest.raises(UnavailableError, match="no pinned buffer became free within 0.01 s; the device is 1 copies behind"):
        ring.put(b, timeout=0.01)
    backend.run()
    second = ring.put(b, timeout=0)
    backend.run()
    assert same(first.take(), a) and same(second.take(), b)


def test_reuse_before_completion_would_be_seen() -> None:
    backend = LyingBackend()
    ring = DeviceRing(backend, 1)
    a, b = batch_of(1), batch_of(2)
    first, second = ring.put(a), ring.put(b, timeout=0)
    backend.run()
    assert not same(first.take(), a) and same(second.take(), b)


def test_a_put_waits_for_the_event_and_for_nothing_else() -> None:
    backend = FakeBackend()
    ring = DeviceRing(backend, 1)
    first = ring.put(batch_of(1))
    backend.asked.clear()
    taken: list[Transfer] = []
    put = threading.Thread(target=lambda: taken.append(ring.put(batch_of(2), timeout=30)))
    put.start()
    assert backend.asked.wait(30)
    assert not taken
    backend.run()
    put.join(30)
    assert len(taken) == 1 and same(first.take(), batch_of(1))
    backend.run()
    assert same(taken[0].take(), batch_of(2))


def test_the_samples_memory_is_given_back_after_the_copys_event_once_and_in_order() -> None:
    backend = FakeBackend()
    ring = DeviceRing(backend, 3)
    given: list[int] = []

    def give(i: int) -> Callable[[], None]:
        return lambda: given.append(i)

    transfers = [ring.put(batch_of(i), give(i)) for i in range(3)]
    ring.poll()
    transfers[0].take()
    assert given == [] and not transfers[0].copied
    backend.run(events=1)
    ring.poll()
    assert given == [0] and transfers[0].copied and not transfers[1].copied
    backend.run(events=1)
    transfers[2].take()
    assert given == [0, 1]
    backend.run()
    ring.put(batch_of(3))
    assert given == [0, 1, 2]
    backend.run()
    ring.close()
    assert given == [0, 1, 2]


def test_the_trainers_stream_waits_for_the_batch_that_it_takes() -> None:
    backend = FakeBackend()
    ring = DeviceRing(backend, 2)
    events = []
    for i in range(2):
        t = ring.put(batch_of(i))
        events.append(backend.queue[-1])
        got = t.take()
        assert backend.waited == events  # that event, and the CPU was not kept: the stream has not run
        assert all(u is v for u, v in zip(backend.used[-3:], got.values(), strict=True))


def test_what_is_on_the_device_goes_along_and_is_waited_for() -> None:
    backend = FakeBackend()
    ring = DeviceRing(backend, 1)
    b = batch_of(1)
    backend.resident.append(b["ids"])
    got = ring.put(b).take()
    assert got["ids"] is b["ids"] and list(got) == list(b)
    assert backend.followed == [2] and len(backend.queue) == 3  # behind the two copies, before the event
    backend.run()
    assert same(got, b)
    assert ring.put(Batch({"ids": b["ids"]})).take()["ids"] is b["ids"]
    backend.run()
    assert len(ring.put(Batch({})).take()) == 0


def test_pinned_memory_is_bounded_by_the_largest_batch() -> None:
    backend = FakeBackend()
    ring = DeviceRing(backend, 3)
    rng = np.random.default_rng(0)
    largest = 0
    sizes = [*rng.integers(1, 200_000, 20).tolist(), 300_000, *rng.integers(1, 1000, 6).tolist()]
    for size in sizes:
        b = Batch({"x": np.arange(size, dtype=np.int64)})
        largest = max(largest, -(-b.nbytes // MIB) * MIB)
        t = ring.put(b)
        backend.run()
        assert same(t.take(), b)
        assert ring.pinned_bytes <= 3 * largest and ring.pinned_bytes == sum(p.nbytes for p in backend.buffers)
    ring.close()
    assert backend.buffers == [] and ring.pinned_bytes == 0


def test_each_slot_grows_once_for_a_new_largest_batch() -> None:
    backend = FakeBackend()
    ring = DeviceRing(backend, 2)
    for n in (1, 1, MIB // 8 + 1, 1, MIB // 8 + 1, 1, 1):
        ring.put(Batch({"x": np.zeros(n, np.int64)}))
        backend.run()
    assert sorted(b.nbytes for b in backend.buffers) == [MIB, 2 * MIB]  # the second slot was asked for small ones only
    ring.put(Batch({"x": np.zeros(MIB // 8 + 1, np.int64)}))
    assert [b.nbytes for b in backend.buffers] == [2 * MIB, 2 * MIB]


def test_an_allocation_that_fails_is_raised_and_can_be_tried_again() -> None:
    backend = FakeBackend(room=MIB)
    ring = DeviceRing(backend, 1)
    given: list[int] = []
    with pytest.raises(MemoryError, match="no room for pinned memory"):
        ring.put(Batch({"x": np.zeros(MIB, np.int64)}), lambda: given.append(1))
    assert ring.pinned_bytes == 0
    backend.room = 1 << 30
    small = ring.put(batch_of(1))
    backend.run()
    assert same(small.take(), batch_of(1)) and given == []


def test_a_slot_whose_copy_failed_halfway_is_not_used_before_the_device_is_through() -> None:
    backend = FakeBackend()
    ring = DeviceRing(backend, 1)
    given: list[int] = []
    backend.fail_start = 1
    with pytest.raises(RuntimeError, match="out of device memory"):
        ring.put(batch_of(1), lambda: given.append(1))
    assert len(backend.queue) == 2  # the first tensor's copy, and an event
    with pytest.raises(UnavailableError):
        ring.put(batch_of(2), timeout=0.01)
    backend.run()
    ring.put(batch_of(2), timeout=0)
    ring.poll()
    assert given == []


def test_close_waits_for_the_copies_gives_back_and_frees() -> None:
    backend = FakeBackend()
    ring = DeviceRing(backend, 2)
    given: list[int] = []
    t = ring.put(batch_of(1), lambda: given.append(1))
    with pytest.raises(UnavailableError, match="did not finish its copies within 0.01 s"):
        ring.close(timeout=0.01)
    assert len(backend.buffers) == 1 and given == []
    backend.asked.clear()
    closing = threading.Thread(target=ring.close)
    closing.start()
    assert backend.asked.wait(30)
    backend.run()
    closing.join(30)
    assert backend.buffers == [] and given == [1] and same(t.take(), batch_of(1))
    ring.close()
    with pytest.raises(ClosedError):
        ring.put(batch_of(2))


def test_close_ends_a_put_that_waits() -> None:
    backend = FakeBackend()
    ring = DeviceRing(backend, 1)
    ring.put(batch_of(1))
    backend.asked.clear()
    ended: list[BaseException] = []

    def put() -> None:
        try:
            ring.put(batch_of(2), timeout=30)
        except ClosedError as e:
            ended.append(e)

    waiting = threading.Thread(target=put)
    waiting.start()
    assert backend.asked.wait(30)
    with pytest.raises(UnavailableError):
        ring.close(timeout=0)
    waiting.join(30)
    assert len(ended) == 1
    backend.run()
    ring.close()


def test_one_function_that_fails_does_not_keep_the_others_from_being_called(caplog: pytest.LogCaptureFixture) -> None:
    backend = FakeBackend()
    ring = DeviceRing(backend, 3)
    given: list[int] = []

    def fail(message: str) -> Callable[[], None]:
        def raise_it() -> None:
            raise OSError(message)

        return raise_it

    ring.put(batch_of(0), fail("first"))
    ring.put(batch_of(1), fail("second"))
    ring.put(batch_of(2), lambda: given.append(2))
    backend.run()
    with pytest.raises(OSError, match="first"):
        ring.poll()
    assert given == [2] and "second" in caplog.text
    ring.poll()


@pytest.mark.parametrize("seed", range(20))
def test_whatever_the_order_of_puts_copies_and_takes_every_batch_arrives(seed: int) -> None:
    rng = np.random.default_rng(seed)
    backend = FakeBackend()
    ring = DeviceRing(backend, int(rng.integers(1, 4)))
    made, under_way, given = 0, [], []
    for _ in range(200):
        step = rng.integers(3)
        if step == 0:
            n = int(rng.choice([1, 40, 900, 60_000], p=[0.3, 0.3, 0.3, 0.1]))
            try:
                transfer = ring.put(batch_of(made, n), lambda i=made: given.append(i), timeout=0)  # type: ignore[misc]
            except UnavailableError:
                backend.run(events=1)
                continue
            under_way.append((transfer, made, n))
            made += 1
        elif step == 1:
            backend.run(events=1)
        elif under_way:
            transfer, i, n = under_way.pop(int(rng.integers(len(under_way))))
            got = transfer.take()
            while not transfer.copied:  # the trainer's stream waits for it
                backend.run(events=1)
            assert same(got, batch_of(i, n))
    backend.run()
    ring.close()
    assert sorted(given) == list(range(made)) and backend.buffers == []


@pytest.mark.parametrize("slots", [0, -1, 1.5, True])
def test_impossible_numbers_of_slots_are_refused(slots: Any) -> None:
    with pytest.raises(InvalidError):
        DeviceRing(FakeBackend(), slots)


# torch.


def test_the_cpu_needs_no_ring() -> None:
    assert ring_for(None, 2) is None and ring_for("cpu", 2) is None


@pytest.mark.skipif(torch is not None, reason="torch is installed")
def test_a_device_needs_torch() -> None:
    with pytest.raises(UnsupportedError, match="torch is not installed"):
        ring_for("cuda", 2)


@pytest.mark.skipif(torch is None, reason="torch is not installed")
def test_devices_that_cannot_be_had_are_refused() -> None:
    assert ring_for(torch.device("cpu", 0), 2) is None
    for nonsense in ("gpu", "cuda:x", 1.5):
        with pytest.raises(InvalidError):
            ring_for(nonsense, 2)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="no pinned copies"):
        ring_for("meta", 2)
    if not torch.cuda.is_available():
        with pytest.raises(UnsupportedError, match="finds no GPU"):
            ring_for("cuda", 2)


@pytest.mark.skipif(torch is None, reason="torch is not installed")
def test_staging_keeps_types_shapes_and_bits() -> None:
    buffer = torch.full((4096,), 0xEE, dtype=torch.uint8)
    tensors = [
        torch.arange(12).reshape(3, 4).t(),
        torch.tensor([[1.5, -2.0]], dtype=torch.bfloat16),
        torch.zeros(2, 0, 3, dtype=torch.float32),
        torch.tensor(7),
        torch.tensor([True, False]),
    ]
    for i, t in enumerate(tensors):
        staged = stage(buffer, 64 * (i + 1), t)
        assert staged.dtype == t.dtype and staged.shape == t.shape and torch.equal(staged, t)
        assert t.numel() == 0 or staged.data_ptr() == buffer.data_ptr() + 64 * (i + 1)
    frozen = np.arange(5, dtype=np.int64)[::2]
    frozen.flags.writeable = False
    assert stage(buffer, 0, frozen).tolist() == [0, 2, 4]


@pytest.mark.skipif(torch is None or not torch.cuda.is_available(), reason="there is no GPU")
def test_batches_arrive_on_a_gpu() -> None:
    ring = ring_for("cuda", 2)
    assert ring is not None
    given: list[int] = []
    batches: list[Any] = []
    for i in range(20):
        ids = torch.arange(1 << 18).reshape(1, -1) + i
        states = torch.randn(1, 1 << 12, 96).to(torch.bfloat16)
        batches.append(Batch({"ids": ids, "states": states}))
    for i, b in enumerate(batches):
        transfer = ring.put(b, lambda i=i: given.append(i))  # type: ignore[misc]
        trainer = torch.cuda.Stream()
        with torch.cuda.stream(trainer):
            got: Any = transfer.take()
            sums = [t.double().sum() for t in got.values()]
        trainer.synchronize()
        assert [float(s) for s in sums] == [float(t.double().sum()) for t in b.values()]
        assert all(torch.equal(got[k].cpu(), b[k]) for k in b)
    ring.close()
    assert given == list(range(20)) and ring.pinned_bytes == 0
