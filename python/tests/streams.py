"""A small target, prompts and samples in the way of the reference page."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from sluice import Eagle3TargetBatch

HIDDEN, VOCAB = 8, 32


class Target:
    """A target whose states say which tokens they are of. Its batches are shifted, as the page's are."""

    def __init__(self) -> None:
        self.calls = 0
        self.embeddings = torch.nn.Embedding(VOCAB, HIDDEN)
        self.vocabulary: Any = None

    def generate_batch(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, loss_mask: torch.Tensor, **packing: torch.Tensor) -> Eagle3TargetBatch:
        self.calls += 1
        states = input_ids[..., None].float().repeat(1, 1, 3 * HIDDEN)
        logits = torch.nn.functional.one_hot(shift(input_ids), VOCAB).float()
        return Eagle3TargetBatch(states, shift(input_ids), attention_mask, shift(loss_mask), logits, **packing)

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.embeddings

    def set_vocab_mapping(self, selected_token_ids: torch.Tensor, selected_token_mask: torch.Tensor) -> None:
        self.vocabulary = (selected_token_ids, selected_token_mask)


def shift(t: torch.Tensor) -> torch.Tensor:
    return torch.cat([t[:, 1:], torch.zeros_like(t[:, :1])], 1)


def prompt(i: int, tokens: int = 6) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.full((1, tokens), i % VOCAB), torch.ones(1, tokens, dtype=torch.long), torch.ones(1, tokens, dtype=torch.long)


def prompts(n: int, tokens: int = 6) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    return (prompt(i, tokens) for i in range(n))


def packed() -> tuple[torch.Tensor, ...]:
    """Two documents, of four and three tokens, and one token of padding that counts to the last, as upstream's packing has it."""
    ids, mask = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 0]]), torch.tensor([[1, 1, 1, 1, 1, 1, 1, 0]])
    return ids, mask, mask.clone(), torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0]]), torch.tensor([[4, 4]]), torch.tensor([[3, 2, 1, 0, 2, 1, 0, 0]])


def tensors(i: int = 1, tokens: int = 6) -> dict[str, torch.Tensor]:
    """A sample of the smallest target."""
    return Target().generate_batch(*prompt(i, tokens)).tensors()


def filler(nbytes: int) -> dict[str, torch.Tensor]:
    """A sample that is little but large."""
    return {**tensors(), "logits": torch.zeros(nbytes // 4)}
