"""Which binary of the service this package starts: the one that ``$SLUICE_BINARY`` names, else the one in the package, else ``sluice`` on the ``PATH``, else one that go builds in the
checkout that the package lies in.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NoReturn

from .errors import CorruptError, InvalidError, UnavailableError, UnsupportedError

log = logging.getLogger("sluice")

ENV_BINARY = "SLUICE_BINARY"
LEAST_API = 1
"""The oldest API that this package can work with, as ``sluice version --json`` and a service's endpoint.json number it."""

_PACKAGED = Path(__file__).resolve().parent / "bin" / "sluice"
_CHECKOUT = Path(__file__).resolve().parents[3]  # if the package lies in python/src of one
_MODULE = "module github.com/sluice-ml/sluice"
_VERSION_SECONDS = 30.0
_BUILD_SECONDS = 900.0

Origin = Literal["environment", "package", "path", "checkout"]


@dataclass(frozen=True)
class Binary:
    """A binary that this package can work with: its absolute path, where it was found, and what it says of itself."""

    path: str
    origin: Origin
    version: str
    api: int


def find() -> Binary:
    """The binary to start. Says at level INFO of the logger ``sluice`` which it is.

    The first that is there is taken; if it is of no use, that is an error, and no other is tried. In a checkout, go builds it when its sources have changed, which takes a minute the first time and
    a fraction of a second later.

    Raises UnavailableError (there is none, or go can't build it), UnsupportedError (it is too old for this package), InvalidError ($SLUICE_BINARY names no program), CorruptError (it is no sluice).
    """
    found = _look()
    if found is None:
        raise UnavailableError(
            f"there is no binary of the service: the package holds none, none is on PATH, and {_no_checkout()}", op="binary",
            hint=f"install a wheel that holds one, put sluice on PATH, or name one with {ENV_BINARY}",
        )
    binary = _asked(*found)
    log.info("binary: %s, from the %s, version %s", binary.path, binary.origin, binary.version)
    return binary


def main() -> NoReturn:
    """Runs the binary in the package: the command ``sluice`` of a wheel that holds one."""
    os.execv(_PACKAGED, ["sluice", *sys.argv[1:]])


def _look() -> tuple[str, Origin] | None:
    if named := os.environ.get(ENV_BINARY):
        if not os.path.isfile(named) or not os.access(named, os.X_OK):
            raise InvalidError(f"is {named!r}, which is no program", op="binary", subject=ENV_BINARY)
        return os.path.abspath(named), "environment"
    if _PACKAGED.is_file():
        return str(_PACKAGED), "package"
    if on_path := shutil.which("sluice"):
        return os.path.abspath(on_path), "path"
    if _is_checkout() and shutil.which("go"):
        return _built(), "checkout"
    return None


def _asked(path: str, origin: Origin) -> Binary:
    """What a binary says of itself, if this package can work with it."""
    said = _run(path, "version", "--json")
    if said.returncode == 2:  # before there were numbers
        version, api = _run(path, "version").stdout.strip().removeprefix("sluice version "), 0
    else:
        try:
            values = json.loads(said.stdout)
            version, api = str(values["version"]), int(values["api"])
        except (ValueError, TypeError, KeyError):
            raise CorruptError(f"is no sluice: asked for its version it said {(said.stdout + said.stderr)[:200]!r}", op="binary", subject=path) from None
    if api < LEAST_API:
        raise too_old(version, api, path)
    return Binary(path, origin, version, api)


def too_old(version: str, api: int, subject: str) -> UnsupportedError:
    """The error for a binary, or a service that runs, of an API that this package can't work with."""
    from . import __version__

    detail = f"is sluice {version or 'unknown'} with API {api}, and version {__version__} of the Python package needs API {LEAST_API} at least"
    return UnsupportedError(detail, op="binary", subject=subject, hint=f"install a newer one, or name another with {ENV_BINARY}")


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=_VERSION_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as e:
        raise UnavailableError(f"can't be run: {e}", op="binary", subject=command[0]) from e


def _is_checkout() -> bool:
    try:
        with open(_CHECKOUT / "go.mod", encoding="utf-8") as f:
            return f.readline().strip() == _MODULE
    except OSError:
        return False


def _no_checkout() -> str:
    return "there is no go to build it with in the checkout" if _is_checkout() else "the package does not lie in a checkout to build it in"


def _built() -> str:
    """Has go build the checkout's binary into the user's cache, and returns its path. Go itself knows whether it must."""
    folder = _cache() / ("build-" + hashlib.sha256(os.fsencode(_CHECKOUT)).hexdigest()[:16])
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = folder / "sluice"
    if not path.exists():
        log.info("binary: go builds it in %s, which takes a minute the first time", _CHECKOUT)
    # Go builds in GOTMPDIR and renames from there if it is on the same file system: a process that runs the old binary keeps it.
    environment = os.environ | {"CGO_ENABLED": "0", "GOTMPDIR": str(folder)}
    command = ["go", "build", "-trimpath", "-ldflags", "-s -w", "-o", str(path), "./cmd/sluice"]
    with _locked(folder / "lock"):
        try:
            done = subprocess.run(
                command, cwd=_CHECKOUT, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", timeout=_BUILD_SECONDS,
            )
        except subprocess.TimeoutExpired:
            raise UnavailableError(f"go has not built it in {_BUILD_SECONDS:.0f} s", op="binary", subject=str(_CHECKOUT)) from None
    if done.returncode != 0:
        raise UnavailableError(f"go can't build it:\n{done.stdout.strip()}", op="binary", subject=str(_CHECKOUT))
    return str(path)


def _cache() -> Path:
    if os.path.isabs(named := os.environ.get("XDG_CACHE_HOME", "")):
        return Path(named, "sluice")
    return Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache") / "sluice"


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds a file's lock, which others of this user may hold while they build."""
    until = time.monotonic() + _BUILD_SECONDS
    with open(path, "ab") as f:
        while True:
            try:
                fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    raise UnavailableError(f"another process has been building it for {_BUILD_SECONDS:.0f} s", op="binary", subject=str(path)) from None
                time.sleep(0.05)
        yield
