"""The reference's batch class holds what a sample and a collated batch hold, and says how it is aligned."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sluice.batches import FIELDS, Eagle3TargetBatch, tensors_of
from sluice.collate import Sample, collate
from sluice.errors import InvalidError, UnsupportedError
from sluice.refs import SampleRef
from sluice.tensorfile import specs_of

EAGLE3 = json.loads((Path(__file__).resolve().parents[2] / "schemas" / "eagle3.json").read_text())


def tensors(*supervision: str, packed: bool = False) -> dict[str, Any]:
    every: dict[str, Any] = {
        "last_hidden_states": np.arange(6, dtype=np.float32).reshape(1, 6, 1),
        "logits": np.zeros((1, 6, 9), np.float32),
        "target_probs": np.zeros((1, 6, 4), np.float32),
        "position_mask": np.ones((1, 6, 1), np.bool_),
    }
    made: dict[str, Any] = {
        "aux_hidden_states": np.zeros((1, 6, 3), np.float32),
        "input_ids": np.array([[10, 11, 12, 13, 14, 15]]),
        "attention_mask": np.ones((1, 6), np.int64),
        "loss_mask": np.array([[1, 0, 0, 1, 1, 1]]),
        **{name: every[name] for name in supervision or ("logits",)},
    }
    if packed:
        made["position_ids"] = np.array([[0, 1, 2, 0, 1, 2]])
        made["seq_lens"] = np.array([[3, 3]])
        made["doc_remaining"] = np.array([[2, 1, 0, 2, 1, 0]])
    return made


def test_the_fields_are_the_references_in_its_order() -> None:
    names = [f.name for f in fields(Eagle3TargetBatch)]
    assert names[:10] == [
        "aux_hidden_states",
        "input_ids",
        "attention_mask",
        "loss_mask",
        "logits",
        "target_probs",
        "position_mask",
        "position_ids",
        "seq_lens",
        "doc_remaining",
    ]
    assert [f["name"] for f in EAGLE3["features"]] == list(FIELDS)
    assert Eagle3TargetBatch(*(tensors()[n] for n in ("aux_hidden_states", "input_ids", "attention_mask", "loss_mask", "logits"))).shifted


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("supervision", [("logits",), ("target_probs", "position_mask"), ("last_hidden_states",)])
def test_a_collated_batch_comes_and_goes_without_a_copy(supervision: tuple[str, ...], packed: bool) -> None:
    features = tensors(*supervision, packed=packed)
    specs = specs_of(features)
    ref = SampleRef(
        sample_id="s",
        run_id="r",
        store_uri="mem:test",
        feature_keys={name: f"s/{name}" for name in specs},
        feature_specs=specs,
        algorithm="eagle3",  # type: ignore[arg-type,unused-ignore]
        schema_version=1,
        num_tokens=6,
        estimated_bytes=sum(t.nbytes for t in features.values()),
        target_model_version="0",
        draft_weight_version="0",
        generation="g",
        attributes={"shift": "0", "aux_layers": "hf:1,2,3", "last_norm": "post"},
    )
    collated = collate(EAGLE3, [Sample(ref, features)])
    batch = Eagle3TargetBatch.from_batch(collated)
    assert batch.shifted and batch.attributes()["shift"] == "1"
    assert batch.last_norm == ("post" if supervision == ("last_hidden_states",) else None)
    again = batch.to_batch()
    assert list(again) == list(collated) and all(again[name] is collated[name] for name in collated)
    assert (again.num_tokens, again.supervised_tokens, again.shifted) == (collated.num_tokens, collated.supervised_tokens, True)
    # What is not shifted counts the same.
    stored = Eagle3TargetBatch.from_sample(ref, features)
    assert stored.attributes() == {"shift": "0", **({"last_norm": "post"} if batch.last_norm else {})}
    assert stored.to_batch().supervised_tokens == collated.supervised_tokens and not stored.to_batch().shifted
    with pytest.raises(InvalidError, match="shift"):
        Eagle3TargetBatch.from_sample(replace(ref, attributes={}), features)


def test_the_tensors_of_another_class_with_these_fields_are_had_in_the_samples_order() -> None:
    features = tensors("target_probs", "position_mask")
    theirs = SimpleNamespace(**dict(reversed(features.items())), logits=None, position_ids=None)
    assert list(tensors_of(theirs).items()) == list(features.items())


def without(*names: str, **more: Any) -> dict[str, Any]:
    return {**{k: v for k, v in tensors().items() if k not in names}, **more}


@pytest.mark.parametrize(
    "given, message",
    [
        (without("loss_mask"), 'lacks "loss_mask"'),
        (without("logits"), "has 0 kinds of supervision"),
        (without(last_hidden_states=np.zeros((1, 6, 1))), "has 2 kinds of supervision"),
        (without(target_probs=np.zeros((1, 6, 4))), "has 1 of target_probs and position_mask, want both or neither"),
        (without(seq_lens=np.array([[6]])), "has 1 of position_ids, seq_lens, doc_remaining, want all or none"),
        (without(hidden_states=np.zeros((1, 6, 1))), 'has the tensor "hidden_states"'),
    ],
)
def test_what_a_batch_has_wrong_is_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidError) as e:
        Eagle3TargetBatch.from_tensors(given, shifted=True)
    assert message in str(e.value)
    with pytest.raises(ValueError, match="want exactly one"):
        Eagle3TargetBatch(**without("logits"))
    with pytest.raises(InvalidError):
        Eagle3TargetBatch(**tensors(), last_norm="none")


def test_the_trainers_arguments_are_named_as_it_names_them() -> None:
    features = tensors(packed=True)
    inputs = Eagle3TargetBatch(**features).to_trainer_inputs()
    assert inputs.pop("target_logits") is features.pop("logits") and inputs == features
    assert "position_mask" in Eagle3TargetBatch(**tensors("target_probs", "position_mask")).to_trainer_inputs()
    with pytest.raises(InvalidError, match="shifted"):
        Eagle3TargetBatch(**tensors(), shifted=False).to_trainer_inputs()
    with pytest.raises(UnsupportedError, match="last_hidden_states"):
        Eagle3TargetBatch(**tensors("last_hidden_states")).to_trainer_inputs()
