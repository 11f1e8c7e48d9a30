"""Refs: the same bytes as the service's, the same refusals, and nothing of one can change."""

from __future__ import annotations

import copy
import dataclasses
import enum
import inspect
import json
import pickle
import random
import types
import typing
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sluice import dtypes
from sluice.errors import InvalidError
from sluice.refs import MAX_REF_BYTES, FeatureAlgorithm, FeatureSpec, FrozenDict, SampleRef, assert_no_tensors

from .interpreter import run_python

GOLDEN = {p.stem: p.read_bytes() for p in sorted((Path(__file__).parents[2] / "testdata" / "refs").glob("*.json"))}


def fields(**changed: Any) -> dict[str, Any]:
    """Return the fields of a valid ref, but for those that are given."""
    return {
        "sample_id": "r1-0-17",
        "run_id": "r1",
        "store_uri": "mem:test",
        "feature_keys": {"aux": "r1-0-17/aux", "ids": "r1-0-17/ids"},
        "feature_specs": {"aux": FeatureSpec((2, 4, 6), "bfloat16"), "ids": FeatureSpec((2, 4), "int64")},
        "algorithm": FeatureAlgorithm.EAGLE3,
        "schema_version": 1,
        "num_tokens": 4,
        "estimated_bytes": 2 * 4 * 6 * 2 + 2 * 4 * 8,
        "target_model_version": "0",
        "draft_weight_version": "0",
        "generation": "g1",
        "attributes": {"shift": "0"},
        **changed,
    }


def ref(**changed: Any) -> SampleRef:
    return SampleRef(**fields(**changed))


def one(name: str = "x", spec: FeatureSpec | None = None, **changed: Any) -> SampleRef:
    """Return a ref of a single feature."""
    spec = spec or FeatureSpec((), "uint8")
    return ref(feature_keys={name: f"k/{name}"}, feature_specs={name: spec}, estimated_bytes=spec.nbytes, **changed)


# --- specs ---


def test_a_spec_is_a_dataclass_of_shape_and_dtype() -> None:
    spec = FeatureSpec((1, 2), "bfloat16")
    assert list(inspect.signature(FeatureSpec).parameters) == ["shape", "dtype"]
    assert [f.name for f in dataclasses.fields(spec)] == ["shape", "dtype"]
    assert dataclasses.replace(spec, shape=(3,)) == FeatureSpec((3,), "bfloat16")
    assert dataclasses.asdict(spec) == {"shape": (1, 2), "dtype": spec.dtype}
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.shape = (3,)  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.dtype = "int8"  # type: ignore[misc]
    with pytest.raises(AttributeError, match="no attribute 'stride'"):
        spec.stride  # type: ignore[attr-defined]  # noqa: B018


def test_a_spec_takes_a_dtype_of_any_framework_and_gives_torchs_back() -> None:
    torch = pytest.importorskip("torch")
    given = [FeatureSpec((2,), d) for d in (torch.float16, np.float16, np.dtype("float16"), "float16")]
    given.append(FeatureSpec(typing.cast(Any, torch.Size([2])), "float16"))
    given.append(FeatureSpec(typing.cast(Any, [np.int64(2)]), "float16"))
    assert {s.dtype for s in given} == {torch.float16}
    assert {s.dtype_name for s in given} == {"float16"}
    assert len(set(given)) == 1
    assert all(type(d) is int for s in given for d in s.shape)


def test_a_dtype_that_this_torch_lacks_is_read_as_its_name() -> None:
    torch = pytest.importorskip("torch")
    for name in dtypes.NAMES:
        spec = FeatureSpec((1,), name)
        assert spec.dtype == getattr(torch, name, name)
        assert pickle.loads(pickle.dumps(spec)) == spec == copy.deepcopy(spec) == copy.copy(spec)


