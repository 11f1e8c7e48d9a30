"""Services that a program starts for itself."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import sluice
from sluice import service

SOURCES = str(Path(sluice.__file__).resolve().parents[1])
PATIENCE = 30.0


def until(what: Callable[[], bool], why: str) -> None:
    """Waits, but not for ever, until something is so."""
    end = time.monotonic() + PATIENCE
    while not what():
        assert time.monotonic() < end, why
        time.sleep(0.01)


def runs(pid: int) -> bool:
    """Whether a process is there that is more than a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):  # the latter where it dies between open and read
        return False


def gone(endpoint: service.Endpoint) -> None:
    until(lambda: not runs(endpoint.pid) and not os.path.exists(endpoint.socket), f"process {endpoint.pid} or {endpoint.socket} is left")


@pytest.fixture(autouse=True)
def base(binary: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of private services, apart from others' and short enough; the test's services are gone at its end."""
    runtime = Path(tempfile.mkdtemp(prefix="sl", dir="/tmp"))
    monkeypatch.setenv("SLUICE_BINARY", binary)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    monkeypatch.setenv("PYTHONPATH", SOURCES)
    base = runtime / "sluice"
    yield base
    until(lambda: not [p for p in base.glob("*") if p.suffix != ".log"], "a service is left")
    shutil.rmtree(runtime, ignore_errors=True)  # logs go by themselves


def program(code: str, *arguments: str) -> subprocess.Popen[str]:
    code = "import json, os, sys, signal, time\nimport sluice\nfrom sluice import service\n" + code
    return subprocess.Popen([sys.executable, "-c", code, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def line_of(p: subprocess.Popen[str]) -> str:
    assert p.stdout is not None
    if line := p.stdout.readline():
        return line.strip()
    raise AssertionError(p.communicate(timeout=PATIENCE)[1])


def test_a_local_service_answers_and_leaves_nothing(base: Path) -> None:
    with sluice.local() as client:
        endpoint = client.endpoint
        assert client.status()["pid"] == endpoint.pid
        assert stat.S_IMODE(os.stat(endpoint.folder).st_mode) == 0o700 == stat.S_IMODE(os.stat(base).st_mode)
        assert "url" not in json.loads(Path(endpoint.folder, "endpoint.json").read_bytes())  # the unix socket alone
        store = client.status()["store_dir"]
        client.create_run("r1", algorithm="eagle3", max_samples=4)
    assert not runs(endpoint.pid)
    assert not os.path.exists(store)
    assert os.listdir(base) == []
    client.close()


def test_a_local_service_takes_its_cap_and_its_store(tmp_path: Path) -> None:
    with sluice.local(max_bytes="64MiB", store=tmp_path / "samples", durability="power") as client:
        status = client.status()
        assert (status["max_bytes"], status["store_dir"], status["durability"]) == (64 << 20, str(tmp_path / "samples"), "power")
    assert not (tmp_path / "samples").exists()


@pytest.mark.parametrize(
    "end", ["c.close()", "sys.exit(3)", "raise ValueError", "pass", "del c", "os.kill(os.getpid(), signal.SIGINT); time.sleep(60)"], ids=["close", "exit", "exception", "end", "dropped", "interrupt"],
)
def test_a_local_service_ends_with_its_program(end: str) -> None:
    p = program(f"c = sluice.local(idle=3600)\nprint(c.endpoint.pid, c.endpoint.folder, flush=True)\n{end}")
    pid, folder = line_of(p).split()
    p.communicate(timeout=PATIENCE)
    assert not runs(int(pid))
    assert not os.path.exists(folder)


@pytest.mark.parametrize("end", ["os._exit(1)", "os.kill(os.getpid(), signal.SIGKILL)", "os.kill(os.getpid(), signal.SIGTERM)"], ids=["_exit", "kill", "term"])
def test_a_local_service_does_not_outlive_a_killed_program_for_long(end: str) -> None:
    p = program(f"c = sluice.local(idle=0.1)\nprint(c.endpoint.pid, c.endpoint.folder, flush=True)\n{end}")
    pid, folder = line_of(p).split()
    p.communicate(timeout=PATIENCE)  # no end of a pipe is left with the service
    until(lambda: not runs(int(pid)) and not os.path.exists(folder), "the service is left")


def test_a_forked_child_leaves_the_service_to_its_parent() -> None:
    with sluice.local() as client:
        child = os.fork()
        if child == 0:
            try:
                client.close()
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        assert client.status()["pid"] == client.endpoint.pid


def test_a_service_is_nobodys_child_and_has_nothing_of_its_starter() -> None:
    p = program(
        "read, write = os.pipe()\nos.set_inheritable(write, True)\n"
        "c = sluice.local()\n"
        "try:\n    os.waitpid(-1, os.WNOHANG); raise SystemExit('it is a child')\nexcept ChildProcessError:\n    pass\n"
        "pipe, fds = os.readlink(f'/proc/self/fd/{write}'), f'/proc/{c.endpoint.pid}/fd'\n"
        "held = [os.readlink(f'{fds}/{fd}') for fd in os.listdir(fds)]\n"
        "print(json.dumps([pipe in held, os.getsid(c.endpoint.pid) == os.getsid(0), held[0], os.readlink(f'/proc/{c.endpoint.pid}/cwd')]))\n"
        "c.close()\n"
        "try:\n    os.waitpid(-1, os.WNOHANG); raise SystemExit('a zombie is left')\nexcept ChildProcessError:\n    pass\n"
    )
    out, said = p.communicate(timeout=PATIENCE)
    assert p.returncode == 0, said
    assert json.loads(out) == [False, False, "/dev/null", "/"]


def test_the_settings_of_a_service_elsewhere_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLUICE_MAX_BYTES", "nonsense")
    monkeypatch.setenv("SLUICE_URL", "http://127.0.0.1:1")
    with sluice.local() as client:
        assert client.status()["max_bytes"] == 0


def test_of_eight_that_start_at_once_one_does_and_the_others_join(tmp_path: Path, base: Path) -> None:
    code = "sys.stdin.readline()\nwith service.private(sys.argv[1], idle=0.1) as e:\n    print(e.pid, e.binary is not None, flush=True)\n    sys.stdin.readline()\n"
    starters = [program(code, str(tmp_path)) for _ in range(8)]
    try:
        for p in starters:
            assert p.stdin is not None
            p.stdin.write("go\n")
            p.stdin.flush()
        said = [line_of(p).split() for p in starters]
        assert len({pid for pid, _ in said}) == 1
        assert [started for _, started in said].count("True") == 1
        assert len([p for p in base.iterdir() if p.suffix == ".sock"]) == 1
        assert runs(int(said[0][0]))
    finally:
        for p in starters:
            p.communicate(timeout=PATIENCE)
    until(lambda: not runs(int(said[0][0])), "the service outlives its last client")


def test_who_comes_while_the_service_ends_gets_another(tmp_path: Path) -> None:
    seen = set()
    for _ in range(5):
        with service.private(tmp_path, idle=0.001) as endpoint:
            assert endpoint.pid not in seen
            seen.add(endpoint.pid)
            with sluice.Client(endpoint.url) as client:
                assert client.status()["pid"] == endpoint.pid
        end = time.monotonic() + PATIENCE
        while os.path.exists(endpoint.socket):  # without a pause, so that it is met in the middle of its end
            assert time.monotonic() < end


def test_a_private_service_stays_while_it_is_held_and_ends_after_its_last_client(tmp_path: Path) -> None:
    with service.private(tmp_path, idle=0.1) as endpoint:
        client = sluice.Client(endpoint.url)
    with client:  # also when the one who brought it up has let go, long past the idle time
        end = time.monotonic() + 2.5
        while time.monotonic() < end:
            assert client.status()["pid"] == endpoint.pid
            time.sleep(0.1)
    gone(endpoint)


def test_a_private_service_that_ends_in_order_leaves_no_log(tmp_path: Path, base: Path) -> None:
    p = program("with service.private(idle=0.1) as a, service.private(sys.argv[1], idle=0.1) as b: print(a.log, b.log)", str(tmp_path))
    logs = line_of(p).split()
    p.communicate(timeout=PATIENCE)  # nobody is there any more whom it could tell
    assert [Path(path).parent for path in logs] == [base] * 2
    until(lambda: not any(map(os.path.exists, logs)), "a log is left")


def test_what_a_private_service_said_that_failed_stays_for_a_day(tmp_path: Path) -> None:
    with service.private(tmp_path) as endpoint:
        with open(endpoint.log, "a") as log:
            log.write("panic\n")
        os.kill(endpoint.pid, signal.SIGKILL)
        until(lambda: not runs(endpoint.pid), "it survives a kill")
    with sluice.local(), service.private(tmp_path, idle=0.1) as again:  # which ends in order
        assert again.log == endpoint.log
    gone(again)
    p = program("with service.private(sys.argv[1], idle=0.1): pass", str(tmp_path))  # behind all that the first may still do to the log
    p.communicate(timeout=PATIENCE)
    assert "\npanic\n" in Path(endpoint.log).read_text()
    gone(again)
    os.utime(endpoint.log, (time.time() - 25 * 3600,) * 2)
    with sluice.local():
        assert not os.path.exists(endpoint.log)


def test_there_is_one_service_a_directory(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    (tmp_path / "link").symlink_to("a")
    with service.private(tmp_path / "a", idle=0.1) as a, service.private(tmp_path / "b", idle=0.1) as b, service.private(tmp_path / "b" / ".." / "link", idle=0.1) as link:
        assert a.pid == link.pid != b.pid
        assert a.binary is not None and link.binary is None
        assert sorted(os.listdir(tmp_path / "a")) == ["state", "store"]
        assert not [p for p in tmp_path.rglob("*") if p.is_socket()]
    gone(a)
    gone(b)


def test_what_is_in_a_directory_is_there_again(tmp_path: Path) -> None:
    with service.private(tmp_path, idle=0.1) as endpoint, sluice.Client(endpoint.url) as client:
        run = client.create_run("r", mixed=True, max_samples=4)
        ref = run.store.put("s", {"x": np.arange(4)}, "any", "mine", 1, num_tokens=0)
        run.queue.put(ref)
    gone(endpoint)
    with service.private(tmp_path, idle=0.1) as again, sluice.Client(again.url) as client:
        assert again.pid != endpoint.pid
        run = client.run("r")
        (lease,) = run.queue.acquire(sluice.Consumer("c"), timeout=PATIENCE).leases
        assert lease.ref == ref
        got, handle = run.store.get(ref)
        assert np.asarray(got["x"]).tolist() == [0, 1, 2, 3]
        run.queue.ack(sluice.Consumer("c"), lease)
        run.store.release(handle)
    gone(again)


def test_who_has_another_runtime_directory_joins_nevertheless(tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with service.private(tmp_path, idle=0.1) as a:
        other = base.parent / "other"
        other.mkdir(mode=0o700)
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(other))
        with service.private(tmp_path) as b:
            assert (b.pid, b.socket) == (a.pid, a.socket)
    gone(a)


def test_there_is_one_service_a_process() -> None:
    with service.private(idle=0.1) as a, service.private(idle=0.1) as b:
        assert a.pid == b.pid
        p = program("with service.private(idle=0.1) as e: print(e.pid)")
        assert int(line_of(p)) != a.pid
        p.communicate(timeout=PATIENCE)
    gone(a)


def test_a_directory_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for key, detail in ((tmp_path / "none", "No such file"), (tmp_path / "file", "is no directory")):
        with pytest.raises(sluice.InvalidError, match=detail):
            service.private(key)


def test_what_the_service_said_is_in_the_error_of_a_start_that_fails() -> None:
    with pytest.raises(sluice.UnavailableError, match="(?s)with status .* It said:.*much"):
        sluice.local(max_bytes="much")


@pytest.mark.parametrize("wrong", [{"idle": 0.0}, {"durability": "both"}], ids=["idle", "durability"])
def test_a_wrong_argument_is_refused_by_name(wrong: dict[str, float]) -> None:
    with pytest.raises(sluice.InvalidError, match=next(iter(wrong))):
        sluice.local(**wrong)


def test_a_start_that_takes_too_long_is_given_up_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    never = tmp_path / "never"
    never.write_text(f'#!/bin/sh\n[ "$1" = version ] && exec {os.environ["SLUICE_BINARY"]} "$@"\necho $$ > {tmp_path}/pid\nexec sleep 3600\n')
    never.chmod(0o755)
    monkeypatch.setenv("SLUICE_BINARY", str(never))
    with pytest.raises(sluice.UnavailableError, match="no service answers there after 1 s"):
        sluice.local(timeout=1.0)
    assert not runs(int((tmp_path / "pid").read_text()))


def test_a_service_that_is_too_old_is_not_joined(tmp_path: Path) -> None:
    with service.private(tmp_path, idle=0.1) as endpoint:
        said = Path(endpoint.folder, "endpoint.json")
        word = json.loads(said.read_bytes())
        said.write_text(json.dumps(word | {"api": 0, "version": "v0.0.1"}))
        with pytest.raises(sluice.UnsupportedError, match=f"process {endpoint.pid}: is sluice v0.0.1 with API 0, .* needs API 1"):
            service.private(tmp_path)
    gone(endpoint)


def test_a_service_that_died_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    client = sluice.local()
    os.kill(client.endpoint.pid, signal.SIGKILL)
    until(lambda: not runs(client.endpoint.pid), "it survives a kill")
    with caplog.at_level(logging.WARNING, "sluice"):
        client.close()
    assert f"process {client.endpoint.pid} ended with status 137; {client.endpoint.log} is what it said" in caplog.text
    assert os.path.exists(client.endpoint.log)
    with sluice.local():  # and what it left is removed by the next one
        assert not os.path.exists(client.endpoint.folder)


def test_calls_fail_at_once_when_a_local_service_has_died() -> None:
    with sluice.local() as client:
        run = client.create_run("r", mixed=True, max_samples=4)
        waits: list[BaseException] = []

        def acquire() -> None:
            try:
                run.queue.acquire(sluice.Consumer("c"), timeout=600.0)
            except BaseException as e:
                waits.append(e)

        waiting = threading.Thread(target=acquire)
        waiting.start()
        until(lambda: bool(client.status()["runs"][0]["consumers"]), "nobody waits")
        begin = time.monotonic()
        os.kill(client.endpoint.pid, signal.SIGKILL)
        waiting.join(PATIENCE)
        for _ in range(3):
            with pytest.raises(sluice.UnavailableError, match=f"the private service has died: process {client.endpoint.pid}; {client.endpoint.log} is what it said"):
                client.status()
        assert [type(e) for e in waits] == [sluice.UnavailableError]
        assert client._t._holder is not None
        client._t._holder.join(PATIENCE)
        assert not client._t._holder.is_alive()
    assert time.monotonic() - begin < 10
    with sluice.local():  # which removes what it left
        pass


@pytest.mark.parametrize("squat", ["mode", "link", "file"])
def test_a_folder_that_others_could_have_laid_is_refused(squat: str, base: Path, tmp_path: Path) -> None:
    if squat == "mode":
        base.mkdir()
        base.chmod(0o755)
    elif squat == "link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        base.symlink_to(tmp_path / "elsewhere")
    else:
        base.touch(0o700)
    with pytest.raises(sluice.DeniedError, match=f"{base}: is .* want a directory of this user"):
        sluice.local()
    if base.is_symlink() or base.is_file():
        base.unlink()


def test_a_folder_in_a_directory_that_others_may_change_is_refused(base: Path) -> None:
    base.parent.chmod(0o700)
    open_to_all = base.parent / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    with pytest.raises(sluice.DeniedError, match="may be changed by others"):
        service._make_own(open_to_all / "sluice")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory to somebody else")
def test_a_folder_of_somebody_else_is_refused(base: Path) -> None:
    base.mkdir(mode=0o700)
    os.chown(base, 65534, -1)
    with pytest.raises(sluice.DeniedError, match="of user 65534"):
        sluice.local()


def test_a_runtime_directory_of_no_use_is_passed_over_and_that_is_said(base: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    short = base.parent / "t"
    short.mkdir()
    long = base.parent / ("x" * 60)
    long.mkdir(mode=0o700)
    shared = base.parent / "shared"
    shared.mkdir()
    shared.chmod(0o755)
    monkeypatch.setattr(tempfile, "tempdir", str(short))
    with caplog.at_level(logging.INFO, "sluice"):
        for directory, why in ((shared, "is no directory of this user alone"), (base.parent / "none", "is no directory of this user alone"), (long, "too long a path for sockets")):
            monkeypatch.setenv("XDG_RUNTIME_DIR", str(directory))
            caplog.clear()
            with sluice.local() as client:
                assert Path(client.endpoint.folder).parent == short / f"sluice-{os.geteuid()}"
            assert why in caplog.text


def test_logs_of_services_that_are_long_gone_are_removed(base: Path) -> None:
    base.mkdir(mode=0o700)
    old, new = base / "lold.log", base / "lnew.log"
    for path in (old, new):
        path.touch()
    os.utime(old, (1, 1))
    with sluice.local():
        assert not old.exists()
        assert new.exists()
