"""Which binary is taken, and what is said of it."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import sluice
from sluice import binary as binaries

GO = shutil.which("go")


def fake(path: Path, version: str = '{"version":"v9 go1.26","api":9}') -> Path:
    """A program that says that it is a sluice."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n[ \"$*\" = 'version --json' ] && {{ echo '{version}'; exit 0; }}\nexit 1\n")
    path.chmod(0o755)
    return path


@pytest.fixture(autouse=True)
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A world without a binary, but for what a test lays there."""
    (tmp_path / "path").mkdir()
    monkeypatch.delenv("SLUICE_BINARY", raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path / 'path'}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(binaries, "_PACKAGED", tmp_path / "package" / "bin" / "sluice")
    monkeypatch.setattr(binaries, "_CHECKOUT", tmp_path / "checkout")
    return tmp_path


def test_the_one_that_is_named_goes_before_the_package_before_path(nowhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_path = fake(nowhere / "path" / "sluice")
    found = binaries.find()
    assert found == binaries.Binary(str(on_path), "path", "v9 go1.26", 9)
    packaged = fake(nowhere / "package" / "bin" / "sluice")
    assert (binaries.find().path, binaries.find().origin) == (str(packaged), "package")
    named = fake(nowhere / "named")
    monkeypatch.setenv("SLUICE_BINARY", str(named))
    assert (binaries.find().path, binaries.find().origin) == (str(named), "environment")


def test_it_is_said_which_is_used(nowhere: Path, caplog: pytest.LogCaptureFixture) -> None:
    on_path = fake(nowhere / "path" / "sluice")
    with caplog.at_level(logging.INFO, "sluice"):
        binaries.find()
    assert f"{on_path}, from the path, version v9 go1.26" in caplog.text


def test_that_there_is_none_is_said_with_the_remedies(nowhere: Path) -> None:
    with pytest.raises(sluice.UnavailableError, match="the package holds none, none is on PATH, and the package does not lie in a checkout.*SLUICE_BINARY"):
        binaries.find()
    (nowhere / "checkout").mkdir()
    (nowhere / "checkout" / "go.mod").write_text("module github.com/sluice-ml/sluice\n")
    with pytest.raises(sluice.UnavailableError, match="there is no go to build it with"):
        binaries.find()


@pytest.mark.parametrize("what", ["none", "directory", "data"])
def test_a_name_that_is_no_program_is_refused(what: str, nowhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake(nowhere / "path" / "sluice")  # and is not passed over for another
    named = nowhere / "named"
    if what == "directory":
        named.mkdir()
    elif what == "data":
        named.touch(0o600)
    monkeypatch.setenv("SLUICE_BINARY", str(named))
    with pytest.raises(sluice.InvalidError, match="SLUICE_BINARY.*which is no program"):
        binaries.find()


def test_one_that_is_too_old_is_refused_with_both_versions(nowhere: Path) -> None:
    path = fake(nowhere / "path" / "sluice", '{"version":"v0.0.9","api":0}')
    with pytest.raises(sluice.UnsupportedError, match=rf"{path}: is sluice v0\.0\.9 with API 0, and version {sluice.__version__} of the Python package needs API 1"):
        binaries.find()


def test_one_that_has_no_number_yet_is_refused_with_both_versions(nowhere: Path) -> None:
    path = nowhere / "path" / "sluice"
    path.write_text('#!/bin/sh\n[ "$*" = version ] && { echo sluice version v0.0.1 go1.26; exit 0; }\necho "unknown flag: --json" >&2\nexit 2\n')
    path.chmod(0o755)
    with pytest.raises(sluice.UnsupportedError, match=r"is sluice v0\.0\.1 go1\.26 with API 0"):
        binaries.find()


@pytest.mark.parametrize("said", ["irrigation 2.0", "[]", '{"version":"v1"}', '{"version":"v1","api":"many"}'])
def test_what_is_no_sluice_is_refused_with_what_it_says(said: str, nowhere: Path) -> None:
    fake(nowhere / "path" / "sluice", said)
    with pytest.raises(sluice.CorruptError, match="is no sluice: asked for its version it said"):
        binaries.find()


def test_one_that_cannot_run_is_told_of(nowhere: Path) -> None:
    path = fake(nowhere / "path" / "sluice")
    path.write_text("#!/no/such/interpreter\n")
    with pytest.raises(sluice.UnavailableError, match="can't be run"):
        binaries.find()


def test_the_real_one_is_taken(binary: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLUICE_BINARY", binary)
    assert binaries.find().api >= binaries.LEAST_API


# A checkout in small: what go builds of it says that it is a sluice.
PROGRAM = """package main

