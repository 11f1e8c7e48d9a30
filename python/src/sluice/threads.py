"""Threads that may be inside torch when the program ends.

The interpreter ends daemon threads where they are when they next want its lock. One that comes back from C++ then takes the whole process down ("terminate called without an active exception"),
so these are told to end before, and waited for, though not for long.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections.abc import Callable

log = logging.getLogger("sluice")

EXIT_SECONDS = 10.0
"""How long the end of a program waits for all of them."""

_live: dict[threading.Thread, Callable[[], None]] = {}
_registered = False


def start(work: Callable[[], None], name: str, stop: Callable[[], None]) -> threading.Thread:
    """Start a daemon thread. ``stop``, called when the program ends, makes ``work`` return soon; it must not wait."""
    global _registered
    if not _registered:  # not when this is imported: the hook runs before those that were registered by now, the end of embedded services among them
        _registered = True
        atexit.register(_end)

    def run() -> None:
        try:
            work()
        finally:
            _live.pop(thread, None)

    thread = threading.Thread(target=run, name=name, daemon=True)
    _live[thread] = stop
    try:
        thread.start()
    except BaseException:
        del _live[thread]
        raise
    return thread


def _end() -> None:
    until = time.monotonic() + EXIT_SECONDS
    for stop in list(_live.values()):
        stop()
    for thread in list(_live):
        thread.join(max(0.0, until - time.monotonic()))
        if thread.is_alive():
            log.warning("the program ends while the thread %s is at work, which has not ended within %.0f s", thread.name, EXIT_SECONDS)


os.register_at_fork(after_in_child=_live.clear)  # they are not there
