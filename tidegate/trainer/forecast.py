"""Predicts how long a run's steps and evaluations sample, from a short measurement of its engines."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterator, Mapping, Sequence

import aiohttp

from tidegate.config import Settings
from tidegate.errors import EngineError
from tidegate.settings.evaluation import EvalSettings
from tidegate.trainer.admission.pace import SHARE
from tidegate.trainer.publish.engine_control import EngineControl
from tidegate.types import Task

TOKENS = 8
"""Tokens of a reply of the measurement."""
SECONDS = 2.0
"""Intended duration of the measurement."""
LIMIT_S = 30.0
LONG_STEP_S = 600.0
"""Seconds of sampling from which a step is called long."""


async def measure_rate(urls: Sequence[str], episodes: int) -> float:
    """Returns the tokens per second that engines sample together; 0 if one does not respond.

    Args:
        urls: Addresses of the engines.
        episodes: Number of episodes that run at a time; of slow engines fewer replies are requested.
    """
    try:
        async with asyncio.timeout(LIMIT_S), aiohttp.ClientSession() as http:
            engines = [EngineControl(url, http) for url in urls]
            await _sample(engines, 1)  # the first one may compile
            single = len(engines) * TOKENS / await _sample(engines, 1)
            number = min(episodes, max(1.0, SECONDS * single / TOKENS))
            each = math.ceil(number / len(engines))
            return each * len(engines) * TOKENS / await _sample(engines, each)
    except (EngineError, TimeoutError):
        return 0.0


async def _sample(engines: Sequence[EngineControl], each: int) -> float:
    """Samples so many replies on each engine; returns the seconds."""
    body = {
        "input_ids": [0], "return_logprob": True, "stream": False,
        "sampling_params": {"max_new_tokens": TOKENS, "temperature": 1.0, "ignore_eos": True},
    }  # fmt: skip
    began = time.monotonic()
    await asyncio.gather(*(engine.call("/generate", body) for engine in engines for _ in range(each)))
    # It is divided by.
    return max(time.monotonic() - began, 1e-6)


def episodes_at_a_time(settings: Settings) -> int:
    """Returns the number of episodes of a batch, as far as they run at the same time."""
    trainer = settings.trainer
    return min(settings.agent.max_concurrency, trainer.groups_per_batch * trainer.group_size)


Sets = Mapping[str, Sequence[Task]]
"""Held-out sets of an environment, as `eval_sets()` returns them."""


def forecast(settings: Settings, rate: float, tokens: float | None = None, sets: Sets | None = None) -> str:
    """Returns a line about steps and evaluations.

    Args:
        settings: Settings of the run.
        rate: Tokens per second that the engines sample together.
        tokens: Mean length of an episode; None: one reply of `sampling.max_tokens`.
        sets: The environment's held-out sets; None: one set with enough tasks.
    """
    trainer, evaluation = settings.trainer, settings.eval
    length = settings.sampling.max_tokens if tokens is None else tokens
    batch = trainer.groups_per_batch * trainer.group_size
    how = f"one reply of sampling.max_tokens = {length}" if tokens is None else f"{length:.0f} tokens"
    parts = [f"{_seconds(batch * length / rate)} of sampling a step ({batch} episodes of {how})"]
    if evaluation.first or evaluation.last:
        number = _evaluation_episodes(evaluation, sets)
        parts.append(f"{_seconds(number * length / rate)} an evaluation ({number} episodes)")
    most = "at most" if tokens is None else "about"
    return f"the engines sample about {rate:.3g} tokens/s: {most} {' and '.join(parts)}"


def advice(
    settings: Settings, rate: float, tokens: float | None = None, sets: Sets | None = None
) -> Iterator[tuple[str, str]]:
    """Yields what engines are too slow for, and which setting to change; arguments as above."""
    trainer, evaluation, agent = settings.trainer, settings.eval, settings.agent
    length = settings.sampling.max_tokens if tokens is None else tokens
    served, wanted = rate * agent.deadline_s / length, episodes_at_a_time(settings)
    if served * SHARE < min(wanted, trainer.group_size):
        enough = math.ceil(trainer.group_size * length / rate / SHARE)
        yield (
            f"within agent.deadline_s = {agent.deadline_s:g} the engines sample {served:.3g} such episodes, "
            f"and a group has {trainer.group_size}",
            f"raise agent.deadline_s to {enough}, or lower sampling.max_tokens",
        )
    seconds = _evaluation_episodes(evaluation, sets) * length / rate
    if (evaluation.first or evaluation.last) and seconds > evaluation.deadline_s:
        in_suites = sum(suite.tasks for suite in evaluation.suites.values())
        fewer = int((evaluation.deadline_s * rate / length - in_suites) / (1 + len(sets or [""])))
        lower = f"lower eval.tasks to {fewer}, or " if fewer > 0 else ""
        yield (
            f"an evaluation of {_seconds(seconds)} exceeds eval.deadline_s = {evaluation.deadline_s:g}",
            f"{lower}raise eval.deadline_s to {math.ceil(seconds)}",
        )
    step = trainer.groups_per_batch * trainer.group_size * length / rate
    if step > LONG_STEP_S:
        yield (
            f"a step samples for {_seconds(step)}",
            "lower trainer.groups_per_batch or sampling.max_tokens, or add engines",
        )


def _evaluation_episodes(settings: EvalSettings, sets: Sets | None) -> int:
    """Returns the number of episodes of the first or last evaluation, which samples the main set twice."""
    parts = [(name, settings.tasks) for name in ("", *(sets or [""]))]
    parts += [(suite.set, suite.tasks) for suite in settings.suites.values()]
    return sum(min(number, len(sets.get(name, ()))) if sets else number for name, number in parts)


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds < 1000 else f"{seconds:,.0f} s"