def test_specs_differ_by_shape_and_by_dtype() -> None:
    spec = FeatureSpec((2, 3), "float32")
    assert spec == FeatureSpec((2, 3), "float32")
    assert hash(spec) == hash(FeatureSpec((2, 3), "float32"))
    assert spec != FeatureSpec((3, 2), "float32")
    assert spec != FeatureSpec((2, 3), "int32")
    assert spec != (2, 3)
    assert eval(repr(spec)) == spec
    assert (spec.nbytes, FeatureSpec((), "int64").nbytes, FeatureSpec((3, 0), "int64").nbytes) == (24, 8, 0)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((True, 2), r"shape\[0\] is True, want an integer"),
        ((np.bool_(True),), r"shape\[0\] is .*True"),
        ((1, 2.0), r"shape\[1\] is 2.0, want an integer"),
        ((np.float64(2),), r"shape\[0\] is .*2\.0"),
        (("2",), r"shape\[0\] is '2'"),
        ((None,), r"shape\[0\] is None"),
        ((2, -4), r"shape\[1\] is -4, want 0 or more"),
        ((2**53,), r"shape\[0\] is 9007199254740992, want 0 or more and less than 2\^53"),
        ((2**70,), r"shape\[0\] is 1180591620717411303424"),
        ((2**40, 2**40), r"overflows"),
        ((0, 2**40, 2**40), r"overflows"),
        ((2**26, 2**26), r"int64\[67108864, 67108864\] is 36028797018963968 bytes, want less than 2\^53"),
        ((1,) * 17, r"shape has 17 axes, at most 16"),
        (5, r"shape is 5, want a tuple"),
        ("12", r"shape is '12', want a tuple"),
        (np.array([1, 2]), r"want a tuple"),
    ],
)
def test_a_spec_refuses_a_bad_shape(shape: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as e:
        FeatureSpec(shape, "int64")
    assert isinstance(e.value, InvalidError)


def test_a_spec_refuses_a_tensor_as_an_axis() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(InvalidError, match=r"shape\[0\] is tensor\(3\)"):
        FeatureSpec((torch.tensor(3),), "int64")


def test_a_spec_refuses_what_is_no_dtype() -> None:
    with pytest.raises(ValueError, match="dtype is 'float', want one of float64"):
        FeatureSpec((1,), "float")


def test_specs_and_refs_do_not_import_torch_before_a_dtype_is_read() -> None:
    run_python(f"""
        import copy, dataclasses, pickle
        from sluice.refs import SampleRef, assert_no_tensors
        r = SampleRef.from_json({GOLDEN["every-dtype"]!r})
        assert r == pickle.loads(pickle.dumps(r)) == SampleRef.from_wire(r.wire()) == dataclasses.replace(r) == copy.deepcopy(r)
        assert_no_tensors([r, {{"spec": r.feature_specs["f_bool"]}}])
        hash(r), repr(r), r.to_json(), [s.nbytes for s in r.feature_specs.values()]
        assert "torch" not in sys.modules
    """)


def test_without_torch_a_dtype_is_read_as_its_name() -> None:
    run_python("""
        sys.modules["torch"] = None
        from sluice.refs import FeatureSpec
        spec = FeatureSpec((1,), "bfloat16")
        assert spec.dtype == "bfloat16" == spec.dtype_name
    """)


# --- canonical JSON ---


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_bytes_come_back(name: str) -> None:
    data = GOLDEN[name]
    r = SampleRef.from_json(data)
    assert r.to_json() == data
    assert SampleRef.from_json(data.decode()).to_json() == data
    assert SampleRef.from_wire(json.loads(data)) == r
    assert json.dumps(r.wire(), ensure_ascii=False, separators=(",", ":")).encode() == data
    again = SampleRef(**{f.name: getattr(r, f.name) for f in dataclasses.fields(r)})
    assert again == r
    assert again.to_json() == data


def test_the_golden_refs_are_all_here() -> None:
    assert len(GOLDEN) >= 6


def test_a_golden_ref_has_the_fields_that_its_text_says() -> None:
    r = SampleRef.from_json(GOLDEN["eagle3"])
    assert r.algorithm is FeatureAlgorithm.EAGLE3
    assert r.feature_names() == ("aux_hidden_states", "input_ids", "attention_mask", "loss_mask", "last_hidden_states")
    assert r.feature_keys["loss_mask"] == "r1-0-17/loss_mask"
    assert r.feature_specs["aux_hidden_states"] == FeatureSpec((1, 2048, 12288), "bfloat16")
    assert (r.num_tokens, r.schema_version, r.generation) == (1873, 1, "6f1c0a2b3c4d5e6f708192a3b4c5d6e7")
    assert r.attributes == {"aux_layers": "hf:1,15,28", "last_norm": "post", "shift": "0"}
    assert SampleRef.from_json(GOLDEN["scalar-and-text"]).algorithm == "custom-2"


def test_json_may_have_any_spacing_order_and_escapes() -> None:
    data = json.loads(GOLDEN["scalar-and-text"])
    text = json.dumps(data, ensure_ascii=True, indent="\t", sort_keys=True).replace('"mem:', '"\\u006de\\u006D:')
    assert "\\ud83d\\ude00" in text
    assert SampleRef.from_json(f" \r\n\t{text} ").to_json() == GOLDEN["scalar-and-text"]


def test_attributes_are_sorted_by_bytes_in_the_canonical_form() -> None:
    r = ref(attributes={"b": "1", "a": "2", "Z": "3", "_": "4", "1": "5"})
    assert list(json.loads(r.to_json())["attributes"]) == ["1", "Z", "_", "a", "b"]


def test_a_ref_without_generation_is_legal_but_has_no_json() -> None:
    made = {k: v for k, v in fields().items() if k not in ("generation", "attributes")}
    r = SampleRef(**made)
    assert (r.generation, r.attributes) == ("", {})
    for form in (r.to_json, r.wire):
        with pytest.raises(ValueError, match="generation is ''"):
            form()
    wire = {**ref().wire(), "generation": ""}
    with pytest.raises(InvalidError, match="generation is ''"):
        SampleRef.from_wire(wire)
    with pytest.raises(InvalidError, match="generation is ''"):
        SampleRef.from_json(json.dumps(wire))


GOOD = SampleRef(**fields()).to_json().decode()
FEATURES = GOOD[GOOD.index('"features":') + len('"features":') : GOOD.index(',"algorithm"')]


def edited(old: str, new: str) -> str:
    assert old in GOOD, old
    return GOOD.replace(old, new, 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("", "is not JSON", id="empty"),
        pytest.param(edited('"run_id"', '"runid"'), "unknown field 'runid'", id="unknown field"),
        pytest.param(edited('"run_id"', '"Run_ID"'), "unknown field 'Run_ID'", id="other case"),
        pytest.param(edited('"run_id":"r1"', '"run_id":"r1","run_id":"r2"'), "field 'run_id' is there twice", id="twice"),
        pytest.param(edited('"run_id":"r1"', '"run_id":"r1","run\\u005fid":"r1"'), "field 'run_id' is there twice", id="twice, escaped"),
        pytest.param(edited('"run_id":"r1",', ""), "lacks the field 'run_id'", id="missing"),
        pytest.param(edited(',"dtype":"bfloat16"', ""), r"features\[0\] lacks the field 'dtype'", id="missing in a feature"),
        pytest.param(
            edited('"dtype":"bfloat16"', '"dtype":"bfloat16","x":1'), r"features\[0\] has the unknown field 'x'", id="unknown in a feature"
        ),
        pytest.param(edited('"name":"ids"', '"name":"aux"'), r"features\[1\].name is 'aux', which another", id="feature twice"),
        pytest.param(edited('"num_tokens":4', '"num_tokens":true'), "num_tokens is True", id="bool"),
        pytest.param(edited('"num_tokens":4', '"num_tokens":4.0'), "found 4.0, want a non-negative integer", id="float"),
        pytest.param(edited('"num_tokens":4', '"num_tokens":4e0'), "found 4e0", id="exponent"),
        pytest.param(edited('"num_tokens":4', '"num_tokens":"4"'), "num_tokens is '4'", id="string"),
        pytest.param(edited('"num_tokens":4', '"num_tokens":04'), "is not JSON", id="leading zero"),
        pytest.param(edited('"num_tokens":4', '"num_tokens":+4'), "is not JSON", id="plus"),
        pytest.param(edited('"num_tokens":4', '"num_tokens":-4'), "found -4", id="negative"),
        pytest.param(edited('"num_tokens":4', '"num_tokens":-0'), "found -0", id="minus zero"),
        pytest.param(edited('"num_tokens":4', '"num_tokens":NaN'), "found NaN", id="NaN"),
        pytest.param(edited('"num_tokens":4', '"num_tokens":-Infinity'), "found -Infinity", id="infinity"),
        pytest.param(edited('"num_tokens":4', '"num_tokens":\u0664'), "is not JSON", id="a digit of another script"),
        pytest.param(edited('"num_tokens":4', '"num_tokens":9007199254740992'), r"is 2\^53 or more", id="2^53"),
        pytest.param(edited('"num_tokens":4', '"num_tokens":' + "9" * 100000), r"is 2\^53 or more", id="huge"),
        pytest.param(edited("[2,4,6]", "[2,true,6]"), r"shape\[1\] is True", id="bool in a shape"),
        pytest.param(edited("[2,4,6]", "[2,[4],6]"), r"shape\[1\] is \[4\]", id="list in a shape"),
        pytest.param(edited("[2,4,6]", '"246"'), r"features\[0\] has the shape '246'", id="no shape"),
        pytest.param(edited('"run_id":"r1"', '"run_id":null'), "run_id is None", id="null"),
        pytest.param(edited('"bfloat16"', '"bfloat"'), "dtype is 'bfloat'", id="unknown dtype"),
        pytest.param(edited('"bfloat16"', '"BF16"'), "dtype is 'BF16'", id="tag"),
        pytest.param(edited('"bfloat16"', "null"), "the dtype None", id="no dtype"),
        pytest.param(edited('"shift":"0"}', '"shift":"0",}'), "is not JSON", id="trailing comma"),
        pytest.param(edited('"shift":"0"', '"shift":"0","shift":"0"'), "field 'shift' is there twice", id="attribute twice"),
        pytest.param(edited('"shift":"0"', '"shift":0'), r"attributes\['shift'\] is 0, want a str", id="number as attribute"),
        pytest.param(edited('{"shift":"0"}', "null"), "attributes is None", id="no attributes"),
        pytest.param(edited('{"shift":"0"}', "[]"), r"attributes is \[\]", id="list of attributes"),
        pytest.param(edited('"eagle3"', "3"), "algorithm is 3", id="number as algorithm"),
        pytest.param(edited('"eagle3"', '""'), "algorithm is ''", id="no algorithm"),
        pytest.param(
            GOOD[: GOOD.index('"features"')] + '"features":{}' + GOOD[GOOD.index(',"algorithm"') :],
            "features is {}",
            id="features as object",
        ),
        pytest.param(
            GOOD[: GOOD.index('"features"')] + '"features":[7]' + GOOD[GOOD.index(',"algorithm"') :], r"features\[0\] is 7", id="no feature"
        ),
        pytest.param(f"[{GOOD}]", r"ref is \[", id="list"),
        pytest.param(GOOD + "{}", "is not JSON", id="more behind"),
        pytest.param(GOOD + "\x00", "is not JSON", id="NUL behind"),
        pytest.param(GOOD + "\u00a0", "is not JSON", id="other space behind"),
        pytest.param("\ufeff" + GOOD, "is not JSON", id="byte order mark"),
        pytest.param(GOOD[:-1], "is not JSON", id="cut"),
        pytest.param(GOOD[:20], "is not JSON", id="cut in a string"),
        pytest.param(edited('"mem:test"', '"\\ud800"'), "store_uri is not valid UTF-8", id="lone surrogate"),
        pytest.param(edited('"mem:test"', '"\\udc00\\ud800"'), "store_uri is not valid UTF-8", id="surrogates the wrong way round"),
        pytest.param(edited('"mem:test"', '"\ud800"'), "is not valid UTF-8", id="raw surrogate"),
        pytest.param(edited('"mem:test"', '"\\q"'), "is not JSON", id="bad escape"),
        pytest.param(edited('"mem:test"', '"\\u+123"'), "is not JSON", id="bad digits of an escape"),
        pytest.param(edited('"mem:test"', '"m\n"'), "is not JSON", id="raw control character"),
        pytest.param(edited('"mem:test"', '"m\\n"'), "store_uri contains the control character '\\\\n'", id="escaped control character"),
        pytest.param(edited('"mem:test"', '"m\x7f"'), "store_uri contains the control character", id="delete"),
        pytest.param(edited('"mem:test"', '"m\u0085"'), "store_uri contains the control character", id="C1"),
        pytest.param(edited('"shift":"0"', '"shift":"\u2028"'), r"attributes\['shift'\] contains the control", id="line separator"),
        pytest.param(edited('"r1-0-17/aux"', '"\u2029"'), r"feature_keys\['aux'\] contains the control", id="paragraph separator"),
        pytest.param("[" * 100000, "is nested too deep", id="deep"),
        pytest.param('{"a":' * 40000, "is nested too deep", id="deep objects"),
        pytest.param(" " * (4 * MAX_REF_BYTES + 1), "262144 bytes", id="long"),
        pytest.param("é" * (2 * MAX_REF_BYTES + 1), "262144 are allowed", id="long in bytes"),
    ],
)
def test_the_parser_is_as_strict_as_the_services(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as e:
        SampleRef.from_json(text)
    assert isinstance(e.value, InvalidError)
    assert len(str(e.value)) < 1000


@pytest.mark.parametrize("data", [GOOD.encode().replace(b"mem:", b"m\xff"), GOOD.encode("utf-16"), b"\xed\xa0\x80", b"\xc0\xaf", None, 7])
def test_what_is_no_utf8_text_is_refused(data: Any) -> None:
    with pytest.raises(InvalidError):
        SampleRef.from_json(data)


def test_a_body_that_json_has_parsed_is_read_as_strictly() -> None:
    wire = ref().wire()
    changes: tuple[dict[str, Any], ...] = (
        {"num_tokens": 4.0},
        {"num_tokens": True},
        {"x": 1},
        {"attributes": {"a": 1}},
        {"features": []},
        {"features": {}},
    )
    for changed in changes:
        with pytest.raises(InvalidError):
            SampleRef.from_wire({**wire, **changed})
    not_objects: tuple[Any, ...] = (None, [], "x", json.dumps(wire))
    for bad in not_objects:
        with pytest.raises(InvalidError):
            SampleRef.from_wire(bad)
    for name in wire:
        with pytest.raises(InvalidError, match=f"lacks the field '{name}'"):
            SampleRef.from_wire({k: v for k, v in wire.items() if k != name})


def test_a_ref_has_a_largest_size() -> None:
    room = MAX_REF_BYTES - len(ref(attributes={"shift": "0", "a": ""}).to_json())
    longest = ref(attributes={"shift": "0", "a": "é" * (room // 2) + "x" * (room % 2)})
    assert len(longest.to_json()) == MAX_REF_BYTES
    assert SampleRef.from_json(longest.to_json()) == longest
    with pytest.raises(InvalidError, match="is 65537 bytes in canonical form, at most 65536 are allowed"):
        ref(attributes={"shift": "0", "a": "x" * (room + 1)})


# --- fields ---


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"sample_id": ""}, "sample_id is '', want"),
        ({"sample_id": "a/b"}, "sample_id is 'a/b'"),
        ({"sample_id": "a..b"}, r"sample_id is 'a..b', want .* without \"..\""),
        ({"sample_id": ".a"}, "sample_id is '.a'"),
        ({"sample_id": "a\x1b[31m"}, r"sample_id is 'a\\x1b\[31m'"),
        ({"sample_id": "a\n"}, r"sample_id is 'a\\n'"),
        ({"sample_id": "é"}, "sample_id is 'é'"),
        ({"sample_id": 7}, "sample_id is 7"),
        ({"sample_id": None}, "sample_id is None"),
        ({"run_id": "x" * 201}, "run_id is 'xxx"),
        ({"run_id": "a\x1b[31m"}, r"run_id is 'a\\x1b\[31m'"),
        ({"generation": "a b"}, "generation is 'a b'"),
        ({"generation": None}, "generation is None"),
        ({"algorithm": ""}, "algorithm is ''"),
        ({"algorithm": None}, "algorithm is None, want a FeatureAlgorithm or"),
        ({"store_uri": ""}, "store_uri is empty"),
        ({"store_uri": b"mem:"}, "store_uri is b'mem:', want a str"),
        ({"store_uri": "mem:\n"}, r"store_uri contains the control character '\\n'"),
        ({"target_model_version": "\udcff"}, "target_model_version is not valid UTF-8"),
        ({"target_model_version": 0}, "target_model_version is 0, want a str"),
        ({"draft_weight_version": ""}, "draft_weight_version is empty"),
        ({"schema_version": 0}, "schema_version is 0, want an integer of 1 or more"),
        ({"schema_version": True}, "schema_version is True"),
        ({"num_tokens": -1}, "num_tokens is -1, want an integer of 0 or more"),
        ({"num_tokens": 2**53}, r"less than 2\^53"),
        ({"num_tokens": 4.0}, "num_tokens is 4.0"),
        ({"estimated_bytes": 161}, "estimated_bytes is 161, but the features add up to 160"),
        ({"feature_specs": {}, "feature_keys": {}}, "feature_specs is empty"),
        ({"feature_specs": None}, "feature_specs is None, want a dict"),
        ({"feature_specs": [("aux", 1)]}, "want a dict"),
        ({"feature_keys": {"ids": "i", "aux": "a"}}, "want the same in the same order"),
        ({"feature_keys": {"aux": "a"}}, r"feature_keys has the names \['aux'\], feature_specs \['aux', 'ids'\]"),
        ({"feature_keys": {"aux": "", "ids": "i"}}, r"feature_keys\['aux'\] is empty"),
        ({"feature_keys": {"aux": 1, "ids": "i"}}, r"feature_keys\['aux'\] is 1, want a str"),
        ({"feature_keys": {"aux": "a", "ids": np.zeros(2)}}, r"feature_keys\['ids'\] is array"),
        ({"feature_specs": {"aux": FeatureSpec((1,), "int8"), "ids": ((1,), "int8")}}, r"feature_specs\['ids'\] is .* want a FeatureSpec"),
        ({"feature_specs": {"a b": FeatureSpec((1,), "int8")}, "feature_keys": {"a b": "k"}}, "feature_specs has the name 'a b'"),
        ({"feature_specs": {1: FeatureSpec((1,), "int8")}, "feature_keys": {1: "k"}}, "feature_specs has the name 1"),
        ({"attributes": {"a b": ""}}, "attributes has the key 'a b'"),
        ({"attributes": {"a": 0}}, r"attributes\['a'\] is 0, want a str"),
        ({"attributes": {"a": "x\u2028"}}, r"attributes\['a'\] contains the control character"),
        ({"attributes": None}, "attributes is None, want a dict"),
        ({"attributes": {f"a{i}": "" for i in range(65)}}, "attributes has 65 entries, at most 64"),
    ],
)
def test_a_bad_field_is_named_with_its_value(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as e:
        ref(**changed)
    assert isinstance(e.value, InvalidError)
    assert "\x1b" not in str(e.value)


def test_a_ref_has_at_most_64_features() -> None:
    def many(n: int) -> SampleRef:
        names = [f"f{i}" for i in range(n)]
        return ref(feature_keys={n: n for n in names}, feature_specs={n: FeatureSpec((1,), "int8") for n in names}, estimated_bytes=n)

    assert len(many(64).feature_names()) == 64
    with pytest.raises(InvalidError, match="feature_specs has 65 entries, at most 64"):
        many(65)


def test_features_may_not_add_up_to_2_to_the_53() -> None:
    specs = {"a": FeatureSpec((2**52,), "int8"), "b": FeatureSpec((2**52,), "int8")}
    with pytest.raises(InvalidError, match=r"2\^53"):
        ref(feature_keys={"a": "a", "b": "b"}, feature_specs=specs, estimated_bytes=2**53 - 1)


def test_a_builtin_algorithm_by_name_is_the_member() -> None:
    assert ref(algorithm="dspark").algorithm is FeatureAlgorithm.DSPARK
    assert ref(algorithm="mine").algorithm == "mine"
    assert [(a.name, a.value) for a in FeatureAlgorithm] == [("EAGLE3", "eagle3"), ("DFLASH", "dflash"), ("DSPARK", "dspark")]
    assert FeatureAlgorithm.__bases__ == (enum.Enum,)


def test_numpy_integers_become_plain_ones() -> None:
    r = ref(num_tokens=np.int64(4), schema_version=np.uint8(1))
    assert type(r.num_tokens) is int
    assert r.to_json() == GOOD.encode()


# --- immutable, comparable, hashable, copyable ---


def test_nothing_of_a_ref_changes_with_what_it_was_made_of() -> None:
    given = fields()
    r = SampleRef(**given)
    given["feature_keys"]["aux"] = "changed"
    given["feature_specs"].clear()
    given["attributes"]["shift"] = "1"
    r.wire()["attributes"]["shift"] = "1"
    r.wire()["features"][0]["shape"][0] = 99
    assert r.to_json() == GOOD.encode()


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(SampleRef)])
def test_no_field_can_be_set_or_deleted(field: str) -> None:
    r = ref()
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(r, field, getattr(r, field))
    with pytest.raises(dataclasses.FrozenInstanceError):
        delattr(r, field)


