"""The schema's admission rule, held against a sample before it is uploaded: what a trainer can learn nothing from, or not even collate, is
refused where it is made. It counts as the producers do that know their prompts: row by row, and never the first token of a document, which
nothing predicts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from .errors import SchemaError
from .schema import Schema
from .tensorfile import Tensor


def admit(schema: Schema, sample_id: str, tensors: Mapping[str, Tensor], attributes: Mapping[str, str]) -> None:
    """Raise SchemaError where a sample is empty, or one of its rows has fewer tokens or supervised tokens than the schema admits. Of masks that
    are missing, or have another form than one value a token, nothing is counted: the run's own check of the ref says what is wrong."""

    def bad(detail: str, hint: str = "") -> SchemaError:
        return SchemaError(detail, op="admission", subject=sample_id, hint=hint)

    rows = cols = -1
    for name, t in tensors.items():
        f = schema.feature(name)
        if f is None or not f.in_rows or len(t.shape) < 2:
            continue
        if 0 in t.shape[:2]:
            raise bad(f'feature "{name}" is {list(t.shape)}, and a sample without a row or without a token is none')
        if rows < 0:
            rows, cols = int(t.shape[0]), int(t.shape[1])
    if rows < 0:
        return

    def values(role: str) -> npt.NDArray[Any] | None:
        f = schema.role(role)
        t = None if f is None else tensors.get(f.name)
        return _values(t) if t is not None and tuple(t.shape) == (rows, cols) else None

    attention = values("attention_mask")
    tokens = _lengths(attributes, rows, cols) if attention is None else np.count_nonzero(attention, axis=1).tolist()
    supervised = [schema.min_supervised] * rows
    loss = values("loss_mask")
    if loss is not None:
        counts = loss != 0
        if attributes.get("shift") != "1":  # otherwise it was its producer who decided which token a slot stands for
            positions = values("position_ids")
            counts[:, 0] = False
            if positions is not None and schema.packing:
                counts &= positions != 0
        supervised = np.count_nonzero(counts, axis=1).tolist()
    for r in range(rows):
        if tokens[r] < schema.min_tokens:
            raise bad(f"row {r} has {tokens[r]} tokens, {schema.name} admits {schema.min_tokens} or more", "leave such rows out")
        if supervised[r] < schema.min_supervised:
            raise bad(
                f"row {r} has {supervised[r]} supervised tokens behind the first of a document, {schema.name} admits {schema.min_supervised} or more",
                "leave such rows out",
            )


def _lengths(attributes: Mapping[str, str], rows: int, cols: int) -> list[int]:
    """The tokens of each row where no attention mask tells them from padding."""
    listed = str(attributes.get("row_lengths", "")).split(",")
    if len(listed) == rows and all(n.isdecimal() and n.isascii() and len(n) < 16 for n in listed):
        return [min(int(n), cols) for n in listed]
    return [cols] * rows


def _values(t: Any) -> npt.NDArray[Any]:
    if isinstance(t, np.ndarray):
        return t
    array: npt.NDArray[Any] = (t != 0).cpu().numpy() if t.is_floating_point() else t.detach().cpu().numpy()  # numpy has no bfloat16
    return array
