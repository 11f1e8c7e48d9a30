"""Trains a small EAGLE-3 draft from a live stream of the Llama that ships with the project.

    python examples/train_eagle3.py                  # starts a service and a producer, trains, evaluates, draws
    python examples/train_eagle3.py --colocated      # the same draft without the stream: the trainer runs the target itself

A producer, which is a process of its own, lets the target write replies to prompts and streams its hidden states; the trainer takes them in batches and never runs
the target for training, only its frozen head. Needs torch 1.13 or newer, safetensors, matplotlib and the package sluice. See docs/train_eagle3.md.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.util
import itertools
import json
import math
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import sluice
from eagle3 import draft as drafts
from eagle3.prompts import Row, collate, contexts, rows, sample, sample_bytes
from eagle3.speculate import Chain, Drafter, Unigram, decode
from eagle3.target import ONEDNN, Target
from sluice.loader import Loader

ROOT = Path(__file__).resolve().parents[1]
DECAY = 0.8  # weight of a training-time-test step's loss against the one before it
VERSION = "austen"


def options(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    p = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    p.add_argument("--colocated", action="store_true", help="run the target in the trainer instead of streaming")
    p.add_argument("--out", type=Path, default=Path("eagle3-out"), help="folder for the draft, report.json and the pictures")
    p.add_argument("--steps", type=int, default=400, help="optimizer steps")
    p.add_argument("--batch", type=int, default=4, help="samples a step")
    p.add_argument("--ttt", type=int, default=4, help="training-time-test steps")
    p.add_argument("--chain", type=int, default=4, help="tokens that the draft proposes a pass of the target")
    p.add_argument("--lr", type=float, default=3e-3, help="highest learning rate")
    p.add_argument("--decode", type=int, default=64, help="tokens to decode for each held-out prompt at the end")
    p.add_argument("--reply", type=int, default=128, help="tokens of a reply at most")
    p.add_argument("--context", type=int, default=128, help="tokens of a prompt at most; longer ones are left out")
    p.add_argument("--evals", type=int, default=8, help="evaluations while it trains")
    p.add_argument("--held-out", type=int, default=16, help="held-out prompts to evaluate on")
    p.add_argument("--seed", type=int, default=1, help="of prompts, replies and the draft's first weights")
    p.add_argument("--threads", type=int, default=1, help="of torch, in each process")
    p.add_argument("--max-bytes", type=int, default=32 << 20, help="cap of the stream's store")
    p.add_argument("--service", help="URL of a service to use instead of one that is started for this run")
    p.add_argument("--run", default="eagle3", help="name of the run, new to the service")
    p.add_argument("--produce", action="store_true", help="be the producer of a run that exists; the trainer starts one so")
    p.add_argument("--model", type=Path, default=ROOT / "target/tinyllama/austen", help="folder of the target")
    p.add_argument("--prompts", type=Path, default=ROOT / "internal/demo/prompts.jsonl", help="conversations, one a line")
    args = p.parse_args(argv)
    for name in ("steps", "batch", "ttt", "chain", "decode", "reply", "context", "evals", "held_out", "threads", "max_bytes"):
        if getattr(args, name) < 1:
            p.error(f"--{name.replace('_', '-')} is {getattr(args, name)}, want 1 or more")
    return args


def need(*packages: str) -> None:
    """Ends the program with a sentence, before it trains for nothing, if one of these is not installed."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(f"train_eagle3.py needs {' and '.join(missing)}: pip install {' '.join(missing)}")


def prompts(args: argparse.Namespace, held_out: bool) -> list[list[int]]:
    """The contexts of one side of the split that are short enough."""
    return [c for c in contexts(args.prompts, held_out) if len(c) <= args.context]


def stream_of_rows(args: argparse.Namespace, target: Target) -> Iterator[Row]:
    """The rows of the whole training, in order. Producer and --colocated take them from here, and so train on the same ones."""
    return itertools.islice(rows(target, prompts(args, held_out=False), args.seed, args.reply), args.steps * args.batch)


