"""The reference page's batch class, with the field names of NeMo AutoModel's, for programs that are written against it.

A target's `generate_batch` returns one, and a FeatureDataLoader yields them. It is plain data: what is shifted, padded or packed is decided
in `sluice.collate` alone, and a batch here says how it is aligned.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from .collate import Batch
from .errors import InvalidError, UnsupportedError
from .tensorfile import Tensor

if TYPE_CHECKING:
    from .refs import SampleRef

_REQUIRED = ("aux_hidden_states", "input_ids", "attention_mask", "loss_mask")
_SUPERVISION = (("last_hidden_states",), ("logits",), ("target_probs", "position_mask"))
_PACKING = ("position_ids", "seq_lens", "doc_remaining")

FIELDS: tuple[str, ...] = (*_REQUIRED, *(name for encoding in _SUPERVISION for name in encoding), *_PACKING)
"""The names of all tensors that a batch can have, in the order in which a sample has them."""


@dataclass(eq=False)
class Eagle3TargetBatch:
    """What a target says of one batch of prompts. Tensors are torch's or numpy's.

    aux_hidden_states: [B,S,K*H], the states of K layers of the target, side by side. Never shifted.
    input_ids, attention_mask, loss_mask: [B,S].
    The supervision is exactly one of these:
        logits: [B,S,V], of the whole vocabulary;
        target_probs: [B,S,Vd], over the draft's vocabulary, with position_mask: [B,S,1], bool, whether the target's choice lies in it;
        last_hidden_states: [B,S,H], from which the trainer computes logits by the frozen head. The reference has not this one.
    position_ids: [B,S], seq_lens: [B,docs], doc_remaining: [B,S]: where rows are packed; all three or none. Never shifted.
    shifted: whether input_ids, loss_mask and the supervision are shifted left by one against aux_hidden_states, as a trainer takes them and
        as upstream's targets return them; False where row t of every tensor belongs to position t.
    last_norm: the norm state of last_hidden_states, "pre" or "post"; None where it does not say, or has none.

    Raises InvalidError (a ValueError) where the supervision is not exactly one, or packing is there in part.
    """

    aux_hidden_states: Tensor
    input_ids: Tensor
    attention_mask: Tensor
    loss_mask: Tensor
    logits: Tensor | None = None
    target_probs: Tensor | None = None
    position_mask: Tensor | None = None
    position_ids: Tensor | None = None
    seq_lens: Tensor | None = None
    doc_remaining: Tensor | None = None
    last_hidden_states: Tensor | None = field(default=None, kw_only=True)
    shifted: bool = field(default=True, kw_only=True)
    last_norm: str | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        check_names(self.tensors())
        if self.last_norm not in (None, "pre", "post"):
            raise InvalidError(f'is {self.last_norm!r:.40}, want "pre", "post" or None', op="batch", subject="last_norm")

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], *, shifted: bool, last_norm: str | None = None) -> Eagle3TargetBatch:
        """Make a batch of a sample's tensors, or of a batch's, without a copy. Whether they are shifted must be said. Raises InvalidError
        for a name that it has no field for, or one that is missing."""
        check_names(tensors)
        return cls(**cast("dict[str, Any]", dict(tensors)), shifted=shifted, last_norm=last_norm)

    @classmethod
    def from_sample(cls, ref: SampleRef, tensors: Mapping[str, Tensor]) -> Eagle3TargetBatch:
        """Make one of a sample, as it is stored, without a copy. Raises InvalidError also where the ref does not say how it is aligned."""
        shift = ref.attributes.get("shift")
        if shift not in ("0", "1"):
            raise InvalidError(f'has the attribute "shift" {shift!r:.40}, want "0" or "1"', op="batch", subject=ref.sample_id)
        norm = ref.attributes.get("last_norm") if "last_hidden_states" in tensors else None
        return cls.from_tensors(tensors, shifted=shift == "1", last_norm=norm)

    @classmethod
    def from_batch(cls, batch: Batch) -> Eagle3TargetBatch:
        """Make one of a collated batch, without a copy. Raises InvalidError where the batch is of another algorithm."""
        return cls.from_tensors(batch.tensors, shifted=batch.shifted, last_norm=batch.last_norm)

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that it has, by name, in the order in which a sample has them."""
        return tensors_of(self)

    def attributes(self) -> dict[str, str]:
        """Return what a ref of these tensors must say of their alignment and norm."""
        said = {"shift": "1" if self.shifted else "0"}
        if self.last_norm is not None:
            said["last_norm"] = self.last_norm
        return said

    def to_batch(self) -> Batch:
        """Return it as a Batch without samples, and without a copy. The first token of a document, which nothing predicts, does not count
        as supervised."""
        loss = cast(Any, self.loss_mask)
        if not self.shifted:
            loss = loss[:, 1:] if self.position_ids is None else loss * (cast(Any, self.position_ids) != 0)
        return Batch(
            self.tensors(),
            num_tokens=int(cast(Any, self.attention_mask).sum()),
            supervised_tokens=int(loss.sum()),
            shifted=self.shifted,
            last_norm=self.last_norm,
            aliases=True,
        )

    def to_trainer_inputs(self) -> dict[str, Tensor]:
        """Return the keyword arguments of AutoModel's EAGLE-3 trainer module, in which the logits are called target_logits.

        Raises InvalidError where the batch is not shifted, and UnsupportedError where it has the last hidden states instead of logits.
        """
        if not self.shifted:
            raise InvalidError("is False, and the trainer takes shifted batches", op="batch", subject="shifted")
        inputs = self.tensors()
        if "last_hidden_states" in inputs:
            raise UnsupportedError(
                "has no argument of the trainer", op="batch", subject="last_hidden_states", hint="compute logits by the target's head first"
            )
        if "logits" in inputs:
            inputs["target_logits"] = inputs.pop("logits")
        return inputs


def tensors_of(batch: object) -> dict[str, Tensor]:
    """Return the tensors of any batch that has the reference's fields, AutoModel's own class among them, by name, in the order in which a
    sample has them. A field that is None or missing is left out."""
    found = {name: getattr(batch, name, None) for name in FIELDS}
    return {name: t for name, t in found.items() if t is not None}


def check_names(tensors: Mapping[str, object]) -> None:
    """Raise InvalidError where these are not the tensors of one batch: some are missing or unknown, the supervision is not exactly one, or
    packing is there in part."""

    def bad(detail: str) -> InvalidError:
        return InvalidError(detail, op="batch")

    for name in _REQUIRED:
        if name not in tensors:
            raise bad(f'lacks "{name}"; it has {", ".join(tensors) or "nothing"}')
    for name in tensors:
        if name not in FIELDS:
            raise bad(f'has the tensor "{name:.60}", want some of {", ".join(FIELDS)}')
    found = []
    for encoding in _SUPERVISION:
        n = sum(name in tensors for name in encoding)
        if n not in (0, len(encoding)):
            raise bad(f"has {n} of {' and '.join(encoding)}, want both or neither")
        if n:
            found.append(" and ".join(encoding))
    if len(found) != 1:
        want = "; ".join(" and ".join(encoding) for encoding in _SUPERVISION)
        raise bad(f"has {len(found)} kinds of supervision ({'; '.join(found) or 'none'}), want exactly one of {want}")
    n = sum(name in tensors for name in _PACKING)
    if n not in (0, len(_PACKING)):
        raise bad(f"has {n} of {', '.join(_PACKING)}, want all or none")
