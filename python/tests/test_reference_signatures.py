"""Every public name of the reference API's page is in sluice, with its parameters, defaults and return types.

reference_signatures.json is what tools/reference_signatures.py makes of the page. What may be added: keyword-only parameters with a default, and, behind the page's, fields of a dataclass with a
default.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest

import sluice

from .interpreter import run_python

TABLE: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("reference_signatures.json").read_text())
CALLABLES = [name for name, entry in TABLE.items() if "parameters" in entry]
RETURNS = {"FeatureProducer.get_input_embeddings": "Any"}  # the page has torch.nn.Module, and torch need not be here
NAMESPACE = {"FeatureAlgorithm": sluice.FeatureAlgorithm}


def found(name: str) -> Any:
    value: Any = sluice
    for part in name.split("."):
        value = getattr(value, part)
    return value


def parameters_of(name: str) -> list[inspect.Parameter]:
    value = found(name)
    if TABLE[name]["kind"] == "class" and not TABLE[name]["parameters"] and not dataclasses.is_dataclass(value):
        return []
    skip = 1 if "." in name else 0  # self
    return list(inspect.signature(value).parameters.values())[skip:]


def test_the_table_is_the_pages() -> None:
    classes = [name for name, entry in TABLE.items() if entry["kind"] in ("class", "enum")]
    assert classes == [
        "AsyncFeaturePipeline", "FeatureAlgorithm", "FeatureDataLoader", "FeatureProducer", "FeatureSpec", "FeatureStore", "Lease", "LocalFeatureStore", "PromptSource", "SampleRef", "SampleRefQueue",
        "SharedDirFeatureStore", "StoreHandle", "StoreHealth", "VisibilityTimeout",
    ]
    assert len(TABLE) == 64
    assert "assert_no_tensors" in TABLE


@pytest.mark.parametrize("name", CALLABLES)
def test_parameters_order_defaults_and_kinds_are_the_pages(name: str) -> None:
    ours, wanted = parameters_of(name), TABLE[name]["parameters"]
    more = ours[len(wanted):]
    fields = dataclasses.is_dataclass(found(name))
    assert [p.name for p in more if p.default is p.empty] == []
    assert all(fields or p.kind is p.KEYWORD_ONLY for p in more)
    for parameter, (want, *default) in zip(ours, wanted, strict=False):
        assert parameter.name == want
        assert parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        if not default:
            assert parameter.default is parameter.empty
        elif default[0].endswith("_id()"):  # minted for each
            assert parameter.default is not parameter.empty
        else:
            assert parameter.default == eval(default[0], NAMESPACE)  # noqa: S307
    assert [p.name for p in ours[:len(wanted)]] == [w[0] for w in wanted]


@pytest.mark.parametrize("name", [name for name in CALLABLES if "returns" in TABLE[name]])
def test_what_is_returned_is_the_pages(name: str) -> None:
    said = inspect.signature(found(name)).return_annotation
    want = RETURNS.get(name, TABLE[name]["returns"])
    assert said.replace("torch.", "") == re.sub(r"\b_(?=Pro|Packed)", "", want)


@pytest.mark.parametrize("name", [name for name, entry in TABLE.items() if entry["kind"] == "attribute"])
def test_attributes_are_there(name: str) -> None:
    owner, attribute = name.split(".")
    value = getattr(sluice, owner)
    assert isinstance(inspect.getattr_static(value, attribute), property)


def test_algorithms_are_the_pages() -> None:
    assert issubclass(sluice.FeatureAlgorithm, enum.Enum)
    assert {a.name: a.value for a in sluice.FeatureAlgorithm} == TABLE["FeatureAlgorithm"]["members"]


@pytest.mark.parametrize("name", ["FeatureSpec", "SampleRef", "Lease", "StoreHandle", "StoreHealth", "VisibilityTimeout"])
def test_dataclasses_are_frozen(name: str) -> None:
    assert found(name).__dataclass_params__.frozen


def test_all_names_can_be_imported_from_sluice_alone() -> None:
    names = sorted({name.split(".")[0] for name in TABLE} | {"Eagle3TargetBatch"})
    assert set(names) <= set(sluice.__all__) and set(names) <= set(dir(sluice))
    run_python(f"from sluice import {', '.join(names)}")


def test_the_import_needs_no_torch_and_no_reference() -> None:
    run_python("import sluice; assert 'torch' not in sys.modules and 'sluice.reference' not in sys.modules, 'imported'")


def test_another_name_is_none() -> None:
    with pytest.raises(AttributeError, match="no attribute 'FeatureStream'"):
        _ = sluice.FeatureStream
