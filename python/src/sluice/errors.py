"""Errors, one class a code.

Every error of the package is a :class:`SluiceError` and also the built-in exception that the reference API raises in its place, so that ``except KeyError`` and
``except MemoryError`` go on working. Act on the class or on :attr:`SluiceError.code`, which is stable; the text is for people.
"""

from __future__ import annotations

from typing import Any, ClassVar


class SluiceError(Exception):
    """What all errors of Sluice have.

    ``op`` and ``subject`` say what was being done to what, ``detail`` what is wrong, ``hint`` what to do about it, and ``request`` is the id of the call in the service's log,
    if the service gave the error.
    """

    code: ClassVar[str] = "internal"

    def __init__(self, detail: str = "", *, op: str = "", subject: str = "", hint: str = "", request: str = "") -> None:
        super().__init__(detail)
        self.detail = detail
        self.op = op
        self.subject = subject
        self.hint = hint
        self.request = request

    def __str__(self) -> str:
        # Not Exception.__str__: KeyError would show its argument's repr.
        head = ": ".join(part for part in (self.op, self.subject) if part)
        text = ": ".join(part for part in (head, self.detail or self.code) if part)
        return _printable(f"{text} ({self.hint})" if self.hint else text)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.detail, self.op, self.subject, self.hint, self.request), self.__dict__


def _printable(text: str) -> str:
    """Without what could disturb a terminal, or reorder what is read: names and reasons may come from anywhere."""
    return "".join(c if c == "\n" or c.isprintable() else "?" for c in text)


def _rebuild(cls: type[SluiceError], detail: str, op: str, subject: str, hint: str, request: str) -> SluiceError:
    return cls(detail, op=op, subject=subject, hint=hint, request=request)


class InvalidError(SluiceError, ValueError):
    """An argument breaks its documented form."""

    code = "invalid"


class NotFoundError(SluiceError, KeyError):
    """No such sample, lease, run or feature; or a ref of an earlier put, or of another store."""

    code = "not_found"


class DuplicateError(SluiceError, ValueError):
    """The sample id is taken."""

    code = "duplicate"


class FullError(SluiceError, MemoryError):
    """It does not fit the cap."""

    code = "full"


class NoSpaceError(SluiceError, MemoryError):
    """The file system or the cgroup has no room, whatever the caps say."""

    code = "no_space"


class ClosedError(SluiceError, RuntimeError):
    """The store, queue, loader or client was closed."""

    code = "closed"


class StaleError(SluiceError, RuntimeError):
    """The lease ran out, or a newer incarnation has taken over."""

    code = "stale"


class SchemaError(SluiceError, ValueError):
    """The sample does not agree with its run's schema."""

    code = "schema"


class CorruptError(SluiceError, RuntimeError):
    """Bytes disagree with their ref, are short, or fail a check."""

    code = "corrupt"


class DeniedError(SluiceError, PermissionError):
    """The operating system or the token does not allow it."""

    code = "denied"


class ConflictError(SluiceError, RuntimeError):
    """The state does not allow it now: a claimed sample aborted, a second start."""

    code = "conflict"


class UnavailableError(SluiceError, ConnectionError):
    """The service cannot answer now; nothing is known of the call. It may be repeated."""

    code = "unavailable"


class WedgedError(SluiceError, RuntimeError):
    """Producer and consumers wait for each other and nothing can move."""

    code = "wedged"


class AbortedError(SluiceError, RuntimeError):
    """The caller's own abort condition became true."""

    code = "aborted"


class UnsupportedError(SluiceError, NotImplementedError):
    """This medium, target, library or backend cannot do it."""

    code = "unsupported"


class TargetFaultError(SluiceError, RuntimeError):
    """The target failed, or answered something that cannot be right."""

    code = "target_fault"


class WaitTimeoutError(SluiceError, TimeoutError):
    """What was waited for did not come within the timeout that the caller gave."""

    code = "timeout"


BY_CODE: dict[str, type[SluiceError]] = {
    cls.code: cls
    for cls in (
        InvalidError, NotFoundError, DuplicateError, FullError, NoSpaceError, ClosedError, StaleError, SchemaError, CorruptError, DeniedError, ConflictError,
        UnavailableError, WedgedError, AbortedError, UnsupportedError, TargetFaultError,
    )
}
"""The class of each code that the service's problem documents can have, beside those of HTTP itself."""

_OF_HTTP: dict[str, type[SluiceError]] = {
    "unauthorized": DeniedError, "too_large": InvalidError, "method_not_allowed": InvalidError, "unsupported_media": InvalidError, "bad_range": InvalidError,
    "precondition": InvalidError, "timeout": UnavailableError, "busy": UnavailableError, "internal": UnavailableError,
}


def from_problem(problem: dict[str, Any]) -> SluiceError:
    """The error that a problem document (RFC 9457) of the service means. ``code`` is the document's own, also where several codes share a class."""
    code = str(problem.get("code", ""))
    cls = BY_CODE.get(code) or _OF_HTTP.get(code) or SluiceError
    error = cls(
        str(problem.get("detail", "")), op=str(problem.get("op", "")), subject=str(problem.get("subject", "")), hint=str(problem.get("hint", "")),
        request=str(problem.get("request", "")),
    )
    if code == "unauthorized":
        error.hint = "give token= or token_file=, or $SLUICE_TOKEN_FILE; `sluice token create` makes one"
    if code and code != cls.code:
        error.__dict__["code"] = code
    return error
