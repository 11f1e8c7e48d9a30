"""Tokens, the chat template, and conversations made of a novel's paragraphs."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

BOS, EOS, PAD, SYSTEM, USER, ASSISTANT, END, UNUSED = range(256, 264)
ROLES = {"system": SYSTEM, "user": USER, "assistant": ASSISTANT}
VOCAB_SIZE = 264

SYSTEMS = [
    "Continue the story.",
    "Answer as a character of the novel.",
    "Write on in the manner of Jane Austen.",
    "You are a novelist of good sense.",
    "Be brief and civil.",
]

Turn = dict[str, str]


def encode(turns: list[Turn]) -> list[int]:
    """<bos>, then for every turn its role, the UTF-8 bytes of its content and <end>."""
    ids = [BOS]
    for turn in turns:
        ids += [ROLES[turn["role"]], *turn["content"].encode(), END]
    return ids


def sentences(paragraph: str) -> list[str]:
    """Splits after . ! ? (and a closing quote) before a capital; titles do not end one."""
    parts = re.split(r'(?<=[a-z,;][.!?])\s+(?=["A-Z(])|(?<=[.!?]["\'])\s+(?=["A-Z(])', paragraph)
    out: list[str] = []
    for part in parts:
        if out and re.search(r"\b(Mr|Mrs|Dr|Esq|St|Rev|Capt|Col|Messrs)\.$", out[-1]):
            out[-1] += " " + part
        else:
            out.append(part)
    return out


def spoken(paragraph: str) -> str:
    """What stands between a paragraph's quotation marks; "" when that is little or odd."""
    marks = paragraph.count('"')
    if not paragraph.startswith('"') or marks % 2:
        return ""
    speech = " ".join(s.strip() for s in re.findall(r'"([^"]+)"', paragraph))
    return re.sub(r"[,;]$", ".", speech) if len(speech) >= 4 else ""


class Novel:
    """One novel's paragraphs, ready to be drawn from."""

    def __init__(self, paragraphs: list[str]) -> None:
        self.paragraphs = paragraphs
        self.sentences = [s for p in paragraphs for s in sentences(p)]
        self.spoken = [spoken(p) for p in paragraphs]
        self.speech = [i for i in range(len(paragraphs) - 1) if self.spoken[i] and self.spoken[i + 1]]
        self.long = [p for p in paragraphs if len(sentences(p)) >= 2]
        self.text = "\n".join(paragraphs).encode()
        self.starts = [0] + [m.end() for m in re.finditer(rb"\n|(?<=[a-z][.!?]) ", self.text)]

    def conversation(self, rng: random.Random, turn_bytes: int = 160) -> list[Turn]:
        """Turns that follow the text: dialogue, sentence and sequel, or halves of a paragraph."""
        kind = rng.random()
        if kind < 0.4 and self.speech:
            contents = self._dialogue(rng)
        elif kind < 0.8:
            contents = self._sequel(rng, turn_bytes)
        else:
            parts = sentences(rng.choice(self.long))
            cut = rng.randint(1, len(parts) - 1)
            contents = [" ".join(parts[:cut]), " ".join(parts[cut:])]
        turns = [{"role": ("user", "assistant")[i % 2], "content": c} for i, c in enumerate(contents)]
        if rng.random() < 0.12:
            turns.insert(0, {"role": "system", "content": rng.choice(SYSTEMS)})
        return turns

    def _dialogue(self, rng: random.Random) -> list[str]:
        start = rng.choice(self.speech)
        contents: list[str] = []
        for speech in self.spoken[start : start + 2 * rng.randint(1, 3)]:
            if not speech:
                break
            contents.append(speech)
        return contents[: len(contents) // 2 * 2]

    def _sequel(self, rng: random.Random, turn_bytes: int) -> list[str]:
        at = rng.randrange(max(1, len(self.sentences) - 12))
        contents: list[str] = []
        for _ in range(rng.choice([2, 2, 2, 4])):
            want, turn = rng.randint(20, turn_bytes), ""
            while at < len(self.sentences) and (not turn or len(turn) + len(self.sentences[at]) < want):
                turn = f"{turn} {self.sentences[at]}".strip()
                at += 1
            if turn:
                contents.append(turn)
        return contents[: len(contents) // 2 * 2]


class Corpus:
    """The train or valid part of all novels."""

    def __init__(self, path: Path, part: str) -> None:
        raw = json.loads(Path(path).read_text())
        self.novels = {name: Novel(parts[part]) for name, parts in raw["novels"].items()}
        self.weights = [len(n.text) for n in self.novels.values()]

    def draw(self, rng: random.Random) -> Novel:
        """A novel, with probability in proportion to its size."""
        return rng.choices(list(self.novels.values()), self.weights)[0]

    def plain_row(self, rng: random.Random, size: int) -> list[int]:
        """size tokens: passages from a sentence's start; a quarter of them end at a paragraph."""
        row: list[int] = []
        while len(row) < size:
            novel = self.draw(rng)
            start = rng.choice(novel.starts)
            stop: int | None = None
            if rng.random() < 0.25:
                stop = novel.text.find(b"\n", start + 40)
                stop = stop if stop > 0 else None
            passage = novel.text[start : min(stop or start + size, start + size)]
            row += [BOS, *passage] + ([EOS] if stop else [])
        return row[:size]

    def chat_row(self, rng: random.Random, size: int) -> list[int]:
        """size tokens: conversations one after the other, the last one cut."""
        row: list[int] = []
        while len(row) < size:
            turns = self.draw(rng).conversation(rng)
            if any(t["role"] == "assistant" for t in turns):
                row += encode(turns)
        return row[:size]

    def batch(self, rng: random.Random, rows: int, size: int, plain: float = 0.6) -> list[list[int]]:
        """rows x size tokens, each row plain with the given probability."""
        return [(self.plain_row if rng.random() < plain else self.chat_row)(rng, size) for _ in range(rows)]
