"""Which samples a producer refuses, by the schema's admission rule."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import sluice
from sluice.admission import admit
from sluice.dtypes import torch_module
from sluice.schema import Schema, builtin

ATTRIBUTES = {"shift": "0", "aux_layers": "hf:1,2,3", "last_norm": "post"}


def eagle3(tokens: int, supervised: list[int] | None = None, *, rows: int = 1) -> dict[str, Any]:
    ids = np.ones((rows, tokens), np.int64)
    loss = ids.copy() if supervised is None else np.isin(np.arange(tokens), supervised)[None].repeat(rows, 0).astype(np.int64)
    states = np.ones((rows, tokens, 24), np.float32)
    return {"aux_hidden_states": states, "input_ids": ids, "attention_mask": ids.copy(), "loss_mask": loss, "last_hidden_states": states[..., :8].copy()}


def refusal(schema: Schema, tensors: dict[str, Any], **attributes: str) -> str:
    try:
        admit(schema, "s", tensors, ATTRIBUTES | attributes)
    except sluice.SchemaError as e:
        assert (e.op, e.subject) == ("admission", "s")
        return e.detail
    return ""


EAGLE3 = builtin("eagle3")


@pytest.mark.parametrize(
    ("tensors", "attributes", "why"),
    [
        (eagle3(2), {}, ""),
        (eagle3(0), {}, 'feature "aux_hidden_states" is [1, 0, 24], and a sample without a row or without a token is none'),
        (eagle3(3, rows=0), {}, 'feature "aux_hidden_states" is [0, 3, 24], and a sample without a row or without a token is none'),
        (eagle3(1), {}, "row 0 has 1 tokens, eagle3 admits 2 or more"),
        (eagle3(4, [0]), {}, "row 0 has 0 supervised tokens behind the first of a document, eagle3 admits 1 or more"),
        (eagle3(4, [0]), {"shift": "1"}, ""),
        (eagle3(4, []), {"shift": "1"}, "row 0 has 0 supervised tokens behind the first of a document, eagle3 admits 1 or more"),
        (eagle3(4) | {"attention_mask": np.array([[1, 0, 0, 0]])}, {}, "row 0 has 1 tokens, eagle3 admits 2 or more"),
        (eagle3(4) | {"position_ids": np.array([[0, 0, 0, 0]])}, {}, "row 0 has 0 supervised tokens behind the first of a document, eagle3 admits 1 or more"),
        (eagle3(4, rows=2) | {"loss_mask": np.array([[0, 1, 1, 1], [1, 0, 0, 0]])}, {}, "row 1 has 0 supervised tokens behind the first of a document, eagle3 admits 1 or more"),
    ],
    ids=["least", "no token", "no row", "short", "first alone", "shifted", "shifted, none", "padding", "documents", "second row"],
)
def test_the_rule_counts_each_row_without_what_nothing_predicts(tensors: dict[str, Any], attributes: dict[str, str], why: str) -> None:
    assert refusal(EAGLE3, tensors, **attributes) == why
    torch = torch_module()
    if torch is not None:
        assert refusal(EAGLE3, {name: torch.from_numpy(t) for name, t in tensors.items()}, **attributes) == why


def test_where_no_mask_tells_padding_the_attribute_does() -> None:
    features = [{"name": "h", "from": "aux", "axes": ["B", "S", "H"], "dtypes": ["float32"], "required": True}]
    schema = Schema.parse({"name": "mine", "version": 1, "features": features, "admission": {"min_tokens": 2}})
    states = {"h": np.ones((2, 3, 4), np.float32)}
    assert refusal(schema, states) == ""
    assert refusal(schema, states, row_lengths="3,1") == "row 1 has 1 tokens, mine admits 2 or more"


def test_a_schema_without_rows_has_nothing_to_count() -> None:
    features = [{"name": "h", "axes": ["N"], "dtypes": ["float32"], "required": True}]
    schema = Schema.parse({"name": "mine", "version": 1, "features": features, "admission": {"min_tokens": 2, "min_supervised": 1}})
    assert refusal(schema, {"h": np.ones(0, np.float32)}) == ""
