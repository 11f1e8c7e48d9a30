"""The wheel, the sdist and the editable install, as pip makes and installs them, without a network."""

from __future__ import annotations

import base64
import csv
import hashlib
import importlib.util
import io
import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from email import message_from_bytes
from pathlib import Path

import numpy as np
import pytest

import sluice
import sluice_build

FOLDER = Path(__file__).resolve().parents[1]
PLATFORM = {"linux": "manylinux2014_", "darwin": "macosx_12_0_"}.get(sys.platform, "any")


def execute(*command: str | Path, ok: bool = True, **variables: str) -> str:
    """Runs a command outside of the checkout and returns what it prints."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "SLUICE_BINARY")} | variables
    done = subprocess.run(command, cwd="/", env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600)
    assert (done.returncode == 0) == ok, done.stdout
    return done.stdout


def pip(*arguments: str | Path, **variables: str) -> str:
    return execute(sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments, **variables)


def wheel_of(folder: Path, out: Path, *arguments: str) -> tuple[Path, str]:
    said = pip("wheel", "--verbose", "--no-index", "--no-deps", "--wheel-dir", out, *arguments, folder)
    (built,) = out.glob("*.whl")
    return built, said


@pytest.fixture(scope="module")
def packaged(binary: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel with a binary inside."""
    return wheel_of(FOLDER, tmp_path_factory.mktemp("packaged"), f"--config-settings=binary={binary}")[0]


