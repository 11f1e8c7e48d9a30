"""The draft: one decoder layer over the target's fused aux states, trained on its own outputs, and its checkpoint.

Parameter names are those of the checkpoints that vLLM and SGLang load, so the state dict is the file.
Shapes: B rows, S tokens, H hidden, A query heads, K key/value heads, D head_dim, V vocabulary.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .prompts import shift
from .target import BOS, END, PAD, Config, Target, linear, rms_norm, rotary, rotate


class Linear(nn.Linear):
    """A matrix without a bias."""

    def __init__(self, width: int, height: int) -> None:
        super().__init__(width, height, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight)


class Norm(nn.Module):
    """RMSNorm over H."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class Context(Protocol):
    """What a token attends to: takes q, k, v [B, A, S, D] of the new tokens and returns what was mixed, [B, A, S, D]."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor: ...


class Attention(nn.Module):
    """Grouped-query attention whose input is an embedding beside a hidden state, 2H wide."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.config = c
        self.q_proj = Linear(2 * c.hidden_size, c.num_attention_heads * c.head_dim)
        self.k_proj = Linear(2 * c.hidden_size, c.num_key_value_heads * c.head_dim)
        self.v_proj = Linear(2 * c.hidden_size, c.num_key_value_heads * c.head_dim)
        self.o_proj = Linear(c.num_attention_heads * c.head_dim, c.hidden_size)

    def forward(self, x: Tensor, positions: Tensor, context: Context) -> Tensor:
        """x [B, S, 2H] at positions [B, S] -> [B, S, H]."""
        c, (b, s, _) = self.config, x.shape
        q, k, v = (p(x).view(b, s, -1, c.head_dim).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        angles = rotary(positions, c.head_dim, c.rope_theta, x.dtype)
        q, k = rotate(q, angles), rotate(k, angles)
        k, v = (t.repeat_interleave(c.num_attention_heads // c.num_key_value_heads, dim=1) for t in (k, v))
        return self.o_proj(context(q, k, v).transpose(1, 2).reshape(b, s, -1))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.gate_proj = Linear(c.hidden_size, c.intermediate_size)
        self.up_proj = Linear(c.hidden_size, c.intermediate_size)
        self.down_proj = Linear(c.intermediate_size, c.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """The decoder layer."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.input_layernorm = Norm(c.hidden_size, c.rms_norm_eps)
        self.hidden_norm = Norm(c.hidden_size, c.rms_norm_eps)
        self.post_attention_layernorm = Norm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = Attention(c)
        self.mlp = MLP(c)

    def forward(self, embedded: Tensor, hidden: Tensor, positions: Tensor, context: Context) -> Tensor:
        """Two of [B, S, H] -> [B, S, H]."""
        both = torch.cat([self.input_layernorm(embedded), self.hidden_norm(hidden)], dim=-1)
        hidden = hidden + self.self_attn(both, positions, context)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Draft(nn.Module):
    """Row t knows the target's states at position t and the token at t + 1, and predicts the one at t + 2.

    The embedding is the target's and stays as it is; the head is the draft's own and begins as the target's.
    """

    d2t: Tensor
    t2d: Tensor

    def __init__(self, target: Target, seed: int) -> None:
        super().__init__()
        self.config = c = target.config
        v, h = target.embedding.shape
        self.fc = Linear(len(target.aux_layers) * h, h)
        self.midlayer = Layer(c)
        self.norm = Norm(h, c.rms_norm_eps)
        self.lm_head = Linear(h, v)
        self.embed_tokens = nn.Embedding(v, h)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for p in self.parameters():
                if p.dim() == 2:
                    p.copy_(torch.randn(p.shape, generator=generator) / math.sqrt(p.shape[1]))
            self.lm_head.weight.copy_(target.embedding)
            self.embed_tokens.weight.copy_(target.embedding)
        self.embed_tokens.weight.requires_grad_(False)
        # The draft's vocabulary is the target's: id i of the draft is id i + d2t[i] of the target.
        self.register_buffer("d2t", torch.zeros(v, dtype=torch.int64))
        self.register_buffer("t2d", torch.ones(v, dtype=torch.bool))

    def step(self, hidden: Tensor, ids: Tensor, positions: Tensor, context: Context) -> Tensor:
        """hidden [B, S, H] and the ids [B, S] that follow -> the next hidden [B, S, H]; the first hidden is fc of the aux states."""
        return self.midlayer(self.embed_tokens(ids), hidden, positions, context)

    def logits(self, hidden: Tensor) -> Tensor:
        """[B, S, H] -> [B, S, V]."""
        return self.lm_head(self.norm(hidden))


class TrainingContext:
    """At step k of training row t stands for the token at t + k: it sees the rows up to t of the first step, made from true states, and of later steps its own row."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.keys.append(k)
        self.values.append(v)
        s, scale = q.shape[2], 1 / math.sqrt(q.shape[3])
        later = torch.full((s, s), -math.inf).triu(1)
        scores = [q @ self.keys[0].transpose(-1, -2) * scale + later]
        scores += [(q * key).sum(-1, keepdim=True) * scale for key in self.keys[1:]]
        weights = torch.cat(scores, dim=-1).softmax(dim=-1)
        mixed = weights[..., :s] @ self.values[0]
        for i, value in enumerate(self.values[1:]):
            mixed = mixed + weights[..., s + i, None] * value
        return mixed


def training_test(draft: Draft, batch: Mapping[str, Tensor], steps: int) -> Iterator[Tensor]:
    """EAGLE-3's training-time test: yields the logits [B, S, V] of every step; the draft's own hidden states go into the next one.

    batch is shifted: row t has the target's states at t and the token at t + 1. The logits of step k at row t are for the token at t + 2 + k.
    """
    b, s = batch["input_ids"].shape
    hidden, context = draft.fc(batch["aux_hidden_states"]), TrainingContext()
    for k in range(steps):
        positions = torch.arange(k, k + s).expand(b, s)
        hidden = draft.step(hidden, shift(batch["input_ids"], k), positions, context)
        yield draft.logits(hidden)


def losses(draft: Draft, target: Target, batch: Mapping[str, Tensor], steps: int) -> Tensor:
    """The cross entropy [steps] between the target's distribution and the draft's, mean over the supervised rows of each step."""
    wanted = target.logits(batch["last_hidden_states"]).softmax(dim=-1)
    out = []
    for k, logits in enumerate(training_test(draft, batch, steps)):
        mask = shift(batch["loss_mask"], k).to(logits.dtype)
        each = -(shift(wanted, k) * logits.log_softmax(dim=-1)).sum(dim=-1)
        out.append((each * mask).sum() / mask.sum().clamp(min=1))
    return torch.stack(out)


@torch.no_grad()
def agreement(draft: Draft, target: Target, batches: list[dict[str, Tensor]], steps: int) -> list[float]:
    """How often, at each step, the draft's first choice is the target's, over the supervised rows."""
    same, of = torch.zeros(steps), torch.zeros(steps)
    for batch in batches:
        choice = target.logits(batch["last_hidden_states"]).argmax(dim=-1)
        for k, logits in enumerate(training_test(draft, batch, steps)):
            mask = shift(batch["loss_mask"], k).bool()
            same[k] += (logits.argmax(dim=-1) == shift(choice, k))[mask].sum()
            of[k] += mask.sum()
    return (same / of).tolist()


def save(draft: Draft, folder: Path) -> None:
    """Writes config.json and model.safetensors (float32)."""
    from safetensors.torch import save_file

    c = draft.config
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "vocab_size": c.vocab_size,
        "draft_vocab_size": draft.lm_head.weight.shape[0],
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": c.num_attention_heads,
        "num_key_value_heads": c.num_key_value_heads,
        "head_dim": c.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": c.rms_norm_eps,
        "rope_theta": c.rope_theta,
        "rope_scaling": None,
        "max_position_embeddings": c.max_position_embeddings,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": BOS,
        "eos_token_id": END,
        "pad_token_id": PAD,
        "torch_dtype": "float32",
        "use_cache": True,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    tensors = {name: t.detach().clone().contiguous() for name, t in draft.state_dict().items()}
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})


def load(target: Target, folder: Path) -> Draft:
    """Reads what save wrote."""
    from safetensors.torch import load_file

    draft = Draft(target, seed=0)
    draft.load_state_dict(load_file(str(folder / "model.safetensors")))
    return draft
