"""The page of signatures is that of the code, and programs on the pages run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import sluice

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


def program_of_the_producers_page() -> str:
    (program,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "python-producer.md").read_text(), re.S)
    return str(program)


def test_the_producer_of_the_page_runs_as_it_stands(binary: str, tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT / "python" / "src"), "SLUICE_BINARY": binary, "XDG_RUNTIME_DIR": str(tmp_path)}
    os.chmod(tmp_path, 0o700)
    ran = subprocess.run([sys.executable, "-c", program_of_the_producers_page()], capture_output=True, text=True, timeout=120, env=environment, check=False)
    assert ran.returncode == 0, ran.stderr
    lines = ran.stdout.splitlines()
    assert [line.split(": ")[2] for line in lines if line.startswith("left out: ")] == [f"rows-v1-0-{n}" for n in (0, 5, 10, 15)]
    tokens = [int(line.split()[-1]) for line in lines if not line.startswith("left out: ")]
    assert (len(tokens), sum(tokens)) == (4, 4 * (2 + 3 + 4 + 5)), ran.stdout


def test_the_producer_of_the_page_goes_on_where_a_killed_one_ended(client: sluice.Client, run_id: str) -> None:
    page: dict[str, Any] = {"__name__": "page"}
    exec(program_of_the_producers_page(), page)
    run = client.create_run(run_id, algorithm="eagle3", max_bytes=1 << 20)
    first = run.producer("p0", incarnation=1).start()
    for n in (1, 2, 3):
        first.put(f"first-{n}", page["forward"](page["ROWS"][n]), attributes=page["ATTRIBUTES"], positions=[sluice.Position(page["SOURCE"], 0, n)], timeout=20)
    page["produce"](run)
    with run.loader(batch=1, timeout=20) as loader:
        ids = [batch.refs[0].sample_id for batch in loader]
    assert ids == ["first-1", "first-2", "first-3"] + [f"rows-v1-0-{n}" for n in range(4, 20) if n % 5]
    with pytest.raises(sluice.SluiceError):
        first.close()
    client.delete_run(run_id)
