"""Extracts Jane Austen's six novels from the janeaustenr package as plain paragraphs.

    python3 prepare.py --package r-cran-janeaustenr_1.0.0-1_all.deb --out corpus.json

The package may be the Debian archive or the folder of the installed R package. The
output is {"novels": {name: {"train": [paragraph], "valid": [paragraph]}}, "sha256": hex,
"bytes": n}; the last part of every novel is held out for validation.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
import tempfile
import warnings
import zlib
from pathlib import Path
from typing import Any

ORIGIN = (
    "Jane Austen, six novels (public domain), texts of Project Gutenberg as packaged by "
    "janeaustenr 1.0.0 (Debian package r-cran-janeaustenr 1.0.0-1)"
)
HELD_OUT = 0.05

HEADING = re.compile(r"^\s*(chapter|volume)\s+([ivxlc]+|\d+)\s*\.?$", re.IGNORECASE)
ENDING = re.compile(r"^\s*(finis|the end|a note on the text)\s*\.?$", re.IGNORECASE)
ASCII = str.maketrans({"‘": "'", "’": "'", "“": '"', "”": '"', "—": "--", "–": "-", "\u00a0": " "})


def read_lines(package: Path) -> dict[str, list[str]]:
    """The lines of every novel, by the package's own names for them."""
    if package.suffix == ".deb":
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run(["dpkg-deb", "-x", str(package), folder], check=True)
            return read_lines(Path(folder) / "usr/lib/R/site-library/janeaustenr")
    import rdata

    def convert(data: bytes) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return rdata.conversion.convert(rdata.parser.parse_data(data))

    # R's lazy-load database: the index is gzip, each value a big-endian length and zlib.
    index = convert(zlib.decompress((package / "data/Rdata.rdx").read_bytes(), 31))
    values = (package / "data/Rdata.rdb").read_bytes()
    novels = {}
    for name, (start, size) in sorted(index["variables"].items()):
        lines = convert(zlib.decompress(values[start + 4 : start + size]))
        novels[name] = [str(line) for line in lines]
    return novels


def paragraphs(lines: list[str]) -> list[str]:
    """Joins wrapped lines into paragraphs; drops title page, headings and end matter."""
    first = next(i for i, line in enumerate(lines) if HEADING.match(line))
    out: list[str] = []
    current: list[str] = []
    for line in lines[first:] + [""]:
        ended = ENDING.match(line)
        if line.strip() and not ended and not HEADING.match(line):
            current.append(line)
            continue
        text = re.sub(r"\s+", " ", " ".join(current).translate(ASCII).replace("_", "")).strip()
        current = []
        if re.search(r"[a-z]", text):
            out.append(text)
        if ended:
            break
    return out


def split(text: list[str]) -> dict[str, list[str]]:
    """Cuts a novel between two paragraphs so that about HELD_OUT of its bytes come last."""
    keep, seen = (1 - HELD_OUT) * sum(len(p) for p in text), 0
    for i, paragraph in enumerate(text):
        seen += len(paragraph)
        if seen >= keep:
            return {"train": text[: i + 1], "valid": text[i + 1 :]}
    raise ValueError("empty novel")


def main() -> None:
    """Writes the corpus file named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--package", type=Path, default=Path("/usr/lib/R/site-library/janeaustenr"))
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    novels = {name: paragraphs(lines) for name, lines in read_lines(args.package).items()}
    whole = "\n\n".join("\n".join(text) for text in novels.values()).encode()
    parts = {name: split(text) for name, text in novels.items()}
    corpus = {
        "origin": ORIGIN,
        "bytes": len(whole),
        "sha256": hashlib.sha256(whole).hexdigest(),
        "novels": parts,
    }
    args.out.write_text(json.dumps(corpus, indent=0) + "\n")
    for name, halves in parts.items():
        print(name, *(f"{k} {len(v)} paragraphs {sum(map(len, v))} characters" for k, v in halves.items()))
    print(corpus["bytes"], "bytes", corpus["sha256"])


if __name__ == "__main__":
    main()
