"""The way of a batch to a device: a ring of pinned buffers and a side stream.

A copy to a GPU overlaps with the trainer's work only if it comes from pinned memory and runs in a stream of its own. So each batch is
copied by the CPU into a slot, a pinned buffer, and from there by the device in the side stream, behind which an event is recorded:

    put(batch)    the CPU copies the tensors into a free slot; the device's copy begins; neither waits for the trainer
    take()        the trainer's current stream waits for the event, and the batch is on the device; the CPU does not wait

Three rules keep the bytes right. A slot is used again only after the event of its last use has completed. The sample's own memory is given
back (`done`) only after its copy's event. And a tensor that was made in the side stream and is used in the trainer's is recorded there, so
that its memory is not handed out anew while the trainer's kernels still read it.

Memory is bounded: `slots` buffers, each as large as the largest batch so far (rounded up to 1 MiB) by the time that it is used next.

A batch for the CPU takes no such way: `ring_for` gives no ring, and tensors are trained on as they are.

What of this was run: all of it but `CudaBackend`, on a backend whose stream runs when the test says so. `CudaBackend`, the thin part that
calls torch.cuda, was written without a GPU at hand and has not been run; tests/test_device.py runs the ring on one where it finds one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np

from . import dtypes
from .collate import Batch, nbytes_of
from .errors import ClosedError, InvalidError, SluiceError, UnavailableError, UnsupportedError
from .tensorfile import Tensor

if TYPE_CHECKING:
    import torch

_log = logging.getLogger(__name__)

_ALIGNMENT = 64
_GRAIN = 1 << 20
_POLL = 0.0005  # seconds between two looks at an event that is waited for


class Event(Protocol):
    """A mark in the side stream."""

    def query(self) -> bool:
        """Report whether the stream has come past it. Never waits."""


class Backend(Protocol):
    """What the ring needs of a device: an allocator of pinned memory, a side stream, and its events. The current stream is the calling
    thread's."""

    def allocate(self, nbytes: int) -> Any:
        """Return a pinned buffer of so many bytes. MemoryError or RuntimeError where there is no room."""

    def free(self, buffer: Any) -> None:
        """Give a buffer back. No copy of it is under way."""

    def here(self, tensor: Tensor) -> bool:
        """Report whether the tensor is on the device already."""

    def stage(self, buffer: Any, offset: int, tensor: Tensor) -> Tensor:
        """Copy a tensor into the buffer, and return the copy: a view of the buffer. Done when it returns."""

    def start(self, staged: Tensor) -> Tensor:
        """Begin the copy of a staged tensor in the side stream, and return the tensor on the device."""

    def follow(self) -> None:
        """Let the side stream wait for what is in the current stream now."""

    def record(self) -> Event:
        """Record an event in the side stream, behind what was started."""

    def wait(self, event: Event) -> None:
        """Let the current stream wait for the event. The CPU does not wait."""

    def use(self, tensor: Tensor) -> None:
        """Say that the current stream uses a tensor that was made in the side stream."""


class Transfer:
    """A batch on its way. `DeviceRing.put` makes it; `take` gives the batch on the device."""

    def __init__(self, ring: DeviceRing, batch: Batch, event: Event, done: Callable[[], None] | None) -> None:
        self._ring, self._batch, self._event, self._done = ring, batch, event, done

    @property
    def copied(self) -> bool:
        """Whether the device has its copy. Never waits."""
        return self._event.query()

    def take(self) -> Batch:
        """Return the batch on the device. The caller's current stream waits for the copy; the CPU does not. Call it in the thread that
        trains; again for another stream."""
        self._ring._arrive(self._event, self._batch)
        return self._batch


class _Slot:
    """A pinned buffer. It is busy while it is filled, and from then on until the event of its last use has completed."""

    def __init__(self) -> None:
        self.buffer: Any = None
        self.size = 0
        self.filling = False
        self.event: Event | None = None

    def free(self) -> bool:
        return not self.filling and (self.event is None or self.event.query())


