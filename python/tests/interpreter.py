"""Another interpreter, for what has to be true of a fresh one: what is imported, and what works where torch is absent."""

from __future__ import annotations

import subprocess
import sys
import textwrap


def run_python(code: str) -> None:
    """Run code in another interpreter, which finds the package where this one does."""
    path = [p for p in sys.path if p]
    done = subprocess.run(
        [sys.executable, "-c", f"import sys\nsys.path[:0] = {path!r}\n" + textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