@pytest.mark.parametrize("field", ["feature_keys", "feature_specs", "attributes"])
@pytest.mark.parametrize(
    "change",
    [
        lambda d: d.__setitem__("x", 1),
        lambda d: d.__delitem__("shift"),
        lambda d: d.clear(),
        lambda d: d.pop("x", None),
        lambda d: d.popitem(),
        lambda d: d.setdefault("x", 1),
        lambda d: d.update(x=1),
        lambda d: d.__ior__({"x": 1}),
    ],
)
def test_no_dict_of_a_ref_can_be_changed(field: str, change: Callable[[Any], object]) -> None:
    r = ref()
    with pytest.raises(TypeError, match="cannot be changed"):
        change(getattr(r, field))
    assert r.to_json() == GOOD.encode()


def test_a_frozen_dict_is_a_dict_otherwise() -> None:
    frozen = FrozenDict({"a": 1, "b": 2})
    assert frozen == {"b": 2, "a": 1}
    assert isinstance(frozen, dict)
    assert hash(frozen) == hash(FrozenDict({"b": 2, "a": 1}))
    assert copy.copy(frozen) is copy.deepcopy(frozen) is frozen
    thawed = dict(frozen)
    thawed["c"] = 3
    assert (thawed, frozen | {"c": 3}, frozen.copy()) == ({"a": 1, "b": 2, "c": 3}, {"a": 1, "b": 2, "c": 3}, {"a": 1, "b": 2})
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        again = pickle.loads(pickle.dumps(frozen, protocol))
        assert type(again) is FrozenDict
        assert list(again.items()) == list(frozen.items())


