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
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from . import threads
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

T = TypeVar("T")


def new_id() -> str:
    """A fresh request, session or handle id: 32 hexadecimal digits."""
    return os.urandom(16).hex()


class Lost(Exception):
    """An attempt of which nothing is known: no answer, half of one, or the word that the service can't answer now."""

    def __init__(self, why: BaseException, at_once: bool = False, nobody: bool = False) -> None:
        super().__init__(str(why))
        self.why = why
        self.nobody = nobody  # there was no process to connect to
        self.at_once = at_once  # a kept connection had gone stale: nobody need be spared


class Cancel:
    """Ends the calls that were given it, from another thread, at once."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal handler may cancel what its own thread is in
        self._waiting: set[socket.socket | threading.Event] = set()
        self._event = threading.Event()

    @property
    def cancelled(self) -> bool:
        return self._event.is_set()

    def cancel(self) -> None:
        with self._lock:
            self._event.set()
            for w in self._waiting:
                _wake(w)

    def wait(self, seconds: float) -> bool:
        return self._event.wait(seconds)

    def _add(self, w: socket.socket | threading.Event) -> None:
        with self._lock:
            self._waiting.add(w)
            if self._event.is_set():
                _wake(w)

    def _remove(self, w: socket.socket | threading.Event) -> None:
        with self._lock:
            self._waiting.discard(w)


class Cancelled(Exception):
    """A call was ended by its :class:`Cancel`; what became of it is not known."""


def _may_come_back() -> None:
    """What is known of a service that this process has nothing to do with."""


def _wake(w: socket.socket | threading.Event) -> None:
    if isinstance(w, threading.Event):
        w.set()
        return
    try:
        w.shutdown(socket.SHUT_RDWR)  # not close: another thread is in it
    except OSError:
        pass  # it is not connected any more, which is what was wanted, or not yet, which whoever connects it finds out


class _Socket(socket.socket):
    """A socket whose answer has come by ``until``, however it trickles. None: each read has the time that was set."""

    until: float | None = None

    def recv_into(self, *args: Any, **kwargs: Any) -> int:
        _hurry(self)
        return super().recv_into(*args, **kwargs)


class _TLSSocket(ssl.SSLSocket):
    """The same over TLS."""

    until: float | None = None

    def recv_into(self, *args: Any, **kwargs: Any) -> int:
        _hurry(self)
        return super().recv_into(*args, **kwargs)


def _hurry(s: _Socket | _TLSSocket) -> None:
    if s.until is not None:
        left = s.until - time.monotonic()
        if left <= 0:
            raise TimeoutError("the answer took too long")
        s.settimeout(left)


_alive: weakref.WeakSet[Transport] = weakref.WeakSet()


class Transport:
    """One session of one process with a service. All methods may be called from any thread."""

    def __init__(self, address: Address, *, patience: float = 120.0) -> None:
        if isinstance(patience, bool) or not isinstance(patience, (int, float)) or not patience > 0:
            raise InvalidError(f"is {patience!r}, want a number of seconds above 0", op="client", subject="patience")
        self.address = address
        self.patience = patience
        self._tls: ssl.SSLContext | None = None
        if address.scheme == "https":
            try:
                self._tls = ssl.create_default_context(cafile=address.ca_file or None)
            except (OSError, ssl.SSLError) as e:
                raise InvalidError(f"{address.ca_file} holds no certificate that can be read: {e}", op="client", subject="ca_file") from e
            self._tls.sslsocket_class = _TLSSocket
        if address.in_clear:
            log.warning("the token crosses the network unencrypted to %s", address.name)
        self.closed = False
        self.gone: Callable[[], str | None] = _may_come_back
        """Asked where nobody is to be connected to: that the service will not come back, and why, or None where it will. It may see to that, and change :attr:`address`. One thread asks at a time."""
        self.on_return: list[Callable[[], None]] = []  # called in a thread of the transport when the service is back after it was away
        self._renew()
        _alive.add(self)

    def _renew(self) -> None:
        """What belongs to one process. A child of a fork makes it anew."""
        self.pid = os.getpid()
        self.session = new_id()
        self._lock = threading.Lock()
        self._asking = threading.Lock()
        self._dead = ""  # why the service is gone for good
        self._idle: list[_Socket | _TLSSocket] = []
        self._end = Cancel()
        self._holder: threading.Thread | None = None
        self._held = threading.Event()
        self._later: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._worker: threading.Thread | None = None
        self._owed: list[Callable[[], None]] = []
        a = self.address
        host = f"[{a.host}]" if ":" in a.host else a.host
        # What every request says.
        self._head = f" HTTP/1.1\r\nHost: {host}{f':{a.port}' if a.port else ''}\r\nSluice-Session: {self.session}\r\nUser-Agent: sluice-python\r\n"
        if a.token:
            self._head += f"Authorization: Bearer {a.token}\r\n"

    def __reduce__(self) -> str:
        raise UnsupportedError("a client, and what belongs to it, can't be sent to another process", op="pickle", hint="connect there; the child of a fork does so by itself")

    # -- calls ---------------------------------------------------------------------------------------------------------

    def call(
        self, method: str, path: str, body: Any = None, *, wait: float = 0.0, patience: float | None = None, cancel: Cancel | None = None, within: float | None = None,
    ) -> Any:
        """Make a call and repeat it while its answers are lost. Returns the answer's JSON. ``wait`` is what the body asks the service to wait for, and ``within`` bounds all, in seconds.

        After the first attempt, a refusal may be the echo of a success: the error has an attribute ``attempts``.
        """
        data = None if body is None else encode(body)
        request = new_id()
        made = 0
        until = None if within is None else time.monotonic() + within

        def once() -> Any:
            nonlocal made
            made += 1
            timeout = wait + ANSWER_SECONDS
            if until is not None:
                timeout = max(0.01, min(timeout, until - time.monotonic()))
            try:
                return self._attempt(method, path, data, request, timeout, cancel)
            except SluiceError as e:
                e.__dict__["attempts"] = made
                raise

        return self.repeat(once, patience=patience, cancel=cancel, until=until)

    def give_back(self, method: str, path: str, body: Any) -> Any:
        """A call for somebody who has been interrupted, or whom nobody waits for: it takes 5 s at most."""
        return self.call(method, path, body, patience=1.0, within=_GIVE_BACK_SECONDS)

    def repeat(
        self, once: Callable[[], T], *, patience: float | None = None, cancel: Cancel | None = None, until: float | None = None, moved: Callable[[], bool] | None = None,
    ) -> T:
        """Run ``once`` until it does not end as :class:`Lost`. ``moved`` says whether the last attempt came further, which starts patience anew; ``until`` ends it all."""
        self.enter()
        limit = self.patience if patience is None else patience
        since = 0.0
        pause = 0.0
        while True:
            try:
                return once()
            except Lost as lost:
                now = time.monotonic()
                if self.closed or self._end.cancelled:
                    raise self.closed_error() from None
                if cancel is not None and cancel.cancelled:
                    raise Cancelled from None
                if self._is_dead(lost):
                    raise self._dead_error() from None
                if since == 0.0 or moved is not None and moved():
                    since, pause = now, 0.0
                if lost.at_once:
                    continue
                if now - since >= limit or until is not None and now >= until:
                    raise self._unavailable(lost, now - since) from lost.why
            pause = min(max(2 * pause, 0.02), 2.0)
            self._pause(pause * random.uniform(0.5, 1.0), cancel)  # so that the clients of a service that comes back do not all come at once

    def _pause(self, seconds: float, cancel: Cancel | None) -> None:
        if cancel is None:
            self._end.wait(seconds)
            return
        either = threading.Event()
        ends = (cancel, self._end)
        try:
            for c in ends:
                c._add(either)
            either.wait(seconds)
        finally:
            for c in ends:
                c._remove(either)

    def enter(self) -> None:
        """Refuse calls of a closed transport, and see to the session."""
        if self.pid != os.getpid():
            self._renew()  # where fork was not seen
        if self.closed:
            raise self.closed_error()
        if self._dead:
            raise self._dead_error()
        self.hold()

    @property
    def dead(self) -> bool:
        """Whether the service is gone for good: nothing is worth another try."""
        return self._dead != ""

    def _is_dead(self, lost: Lost) -> bool:
        if lost.nobody and not self._dead:
            with self._asking:
                self._dead = self._dead or self.gone() or ""
        return self.dead

    def _dead_error(self) -> UnavailableError:
        return UnavailableError(self._dead, op="client", subject=self.address.name)

    def closed_error(self) -> ClosedError:
        return ClosedError("the client is closed", op="client", subject=self.address.name)

    def _unavailable(self, lost: Lost, waited: float) -> UnavailableError:
        detail = "the service does not answer" if waited < 1 else f"the service has not answered for {waited:.0f} s"
        why = lost.why.detail if isinstance(lost.why, SluiceError) else str(lost.why) or type(lost.why).__name__
        return UnavailableError(f"{detail}: {why}", op="client", subject=self.address.name)

    def _attempt(self, method: str, path: str, data: bytes | None, request: str, timeout: float, cancel: Cancel | None = None, last: bool = False) -> Any:
        with self.exchange(method, path, request, {} if data is None else _JSON, data, timeout=timeout, cancel=cancel, last=last) as response:
            return read_json(response)

    def head(self, path: str) -> int:
        """The status that a HEAD is answered with."""
        request = new_id()

        def once() -> int:
            with self.exchange("HEAD", path, request, {}, None, timeout=ANSWER_SECONDS) as response:
                response.read()
                if response.status in _AWAY:
                    raise Lost(_no_service(response, "no problem document"))
                return response.status

        return self.repeat(once)

    @contextmanager
    def exchange(
        self, method: str, path: str, request: str, headers: dict[str, str], data: bytes | None, *, timeout: float, cancel: Cancel | None = None,
        upload: Callable[[socket.socket], None] | None = None, streams: bool = False, last: bool = False,
    ) -> Iterator[http.client.HTTPResponse]:
        """One attempt: sends the request and gives the response, whose connection is kept if it was read to its end. What breaks on the way is :class:`Lost`.

        ``timeout`` in seconds is that of the whole answer, or with ``streams`` of each part of it. ``last`` is for the call that ends the session: all others end with it.
        """
        head = f"{method} {self.address.prefix}{path}{self._head}Sluice-Request: {request}\r\n" + "".join(f"{k}: {v}\r\n" for k, v in headers.items())
        if upload is None and method in ("POST", "PUT"):
            head += f"Content-Length: {len(data or b'')}\r\n"
        message = (head + "\r\n").encode("ascii") + (data or b"")
        ends = [c for c in (cancel, None if last else self._end) if c is not None]
        s, kept = self._connection(timeout, ends)
        response: http.client.HTTPResponse | None = None
        refused: OSError | None = None
        whole = False
        try:
            try:
                try:
                    s.sendall(message)
                    if upload is not None:
                        upload(s)
                except ConnectionError as e:
                    refused = e  # a service that refuses may answer before it has seen all
                s.until = None if streams else time.monotonic() + timeout
                response = http.client.HTTPResponse(s, method=method)
                response.begin()
            except (OSError, http.client.HTTPException) as e:
                # A kept connection may have been closed by the other side while nobody used it: then nobody is spared by waiting.
                raise Lost(refused or e, at_once=kept and isinstance(refused or e, (BrokenPipeError, ConnectionResetError))) from e
            try:
                yield response
            except SluiceError:
                whole = refused is None
                raise
            except (OSError, http.client.HTTPException) as e:
                raise Lost(e) from e
            whole = refused is None
        finally:
            refused = None  # its traceback has this frame, which must not have it in turn: the two would keep the caller's frames
            for c in ends:
                c._remove(s)
            whole = whole and response is not None and response.isclosed() and not response.will_close and not any(c.cancelled for c in ends)
            if response is not None:
                response.close()
            if whole:
                self._keep(s)
            else:
                s.close()

    def _connection(self, timeout: float, ends: list[Cancel]) -> tuple[_Socket | _TLSSocket, bool]:
        """A connection, and whether it is a kept one. It is with ``ends``."""
        with self._lock:
            kept = self._idle.pop() if self._idle else None
        if kept is not None:
            kept.settimeout(timeout)
            for c in ends:
                c._add(kept)
            return kept, True
        a = self.address
        try:
            if a.scheme == "unix":
                where: list[Any] = [(socket.AF_UNIX, socket.SOCK_STREAM, 0, "", a.socket)]
            else:
                where = socket.getaddrinfo(a.host, a.port, type=socket.SOCK_STREAM)
        except OSError as e:
            raise Lost(e) from e
        until = time.monotonic() + min(_CONNECT_SECONDS, timeout)
        broken: BaseException = OSError("it has no address")
        for family, kind, protocol, _, address in where:
            s: _Socket | _TLSSocket = _Socket(family, kind, protocol)
            try:
                s = self._connect(s, address, until, ends)
                s.settimeout(timeout)
                return s, False
            except BaseException as e:
                for c in ends:
                    c._remove(s)
                s.close()
                if isinstance(e, ssl.SSLCertVerificationError):
                    raise UnavailableError(f"its certificate is not trusted: {e.verify_message}", op="client", subject=a.name, hint="give ca_file, the service's tls-cert.pem") from e
                if not isinstance(e, OSError):
                    raise
                broken = e
        try:
            raise Lost(broken, nobody=isinstance(broken, (ConnectionRefusedError, FileNotFoundError))) from broken
        finally:
            del broken  # its traceback has this frame

    def _connect(self, s: _Socket | _TLSSocket, address: Any, until: float, ends: list[Cancel]) -> _Socket | _TLSSocket:
        for c in ends:
            c._add(s)  # before it connects: that, too, ends at once
        if any(c.cancelled for c in ends):
            raise ConnectionAbortedError("the call was ended")
        s.settimeout(max(0.01, until - time.monotonic()))
        s.connect(address)
        if s.family != socket.AF_UNIX:
            s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._tls is not None:
            plain = s
            s = self._tls.wrap_socket(plain, server_hostname=self.address.host, do_handshake_on_connect=False)  # type: ignore[assignment]  # of the context's class
            try:
                for c in ends:
                    c._add(s)
                    c._remove(plain)
                s.until = until
                s.settimeout(max(0.01, until - time.monotonic()))
                s.do_handshake()  # type: ignore[union-attr]
            except BaseException:
                for c in ends:
                    c._remove(s)
                s.close()
                raise
        if any(c.cancelled for c in ends):
            for c in ends:
                c._remove(s)
            s.close()
            raise ConnectionAbortedError("the call was ended")
        return s

    def _keep(self, s: _Socket | _TLSSocket) -> None:
        with self._lock:
            if not self.closed and len(self._idle) < _MAX_IDLE:
                self._idle.append(s)
                return
        s.close()

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
                with self.exchange("GET", f"/v1/sessions/{session}", new_id(), {}, None, timeout=_SILENCE_SECONDS, streams=True) as response:
                    if response.status != 200:
                        read_json(response)
                    held.set()
                    if down:
                        log.info("the service at %s is back", self.address.name)
                        down = False
                    if not first:
                        self.work_later()
                        for again in list(self.on_return):
                            self.soon(again)
                    first = False
                    while response.read1(512):
                        pause = 0.0
                        self._pay()
                why = "the service has ended it"
            except (Lost, SluiceError) as e:
                why = str(e) or type(e).__name__
                if isinstance(e, Lost) and not end.cancelled and self._is_dead(e):
                    log.error("%s", self._dead_error())
            held.set()  # or tried at least
            if end.cancelled or self._dead:
                return
            if not down:
                down = True
                log.warning("the session's connection with %s is broken (%s); it will be made anew", self.address.name, why)
            pause = min(max(2 * pause, 0.02), 2.0)
            end.wait(pause * random.uniform(0.5, 1.0))

    def owe(self, work: Callable[[], None]) -> None:
        """Do work when the service has given its next sign of life, which is the time to make up for a call that did not get through. It may owe itself again."""
        with self._lock:
            self._owed.append(work)

    def _pay(self) -> None:
        if self._owed:
            with self._lock:
                owed, self._owed = self._owed, []
            self.work_later()
            for work in owed:
                self.soon(work)

    def work_later(self) -> None:
        """Start the transport's own thread, which :meth:`soon` needs."""
        if self._worker is None:
            with self._lock:
                if self._worker is None and not self.closed:
                    later = self._later
                    self._worker = threads.start(lambda: _work(later), "sluice-later", lambda: later.put(None))  # it may have the last word of a tensor

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
        for s in idle:
            s.close()
        if not mine:
            return  # the session is the parent's
        self._end.cancel()
        self._later.put(None)
        until = time.monotonic() + _GIVE_BACK_SECONDS
        for thread in (self._holder, self._worker):
            if thread is not None and thread is not threading.current_thread():
                thread.join(max(0.0, until - time.monotonic()))
        if self._holder is None or self._dead:
            return  # nothing was called, and the service has never heard of the session; or it is gone
        try:
            self._attempt("DELETE", f"/v1/sessions/{self.session}", None, new_id(), max(0.1, until - time.monotonic()), last=True)
        except (Lost, SluiceError) as e:
            log.debug("the session at %s was not ended by a call, and ends by itself: %s", self.address.name, str(e))


