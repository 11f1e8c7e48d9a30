"""A causal language model and a tokenizer of the structure that transformers' have, so that its producer is tested without that package."""

from __future__ import annotations

import math
import re
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

VOCAB = 160
SPECIALS = {"<bos>": 128, "<system>": 129, "<user>": 130, "<assistant>": 131, "<end>": 132}


class Norm(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(1 + 0.2 * torch.randn(hidden))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class Layer(nn.Module):
    """Causal attention with one head, and a feed-forward layer. Returns a tuple, as transformers' layers did for years."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.up, self.down = Norm(hidden), nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, 2 * hidden), nn.Linear(2 * hidden, hidden)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor]:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        weights = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]) + mask).softmax(-1)
        x = x + self.drop(weights @ v)
        return (x + self.down(torch.relu(self.up(self.norm(x)))),)


class Base(nn.Module):
    def __init__(self, hidden: int, layers: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, hidden)
        self.layers = nn.ModuleList(Layer(hidden) for _ in range(layers))
        self.norm = Norm(hidden)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, use_cache: bool = True, output_hidden_states: bool = False) -> Any:
        assert not use_cache
        s = input_ids.shape[1]
        causal = torch.full((s, s), -math.inf).triu(1).to(self.norm.weight)
        mask = causal + torch.zeros_like(attention_mask, dtype=causal.dtype).masked_fill(attention_mask == 0, torch.finfo(causal.dtype).min)[:, None]
        x = self.embed_tokens(input_ids)
        states = []
        for layer in self.layers:
            states.append(x)
            (x,) = layer(x, mask)
        x = self.norm(x)
        return SimpleNamespace(last_hidden_state=x, hidden_states=(*states, x) if output_hidden_states else None)


class CausalLM(nn.Module):
    """model.layers, model.norm, lm_head and config, as LlamaForCausalLM has them."""

    def __init__(self, hidden: int = 16, layers: int = 8, seed: int = 1, positions: int = 64) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.config = SimpleNamespace(max_position_embeddings=positions, rope_theta=10000.0, _name_or_path="")
        self.model = Base(hidden, layers)
        self.lm_head = nn.Linear(hidden, VOCAB, bias=False)
        self.eval()

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embed_tokens

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, use_cache: bool = True, output_hidden_states: bool = False) -> Any:
        out = self.model(input_ids, attention_mask, use_cache=use_cache, output_hidden_states=output_hidden_states)
        return SimpleNamespace(logits=self.lm_head(out.last_hidden_state), hidden_states=out.hidden_states)


class Tokenizer:
    """A token a character, and one for each special token. The template is <bos>, then <role>content<end> for each turn."""

    chat_template: str | None = "<bos>(<role>content<end>)*"
    special_tokens_map = {"bos_token": "<bos>"}
    thinks = False  # a template that writes an answer's thoughts in the last turn only

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        parts = re.findall(r"<(?:bos|system|user|assistant|end)>|.", text, re.DOTALL)
        ids = [SPECIALS[p] if p in SPECIALS else ord(p) % 128 for p in parts]
        return {"input_ids": [SPECIALS["<bos>"], *ids] if add_special_tokens else ids}

    def get_vocab(self) -> dict[str, int]:
        return {chr(i): i for i in range(128)} | SPECIALS

    def apply_chat_template(self, messages: list[dict[str, str]], tokenize: bool = True, add_generation_prompt: bool = False) -> str:
        assert not tokenize
        text = "<bos>"
        for i, m in enumerate(messages):
            if m["role"] not in ("system", "user", "assistant"):
                raise ValueError(f"unknown role {m['role']}")
            content = m["content"]
            if self.thinks and i < len(messages) - 1:
                content = re.sub(r"\(.*?\)", "", content)
            text += f"<{m['role']}>{content}<end>"
        return text + "<assistant>" * add_generation_prompt