@pytest.mark.parametrize("name", GOLDEN)
def test_a_ref_survives_pickle_and_copy(name: str) -> None:
    r = SampleRef.from_json(GOLDEN[name])
    copies = [
        copy.copy(r),
        copy.deepcopy(r),
        dataclasses.replace(r),
        *(pickle.loads(pickle.dumps(r, p)) for p in range(pickle.HIGHEST_PROTOCOL + 1)),
    ]
    for again in copies:
        assert again == r
        assert hash(again) == hash(r)
        assert again.to_json() == GOLDEN[name]
        assert type(again.attributes) is type(again.feature_specs) is FrozenDict
    assert len({r, *copies}) == 1


def test_refs_differ_if_any_field_does() -> None:
    specs = {"ids": FeatureSpec((2, 4), "int64"), "aux": FeatureSpec((2, 4, 6), "bfloat16")}
    turned = {"feature_keys": {"ids": "r1-0-17/ids", "aux": "r1-0-17/aux"}, "feature_specs": specs}
    changes: list[dict[str, Any]] = [
        {"sample_id": "s"}, {"run_id": "r"}, {"store_uri": "mem:"}, {"algorithm": "x"}, {"schema_version": 2}, {"num_tokens": 5},
        {"generation": "g"}, {"target_model_version": "1"}, {"draft_weight_version": "1"}, {"attributes": {}}, turned,
        {"feature_keys": {"aux": "a", "ids": "i"}},
        {"feature_specs": {"aux": FeatureSpec((4, 2, 6), "bfloat16"), "ids": FeatureSpec((2, 4), "int64")}},
    ]  # fmt: skip
    others = [one(), *(ref(**changed) for changed in changes)]
    assert all(o != ref() for o in others)
    assert len({ref(), *others}) == len(others) + 1
    assert ref() != GOOD


