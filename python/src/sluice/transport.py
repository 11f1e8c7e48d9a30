"""HTTP to the service: a pool of connections, one rule for repeating calls, and the session that says that this process lives.

An attempt that was answered is over, whatever the answer. One that was not, or whose answer was "unavailable", is made again with the same id, for as long as the
transport's patience lasts; the API is made so that every call may be repeated. A call that waits asks for slices of 30 s, so that neither side waits for a peer that is gone.

After a fork the child has a session of its own and no connections: it owns nothing of what its parent holds.
"""

from __future__ import annotations

import http.client
import json
import logging
import os
import queue
import random
import socket
import ssl
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from .address import Address
from .errors import ClosedError, CorruptError, InvalidError, SluiceError, UnavailableError, UnsupportedError, from_problem

log = logging.getLogger("sluice")

ANSWER_SECONDS = 20.0
"""How long an attempt may take beyond what the call itself asks to wait."""
SLICE_SECONDS = 30.0
"""The longest wait that one attempt asks for."""
_CONNECT_SECONDS = 5.0
_SILENCE_SECONDS = 30.0  # of the session's connection; the service sends a sign of life every few seconds
_GIVE_BACK_SECONDS = 5.0
_MAX_ANSWER = 256 << 20
_MAX_IDLE = 64
_AWAY = (429, 502, 503, 504)  # statuses of one that can't answer now
_PIECE = 4 << 20  # bytes a sendall: its timeout counts for the whole of them

T = TypeVar("T")


def new_id() -> str:
    """A fresh request, session or handle id: 32 hexadecimal digits."""
    return uuid.uuid4().hex


class Lost(Exception):
    """An attempt of which nothing is known: no answer, half of one, or the word that the service can't answer now."""

    def __init__(self, why: BaseException, at_once: bool = False) -> None:
        super().__init__(str(why))
        self.why = why
        self.at_once = at_once  # a kept connection had gone stale: nobody need be spared


