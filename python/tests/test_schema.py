"""Schema documents are read strictly, and say of a ref what the Go package says."""

from __future__ import annotations

import copy
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from sluice import dtypes, schema
from sluice.errors import InvalidError, SchemaError
from sluice.refs import FeatureSpec, SampleRef
from sluice.schema import Schema

SCHEMAS = Path(__file__).resolve().parents[2] / "schemas"
SMALL: dict[str, Any] = {
    "name": "small",
    "version": 3,
    "features": [
        {"name": "aux", "from": "aux", "axes": ["B", "S", "K*H"], "dtypes": ["float32"], "required": True},
        {"name": "last", "from": "last", "norm": "post", "axes": ["B", "S", "H"], "dtypes": ["float32", "float16"]},
        {"name": "mask", "axes": ["B", "S", "1"], "dtypes": ["bool"]},
        {"name": "pos", "from": "position_ids", "axes": ["B", "S"], "dtypes": ["int64"]},
        {"name": "lens", "from": "seq_lens", "axes": ["B", "docs"], "dtypes": ["int64"]},
    ],
    "supervision": {"rule": "at_most_one", "encodings": [{"name": "state", "features": ["last", "mask"]}]},
    "packing": ["pos", "lens"],
    "attributes": [{"name": "layers", "pattern": "unknown|hf:[0-9]+(,[0-9]+)*", "counts": "K"}, {"name": "norm", "required_with": "last"}],
}
AUX = ("float32", [1, 4, 6])
LAST = ("float32", [1, 4, 3])
MASK = ("bool", [1, 4, 1])


def ref_of(features: dict[str, tuple[str, list[int]]], **fields: Any) -> SampleRef:
    size = 0
    specs = {}
    for name, (dtype, shape) in features.items():
        n = dtypes.itemsize(dtype)
        for d in shape:
            n *= d
        size += n
        specs[name] = FeatureSpec(tuple(shape), dtypes.torch_dtype(dtype) if dtypes.torch_module() else dtypes.numpy_dtype(dtype))  # type: ignore[arg-type,unused-ignore]
    given: dict[str, Any] = {
        "sample_id": "s",
        "run_id": "r",
        "store_uri": "mem:test",
        "feature_keys": {name: f"s/{name}" for name in features},
        "feature_specs": specs,
        "algorithm": "small",
        "schema_version": 3,
        "num_tokens": 4,
        "estimated_bytes": size,
        "target_model_version": "0",
        "draft_weight_version": "0",
        "generation": "g",
        "attributes": {"layers": "hf:1,2", "norm": "post"},
    }
    return SampleRef(**{**given, **fields})


@pytest.mark.parametrize("name", ["eagle3", "dflash", "dspark"])
def test_the_built_in_documents_are_schemas(name: str) -> None:
    s = Schema.parse(json.loads((SCHEMAS / f"{name}.json").read_text()))
    assert s.name == name and s.packing == ("position_ids", "seq_lens", "doc_remaining") and (s.min_tokens, s.min_supervised) == (2, 1)
    assert s.shifts == (name == "eagle3") and Schema.parse(s) is s
    assert all(a.matches is not None for a in s.attributes)
    loss = s.role("loss_mask")
    assert loss is not None and loss.is_mask and loss.in_rows and s.feature("loss_mask") is loss
    assert s.role("nothing") is None and s.feature("nothing") is None


def test_a_ref_that_agrees_passes() -> None:
    s = Schema.parse(SMALL)
    bare, supervised = ref_of({"aux": AUX}, attributes={"layers": "unknown"}), ref_of({"aux": AUX, "last": LAST, "mask": MASK})
    for ref in (bare, supervised):
        s.validate(ref)
    assert (s.encoding_of(bare), s.encoding_of(supervised)) == ("", "state")
    packed = ref_of({"aux": AUX, "pos": ("int64", [1, 4]), "lens": ("int64", [1, 9])})
    s.validate(packed)
    assert s.packed(packed) and not s.packed(bare)


@pytest.mark.parametrize(
    "features, fields, message",
    [
        ({"aux": AUX}, {"algorithm": "other"}, "is a sample of other version 3, want small version 3"),
        ({"aux": AUX}, {"schema_version": 2}, "is a sample of small version 2, want small version 3"),
        ({"mask": MASK}, {}, 'lacks the required feature "aux"'),
        ({"aux": AUX, "more": MASK}, {}, 'has the feature "more", which the schema does not know'),
        ({"aux": ("float16", [1, 4, 6])}, {}, 'feature "aux" is float16, want one of [float32]'),
        ({"aux": ("float32", [4, 6])}, {}, 'feature "aux" is float32[4,6], want the axes [B,S,K*H]'),
        ({"aux": ("float32", [1, 4, 7])}, {}, 'feature "aux" is float32[1,4,7]: axis K*H is 7, which is no multiple of 2'),
        (
            {"aux": AUX, "last": ("float32", [1, 5, 3]), "mask": MASK},
            {},
            'feature "last" is float32[1,5,3]: axis S is 5, want 4 as elsewhere in the sample',
        ),
        (
            {"aux": AUX, "last": ("float32", [1, 4, 2]), "mask": MASK},
            {},
            'feature "aux" is float32[1,4,6]: axis K*H is 6, want 4 as elsewhere in the sample',
        ),
        (
            {"aux": AUX, "last": LAST, "mask": ("bool", [1, 4, 2])},
            {},
            'feature "mask" is bool[1,4,2]: axis 1 is 2, want 1 as elsewhere in the sample',
        ),
        ({"aux": AUX, "last": LAST}, {}, 'has 1 of the features [last mask] of the supervision "state", want all or none'),
        ({"aux": AUX, "pos": ("int64", [1, 4])}, {}, "has 1 of the packing features [pos lens], want all or none"),
        ({"aux": AUX}, {"attributes": {"layers": "hf:1,"}}, 'attribute "layers" is "hf:1,", want unknown|hf:[0-9]+(,[0-9]+)*'),
        ({"aux": AUX}, {"attributes": {"layers": "hf:1٣"}}, 'attribute "layers" is "hf:1٣"'),
        ({"aux": AUX, "last": LAST, "mask": MASK}, {"attributes": {}}, 'lacks the required attribute "norm"'),
    ],
)
def test_what_a_ref_has_wrong_is_named(features: Any, fields: Any, message: str) -> None:
    with pytest.raises(SchemaError) as e:
        Schema.parse(SMALL).validate(ref_of(features, **fields))
    assert message in e.value.detail and e.value.subject == "s"


