"""Services that a program starts for itself: no port, no token, a unix socket in a folder that only this user can enter.

A service that is started here is a process of its own, detached from the program. What keeps it is the sessions that clients hold; when the last one is gone, be it that its program was killed, it
ends after ten seconds and leaves nothing. :func:`local` besides ends its service at once when it is closed and when the program ends in order.
"""

from __future__ import annotations

import atexit
import hashlib
import http.client
import json
import logging
import os
import select
import signal
import socket
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from . import binary
from .client import Client
from .errors import CorruptError, DeniedError, InvalidError, SluiceError, UnavailableError
from .transport import new_id

log = logging.getLogger("sluice")

IDLE_SECONDS = 10.0
"""How long a private service outlives its last client."""
START_SECONDS = 60.0
"""How long a start may take before it is given up."""

_STOP_SECONDS = 30.0
_ANSWER_SECONDS = 5.0
_SHELL_SECONDS = 30.0
_MAX_SOCKET_PATH = 103 if os.uname().sysname == "Darwin" else 107
_LONGEST_NAME = len("/d0123456789abcdef/sluice.sock")
_MAX_LOG = 1 << 20
_OLD_LOG_SECONDS = 24 * 3600.0
_UNKNOWN = -1  # the exit status of a service that is left to itself
_ALREADY_RUNS = 3  # that of a service whose state directory another one has

# The service is a grandchild: its parent, a shell that waits for it, says its pid and its exit status on the pipe, and leaves neither a zombie nor a child in this program. It is there longer than
# the program, and removes the log of a service that has ended in order, unless there is something in it of one before.
_DETACH = 'log=$1 before=$2; shift 2; { "$@" >&2 & echo $!; wait $!; status=$?; [ $status$before != 00 ] || rm -f "$log"; echo $status; } &'


class Endpoint:
    """A private service that answers. It cannot end for want of clients before :meth:`close`, so that there is time for a client to connect: minutes, not longer.

    ``socket`` is the path of its unix socket, and ``url`` the address for :class:`sluice.Client`. ``pid`` is its process, ``folder`` its state directory, and ``log`` the file of what it says.
    ``binary`` is the binary that it was started with, None if it was joined.
    """

    def __init__(self, place: _Place, pid: int, hold: _Hold, used: binary.Binary | None) -> None:
        self.pid = pid
        self.folder = str(place.state)
        self.socket = str(place.socket)
        self.url = f"unix:{self.socket}"
        self.log = str(place.log)
        self.binary = used
        self._hold = hold

    def close(self) -> None:
        """Stop keeping the service. Idempotent."""
        self._hold.close()

    def __enter__(self) -> Endpoint:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def watch(client: Client, endpoint: Endpoint, again: Callable[[], Endpoint] | None = None) -> None:
    """Let a client know of the death of its private service, for which it would wait otherwise: its calls fail at once. With ``again`` they wait for the service that this starts or joins instead."""
    transport, there = client._t, endpoint

    def gone() -> str | None:
        nonlocal there
        if _lives(there.pid):
            return None
        died = f"the private service has died: process {there.pid}; {there.log} is what it said"
        if again is None:
            return died
        log.warning("%s; another one is started", died)
        try:
            with again() as there:  # it waits for the session for as long as it does after a last one; if that was too short, this is asked again
                transport.address = replace(transport.address, name=there.url, socket=there.socket)
        except SluiceError as e:
            return f"{died}. Another one can't be started: {e}"
        return None

    transport.gone = gone


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return False  # the number is somebody else's by now
    return True


class _Place(NamedTuple):
    """Where a private service is. The log lies beside what the service itself makes, of which it may leave nothing."""

    state: Path
    socket: Path
    log: Path

    @classmethod
    def folder(cls, path: Path) -> _Place:
        """A state directory with the socket in it."""
        return cls(path, path / "sluice.sock", path.with_name(path.name + ".log"))


