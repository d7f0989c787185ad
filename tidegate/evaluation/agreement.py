"""Compares a judge's scores with labels that people gave."""

from __future__ import annotations

import asyncio
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tidegate.envs.judge.judge import PART, RewardJudge
from tidegate.errors import ConfigError, RewardError
from tidegate.evaluation.stats import LEVEL, RESAMPLES, wilson
from tidegate.settings.judge import JudgeSettings
from tidegate.trainer.records.judge import ranks, spearman
from tidegate.types import Message, Outcome, Task, Trajectory

KEYS = ("prompt", "output", "label", "answer", "group")
MAX_REASONS = 3
Values = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Labelled:
    """One attempt with the label that a person gave it."""

    task: Task
    trajectory: Trajectory
    label: float
    """From 0 to 1."""
    group: str


def read_labelled(path: Path) -> list[Labelled]:
    """Reads a JSONL file of `{prompt, output, label, answer, group}`; the last two are optional.

    `prompt` and `output` are texts or lists of messages, `label` is a number from 0 to 1 or a bool, and
    attempts of one `group` are compared with each other by a judge that ranks.

    Raises:
        ConfigError: The file cannot be read, has no rows, or a row is invalid.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--gold {path}: {error}") from None
    rows = [_row(line, f"{path}, line {number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not rows:
        raise ConfigError(f"--gold {path}: the file has no rows")
    return rows


def _row(line: str, where: str) -> Labelled:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where}: not JSON: {error}") from None
    if not isinstance(row, dict) or not {"prompt", "output", "label"} <= row.keys() <= set(KEYS):
        raise ConfigError(
            f"{where}: a row is an object with prompt, output and label, and perhaps answer and group"
        )
    label = row["label"]
    if not isinstance(label, int | float) or not 0 <= label <= 1:
        raise ConfigError(f"{where}: label = {label!r} is not a number from 0 to 1")
    prompt, reply = _messages(row["prompt"], "user", where), _messages(row["output"], "assistant", where)
    group = str(row.get("group", ""))
    task = Task(group or json.dumps(row["prompt"]), "labelled", prompt, row.get("answer"))
    output = reply[-1].get("content") if reply else None
    trajectory = Trajectory(
        "", task.id, task.env, "train", Outcome.COMPLETED, [], output=output, messages=[*prompt, *reply]
    )
    return Labelled(task, trajectory, float(label), group)


def _messages(value: Any, role: str, where: str) -> list[Message]:
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if isinstance(value, list) and all(isinstance(message, dict) for message in value):
        return value
    raise ConfigError(f"{where}: {str(value)[:80]!r} is neither a text nor a list of messages")


def agreement(settings: JudgeSettings, rows: Sequence[Labelled], threshold: float) -> dict[str, Any]:
    """Has the judge score each row, or in the kind `ranking` each group.

    Args:
        settings: The judge, with its rubric resolved.
        rows: The labelled attempts.
        threshold: Least score, and least label, that count as good.

    Returns:
        The figures: `rows`, `failed` (rows without a verdict), `failures` (their reasons), `costs`,
        `accuracy` and `confusion` at the threshold, `auc` or `spearman` with their intervals.

    Raises:
        ConfigError: A judge that ranks needs a group of at least two rows.
    """
    if (
        settings.kind == "ranking"
        and max(Counter(row.group for row in rows if row.group).values(), default=0) < 2
    ):
        raise ConfigError('env.judge.kind = "ranking" needs rows with the same group, which it compares')
    scores, costs, reasons = asyncio.run(_asked(settings, rows))
    charged = ("calls", "errors", "prompt_tokens", "completion_tokens")
    judged = [(row, score) for row, score in zip(rows, scores, strict=True) if score is not None]
    figures: dict[str, Any] = {
        "rows": len(rows),
        "failed": len(rows) - len(judged),
        "failures": dict(reasons.most_common(MAX_REASONS)),
        "costs": {name: costs[f"judge/{name}"] for name in charged},
        "level": LEVEL,
    }
    if judged:
        labels = np.array([row.label for row, _ in judged])
        values = np.array([score for _, score in judged])
        groups = [row.group for row, _ in judged] if settings.kind == "ranking" else None
        figures |= compare(labels, values, threshold, groups)
    return figures


async def _asked(
    settings: JudgeSettings, rows: Sequence[Labelled]
) -> tuple[list[float | None], Counter[str], Counter[str]]:
    """Returns each row's score, None without a verdict; the costs; and the failures by reason."""
    judge, costs, reasons = RewardJudge(settings), Counter[str](), Counter[str]()
    scores: list[float | None] = [None] * len(rows)
    members: dict[str, list[int]] = defaultdict(list)
    for number, row in enumerate(rows):
        members[row.group if judge.ranks and row.group else f"\0{number}"].append(number)

    async def ask(numbers: Sequence[int]) -> None:
        asked = [rows[number] for number in numbers]
        try:
            if judge.ranks:
                scored = await judge.rank(asked[0].task, [row.trajectory for row in asked])
            else:
                scored = [await judge.score(asked[0].task, asked[0].trajectory, None)]
        except RewardError as error:
            costs.update(error.metrics)
            reasons[str(error)] += len(numbers)
            return
        for number, one in zip(numbers, scored, strict=True):
            scores[number] = one.parts[PART]
            costs.update(one.metrics)

    try:
        await asyncio.gather(*map(ask, members.values()))
    finally:
        await judge.close()
    return scores, costs, reasons


