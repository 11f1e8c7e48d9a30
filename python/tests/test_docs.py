"""The page of signatures is that of the code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_the_committed_page_of_signatures_is_that_of_the_code() -> None:
    pytest.importorskip("torch")  # some annotations are of torch
    made = subprocess.run([sys.executable, str(ROOT / "tools" / "pydoc" / "signatures.py")], capture_output=True, text=True, timeout=120, env={"PYTHONPATH": str(ROOT / "python" / "src")}, check=False)
    assert made.returncode == 0, made.stderr
    assert made.stdout == (ROOT / "docs" / "python-api.md").read_text(), "make pydoc writes it again"
