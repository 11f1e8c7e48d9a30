"""The store of a run, through a real service: mapped over the unix socket, and over HTTP as from another host."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sluice
from sluice.store import StoreHandle
from sluice.transport import Lost

from .conftest import Service

SCHEMA: dict[str, Any] = {
    "name": "mine", "version": 1, "features": [
        {"name": "hidden_states", "from": "aux", "axes": ["B", "S", "H"], "dtypes": ["float32"], "required": True},
        {"name": "input_ids", "from": "input_ids", "axes": ["B", "S"], "dtypes": ["int64"], "required": True},
    ],
}


def sample(rows: int = 3, width: int = 4) -> dict[str, Any]:
    return {"hidden_states": np.arange(rows * width, dtype=np.float32).reshape(1, rows, width), "input_ids": np.arange(rows, dtype=np.int64)[None]}


@pytest.fixture(params=["mapped", "http"])
def run(request: pytest.FixtureRequest, service: Service, run_id: str) -> Any:
    how: sluice.Client = request.getfixturevalue("client" if request.param == "mapped" else "remote")
    with how.create_run(run_id, schema=SCHEMA, max_bytes=64 << 20) as r:
        yield r
    how.delete_run(run_id)


def until(claim: Callable[[], bool], seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not claim():
        assert time.monotonic() < end, "it did not become true in time"
        time.sleep(0.005)


def same(a: Any, b: Any) -> bool:
    return bool(np.array_equal(np.asarray(a), np.asarray(b)))


def test_what_was_put_comes_back_in_order(run: sluice.Run) -> None:
    given = sample()
    ref = run.store.put("s", given, num_tokens=3)
    got, handle = run.store.get(ref)
    assert list(got) == list(given) == list(ref.feature_names())
    assert all(same(got[name], given[name]) for name in given)
    run.store.release(handle)


def test_put_copies(run: sluice.Run) -> None:
    given = sample()
    ref = run.store.put("s", given, num_tokens=3)
    given["input_ids"][:] = 99
    got, handle = run.store.get(ref)
    assert same(got["input_ids"], [[0, 1, 2]])
    run.store.release(handle)


def test_what_one_consumer_writes_nobody_else_sees(run: sluice.Run) -> None:
    ref = run.store.put("s", sample(), num_tokens=3)
    mine, a = run.store.get(ref)
    mine["input_ids"][:] = 77
    theirs, b = run.store.get(ref)
    assert same(theirs["input_ids"], [[0, 1, 2]])
    run.store.release(a)
    run.store.release(b)


def test_torch_and_strided_tensors(run: sluice.Run) -> None:
    torch = pytest.importorskip("torch")
    wide = torch.arange(24, dtype=torch.float32).reshape(1, 4, 6)
    given = {"hidden_states": wide[:, ::2, 1:5].contiguous().transpose(1, 2).transpose(1, 2), "input_ids": torch.arange(8)[None, ::4]}
    given["hidden_states"] = wide[:, ::2, 1:5]
    assert not given["hidden_states"].is_contiguous()
    ref = run.store.put("s", given, num_tokens=2)
    got, handle = run.store.get(ref)
    assert all(torch.equal(got[name], given[name]) for name in given)
    run.store.release(handle)


FRAMEWORKS = ["numpy", "torch"]


def _mapping_of(address: int) -> str:
    """The file that is mapped where an address points to, and how."""
    with open("/proc/self/maps") as f:
        for line in f:
            where, how, _, _, _, *name = line.split(maxsplit=5)
            begin, end = (int(part, 16) for part in where.split("-"))
            if begin <= address < end:
                return f"{how} {name[0].strip() if name else ''}"
    raise AssertionError("nothing is mapped there")


def _address(tensor: Any) -> int:
    return int(tensor.ctypes.data if isinstance(tensor, np.ndarray) else tensor.data_ptr())


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_on_the_services_host_tensors_lie_in_the_samples_own_file(client: sluice.Client, run_id: str, framework: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if framework == "torch":
        pytest.importorskip("torch")
    else:
        monkeypatch.setattr(sluice.dtypes, "torch_module", lambda: None)
    run = client.create_run(run_id, schema=SCHEMA, max_bytes=64 << 20)
    ref = run.store.put("s", sample(300, 5), num_tokens=3)
    got, handle = run.store.get(ref)
    assert run.store._site is not None
    for name, t in got.items():
        assert isinstance(t, np.ndarray) is (framework == "numpy")
        assert _mapping_of(_address(t)) == f"rw-p {os.path.join(os.path.realpath(run.store._site.dir), 's.safetensors')}", name
    a_copy = np.asarray(got["input_ids"]).copy()
    assert ".safetensors" not in _mapping_of(_address(a_copy))  # so the claim could fail
    run.store.release(handle)


def test_on_the_services_host_no_bytes_go_over_the_connection(client: sluice.Client, run_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = client.create_run(run_id, schema=SCHEMA, max_bytes=64 << 20)
    calls: list[tuple[str, str]] = []
    real, staged = client._t.exchange, Path(run.store._info["staging_dir"])
    written: list[int] = []

    def exchange(method: str, path: str, *rest: Any, **more: Any) -> Any:
        if path.endswith("/stage"):
            written.extend(f.stat().st_size for f in staged.iterdir())
        calls.append((method, path.partition("?")[0].rpartition("/")[2]))
        return real(method, path, *rest, **more)

    monkeypatch.setattr(client._t, "exchange", exchange)
    ref = run.store.put("s", sample(300, 5), num_tokens=3)
    _, handle = run.store.get(ref)
    run.store.release(handle)
    assert [c for c in calls if c[1] != "release"] == [("POST", "stage"), ("POST", "pins")]
    assert len(written) == 1 and written[0] > ref.estimated_bytes  # the whole file, once, before the service is told of it


NARROW = ["bfloat16", "float8_e4m3fn", "float8_e5m2"]


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("name", NARROW)
def test_what_numpy_has_not_comes_back_with_its_bits(run: sluice.Run, run_id: str, name: str, framework: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """bfloat16 and float8, of torch or of ml_dtypes, also where neighbours are not adjacent."""
    schema = {"name": "narrow", "version": 1, "features": [SCHEMA["features"][0] | {"dtypes": NARROW}, SCHEMA["features"][1]]}
    given: Any
    bits = np.arange(2 * 6 * 8, dtype=np.uint16 if name == "bfloat16" else np.uint8).reshape(1, 12, 8)
    try:
        if framework == "torch":
            torch = pytest.importorskip("torch")
            of = sluice.dtypes.torch_dtype(name)
            given = torch.from_numpy(bits.view(bits.dtype.str.replace("u", "i"))).view(of)[:, ::2, 1:]
        else:
            monkeypatch.setattr(sluice.dtypes, "torch_module", lambda: None)
            given = bits.view(sluice.dtypes.numpy_dtype(name))[:, ::2, 1:]
    except sluice.UnsupportedError as e:
        pytest.skip(str(e))
    with run.client.create_run(f"{run_id}-narrow", schema=schema, max_bytes=1 << 20) as narrow:
        ref = narrow.store.put("s", {"hidden_states": given, "input_ids": np.arange(6)[None]}, num_tokens=6)
        assert ref.feature_specs["hidden_states"].dtype_name == name
        got, handle = narrow.store.get(ref)
        t: Any = got["hidden_states"]
        assert t.dtype == given.dtype and tuple(t.shape) == (1, 6, 7)
        came = t if isinstance(t, np.ndarray) else t.view(sluice.dtypes.torch_module().int16 if name == "bfloat16" else sluice.dtypes.torch_module().int8).numpy()  # type: ignore[union-attr]
        assert np.array_equal(came.view(bits.dtype), bits[:, ::2, 1:])
        narrow.store.release(handle)
    run.client.delete_run(f"{run_id}-narrow")


def test_tensors_outlive_release_and_client(service: Service, run_id: str) -> None:
    with sluice.Client(service.socket) as c:
        run = c.create_run(run_id, schema=SCHEMA, max_bytes=64 << 20)
        ref = run.store.put("s", sample(4096, 16), num_tokens=3)
        run.queue.put(ref)
        (lease,) = run.queue.acquire(sluice.Consumer("c"), timeout=5).leases
        got, handle = run.store.get(ref)
        run.queue.ack(sluice.Consumer("c"), lease)
        run.store.release(handle)
        c.delete_run(run_id)
    gc.collect()
    assert same(got["hidden_states"], sample(4096, 16)["hidden_states"])


def test_bytes_count_until_the_last_tensor_is_gone(client: sluice.Client, run_id: str) -> None:
    run = client.create_run(run_id, schema=SCHEMA, max_bytes=64 << 20)
    ref = run.store.put("s", sample(1024, 4), num_tokens=3)
    got, handle = run.store.get(ref)
    view = got["hidden_states"][0, 5:7]
    run.store.release(handle)
    del got
    gc.collect()
    assert run.store.counters()["resident_bytes"] == ref.estimated_bytes
    assert same(view, sample(1024, 4)["hidden_states"][0, 5:7])
    del view
    gc.collect()
    until(lambda: run.store.counters()["resident_bytes"] == 0)
    with pytest.raises(sluice.NotFoundError):
        run.store.get(ref)


def test_no_descriptor_and_no_mapping_is_left(client: sluice.Client, run_id: str) -> None:
    run = client.create_run(run_id, schema=SCHEMA, max_bytes=64 << 20)

    def held() -> tuple[int, int]:
        with open("/proc/self/maps") as f:
            maps = sum(".safetensors" in line for line in f)
        return len(os.listdir("/proc/self/fd")), maps

    def cycle(n: int) -> None:
        for i in range(n):
            ref = run.store.put(f"s{i}", sample(512, 4), num_tokens=3)
            _, handle = run.store.get(ref)
            run.store.release(handle)

    cycle(3)
    before = held()
    cycle(30)
    gc.collect()
    assert held() == before
    until(lambda: run.store.counters()["resident_samples"] == 0)


def test_release_is_idempotent_and_a_forged_handle_is_useless(run: sluice.Run) -> None:
    ref = run.store.put("s", sample(), num_tokens=3)
    _, a = run.store.get(ref)
    _, b = run.store.get(ref)
    run.store.release(a)
    run.store.release(a)
    run.store.release(StoreHandle(run.store, "other", ref, b.handle_id))
    run.store.release(StoreHandle(run.store, "s", ref))
    got, c = run.store.get(ref)
    assert same(got["input_ids"], [[0, 1, 2]])
    del got
    run.store.release(b)
    run.store.release(c)


@pytest.mark.parametrize(
    ("change", "error", "says"), [
        ({"sample_id": ""}, ValueError, "sample_id"),
        ({"sample_id": "../x"}, ValueError, "sample_id"),
        ({"tensors": {}}, ValueError, ""),
        ({"tensors": {"input_ids": [1, 2]}}, ValueError, "input_ids"),
        ({"tensors": [1, 2]}, ValueError, "tensors"),
        ({"attributes": "x"}, ValueError, "attributes"),
        ({"num_tokens": None}, ValueError, "num_tokens"),
        ({"num_tokens": -1}, ValueError, "num_tokens"),
        ({"run_id": "another"}, ValueError, "run"),
        ({"tensors": {"hidden_states": np.zeros((1, 4 << 20, 8), np.float32), "input_ids": np.zeros((1, 4 << 20), np.int64)}}, MemoryError, "cap"),
    ],
)
def test_bad_puts_are_refused_and_leave_nothing(run: sluice.Run, change: dict[str, Any], error: type[Exception], says: str) -> None:
    before = run.store.counters()
    with pytest.raises(error) as caught:
        arguments: dict[str, Any] = {"sample_id": "s", "tensors": sample(), "num_tokens": 3}
        run.store.put(**(arguments | change))
    assert says in str(caught.value)
    assert isinstance(caught.value, sluice.SluiceError)
    assert run.store.counters()["resident_samples"] == before["resident_samples"]
    staging = Path(run.store._info["staging_dir"])
    assert not list(staging.iterdir())


def test_a_duplicate_is_refused(run: sluice.Run) -> None:
    run.store.put("s", sample(), num_tokens=3)
    with pytest.raises(sluice.DuplicateError) as caught:
        run.store.put("s", sample(), num_tokens=3)
    assert caught.value.code == "duplicate" and isinstance(caught.value, ValueError)


def test_a_put_whose_file_went_with_the_service_may_be_repeated(client: sluice.Client, run_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = client.create_run(run_id, schema=SCHEMA, max_bytes=64 << 20)
    staging, real, calls = Path(run.store._info["staging_dir"]), client._t._attempt, 0

    def takes_along(method: str, path: str, *args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        if path.endswith("/stage"):
            calls += 1
            if calls == 1:
                [file] = staging.iterdir()
                file.unlink()
                raise Lost(ConnectionResetError("the service was killed"))
        return real(method, path, *args, **kwargs)

    monkeypatch.setattr(client._t, "_attempt", takes_along)
    with pytest.raises(sluice.UnavailableError, match="went away while it took the file"):
        run.store.put("s", sample(), num_tokens=3)
    assert calls >= 2
    run.store.abort(run.store.put("s", sample(), num_tokens=3))
    assert not list(staging.iterdir())
    client.delete_run(run_id)


def test_a_ref_of_another_store_or_put_is_not_found(run: sluice.Run, client: sluice.Client, run_id: str) -> None:
    ref = run.store.put("s", sample(), num_tokens=3)
    run.store.abort(ref)
    again = run.store.put("s", sample(), num_tokens=3)
    with pytest.raises(KeyError, match="acked or freed, or put anew"):
        run.store.get(ref)
    other = client.create_run(run_id + "-other", schema=SCHEMA, max_bytes=1 << 20)
    with pytest.raises(sluice.NotFoundError, match=r"this is"):
        other.store.get(again)
    client.delete_run(other.run_id)


def test_health_speaks_of_marks(client: sluice.Client, run_id: str) -> None:
    run = client.create_run(run_id, schema=SCHEMA, max_bytes=10_000, high_watermark_bytes=100, low_watermark_bytes=50)
    empty = run.store.health()
    assert (empty.resident_bytes, empty.capacity_bytes, empty.sample_count, empty.high_watermark_hit, empty.low_watermark_hit) == (0, 10_000, 0, False, True)
    ref = run.store.put("s", sample(8, 4), num_tokens=3)
    full = run.store.health()
    assert (full.resident_bytes, full.sample_count, full.high_watermark_hit, full.low_watermark_hit) == (ref.estimated_bytes, 1, True, False)


def test_a_closed_store_refuses(run: sluice.Run) -> None:
    ref = run.store.put("s", sample(), num_tokens=3)
    got, _ = run.store.get(ref)
    run.store.close()
    run.store.close()
    for call in (lambda: run.store.get(ref), lambda: run.store.put("t", sample(), num_tokens=1), run.store.health, run.store.gc):
        with pytest.raises(RuntimeError):
            call()
    assert same(got["input_ids"], [[0, 1, 2]])


@pytest.mark.parametrize("ranges", [1, 4])
def test_a_download_is_of_parallel_ranges_into_one_buffer(service: Service, run_id: str, ranges: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with sluice.Client(service.url, state_dir=service.state, http_only=True, ranges=ranges) as far, far.create_run(run_id, schema=SCHEMA, max_bytes=64 << 20) as run:
        given = sample(400_000, 8)
        ref = run.store.put("s", given, num_tokens=3)
        monkeypatch.setattr(sluice.store, "_LEAST_PART", 1 << 20)  # this sample is worth four connections
        real = far._t.exchange
        asked: list[tuple[int, int]] = []
        all_at_once = threading.Barrier(ranges)

        def exchange(method: str, path: str, request: str, headers: dict[str, str], *rest: Any, **more: Any) -> Any:
            if "Range" in headers:
                begin, end = headers["Range"].removeprefix("bytes=").split("-")
                asked.append((int(begin), int(end) + 1))
                if len(asked) > 1:  # the first one is the header's
                    all_at_once.wait(20)
            return real(method, path, request, headers, *rest, **more)

        monkeypatch.setattr(far._t, "exchange", exchange)
        got, handle = run.store.get(ref)
        asked.sort()
        assert len(asked) == 1 + ranges
        assert [end for _, end in asked[:-1]] == [begin for begin, _ in asked[1:]] and asked[0][0] == 0  # each byte once
        assert all(same(got[name], given[name]) for name in given)
        a, b = (_mapping_of(_address(t)) for t in got.values())
        assert a == b and ".safetensors" not in a
        run.store.release(handle)


def test_a_damaged_download_is_corrupt(remote: sluice.Client, run_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = remote.create_run(run_id, schema=SCHEMA, max_bytes=64 << 20)
    ref = run.store.put("s", sample(200_000, 8), num_tokens=3)
    import http.client

    real = http.client.HTTPResponse.readinto

    def flipped(self: http.client.HTTPResponse, buffer: Any) -> int:
        n = real(self, buffer)
        if n > 100_000:
            buffer[n - 1] ^= 1
        return n

    monkeypatch.setattr(http.client.HTTPResponse, "readinto", flipped)
    with pytest.raises(sluice.CorruptError, match="crc32"):
        run.store.get(ref)
    monkeypatch.undo()
    got, handle = run.store.get(ref)  # and the pin of the failed get was no release
    assert same(got["hidden_states"], sample(200_000, 8)["hidden_states"])
    run.store.release(handle)


def test_a_broken_download_goes_on_where_it_broke(remote: sluice.Client, run_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = remote.create_run(run_id, schema=SCHEMA, max_bytes=64 << 20)
    ref = run.store.put("s", sample(400_000, 8), num_tokens=3)
    import http.client

    real = http.client.HTTPResponse.readinto
    broken: list[int] = []
    lock = threading.Lock()

    def breaks(self: http.client.HTTPResponse, buffer: Any) -> int:
        with lock:
            if len(broken) < 6 and len(buffer) > 100_000:
                broken.append(len(buffer))
                raise ConnectionResetError("the cable")
        return real(self, buffer[:300_000])

    monkeypatch.setattr(http.client.HTTPResponse, "readinto", breaks)
    got, handle = run.store.get(ref)
    assert len(broken) == 6
    assert same(got["hidden_states"], sample(400_000, 8)["hidden_states"])
    run.store.release(handle)


def _child_of_fork(run: sluice.Run, ref: sluice.SampleRef, handle: StoreHandle, out: Any) -> None:
    run.store.release(handle)  # the parent's: it must do nothing
    got, mine = run.store.get(ref)
    out.put((run.client._t.session, np.asarray(got["input_ids"]).tolist()))
    run.store.release(mine)
    run.client.close()


def test_the_child_of_a_fork_has_a_session_of_its_own_and_owns_nothing(client: sluice.Client, run_id: str) -> None:
    run = client.create_run(run_id, schema=SCHEMA, max_bytes=64 << 20)
    ref = run.store.put("s", sample(), num_tokens=3)
    _, handle = run.store.get(ref)
    fork = multiprocessing.get_context("fork")
    out = fork.Queue()
    child = fork.Process(target=_child_of_fork, args=(run, ref, handle, out))
    child.start()
    session, ids = out.get(timeout=20)
    child.join(20)
    assert child.exitcode == 0
    assert session != client._t.session and ids == [[0, 1, 2]]
    again, second = run.store.get(ref)  # the parent's pin stands: a sample without claim goes with its last pin
    run.store.release(second)
    run.store.release(handle)


def test_a_killed_process_leaves_no_pin(client: sluice.Client, service: Service, run_id: str) -> None:
    run = client.create_run(run_id, schema=SCHEMA, max_bytes=64 << 20)
    ref = run.store.put("s", sample(), num_tokens=3)
    run.queue.put(ref)
    spawn = multiprocessing.get_context("spawn")
    ready = spawn.Event()
    child = spawn.Process(target=_hold_for_ever, args=(service.socket, run_id, ready))
    child.start()
    assert ready.wait(30)
    assert run.queue.outstanding_count() == 1
    os.kill(child.pid or 0, signal.SIGKILL)
    child.join(10)
    (lease,) = run.queue.acquire(sluice.Consumer("next"), timeout=15).leases  # its lease comes back without running out
    run.queue.ack(sluice.Consumer("next"), lease)
    until(lambda: run.store.counters()["resident_samples"] == 0)


FORKS_AND_DIES = """
import os, signal, sys, time, sluice
run = sluice.connect(sys.argv[1], run=sys.argv[2])
(lease,) = run.queue.acquire(sluice.Consumer("dies"), timeout=5).leases
if os.fork() == 0:
    time.sleep(120)
    os._exit(0)
