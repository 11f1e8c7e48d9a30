"""Speculative decoding with a chain of proposals and greedy verification: how much a draft is worth."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from .draft import Draft
from .target import BOS, Target


class Drafter(Protocol):
    """Proposes the k tokens that follow tokens; aux [1, n, 3H] are the target's states of all tokens but the last."""

    def propose(self, tokens: list[int], aux: Tensor, k: int) -> list[int]: ...


class Unigram:
    """Proposes the same token always."""

    def __init__(self, token: int) -> None:
        self.token = token

    def propose(self, tokens: list[int], aux: Tensor, k: int) -> list[int]:
        return [self.token] * k


class ChainContext:
    """Keys and values of the rows so far; new rows see them, and each other up to themselves."""

    def __init__(self) -> None:
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.keys = k if self.keys is None else torch.cat([self.keys, k], dim=2)
        self.values = v if self.values is None else torch.cat([self.values, v], dim=2)
        s, n = q.shape[2], self.keys.shape[2]
        later = torch.full((s, n), -math.inf).triu(n - s + 1)
        return (q @ self.keys.transpose(-1, -2) / math.sqrt(q.shape[3]) + later).softmax(dim=-1) @ self.values

    def cut(self, rows: int) -> None:
        """Forgets all but the first rows."""
        if self.keys is not None and self.values is not None:
            self.keys, self.values = self.keys[:, :, :rows], self.values[:, :, :rows]


class Chain:
    """Proposes with a draft, for one sequence. Rows made from the target's states are kept; those of a proposal are made anew from true states once they are verified."""

    def __init__(self, draft: Draft) -> None:
        self.draft, self.context, self.rows = draft, ChainContext(), 0

    @torch.no_grad()
    def propose(self, tokens: list[int], aux: Tensor, k: int) -> list[int]:
        n = len(tokens) - 1
        ids, positions = torch.tensor([tokens[self.rows + 1 :]]), torch.arange(self.rows, n)[None]
        hidden = self.draft.step(self.draft.fc(aux[:, self.rows : n]), ids, positions, self.context)[:, -1:]
        out = [int(self.draft.logits(hidden).argmax())]
        for i in range(k - 1):
            hidden = self.draft.step(hidden, torch.tensor([out[-1:]]), torch.tensor([[n + i]]), self.context)
            out.append(int(self.draft.logits(hidden).argmax()))
        self.context.cut(n)
        self.rows = n
        return out


@dataclass
class Decoded:
    """A reply, and what it cost."""

    tokens: list[int]
    verified: int
    """Tokens of it that a verifying pass gave: all but the first."""
    passes: int


def decode(target: Target, drafter: Drafter, context: list[int], limit: int, k: int) -> Decoded:
    """The target's greedy reply of at most limit tokens, up to the first special token. Each pass of the target verifies k proposals and adds a token of its own."""
    cache = target.cache(1, len(context) + limit + k + 1)
    aux, last = target.forward(torch.tensor([context]), cache=cache)
    tokens = [*context, int(target.logits(last[:, -1]).argmax())]
    passes = 0
    while len(tokens) < len(context) + limit and tokens[-1] < BOS:
        proposed = drafter.propose(tokens, aux, k)
        ids = torch.tensor([[tokens[-1], *proposed]])
        states, last = target.forward(ids, torch.arange(len(tokens) - 1, len(tokens) + k)[None], cache)
        chosen = target.logits(last)[0].argmax(dim=-1).tolist()
        accepted = next((i for i in range(k) if proposed[i] != chosen[i]), k)
        new = chosen[: accepted + 1]  # the accepted proposals are what the target chose
        new = new[: next((i + 1 for i, token in enumerate(new) if token >= BOS), len(new))]
        tokens += new[: len(context) + limit - len(tokens)]
        aux = torch.cat([aux, states[:, : accepted + 1]], dim=1)
        passes += 1
    reply = tokens[len(context) :]
    return Decoded(reply, len(reply) - 1, passes)
