"""Makes the demo's conversations from the held-out ends of the novels.

python3 prompts.py --corpus corpus.json --out internal/demo/prompts.jsonl
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
from pathlib import Path

from conversations import Corpus


def tidy(content: str) -> bool:
    """Whether quotation marks open before they close, and nothing is too short to read."""
    stray = content.count('"') % 2 or re.match(r'[^"]*\w[.,!?-]*"', content) or content[0] == "'" or content[-1] == "'"
    return len(content) >= 8 and not stray


def main() -> None:
    """Draws distinct conversations whose contents have 80 to 360 bytes together."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--count", type=int, default=240)
    parser.add_argument("--seed", type=int, default=7)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    corpus = Corpus(args.corpus, "valid")
    lines: list[str] = []
    sizes: list[int] = []
    shapes: list[int] = []
    seen: set[str] = set()
    while len(lines) < args.count:
        # Short ones are wanted more often than long ones; a wish that finds nothing is dropped.
        count = 4 if rng.random() < 0.5 else 2
        limit = min(360, 60 + 40 * count / 2 + rng.expovariate(1 / 90))
        for _ in range(400):
            turns = corpus.draw(rng).conversation(rng, turn_bytes=60 if count == 4 else 130)
            said = [t["content"] for t in turns if t["role"] != "system"]
            size = sum(len(t["content"].encode()) for t in turns)
            fits = max(80, limit - 40) <= size <= limit
            if len(said) == count and fits and all(tidy(s) and s not in seen for s in said):
                break
        else:
            continue
        seen.update(said)
        lines.append(json.dumps({"conversations": turns}, ensure_ascii=False))
        sizes.append(size)
        shapes.append(len(turns))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(
        f"{len(lines)} conversations of {min(sizes)}..{max(sizes)} bytes, mean {statistics.mean(sizes):.0f}, "
        f"turns { ({n: shapes.count(n) for n in sorted(set(shapes))}) }"
    )


if __name__ == "__main__":
    main()