print("forked", flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_child_that_outlives_its_parent_does_not_keep_the_parents_leases(client: sluice.Client, service: Service, run_id: str) -> None:
    """The child has copies of all that its parent had open, the connection by which the service knows that the parent lives among them."""
    run = client.create_run(run_id, schema=SCHEMA, max_bytes=64 << 20, visibility_timeout=600)
    run.queue.put(run.store.put("s", sample(), num_tokens=3))
    program = [sys.executable, "-c", FORKS_AND_DIES, service.socket, run_id]
    parent = subprocess.Popen(program, stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}, start_new_session=True)
    try:
        assert parent.stdout is not None and parent.stdout.readline() == b"forked\n"
        assert parent.wait(20) == -signal.SIGKILL
        (lease,) = run.queue.acquire(sluice.Consumer("next"), timeout=20).leases
        run.queue.ack(sluice.Consumer("next"), lease)
        os.killpg(parent.pid, 0)  # the child is there still
    finally:
        os.killpg(parent.pid, signal.SIGKILL)
        parent.communicate(timeout=20)


def _hold_for_ever(socket: str, run_id: str, ready: Any) -> None:
    run = sluice.connect(socket, run=run_id)
    (lease,) = run.queue.acquire(sluice.Consumer("dies"), timeout=5).leases
    run.store.get(lease.ref)
    ready.set()
    time.sleep(60)


