"""The data plane: the store of a run, through the service.

On the service's own host, :meth:`RunStore.get` maps the sample's file and makes tensors over the mapping, without a copy; what the caller writes to them nobody else sees. A mapping
ends with its last tensor, never before. Elsewhere the file comes over HTTP, by several ranges at once into one buffer, and its checksums are compared.
"""

from __future__ import annotations

import abc
import collections
import ctypes
import errno
import fcntl
import itertools
import json
import logging
import mmap
import os
import threading
import weakref
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from . import checksum, tensorfile
from .answers import count, fields, run_path, text, understood
from .errors import ClosedError, ConflictError, CorruptError, DeniedError, DuplicateError, InvalidError, NoSpaceError, NotFoundError, SluiceError, UnavailableError
from .refs import FeatureAlgorithm, SampleRef
from .tensorfile import Tensor
from .transport import Cancel, Lost, Transport, new_id, read_json

if TYPE_CHECKING:
    import socket

    import torch

    from .queue import Reservation

log = logging.getLogger("sluice")

REF_KEY = "sluice.ref"
"""Key of the ref in a file's metadata."""
_HEAD_BYTES = 64 << 10  # of a file, fetched first: its header, and all of a small sample
_LEAST_PART = 8 << 20  # bytes that are worth a connection of their own
_READ_BYTES = 512 << 10  # are read, and then summed while the processor's cache has them
_SPARE_FROM = 4 << 20  # bytes from which a file's pages are worth a call
_SEND_BYTES = 256 << 10  # a sendall: its timeout counts for the whole of it, also on a slow line
_STALL_SECONDS = 20.0
_MAX_BATCH = 1024

_handle_ids = itertools.count(1)


def _next_handle_id() -> int:
    return next(_handle_ids)


@dataclass(frozen=True)
class StoreHandle:
    """Token that the consumer returns to :meth:`FeatureStore.release`. Each get mints one; releasing it again, or a forged one, does nothing."""

    store: FeatureStore
    sample_id: str
    ref: SampleRef
    handle_id: int = field(default_factory=_next_handle_id)


@dataclass(frozen=True)
class StoreHealth:
    """Counters of a store, for decisions about backpressure."""

    resident_bytes: int
    capacity_bytes: int
    sample_count: int
    high_watermark_hit: bool
    low_watermark_hit: bool


class FeatureStore(abc.ABC):
    """What every store can do. The signatures are those of the reference API."""

    store_uri: str

    @abc.abstractmethod
    def put(
        self, sample_id: str, tensors: Mapping[str, Tensor], run_id: str, algorithm: FeatureAlgorithm, schema_version: int, target_model_version: str, draft_weight_version: str, num_tokens: int,
    ) -> SampleRef:
        """Copy tensors into the store. Nothing is visible before all is right; a refused put leaves nothing."""

    @abc.abstractmethod
    def get(self, ref: SampleRef, device: torch.device | str | None = None) -> tuple[dict[str, Tensor], StoreHandle]:
        """The sample's tensors, in the order of its features, and a handle that pins it until it is released."""

    @abc.abstractmethod
    def release(self, handle: StoreHandle) -> None:
        """Give up a pin. Idempotent."""

    @abc.abstractmethod
    def gc(self) -> int:
        """Free what nobody owns. Returns how many that were."""

    @abc.abstractmethod
    def health(self) -> StoreHealth:
        """Counters; it waits for no put and no get."""

    @abc.abstractmethod
    def close(self) -> None:
        """End the use of the store. Idempotent. Tensors that were handed out stay valid."""


@dataclass
class _Pin:
    handle: StoreHandle
    id: str
    memory: weakref.ref[mmap.mmap] | None  # of a mapping; None if the sample was fetched
    held: bool = True
    mapped: bool = False


_stores: weakref.WeakSet[RunStore] = weakref.WeakSet()