class DeviceRing:
    """Copies batches to a device through pinned buffers, in the order in which they are put.

    Its methods may be called from any thread. `slots` is how many copies may be under way at once: one more than the loader's prefetch is
    enough, and 2 the least at which the CPU's copy of a batch overlaps with the device's copy of the one before.
    """

    def __init__(self, backend: Backend, slots: int) -> None:
        if not isinstance(slots, int) or isinstance(slots, bool) or slots < 1:
            raise InvalidError(f"is {slots!r:.40}, want 1 or more", op="device ring", subject="slots")
        self._backend = backend
        self._slots = [_Slot() for _ in range(slots)]
        self._lock = threading.Lock()  # guards what follows, and each slot's fields
        self._order = threading.Lock()  # held by the put that runs, so that slots are used in turn
        self._next = 0
        self._largest = 0
        self._under_way: list[Transfer] = []
        self._closing = threading.Event()
        self._closed = False

    @property
    def pinned_bytes(self) -> int:
        """Pinned memory that the ring holds now: at most its slots times the largest batch so far, rounded up to 1 MiB."""
        with self._lock:
            return sum(s.size for s in self._slots)

    def put(self, batch: Batch, done: Callable[[], None] | None = None, *, timeout: float = 600.0) -> Transfer:
        """Begin the copy of a batch to the device. It waits for a free slot, `timeout` seconds at most, and for nothing else.

        `done` is called once, when the device has its copy and the batch's own memory is needed no more: in a later put, take, poll or
        close, by the thread that calls it. Tensors that are on the device already go along as they are.

        Raises UnavailableError where no slot became free in time, ClosedError, UnsupportedError for a dtype that torch lacks, and what the
        allocator raises. After an error `done` is not called: nothing reads the batch's memory any more, and it is the caller's to give
        back.
        """
        self.poll()
        deadline = time.monotonic() + timeout
        if not self._order.acquire(timeout=max(timeout, 0)):
            raise self._late(timeout)
        try:
            return self._start(self._claim(deadline, timeout), batch, done)
        finally:
            self._order.release()

    def poll(self) -> None:
        """Call `done` of every batch whose copy has completed. Never waits for the device. The first exception of such a function is raised
        when all have been called; others are logged."""
        error: Exception | None = None
        while True:
            with self._lock:
                transfer = next((t for t in self._under_way if t.copied), None)
                if transfer is None:
                    break
                self._under_way.remove(transfer)
            done, transfer._done = transfer._done, None
            try:
                if done is not None:
                    done()
            except Exception as e:
                if error is not None:
                    _log.exception("device ring: a batch could not be given back")
                error = error or e
        if error is not None:
            raise error

    def close(self, timeout: float = 30.0) -> None:
        """Wait for the copies that are under way, `timeout` seconds at most, call their `done`, and free the buffers. Batches that were
        taken stay. Idempotent.

        Raises UnavailableError where the device is not through in time. The buffers stay then, since it may still read them; close may be
        called again.
        """
        self._closing.set()
        deadline = time.monotonic() + timeout
        with self._lock:
            slots = list(self._slots)
        pause = threading.Event()  # nobody sets it: _closing, which cuts the waits of put short, is set
        while not all(self._is_free(s) for s in slots):
            if time.monotonic() >= deadline:
                raise UnavailableError(f"the device did not finish its copies within {timeout:g} s", op="device ring: close")
            pause.wait(_POLL)
        with self._lock:
            self._closed = True
            buffers = [s.buffer for s in slots if s.buffer is not None]
            for s in slots:
                s.buffer, s.size, s.event = None, 0, None
        for b in buffers:
            self._backend.free(b)
        self.poll()

    def _is_free(self, slot: _Slot) -> bool:
        with self._lock:
            return slot.free()

    def _late(self, timeout: float) -> SluiceError:
        return UnavailableError(
            f"no pinned buffer became free within {timeout:g} s; the device is {len(self._slots)} copies behind", op="device ring: put"
        )

    def _claim(self, deadline: float, timeout: float) -> _Slot:
        """Return the next slot in turn, marked as being filled, when the event of its last use has completed."""
        slot = self._slots[self._next]
        while True:
            with self._lock:
                if self._closed or self._closing.is_set():
                    raise ClosedError("was closed", op="device ring: put")
                if slot.free():
                    slot.filling, slot.event = True, None
                    self._next = (self._next + 1) % len(self._slots)
                    return slot
            if time.monotonic() >= deadline:
                raise self._late(timeout)
            self._closing.wait(_POLL)

    def _start(self, slot: _Slot, batch: Batch, done: Callable[[], None] | None) -> Transfer:
        backend = self._backend
        tensors: dict[str, Tensor] = {}
        begun = stayed = False
        try:
            offsets, size = {}, 0
            for name, t in batch.items():
                if not backend.here(t):
                    offsets[name] = size
                    size += max(-(-nbytes_of(t) // _ALIGNMENT), 1) * _ALIGNMENT
            self._grow(slot, size)
            for name, t in batch.items():
                if name not in offsets:
                    tensors[name], stayed = t, True
                    continue
                staged = backend.stage(slot.buffer, offsets[name], t)
                begun = True
                tensors[name] = backend.start(staged)
            if stayed:
                backend.follow()
            event = backend.record()
        except BaseException:
            # The device may be reading the slot: it is not free before that is through, or ever, where not even that can be told.
            last = backend.record() if begun else None
            with self._lock:
                slot.filling, slot.event = False, last
            raise
        transfer = Transfer(self, batch.replace(tensors, aliases=batch.aliases and stayed), event, done)
        with self._lock:
            slot.filling, slot.event = False, event
            self._under_way.append(transfer)
        return transfer

    def _grow(self, slot: _Slot, size: int) -> None:
        """Make room for so many bytes. A slot that is too small becomes as large as the largest batch so far needs it, so that each is
        allocated anew once for a new largest one."""
        with self._lock:
            self._largest = max(self._largest, -(-size // _GRAIN) * _GRAIN)
            if slot.size >= size:
                return
            old, slot.buffer, slot.size = slot.buffer, None, 0
            largest = self._largest
        if old is not None:
            self._backend.free(old)
        buffer = self._backend.allocate(largest)
        with self._lock:
            slot.buffer, slot.size = buffer, largest

    def _arrive(self, event: Event, batch: Batch) -> None:
        self._backend.wait(event)
        for t in batch.values():
            self._backend.use(t)
        self.poll()


def ring_for(device: torch.device | str | None, slots: int) -> DeviceRing | None:
    """Return a ring for a CUDA device (of ROCm too), or None for the CPU and for no device, where tensors are trained on as they are.

    Raises InvalidError for what is no device, and UnsupportedError where torch is not installed, finds no GPU, or the device is of another
    kind.
    """
    if device is None or str(device) == "cpu":
        return None
    torch = dtypes.torch_module()
    if torch is None:
        raise UnsupportedError("torch is not installed", op="device", subject=str(device))
    try:
        parsed = torch.device(device)
    except (RuntimeError, TypeError) as e:
        raise InvalidError(f"is no device of torch: {e}", op="device", subject=f"{device!s:.60}") from None
    if parsed.type == "cpu":
        return None
    if parsed.type != "cuda":
        raise UnsupportedError(
            "has no pinned copies in a stream here", op="device", subject=str(device), hint="leave device out, and call batch.to(device)"
        )
    if not torch.cuda.is_available():
        raise UnsupportedError(f"torch {torch.__version__} finds no GPU", op="device", subject=str(device))
    return DeviceRing(CudaBackend(parsed), slots)


class CudaBackend:
    """torch.cuda's pinned memory, streams and events."""

    def __init__(self, device: torch.device) -> None:
        torch: Any = dtypes.torch_module()
        self._torch = torch
        self._device = device if device.index is not None else torch.device(device.type, torch.cuda.current_device())
        self._stream = torch.cuda.Stream(device=self._device)

    def allocate(self, nbytes: int) -> Any:
        return self._torch.empty(nbytes, dtype=self._torch.uint8, pin_memory=True)

    def free(self, buffer: Any) -> None:
        """Nothing to do: with the last reference the buffer goes back to torch, which keeps it for pinned tensors to come."""

    def here(self, tensor: Tensor) -> bool:
        return not isinstance(tensor, np.ndarray) and bool(tensor.device == self._device)

    def stage(self, buffer: Any, offset: int, tensor: Tensor) -> Tensor:
        return stage(buffer, offset, tensor)

    def start(self, staged: Tensor) -> Tensor:
        with self._torch.cuda.stream(self._stream):
            moved: Tensor = cast(Any, staged).to(self._device, non_blocking=True)
        return moved

    def follow(self) -> None:
        self._stream.wait_stream(self._torch.cuda.current_stream(self._device))

    def record(self) -> Event:
        event: Event = self._stream.record_event(self._torch.cuda.Event())
        return event

    def wait(self, event: Event) -> None:
        self._torch.cuda.current_stream(self._device).wait_event(event)

    def use(self, tensor: Tensor) -> None:
        cast(Any, tensor).record_stream(self._torch.cuda.current_stream(self._device))


def stage(buffer: torch.Tensor, offset: int, tensor: Tensor) -> torch.Tensor:
    """Copy a tensor of the CPU, of torch or numpy, into a uint8 tensor of torch from the given byte on, and return the copy: a view of the
    buffer, of the tensor's type and shape."""
    dtype = dtypes.torch_dtype(dtypes.name_of(tensor.dtype))
    view: torch.Tensor = buffer[offset : offset + nbytes_of(tensor)].view(dtype).reshape(tuple(tensor.shape))
    if isinstance(tensor, np.ndarray):
        # By bytes, since torch has not each of numpy's types (bfloat16 of ml_dtypes, arrays that may not be written to).
        target: Any = buffer[offset : offset + tensor.nbytes].numpy()
        target[:] = np.ascontiguousarray(tensor).reshape(-1).view(np.uint8)
    else:
        view.copy_(tensor)
    return view