def test_the_order_of_features_is_part_of_the_value_and_that_of_attributes_is_not() -> None:
    a = ref(attributes={"a": "1", "b": "2"})
    assert a == ref(attributes={"b": "2", "a": "1"})
    turned = ref(
        feature_keys=dict(reversed(fields()["feature_keys"].items())), feature_specs=dict(reversed(fields()["feature_specs"].items()))
    )
    assert turned != ref()
    assert turned.feature_names() == ("ids", "aux")
    assert SampleRef.from_json(turned.to_json()).feature_names() == ("ids", "aux")


def test_whatever_is_valid_round_trips() -> None:
    rng = random.Random(5)
    letters = "ABCxyz019_"
    alphabet = "ab/:\"\\<&>é漢😀\u00a0\u2027\u202a '{}[],\u0600\ufffd\uffff"

    def identifier() -> str:
        return rng.choice(letters) + "".join(rng.choice(letters + ":-") for _ in range(rng.randrange(12)))

    def text(least: int = 1) -> str:
        return "".join(rng.choice(alphabet) for _ in range(rng.randrange(least, 12)))

    for _ in range(500):
        names = {identifier() for _ in range(rng.randrange(1, 7))}
        specs = {n: FeatureSpec(tuple(rng.randrange(50) for _ in range(rng.randrange(5))), rng.choice(dtypes.NAMES)) for n in names}
        r = SampleRef(
            identifier(), identifier(), text(), {n: text() for n in specs}, specs, identifier(), rng.randrange(1, 2**53),
            rng.randrange(2**53), sum(s.nbytes for s in specs.values()), text(), text(), identifier(),
            {identifier(): text(0) for _ in range(rng.randrange(5))},
        )  # fmt: skip
        again = SampleRef.from_json(r.to_json())
        assert again == r
        assert again.to_json() == r.to_json()
        assert json.loads(r.to_json()) == r.wire()
        assert SampleRef.from_wire(json.loads(json.dumps(r.wire()))) == r