class Cancel:
    """Ends the calls that were given it, from another thread, at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self._event = threading.Event()

    @property
    def cancelled(self) -> bool:
        return self._event.is_set()

    def cancel(self) -> None:
        with self._lock:
            self._event.set()
            for s in self._sockets:
                _shut(s)

    def wait(self, seconds: float) -> bool:
        return self._event.wait(seconds)

    def _add(self, s: socket.socket) -> None:
        with self._lock:
            if self._event.is_set():
                _shut(s)
            self._sockets.add(s)

    def _remove(self, s: socket.socket) -> None:
        with self._lock:
            self._sockets.discard(s)


class Cancelled(Exception):
    """A call was ended by its :class:`Cancel`; what became of it is not known."""


def _shut(s: socket.socket) -> None:
    try:
        s.shutdown(socket.SHUT_RDWR)  # not close: another thread is in it
    except OSError:
        pass  # it is not connected any more, which is what was wanted


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        s = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            s.settimeout(self.timeout)
            s.connect(self._path)
        except BaseException:
            s.close()
            raise
        self.sock = s


_alive: weakref.WeakSet[Transport] = weakref.WeakSet()


class Transport:
    """One session of one process with a service. All methods may be called from any thread."""

    def __init__(self, address: Address, *, patience: float = 120.0) -> None:
        if not patience > 0:
            raise InvalidError(f"is {patience!r} seconds, want more than 0", op="client", subject="patience")
        self.address = address
        self.patience = patience
        self._tls: ssl.SSLContext | None = None
        if address.scheme == "https":
            try:
                self._tls = ssl.create_default_context(cafile=address.ca_file or None)
            except (OSError, ssl.SSLError) as e:
                raise InvalidError(f"{address.ca_file} holds no certificate that can be read: {e}", op="client", subject="ca_file") from e
        if address.in_clear:
            log.warning("the token crosses the network unencrypted to %s", address.name)
        self.closed = False
        self.on_return: list[Callable[[], None]] = []  # called in a thread of the transport when the service is back after it was away
        self._renew()
        _alive.add(self)

    def _renew(self) -> None:
        """What belongs to one process. A child of a fork makes it anew."""
        self.pid = os.getpid()
        self.session = new_id()
        self._lock = threading.Lock()
        self._idle: list[http.client.HTTPConnection] = []
        self._end = Cancel()
        self._holder: threading.Thread | None = None
        self._held = threading.Event()
        self._later: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._worker: threading.Thread | None = None

    # -- calls ---------------------------------------------------------------------------------------------------------

    def call(
        self, method: str, path: str, body: Any = None, *, wait: float = 0.0, patience: float | None = None, cancel: Cancel | None = None, headers: dict[str, str] | None = None,
    ) -> Any:
        """Make a call and repeat it while its answers are lost. Returns the answer's JSON. ``wait`` is what the body asks the service to wait for, in seconds."""
        return self.attempts(method, path, body, wait=wait, patience=patience, cancel=cancel, headers=headers)[0]

    def attempts(
        self, method: str, path: str, body: Any = None, *, wait: float = 0.0, patience: float | None = None, cancel: Cancel | None = None, headers: dict[str, str] | None = None,
    ) -> tuple[Any, int]:
        """As :meth:`call`, and tells how many attempts it took. After the first, a refusal may be the echo of a success: the error then has an attribute ``attempts``."""
        data = None if body is None else encode(body)
        request = new_id()
        made = 0

        def once() -> Any:
            nonlocal made
            made += 1
            try:
                return self._attempt(method, path, data, request, wait + ANSWER_SECONDS, cancel, headers)
            except SluiceError as e:
                e.__dict__["attempts"] = made
                raise

        return self.repeat(once, patience=patience, cancel=cancel), made

    def repeat(self, once: Callable[[], T], *, patience: float | None = None, cancel: Cancel | None = None, moved: Callable[[], bool] | None = None) -> T:
        """Run ``once`` until it does not end as :class:`Lost`. ``moved`` says whether the last attempt came further, which starts patience anew."""
        self.enter()
        limit = self.patience if patience is None else patience
        since = 0.0
        pause = 0.0
        while True:
            try:
                return once()
            except Lost as lost:
                now = time.monotonic()
                if cancel is not None and cancel.cancelled:
                    raise Cancelled from None
                if self.closed or self._end.cancelled:
                    raise self.closed_error() from None
                if since == 0.0 or moved is not None and moved():
                    since, pause = now, 0.0
                if lost.at_once:
                    continue
                if now - since >= limit:
                    raise self._unavailable(lost, now - since) from lost.why
            pause = min(max(2 * pause, 0.02), 2.0)
            short = pause * random.uniform(0.5, 1.0)  # so that the clients of a service that comes back do not all come at once
            if (cancel or self._end).wait(short):
                continue

    def enter(self) -> None:
        """Refuse calls of a closed transport, and see to the session."""
        if self.pid != os.getpid():
            self._renew()  # where fork was not seen
        if self.closed:
            raise self.closed_error()
        self.hold()

    def closed_error(self) -> ClosedError:
        return ClosedError("the client is closed", op="client", subject=self.address.name)

    def _unavailable(self, lost: Lost, waited: float) -> UnavailableError:
        detail = "the service does not answer" if waited < 1 else f"the service has not answered for {waited:.0f} s"
        why = lost.why.detail if isinstance(lost.why, SluiceError) else str(lost.why) or type(lost.why).__name__
        return UnavailableError(f"{detail}: {why}", op="client", subject=self.address.name)

    def _attempt(
        self, method: str, path: str, data: bytes | None, request: str, timeout: float, cancel: Cancel | None = None, headers: dict[str, str] | None = None,
    ) -> Any:
        send = dict(headers or {})
        if data is not None:
            send["Content-Type"] = "application/json"
        with self.exchange(method, path, request, send, data, timeout=timeout, cancel=cancel) as response:
            return read_json(response)

    def exists(self, path: str) -> bool:
        """Whether a HEAD finds something, also something that the service can't hand out, such as a corrupt file."""

        def once() -> bool:
            with self.exchange("HEAD", path, new_id(), {}, None, timeout=ANSWER_SECONDS) as response:
                response.read()
                if response.status in _AWAY:
                    raise Lost(_no_service(response, "no problem document"))
                return response.status != 404

        return self.repeat(once)

    @contextmanager
    def exchange(
        self, method: str, path: str, request: str, headers: dict[str, str], data: bytes | None, *, timeout: float, cancel: Cancel | None = None,
        upload: Callable[[http.client.HTTPConnection], None] | None = None,
    ) -> Iterator[http.client.HTTPResponse]:
        """One attempt: sends the request and gives the response, whose connection is kept if it was read to its end. What breaks on the way is :class:`Lost`."""
        connection, kept = self._connection(timeout)
        response: http.client.HTTPResponse | None = None
        refused: OSError | None = None
        try:
            with self._watched(connection, cancel), self._watched(connection, self._end):
                try:
                    connection.putrequest(method, self.address.prefix + path, skip_accept_encoding=True)
                    for name, value in (self._headers(request) | headers).items():
                        connection.putheader(name, value)
                    if upload is None and method in ("POST", "PUT"):
                        connection.putheader("Content-Length", str(len(data or b"")))
                    connection.endheaders(data)
                    if upload is not None:
                        try:
                            upload(connection)
                        except OSError as e:
                            refused = e  # a service that refuses may answer before it has seen all
                    response = connection.getresponse()
                except (OSError, http.client.HTTPException) as e:
                    # A kept connection may have been closed by the other side while nobody used it: then nobody is spared by waiting.
                    raise Lost(refused or e, at_once=kept and refused is None and isinstance(e, (BrokenPipeError, ConnectionResetError))) from e
                try:
                    yield response
                except SluiceError:
                    raise
                except (OSError, http.client.HTTPException) as e:
                    raise Lost(e) from e
        finally:
            if response is not None and response.isclosed() and refused is None:
                self._keep(connection)
            else:
                connection.close()

    def _headers(self, request: str) -> dict[str, str]:
        headers = {"Sluice-Session": self.session, "Sluice-Request": request, "User-Agent": "sluice-python"}
        if self.address.token:
            headers["Authorization"] = f"Bearer {self.address.token}"
        return headers

    @contextmanager
    def _watched(self, connection: http.client.HTTPConnection, cancel: Cancel | None) -> Iterator[None]:
        if cancel is None:
            yield
            return
        s = connection.sock
        cancel._add(s)
        try:
            yield
        finally:
            cancel._remove(s)

    def _connection(self, timeout: float) -> tuple[http.client.HTTPConnection, bool]:
        with self._lock:
            connection = self._idle.pop() if self._idle else None
        if connection is not None and connection.sock is not None:
            connection.sock.settimeout(timeout)
            return connection, True
        a = self.address
        if a.scheme == "unix":
            connection = _UnixConnection(a.socket, _CONNECT_SECONDS)
        elif a.scheme == "https":
            connection = http.client.HTTPSConnection(a.host, a.port, timeout=_CONNECT_SECONDS, context=self._tls)
        else:
            connection = http.client.HTTPConnection(a.host, a.port, timeout=_CONNECT_SECONDS)
        try:
            connection.connect()
        except ssl.SSLCertVerificationError as e:
            connection.close()
            raise UnavailableError(f"its certificate is not trusted: {e.verify_message}", op="client", subject=a.name, hint="give ca_file, the service's tls-cert.pem") from e
        except OSError as e:
            connection.close()
            raise Lost(e) from e
        connection.sock.settimeout(timeout)
        return connection, False

    def _keep(self, connection: http.client.HTTPConnection) -> None:
        with self._lock:
            if not self.closed and connection.sock is not None and len(self._idle) < _MAX_IDLE:
                self._idle.append(connection)
                return
        connection.close()

    # -- the session ---------------------------------------------------------------------------------------------------

    def hold(self) -> None:
        """Hold the session's connection: while it stands, the service knows that this process lives. Waits, bounded, until it stands or was tried."""
        if not self._held.is_set():
            with self._lock:
                if self._holder is None and not self.closed:
                    self._holder = threading.Thread(target=self._hold, name="sluice-session", daemon=True)
                    self._holder.start()
            self._held.wait(_CONNECT_SECONDS)

    def _hold(self) -> None:
        end, held, session = self._end, self._held, self.session
        pause, down, first = 0.0, False, True
        while not end.cancelled:
            try:
                with self.exchange("GET", f"/v1/sessions/{session}", new_id(), {}, None, timeout=_SILENCE_SECONDS) as response:
                    if response.status != 200:
                        read_json(response)
                    held.set()
                    pause = 0.0
                    if down:
                        log.info("the service at %s is back", self.address.name)
                        down = False
                    if not first:
                        self.work_later()
                        for again in list(self.on_return):
                            self.soon(again)
                    first = False
                    while response.read1(512):
                        pass
                why = "the service has ended it"
            except (Lost, SluiceError) as e:
                why = str(e) or type(e).__name__
            held.set()  # or tried at least
            if end.cancelled:
                return
            if not down:
                down = True
                log.warning("the session's connection with %s is broken (%s); it will be made anew", self.address.name, why)
            pause = min(max(2 * pause, 0.02), 2.0)
            end.wait(pause * random.uniform(0.5, 1.0))

    def work_later(self) -> None:
        """Start the transport's own thread, which :meth:`soon` needs."""
        if self._worker is None:
            with self._lock:
                if self._worker is None and not self.closed:
                    self._worker = threading.Thread(target=_work, args=(self._later,), name="sluice-later", daemon=True)
                    self._worker.start()

    def soon(self, work: Callable[[], None]) -> None:
        """Run work in the transport's own thread. It takes no lock, so finalizers may call it."""
        self._later.put(work)

    # -- ends ----------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the session: reservations and pins go, leases of its consumers return to the head, calls under way end. Idempotent; waits 5 s at most for a service that is away."""
        with self._lock:
            if self.closed:
                return
            self.closed = True
            idle, self._idle = self._idle, []
        _alive.discard(self)
        mine = self.pid == os.getpid()
        for c in idle:
            c.close()
        if not mine:
            return  # the session is the parent's
        self._end.cancel()
        self._later.put(None)
        if self._holder is not None:
            self._holder.join(_GIVE_BACK_SECONDS)
        if self._worker is not None and self._worker is not threading.current_thread():
            self._worker.join(_GIVE_BACK_SECONDS)
        self._end = Cancel()
        try:
            self._attempt("DELETE", f"/v1/sessions/{self.session}", None, new_id(), _GIVE_BACK_SECONDS)
        except (Lost, SluiceError) as e:
            log.debug("the session at %s was not ended by a call, and ends by itself: %s", self.address.name, e)
        with self._lock:
            idle, self._idle = self._idle, []
        for c in idle:
            c.close()