_JSON = {"Content-Type": "application/json"}


def _work(later: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (work := later.get()) is not None:
        try:
            work()
        except ClosedError as e:
            log.debug("nothing is left to do for %s", str(e))  # of a run or a loader, or of the client, which then ends this
        except Exception:
            log.exception("a call behind the program's back has failed")


def encode(body: Any) -> bytes:
    try:
        return json.dumps(body, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as e:  # a lone surrogate, too, is a ValueError
        raise InvalidError(f"has no JSON form: {e}", op="client", subject="an argument of the call") from e


def read_json(response: http.client.HTTPResponse) -> Any:
    """The answer's JSON, or the error that it is."""
    data = response.read(_MAX_ANSWER + 1)
    if len(data) > _MAX_ANSWER:
        raise UnsupportedError(f"the answer is longer than {_MAX_ANSWER} bytes", op="client")
    if response.length:
        raise Lost(http.client.IncompleteRead(data, response.length))
    kind = response.headers["Content-Type"]
    if kind != "application/json":
        kind = response.headers.get_content_type()
    if response.status // 100 != 2:
        refuse(response, data, kind)
    if response.status == 204 or not data:
        return None
    if kind != "application/json":
        raise _no_service(response, f"the type {kind}")
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as e:
        raise CorruptError("the answer can't be read", op="client") from e


def refuse(response: http.client.HTTPResponse, data: bytes, kind: str) -> None:
    """Raise what a response with a status other than 2xx means."""
    error: SluiceError | None = None
    if kind == "application/problem+json":
        try:
            problem = json.loads(data)
        except (ValueError, RecursionError):
            problem = None
        if isinstance(problem, dict) and problem.get("code"):
            error = from_problem(problem)
    try:
        if error is None:
            error = _no_service(response, "no problem document")
            away = response.status in _AWAY
        else:
            away = error.code in ("unavailable", "busy", "timeout")
        raise Lost(error) if away else error
    finally:
        del error  # its traceback has this frame, which must not have it in turn: the two would keep the caller's frames


def _no_service(response: http.client.HTTPResponse, what: str) -> UnavailableError:
    return UnavailableError(f"the answer has the status {response.status} {response.reason} and {what}", op="client", hint="is that the address of a Sluice service?")


def _after_fork() -> None:
    for transport in list(_alive):
        # The child's copies of what its parent has open, the session's connection among them, would keep the parent alive for the service when it is dead. Their other threads are not here,
        # so nobody uses them, and no lock is taken, which one of those may have held.
        for s in [*transport._idle, *transport._end._waiting]:
            if isinstance(s, socket.socket) and (fd := s.detach()) >= 0:
                os.close(fd)
        transport._renew()


os.register_at_fork(after_in_child=_after_fork)
