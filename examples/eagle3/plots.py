"""Pictures of a training, from what report.json holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402 - the backend comes first

BLUES = ("#0b3c5d", "#1f6fa3", "#4ca3d4", "#9ccbe8", "#c4dff0", "#d9e9f3")  # training-time-test steps, the first darkest
MARK, MUTED = "#d1741d", "#8a8f94"


def draw(report: dict[str, Any], folder: Path) -> list[str]:
    """Writes the PNGs of a report into folder and returns their names."""
    pictures = {"loss.png": loss, "agreement.png": agreement, "accepted.png": accepted}
    if report["stream"]:
        pictures["stream.png"] = stream
    for name, picture in pictures.items():
        figure, axes = plt.subplots(figsize=(6.6, 3.7), dpi=110)
        picture(report, axes)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        figure.tight_layout()
        figure.savefig(folder / name, metadata={"Software": None})
        plt.close(figure)
    return list(pictures)


def shade(k: int) -> str:
    return BLUES[min(k, len(BLUES) - 1)]


def smooth(values: list[float], over: int) -> list[float]:
    """Means over the last so many values."""
    return [sum(values[max(0, i + 1 - over) : i + 1]) / len(values[max(0, i + 1 - over) : i + 1]) for i in range(len(values))]


def loss(report: dict[str, Any], axes: Any) -> None:
    steps = range(1, len(report["losses"]) + 1)
    over = max(1, len(steps) // 40)
    for k in range(report["options"]["ttt"]):
        axes.plot(steps, smooth([each[k] for each in report["losses"]], over), color=shade(k), label=f"{k + 1}")
    axes.set(xlabel="optimizer step", ylabel="cross entropy, nats a token", title=f"Training loss, mean over {over} steps" if over > 1 else "Training loss")
    axes.legend(title="training-time-test step", frameon=False, ncol=2)


def agreement(report: dict[str, Any], axes: Any) -> None:
    steps = [int(s) for s in report["agreement_over_steps"]]
    for k in range(report["options"]["ttt"]):
        axes.plot(steps, [each[k] for each in report["agreement_over_steps"].values()], color=shade(k), marker="o", markersize=3, label=f"step {k + 1} of the test")
    axes.axhline(report["agreement"]["unigram"], color=MARK, linestyle="--", label="unigram")
    axes.axhline(report["agreement"]["untrained"][0], color=MUTED, linestyle=":", label="untrained")
    axes.set(xlabel="optimizer step", ylabel="same first choice as the target", title="Agreement on held-out prompts", ylim=(0, None))
    axes.legend(frameon=False, ncol=2)


def accepted(report: dict[str, Any], axes: Any) -> None:
    names = ["untrained", "unigram", "trained"]
    values = [report["accepted_length"][name] for name in names]
    bars = axes.bar(names, values, color=[MUTED, MARK, BLUES[1]], width=0.6)
    axes.bar_label(bars, [f"{v:.2f}" for v in values], padding=3)
    most = report["options"]["chain"] + 1
    axes.axhline(1, color=MUTED, linewidth=0.8, zorder=0)
    axes.set(ylabel="tokens a pass of the target", title=f"Mean accepted length on held-out prompts (1 to {most})", ylim=(0, max(most, *values) * 1.05))


def stream(report: dict[str, Any], axes: Any) -> None:
    steps = range(1, len(report["seconds"]["wait"]) + 1)
    waited = [sum(report["seconds"]["wait"][:i]) for i in steps]
    trained = [sum(report["seconds"]["step"][:i]) for i in steps]
    seen = report["stream"]["stats"]
    axes.plot(steps, trained, color=BLUES[1], label="trainer steps")
    axes.plot(steps, waited, color=MARK, label="trainer waits for samples")
    axes.plot([s["step"] for s in seen], [s["producer_paused_seconds"] for s in seen], color=MUTED, linestyle="--", label="producer waits for room")
    axes.set(xlabel="optimizer step", ylabel="seconds, added up", title=f"The stream. Bottleneck: {report['stream']['bottleneck'].partition(':')[0]}", ylim=(0, None))
    axes.legend(frameon=False)
