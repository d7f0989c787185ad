"""Repeats the runs of the gallery that need no GPU, and checks their results: `make gallery`.

python -m docs.gallery.run [--only NAME] [--draw]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
LIMIT_S = 3600
"""Wall time of one run."""
LAST = 4
"""Steps over which the training reward is averaged where a run has no held-out reward."""


@dataclass(frozen=True, slots=True)
class Card:
    """One run of the gallery.

    Attributes:
        name: Name of the card and of its picture.
        target: Target of the Makefile that starts the run.
        run: Directory of the run in `runs/`.
        goal: Least final reward.
    """

    name: str
    target: str
    run: str
    goal: float


CARDS = (
    Card("words", "demo", "words", 0.9),
    Card("demo", "demo-tiny", "demo", 0.85),
    Card("search", "demo-search", "demo-search", 0.85),
    Card("passages", "demo-passages", "small-search", 0.75),
    Card("stories", "demo-stories", "small-calculator", 0.6),
    Card("service", "demo-service", "demo-service", 0.75),
    Card("shell", "demo-shell", "demo-shell", 0.75),
    Card("online", "demo-online", "online", 0.8),
)


def rows_of(card: Card) -> list[dict[str, Any]]:
    """Returns the lines of the run's metrics.jsonl."""
    path = ROOT / "runs" / card.run / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def final(rows: list[dict[str, Any]]) -> float:
    """Returns the last held-out reward, else the mean training reward of the last steps.

    Raises:
        ValueError: There are no steps.
    """
    held_out = [row["eval/reward"] for row in rows if "eval/reward" in row]
    training = [row["reward/mean"] for row in rows if "reward/mean" in row][-LAST:]
    if not training:
        raise ValueError("metrics.jsonl has no training step")
    return float(held_out[-1] if held_out else sum(training) / len(training))


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Writes the curve of a run as a small picture."""
    figure, axes = plt.subplots(figsize=(4.2, 2.4))
    lines = [
        ("reward/mean", "-", "training"),
        ("eval/reward", "D--", "held out"),
        ("eval/reward_unseen_wordings", "s:", "new wordings"),
    ]
    for key, style, label in lines:
        points = [(row["step"], row[key]) for row in rows if key in row]
        if points:
            axes.plot(*zip(*points, strict=True), style, label=label, markersize=4)
    axes.set(xlabel="step", ylabel="mean reward", ylim=(0, 1.02))
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=90, bbox_inches="tight")
    plt.close(figure)


def repeat(card: Card) -> None:
    """Starts the run of a card, with its output on standard output.

    Raises:
        CalledProcessError: The run failed.
        TimeoutExpired: It did not end in time.
    """
    subprocess.run(["make", card.target], cwd=ROOT, check=True, timeout=LIMIT_S)


def check(card: Card, *, only_draw: bool) -> bool:
    """Repeats a run, draws its curve and compares its final reward; returns whether it reached the goal."""
    began = time.monotonic()
    try:
        if not only_draw:
            repeat(card)
        rows = rows_of(card)
        reward = final(rows)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        print(f"{card.name:<10} failed: {error}", flush=True)
        return False
    draw(rows, FOLDER / f"{card.name}.png")
    reached = reward >= card.goal
    outcome = "ok" if reached else "TOO LOW"
    seconds = time.monotonic() - began
    print(f"{card.name:<10} {seconds:5.0f} s  reward {reward:.3f}, goal {card.goal:g}  {outcome}", flush=True)
    return reached


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    names = [card.name for card in CARDS]
    parser.add_argument("--only", choices=names, metavar="NAME", help=f"one run: {', '.join(names)}")
    parser.add_argument("--draw", action="store_true", help="use the files of finished runs in runs/")
    arguments = parser.parse_args()
    chosen = [card for card in CARDS if arguments.only in (None, card.name)]
    reached = [check(card, only_draw=arguments.draw) for card in chosen]
    return 0 if all(reached) else 1


if __name__ == "__main__":
    sys.exit(main())
