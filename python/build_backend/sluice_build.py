"""Builds the wheel and the sdist of the Python package (PEP 517, PEP 660). Standard library only, so that it runs without a network.

The wheel holds the service's binary, and the tag of its platform, where the package lies in a checkout of Sluice and Go can build it.
Otherwise it is a py3-none-any wheel, whose user brings a binary. The setting `binary` decides instead, if it is given: `--config-settings
binary=none`, or `binary=PATH` of one that is built already. GOOS and GOARCH name another platform, as for go.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import json
import os
import re
import stat
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

HERE = Path(__file__).resolve().parent.parent  # the folder of pyproject.toml
CHECKOUT = HERE.parent
MODULE = "module github.com/sluice-ml/sluice"
PACKAGE = "sluice"  # what is imported, whatever the distribution is called
PACKAGED_BINARY = f"{PACKAGE}/bin/sluice"
SCRIPT = "[console_scripts]\nsluice = sluice.binary:main\n"

# A binary without cgo needs no libc, so it runs under any; it needs Linux 3.2 or macOS 12, as Go 1.26 does.
LINUX = {"amd64": "x86_64", "arm64": "aarch64", "ppc64le": "ppc64le", "s390x": "s390x", "riscv64": "riscv64"}
MACOS = {"amd64": "x86_64", "arm64": "arm64"}

Settings = Mapping[str, Any] | None


class BuildError(Exception):
    """The package cannot be built as it is, or as it was asked for."""


@dataclass(frozen=True)
class Project:
    """What [project] in pyproject.toml says, as far as it is supported."""

    name: str
    version: str
    metadata: str

    @property
    def stem(self) -> str:
        return re.sub(r"[-_.]+", "_", self.name).lower() + "-" + self.version

    @property
    def dist_info(self) -> str:
        return self.stem + ".dist-info"


@dataclass(frozen=True)
class Plan:
    """Which binary comes into the wheel, and the wheel's platform tags."""

    platform: str
    reason: str
    build: bool = False
    file: Path | None = None

    @property
    def packaged(self) -> bool:
        return self.build or self.file is not None

    @property
    def tag(self) -> str:
        return "py3-none-" + self.platform


def build_wheel(wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None) -> str:
    """Builds a wheel in wheel_directory and returns its file name."""
    project, plan = read_project(), choose(config_settings)
    files = [(f"{PACKAGE}/{p.relative_to(HERE / 'src' / PACKAGE).as_posix()}", p.read_bytes(), False) for p in sources("src/" + PACKAGE)]
    if plan.packaged:
        files.append((PACKAGED_BINARY, plan.file.read_bytes() if plan.file else build_binary(), True))
    return write_wheel(wheel_directory, project, plan, files)


def build_editable(wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None) -> str:
    """Builds a wheel that points to src/, and returns its file name. It holds no binary: the package lies in the checkout still."""
    project = read_project()
    plan = Plan("any", "an editable install uses the checkout's binary, or the one on PATH")
    return write_wheel(wheel_directory, project, plan, [(f"__editable__.{PACKAGE}.pth", (str(HERE / "src") + "\n").encode(), False)])


def prepare_metadata_for_build_wheel(metadata_directory: str, config_settings: Settings = None) -> str:
    """Writes what a wheel's dist-info folder says, without building the wheel, and returns that folder's name."""
    return write_dist_info(metadata_directory, choose(config_settings))


def prepare_metadata_for_build_editable(metadata_directory: str, config_settings: Settings = None) -> str:
    """As prepare_metadata_for_build_wheel, of an editable wheel."""
    return write_dist_info(metadata_directory, Plan("any", "an editable install"))