class LocalClient(Client):
    """A client whose service is its own: see :func:`local`. ``endpoint`` says where it is and which binary it is."""

    def __init__(self, endpoint: Endpoint, process: _Process, **options: Any) -> None:
        self._process = process
        self._pid = os.getpid()
        self.endpoint = endpoint
        super().__init__(endpoint.url, **options)
        watch(self, endpoint)
        _open.add(self)

    def close(self) -> None:
        """End the session and the service, with its samples. Tensors that were handed out stay valid. Idempotent; in a child of a fork it leaves the service to the parent."""
        try:
            super().close()
        finally:
            if self._pid == os.getpid() and self in _open:
                _open.remove(self)
                self._end()

    def _end(self) -> None:
        status = self._process.stop()
        if status == 0:
            Path(self.endpoint.log).unlink(missing_ok=True)
        else:
            log.warning("service: process %d ended with status %s; %s is what it said", self.endpoint.pid, status, self.endpoint.log)


_open: set[LocalClient] = set()


@atexit.register
def _close_all() -> None:
    for client in list(_open):
        try:
            client.close()
        except Exception:
            log.exception("service: process %d could not be ended in order", client.endpoint.pid)


def local(
    *, max_bytes: int | str | None = None, store: str | os.PathLike[str] | None = None, durability: str = "process", idle: float = IDLE_SECONDS, timeout: float = START_SECONDS, **options: Any,
) -> LocalClient:
    """Start a service for this program alone, and return a client of it.

        with sluice.local() as client:
            run = client.create_run("r1", algorithm="eagle3", max_bytes=4 << 30)

    It ends with the client's ``close``, at the end of the ``with``, and when the program ends in order; ``idle`` seconds after the program was killed. Then its samples are gone.
    ``max_bytes`` is what the caps of all runs may add up to: bytes, or a size like "64GiB"; None is whatever the machine has room for. ``store`` is the directory for samples, which need not be there;
    by default it is in /dev/shm, if that has room. ``durability`` is "process" or "power". ``timeout`` bounds the start, in seconds. ``options`` are those of :class:`sluice.Client`.

    Raises UnavailableError (no binary, or it did not start: with the end of its log), UnsupportedError (the binary is too old), DeniedError (a folder belongs to somebody else), InvalidError.
    """
    place = _Place.folder(_base() / f"l{new_id()[:12]}")
    endpoint, process = _start_or_join(place, [*_flags(max_bytes, store, durability, idle), "--remove-state"], timeout)
    if process is None:
        endpoint.close()
        raise InvalidError("there is one already, by the name that was made for this one", op="service", subject=str(place.state))
    try:
        client = LocalClient(endpoint, process, **options)
    except BaseException:
        process.stop()
        raise
    finally:
        endpoint.close()
    return client


def private(
    directory: str | os.PathLike[str] | None = None, *, max_bytes: int | str | None = None, store: str | os.PathLike[str] | None = None, durability: str = "process", idle: float = IDLE_SECONDS,
    timeout: float = START_SECONDS,
) -> Endpoint:
    """Start a private service, or join the one that runs: one for each process if ``directory`` is None, else one for each directory, whichever way its path is written. Many may call at once.

        with service.private(directory) as endpoint:
            client = Client(endpoint.url)

    That of a process leaves nothing. That of a directory keeps its samples and its journal in there, in ``store`` and ``state``, and the next one goes on with them; its socket is elsewhere.
    The other arguments are as for :func:`local`; they count for who starts it. The service ends ``idle`` seconds after its last client.

    Raises as :func:`local` does, and UnsupportedError if the one that runs is too old for this package.
    """
    base, name = _base(), _name(directory)
    if directory is None:
        place, flags = _Place.folder(base / name), ["--remove-state"]
    else:
        real = Path(os.path.realpath(directory))
        place = _Place(real / "state", base / f"{name}.sock", base / f"{name}.log")
        store = real / "store" if store is None else store
        flags = ["--socket", str(place.socket)]
    endpoint, process = _start_or_join(place, _flags(max_bytes, store, durability, idle) + flags, timeout)
    if process is not None:
        process.forget()
    return endpoint