def _work(later: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (work := later.get()) is not None:
        try:
            work()
        except ClosedError:
            return
        except Exception:
            log.exception("a call behind the program's back has failed")


def encode(body: Any) -> bytes:
    return json.dumps(body, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()


def read_json(response: http.client.HTTPResponse) -> Any:
    """The answer's JSON, or the error that it is."""
    data = response.read(_MAX_ANSWER + 1)
    if len(data) > _MAX_ANSWER:
        raise UnsupportedError(f"the answer is longer than {_MAX_ANSWER} bytes", op="client")
    if response.length:
        raise Lost(http.client.IncompleteRead(data, response.length))
    kind = response.headers.get_content_type()
    if response.status // 100 != 2:
        refuse(response, data, kind)
    if response.status == 204 or not data:
        return None
    if kind != "application/json":
        raise _no_service(response, f"the type {kind}")
    try:
        return json.loads(data)
    except ValueError as e:
        raise CorruptError("the answer can't be read", op="client") from e


def refuse(response: http.client.HTTPResponse, data: bytes, kind: str) -> None:
    """Raise what a response with a status other than 2xx means."""
    if kind == "application/problem+json":
        try:
            problem = json.loads(data)
        except ValueError:
            problem = None
        if isinstance(problem, dict) and problem.get("code"):
            error = from_problem(problem)
            if error.code in ("unavailable", "busy", "timeout"):
                raise Lost(error)
            raise error
    error = _no_service(response, "no problem document")
    if response.status in _AWAY:
        raise Lost(error)
    raise error


def _no_service(response: http.client.HTTPResponse, what: str) -> UnavailableError:
    return UnavailableError(f"the answer has the status {response.status} {response.reason} and {what}", op="client", hint="is that the address of a Sluice service?")


def _after_fork() -> None:
    for transport in list(_alive):
        for c in transport._idle:
            if c.sock is not None:
                c.sock.close()  # the child's copies; the parent's connections stand
        transport._renew()


os.register_at_fork(after_in_child=_after_fork)