def learning_rate(step: int, args: argparse.Namespace) -> float:
    """A linear warm-up, then a cosine down to a tenth."""
    warm = min(20, max(1, args.steps // 10))
    if step < warm:
        return float(args.lr * (step + 1) / warm)
    return float(args.lr * (0.55 + 0.45 * math.cos(math.pi * (step - warm) / max(1, args.steps - warm))))


class Trainer:
    """The draft, its optimizer, and what is written down while it trains."""

    def __init__(self, args: argparse.Namespace, target: Target) -> None:
        self.args, self.target = args, target
        self.draft = drafts.Draft(target, args.seed)
        self.parameters = [p for p in self.draft.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=args.lr, betas=(0.9, 0.95), weight_decay=0.01)
        weights = torch.tensor([DECAY**k for k in range(args.ttt)])
        self.weights = weights / weights.sum()
        self.counts = torch.zeros(target.config.vocab_size, dtype=torch.int64)  # of the tokens that were supervised
        self.losses: list[list[float]] = []
        self.agreement: dict[int, list[float]] = {}
        self.seconds: dict[str, list[float]] = {"wait": [], "step": []}
        held_out = rows(target, prompts(args, held_out=True), args.seed + 1, args.reply)
        samples = [sample(target, next(held_out)) for _ in range(args.held_out)]
        self.held_out = [collate(samples[i : i + 8]) for i in range(0, len(samples), 8)]

    def step(self, batch: Mapping[str, Tensor]) -> None:
        """One optimizer step."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(len(self.losses), self.args)
        each = drafts.losses(self.draft, self.target, batch, self.args.ttt)
        self.optimizer.zero_grad()
        (each * self.weights).sum().backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        self.losses.append(each.tolist())
        self.counts += torch.bincount(batch["input_ids"][batch["loss_mask"].bool()], minlength=len(self.counts))

    def evaluate(self) -> None:
        """Writes down how often the draft agrees with the target on the held-out prompts, now."""
        step = len(self.losses)
        self.agreement[step] = drafts.agreement(self.draft, self.target, self.held_out, self.args.ttt)
        loss = f"loss {sum(self.losses[-1]) / self.args.ttt:.3f}, " if self.losses else ""
        print(f"step {step}: {loss}held-out agreement {' '.join(f'{a:.3f}' for a in self.agreement[step])}", flush=True)

    def train(self, batches: Iterator[Mapping[str, Tensor]], settle: Callable[[], None]) -> None:
        """All steps; settle is called behind each, when the batch has been trained on."""
        every = max(1, self.args.steps // self.args.evals)
        self.evaluate()
        for _ in range(self.args.steps):
            began = time.perf_counter()
            batch = next(batches, None)
            if batch is None:
                raise RuntimeError(f"the batches ended behind step {len(self.losses)} of {self.args.steps}")
            got = time.perf_counter()
            self.step(batch)
            settle()
            self.seconds["wait"].append(got - began)
            self.seconds["step"].append(time.perf_counter() - got)
            if len(self.losses) % every == 0 or len(self.losses) == self.args.steps:
                self.evaluate()


def colocated(args: argparse.Namespace, target: Target) -> Iterator[Mapping[str, Tensor]]:
    """The batches of the stream, made here."""
    waiting = []
    for row in stream_of_rows(args, target):
        waiting.append(sample(target, row))
        if len(waiting) == args.batch:
            yield collate(waiting)
            waiting = []


def produce(args: argparse.Namespace, target: Target) -> None:
    """The producer's process: streams the samples of all rows, and says what each is. Room is waited for before the target runs."""
    weights = hashlib.sha256((args.model / "model.safetensors").read_bytes()).hexdigest()
    attributes = {"shift": "0", "last_norm": "post", "aux_layers": "hf:" + ",".join(map(str, target.aux_layers)), "target": f"sha256:{weights}"}
    parent = os.getppid()
    with sluice.connect(args.service, run=args.run) as run, run.producer("target") as producer:
        for index, row in enumerate(stream_of_rows(args, target)):
            room = producer.reserve(sample_bytes(target, row), abort_when=lambda: os.getppid() != parent)  # a trainer that was killed takes nothing any more
            producer.put(f"{args.run}-{index}", sample(target, row), attributes=attributes, reservation=room)


@contextlib.contextmanager
def producer_process(args: argparse.Namespace, url: str) -> Iterator[subprocess.Popen[bytes]]:
    """Runs the producer beside the trainer, and ends it at the latest with it."""
    command = [sys.executable, str(Path(__file__).resolve()), "--produce", "--service", url]
    for name in ("run", "steps", "batch", "seed", "threads", "reply", "context", "model", "prompts"):
        command += [f"--{name}", str(getattr(args, name))]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)


def streamed(loader: Loader, process: subprocess.Popen[bytes], patience: float = 5.0) -> Iterator[Any]:
    """The loader's batches. A producer that failed while it worked is an error of the loader; one that never came to it is noticed here, after patience in seconds."""
    while True:
        try:
            batch = loader.next(timeout=patience)
        except sluice.WaitTimeoutError:
            if process.poll():
                raise RuntimeError(f"the producer ended with status {process.returncode}") from None
            continue
        if batch is None:
            return
        yield batch


def train_streamed(args: argparse.Namespace, trainer: Trainer) -> dict[str, Any]:
    """Trains from the stream, and returns what was seen of it."""
    seen: list[dict[str, float]] = []
    every = max(1, args.steps // 50)
    with sluice.Client(args.service) if args.service else sluice.local(max_bytes=args.max_bytes) as client:
        run = client.create_run(args.run, algorithm="eagle3", max_bytes=args.max_bytes)
        with run, producer_process(args, client.url) as process, run.loader(batch=args.batch, collate="pad", ack="step") as loader:

            def settle() -> None:
                run.step()
                if len(trainer.losses) % every == 0:
                    seen.append({"step": len(trainer.losses), **run.stats()})

            trainer.train(streamed(loader, process), settle)
            return {"stats": seen, "bottleneck": run.bottleneck(), "service": client.url if args.service else "local"}


def accepted(args: argparse.Namespace, target: Target, drafter: Callable[[], Drafter]) -> tuple[float, list[list[int]]]:
    """Decodes replies to the held-out prompts: tokens that one verifying pass of the target gives on average, and the replies."""
    done = [decode(target, drafter(), context, args.decode, args.chain) for context in prompts(args, held_out=True)[: args.held_out]]
    return sum(d.verified for d in done) / max(1, sum(d.passes for d in done)), [d.tokens for d in done]


def worth(args: argparse.Namespace, trainer: Trainer) -> dict[str, Any]:
    """What the draft is worth on the held-out prompts, beside an untrained one and the most frequent token."""
    target, token = trainer.target, int(trainer.counts.argmax())
    untrained = drafts.Draft(target, args.seed)
    choices = torch.cat([target.logits(b["last_hidden_states"]).argmax(-1)[b["loss_mask"].bool()] for b in trainer.held_out])
    lengths, replies = {}, {}
    drafters: dict[str, Callable[[], Drafter]] = {
        "trained": lambda: Chain(trainer.draft), "untrained": lambda: Chain(untrained), "unigram": lambda: Unigram(token),
    }
    for name, drafter in drafters.items():
        lengths[name], replies[name] = accepted(args, target, drafter)
    return {
        "same_replies": replies["trained"] == replies["untrained"] == replies["unigram"],  # what is proposed must not change what the target says
        "unigram_token": token,
        "agreement": {
            "trained": trainer.agreement[args.steps],
            "untrained": drafts.agreement(untrained, target, trainer.held_out, args.ttt),
            "unigram": float((choices == token).float().mean()),
        },
        "accepted_length": lengths,
        "example": bytes(t for t in replies["trained"][0] if t < 256).decode("utf-8", "replace"),
    }


def digest(draft: drafts.Draft) -> str:
    """SHA-256 of all weights: equal only if every bit is."""
    h = hashlib.sha256()
    for name, t in sorted(draft.state_dict().items()):
        h.update(name.encode())
        h.update(t.contiguous().numpy().tobytes())
    return h.hexdigest()


def cpu_seconds() -> dict[str, float]:
    """Of this process, and of those that it started and that have ended: the producer and the service."""
    others = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {"trainer": time.process_time(), "producer_and_service": others.ru_utime + others.ru_stime}


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Trains, evaluates, writes report.json, the draft and the pictures into --out, and returns the report."""
    args = options(argv)
    began = time.perf_counter()
    need("safetensors", *([] if args.produce else ["matplotlib"]))
    torch.set_num_threads(args.threads)
    target = Target(args.model)
    if args.produce:
        produce(args, target)
        return {}
    from eagle3.plots import draw  # here, so that a producer does without matplotlib

    args.out.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(args, target)
    if args.colocated:
        trainer.train(colocated(args, target), lambda: None)
        stream = None
    else:
        stream = train_streamed(args, trainer)
    trained = time.perf_counter()
    report = {
        "options": {name: str(v) if isinstance(v, Path) else v for name, v in vars(args).items()},
        "torch": torch.__version__,
        "onednn": ONEDNN,
        "losses": trainer.losses,
        "agreement_over_steps": trainer.agreement,
        **worth(args, trainer),
        "stream": stream,
        "seconds": {**trainer.seconds, "training": trained - began, "all": time.perf_counter() - began, "cpu": cpu_seconds()},
        "weights_sha256": digest(trainer.draft),
    }
    drafts.save(trainer.draft, args.out / "draft")
    (args.out / "report.json").write_text(json.dumps(report) + "\n")
    pictures = draw(json.loads(json.dumps(report)), args.out)
    print(summary(report))
    print(f"{args.out}: draft/, report.json, {', '.join(pictures)}")
    return report


def summary(report: dict[str, Any]) -> str:
    """The outcome, for people."""
    s, a, n = report["seconds"], report["agreement"], report["accepted_length"]
    steps, waits = sum(s["step"]), sum(s["wait"])
    trained = " ".join(f"{x:.3f}" for x in a["trained"])
    cpu = ", ".join(f"{seconds:.0f} s {name.replace('_', ' ')}" for name, seconds in s["cpu"].items())
    lines = [
        f"{len(report['losses'])} steps in {s['training']:.0f} s: {steps:.0f} s of training, {waits:.0f} s of waiting; {s['all']:.0f} s in all; CPU: {cpu}",
        f"agreement on held-out prompts: {trained}, untrained {a['untrained'][0]:.3f}, unigram {a['unigram']:.3f}",
        f"mean accepted length: {n['trained']:.2f}, untrained {n['untrained']:.2f}, unigram {n['unigram']:.2f}"
        + ("" if report["same_replies"] else "; BUT THE REPLIES DIFFER, which only a tie of two tokens excuses"),
        f"weights sha256 {report['weights_sha256']}",
    ]
    if report["stream"]:
        lines.insert(1, f"bottleneck: {report['stream']['bottleneck']}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
