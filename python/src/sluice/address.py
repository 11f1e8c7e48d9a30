"""Where the service is and how to prove who calls: the same rules, files and environment variables as the command line and the Go client."""

from __future__ import annotations

import ipaddress
import json
import os
import re
import stat
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from .errors import CorruptError, DeniedError, InvalidError, UnavailableError

ENV_URL = "SLUICE_URL"
ENV_TOKEN_FILE = "SLUICE_TOKEN_FILE"
ENV_STATE = "SLUICE_STATE"

_PATH = re.compile(r"[A-Za-z0-9/._~!$&'()*+,;=:@%-]*")
_TOKEN = re.compile(r"[A-Za-z0-9_-]{26,256}")
_MAX_FILE = 4 << 20
_MAX_SOCKET_PATH = 107 if sys.platform == "linux" else 103


@dataclass(frozen=True)
class Address:
    """A service, resolved. ``name`` is for messages; it never holds a secret."""

    name: str
    scheme: str  # "unix", "http" or "https"
    host: str = ""
    port: int = 0
    prefix: str = ""  # path in front of /v1
    socket: str = ""  # of the unix socket
    ca_file: str = ""
    token: str = field(default="", repr=False)

    @property
    def in_clear(self) -> bool:
        """Whether a token would cross a network unencrypted."""
        if self.scheme != "http" or not self.token or self.host == "localhost":
            return False
        try:
            return not ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return True


def resolve(
    url: str | None = None, *, state_dir: str | os.PathLike[str] | None = None, token: str | None = None,
    token_file: str | os.PathLike[str] | None = None, ca_file: str | os.PathLike[str] | None = None,
) -> Address:
    """Find the service: ``url``, else ``$SLUICE_URL``, else the service that has left word in its state directory on this host."""
    where = url or os.environ.get(ENV_URL, "")
    ca = os.fspath(ca_file) if ca_file else ""
    directory = Path(state_dir) if state_dir else _default_state()
    if not where:
        if directory is None:
            raise UnavailableError("there is no home directory, and so no state directory of a service", op="client", hint=f"name a service by its url or ${ENV_URL}")
        endpoint = _read_endpoint(directory)
        socket = endpoint.get("socket")
        where = f"unix:{socket}" if socket else str(endpoint.get("url", ""))
        ca = ca or ("" if socket else str(endpoint.get("ca_file", "")))
        if not where:
            raise CorruptError("names neither a socket nor a url", op="client", subject=str(directory / "endpoint.json"))
    address = parse(where)
    secret = _given_token(token, token_file)
    if not secret and address.scheme != "unix" and directory is not None:
        secret, own_ca = _own_token(directory, address.name)
        ca = ca or own_ca
    return Address(address.name, address.scheme, address.host, address.port, address.prefix, address.socket, ca, secret)


def parse(where: str) -> Address:
    """Read an address: ``http://host:port``, ``https://host:port`` or ``unix:/path``."""

    def bad(detail: str) -> InvalidError:
        return InvalidError(detail, op="client", subject="url", hint="want http://host:port, https://host:port or unix:/path")

    if not isinstance(where, str):
        raise bad(f"is a {type(where).__name__}")
    if not where.isprintable():
        raise bad("has characters that can't be printed")
    if where.startswith("unix:"):
        path = where[len("unix:"):].removeprefix("//")
        if not os.path.isabs(path):
            raise bad("the path of the unix socket is not absolute")
        if len(os.fsencode(path)) > _MAX_SOCKET_PATH:
            raise bad(f"the path of the unix socket has {len(os.fsencode(path))} bytes, want {_MAX_SOCKET_PATH} at most")
        return Address(f"unix:{path}", "unix", host="localhost", socket=path)
    try:
        u = urlsplit(where)
        port = u.port
    except ValueError:
        raise bad("can't be read") from None  # the error would quote what may be a secret
    if u.scheme not in ("http", "https"):
        raise bad(f"has the scheme {u.scheme!r}")
    if not u.hostname:
        raise bad("names no host")
    if u.username is not None or u.password is not None:
        raise bad("holds a user or password; a token goes into a file")
    if u.query or u.fragment:
        raise bad("has a query or a fragment")
    if port == 0:
        raise bad("has the port 0")
    prefix = u.path.rstrip("/")
    try:
        u.hostname.encode("idna")
    except UnicodeError:
        raise bad("names a host that can't be one") from None
    if " " in u.netloc or not _PATH.fullmatch(prefix):
        raise bad("has characters that must be escaped")
    return Address(f"{u.scheme}://{u.netloc}{prefix}", u.scheme, u.hostname, port or (443 if u.scheme == "https" else 80), prefix)