def test_a_service_that_restarts_is_waited_for(own_service: Service, run_id: str) -> None:
    with sluice.Client(own_service.socket) as c:
        run = c.create_run(run_id, schema=SCHEMA, max_bytes=64 << 20)
        ref = run.store.put("s", sample(), num_tokens=3)
        run.queue.put(ref)
        got, handle = run.store.get(ref)
        own_service.kill()
        threading.Timer(0.3, own_service.start).start()
        (lease,) = run.queue.acquire(sluice.Consumer("c"), timeout=20).leases
        assert lease.ref == ref
        run.queue.ack(sluice.Consumer("c"), lease)
        assert same(got["input_ids"], [[0, 1, 2]])
        run.store.release(handle)
        del got
        gc.collect()
        until(lambda: run.store.counters()["resident_samples"] == 0, 10)


def test_a_service_that_is_gone_is_unavailable_within_the_patience(own_service: Service, run_id: str) -> None:
    c = sluice.Client(own_service.socket, patience=0.3)
    run = c.create_run(run_id, schema=SCHEMA, max_bytes=1 << 20)
    own_service.kill()
    began = time.monotonic()
    with pytest.raises(sluice.UnavailableError, match="has not answered|does not answer"):
        run.store.put("s", sample(), num_tokens=3)
    assert time.monotonic() - began < 10
    c.close()
    with pytest.raises(sluice.ClosedError):
        c.status()


