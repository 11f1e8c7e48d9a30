"""What the service answers, read with care: an answer of another form than was agreed is a CorruptError, whatever is wrong with it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar
from urllib.parse import quote

from .errors import CorruptError, InvalidError

T = TypeVar("T")

_RUN_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._:-]{0,199}\Z")


def understood(op: str, subject: str, read: Callable[[], T]) -> T:
    """What ``read`` makes of an answer. It makes no calls: all that it raises is the answer's fault."""
    try:
        return read()
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as e:
        raise CorruptError(f"the service's answer can't be understood: {type(e).__name__}: {e}", op=op, subject=subject, hint="do client and service have the same version?") from e


def fields(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"is a {type(value).__name__}, want an object")
    return value


def items(value: Any) -> list[Any]:
    """A list; null is an empty one."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise TypeError(f"is a {type(value).__name__}, want a list")
    return value


def text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"is {value!r:.80}, want a string")
    return value


def flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"is {value!r:.80}, want true or false")
    return value


def count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 63:
        raise TypeError(f"is {value!r:.80}, want a whole number")
    return value


def seconds(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise TypeError(f"is {value!r:.80}, want a number of seconds")
    return float(value)


def lease_id(value: Any) -> int:
    if not re.fullmatch(r"[0-9a-f]{1,32}", text(value)):
        raise ValueError(f"is {value!r:.80}, want 32 hexadecimal digits")
    return int(value, 16)


def run_path(run_id: Any) -> str:
    """The path of a run. InvalidError for what can't be the name of one, which could otherwise be that of something else."""
    if not isinstance(run_id, str) or not _RUN_ID.match(run_id) or ".." in run_id:
        raise InvalidError(f'is {run_id!r:.220}, want [A-Za-z0-9_][A-Za-z0-9._:-]{{0,199}} without ".."', op="client", subject="run_id")
    return f"/v1/runs/{quote(run_id, safe='')}"