class RunStore(FeatureStore):
    """The store of one run. Made by :class:`sluice.Run`; every method may be called from any thread."""

    def __init__(self, transport: Transport, run_id: str, info: Mapping[str, Any], spec: Mapping[str, Any], *, ranges: int = 4, http_only: bool = False) -> None:
        self._t = transport
        self._run = run_path(run_id)
        self.run_id = run_id
        self.store_uri = understood("run", run_id, lambda: text(fields(info)["uri"]))
        self._info = info
        self._spec = spec
        self._ranges = ranges
        self._closed = False
        self._renew()
        _stores.add(self)
        self._site: _Site | None = None
        why = "http_only is set"
        if not http_only:
            self._site, why = understood("run", run_id, lambda: _find_site(info))
        if self._site is None:
            log.info("run %s: samples go over HTTP, since the service's files can't be mapped: %s", run_id, why)
        elif transport.address.scheme != "unix":
            # Only the unix socket tells the service whose file it is offered.
            self._site.stages = False

    def _renew(self) -> None:
        """What belongs to one process. The child of a fork has none of its parent's pins."""
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._pins: dict[int, _Pin] = {}
        self._ended: collections.deque[int] = collections.deque()  # handle ids of mappings that have ended

    # -- put -----------------------------------------------------------------------------------------------------------

    def put(
        self, sample_id: str, tensors: Mapping[str, Tensor], run_id: str | None = None, algorithm: FeatureAlgorithm | str | None = None, schema_version: int | None = None,
        target_model_version: str = "0", draft_weight_version: str = "0", num_tokens: int | None = None, *, attributes: Mapping[str, str] | None = None, reservation: Reservation | str | None = None,
    ) -> SampleRef:
        """Copy tensors (torch on any device, or numpy; also non-contiguous) into the store, written once.

        What is left out is the run's own: run_id, algorithm and schema_version. ``num_tokens`` is the sum of attention_mask, or of loss_mask where there is none.
        ``attributes`` are those that the run's schema wants. ``reservation`` is one from :meth:`sluice.RunQueue.reserve`, or its id; without it the put goes by the caps.

        Raises InvalidError, DuplicateError, FullError, NoSpaceError, SchemaError, ClosedError, UnavailableError.
        """
        self._enter("put")
        for name, value in (("tensors", tensors), ("attributes", {} if attributes is None else attributes)):
            if not isinstance(value, Mapping):
                raise InvalidError(f"is a {type(value).__name__}, want a mapping by name", op="put", subject=name)
        schema = self._spec.get("schema") or {}
        specs = tensorfile.specs_of(tensors)
        ref = SampleRef(
            sample_id=sample_id, run_id=self.run_id if run_id is None else run_id, store_uri=self.store_uri,
            feature_keys={name: f"{sample_id}/{name}" for name in tensors}, feature_specs=specs,
            algorithm=_algorithm(str(schema.get("name", "")) if algorithm is None else algorithm),
            schema_version=int(schema.get("version", 1)) if schema_version is None else schema_version,
            num_tokens=_count_tokens(tensors) if num_tokens is None else num_tokens,
            estimated_bytes=sum(spec.nbytes for spec in specs.values()), target_model_version=target_model_version, draft_weight_version=draft_weight_version,
            generation=new_id(), attributes=dict(attributes or {}),
        )
        header, views = tensorfile.encode(tensors, {REF_KEY: ref.to_json().decode()})
        room = None if reservation is None else reservation if isinstance(reservation, str) else reservation.id
        if self._site is not None and self._site.stages:
            self._stage(ref, header, views, room)
        else:
            self._upload(ref, header, views, room)
        return ref

    def _fields(self, ref: SampleRef) -> dict[str, Any]:
        # Which put it is, so that the service knows a repetition before it looks at the file, which says the rest.
        algorithm = ref.algorithm.value if isinstance(ref.algorithm, FeatureAlgorithm) else ref.algorithm
        return {"generation": ref.generation, "algorithm": algorithm, "num_tokens": ref.num_tokens}

    def _stage(self, ref: SampleRef, header: bytes, views: Sequence[memoryview], reservation: str | None) -> None:
        assert self._site is not None
        size = len(header) + sum(v.nbytes for v in views)
        name = self._spare(size) if size >= _SPARE_FROM else ""
        fresh = not name
        name = name or new_id()
        path = os.path.join(self._site.staging, name)
        try:
            _write_file(path, header, views, fresh)
            body: dict[str, Any] = {"file": name, "sample_id": ref.sample_id, "fields": self._fields(ref)}
            if reservation:
                body["reservation"] = reservation
            try:
                self._t.call("POST", f"{self._run}/stage", body)
            except (DuplicateError, NotFoundError, InvalidError) as e:
                again = e.__dict__.get("attempts", 1) > 1
                if not again or not self._was_put(ref):
                    if again and isinstance(e, NotFoundError):  # a service that ends while it takes the file takes it along
                        raise UnavailableError(
                            f"the service went away while it took the file, and now it says: {e}", op="store: put", subject=ref.sample_id, hint="put the sample again"
                        ) from None
                    raise
        except SluiceError:
            _remove(path)
            raise
        except BaseException:
            _remove(path)
            self._take_back(ref)  # the caller was interrupted: nothing of it stays
            raise

    def _spare(self, size: int) -> str:
        """The name of a freed sample's file that lies in the staging directory to be written over, which takes half the time of a fresh one; or none."""
        answer = self._t.call("POST", f"{self._run}/spare", {"bytes": size})
        name = understood("spare", self.run_id, lambda: text(fields(answer).get("file", "")))
        if name != os.path.basename(name) or name in (".", "..") or not name.isprintable():
            raise CorruptError("the service gave no bare file name", op="spare", subject=self.run_id)
        return name

    def _was_put(self, ref: SampleRef) -> bool:
        """Whether the refusal of a repeated put is the echo of a success."""
        try:
            return self._t.head(self._path(ref)) // 100 == 2
        except SluiceError:
            return False  # then the error that is known stands

    def _upload(self, ref: SampleRef, header: bytes, views: Sequence[memoryview], reservation: str | None) -> None:
        path = f"{self._run}/samples/{quote(ref.sample_id, safe='')}"
        if reservation:
            path += f"?reservation={quote(reservation, safe='')}"
        size = len(header) + sum(v.nbytes for v in views)
        headers = {"Content-Type": "application/octet-stream", "Content-Length": str(size), "Sluice-Sample": json.dumps(self._fields(ref), separators=(",", ":"))}
        request = new_id()
        made = 0

        def send(s: socket.socket) -> None:
            for view in (memoryview(header), *views):
                for at in range(0, view.nbytes, _SEND_BYTES):
                    s.sendall(view[at:at + _SEND_BYTES])

        def once() -> None:
            nonlocal made
            made += 1
            with self._t.exchange("PUT", path, request, headers, None, timeout=_STALL_SECONDS, upload=send) as response:
                read_json(response)

        try:
            self._t.repeat(once)
        except (DuplicateError, NotFoundError, InvalidError):
            if made < 2 or not self._was_put(ref):
                raise
        except SluiceError:
            raise
        except BaseException:
            self._take_back(ref)  # the caller was interrupted: nothing of it stays
            raise

    def _take_back(self, ref: SampleRef, again: bool = True) -> None:
        if again:
            self._t.owe(lambda: self._take_back(ref, again=False))  # the put may be on its way yet, and come in behind this
        try:
            self._t.give_back("POST", f"{self._run}/abort", {"ref": ref.wire()})
        except (NotFoundError, ConflictError, ClosedError):
            pass  # it had not come so far, or it went with the session
        except SluiceError as e:
            log.warning("run %s: can't take back the put of %s, which ends with its reservation: %s", self.run_id, ref.sample_id, str(e))

    def _path(self, ref: SampleRef, what: str = "") -> str:
        return f"{self._run}/samples/{quote(ref.sample_id, safe='')}{what}?generation={quote(ref.generation, safe='')}"

    # -- get -----------------------------------------------------------------------------------------------------------

    def get(self, ref: SampleRef, device: torch.device | str | None = None) -> tuple[dict[str, Tensor], StoreHandle]:
        """The sample's tensors: torch's where torch can be imported, numpy's otherwise. They may be written to.

        With a device they are moved there, and the memory of the host is free again. Raises NotFoundError (freed, of an earlier put, of another store), CorruptError, ClosedError,
        UnavailableError.
        """
        self._enter("get")
        if ref.store_uri != self.store_uri:
            raise NotFoundError(f"is in the store {ref.store_uri}, this is {self.store_uri}", op="get", subject=ref.sample_id)
        pin_id = new_id()
        handle = StoreHandle(self, ref.sample_id, ref)
        mapped = self._site is not None
        pinned = False
        try:
            granted = self._t.call("POST", f"{self._run}/pins", {"ref": ref.wire(), "map": mapped, "handle": pin_id})
            pinned = True
            memory = self._map(ref, granted) if mapped else self._fetch(ref, granted, pin_id)
            tensors = self._check(ref, memory)
            if device is not None:
                tensors = _to_device(tensors, device)
            pin = _Pin(handle, pin_id, None, mapped=mapped)
            with self._lock:
                self._pins[handle.handle_id] = pin
                if self._pin_again not in self._t.on_return:
                    self._t.on_return.append(self._pin_again)  # which also keeps the store while it has pins
            if mapped:
                self._t.work_later()
                later, ended, flush, number = self._t._later, self._ended, self._flush, handle.handle_id

                def end(_: object) -> None:  # in a finalizer: it takes no lock
                    ended.append(number)
                    later.put(flush)

                pin.memory = weakref.ref(memory, end)
        except BaseException as e:
            with self._lock:
                if handle.handle_id in self._pins:
                    self._forget(handle.handle_id)
            if pinned or not isinstance(e, SluiceError) or isinstance(e, UnavailableError):
                self._undo(pin_id, pinned)  # otherwise the service has refused it
            if not pinned and isinstance(e, NotFoundError):
                e.hint = e.hint or "it was acked or freed, or put anew under its id"
            elif mapped and isinstance(e, (CorruptError, NotFoundError)) and not self._still_there(ref):
                raise NotFoundError("was freed while it was opened", op="get", subject=ref.sample_id) from e
            raise
        return tensors, handle

    def _map(self, ref: SampleRef, granted: Mapping[str, Any]) -> mmap.mmap:
        assert self._site is not None
        name, size = understood("get", ref.sample_id, lambda: (text(fields(granted)["file"]), count(granted["size"])))
        if name != os.path.basename(name) or name in ("", ".", "..") or not name.isprintable():
            raise CorruptError("the service gave no bare file name", op="get", subject=ref.sample_id)
        self._fits(ref, size)
        try:
            fd = os.open(os.path.join(self._site.dir, name), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            raise NotFoundError("its file is gone", op="get", subject=ref.sample_id) from None
        except OSError as e:
            raise _unopened(e)(f"its file can't be opened: {e.strerror}", op="get", subject=ref.sample_id) from e
        try:
            # The lock comes before the mapping: a file that a reader has locked is never written again. The mapping keeps a copy of the descriptor, and so the lock.
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if os.fstat(fd).st_size != size:
                raise CorruptError(f"its file has {os.fstat(fd).st_size} bytes, want {size}", op="get", subject=ref.sample_id)
            return mmap.mmap(fd, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        except BlockingIOError:
            raise UnavailableError("another process holds an exclusive lock on its file", op="get", subject=ref.sample_id) from None
        except OSError as e:
            raise (NoSpaceError if e.errno == errno.ENOMEM else UnavailableError)(f"its file can't be mapped: {e.strerror}", op="get", subject=ref.sample_id) from e
        finally:
            os.close(fd)

    def _fits(self, ref: SampleRef, size: int) -> None:
        """Hold the size that the service gives against the ref, before memory is taken for it."""
        data = 8 + sum(spec.nbytes for spec in ref.feature_specs.values())
        if not data <= size <= data + tensorfile.MAX_HEADER:
            raise CorruptError(f"its file has {size} bytes, want {data} and a header of {tensorfile.MAX_HEADER} at most", op="get", subject=ref.sample_id)

    def _check(self, ref: SampleRef, memory: mmap.mmap) -> dict[str, Tensor]:
        header = tensorfile.parse_header(memory, len(memory))
        if header.metadata.get(REF_KEY, "").encode() != ref.to_json():
            raise CorruptError("the file has another ref in its metadata than the one that was asked for", op="get", subject=ref.sample_id)
        for name, spec in ref.feature_specs.items():
            entry = header.entries.get(name)
            if entry is None:
                raise CorruptError(f"the file lacks the feature {name!r}", op="get", subject=ref.sample_id)
            if entry.dtype != spec.dtype_name or tuple(entry.shape) != tuple(spec.shape):
                raise CorruptError(
                    f"the feature {name!r} is {entry.dtype} {list(entry.shape)} in the file, the ref says {spec.dtype_name} {list(spec.shape)}", op="get", subject=ref.sample_id
                )
        if len(header.entries) != len(ref.feature_specs):
            raise CorruptError(f"the file has {len(header.entries)} features, the ref promises {len(ref.feature_specs)}", op="get", subject=ref.sample_id)
        return tensorfile.decode(memory, ref.feature_names(), header=header)

    def _still_there(self, ref: SampleRef) -> bool:
        try:
            return self._t.head(self._path(ref)) != 404
        except SluiceError:
            return True  # then the error that is known stands

    def _undo(self, pin_id: str, certain: bool = True) -> None:
        """Take back the pin of a get that failed, which is no release: it must not free a sample that nobody claims yet. ``certain`` says that the pin was answered."""
        if not certain:
            self._t.owe(lambda: self._undo(pin_id))  # the call may be on its way yet, and come in behind this
        try:
            self._t.give_back("POST", f"{self._run}/release", {"handles": [pin_id], "undo": True})
        except UnavailableError:
            self._t.owe(lambda: self._undo(pin_id))
        except SluiceError as e:
            log.debug("run %s: a pin was not taken back, and ends with the session: %s", self.run_id, str(e))

    def _fetch(self, ref: SampleRef, granted: Mapping[str, Any], pin_id: str) -> mmap.mmap:
        size = understood("get", ref.sample_id, lambda: count(fields(granted)["size"]))
        self._fits(ref, size)
        try:
            # Pages of our own, aligned; private, so that not even the child of a fork sees what is written to them.
            memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as e:
            raise NoSpaceError(f"there is no memory for its {size} bytes: {e.strerror}", op="get", subject=ref.sample_id) from e
        again = {"ref": ref.wire(), "map": False, "handle": pin_id}
        cancel = Cancel()
        fetch = _Fetch(self._t, self._path(ref), ref.sample_id, memory, size, lambda: self._t.call("POST", f"{self._run}/pins", again, cancel=cancel), cancel)
        fetch.run(self._ranges, lambda: self._t.call("GET", self._path(ref, "/checksums") + "&kind=crc32", cancel=cancel))
        return memory

    # -- release -------------------------------------------------------------------------------------------------------

    def release(self, handle: StoreHandle) -> None:
        """Give up the pin. Tensors that are still referenced stay valid, and their bytes are counted until they are gone. Idempotent."""
        self.release_many([handle])

    def release_many(self, handles: Sequence[StoreHandle]) -> None:
        """Give up several pins, with one call for all.

        Raises UnavailableError when the service does not answer; then it is made up for when it does again.
        """
        if self._t.closed or self._pid != os.getpid():
            return  # they went with the session; in the child of a fork they are the parent's
        gone: list[str] = []
        kept: list[str] = []
        with self._lock:
            for handle in handles:
                pin = self._pins.get(handle.handle_id)
                if pin is None or pin.handle is not handle and pin.handle != handle or not pin.held:
                    continue
                pin.held = False
                if pin.memory is not None and pin.memory() is not None:
                    pin.mapped = True
                    kept.append(pin.id)
                else:
                    pin.mapped = False
                    self._forget(handle.handle_id)
                    gone.append(pin.id)
        for at in range(0, max(len(gone), len(kept)), _MAX_BATCH):
            self._give_back(gone[at:at + _MAX_BATCH], kept[at:at + _MAX_BATCH])

    def _forget(self, handle_id: int) -> None:
        """Called with the lock."""
        del self._pins[handle_id]
        if not self._pins and self._pin_again in self._t.on_return:
            self._t.on_return.remove(self._pin_again)

    def settle_memory(self) -> None:
        """Wait until the service knows of all memory that is free here by now: a mapping that ends is told of by another thread. Bounded."""
        told = threading.Event()
        self._t.work_later()
        self._t.soon(told.set)
        told.wait(_STALL_SECONDS)

    def _give_back(self, gone: list[str], kept: list[str], behind: bool = False) -> None:
        """Tell the service of pins that are given up, and of those that are but for their mappings. ``behind`` says that nobody waits for it."""
        call = self._t.give_back if behind else self._t.call
        for ids, keep in ((gone, False), (kept, True)):
            if not ids:
                continue
            try:
                call("POST", f"{self._run}/release", {"handles": ids, "keep": True} if keep else {"handles": ids})
            except (ClosedError, NotFoundError):
                pass  # the session has ended, or the run, and the pins with it
            except UnavailableError:
                self._t.owe(lambda: self._give_back(gone, kept, behind=True))  # when it is there again; twice does no harm
                if behind:
                    return
                raise

    def kept(self) -> list[SampleRef]:
        """The samples that were released here while tensors of them were referenced, which they still are: their bytes count until those are gone."""
        with self._lock:
            return [pin.handle.ref for pin in self._pins.values() if not pin.held and pin.mapped]

    def _flush(self) -> None:
        """Mappings have ended. Runs in the transport's thread, and takes all that have by then."""
        gone: list[str] = []
        with self._lock:
            while self._ended:
                number = self._ended.popleft()
                pin = self._pins.get(number)
                if pin is None:
                    continue
                pin.mapped, pin.memory = False, None
                if not pin.held:  # otherwise its release says it
                    self._forget(number)
                    gone.append(pin.id)
        if self._pid == os.getpid() and not self._t.closed:
            for at in range(0, len(gone), _MAX_BATCH):
                self._give_back(gone[at:at + _MAX_BATCH], [], behind=True)

    def _pin_again(self) -> None:
        """A service that was started anew knows nothing of the pins of this process: what is held or mapped here is to count there."""
        if self._pid != os.getpid():
            return
        with self._lock:
            pins = [p for p in self._pins.values() if p.held or p.mapped]
        for pin in pins:
            try:
                self._t.give_back("POST", f"{self._run}/pins", {"ref": pin.handle.ref.wire(), "map": self._site is not None, "handle": pin.id})
                if not pin.held:
                    self._give_back([] if pin.mapped else [pin.id], [pin.id] if pin.mapped else [], behind=True)
            except NotFoundError:
                pass  # it was acked meanwhile
            except ClosedError:
                return
            except UnavailableError as e:
                log.warning("run %s: the service is away again, and pins are taken again when it is back: %s", self.run_id, str(e))
                self._t.owe(self._pin_again)
                return
            except SluiceError as e:
                log.warning("run %s: can't take the pin of %s again, whose bytes count no longer: %s", self.run_id, pin.handle.sample_id, str(e))

    # -- the rest ------------------------------------------------------------------------------------------------------

    def abort(self, ref: SampleRef, *, promptly: bool = False) -> None:
        """Free a sample that was never enqueued, without reading it. ConflictError if it was. ``promptly`` takes 5 s at most, however patient the client is."""
        self._enter("abort")
        if ref.store_uri == self.store_uri:
            (self._t.give_back if promptly else self._t.call)("POST", f"{self._run}/abort", {"ref": ref.wire()})

    def gc(self) -> int:
        self._enter("gc")
        """Free what nobody owns: files of dead writers, samples of dead sessions that were never enqueued. Returns how many."""
        answer = self._t.call("POST", f"{self._run}/gc")
        return understood("gc", self.run_id, lambda: count(fields(answer)["freed"]))

    def counters(self) -> dict[str, Any]:
        """The service's counters of the store: resident, reserved, dead, staging and pool bytes and samples, and the caps with both watermarks."""
        self._enter("health")
        answer = self._t.call("GET", f"{self._run}/health")
        return understood("health", self.run_id, lambda: dict(fields(answer)))

    def health(self) -> StoreHealth:
        """Counters; it waits for no put and no get. Raises ClosedError, UnavailableError."""
        counters = self.counters()
        return understood("health", self.run_id, lambda: health_of(counters))

    def close(self) -> None:
        """Refuse later calls. Samples stay, and so do pins, until they are released or the client is closed."""
        self._closed = True

    def _enter(self, op: str) -> None:
        if self._closed:
            raise ClosedError("the store is closed", op=op, subject=self.store_uri)


def health_of(counters: Mapping[str, Any]) -> StoreHealth:
    """The reference API's health from the service's counters. A watermark of the samples counts as well as one of the bytes."""
    caps = counters["caps"]
    used = {"bytes": int(counters["resident_bytes"]), "samples": int(counters["resident_samples"])}
    high = [used[unit] >= caps[f"high_watermark_{unit}"] for unit in used if caps.get(f"max_{unit}")]
    low = [used[unit] <= caps[f"low_watermark_{unit}"] for unit in used if caps.get(f"max_{unit}")]
    return StoreHealth(used["bytes"], int(caps.get("max_bytes", 0)), used["samples"], any(high), all(low))


def _after_fork() -> None:
    for store in list(_stores):
        store._renew()  # without its lock, which a thread may hold that is not here


os.register_at_fork(after_in_child=_after_fork)


def _algorithm(name: FeatureAlgorithm | str) -> FeatureAlgorithm | str:
    if isinstance(name, FeatureAlgorithm):
        return name
    try:
        return FeatureAlgorithm(name)
    except ValueError:
        return name  # of a schema of the run's own


def _count_tokens(tensors: Mapping[str, Tensor]) -> int:
    for name in ("attention_mask", "loss_mask"):
        if name in tensors:
            return int(tensors[name].sum())
    raise InvalidError("is missing, and there is neither attention_mask nor loss_mask to count it by", op="put", subject="num_tokens")


def _to_device(tensors: dict[str, Tensor], device: torch.device | str) -> dict[str, Tensor]:
    moved: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if not hasattr(tensor, "to"):
            if str(device) != "cpu":
                raise InvalidError(f"is {device!r}, and without torch there is no device but the cpu", op="get", subject="device")
            return tensors
        moved[name] = tensor.to(device)
    return moved


# -- files of the service on this host -------------------------------------------------------------------------------------


@dataclass
class _Site:
    dir: str
    staging: str
    stages: bool


# Where a shared lock and a private mapping are known to do what we need, by statfs(2).
_MAPS = {0x01021994: "tmpfs", 0xEF53: "ext4", 0x58465342: "xfs", 0x9123683E: "btrfs", 0x794C7630: "overlay"}


def _find_site(info: Mapping[str, Any]) -> tuple[_Site | None, str]:
    """Prove that this process sees the service's own files, by the random id in the one beside them. If not, say why."""
    path, want = str(info.get("id_file", "")), str(info.get("id", ""))
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            found = os.read(fd, 64).strip().decode("ascii", "replace")
        finally:
            os.close(fd)
    except OSError as e:
        return None, f"{path}: {e.strerror}"
    if len(want) != 32 or found != want:
        return None, f"the id in {path} is another store's"
    directory, staging = str(info["dir"]), str(info.get("staging_dir", ""))
    kind = _fs_type(directory)
    if kind not in _MAPS:
        return None, f"the file system of {directory} ({kind:#x}) is not known to map safely"
    if not os.access(directory, os.X_OK):
        return None, f"{directory}: no access"
    return _Site(directory, staging, bool(staging) and os.access(staging, os.W_OK | os.X_OK)), ""


def _fs_type(path: str) -> int:
    """f_type of statfs(2), which os.statvfs does not tell; 0 where it can't be had."""
    if not os.uname().sysname == "Linux":
        return 0
    buffer = ctypes.create_string_buffer(256)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.statfs(os.fsencode(path), buffer) != 0:
        return 0
    return int(ctypes.cast(buffer, ctypes.POINTER(ctypes.c_long))[0]) & 0xFFFFFFFF


def _write_file(path: str, header: bytes, views: Sequence[memoryview], fresh: bool) -> None:
    """Write a sample's file: a fresh one, or over one that the service has spared, whose size is right and which nobody may be reading any more."""
    try:
        fd = -1 if fresh else os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            if fd >= 0:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            fd = -1
            os.unlink(path)
        if fd < 0:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            rest: list[memoryview] = [memoryview(header), *(v for v in views if v.nbytes)]
            while rest:
                n = os.writev(fd, rest[:1024])
                while rest and n >= rest[0].nbytes:
                    n -= rest[0].nbytes
                    rest.pop(0)
                if n:
                    rest[0] = rest[0][n:]
        finally:
            os.close(fd)
    except OSError as e:
        kind = NoSpaceError if e.errno in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM) else _unopened(e)
        raise kind(f"the sample can't be written: {e.strerror}", op="put", subject=os.path.dirname(path)) from e


def _unopened(e: OSError) -> type[SluiceError]:
    """What a file that can't be opened means: no permission, no file or folder (the run is gone), or a passing want, as of descriptors."""
    if isinstance(e, PermissionError) or e.errno in (errno.EROFS, errno.ELOOP):
        return DeniedError
    return NotFoundError if isinstance(e, (FileNotFoundError, NotADirectoryError)) else UnavailableError


def _remove(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass  # the service has taken it
    except OSError as e:
        log.warning("can't remove %s: %s", path, e.strerror)


# -- a file of the service elsewhere ---------------------------------------------------------------------------------------


class _Fetch:
    """One download, by several connections into one buffer, each going on where it broke. What comes is summed as it comes, while the processor's cache has it."""

    def __init__(self, transport: Transport, path: str, sample_id: str, memory: mmap.mmap, size: int, repin: Callable[[], Any], cancel: Cancel) -> None:
        self._t, self._path, self._sample, self._size, self._repin, self._cancel = transport, path, sample_id, size, repin, cancel
        self._view = memoryview(memory)
        self._header: tensorfile.Header | None = None
        self._summed: list[tuple[str, int, int, int]] = []  # feature, where the piece begins in the file, its length, its crc32; appended by all threads

    def run(self, ranges: int, checksums: Callable[[], Any]) -> None:
        try:
            head = min(self._size, _HEAD_BYTES)
            self._part(0, head)
            prefix = int.from_bytes(self._view[:8], "little") + 8
            if head < prefix <= self._size:  # a header longer than the first piece
                self._part(head, prefix)
                head = prefix
            self._header = tensorfile.parse_header(self._view, self._size)
            self._sum(0, head)
            parts = self._split(head, ranges)
            if not parts:
                self._compare(checksums())
                return
            with ThreadPoolExecutor(max_workers=len(parts) + 1, thread_name_prefix="sluice-fetch") as pool:
                try:
                    sums = pool.submit(checksums)
                    for job in [pool.submit(self._part, begin, end) for begin, end in parts]:
                        job.result()
                    self._compare(sums.result())
                except BaseException:
                    self._cancel.cancel()  # the other parts, which the end of the block waits for
                    raise
        finally:
            self._view.release()

    def _split(self, begin: int, ranges: int) -> list[tuple[int, int]]:
        left = self._size - begin
        piece = max(_LEAST_PART, -(-left // ranges))
        return [(at, min(self._size, at + piece)) for at in range(begin, self._size, piece)]

    def _sum(self, begin: int, end: int) -> None:
        """Sum what came, each feature by itself."""
        if self._header is None:
            return
        start = self._header.data_start
        for name, entry in self._header.entries.items():
            a, b = max(begin, start + entry.start), min(end, start + entry.end)
            if a < b:
                self._summed.append((name, a, b - a, zlib.crc32(self._view[a:b])))

    def _compare(self, answer: Any) -> None:
        assert self._header is not None
        want = understood("get", self._sample, lambda: fields(fields(answer)["checksums"]))
        got = dict.fromkeys(self._header.entries, 0)
        for name, _, length, crc in sorted(self._summed, key=lambda s: s[1]):
            got[name] = checksum.combine(got[name], crc, length)
        for name, crc in got.items():
            if f"{crc:08x}" != want.get(name):
                raise CorruptError(f"the feature {name!r} has the crc32 {crc:08x}, want {want.get(name)}", op="get", subject=self._sample)

    def _part(self, begin: int, end: int) -> None:
        at = before = begin
        tried = False
        request = new_id()

        def moved() -> bool:
            nonlocal before
            came, before = at > before, at
            return came

        def once() -> None:
            nonlocal at, tried
            if tried:
                self._repin()  # a service that was restarted has lost the pin
            tried = True
            headers = {"Range": f"bytes={at}-{end - 1}"}
            with self._t.exchange("GET", self._path, request, headers, None, timeout=_STALL_SECONDS, streams=True, cancel=self._cancel) as response:
                if response.status != 206:
                    read_json(response)
                    raise CorruptError(f"the service answered a range with the status {response.status}", op="get", subject=self._sample)
                want = f"bytes {at}-{end - 1}/{self._size}"
                if response.headers.get("Content-Range") != want:
                    raise CorruptError(f"the service sent {response.headers.get('Content-Range')!r}, want {want!r}", op="get", subject=self._sample)
                while at < end:
                    n = response.readinto(self._view[at:min(end, at + _READ_BYTES)])
                    if not n:
                        raise Lost(EOFError("the answer ended early"))
                    self._sum(at, at + n)
                    at += n

        self._t.repeat(once, moved=moved, cancel=self._cancel)
