"""The page of signatures is that of the code."""

from __future__ import annotations

import os
import re
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


def test_the_program_in_the_readme_runs_as_it_stands(binary: str, tmp_path: Path) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    environment = os.environ | {"PYTHONPATH": str(ROOT / "python" / "src"), "SLUICE_BINARY": binary, "XDG_RUNTIME_DIR": str(tmp_path)}
    os.chmod(tmp_path, 0o700)
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, env=environment, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines()[-1] == "8.0" and len(ran.stdout.splitlines()) == 3, ran.stdout
