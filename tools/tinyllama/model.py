"""A plain PyTorch Llama: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

Parameter names are those of Hugging Face's ``LlamaForCausalLM``, so a state dict goes
to and comes from a Hugging Face folder unchanged. Shapes below use B batch, S sequence,
H hidden, A attention heads, K key/value heads, D head_dim, I intermediate, V vocabulary.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FUSED = hasattr(F, "scaled_dot_product_attention")
DTYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}


@dataclass
class Config:
    """The fields of a Llama ``config.json`` that change the arithmetic."""

    vocab_size: int = 264
    hidden_size: int = 128
    intermediate_size: int = 352
    num_hidden_layers: int = 8
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 32
    max_position_embeddings: int = 1024
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    tie_word_embeddings: bool = True

    @classmethod
    def load(cls, folder: Path) -> Config:
        """Reads ``folder/config.json``; an absent head_dim is hidden / heads."""
        raw = json.loads((Path(folder) / "config.json").read_text())
        raw.setdefault("head_dim", raw["hidden_size"] // raw["num_attention_heads"])
        return cls(**{k: raw[k] for k in cls.__dataclass_fields__ if k in raw})

    def hugging_face(self, dtype: torch.dtype, **extra: Any) -> dict[str, Any]:
        """The full ``config.json`` as a dict."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            **asdict(self),
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "mlp_bias": False,
            "initializer_range": 0.02,
            "pretraining_tp": 1,
            "rope_scaling": None,
            "use_cache": True,
            "torch_dtype": DTYPES[dtype],
            **extra,
        }


class RMSNorm(nn.Module):
    """Scales the last axis to unit root mean square, then by a learned weight [H]."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] -> [..., H]."""
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


def rotary_tables(position_ids: Tensor, dim: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the rotary angles: [B, S] -> two of [B, 1, S, D]."""
    inverse = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    angles = position_ids.to(torch.float64)[:, None, :, None] * inverse
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates [B, heads, S, D], pairing component i with i + D/2 ("rotate_half")."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


class Attention(nn.Module):
    """Grouped-query attention; query head a reads key/value head a // (A / K)."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.dim = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        self.q_proj = nn.Linear(c.hidden_size, self.heads * self.dim, bias=False)
        self.k_proj = nn.Linear(c.hidden_size, self.kv_heads * self.dim, bias=False)
        self.v_proj = nn.Linear(c.hidden_size, self.kv_heads * self.dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.dim, c.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        """x [B, S, H], mask [B or 1, 1, S, S] added to the scores (none: causal) -> [B, S, H]."""
        b, s, _ = x.shape
        q = self.q_proj(x).view(b, s, self.heads, self.dim).transpose(1, 2)
        k = self.k_proj(x).view(b, s, self.kv_heads, self.dim).transpose(1, 2)
        v = self.v_proj(x).view(b, s, self.kv_heads, self.dim).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        group = self.heads // self.kv_heads
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        if mask is None:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            mixed = ((q @ k.transpose(-1, -2)) / math.sqrt(self.dim) + mask).softmax(dim=-1) @ v
        return self.o_proj(mixed.transpose(1, 2).reshape(b, s, -1))


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, H] -> [B, S, H]."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """One decoder layer: attention and MLP, each behind a norm and beside a residual."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.self_attn = Attention(c)
        self.mlp = MLP(c)
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        """[B, S, H] -> [B, S, H]."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """Embedding, the blocks and the final norm."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(Block(c) for _ in range(c.num_hidden_layers))
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)


@dataclass
class Output:
    """Everything a forward pass can be asked about."""

    hidden: list[Tensor]
    """[B, S, H] each: the embedding, then the output of every block."""
    post: Tensor
    """[B, S, H]: the last block's output after the final norm."""
    logits: Tensor
    """[B, S, V]."""


class Llama(nn.Module):
    """The causal language model."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.config = c
        self.model = Decoder(c)
        if not c.tie_word_embeddings:
            self.lm_head = nn.Linear(c.hidden_size, c.vocab_size, bias=False)

    def init_weights(self, std: float = 0.02) -> None:
        """Normal(0, std), with the projections into the residual stream scaled down."""
        for name, p in self.named_parameters():
            if p.dim() > 1:
                deep = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(p, std=std / math.sqrt(2 * self.config.num_hidden_layers) if deep else std)

    def forward(self, ids: Tensor, mask: Tensor | None = None, position_ids: Tensor | None = None) -> Output:
        """ids [B, S] and a boolean mask [B, S, S] of what may be seen -> Output.

        The default mask is causal (by torch 2's fused attention where there is one) and
        the default positions count from 0.
        """
        c, weight = self.config, self.model.embed_tokens.weight
        s = ids.shape[1]
        if position_ids is None:
            position_ids = torch.arange(s)[None]
        if mask is None and not FUSED:
            mask = torch.ones(s, s, dtype=torch.bool).tril()[None]
        bias = None
        if mask is not None:
            bias = torch.zeros(mask.shape, dtype=weight.dtype)
            bias = bias.masked_fill_(~mask, torch.finfo(weight.dtype).min)[:, None]
        cos, sin = rotary_tables(position_ids, c.head_dim, c.rope_theta, weight.dtype)
        hidden = [self.model.embed_tokens(ids)]
        for block in self.model.layers:
            hidden.append(block(hidden[-1], cos, sin, bias))
        post = self.model.norm(hidden[-1])
        head = weight if c.tie_word_embeddings else self.lm_head.weight
        return Output(hidden, post, F.linear(post, head))


def save(model: Llama, folder: Path, dtype: torch.dtype, **extra: Any) -> None:
    """Writes ``config.json`` and ``model.safetensors`` in dtype into folder."""
    from safetensors.torch import save_file

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(model.config.hugging_face(dtype, **extra), indent=2) + "\n")
    tensors = {k: v.detach().to(dtype).contiguous() for k, v in model.state_dict().items()}
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Llama:
    """Reads a Hugging Face folder, sharded or not, with its weights cast to dtype."""
    from safetensors.torch import load_file

    folder = Path(folder)
    index = folder / "model.safetensors.index.json"
    names = ["model.safetensors"]
    if index.exists():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    tensors: dict[str, Tensor] = {}
    for name in names:
        tensors.update(load_file(str(folder / name)))
    model = Llama(Config.load(folder))
    model.load_state_dict(tensors)
    return model.to(dtype).eval()
