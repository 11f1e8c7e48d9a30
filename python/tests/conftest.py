"""A real service for the tests: the binary that $SLUICE_BINARY names, or one built from this checkout."""

from __future__ import annotations

import gc
import json
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import sluice
from sluice import service as private

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def binary(tmp_path_factory: pytest.TempPathFactory) -> str:
    if named := os.environ.get("SLUICE_BINARY"):
        return named
    path = tmp_path_factory.mktemp("bin") / "sluice"
    subprocess.run(["go", "build", "-o", str(path), "./cmd/sluice"], cwd=ROOT, check=True, timeout=600, env=os.environ | {"CGO_ENABLED": "0"})
    return str(path)


class Service:
    """A `sluice serve` that a test may kill and start again."""

    def __init__(self, binary: str, directory: Path, *flags: str) -> None:
        self.binary, self.state, self.flags = binary, directory / "state", flags
        self.store = directory / "store"
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        with open(self.state.parent / "service.log", "ab") as log:
            self.process = subprocess.Popen(
                [self.binary, "serve", "--state", str(self.state), "--store", str(self.store), "--listen", "127.0.0.1:0", *self.flags], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )
        until = time.monotonic() + 30
        while time.monotonic() < until:
            try:
                if json.loads((self.state / "endpoint.json").read_bytes())["pid"] == self.process.pid:
                    return
            except (FileNotFoundError, ValueError):
                pass
            assert self.process.poll() is None, self.log()
            time.sleep(0.01)
        raise AssertionError("the service did not become ready: " + self.log())

    def log(self) -> str:
        return (self.state.parent / "service.log").read_text(errors="replace")[-4000:]

    @property
    def socket(self) -> str:
        return f"unix:{self.state / 'sluice.sock'}"

    @property
    def url(self) -> str:
        return str(json.loads((self.state / "endpoint.json").read_bytes())["url"])

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait(10)

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                raise


@pytest.fixture(scope="session")
def service(binary: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """One service for all tests that don't harm it."""
    s = Service(binary, tmp_path_factory.mktemp("service"), "--max-bytes", "none")  # many runs add up
    yield s
    s.stop()


@pytest.fixture
def own_service(binary: str, tmp_path: Path) -> Iterator[Service]:
    """A service that the test may kill."""
    s = Service(binary, tmp_path)
    yield s
    s.stop()


_runs = 0


@pytest.fixture
def run_id() -> str:
    global _runs
    _runs += 1
    return f"r{os.getpid()}-{_runs}"


@pytest.fixture
def client(service: Service) -> Iterator[sluice.Client]:
    """A client on the service's own host, over the unix socket: it maps and stages."""
    with sluice.Client(service.socket) as c:
        yield c


@pytest.fixture
def remote(service: Service) -> Iterator[sluice.Client]:
    """A client as on another host: over TCP, and never at the service's files."""
    with sluice.Client(service.url, state_dir=service.state, http_only=True) as c:
        yield c


@pytest.fixture
def repeated() -> bool:
    """Whether the first answer to every call is lost, so that what it says is what a repeated call is told."""
    return False


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No test leaves a thread of the package behind."""
    before = set(threading.enumerate())
    yield
    until = time.monotonic() + 5
    while time.monotonic() < until:
        left = [t for t in threading.enumerate() if t not in before and t.name.startswith("sluice")]
        if not left:
            return
        left[0].join(0.1)
    raise AssertionError(f"threads are left: {[t.name for t in left]}")


@pytest.fixture
def private_services(binary: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of the services that programs start for themselves: this test's own, and empty again at its end, so that none outlives its clients."""
    runtime = Path(tempfile.mkdtemp(prefix="sl", dir="/tmp"))
    monkeypatch.setenv("SLUICE_BINARY", binary)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    monkeypatch.setenv("PYTHONPATH", str(Path(sluice.__file__).resolve().parents[1]))
    monkeypatch.setattr(private, "IDLE_SECONDS", 0.3)
    yield runtime / "sluice"
    gc.collect()
    until = time.monotonic() + 30
    while left := [path.name for path in (runtime / "sluice").glob("*") if path.suffix != ".log"]:
        assert time.monotonic() < until, f"services are left: {left}"
        time.sleep(0.01)
    shutil.rmtree(runtime, ignore_errors=True)  # logs go by themselves