# --- the guard ---


@dataclasses.dataclass
class Node:
    key: Any = None
    next: Any = None
    features: Any = ()


class Duck:
    """Quacks like a tensor, as those of other libraries do."""

    is_cuda = False

    def data_ptr(self) -> int:
        return 0

    def numel(self) -> int:
        return 0


class IntDuck(int, Duck):
    pass


class Text(str):
    pass


class Colour(enum.Enum):
    RED = "red"
    PAIR = (1, 2)


def chain(n: int) -> Any:
    v: Any = 1
    for _ in range(n):
        v = [v]
    return v


@pytest.mark.parametrize(
    "value",
    [
        None, 1, 1.5, True, "text", b"small", bytearray(b"small"), ref(), [ref(), ref()], FeatureSpec((1,), "int8"), ref().wire(),
        Colour.RED, Colour.PAIR, FeatureAlgorithm.EAGLE3, {"a": [1, 2, 3], "b": {"c": "d"}}, OrderedDict(a=1), FrozenDict(a=1),
        types.MappingProxyType({"a": 1}), Node(1, Node("x")), [0.5] * 16, (True,) * 16, [[1] * 16] * 3, ["x"] * 100, "x" * 4096,
        b"x" * 4096, chain(32), (), {}, Text("x"), np.float64(1.0),
    ],
    ids=lambda v: f"{type(v).__name__}",
)  # fmt: skip
def test_the_guard_lets_the_control_plane_pass(value: Any) -> None:
    assert_no_tensors(value)


