"""Trains the byte-level Llama on the prepared corpus and writes a Hugging Face folder.

    python3 train.py --corpus corpus.json --out target/tinyllama/austen --seconds 2500

The learning rate follows the share of the time budget that is spent. The folder is
replaced at every checkpoint; the final one holds bfloat16 weights and their losses.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import shutil
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from conversations import BOS, EOS, PAD, Corpus
from model import Config, Llama, load, save


def loss_of(model: torch.nn.Module, rows: Tensor) -> Tensor:
    """Mean next-token loss in nats over rows [B, S+1]."""
    logits = model(rows[:, :-1]).logits
    return F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


def windows(corpus: Corpus, size: int = 256) -> Tensor:
    """All of the corpus as rows [N, size+1]: <bos>, then size bytes that overlap nowhere."""
    rows: list[list[int]] = []
    for novel in corpus.novels.values():
        for at in range(0, len(novel.text) - size + 1, size):
            rows.append([BOS, *novel.text[at : at + size]])
    return torch.tensor(rows)


@torch.no_grad()
def evaluate(model: torch.nn.Module, rows: Tensor) -> float:
    """Mean loss in nats per token over rows [N, S+1]."""
    total = sum(loss_of(model, part).item() * len(part) for part in rows.split(32))
    return total / len(rows)


def unigram_entropy(corpus: Corpus) -> float:
    """Entropy in nats per byte of the corpus's byte frequencies."""
    counts: Counter = Counter()
    for novel in corpus.novels.values():
        counts.update(novel.text)
    total = sum(counts.values())
    return -sum(n / total * math.log(n / total) for n in counts.values())


def publish(model: Llama, out: Path, card: Path, record: dict[str, Any]) -> None:
    """Writes the folder beside its place, then renames it into it."""
    fresh = out.with_name(out.name + ".new")
    shutil.rmtree(fresh, ignore_errors=True)
    save(model, fresh, torch.bfloat16, bos_token_id=BOS, eos_token_id=EOS, pad_token_id=PAD, byte_tokenizer=True)
    (fresh / "training.json").write_text(json.dumps(record, indent=1) + "\n")
    text = re.sub("@(\\w+)@", lambda m: str(record.get(m[1], "not yet known")), card.read_text())
    (fresh / "README.md").write_text(text)
    old = out.with_name(out.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if out.exists():
        out.rename(old)
    fresh.rename(out)
    shutil.rmtree(old, ignore_errors=True)


def main() -> None:
    """Trains until the time budget is spent."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--card", type=Path, default=Path(__file__).with_name("CARD.md"), help="template of the README")
    parser.add_argument("--seconds", type=float, default=2500)
    parser.add_argument("--tokens", type=int, default=4096, help="tokens in a batch")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--warmup", type=int, default=150, help="steps")
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--state", type=Path, help="file to keep the run in, and to go on from where there is one")
    parser.add_argument("--log-every", type=int, default=100)
    parser.add_argument("--save-every", type=float, default=240, help="seconds")
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)
    corpus, held_out = Corpus(args.corpus, "train"), Corpus(args.corpus, "valid")
    valid = {
        "plain": windows(held_out),
        "chat": torch.tensor(held_out.batch(random.Random(0), 256, 257, plain=0.0)),
    }
    model = Llama(Config())
    model.init_weights()
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": args.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        lr=args.lr,
        betas=(0.9, 0.95),
    )
    raw = json.loads(args.corpus.read_text())
    record: dict[str, Any] = {
        "script": "tools/tinyllama/train.py",
        "text": {"origin": raw["origin"], "bytes": raw["bytes"], "sha256": raw["sha256"]},
        "torch": torch.__version__,
        "parameters": sum(p.numel() for p in model.parameters()),
        "hyperparameters": {
            **{k: v for k, v in vars(args).items() if not isinstance(v, Path)},
            "optimizer": "AdamW, betas 0.9 0.95, decay on matrices only, gradient norm clipped at 1",
            "schedule": "linear warm-up, cosine to 2% over the time budget",
            "lengths": {"256": 0.75, "512": 0.2, "1024": 0.05},
            "mix": {"plain": 0.6, "conversations": 0.4},
        },
        "loss_unit": "nats per byte-token",
        "unigram_entropy": round(unigram_entropy(corpus), 4),
        "losses": [],
    }
    print({k: tuple(v.shape) for k, v in valid.items()}, record["parameters"], record["unigram_entropy"], flush=True)

    step, seen, spent = 0, 0, 0.0
    recent: list[float] = []
    if args.state and args.state.exists():
        state = torch.load(args.state)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        rng.setstate(state["rng"])
        step, seen, spent, record["losses"] = state["progress"]
    begin = time.monotonic() - spent
    saved = time.monotonic()
    while spent < args.seconds:
        fall = 0.02 + 0.49 * (1 + math.cos(math.pi * spent / args.seconds))
        for group in optimizer.param_groups:
            group["lr"] = args.lr * min(fall, (step + 1) / args.warmup)
        size = rng.choices([256, 512, 1024], [0.75, 0.2, 0.05])[0]
        rows = torch.tensor(corpus.batch(rng, max(1, args.tokens // size), size + 1))
        loss = loss_of(model, rows)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step, seen = step + 1, seen + rows.shape[0] * size
        recent.append(loss.item())
        spent = time.monotonic() - begin
        last = spent >= args.seconds
        if step % args.log_every == 0 or last:
            point = {
                "step": step,
                "tokens": seen,
                "seconds": round(spent),
                "train": round(sum(recent) / len(recent), 4),
            }
            recent = []
            if step % (args.log_every * 5) == 0 or last:
                point["valid_plain"] = round(evaluate(model, valid["plain"][::6]), 4)
            record["losses"].append(point)
            print(point, flush=True)
        if time.monotonic() - saved > args.save_every and not last:
            publish(model, args.out, args.card, {**record, "state": "unfinished"})
            if args.state:
                progress = (step, seen, spent, record["losses"])
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "rng": rng.getstate()}
                torch.save({**state, "progress": progress}, args.state)
            saved = time.monotonic()

    record.update(state="finished", steps=step, tokens_seen=seen, seconds=round(spent))
    for name, rows in valid.items():
        record[f"valid_{name}_f32"] = round(evaluate(model, rows), 4)
    publish(model, args.out, args.card, record)
    rounded = load(args.out)
    for name, rows in valid.items():
        record[f"valid_{name}_bf16_weights"] = round(evaluate(rounded, rows), 4)
    record["train_sample_bf16_weights"] = round(
        evaluate(rounded, torch.tensor(corpus.batch(random.Random(0), 256, 257, plain=1.0))), 4
    )
    publish(model, args.out, args.card, record)
    print({k: v for k, v in record.items() if k != "losses"})


if __name__ == "__main__":
    main()