def compare(
    labels: Values, scores: Values, threshold: float, groups: Sequence[str] | None = None
) -> dict[str, Any]:
    """Returns how scores agree with labels; shape of both: [rows].

    `auc` is the probability that the better of two attempts has the higher score, ties counting half: of any
    two if the labels are 0 and 1, with `groups` of two in the same group. `spearman` is the rank correlation,
    if labels are graded. Figures that are not defined are left out.
    """
    good, said = labels >= threshold, scores >= threshold
    right = int((good == said).sum())
    low, high = wilson(right, len(labels))
    figures: dict[str, Any] = {
        "threshold": threshold,
        "accuracy": {"value": right / len(labels), "low": low, "high": high},
        "confusion": {
            "true_good": int((good & said).sum()),
            "false_good": int((~good & said).sum()),
            "false_bad": int((good & ~said).sum()),
            "true_bad": int((~good & ~said).sum()),
        },
    }
    if groups is not None:
        names = np.unique(np.array(groups), return_inverse=True)[1]
        parts = [np.flatnonzero(names == group) for group in range(names.max() + 1)]
        pairs = np.array([_ordered(labels[part], scores[part]) for part in parts])
        figures |= _estimated("auc", lambda chosen: _ratio(pairs[chosen]), len(parts))
    elif np.isin(labels, (0.0, 1.0)).all():
        figures |= _estimated("auc", lambda chosen: auc(labels[chosen], scores[chosen]), len(labels))
    else:
        correlation: Callable[[Any], float | None] = lambda chosen: spearman(labels[chosen], scores[chosen])  # noqa: E731
        figures |= _estimated("spearman", correlation, len(labels))
    return figures


def auc(labels: Values, scores: Values) -> float | None:
    """Returns the area under the ROC curve (Mann and Whitney 1947); None if all labels are equal."""
    good = labels == 1.0
    number = int(good.sum())
    if number in (0, len(labels)):
        return None
    above = ranks(scores)[good].sum() - number * (number + 1) / 2
    return float(above / (number * (len(labels) - number)))


def _ordered(labels: Values, scores: Values) -> tuple[float, int]:
    """Returns how many pairs the scores order as the labels do, ties counting half, and of how many."""
    better = labels[:, None] > labels[None, :]
    higher = np.sign(scores[:, None] - scores[None, :])[better]
    return float(((higher + 1) / 2).sum()), int(better.sum())


def _ratio(pairs: Values) -> float | None:
    alike, number = pairs.sum(axis=0)
    return float(alike / number) if number else None


def _estimated(name: str, statistic: Callable[[Any], float | None], size: int) -> dict[str, Any]:
    """Returns a figure with the percentile interval of RESAMPLES bootstrap resamples, where it is defined."""
    value = statistic(np.arange(size))
    if value is None:
        return {}
    rng = np.random.default_rng(0)
    drawn: Iterable[float | None] = (statistic(rng.integers(size, size=size)) for _ in range(RESAMPLES))
    tail = 100 * (1 - LEVEL) / 2
    low, high = np.percentile([one for one in drawn if one is not None], [tail, 100 - tail])
    return {name: {"value": value, "low": float(low), "high": float(high)}}


def agreement_lines(figures: dict[str, Any]) -> list[str]:
    """Formats the figures as a table."""
    lines = [f"{figures['rows']} labelled attempts, {figures['failed']} without a verdict"]
    lines += [f"  {number} × {reason}" for reason, number in figures["failures"].items()]
    for name in ("accuracy", "auc", "spearman"):
        if name in figures:
            value, low, high = (figures[name][key] for key in ("value", "low", "high"))
            lines.append(f"{name:<12}{value:>8.3f}   {figures['level']:.0%} interval {low:.3f} to {high:.3f}")
    if (table := figures.get("confusion")) is not None:
        at = f"at {figures['threshold']:g}"
        lines.append(f"{at:<12}{'judged good':>14}{'judged bad':>14}")
        lines.append(f"{'label good':<12}{table['true_good']:>14}{table['false_bad']:>14}")
        lines.append(f"{'label bad':<12}{table['false_good']:>14}{table['true_bad']:>14}")
    costs = figures["costs"]
    lines.append(
        f"{costs['calls']:.0f} calls ({costs['errors']:.0f} failed), "
        f"{costs['prompt_tokens']:.0f} prompt tokens, {costs['completion_tokens']:.0f} completion tokens"
    )
    return lines