def test_the_guard_lets_torch_dtypes_pass() -> None:
    torch = pytest.importorskip("torch")
    assert_no_tensors({"dtype": torch.bfloat16, "size": torch.Size([1, 2])})


def looped() -> Node:
    n = Node()
    n.next = Node(next=n)
    return n


def looped_list() -> list[Any]:
    v: list[Any] = []
    v.append({"a": (v,)})
    return v


def tagged() -> Text:
    t = Text("x")
    t.hidden = Duck()  # type: ignore[attr-defined]
    return t


def extended() -> Node:
    n = Node()
    n.hidden = np.zeros(1)  # type: ignore[attr-defined]
    return n


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.zeros(2), r"ref: a tensor \(numpy.ndarray\)"),
        (np.zeros(()), "a tensor"),
        (Duck(), r"a tensor \(tests.test_refs.Duck\)"),
        (IntDuck(3), "a tensor"),
        (types.SimpleNamespace(data_ptr=1, is_cuda=False, numel=2), "a tensor"),
        (Node(features=[0, 1, Node(key=np.zeros(1))]), r"ref.features\[2\].key"),
        ({"k": (Duck(),)}, r'ref\["k"\]\[0\]: a tensor'),
        ({"\x1b[2J": Duck()}, r'ref\["\\u001b\[2J"\]: a tensor'),
        (tagged(), r"ref.hidden: a tensor"),
        (extended(), r"ref.hidden: a tensor"),
        (looped(), r"ref.next.next: a cycle"),
        (looped_list(), r"a cycle"),
        (chain(33), "nested more than 32 deep"),
        ([1] * 17, r"17 numbers \(list\), at most 16"),
        (tuple([0.5] * 17), "17 numbers"),
        ([True] * 17, "17 numbers"),
        ([1] * 16 + ["x", 2.0], "17 numbers"),
        ({"h": [0.5] * 20}, "20 numbers"),
        (b"x" * 4097, r"4097 bytes \(bytes\), at most 4096"),
        (bytearray(4097), "4097 bytes"),
        ("x" * 4097, r"4097 bytes \(str\)"),
        ("é" * 2049, "4098 bytes"),
        ({"x" * 4097: 1}, "a key of 4097"),
        ({1: "a"}, "a dict with the key 1, want str keys"),
        ({("a",): "a"}, "want str keys"),
        ({1, 2}, r"a set \(set\)"),
        (frozenset(), "a set"),
        (object(), r"an opaque object \(builtins.object\)"),
        (memoryview(b"x"), "an opaque object"),
        (range(3), "an opaque object"),
        (1j, "an opaque object"),
        (np.int64(3), "an opaque object"),
        (Node, "an opaque object"),
        (len, "an opaque object"),
        (iter([1]), "an opaque object"),
        ({"a": 1}.values(), "an opaque object"),
        (dataclasses.make_dataclass("Made", ["x"])(np.zeros(1)), r"ref.x: a tensor"),
    ],
)
def test_the_guard_refuses_tensors_and_what_could_hide_one(value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as e:
        assert_no_tensors(value)
    assert isinstance(e.value, InvalidError)


def test_the_guard_refuses_torch_tensors_wherever_they_sit() -> None:
    torch = pytest.importorskip("torch")
    hiding: Any = enum.Enum("hiding", {"T": torch.zeros(1)})
    for value, where in [
        (torch.zeros(1), "lease"),
        ({"a": [torch.tensor(1)]}, r'lease\["a"\]\[0\]'),
        (Node(next=Node(torch.nn.Parameter(torch.zeros(1)))), "lease.next.key"),
        (hiding.T, "lease.value"),
    ]:
        with pytest.raises(ValueError, match=where + ": a tensor"):
            assert_no_tensors(value, "lease")


def test_the_guard_takes_what_is_shared_for_no_cycle() -> None:
    shared = Node("shared")
    assert_no_tensors([shared, shared, {"a": shared}])