_own: dict[int, str] = {}  # the name of this process's service, by its pid: a child of a fork has another


def _name(directory: str | os.PathLike[str] | None) -> str:
    if directory is None:
        return _own.setdefault(os.getpid(), f"p{new_id()[:16]}")
    real = os.path.realpath(directory)
    try:
        info = os.stat(real)
    except OSError as e:
        raise InvalidError(f"can't be looked at: {e.strerror}", op="service", subject=os.fspath(directory)) from e
    if not stat.S_ISDIR(info.st_mode):
        raise InvalidError("is no directory", op="service", subject=os.fspath(directory))
    # Both: an inode alone is soon given to another directory, and a path alone may be removed and made again.
    return "d" + hashlib.sha256(os.fsencode(real) + f"\0{info.st_dev}:{info.st_ino}".encode()).hexdigest()[:16]


def _flags(max_bytes: int | str | None, store: str | os.PathLike[str] | None, durability: str, idle: float) -> list[str]:
    if not idle > 0:
        raise InvalidError(f"is {idle!r} seconds, want more than 0", op="service", subject="idle")
    if durability not in ("process", "power"):
        raise InvalidError(f"is {durability!r}, want process or power", op="service", subject="durability")
    flags = ["--no-tcp", "--exit-idle", f"{idle:.3f}s", "--max-bytes", "none" if max_bytes is None else str(max_bytes), "--durability", durability, "--log-level", "warn"]
    return flags + (["--store", os.path.abspath(store)] if store is not None else [])


def _base() -> Path:
    """The folder for the folders of private services: this user's own, and short enough for sockets."""
    user = f"sluice-{os.geteuid()}"
    places = [Path(tempfile.gettempdir(), user), Path("/tmp", user)]
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if os.path.isabs(runtime):
        if _is_own(runtime):
            places.insert(0, Path(runtime, "sluice"))
        else:
            log.info("service: XDG_RUNTIME_DIR is %s, which is no directory of this user alone: the temp directory is used", runtime)
    for place in places:
        if len(os.fsencode(place)) + _LONGEST_NAME <= _MAX_SOCKET_PATH:
            _make_own(place)
            return place
        log.info("service: %s is too long a path for sockets", place)
    raise InvalidError("every place for sockets has too long a path", op="service", subject=str(places[-1]))


def _is_own(folder: str | Path) -> bool:
    try:
        info = os.lstat(folder)
    except OSError:
        return False
    return stat.S_ISDIR(info.st_mode) and info.st_uid == os.geteuid() and not info.st_mode & 0o077


def _make_own(folder: Path) -> None:
    try:
        above = os.stat(folder.parent)
        os.mkdir(folder, 0o700)
    except FileExistsError:
        pass
    except OSError as e:
        raise UnavailableError(f"can't be made: {e.strerror}", op="service", subject=str(folder)) from e
    if above.st_uid not in (0, os.geteuid()) or above.st_mode & 0o022 and not above.st_mode & stat.S_ISVTX:
        detail = f"may be changed by others: its mode is {stat.filemode(above.st_mode)}, its owner {above.st_uid}"
        raise DeniedError(detail, op="service", subject=str(folder.parent), hint="set TMPDIR, or XDG_RUNTIME_DIR, to a directory of your own")
    if not _is_own(folder):
        info = os.lstat(folder)
        detail = f"is {stat.filemode(info.st_mode)} of user {info.st_uid}, want a directory of this user, {os.geteuid()}, that nobody else can enter"
        raise DeniedError(detail, op="service", subject=str(folder), hint="remove it, or set TMPDIR or XDG_RUNTIME_DIR to another place")