def test_exactly_one_supervision_is_wanted_where_the_rule_says_so() -> None:
    eagle3 = Schema.parse(json.loads((SCHEMAS / "eagle3.json").read_text()))
    tokens = ("int64", [1, 4])
    features = {"aux_hidden_states": AUX, "input_ids": tokens, "attention_mask": tokens, "loss_mask": tokens}
    fields: dict[str, Any] = {
        "algorithm": "eagle3",
        "schema_version": 1,
        "attributes": {"shift": "0", "aux_layers": "hf:1,2,3", "last_norm": "post"},
    }
    with pytest.raises(SchemaError, match="has no supervision, want exactly one of"):
        eagle3.validate(ref_of(features, **fields))
    states = {"last_hidden_states": ("float32", [1, 4, 2]), "logits": ("float32", [1, 4, 9])}
    with pytest.raises(SchemaError, match='has the supervision "last_hidden_states" and "logits", want one'):
        eagle3.validate(ref_of({**features, **states}, **fields))


def changed(path: str, value: object) -> dict[str, Any]:
    document = copy.deepcopy(SMALL)
    *steps, last = path.split(".")
    at: Any = document
    for step in steps:
        at = at[int(step)] if isinstance(at, list) else at[step]
    at[last] = value
    return document


@pytest.mark.parametrize(
    "document, field",
    [
        ([], ""),
        (changed("name", "a..b"), "name"),
        (changed("name", 5), "name"),
        (changed("version", 0), "version"),
        (changed("version", True), "version"),
        (changed("features", []), "features"),
        (changed("features", {}), "features"),
        (changed("features", ["x"]), "features[0]"),
        (changed("features.1.name", "aux"), "features[1].name"),
        (changed("features.0.from", "target"), "features[0].from"),
        (changed("features.3.from", "seq_lens"), "features[4].from"),
        (changed("features.0.axes", ["B", "S", "K+H"]), "features[0].axes"),
        (changed("features.0.axes", "BS"), "features[0].axes"),
        (changed("features.0.dtypes", []), "features[0].dtypes"),
        (changed("features.0.dtypes", ["float"]), "features[0].dtypes"),
        (changed("features.0.norm", "pre"), "features[0].norm"),
        (changed("features.1.norm", ""), "features[1].norm"),
        (changed("features.1.final_layer_norm", "post"), "features[1].final_layer_norm"),
        (changed("features.4.shift", True), "features[4].shift"),
        (changed("features.0.required", 1), "features[0].required"),
        (changed("features.0.stride", 1), "features[0].stride"),
        (changed("supervision.rule", "all"), "supervision.rule"),
        (changed("supervision.rule", "exactly_one"), "supervision.default"),
        (changed("supervision.default", "x"), "supervision.default"),
        (changed("supervision.encodings", [{"name": "x", "features": ["aux"]}]), "supervision.encodings[0].features"),
        (changed("packing", ["aux"]), "packing"),
        (changed("attributes.0.name", "norm"), "attributes[1].name"),
        (changed("attributes.1.required_with", "x"), "attributes[1].required_with"),
        (changed("attributes.0.counts", "2"), "attributes[0].counts"),
        (changed("attributes.0.pattern", "x" * 501), "attributes[0].pattern"),
        (changed("admission", {"min_tokens": -1}), "admission"),
        (changed("collation", "x"), "collation"),
    ],
)
def test_what_a_document_has_wrong_is_named(document: Any, field: str) -> None:
    with pytest.raises(SchemaError) as e:
        Schema.parse(document)
    assert e.value.detail.startswith(field)


@pytest.mark.parametrize("pattern", [r"\pL+", "[[:alpha:]]+", r"\Qa.b\E"])
def test_a_pattern_that_python_cannot_express_is_left_to_the_service_and_said(pattern: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "sluice.schema"):
        s = Schema.parse(changed("attributes.0.pattern", pattern))
    assert repr(pattern) in caplog.text and "'layers'" in caplog.text
    s.validate(ref_of({"aux": AUX}, attributes={"layers": "hf:1,2"}))


@pytest.mark.parametrize("name", ["dflash", "dspark", "eagle3"])
def test_the_schemas_of_the_package_are_the_services(name: str) -> None:
    assert sorted(path.name for path in SCHEMAS.glob("*.json")) == ["dflash.json", "dspark.json", "eagle3.json"]
    assert (Path(schema.__file__).with_name("schemas") / f"{name}.json").read_bytes() == (SCHEMAS / f"{name}.json").read_bytes()
    assert schema.builtin(name).name == name


def test_another_name_is_no_built_in_schema() -> None:
    with pytest.raises(InvalidError, match="'eagle9', want one of dflash, dspark, eagle3"):
        schema.builtin("eagle9")