import "fmt"

func main() { fmt.Println(`{"version":"%s","api":1}`) }
"""


@pytest.fixture(scope="module")
def go_cache() -> str:
    if GO is None:
        pytest.skip("there is no go")
    return subprocess.run([GO, "env", "GOCACHE"], check=True, capture_output=True, text=True, timeout=60).stdout.strip()


@pytest.fixture
def checkout(go_cache: str, nowhere: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    assert GO is not None
    monkeypatch.setenv("PATH", f"{nowhere / 'path'}:{os.path.dirname(GO)}")
    monkeypatch.setenv("GOCACHE", go_cache)  # which would be the test's own otherwise, and cold
    root = nowhere / "checkout"
    (root / "cmd" / "sluice").mkdir(parents=True)
    (root / "go.mod").write_text("module github.com/sluice-ml/sluice\n\ngo 1.21\n")
    (root / "cmd" / "sluice" / "main.go").write_text(PROGRAM % "first")
    return root




def test_in_a_checkout_go_builds_it_and_again_only_after_a_change(checkout: Path, nowhere: Path) -> None:
    found = binaries.find()
    assert (found.origin, found.version) == ("checkout", "first")
    assert Path(found.path).is_relative_to(nowhere / "cache" / "sluice")
    built = os.stat(found.path)
    assert binaries.find() == found
    assert os.stat(found.path).st_ino == built.st_ino
    (checkout / "cmd" / "sluice" / "main.go").write_text(PROGRAM % "second")
    assert binaries.find().version == "second"


def test_a_build_does_not_disturb_a_process_that_runs_the_old_binary(checkout: Path) -> None:
    main = checkout / "cmd" / "sluice" / "main.go"
    waits = PROGRAM.replace('import "fmt"', 'import ("fmt"; "os")').replace("func main() {", "func main() { if len(os.Args) == 1 { os.Stdin.Read(make([]byte, 1)) };") % "first"
    main.write_text(waits)
    path = binaries.find().path
    with subprocess.Popen([path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as old:
        main.write_text(PROGRAM % "second")
        assert binaries.find().version == "second"
        assert "first" in old.communicate("\n", timeout=30)[0]


def test_many_that_look_at_once_build_it_one_after_the_other(checkout: Path) -> None:
    found: list[binaries.Binary] = []
    threads = [threading.Thread(target=lambda: found.append(binaries.find())) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(120)
    assert [f.version for f in found] == ["first"] * 4


def test_what_go_says_is_in_the_error_of_a_build_that_fails(checkout: Path) -> None:
    (checkout / "cmd" / "sluice" / "main.go").write_text("package main\n\nfunc main() { nonsense() }\n")
    with pytest.raises(sluice.UnavailableError, match=r"(?s)go can't build it:.*undefined: nonsense"):
        binaries.find()


def test_the_command_of_a_wheel_is_the_binary_in_it(nowhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packaged = fake(nowhere / "package" / "bin" / "sluice")
    packaged.write_text('#!/bin/sh\necho "$0 $*"\n')
    code = f"import sys, pathlib\nfrom sluice import binary\nbinary._PACKAGED = pathlib.Path({str(packaged)!r})\nsys.argv[1:] = ['status', '--json']\nbinary.main()"
    environment = os.environ | {"PYTHONPATH": str(Path(sluice.__file__).resolve().parents[1])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout == f"{packaged} status --json\n", done.stderr
