"""What becomes of calls that break, and of what they held: answers that trickle or make no sense, ^C at every exchange, cancelled and closed clients, forks."""

from __future__ import annotations

import gc
import http.server
import json
import os
import pickle
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sluice
from sluice import transport
from sluice.address import parse, resolve
from sluice.queue import Consumer, Settlement
from sluice.store import RunStore
from sluice.transport import Cancel, Cancelled

from .conftest import Service
from .lossy import LossyLine
from .test_queue import NBYTES, put
from .test_store import SCHEMA, sample, until


@pytest.fixture(params=["mapped", "http"])
def run(request: pytest.FixtureRequest, service: Service, run_id: str) -> Iterator[sluice.Run]:
    how: sluice.Client = request.getfixturevalue("client" if request.param == "mapped" else "remote")
    with how.create_run(run_id, schema=SCHEMA, max_bytes=64 << 20) as r:
        yield r
    how.delete_run(run_id)


def nothing_is_left(run: sluice.Run) -> None:
    """No lease, reservation, pin, sample or staged file of the run."""

    def clean() -> bool:
        c = run.store.counters()
        return (c["resident_samples"], c["resident_bytes"], c["reserved_bytes"], run.queue.outstanding_count()) == (0, 0, 0, 0)

    until(clean, 10)
    assert not list(Path(run.store._info["staging_dir"]).iterdir())


# -- answers ---------------------------------------------------------------------------------------------------------------


class _Answers:
    """A service that answers what it is told."""

    def __init__(self) -> None:
        self.body: bytes = b"{}"
        self.pause = 0.0  # in seconds, behind each byte
        self.calls = 0
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                outer.calls += 1
                message = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(outer.body) + outer.body
                if not outer.pause or self.path.startswith("/v1/sessions"):
                    self.wfile.write(message)
                    return
                for at in range(len(message)):
                    self.wfile.write(message[at:at + 1])
                    if outer.stopped.wait(outer.pause):
                        return

            do_GET = do_POST = do_DELETE = do_HEAD = answer

            def log_message(self, format: str, *args: Any) -> None:
                pass

            def handle(self) -> None:
                try:
                    super().handle()
                except OSError:
                    pass  # the client was not patient

        self.stopped = threading.Event()
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        self.stopped.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)


@pytest.fixture
def answers() -> Iterator[_Answers]:
    a = _Answers()
    yield a
    a.close()


def test_an_answer_that_trickles_is_no_answer(answers: _Answers, monkeypatch: pytest.MonkeyPatch) -> None:
    with sluice.Client(answers.url, patience=0.1) as c:
        answers.pause = 0.05  # each byte comes well within the time of an answer, all of them do not
        monkeypatch.setattr(transport, "ANSWER_SECONDS", 0.3)
        began = time.monotonic()
        with pytest.raises(sluice.UnavailableError, match="too long|timed out"):
            c.status()
        assert time.monotonic() - began < 5


WRONG: list[Any] = [None, [], 1, "x", {}, {"results": 3}, {"leases": [1], "end": False}, {"leases": [], "end": "no"}, {"reservations": [{}]}, {"file": "../x", "size": -1}, {"file": 1, "size": "9"}]


@pytest.mark.parametrize("wrong", [*(json.dumps(w) for w in WRONG), "[" * 100_000, "NaN", "1" * 5000], ids=lambda w: w[:24])
def test_an_answer_that_makes_no_sense_is_corrupt(answers: _Answers, wrong: str, service: Service, client: sluice.Client, run_id: str) -> None:
    real = client.create_run(run_id, schema=SCHEMA, max_bytes=1 << 20)
    ref = real.store.put("s", sample(), num_tokens=3)
    put(real, "t")
    (lease,) = real.queue.acquire(Consumer("x"), timeout=5).leases
    with sluice.Client(answers.url, patience=0.5) as c:
        mapped = RunStore(c._t, run_id, real.store._info, real.store._spec)
        fetched = RunStore(c._t, run_id, real.store._info, real.store._spec, http_only=True)
        queue = sluice.RunQueue(c._t, run_id, 30)
        answers.body = wrong.encode()
        calls: list[Callable[[], Any]] = [
            c.runs, lambda: c.run("r"), lambda: c.create_run("r", schema=SCHEMA, max_bytes=1), lambda: mapped.get(ref), lambda: fetched.get(ref), mapped.gc, mapped.health,
            lambda: queue.reserve(1, timeout=0), lambda: queue.put(ref), lambda: queue.put_blocks_until_below(ref, timeout=0), lambda: queue.acquire(Consumer("x")),
            lambda: queue.settle(Consumer("x"), [Settlement(1, "ack")]), lambda: queue.renew(Consumer("x"), [lease]), queue.pending_count, queue.outstanding_count, lambda: queue.is_closed,
            queue.reclaim_expired, lambda: queue.requeue("a"),
        ]
        for call in calls:
            with pytest.raises((sluice.CorruptError, sluice.WaitTimeoutError)):
                call()