def _start_or_join(place: _Place, flags: list[str], timeout: float) -> tuple[Endpoint, _Process | None]:
    until = time.monotonic() + timeout
    used: binary.Binary | None = None
    process: _Process | None = None
    not_before, pause = 0.0, 0.02
    try:
        while True:
            hold = _hold(place.socket)
            pid = None if hold is None else _check(place, hold)
            if hold is not None and pid is not None:
                ours = process if process is not None and process.pid == pid else None
                if process is not None and ours is None:
                    process.forget()  # it will find that another one was faster
                return Endpoint(place, pid, hold, used if ours else None), ours
            now = time.monotonic()
            if now >= until:
                said = process.said() if process is not None else ""
                raise UnavailableError(f"no service answers there after {timeout:.0f} s{said}", op="service", subject=str(place.state))
            if process is None:
                if now < not_before:
                    time.sleep(0.005)
                    continue
                used = used or binary.find()
                process = _Process(used.path, place, flags)
            status = process.wait(0.005)
            if status is None:
                continue
            if status not in (0, _ALREADY_RUNS):
                raise UnavailableError(f"the service ended at its start, with status {status}{process.said()}", op="service", subject=used.path if used else "")
            # Another one has the folder: it comes up, and is to be joined, or it ends just now, and is to be followed.
            process.forget()
            process = None
            place = place._replace(socket=_socket_of(place))
            not_before, pause = time.monotonic() + pause, min(2 * pause, 0.5)
    except BaseException:
        if process is not None:
            process.stop()
        raise


class _Hold(http.client.HTTPConnection):
    """A session, held with the service at a unix socket for as long as this is open."""

    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=_ANSWER_SECONDS)
        self._path = str(path)
        self._answer: http.client.HTTPResponse | None = None

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)

    def begin(self) -> bool:
        """Whether it is held. False if no service answers there, or the one that does is ending."""
        try:
            self.request("GET", f"/v1/sessions/{new_id()}")
            self._answer = self.getresponse()
            status, said = self._answer.status, self._answer.readline(4096)
        except PermissionError as e:
            raise DeniedError(f"can't be connected to: {e.strerror}", op="service", subject=self._path) from e
        except (OSError, http.client.HTTPException):
            return False
        if status not in (200, 503):
            raise UnavailableError(f"answers {status}: {said.decode(errors='replace').strip()}", op="service", subject=self._path)
        return status == 200 and said != b""

    def close(self) -> None:
        super().close()
        if self._answer is not None:
            self._answer.close()


def _hold(path: Path) -> _Hold | None:
    hold = _Hold(path)
    held = False
    try:
        held = hold.begin()
        return hold if held else None
    finally:
        if not held:
            hold.close()


def _socket_of(place: _Place) -> Path:
    """Where the one who has the state directory says that its socket is: not where this process would have it, if their runtime directories differ."""
    path = place.state / "endpoint.json"
    try:
        socket = json.loads(path.read_bytes()).get("socket")
        return Path(socket) if isinstance(socket, str) and path.stat().st_uid == os.geteuid() else place.socket
    except (OSError, ValueError, AttributeError):
        return place.socket  # it has left no word yet, or does not any more


def _check(place: _Place, hold: _Hold) -> int | None:
    """The pid of the service that runs there, if this package can work with it. None if it was told to end, which takes away its word first."""
    try:
        endpoint = json.loads((place.state / "endpoint.json").read_bytes())
        pid, api = int(endpoint["pid"]), int(endpoint.get("api", 0))
        if api < binary.LEAST_API:
            raise binary.too_old(str(endpoint.get("version", "")), api, f"the service of process {pid}")
        return pid
    except FileNotFoundError:
        hold.close()
        return None
    except (ValueError, TypeError, KeyError) as e:
        hold.close()
        raise CorruptError(f"can't be read: {e}", op="service", subject=str(place.state / "endpoint.json")) from e
    except BaseException:
        hold.close()
        raise


