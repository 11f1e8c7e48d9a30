"""A line between client and service that loses the answer to every call once: the call is carried out, and the connection breaks before the first byte of its answer."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO
from urllib.parse import urlsplit

import pytest

import sluice
from sluice.address import resolve

from .conftest import Service

_PIECE = 1 << 16
Socket = socket.socket


class LossyLine:
    """Listens at a unix socket and a TCP port and carries what comes to the service's own."""

    def __init__(self, service: Service, directory: Path) -> None:
        self.state = service.state
        self._service = service
        self._path = directory / "lossy.sock"
        self._seen: set[tuple[str, str]] = set()
        self._lock = threading.Lock()
        self._open: set[Socket] = set()
        self.lost = 0
        self.cut = False  # break every connection before anything is carried
        self._listeners = [socket.socket(socket.AF_UNIX), socket.socket(socket.AF_INET)]
        self._listeners[0].bind(str(self._path))
        self._listeners[1].bind(("127.0.0.1", 0))
        self._threads = [threading.Thread(target=self._accept, args=(s,), daemon=True, name="lossy") for s in self._listeners]
        for s, t in zip(self._listeners, self._threads, strict=True):
            s.listen(64)
            t.start()

    @property
    def socket(self) -> str:
        return f"unix:{self._path}"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._listeners[1].getsockname()[1]}"

    def break_all(self) -> None:
        """Break what is connected now."""
        with self._lock:
            for s in self._open:
                _shut(s)

    def close(self) -> None:
        for s in self._listeners:
            _shut(s)
            s.close()
        self.break_all()
        for t in self._threads:
            t.join(5)

    def _accept(self, listener: Socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client, listener is self._listeners[0]), daemon=True, name="lossy").start()

    def _serve(self, client: Socket, local: bool) -> None:
        service = socket.socket(socket.AF_UNIX if local else socket.AF_INET)
        with self._lock:
            self._open |= {client, service}
        try:
            if not self.cut:
                where = urlsplit(self._service.url)
                service.connect(self._service.socket.removeprefix("unix:") if local else (where.hostname, where.port))
                with client.makefile("rb") as asked, service.makefile("rb") as answers:
                    while self._carry(client, asked, service, answers):
                        pass
        except (OSError, ValueError):
            pass  # one of the two has ended it
        finally:
            with self._lock:
                self._open -= {client, service}
            client.close()
            service.close()

    def _carry(self, client: Socket, asked: BinaryIO, service: Socket, answers: BinaryIO) -> bool:
        """One call and its answer; whether the connection goes on."""
        head = _head(asked)
        if not head or self.cut:
            return False
        line, fields = _read(head)
        method, path = line.split(" ")[:2]
        left = int(fields.get("content-length", 0))
        refused = False
        try:
            service.sendall(head)
        except OSError:
            return False
        while left > 0:
            piece = asked.read1(min(left, _PIECE))  # type: ignore[attr-defined]
            if not piece:
                return False
            left -= len(piece)
            if not refused:
                try:
                    service.sendall(piece)
                except OSError:
                    refused = True  # its answer is on its way
        if path.startswith("/v1/sessions/") and method == "GET":
            while piece := answers.read1(_PIECE):  # type: ignore[attr-defined]
                client.sendall(piece)
            return False
        answer_head = _head(answers)
        if not answer_head:
            return False
        _, said = _read(answer_head)
        body = b"" if method == "HEAD" else answers.read(int(said.get("content-length", 0)))
        with self._lock:
            key = (method, fields["sluice-request"])
            first = key not in self._seen
            self._seen.add(key)
            self.lost += first
        if first:
            return False
        client.sendall(answer_head + body)
        return said.get("connection") != "close"


def _head(stream: BinaryIO) -> bytes:
    head = b""
    while line := stream.readline():
        head += line
        if line == b"\r\n":
            return head
    return b""


def _read(head: bytes) -> tuple[str, dict[str, str]]:
    first, *rest = head.decode("latin-1").split("\r\n")
    return first, {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in rest if line)}


def _shut(s: socket.socket) -> None:
    try:
        s.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass


@pytest.fixture(name="real_service", scope="session")
def real_service_of_the_session(binary: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    s = Service(binary, tmp_path_factory.mktemp("lossy"))
    yield s
    s.stop()


@pytest.fixture(name="service", scope="session")
def lossy_service(real_service: Service, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LossyLine]:
    line = LossyLine(real_service, tmp_path_factory.mktemp("line"))
    yield line
    assert line.lost > 0, "the line has lost nothing"
    line.close()


@pytest.fixture(name="repeated")
def lossy_repeated() -> bool:
    return True


@pytest.fixture(name="remote")
def lossy_remote(real_service: Service, service: LossyLine) -> Iterator[sluice.Client]:
    token = resolve(real_service.url, state_dir=real_service.state).token
    with sluice.Client(service.url, token=token, http_only=True) as c:
        yield c
