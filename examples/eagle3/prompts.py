"""What the draft learns from: conversations whose next turn the target writes itself, and the samples made of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from .target import ASSISTANT, BOS, END, ROLES, Target

HELD_OUT = 6  # every sixth conversation is never trained on
SHIFTED = ("input_ids", "loss_mask", "last_hidden_states")


@dataclass(frozen=True)
class Row:
    """A sequence of tokens; the mask is 1 on those that the target wrote."""

    input_ids: list[int]
    loss_mask: list[int]


def contexts(path: Path, held_out: bool) -> list[list[int]]:
    """The conversations of a JSONL file, cut before each turn of the assistant: <bos>, the turns so far, <assistant>."""
    out = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines()):
        if (number % HELD_OUT == HELD_OUT - 1) != held_out:
            continue
        ids = [BOS]
        for turn in json.loads(line)["conversations"]:
            ids.append(ROLES[turn["role"]])
            if ids[-1] == ASSISTANT:
                out.append(list(ids))
            ids += [*turn["content"].encode(), END]
    return out


def rows(target: Target, contexts: list[list[int]], seed: int, limit: int, together: int = 32) -> Iterator[Row]:
    """Contexts in an order of their own for every pass over them, without end, each with a reply of at most limit tokens that is drawn anew.

    The same seed gives the same rows. Replies of together rows are drawn at once.
    """
    if not contexts:
        raise ValueError("no contexts to let the target reply to; are all of them longer than --context?")
    generator = torch.Generator().manual_seed(seed)
    waiting: list[list[int]] = []
    while True:
        for index in torch.randperm(len(contexts), generator=generator).tolist():
            waiting.append(contexts[index])
            if len(waiting) < together:
                continue
            for context, reply in zip(waiting, target.replies(waiting, limit, generator), strict=True):
                yield Row(context + reply, [0] * len(context) + [1] * len(reply))
            waiting = []


def sample(target: Target, row: Row) -> dict[str, Tensor]:
    """The features of one sample of the schema eagle3, row t = position t: ids and masks [1, S] int64, states [1, S, 3H] and [1, S, H] float32."""
    ids = torch.tensor([row.input_ids])
    aux, last = target.forward(ids)
    return {
        "aux_hidden_states": aux,
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "loss_mask": torch.tensor([row.loss_mask]),
        "last_hidden_states": last,
    }


def shift(t: Tensor, by: int) -> Tensor:
    """[B, S, ...] moved to the left by so many positions, zeros behind."""
    return F.pad(t[:, by:], [0, 0] * (t.dim() - 2) + [0, by]) if by else t


def collate(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The batch that Sluice's loader makes of the same samples: padded with zeros at the right to the longest, the SHIFTED features moved left by one.

    Only --colocated needs it: it is the same convention, written down a second time.
    """
    width = max(s["input_ids"].shape[1] for s in samples)
    batch = {}
    for name in samples[0]:
        padded = [F.pad(s[name], [0, 0] * (s[name].dim() - 2) + [0, width - s[name].shape[1]]) for s in samples]
        batch[name] = shift(torch.cat(padded), int(name in SHIFTED))
    return batch


def sample_bytes(target: Target, row: Row) -> int:
    """How many bytes the features of sample have, known before the forward."""
    h, token = target.config.hidden_size, target.embedding.element_size()
    return len(row.input_ids) * ((len(target.aux_layers) + 1) * h * token + 3 * 8)