def build_sdist(sdist_directory: str, config_settings: Settings = None) -> str:
    """Builds an sdist, with the tests, and returns its file name. The same files make the same bytes."""
    project = read_project()
    files = {"PKG-INFO": project.metadata.encode()}
    for name in ("LICENSE", "pyproject.toml", "README.md"):
        files[name] = (HERE / name).read_bytes()
    for folder in ("build_backend", "src", "tests"):
        files.update((p.relative_to(HERE).as_posix(), p.read_bytes()) for p in sources(folder))
    name = project.stem + ".tar.gz"
    with (
        open(Path(sdist_directory, name), "wb") as out,
        gzip.GzipFile(filename="", mode="wb", fileobj=out, mtime=epoch()) as zipped,
        tarfile.open(fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for path in sorted(files):
            entry = tarfile.TarInfo(f"{project.stem}/{path}")
            entry.size, entry.mtime, entry.mode = len(files[path]), epoch(), 0o644
            archive.addfile(entry, io.BytesIO(files[path]))
    say(f"{name}: the sources; a wheel made of it has no binary inside")
    return name


def read_project(text: str | None = None) -> Project:
    """Reads pyproject.toml and renders the core metadata, version 2.4."""
    table: dict[str, Any] = tomllib.loads(text if text is not None else (HERE / "pyproject.toml").read_text("utf-8"))["project"]
    known = {"name", "version", "description", "readme", "requires-python", "license", "license-files", "keywords", "classifiers"}
    known |= {"dependencies", "optional-dependencies", "dynamic", "urls"}
    if unknown := sorted(set(table) - known):
        raise BuildError(f"pyproject.toml: this backend does not know project.{unknown[0]}")
    if not re.fullmatch(r"(?i)[a-z0-9]|[a-z0-9][a-z0-9._-]*[a-z0-9]", table["name"]):
        raise BuildError(f"pyproject.toml: project.name is {table['name']!r}, want letters, digits, and . _ - between them")
    lines = [("Metadata-Version", "2.4"), ("Name", table["name"]), ("Version", table["version"]), ("Summary", table["description"])]
    lines.append(("Keywords", ",".join(table.get("keywords", []))))
    lines += [("Classifier", c) for c in table.get("classifiers", [])]
    lines += [("License-Expression", table["license"])] + [("License-File", f) for f in table["license-files"]]
    lines += [("Project-URL", f"{label}, {url}") for label, url in table.get("urls", {}).items()]
    lines.append(("Requires-Python", table["requires-python"]))
    lines += [("Requires-Dist", r) for r in table.get("dependencies", [])]
    for extra, requirements in table.get("optional-dependencies", {}).items():
        lines.append(("Provides-Extra", extra))
        for r in requirements:
            requirement, _, marker = (part.strip() for part in r.partition(";"))
            lines.append(("Requires-Dist", f"{requirement}; " + (f"({marker}) and " if marker else "") + f'extra == "{extra}"'))
    lines.append(("Description-Content-Type", "text/markdown"))
    head = "".join(f"{key}: {value}\n" for key, value in lines)
    return Project(table["name"], table["version"], head + "\n" + (HERE / table["readme"]).read_text("utf-8"))


def choose(settings: Settings) -> Plan:
    """Decides whether a binary comes into the wheel, and from where. It builds nothing."""
    wanted = str((settings or {}).get("binary", ""))
    if wanted == "none":
        return Plan("any", "binary=none: it finds a binary on PATH")
    if wanted and not Path(wanted).is_file():
        raise BuildError(f"the setting binary is {wanted!r}, want none or the path of a file")
    try:
        goos, goarch = this_platform() if wanted else target()
    except NoGo as e:
        return Plan("any", f"{e}: it finds a binary on PATH")
    if goos == "linux" and goarch in LINUX:
        platform = f"manylinux2014_{LINUX[goarch]}.musllinux_1_1_{LINUX[goarch]}"
    elif goos == "darwin" and goarch in MACOS:
        platform = f"macosx_12_0_{MACOS[goarch]}"
    else:
        return Plan("any", f"there is no binary for {goos}/{goarch}: it finds one on PATH")
    if wanted:
        return Plan(platform, f"with {wanted} inside", file=Path(wanted))
    return Plan(platform, f"with a binary inside that go builds for {goos}/{goarch}", build=True)


class NoGo(Exception):
    """Go cannot build the binary here, and why."""


def target() -> tuple[str, str]:
    """The GOOS and GOARCH that go would build for."""
    go_mod = CHECKOUT / "go.mod"
    if not go_mod.is_file() or go_mod.read_text("utf-8").split("\n", 1)[0] != MODULE:
        raise NoGo("the package does not lie in a checkout of Sluice")
    try:
        # It fails also where this go is older than go.mod wants, and no newer one can be had.
        out = subprocess.run(["go", "env", "-json", "GOOS", "GOARCH"], cwd=CHECKOUT, capture_output=True, check=True, timeout=300).stdout
    except FileNotFoundError:
        raise NoGo("there is no go on PATH to build a binary with") from None
    except subprocess.CalledProcessError as e:
        raise NoGo(f"go cannot build this checkout ({e.stderr.decode(errors='replace').strip()})") from None
    values = json.loads(out)
    return values["GOOS"], values["GOARCH"]


def this_platform() -> tuple[str, str]:
    """GOOS and GOARCH as the environment has them, or of the machine that builds."""
    machine = os.uname().machine
    goarch = {"x86_64": "amd64", "aarch64": "arm64"}.get(machine, machine)
    return os.environ.get("GOOS", sys.platform), os.environ.get("GOARCH", goarch)


def build_binary() -> bytes:
    """Builds the static binary as `make build` does."""
    with tempfile.TemporaryDirectory(prefix="sluice-build-") as folder:
        out = Path(folder, "sluice")
        command = ["go", "build", "-trimpath", "-ldflags", "-s -w", "-o", str(out), "./cmd/sluice"]
        static = os.environ | {"CGO_ENABLED": "0"}
        done = subprocess.run(command, cwd=CHECKOUT, env=static, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        if done.returncode != 0:
            said = done.stdout.decode(errors="replace").strip()
            raise BuildError(f"go could not build the binary; --config-settings binary=none makes a wheel without it:\n{said}")
        return out.read_bytes()


def write_wheel(directory: str, project: Project, plan: Plan, files: list[tuple[str, bytes, bool]]) -> str:
    name = f"{project.stem}-{plan.tag}.whl"
    files = files + [(f"{project.dist_info}/{path}", data, False) for path, data in dist_info(project, plan)]
    record = "".join(f"{path},sha256={digest(data)},{len(data)}\n" for path, data, _ in files) + f"{project.dist_info}/RECORD,,\n"
    files.append((f"{project.dist_info}/RECORD", record.encode(), False))
    at = time.gmtime(max(epoch(), 315532800))[:6]  # a zip file's time begins in 1980
    with zipfile.ZipFile(Path(directory, name), "w", zipfile.ZIP_DEFLATED) as wheel:
        for path, data, executable in files:
            entry = zipfile.ZipInfo(path, at)
            entry.external_attr = (stat.S_IFREG | (0o755 if executable else 0o644)) << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            wheel.writestr(entry, data)
    say(f"{name}: {plan.reason}")
    return name


def write_dist_info(directory: str, plan: Plan) -> str:
    project = read_project()
    for path, data in dist_info(project, plan):
        file = Path(directory, project.dist_info, path)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
    return project.dist_info


def dist_info(project: Project, plan: Plan) -> Iterator[tuple[str, bytes]]:
    pure = "false" if plan.packaged else "true"
    tags = "".join(f"Tag: py3-none-{platform}\n" for platform in plan.platform.split("."))
    yield "METADATA", project.metadata.encode()
    yield "WHEEL", f"Wheel-Version: 1.0\nGenerator: sluice_build\nRoot-Is-Purelib: {pure}\n{tags}".encode()
    yield "licenses/LICENSE", (HERE / "LICENSE").read_bytes()
    if plan.packaged:
        yield "entry_points.txt", SCRIPT.encode()


def sources(folder: str) -> list[Path]:
    """The files of a folder that belong to the package, in the same order everywhere."""
    found = (p for p in (HERE / folder).rglob("*") if p.is_file() and p.suffix != ".pyc")
    ours = (p for p in found if not any(part.startswith(".") or part == "__pycache__" for part in p.relative_to(HERE).parts))
    return sorted(ours, key=lambda p: p.relative_to(HERE).as_posix())


def digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def epoch() -> int:
    """The time of all files, in seconds since 1970, as reproducible builds want it."""
    return int(os.environ.get("SOURCE_DATE_EPOCH", "1577836800"))


def say(line: str) -> None:
    print(f"sluice: {line}", flush=True)
