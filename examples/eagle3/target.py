"""The target: a byte-level Llama in plain PyTorch, its tokens, and the replies that it writes.

Shapes: B rows, S tokens, H hidden, A query heads, K key/value heads, D head_dim, V vocabulary.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

BOS, EOS, PAD, SYSTEM, USER, ASSISTANT, END = range(256, 263)
ROLES = {"system": SYSTEM, "user": USER, "assistant": ASSISTANT}


@dataclass(frozen=True)
class Config:
    """The fields of a Llama's config.json that the arithmetic needs."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float


# Debian's torch multiplies with whatever BLAS is installed, and that is the unoptimised reference one unless another was chosen. oneDNN,
# which is part of it, is more than ten times faster there.
ONEDNN = "BLAS_INFO=generic" in torch.__config__.show() and torch.backends.mkldnn.is_available()


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [..., K] times weight [N, K] -> [..., N]."""
    if ONEDNN and x.dtype == torch.float32:
        return torch._C._nn.mkldnn_linear(x.to_mkldnn(), weight, None).to_dense()
    return F.linear(x, weight)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """[..., H] scaled to unit root mean square, then by weight [H]."""
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))


Rotary = tuple[Tensor, Tensor]


def rotary(positions: Tensor, dim: int, theta: float, dtype: torch.dtype) -> Rotary:
    """Cosine and sine of the rotary angles of positions [B, S]: two of [B, 1, S, dim]."""
    angles = positions[:, None, :, None].double() * theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, by: Rotary) -> Tensor:
    """[B, heads, S, D], of which component i is paired with i + D/2."""
    first, second = x.chunk(2, dim=-1)
    return x * by[0] + torch.cat([-second, first], dim=-1) * by[1]


class Cache:
    """Keys and values of every layer, [B, K, size, D] each. A position that is written again forgets what it held, so going back needs no call."""

    def __init__(self, c: Config, rows: int, size: int, dtype: torch.dtype) -> None:
        shape = (rows, c.num_key_value_heads, size, c.head_dim)
        self.keys = [torch.zeros(shape, dtype=dtype) for _ in range(c.num_hidden_layers)]
        self.values = [torch.zeros(shape, dtype=dtype) for _ in range(c.num_hidden_layers)]


class Target:
    """The frozen model. Row t of every output is position t: nothing is shifted here."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        from safetensors.torch import load_file

        raw = json.loads((folder / "config.json").read_text())
        self.config = c = Config(**{name: raw[name] for name in Config.__dataclass_fields__})
        if not raw["tie_word_embeddings"] or not raw.get("byte_tokenizer"):
            raise ValueError(f"{folder}: wants a byte-level Llama with a tied head, such as target/tinyllama/austen")
        weights = {name: t.to(dtype) for name, t in load_file(str(folder / "model.safetensors")).items()}
        self.dtype = dtype
        self.embedding = weights["model.embed_tokens.weight"]  # [V, H], which is the head as well
        self.norm = weights["model.norm.weight"]
        self.aux_layers = (1, c.num_hidden_layers // 2 - 1, c.num_hidden_layers - 4)  # outputs of these layers, counted from 0
        self.layers = [
            {name.split(".", 3)[3]: t for name, t in weights.items() if name.startswith(f"model.layers.{i}.")}
            for i in range(c.num_hidden_layers)
        ]

    def cache(self, rows: int, size: int) -> Cache:
        """Room for size tokens in each of rows."""
        return Cache(self.config, rows, size, self.dtype)

    @torch.no_grad()
    def forward(self, ids: Tensor, positions: Tensor | None = None, cache: Cache | None = None) -> tuple[Tensor, Tensor]:
        """ids [B, S] at positions [B, S] (from 0 on) -> the aux hidden states [B, S, 3H] and the last hidden states after the final norm [B, S, H].

        A token sees what the cache holds at its position and before it; without a cache that is the tokens of ids.
        """
        c = self.config
        b, s = ids.shape
        if positions is None:
            positions = torch.arange(s).expand(b, s)
        if cache is None:
            cache = self.cache(b, s)
        size = int(positions.max()) + 1
        hidden_from = torch.zeros(b, 1, s, size, dtype=self.dtype)
        hidden_from.masked_fill_(torch.arange(size) > positions[:, None, :, None], -math.inf)
        rows, angles = torch.arange(b)[:, None], rotary(positions, c.head_dim, c.rope_theta, self.dtype)
        x, aux = self.embedding[ids], []
        for i, w in enumerate(self.layers):
            normed = rms_norm(x, w["input_layernorm.weight"], c.rms_norm_eps)
            q, k, v = (linear(normed, w[f"self_attn.{part}_proj.weight"]).view(b, s, -1, c.head_dim).transpose(1, 2) for part in "qkv")
            keys, values = cache.keys[i], cache.values[i]
            keys[rows, :, positions] = rotate(k, angles).transpose(1, 2)
            values[rows, :, positions] = v.transpose(1, 2)
            mixed = mix(rotate(q, angles), keys[:, :, :size], values[:, :, :size], hidden_from)
            x = x + linear(mixed, w["self_attn.o_proj.weight"])
            normed = rms_norm(x, w["post_attention_layernorm.weight"], c.rms_norm_eps)
            gated = F.silu(linear(normed, w["mlp.gate_proj.weight"])) * linear(normed, w["mlp.up_proj.weight"])
            x = x + linear(gated, w["mlp.down_proj.weight"])
            if i in self.aux_layers:
                aux.append(x)
        return torch.cat(aux, dim=-1), rms_norm(x, self.norm, c.rms_norm_eps)

    def logits(self, last: Tensor) -> Tensor:
        """The frozen head: last hidden states [..., H] -> [..., V]."""
        return linear(last, self.embedding)

    def replies(self, contexts: list[list[int]], limit: int, generator: torch.Generator) -> list[list[int]]:
        """What the target says after each context, drawn from its own distribution: at most limit tokens, up to the first special token."""
        lengths = torch.tensor([len(context) for context in contexts])
        ids = torch.full((len(contexts), int(lengths.max())), PAD)
        for row, context in zip(ids, contexts, strict=True):
            row[: len(context)] = torch.tensor(context)
        cache = self.cache(len(contexts), ids.shape[1] + limit)
        last = self.forward(ids, cache=cache)[1][torch.arange(len(contexts)), lengths - 1]  # what lies behind a short context is overwritten
        drawn: list[Tensor] = []
        over = torch.zeros(len(contexts), dtype=torch.bool)
        while len(drawn) < limit and not over.all():
            token = torch.multinomial(self.logits(last).softmax(-1), 1, generator=generator)
            drawn.append(token)
            over |= token[:, 0] >= BOS
            last = self.forward(token, (lengths + len(drawn) - 1)[:, None], cache)[1][:, 0]
        out = []
        for row in torch.cat(drawn, dim=1).tolist():
            end = next((i + 1 for i, token in enumerate(row) if token >= BOS), limit)
            out.append(row[:end])
        return out


def mix(q: Tensor, keys: Tensor, values: Tensor, bias: Tensor) -> Tensor:
    """Grouped-query attention: q [B, A, S, D], keys and values [B, K, T, D], bias [B, 1, S, T] -> [B, S, A*D]."""
    b, a, s, d = q.shape
    k = keys.shape[1]
    grouped = q.reshape(b, k, a // k * s, d)  # query head i reads key/value head i // (A / K)
    scores = (grouped @ keys.transpose(-1, -2)).view(b, a, s, -1) / math.sqrt(d) + bias
    mixed = scores.softmax(dim=-1).view(b, k, a // k * s, -1) @ values
    return mixed.view(b, a, s, d).transpose(1, 2).reshape(b, s, a * d)