class _Process:
    """A service that this process has started, as far as it still cares for it."""

    def __init__(self, path: str, place: _Place, flags: list[str]) -> None:
        _sweep_logs(place.log.parent)
        self._log = place.log
        self._status: int | None = None
        self._read = b""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("SLUICE_")}  # they would set flags
        try:
            out = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                if os.fstat(out).st_size > _MAX_LOG:
                    os.ftruncate(out, 0)
                self._from = os.fstat(out).st_size
                command = ["/bin/sh", "-c", _DETACH, "sh", str(self._log), str(self._from), path, "serve", "--state", str(place.state), *flags]
                self._pipe, write = os.pipe()
                try:
                    shell = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=write, stderr=out, cwd="/", env=environment, start_new_session=True)
                except BaseException:
                    os.close(self._pipe)
                    raise
                finally:
                    os.close(write)
            finally:
                os.close(out)
        except OSError as e:
            raise UnavailableError(f"can't be started: {e}", op="service", subject=path) from e
        try:
            shell.wait(_SHELL_SECONDS)  # it only begins what goes on in the background
            until = time.monotonic() + _SHELL_SECONDS
            while b"\n" not in self._read and self.wait(0.1) is None and time.monotonic() < until:
                pass
            self.pid = int(self._read.split(b"\n")[0])
        except (subprocess.TimeoutExpired, ValueError):
            shell.kill()
            self.forget()
            raise UnavailableError(f"/bin/sh has not started it in {_SHELL_SECONDS:.0f} s{self.said()}", op="service", subject=path) from None

    def wait(self, seconds: float) -> int | None:
        """Its exit status, once it has ended; None if it still runs after so many seconds."""
        poll = select.poll()
        if self._status is None:
            poll.register(self._pipe, select.POLLIN)
        until = time.monotonic() + seconds
        while self._status is None and poll.poll(max(0.0, 1000 * (until - time.monotonic()))):
            piece = os.read(self._pipe, 64)
            self._read += piece
            if not piece:
                lines = self._read.split()
                self._status = int(lines[1]) if len(lines) > 1 else _UNKNOWN
                os.close(self._pipe)
            elif self._read.count(b"\n") < 2:
                break  # its pid, which is what the constructor waits for
        return self._status

    def forget(self) -> None:
        """Leave the service to itself."""
        if self._status is None:
            self._status = _UNKNOWN
            os.close(self._pipe)

    def stop(self) -> int | None:
        """End it in order, or by force if that takes too long. Returns its exit status. Idempotent."""
        if self.wait(0.0) is None:
            self._kill(signal.SIGTERM)
            if self.wait(_STOP_SECONDS) is None:
                log.warning("service: process %d has not ended in %.0f s and is killed", self.pid, _STOP_SECONDS)
                self._kill(signal.SIGKILL)
        return self.wait(_ANSWER_SECONDS)

    def _kill(self, what: signal.Signals) -> None:
        try:
            os.kill(self.pid, what)
        except ProcessLookupError:
            pass  # it has just ended

    def said(self) -> str:
        """The end of its log."""
        try:
            with open(self._log, "rb") as f:
                f.seek(max(self._from, os.fstat(f.fileno()).st_size - 4096))
                text = f.read(4096).decode(errors="replace").strip()
        except FileNotFoundError:
            return f". Its log is gone with one that ended in order just now ({self._log})"
        return f". It said:\n{text}" if text else f", and said nothing ({self._log})"


def _sweep_logs(base: Path) -> None:
    """Removes the logs of services that failed, or were killed, long ago."""
    for path in base.glob("*.log"):
        try:
            if not path.with_suffix("").exists() and not path.with_suffix(".sock").exists() and time.time() - path.stat().st_mtime > _OLD_LOG_SECONDS:
                path.unlink()
        except FileNotFoundError:
            pass  # another start was faster
        except OSError as e:
            log.warning("service: an old log can't be removed: %s", str(e))