def test_errors_can_be_sent_between_processes() -> None:
    for cls in sluice.errors.BY_CODE.values():
        e = pickle.loads(pickle.dumps(cls("wrong", op="put", subject="s", hint="mend it")))
        assert type(e) is cls and str(e) == "put: s: wrong (mend it)" and e.code == cls.code


def test_an_error_shows_nothing_that_disturbs_a_terminal() -> None:
    assert str(sluice.NotFoundError("gone\x1b[2J", subject="s\u202e\r")) == "s??: gone?[2J"


def test_a_large_sample_is_written_over_a_freed_ones_file_and_never_over_one_that_is_mapped(client: sluice.Client, run_id: str) -> None:
    run = client.create_run(run_id, schema=SCHEMA, max_bytes=256 << 20)

    def large(value: int) -> dict[str, Any]:
        return {"hidden_states": np.full((1, 1024, 1500), value, np.float32), "input_ids": np.full((1, 1024), value, np.int64)}

    def cycle(i: int) -> Any:
        ref = run.store.put(f"s{i}", large(i), num_tokens=1)
        got, handle = run.store.get(ref)
        assert same(got["hidden_states"], large(i)["hidden_states"])
        run.store.release(handle)
        return got

    kept = cycle(100)
    for i in range(4):
        before = run.store.counters()["pool_bytes"]
        cycle(i)
        gc.collect()
        until(lambda: run.store.counters()["pool_bytes"] > 0)
        assert i == 0 or before == run.store.counters()["pool_bytes"]  # the same file, and no other
    assert same(kept["hidden_states"], large(100)["hidden_states"])
