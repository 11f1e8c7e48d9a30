"""Writes docs/python-api.md: every public name of the Python package with its signature and what it says of itself.

    PYTHONPATH=python/src python tools/pydoc/signatures.py docs/python-api.md
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

import sluice

HEAD = """# Python: every signature

Made from the code by `make pydoc`; a test holds the two together. How things go together is on other pages: [the package](../python/README.md), [loading](python-loader.md),
[the reference API](python-reference.md), [producing](python-producer.md), [producing with transformers](python-transformers.md), [installing](python-install.md).
Those of `sluice.integrations.nemo` are on the page of the reference API. Times are in seconds, sizes in bytes.
"""

GROUPS = {
    "A service and its runs": ["connect", "local", "Client", "LocalClient", "Run", "Producer"],
    "Batches": ["Loader", "Batch", "BatchSample", "FinalNorm"],
    "Store": ["FeatureStore", "RunStore", "StoreHandle", "StoreHealth"],
    "Queue": ["RunQueue", "Consumer", "Lease", "WindowSlot", "Delivery", "Settlement", "SettleResult", "Reservation", "Position", "DeadLetter", "VisibilityTimeout"],
    "Refs": ["SampleRef", "FeatureSpec", "FeatureAlgorithm", "assert_no_tensors"],
    "The reference API": [
        "LocalFeatureStore", "SharedDirFeatureStore", "ServiceFeatureStore", "SampleRefQueue", "FeatureProducer", "AsyncFeaturePipeline", "PromptSource", "Eagle3TargetBackend", "FeatureDataLoader",
        "Eagle3TargetBatch",
    ],
    "Behind the loader": [
        "dataset.StreamDataset", "stream.Counts", "collate.collate", "collate.Collator", "collate.Sample", "device.ring_for", "device.DeviceRing", "device.Transfer",
        "device.Backend",
    ],
    "Services of a program's own, and their binary": ["service.private", "service.Endpoint", "binary.find", "binary.Binary"],
    "Producing with transformers": [
        "integrations.transformers.TransformersProducer", "integrations.transformers.Counts", "integrations.transformers.Parts", "integrations.transformers.default_aux_layers",
        "integrations.transformers.target_fingerprint", "integrations.transformers.tokenizer_fingerprint", "integrations.prompts.Row", "integrations.prompts.Refusal", "integrations.prompts.JsonLines",
        "integrations.prompts.rows_of",
    ],
}
"""Names of the package, and behind a dot those of its modules. `sluice.integrations.nemo` cannot be imported without NeMo AutoModel: its signatures are on the page of the reference API."""


def found(name: str) -> tuple[str, Any]:
    """What a name stands for, and how it is called from outside."""
    module, _, last = name.rpartition(".")
    if not module:
        return name, getattr(sluice, name)
    return f"sluice.{name}", getattr(importlib.import_module(f"sluice.{module}"), last)


def signature(f: Any) -> str:
    if inspect.isclass(f) and (issubclass(f, enum.Enum) or getattr(f, "_is_protocol", False)):
        return ""  # nobody calls these, and what could be called differs from one Python to the next
    try:
        text = str(inspect.signature(f))
    except (TypeError, ValueError):
        return ""
    text = re.sub(r"(: |-> )'([^']*)'", r"\1\2", text)  # annotations are strings
    text = re.sub(r"<factory>|<object object at 0x[0-9a-f]+>|<built-in function monotonic>", "...", text)
    return text.replace("(self, ", "(").replace("(self)", "()").replace("(cls, ", "(")


def said(o: Any) -> str:
    text = inspect.cleandoc(o.__doc__ or "") if isinstance(o.__doc__, str) else ""
    return re.sub(r":\w+:`(?:~?sluice\.)?([^`]*)`", r"`\1`", text).replace("``", "`")


def entry(level: int, name: str, o: Any) -> Iterator[str]:
    yield f"{'#' * level} `{name}{signature(o) if callable(o) else ''}`"
    if text := said(o):
        yield text


def members(cls: type) -> Iterator[tuple[str, Any, bool]]:
    """Public methods and properties of a class, in the order of the code, those of bases in this package included."""
    seen: set[str] = set()
    for base in reversed([b for b in cls.__mro__ if b.__module__.startswith("sluice")]):
        for name in vars(base):
            if (not name.startswith("_") or name in ("__call__", "__iter__", "__next__")) and name not in seen:
                seen.add(name)
                value = inspect.getattr_static(cls, name)
                if isinstance(value, property):
                    yield name, value.fget, True
                elif isinstance(value, (staticmethod, classmethod)) or inspect.isfunction(value):
                    yield name, getattr(cls, name), False


def page() -> str:
    parts = [HEAD]
    listed: set[str] = set()
    for group, names in GROUPS.items():
        parts.append(f"## {group}")
        for name in names:
            listed.add(name)
            name, o = found(name)
            parts += entry(3, name, o)
            if not inspect.isclass(o):
                continue
            name = o.__name__
            if dataclasses.is_dataclass(o) and not said(o):
                raise SystemExit(f"{name} says nothing of itself")
            for member, f, is_property in members(o):
                head = f"#### `{name}.{member}`" + (" (property)" if is_property else "")
                parts += [head.replace("`" + " (", "` (") if is_property else f"#### `{name}.{member}{signature(f)}`"]
                if text := said(f):
                    parts.append(text)
    rest = sorted(set(sluice.__all__) - listed)
    parts.append("## Errors")
    parts.append("Each is a `SluiceError` and the built-in exception beside it; `code` is stable.")
    rows = ["| Class | Code | Also | Means |", "|---|---|---|---|"]
    others = []
    for name in rest:
        o = getattr(sluice, name)
        if inspect.isclass(o) and issubclass(o, sluice.SluiceError):
            also = next((b.__name__ for b in o.__mro__ if b.__module__ == "builtins" and issubclass(b, Exception) and b is not Exception), "")
            rows.append(f"| {name} | `{o.code}` | {also} | {said(o).splitlines()[0]} |")
        else:
            others.append(name)
    parts.append("\n".join(rows))
    if others:
        parts.append("## Others")
        for name in others:
            parts += entry(3, name, getattr(sluice, name))
    return "\n\n".join(textwrap.dedent(p).strip() for p in parts) + "\n"


if __name__ == "__main__":
    text = page()
    if len(sys.argv) > 1:
        with open(sys.argv[1], "w") as f:
            f.write(text)
    else:
        sys.stdout.write(text)
