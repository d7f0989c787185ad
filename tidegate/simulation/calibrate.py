"""Derives a scenario from a run's files: engine speed, episodes, trainer and rules."""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from tidegate.config import Settings, load_settings
from tidegate.errors import TidegateError
from tidegate.simulation import scenario
from tidegate.simulation.scenario import Scenario, SimulatedTurn
from tidegate.trainer.ledger.entries import State
from tidegate.trainer.ledger.state import LedgerState, read_ledger_state
from tidegate.trainer.records.metrics import read_metrics
from tidegate.trainer.records.trajectories import read_lines

MAX_EPISODES = 4096
"""Maximum episodes to draw from."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One recorded reply."""

    started: float
    seconds: float
    prompt: float
    tokens: float
    policy: str = ""
    """Policy whose engines sampled it."""
    trained: bool = True

    @property
    def ended(self) -> float:
        return self.started + self.seconds


@dataclass(frozen=True, slots=True)
class Recording:
    """An episode's replies in order, its session's duration, and the time before its first request."""

    samples: list[Sample]
    seconds: float
    setup: float

    def turns(self, overhead: Mapping[str, float]) -> tuple[SimulatedTurn, ...]:
        """Returns the turns; the time after the last reply includes reward and finishing.

        `overhead` is the fixed time of a reply, by policy.
        """
        first, last = self.samples[0], self.samples[-1]
        gaps = [max(0.0, after.started - before.ended) for before, after in pairwise(self.samples)]
        rest = max(0.0, self.seconds - self.setup - (last.ended - first.started))
        return tuple(
            SimulatedTurn(
                sample.prompt, sample.tokens, overhead[sample.policy] + away,
                self.setup if sample is first else 0.0, sample.policy, sample.trained,
            )
            for sample, away in zip(self.samples, [*gaps, rest], strict=True)
        )  # fmt: skip


def scenario_of(run_dir: Path) -> Scenario:
    """Returns a scenario like the run; raises TidegateError if it has too few steps or episodes."""
    settings = load_settings(run_dir / "config.toml")
    rows = [row for row in read_metrics(run_dir) if "time/update" in row]
    ledger = read_ledger_state(run_dir / "ledger.jsonl")
    files = sorted((run_dir / "trajectories").glob("step_*.jsonl"))
    sources = {
        name: (first, name in settings.trained_policies)
        for first, names in settings.engine_sets.items()
        for name in names
    }
    episodes = [_recording(line, ledger, sources) for file in files for line in read_lines(file)]
    episodes = [episode for episode in episodes if episode.samples]
    if len(rows) < 3 or len(episodes) < 16:
        raise TidegateError(
            f"{run_dir}: {len(rows)} steps and {len(episodes)} episodes are too few to calibrate with"
        )
    samples = [sample for episode in episodes for sample in episode.samples]
    engines, overhead = {}, {}
    for name in {sample.policy: None for sample in samples}:
        own = [sample for sample in samples if sample.policy == name]
        engines[name], overhead[name] = engine_of(settings.of_policy(name), own)
    return Scenario(
        steps=settings.trainer.steps,
        engine=engines.get("", scenario.EngineModel()),
        policies={
            name: scenario.PolicyEngines(
                **engine.model_dump(),
                train=any(settings.policies[policy].train for policy in settings.engine_sets[name]),
            )
            for name, engine in engines.items()
            if name
        },
        agent=scenario.AgentModel(
            episodes=tuple(episode.turns(overhead) for episode in episodes[:MAX_EPISODES]),
            failed=_share(ledger.counts(ledger.attempts), State.FAILED),
            alike=_share(ledger.counts(ledger.groups), State.FILTERED),
            max_concurrency=settings.agent.max_concurrency,
        ),
        trainer=_trainer(rows),
        rules=admission_rules(settings),
        gateway=scenario.GatewayModel(shards=settings.gateway.shards),
        weights=scenario.WeightsModel(
            gigabytes=_published_bytes(run_dir) / 1e9,
            transport=settings.trainer.publish_transport,
            full_every=1 if settings.policies else settings.trainer.publish_full_every,
        ),
    )


def _published_bytes(run_dir: Path) -> int:
    """Returns the size of the newest version with all weights; 0 if the run kept none."""
    versions = sorted((run_dir / "weights").glob("v*"), key=lambda path: (len(path.name), path.name))
    return sum(file.stat().st_size for file in versions[-1].rglob("*.safetensors")) if versions else 0


def _recording(
    episode: dict[str, Any], ledger: LedgerState, sources: Mapping[str, tuple[str, bool]]
) -> Recording:
    """Returns a recorded episode; `sources` has the engines of each policy, and whether it is trained."""
    samples = [
        Sample(
            turn["started"], turn["seconds"], len(turn["delta_ids"]), len(turn["output_ids"]),
            *sources[turn.get("policy", "")],
        )
        for turn in episode["turns"]
        if turn.get("started")
    ]  # fmt: skip
    samples.sort(key=lambda sample: sample.started)
    attempt = ledger.attempts.get(episode["metadata"].get("attempt", ""))
    setup = max(0.0, samples[0].started - attempt.issued["time"]) if samples and attempt is not None else 0.0
    return Recording(samples, episode["seconds"], setup)