@pytest.fixture(scope="module")
def pure(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel without one."""
    return wheel_of(FOLDER, tmp_path_factory.mktemp("pure"), "--config-settings=binary=none")[0]


class Environment:
    """A fresh virtual environment that has this one's numpy."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder, with_pip=False, symlinks=True)
        self.python = folder / "bin" / "python"
        self.site = Path(execute(self.python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
        links = folder / "links"
        links.mkdir()
        for part in Path(np.__file__).parents[1].glob("numpy*"):
            (links / part.name).symlink_to(part)
        (self.site / "links.pth").write_text(f"{links}\n")
        self.empty = self.files()

    def files(self) -> set[Path]:
        return {p for p in self.python.parents[1].rglob("*") if "__pycache__" not in p.parts}

    def pip(self, *arguments: str | Path) -> str:
        return pip("--python", self.python, *arguments)

    def run(self, code: str, **variables: str) -> str:
        return execute(self.python, "-I", "-c", code, **variables).strip()


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    return Environment(tmp_path / "env")


FIND = "import logging; logging.basicConfig(level='INFO'); from sluice.binary import find; b = find(); print(b.origin, b.path)"


def test_a_wheel_with_a_binary_is_of_its_platform_and_has_a_command(packaged: Path, environment: Environment, tmp_path: Path) -> None:
    assert PLATFORM in packaged.name
    environment.pip("install", "--no-index", packaged)
    assert environment.run(FIND, PATH="/nonexistent").splitlines()[-1] == f"package {environment.site / 'sluice' / 'bin' / 'sluice'}"
    assert environment.run("import sluice; print(sluice.__version__)") == sluice.__version__
    command = environment.python.parent / "sluice"
    assert execute(command, "version", PATH="/nonexistent").startswith("sluice version ")
    started = environment.run("import sluice\nwith sluice.local() as c: print(c.status()['ready'] in (True, False))", XDG_RUNTIME_DIR=str(tmp_path))
    assert started == "True"
    assert not [line for line in environment.pip("check").splitlines() if line.startswith("sluice ")]
    environment.pip("uninstall", "--yes", "sluice")
    assert environment.files() == environment.empty


def test_a_wheel_without_a_binary_is_of_any_platform_and_finds_one_on_path(pure: Path, environment: Environment, binary: str, tmp_path: Path) -> None:
    assert pure.name == f"sluice-{sluice.__version__}-py3-none-any.whl"
    environment.pip("install", "--no-index", pure)
    assert not (environment.python.parent / "sluice").exists()
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "sluice").symlink_to(binary)
    assert environment.run(FIND, PATH=str(tmp_path / "path")).splitlines()[-1] == f"path {tmp_path / 'path' / 'sluice'}"
    assert "there is no binary of the service" in execute(environment.python, "-I", "-c", FIND, ok=False, PATH="/nonexistent")
    environment.pip("uninstall", "--yes", "sluice")
    assert environment.files() == environment.empty


def test_the_licence_of_the_package_is_that_of_the_project() -> None:
    assert (FOLDER / "LICENSE").read_bytes() == (FOLDER.parent / "LICENSE").read_bytes()


def test_an_editable_install_is_this_folder(environment: Environment, tmp_path: Path) -> None:
    copy = shutil.copytree(FOLDER, tmp_path / "copy", ignore=shutil.ignore_patterns(".*", "__pycache__"))
    environment.pip("install", "--no-index", "--editable", copy)
    assert environment.run("import sluice; print(sluice.__file__)") == str(copy / "src" / "sluice" / "__init__.py")
    (copy / "src" / "sluice" / "__init__.py").write_text("changed = True\n")
    assert environment.run("import sluice; print(sluice.changed)") == "True"
    environment.pip("uninstall", "--yes", "sluice")
    assert environment.files() == environment.empty


def test_the_record_of_a_wheel_is_right_and_the_binary_may_be_run(packaged: Path) -> None:
    with zipfile.ZipFile(packaged) as wheel:
        names = wheel.namelist()
        record = f"sluice-{sluice.__version__}.dist-info/RECORD"
        rows = list(csv.reader(io.StringIO(wheel.read(record).decode())))
        assert sorted(path for path, _, _ in rows) == sorted(names)
        for path, digest, size in rows:
            if path == record:
                assert (digest, size) == ("", "")
                continue
            data = wheel.read(path)
            assert digest == "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
            assert int(size) == len(data)
        assert wheel.getinfo("sluice/bin/sluice").external_attr >> 16 == 0o100755
        assert "sluice/schemas/eagle3.json" in names
        assert wheel.getinfo("sluice/py.typed").external_attr >> 16 == 0o100644
        tags = message_from_bytes(wheel.read(f"sluice-{sluice.__version__}.dist-info/WHEEL")).get_all("Tag")
        assert tags is not None
        assert [t.removeprefix("py3-none-") for t in tags] == packaged.stem.removeprefix(f"sluice-{sluice.__version__}-py3-none-").split(".")


def test_the_metadata_is_valid_and_says_what_is_needed(pure: Path) -> None:
    metadata = pytest.importorskip("packaging.metadata")
    with zipfile.ZipFile(pure) as wheel:
        m = metadata.Metadata.from_email(wheel.read(f"sluice-{sluice.__version__}.dist-info/METADATA"), validate=True)
    assert (m.name, str(m.version), m.license_expression, str(m.requires_python)) == ("sluice", sluice.__version__, "Apache-2.0", ">=3.10")
    assert [str(r) for r in m.requires_dist if r.marker is None] == ["numpy>=1.22"]
    (torch,) = [r for r in m.requires_dist if str(r.marker) == 'extra == "torch"']
    assert (torch.name, torch.specifier.contains("1.13.0a0+gitunknown"), torch.specifier.contains("2.5.1"), torch.specifier.contains("1.12.1")) == ("torch", True, True, False)
    assert m.provides_extra == ["torch", "transformers"]
    assert "# Sluice for Python" in m.description


@pytest.mark.skipif(shutil.which("go") is None, reason="there is no go")
def test_in_a_checkout_go_builds_the_binary_of_the_wheel(environment: Environment, tmp_path: Path) -> None:
    built, said = wheel_of(FOLDER, tmp_path)
    assert PLATFORM in built.name
    assert "with a binary inside that go builds for" in said
    environment.pip("install", "--no-index", built)
    assert environment.run(FIND).splitlines()[-1].startswith("package ")


@pytest.mark.parametrize(
    ("goos", "goarch", "tag"),
    [
        ("linux", "amd64", "py3-none-manylinux2014_x86_64.musllinux_1_1_x86_64"),
        ("linux", "arm64", "py3-none-manylinux2014_aarch64.musllinux_1_1_aarch64"),
        ("darwin", "arm64", "py3-none-macosx_12_0_arm64"),
        ("darwin", "amd64", "py3-none-macosx_12_0_x86_64"),
        ("windows", "amd64", "py3-none-any"),
    ],
)
def test_the_tag_is_that_of_the_platform_that_is_built_for(goos: str, goarch: str, tag: str, binary: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOOS", goos)
    monkeypatch.setenv("GOARCH", goarch)
    assert sluice_build.choose({"binary": binary}).tag == tag
    if shutil.which("go") is not None:
        assert sluice_build.choose(None).tag == tag


def test_without_go_the_wheel_is_pure_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    name = sluice_build.build_wheel(str(tmp_path))
    assert name == f"sluice-{sluice.__version__}-py3-none-any.whl"
    assert "there is no go on PATH to build a binary with: it finds a binary on PATH" in capsys.readouterr().out


def test_a_build_that_fails_is_no_wheel_without_a_binary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go = tmp_path / "go"
    go.write_text('#!/bin/sh\n[ "$1" = env ] && { echo \'{"GOOS":"linux","GOARCH":"amd64"}\'; exit 0; }\necho "cmd/sluice: it does not compile" >&2\nexit 1\n')
    go.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(sluice_build.BuildError, match="(?s)binary=none makes a wheel without it:.*it does not compile"):
        sluice_build.build_wheel(str(tmp_path))
    assert not list(tmp_path.glob("*.whl"))


def test_a_setting_that_is_wrong_is_refused(tmp_path: Path) -> None:
    with pytest.raises(sluice_build.BuildError, match="the setting binary is '/no/such', want none or the path of a file"):
        sluice_build.build_wheel(str(tmp_path), {"binary": "/no/such"})


def test_the_same_files_make_the_same_sdist_and_wheel(tmp_path: Path) -> None:
    for make, settings in ((sluice_build.build_sdist, None), (sluice_build.build_wheel, {"binary": "none"})):
        made = []
        for folder in ("a", "b"):
            (tmp_path / folder).mkdir(exist_ok=True)
            made.append((tmp_path / folder / make(str(tmp_path / folder), settings)).read_bytes())
        assert made[0] == made[1]


def test_an_sdist_holds_the_tests_and_makes_the_wheel_without_a_binary(tmp_path: Path, pure: Path) -> None:
    stem = f"sluice-{sluice.__version__}"
    with tarfile.open(tmp_path / sluice_build.build_sdist(str(tmp_path))) as archive:
        names = archive.getnames()
        archive.extractall(tmp_path)
    for path in ("PKG-INFO", "LICENSE", "pyproject.toml", "src/sluice/py.typed", "build_backend/sluice_build.py", "tests/test_packaging.py"):
        assert f"{stem}/{path}" in names
    assert not [n for n in names if "__pycache__" in n or "/." in n]
    built, said = wheel_of(tmp_path / stem, tmp_path)
    assert "the package does not lie in a checkout of Sluice" in said
    assert built.read_bytes() == pure.read_bytes()


def test_the_distribution_may_have_another_name(tmp_path: Path, environment: Environment) -> None:
    copy = shutil.copytree(FOLDER, tmp_path / "copy", ignore=shutil.ignore_patterns(".*", "__pycache__"))
    project = copy / "pyproject.toml"
    project.write_text(project.read_text().replace('name = "sluice"\n', 'name = "Sluice.trainer"\n'))
    built, _ = wheel_of(copy, tmp_path)
    assert built.name == f"sluice_trainer-{sluice.__version__}-py3-none-any.whl"
    environment.pip("install", "--no-index", built)
    assert "Name: Sluice.trainer" in environment.pip("show", "sluice-trainer")
    assert environment.run("import sluice; print(sluice.__version__)") == sluice.__version__


@pytest.mark.parametrize(
    ("text", "what"),
    [('name = "s"\ngui-scripts = {}', "does not know project.gui-scripts"), ('name = "no good"', "project.name is 'no good'")],
    ids=["unknown", "name"],
)
def test_what_the_backend_does_not_support_is_refused(text: str, what: str) -> None:
    with pytest.raises(sluice_build.BuildError, match=what):
        sluice_build.read_project(f"[project]\n{text}\n")


def test_the_package_and_the_project_have_the_same_version() -> None:
    assert sluice_build.read_project().version == sluice.__version__


def test_torch_is_not_imported_with_the_package() -> None:
    if importlib.util.find_spec("torch") is None:
        pytest.skip("there is no torch")
    code = f"import sys; sys.path.insert(0, {str(FOLDER / 'src')!r}); import sluice; print('torch' in sys.modules)"
    assert execute(sys.executable, "-c", code).strip() == "False"