def _default_state() -> Path | None:
    if directory := os.environ.get(ENV_STATE):
        return Path(directory)
    if os.path.isabs(directory := os.environ.get("XDG_STATE_HOME", "")):
        return Path(directory) / "sluice"
    try:
        return Path.home() / ".local" / "state" / "sluice"
    except RuntimeError:
        return None  # a user without a home, as in some containers


def _read_endpoint(directory: Path) -> dict[str, Any]:
    path = directory / "endpoint.json"
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise UnavailableError(
            "no service runs with this state directory", op="client", subject=str(directory), hint=f"start one with `sluice serve`, or name one by its url or ${ENV_URL}"
        ) from None
    except OSError as e:
        raise DeniedError(f"can't be read: {e.strerror}", op="client", subject=str(path)) from e
    except (ValueError, RecursionError) as e:
        raise CorruptError("is not JSON", op="client", subject=str(path)) from e
    if not isinstance(value, dict):
        raise CorruptError("is no JSON object", op="client", subject=str(path))
    return value


def _given_token(token: str | None, token_file: str | os.PathLike[str] | None) -> str:
    if token:
        if not _TOKEN.fullmatch(token):
            raise InvalidError("holds no token: want 26 to 256 letters, digits, - and _", op="client", subject="token")
        return token
    path = os.fspath(token_file) if token_file else os.environ.get(ENV_TOKEN_FILE, "")
    if not path:
        return ""
    text = _read_private(path, links=True).decode("ascii", "replace").strip()  # a secret that an orchestrator mounts is a link
    if not _TOKEN.fullmatch(text):
        raise InvalidError("holds no token: want 26 to 256 letters, digits, - and _, and nothing else", op="client", subject=path)
    return text


def _read_private(path: str, *, links: bool) -> bytes:
    """A file that holds secrets: a regular one, of this user or root, and nobody else's to read. ``links`` says that it may be reached by a symbolic link."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if links else os.O_NOFOLLOW))
    except OSError as e:
        raise DeniedError(f"can't be opened: {e.strerror}", op="token", subject=path) from e
    with open(fd, "rb") as f:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise DeniedError("is no regular file", op="token", subject=path)
        if info.st_uid not in (os.geteuid(), 0) or info.st_mode & 0o077:
            raise DeniedError(f"belongs to uid {info.st_uid} and has the mode {info.st_mode & 0o777:o}, want your own and 600", op="token", subject=path, hint="chmod 600 it")
        data = f.read(_MAX_FILE + 1)
    if len(data) > _MAX_FILE:
        raise CorruptError("has more than 4 MiB", op="token", subject=path)
    return data


def _own_token(directory: Path, name: str) -> tuple[str, str]:
    """The operator's token of the service of the state directory, and its certificate, if that is the service that is called."""
    try:
        endpoint = _read_endpoint(directory)
    except UnavailableError:
        return "", ""  # no service of ours: the one that is called may be elsewhere, and says itself if it wants a token
    if str(endpoint.get("url", "")).rstrip("/") != name:
        return "", ""
    tokens_file = str(directory / "tokens.json")
    try:
        tokens = json.loads(_read_private(tokens_file, links=False))["tokens"]
        own = next((str(t["value"]) for t in tokens if t["role"] == "operator" and not t.get("run")), "")
        if own and not _TOKEN.fullmatch(own):
            raise ValueError
        return own, str(endpoint.get("ca_file", ""))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise CorruptError("is no tokens file of a service", op="token", subject=tokens_file) from None