def test_a_size_is_held_against_the_ref_before_memory_is_taken(answers: _Answers, client: sluice.Client, run_id: str) -> None:
    real = client.create_run(run_id, schema=SCHEMA, max_bytes=1 << 20)
    ref = real.store.put("s", sample(), num_tokens=3)
    with sluice.Client(answers.url, patience=0.5) as c:
        fetched = RunStore(c._t, run_id, real.store._info, real.store._spec, http_only=True)
        for size in (0, 7, NBYTES, 1 << 40, 1 << 62):
            answers.body = json.dumps({"file": "s.safetensors", "size": size}).encode()
            with pytest.raises(sluice.CorruptError, match=str(size)):
                fetched.get(ref)


def test_a_refusal_that_is_no_echo_stays_one(client: sluice.Client, run_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A put that was made twice and refused is a success only if the sample is there, not if asking for it is refused as well."""
    run = client.create_run(run_id, schema=SCHEMA, max_bytes=1 << 20)
    real = client._t.call

    def refused(method: str, path: str, body: Any = None, **more: Any) -> Any:
        if path.endswith("/stage"):
            error = sluice.DuplicateError("taken")
            error.__dict__["attempts"] = 2
            raise error
        return real(method, path, body, **more)

    monkeypatch.setattr(client._t, "call", refused)
    for status in (403, 404, 500):
        monkeypatch.setattr(client._t, "head", lambda path, status=status: status)
        with pytest.raises(sluice.DuplicateError):
            run.store.put("s", sample(), num_tokens=3)
    nothing_is_left(run)


# -- interrupts ------------------------------------------------------------------------------------------------------------


class _Interrupts:
    """Raises KeyboardInterrupt in this thread before, or right after, the n-th time that something is sent or received."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left = -1
        self.after = False
        thread = threading.current_thread()
        for cls in (transport._Socket,):
            for name in ("sendall", "recv_into"):
                real = getattr(cls, name)

                def counted(s: Any, *args: Any, real: Any = real) -> Any:
                    mine = threading.current_thread() is thread and self.left >= 0
                    if mine:
                        self.left -= 1
                    if mine and self.left < 0 and not self.after:
                        raise KeyboardInterrupt
                    answer = real(s, *args)
                    if mine and self.left < 0 and self.after:
                        raise KeyboardInterrupt
                    return answer

                monkeypatch.setattr(cls, name, counted)

    def everywhere(self, work: Callable[[], Any], check: Callable[[], None]) -> int:
        """Interrupt work at its first exchange, then at its second, until it comes through. Returns how often it was."""
        times = 0
        for self.after in (False, True):
            for n in range(100):
                self.left = n
                try:
                    work()
                except KeyboardInterrupt:
                    times += 1
                    check()
                    continue
                finally:
                    through, self.left = self.left >= 0, -1
                assert through, "the interrupt was swallowed"
                break
        return times


def test_an_interrupted_put_leaves_nothing(run: sluice.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    refs: list[sluice.SampleRef] = []
    names = iter(range(1000))
    interrupts = _Interrupts(monkeypatch)
    assert interrupts.everywhere(lambda: refs.append(run.store.put(f"s{next(names)}", sample(), num_tokens=3)), lambda: nothing_is_left(run) if not refs else None) >= 4
    assert len(refs) == 2
    for ref in refs:
        run.store.abort(ref)
    nothing_is_left(run)


def test_an_interrupted_get_leaves_no_pin_and_frees_nothing(run: sluice.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    ref = run.store.put("s", sample(), num_tokens=3)
    got: list[Any] = []
    assert _Interrupts(monkeypatch).everywhere(lambda: got.append(run.store.get(ref)), lambda: None) >= 4
    for again in got[1:]:
        run.store.release(again[1])
    assert run.store.counters()["resident_samples"] == 1  # the first pin stands
    tensors, handle = got.pop(0)
    assert np.asarray(tensors["input_ids"]).tolist() == [[0, 1, 2]]
    run.store.release(handle)
    got.clear()
    del tensors, again
    gc.collect()
    nothing_is_left(run)


def test_an_interrupted_reserve_or_acquire_leaves_nothing(run: sluice.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    rooms: list[sluice.Reservation] = []
    interrupts = _Interrupts(monkeypatch)
    assert interrupts.everywhere(lambda: rooms.append(run.queue.reserve(100, timeout=5)), lambda: None) >= 2
    run.queue.unreserve(*(r.id for r in rooms))
    nothing_is_left(run)
    put(run, "a")

    def cycle() -> None:
        delivery = run.queue.acquire(Consumer("x"), timeout=5)
        interrupts.left += 1000  # not the settling
        run.queue.settle(Consumer("x"), [Settlement(lease.lease_id, "return") for lease in delivery.leases])

    def free() -> None:
        until(lambda: run.queue.outstanding_count() == 0, 10)

    assert interrupts.everywhere(cycle, free) >= 2
    run.queue.ack(Consumer("x"), *run.queue.acquire(Consumer("x"), timeout=5).leases)
    nothing_is_left(run)


def test_an_interrupted_producer_leaves_nothing_but_what_it_enqueued(run: sluice.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    producer = run.producer("p").start()
    names = iter(range(1000))
    done: list[sluice.SampleRef] = []
    assert _Interrupts(monkeypatch).everywhere(lambda: done.append(producer.put(f"s{next(names)}", sample(), num_tokens=3, timeout=5)), lambda: None) >= 6
    until(lambda: run.store.counters()["reserved_bytes"] == 0, 10)

    def drained() -> bool:
        if leases := run.queue.acquire(Consumer("x"), max=8, timeout=0).leases:
            run.queue.ack(Consumer("x"), *leases)
        return run.queue.pending_count() == run.queue.outstanding_count() == 0

    until(drained, 20)
    producer.close()
    nothing_is_left(run)


def test_any_exception_of_the_caller_gives_back(client: sluice.Client, run_id: str) -> None:
    """Not only ^C: a signal handler may raise what it likes, and so may abort_when."""
    run = client.create_run(run_id, schema=SCHEMA, max_bytes=4 * NBYTES, high_watermark_bytes=NBYTES, low_watermark_bytes=1)
    room = run.queue.reserve(NBYTES, timeout=5)
    asked: list[int] = []

    def raises() -> bool:
        asked.append(1)
        if len(asked) > 2:
            raise OSError("a disk")
        return False

    with pytest.raises(OSError, match="a disk"):
        run.queue.reserve(NBYTES, abort_when=raises)
    run.queue.unreserve(room.id)
    nothing_is_left(run)  # it was in the line, and would have had the room now


def test_a_get_that_does_not_reach_its_device_leaves_no_pin(run: sluice.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    (ref,) = put(run, "s")
    with pytest.raises(Exception, match="(?i)device|cuda|torch"):
        run.store.get(ref, device="nowhere")
    (lease,) = run.queue.acquire(Consumer("x"), timeout=5).leases
    run.queue.ack(Consumer("x"), lease)
    gc.collect()
    nothing_is_left(run)


# -- cancelled and closed --------------------------------------------------------------------------------------------------


def test_calls_cancelled_at_random_leave_nothing(client: sluice.Client, run_id: str) -> None:
    run = client.create_run(run_id, schema=SCHEMA, max_bytes=6 * NBYTES, high_watermark_bytes=5 * NBYTES, low_watermark_bytes=NBYTES)
    end = time.monotonic() + 2
    broken = [0, 0]
    faults: list[BaseException] = []

    def work(seed: int, call: Callable[[Cancel], Any], use: Callable[[Any], None], which: int) -> None:
        r = random.Random(seed)
        try:
            while time.monotonic() < end:
                cancel = Cancel()
                timer = threading.Timer(r.random() * 0.01, cancel.cancel)
                timer.start()
                try:
                    use(call(cancel))
                except (Cancelled, sluice.WaitTimeoutError):
                    broken[which] += 1
                finally:
                    timer.cancel()
                    timer.join()
        except BaseException as e:
            faults.append(e)

    def produce(room: sluice.Reservation) -> None:
        run.queue.put(run.store.put(f"s-{room.id}", sample(), num_tokens=3, reservation=room))

    threads = [threading.Thread(target=work, args=(i, lambda c: run.queue.reserve(NBYTES, timeout=0.2, cancel=c), produce, 0)) for i in range(2)]
    for i in range(2):
        me = Consumer(f"c{i}")
        threads.append(threading.Thread(
            target=work, args=(10 + i, lambda c, me=me: run.queue.acquire(me, timeout=0.2, cancel=c), lambda d, me=me: run.queue.ack(me, *d.leases) if d.leases else None, 1),
        ))
    for t in threads:
        t.start()
    for t in threads:
        t.join(30)
    assert not faults and not any(t.is_alive() for t in threads)
    assert min(broken) > 5
    until(lambda: run.queue.outstanding_count() == 0 and run.store.counters()["reserved_bytes"] == 0, 10)

    def drained() -> bool:  # what was given up may still be handed back in between
        if leases := run.queue.acquire(Consumer("rest"), max=8, timeout=0).leases:
            run.queue.ack(Consumer("rest"), *leases)
        return run.queue.pending_count() == run.queue.outstanding_count() == 0

    until(drained, 20)
    nothing_is_left(run)


def test_close_ends_the_calls_of_other_threads_at_once(service: Service, run_id: str, request: pytest.FixtureRequest) -> None:
    c = sluice.Client(service.socket)
    request.addfinalizer(c.close)
    run = c.create_run(run_id, schema=SCHEMA, max_bytes=NBYTES)
    room = run.queue.reserve(NBYTES, timeout=5)
    errors: list[BaseException] = []
    calls = [
        lambda: run.queue.acquire(Consumer("x"), timeout=60), lambda: run.queue.acquire(Consumer("y"), timeout=60, cancel=Cancel()), lambda: run.queue.reserve(NBYTES, timeout=60),
        lambda: run.queue.reserve(NBYTES, timeout=60, abort_when=lambda: False),
    ]

    def call(what: Callable[[], Any]) -> None:
        try:
            what()
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=call, args=(what,)) for what in calls]
    for t in threads:
        t.start()
    until(lambda: run.status()["producers_waiting"] >= 1 and run.status()["consumers_waiting"] == 2)
    began = time.monotonic()
    c.close()
    for t in threads:
        t.join(10)
    assert time.monotonic() - began < 5 and [type(e) for e in errors] == [sluice.ClosedError] * len(calls), errors
    for late in (c.status, run.queue.status, lambda: run.queue.unreserve(room.id), lambda: run.store.put("s", sample(), num_tokens=3)):
        with pytest.raises(sluice.ClosedError):
            late()
    with sluice.Client(service.socket) as other:
        nothing_is_left(other.run(run_id))
        other.delete_run(run_id)


def test_close_ends_who_waits_for_a_service_that_is_away(own_service: Service, run_id: str) -> None:
    c = sluice.Client(own_service.socket)
    run = c.create_run(run_id, schema=SCHEMA, max_bytes=1 << 20)
    own_service.kill()
    errors: list[BaseException] = []

    def call() -> None:
        try:
            run.queue.acquire(Consumer("x"), timeout=60, cancel=Cancel())
        except BaseException as e:
            errors.append(e)

    thread = threading.Thread(target=call)
    thread.start()
    time.sleep(0.5)  # into the longer pauses
    began = time.monotonic()
    c.close()
    thread.join(10)
    assert time.monotonic() - began < 6 and [type(e) for e in errors] == [sluice.ClosedError]


def test_what_is_refused_as_closed_does_not_end_what_comes_later(client: sluice.Client) -> None:
    done = threading.Event()

    def refused() -> None:
        raise sluice.ClosedError("the run is closed")

    client._t.work_later()
    client._t.soon(refused)
    client._t.soon(done.set)
    assert done.wait(5)


def test_a_release_that_did_not_get_through_is_made_up_for_without_haste(service: Service, tmp_path: Path, run_id: str) -> None:
    line = LossyLine(service, tmp_path)
    try:
        with sluice.Client(line.socket, patience=0.3) as c:
            run = c.create_run(run_id, schema=SCHEMA, max_bytes=1 << 20)
            ref = run.store.put("s", sample(), num_tokens=3)
            got, handle = run.store.get(ref)
            del got
            gc.collect()
            line.cut = True
            line.break_all()
            with pytest.raises(sluice.UnavailableError):
                run.store.release(handle)
            calls: list[str] = []
            real = c._t.exchange

            def counted(method: str, path: str, *args: Any, **more: Any) -> Any:
                calls.append(path)
                return real(method, path, *args, **more)

            c._t.exchange = counted  # type: ignore[method-assign]
            time.sleep(0.5)
            assert sum("/release" in path for path in calls) <= 1
            line.cut = False
            nothing_is_left(run)
            c.delete_run(run_id)
    finally:
        line.close()


def test_a_store_lives_as_long_as_its_pins_and_no_longer(client: sluice.Client, run_id: str) -> None:
    before = len(client._t.on_return)
    run = client.create_run(run_id, schema=SCHEMA, max_bytes=1 << 20)
    for _ in range(20):
        client.run(run_id)
    assert len(client._t.on_return) == before
    ref = run.store.put("s", sample(), num_tokens=3)
    got, handle = client.run(run_id).store.get(ref)  # nobody but the tensors keeps that store
    handle.store.release(handle)
    del handle
    gc.collect()
    assert run.store.counters()["resident_samples"] == 1
    del got
    gc.collect()
    nothing_is_left(run)
    until(lambda: len(client._t.on_return) == before)


# -- forks -----------------------------------------------------------------------------------------------------------------


def in_child(work: Callable[[], None]) -> None:
    """Run work in a fork, in bounded time."""
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    assert status == 0, f"the child ended with {status}"


def test_the_child_of_a_fork_holds_none_of_its_parents_connections(client: sluice.Client) -> None:
    client.status()
    open_now = [s.fileno() for s in [*client._t._idle, *client._t._end._waiting] if isinstance(s, socket.socket)]
    assert len(open_now) >= 2  # one that is idle, and the session's

    def check() -> None:
        for fd in open_now:
            with pytest.raises(OSError):
                os.fstat(fd)
        assert client.status()["ready"]

    in_child(check)
    assert client.status()["ready"]


def test_a_dead_parent_is_dead_though_its_child_lives(service: Service, client: sluice.Client, run_id: str) -> None:
    run = client.create_run(run_id, schema=SCHEMA, max_bytes=1 << 20)
    put(run, "a")
    code = f"""
import os, sys, time
sys.path[:0] = {[p for p in sys.path if p]!r}
import sluice
run = sluice.connect({service.socket!r}, run={run_id!r})
assert run.queue.acquire(sluice.Consumer("dies"), timeout=5).leases
pid = os.fork()
if pid == 0:
    time.sleep(60)
    os._exit(0)
print(pid, flush=True)
time.sleep(60)
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    try:
        parent.kill()
        parent.wait(10)
        (lease,) = run.queue.acquire(Consumer("next"), timeout=15).leases
        run.queue.ack(Consumer("next"), lease)
    finally:
        os.kill(child, signal.SIGKILL)
        parent.stdout.close()


def test_a_lock_that_another_thread_held_does_not_stop_the_child(run: sluice.Run) -> None:
    ref = run.store.put("s", sample(), num_tokens=3)
    _, handle = run.store.get(ref)
    held, free = threading.Event(), threading.Event()

    def hold() -> None:
        with run.store._lock, run.client._t._lock, run.client._t._end._lock:
            held.set()
            free.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(5)

    def check() -> None:
        run.store.release(handle)  # its parent's
        _, mine = run.store.get(ref)
        run.store.release(mine)
        run.client.close()

    try:
        in_child(check)
    finally:
        free.set()
        thread.join(5)
    assert run.store.counters()["resident_samples"] == 1
    run.store.release(handle)


def test_what_a_child_writes_its_parent_does_not_see(run: sluice.Run) -> None:
    ref = run.store.put("s", sample(), num_tokens=3)
    got, handle = run.store.get(ref)

    def write() -> None:
        got["input_ids"][:] = 77

    in_child(write)
    assert np.asarray(got["input_ids"]).tolist() == [[0, 1, 2]]
    run.store.release(handle)


def test_a_child_does_not_report_the_end_of_its_parents_producer(client: sluice.Client, run_id: str) -> None:
    run = client.create_run(run_id, schema=SCHEMA, max_bytes=1 << 20)
    with run.producer("p") as p:
        in_child(p.close)
        assert not run.queue.is_closed
    assert run.queue.is_closed


# -- arguments -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url", ["http://a..b", "http://ho st:1", "http://host/a b", "http://host/pr\u00e4fix", "http://host:0", "http://host\r\nX: y", "unix:/" + "x" * 200, "unix:/a\0b", "http://[::1", 7],
)
def test_an_address_that_can_not_be_one_is_refused_at_once(url: Any) -> None:
    with pytest.raises(sluice.InvalidError, match="url"):
        parse(url)


def test_a_user_without_a_home_can_name_a_service(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLUICE_STATE", "XDG_STATE_HOME", "SLUICE_URL"):
        monkeypatch.delenv(name, raising=False)

    def none() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", none)
    assert resolve("http://host:1").port == 1
    with pytest.raises(sluice.UnavailableError, match="home"):
        resolve()


@pytest.mark.parametrize("run_id", ["", "..", "a/b", "a b", "x" * 201, None, 7, "\udcff"])
def test_a_name_that_no_run_can_have_is_refused(client: sluice.Client, run_id: Any) -> None:
    with pytest.raises(sluice.InvalidError, match="run_id"):
        client.run(run_id)
    with pytest.raises(sluice.InvalidError, match="run_id"):
        client.delete_run(run_id)


@pytest.mark.parametrize("timeout", [float("nan"), "5", True])
def test_a_timeout_is_a_number(client: sluice.Client, run_id: str, timeout: Any) -> None:
    run = client.create_run(run_id, schema=SCHEMA, max_bytes=1 << 20)
    for wait in (lambda: run.queue.acquire(Consumer("x"), timeout=timeout), lambda: run.queue.reserve(1, timeout=timeout)):
        with pytest.raises(sluice.InvalidError, match="timeout"):
            wait()


def test_arguments_that_have_no_json_form_are_refused(client: sluice.Client, run_id: str) -> None:
    run = client.create_run(run_id, schema=SCHEMA, max_bytes=1 << 20)
    for call in (lambda: run.queue.leave(Consumer("\udcff")), lambda: run.queue.reserve(object(), timeout=1), lambda: client.create_run("x", schema=SCHEMA, max_bytes=float("nan"))):  # type: ignore[arg-type]
        with pytest.raises(sluice.InvalidError):
            call()
    run.queue.close(RuntimeError("no such file: \udcff"))  # of a file's name: the consumers hear of it all the same
    end = run.queue.acquire(Consumer("x"), timeout=5)
    assert end.cause is not None and "no such file: ?" in str(end.cause)


def test_windows_without_ranks_are_refused(client: sluice.Client, run_id: str) -> None:
    more: dict[str, Any]
    for more in ({"prefetch_windows": 2}, {"drop_tail": True}):
        with pytest.raises(sluice.InvalidError, match=next(iter(more))):
            client.create_run(run_id, schema=SCHEMA, max_bytes=1 << 20, **more)


def test_empty_features_come_back_empty(run: sluice.Run) -> None:
    given: dict[str, Any] = {"hidden_states": np.zeros((1, 0, 4), np.float32), "input_ids": np.zeros((1, 0), np.int64)}
    ref = run.store.put("s", given, num_tokens=0)
    got, handle = run.store.get(ref)
    assert [tuple(got[name].shape) for name in got] == [(1, 0, 4), (1, 0)]
    del got
    gc.collect()
    run.store.release(handle)
    nothing_is_left(run)


def test_what_can_not_be_sent_to_another_process_says_so(client: sluice.Client, run_id: str) -> None:
    run = client.create_run(run_id, schema=SCHEMA, max_bytes=1 << 20)
    ref = run.store.put("s", sample(), num_tokens=3)
    assert pickle.loads(pickle.dumps(ref)) == ref
    _, handle = run.store.get(ref)
    for value in (client, run, run.store, run.queue, handle):
        with pytest.raises(sluice.UnsupportedError, match="another process"):
            pickle.dumps(value)
    run.store.release(handle)


def test_no_token_in_what_is_shown(service: Service) -> None:
    token = resolve(service.url, state_dir=service.state).token
    with sluice.Client(service.url, state_dir=service.state) as c:
        assert token not in repr(c._t.address) + repr(c) + repr(c._t)
        with pytest.raises(sluice.SluiceError) as caught:
            c.run("nobody")
        assert token not in str(caught.value) + repr(caught.value)
