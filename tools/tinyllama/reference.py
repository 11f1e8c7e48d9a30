"""Writes tiny checkpoints and golden outputs for tests of another Llama forward.

    python3 reference.py --out target/tinyllama/testdata --checkpoint target/tinyllama/austen

Every ``expected-NAME.safetensors`` holds, for the checkpoint NAME:

    input_ids       [B, S] int64
    attention_mask  [B, S] int64, 1 on tokens, 0 on the padding at the right
    hidden_-1       [B, S, H] float32, the embedding's output
    hidden_i        [B, S, H] float32, the output of decoder layer i, before the final norm
    last_pre        [B, S, H] float32, the last layer's output before the final norm
    last_post       [B, S, H] float32, the same after the final norm
    logits          [B, S, V] float32

``expected-NAME-packed.safetensors`` has several documents in a row, each of which sees only
itself, and two more tensors: position_ids [B, S] int64, which restart at every document, and
seq_lens [B, documents] int64, padded with zeros. All outputs are zero at padded positions.
The arithmetic is float64 on the weights as stored; only the results are rounded to float32.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from conversations import PAD, encode
from model import Config, Llama, load, save

TINY = Config(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=128,
    rms_norm_eps=1e-6,
    rope_theta=500000.0,
    tie_word_embeddings=False,
)


def random_llama(seed: int, **changes: Any) -> Llama:
    """A tiny model whose weights are large enough for every operation to matter."""
    model = Llama(replace(TINY, **changes))
    generator = torch.Generator().manual_seed(seed)
    for _, p in sorted(model.named_parameters()):
        noise = torch.randn(p.shape, generator=generator)
        p.data = noise * p.shape[-1] ** -0.5 if p.dim() > 1 else 1 + 0.2 * noise
    return model


def write(model: Llama, folder: Path, dtype: torch.dtype = torch.float32, shards: int = 1) -> None:
    """Saves a Hugging Face folder; head_dim is written only where it must be."""
    save(model, folder, dtype, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    if config["head_dim"] * config["num_attention_heads"] == config["hidden_size"]:
        del config["head_dim"]
        path.write_text(json.dumps(config, indent=2) + "\n")
    if shards == 1:
        return
    (folder / "model.safetensors").unlink()
    tensors = {k: v.detach().to(dtype).contiguous() for k, v in model.state_dict().items()}
    names, weight_map = sorted(tensors), {}
    for i in range(shards):
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        part = names[i::shards]
        save_file({n: tensors[n] for n in part}, str(folder / file), metadata={"format": "pt"})
        weight_map.update({n: file for n in part})
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


@torch.no_grad()
def expect(
    folder: Path,
    file: Path,
    rows: list[list[list[int]]],
    pad: int,
    packed: bool,
    layers: Sequence[int] | None = None,
) -> None:
    """Runs rows (each a list of documents) through the checkpoint in folder; writes file.

    layers are the decoder layers whose outputs are kept (all, and the embedding, if None).
    """
    model = load(folder, torch.float64)
    size = max(sum(map(len, row)) for row in rows)
    shape = (len(rows), size)
    ids = torch.full(shape, pad)
    segment = torch.full(shape, -1)
    positions = torch.zeros(shape, dtype=torch.int64)
    lengths = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int64)
    for b, row in enumerate(rows):
        at = 0
        for d, document in enumerate(row):
            end = at + len(document)
            ids[b, at:end] = torch.tensor(document)
            segment[b, at:end] = d
            positions[b, at:end] = torch.arange(len(document))
            lengths[b, d] = len(document)
            at = end
    mask = (segment[:, :, None] == segment[:, None, :]) & torch.ones(size, size, dtype=torch.bool).tril()
    out = model(ids, mask, positions)
    real = (segment >= 0)[..., None]
    tensors: dict[str, Tensor] = {"input_ids": ids, "attention_mask": real[..., 0].to(torch.int64)}
    if packed:
        tensors.update(position_ids=positions, seq_lens=lengths)
    kept = range(-1, len(out.hidden) - 1) if layers is None else layers
    outputs = {f"hidden_{i}": out.hidden[i + 1] for i in kept}
    outputs.update(last_pre=out.hidden[-1], last_post=out.post, logits=out.logits)
    tensors.update({k: (v * real).to(torch.float32).contiguous() for k, v in outputs.items()})
    save_file(tensors, str(file), metadata={"format": "pt"})
    print(file.name, {k: tuple(v.shape) for k, v in tensors.items()})


def main() -> None:
    """Writes all of the test data."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--checkpoint", type=Path, required=True)
    args = parser.parse_args()

    write(random_llama(1), args.out / "tiny-untied")
    write(random_llama(1), args.out / "tiny-sharded", shards=2)
    write(random_llama(1, tie_word_embeddings=True), args.out / "tiny-f16", torch.float16)
    write(random_llama(1, tie_word_embeddings=True), args.out / "tiny-bf16", torch.bfloat16)
    write(random_llama(2, head_dim=12, num_key_value_heads=1), args.out / "tiny-headdim")

    generator = torch.Generator().manual_seed(3)

    def draw(*sizes: int) -> list[list[int]]:
        return [torch.randint(3, TINY.vocab_size, (n,), generator=generator).tolist() for n in sizes]

    padded = [draw(11), draw(7), draw(1)]
    packed = [draw(5, 1, 6), draw(2, 7)]
    for folder in sorted(p for p in args.out.iterdir() if p.is_dir()):
        expect(folder, args.out / f"expected-{folder.name}.safetensors", padded, 0, packed=False)
    expect(args.out / "tiny-untied", args.out / "expected-tiny-untied-packed.safetensors", packed, 0, packed=True)

    name = args.checkpoint.name
    first = encode([{"role": "user", "content": "Is he rich?"}, {"role": "assistant", "content": "Very rich."}])
    second = encode([{"role": "user", "content": "Sense"}])
    third = [256, *b"It is a truth", 257]
    layers = (1, 3, 4)
    expect(args.checkpoint, args.out / f"expected-{name}.safetensors", [[first], [third]], PAD, False, layers)
    expect(
        args.checkpoint, args.out / f"expected-{name}-packed.safetensors", [[second, third, first]], PAD, True, layers
    )
    for file in args.out.rglob("*.safetensors"):
        file.chmod(0o644)


if __name__ == "__main__":
    main()
