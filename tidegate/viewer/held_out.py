"""Names of a run's held-out rewards: those of the environment's evaluation sets, and those of suites."""

from __future__ import annotations

from collections.abc import Iterable

from tidegate.viewer.formatting import printable

SAMPLED, GREEDY = "eval/reward", "eval/reward_greedy"
SUITE = "suite/"
"""Beginning of the set of a suite's episodes."""


def held_out_names(keys: Iterable[str]) -> dict[str, str]:
    """Returns the held-out rewards among metrics with their names: sampled, greedy, sets, then suites."""
    names = {key: name for key in sorted(set(keys)) if (name := _name(key)) is not None}
    order = {SAMPLED: 0, GREEDY: 1}
    return dict(sorted(names.items(), key=lambda item: (order.get(item[0], 2), item[0].endswith("/reward"))))


def _name(key: str) -> str | None:
    if key == SAMPLED:
        return "held out, sampled"
    if key == GREEDY:
        return "held out, greedy"
    if key.startswith("eval/reward_"):
        return f"held out, {_words(key.removeprefix('eval/reward_'))}"
    if key.startswith("eval/") and key.endswith("/reward") and key.count("/") == 2:
        return f"suite {_words(key.split('/')[1])}"
    return None


def held_out_key(eval_set: str, mode: str) -> str:
    """Returns the metric of the reward of an evaluation's episodes, as the evaluator names it."""
    if eval_set.startswith(SUITE):
        return f"eval/{eval_set.removeprefix(SUITE)}/reward"
    return SAMPLED + (f"_{eval_set}" if eval_set else "") + ("_greedy" if mode == "greedy" else "")


def _words(name: str) -> str:
    return printable(name).replace("_", " ")


def episodes_key(key: str) -> str:
    """Returns the metric with the number of episodes of a held-out reward."""
    head, _, last = key.rpartition("/")
    return f"{head}/{last.replace('reward', 'episodes', 1)}"