def engine_of(settings: Settings, samples: Sequence[Sample]) -> tuple[scenario.EngineModel, float]:
    """Fits the decoding model to the replies' durations; returns it and the fixed overhead per reply.

    Least squares over seconds = overhead + read · p + tokens · (a + c · b), where b is the mean number of
    concurrent replies on one engine, and `read` the prompt tokens of all replies that start meanwhile,
    including its own, because an engine reads prompts before it decodes. Negative terms are dropped.
    """
    engines = len(settings.engine.urls) or settings.engine.count
    concurrent = _overlap(samples) / engines
    tokens = np.array([sample.tokens for sample in samples])
    columns = {
        "overhead": np.ones(len(samples)),
        "read": _read_meanwhile(samples) / engines,
        "iteration": tokens,
        "request": tokens * concurrent,
    }
    fit = _non_negative(columns, np.array([sample.seconds for sample in samples]))
    model = scenario.EngineModel(
        count=engines,
        slots=settings.engine.max_slots,
        iteration_s=max(fit["iteration"], 1e-7),
        request_s=fit["request"],
        prompt_token_s=fit["read"],
    )
    return model, fit["overhead"]


def _overlap(samples: Sequence[Sample]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Returns the mean number of concurrent replies during each reply, itself included; shape [samples]."""
    starts = sorted(sample.started for sample in samples)
    ends = sorted(sample.ended for sample in samples)
    sum_starts, sum_ends = np.cumsum([0.0, *starts]), np.cumsum([0.0, *ends])

    def area(moment: float) -> float:
        """Reply-seconds before `moment`."""
        begun, ended = bisect.bisect_right(starts, moment), bisect.bisect_right(ends, moment)
        return float((begun * moment - sum_starts[begun]) - (ended * moment - sum_ends[ended]))

    return np.array(
        [(area(reply.ended) - area(reply.started)) / max(reply.seconds, 1e-6) for reply in samples]
    )


def _read_meanwhile(samples: Sequence[Sample]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Returns the prompt tokens of the replies that start during each reply, itself included; [samples]."""
    ordered = sorted(samples, key=lambda sample: sample.started)
    starts = [sample.started for sample in ordered]
    total = np.cumsum([0.0, *(sample.prompt for sample in ordered)])
    return np.array(
        [
            total[bisect.bisect_right(starts, reply.ended)] - total[bisect.bisect_left(starts, reply.started)]
            for reply in samples
        ]
    )


def _non_negative(columns: dict[str, Any], target: Any) -> dict[str, float]:
    """Least squares that repeatedly drops the column with the most negative coefficient."""
    left = dict(columns)
    while True:
        solution, *_ = np.linalg.lstsq(np.stack(list(left.values()), axis=1), target, rcond=None)
        worst = int(np.argmin(solution))
        if solution[worst] >= 0 or len(left) == 1:
            break
        del left[list(left)[worst]]
    return dict.fromkeys(columns, 0.0) | {
        name: max(0.0, float(value)) for name, value in zip(left, solution, strict=True)
    }


def _trainer(rows: list[dict[str, Any]]) -> scenario.TrainerModel:
    columns = {
        "step": np.ones(len(rows)),
        "token": np.array([row["tokens/trained"] for row in rows], dtype=float),
    }
    fit = _non_negative(columns, np.array([row["time/update"] for row in rows]))
    plain = [row for row in rows if "eval/reward" not in row] or rows
    between = [
        row["time/step"] - row["time/update"] - row.get("time/publish", 0.0) - row["time/wait_for_batch"]
        for row in plain
    ]
    published = [row["time/publish"] for row in rows if row.get("time/publish") is not None]
    return scenario.TrainerModel(
        step_s=fit["step"],
        token_s=fit["token"],
        publish_s=float(np.median(published)) if published else 0.0,
        between_s=max(0.0, float(np.median(between))),
    )


def admission_rules(settings: Settings) -> scenario.RuleModel:
    """Returns the admission rules of a run with these settings."""
    trainer = settings.trainer
    interval = trainer.publish_interval if isinstance(trainer.publish_interval, int) else 1
    derived: dict[str, Any] = {"max_staleness": trainer.staleness_bound, "publish_interval": interval}
    names = scenario.RuleModel.model_fields.keys() - derived.keys()
    return scenario.RuleModel(**derived, **{name: getattr(trainer, name) for name in names})


def _share(counts: Counter[State], state: State) -> float:
    """Returns the share of a state among the items that ended and were not cancelled."""
    total = counts.total() - counts[State.CANCELLED] - counts[State.LIVE]
    return counts[state] / total if total else 0.0
