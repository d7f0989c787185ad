"""Makes a scenario from a real run's files: speed of its engines, episodes, trainer and rules."""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from tidegate.config import Settings, load_settings
from tidegate.errors import TidegateError
from tidegate.simulation.scenario import (
    AgentModel,
    EngineModel,
    RuleModel,
    Scenario,
    SimulatedTurn,
    TrainerModel,
)
from tidegate.trainer.ledger.ledger import read_ledger
from tidegate.trainer.records.metrics import read_metrics

KEPT = 4096
"""Episodes to draw from; more make no difference."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One recorded reply."""

    started: float
    seconds: float
    prompt: float
    tokens: float

    @property
    def ended(self) -> float:
        return self.started + self.seconds


@dataclass(frozen=True, slots=True)
class Recording:
    """An episode's replies in order, the seconds of its session, and those before its first request."""

    samples: list[Sample]
    seconds: float
    setup: float

    def turns(self, overhead: float) -> tuple[SimulatedTurn, ...]:
        """Away after the last reply is what the session's time leaves: reward and finishing."""
        first, last = self.samples[0], self.samples[-1]
        gaps = [max(0.0, after.started - one.ended) for one, after in pairwise(self.samples)]
        rest = max(0.0, self.seconds - self.setup - (last.ended - first.started))
        return tuple(
            SimulatedTurn(one.prompt, one.tokens, overhead + away, self.setup if one is first else 0.0)
            for one, away in zip(self.samples, [*gaps, rest], strict=True)
        )


@dataclass(slots=True)
class Book:
    """What the ledger says: final states, and when each attempt was issued."""

    groups: Counter[str] = field(default_factory=Counter)
    attempts: Counter[str] = field(default_factory=Counter)
    issued: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, run_dir: Path) -> Book:
        book = cls()
        for one in read_ledger(run_dir / "ledger.jsonl"):
            if one["event"] == "ended" and one["kind"] != "run":
                (book.groups if one["kind"] == "group" else book.attempts)[one["state"]] += 1
            elif one["event"] == "issued" and one["kind"] == "attempt":
                book.issued[one["id"]] = one["time"]
        return book


def scenario_of(run_dir: Path) -> Scenario:
    """What the files of a run say; raises TidegateError where they say too little."""
    settings = load_settings(run_dir / "config.toml")
    rows = [row for row in read_metrics(run_dir) if "time/update" in row]
    book = Book.of(run_dir)
    episodes = [_recording(one, book) for one in _episodes(run_dir)]
    episodes = [one for one in episodes if one.samples]
    if len(rows) < 3 or len(episodes) < 16:
        raise TidegateError(
            f"{run_dir}: {len(rows)} steps and {len(episodes)} episodes are too few to calibrate with"
        )
    engine, overhead = engine_of(settings, [sample for one in episodes for sample in one.samples])
    return Scenario(
        steps=settings.trainer.steps,
        engine=engine,
        agent=AgentModel(
            episodes=tuple(one.turns(overhead) for one in episodes[:KEPT]),
            failed=_share(book.attempts, "failed"),
            alike=_share(book.groups, "filtered"),
            max_concurrency=settings.agent.max_concurrency,
        ),
        trainer=_trainer(rows),
        rules=admission_rules(settings),
    )


def _episodes(run_dir: Path) -> Iterator[dict[str, Any]]:
    for path in sorted((run_dir / "trajectories").glob("step_*.jsonl")):
        for number, line in enumerate(path.read_bytes().splitlines(), 1):
            try:
                yield orjson.loads(line)
            except orjson.JSONDecodeError as error:
                raise TidegateError(f"{path}, line {number}: not JSON: {error}") from None


def _recording(episode: dict[str, Any], book: Book) -> Recording:
    samples = [
        Sample(turn["started"], turn["seconds"], len(turn["delta_ids"]), len(turn["output_ids"]))
        for turn in episode["turns"]
        if turn.get("started")
    ]
    samples.sort(key=lambda one: one.started)
    issued = book.issued.get(episode["metadata"].get("attempt", ""))
    setup = max(0.0, samples[0].started - issued) if samples and issued is not None else 0.0
    return Recording(samples, episode["seconds"], setup)


def engine_of(settings: Settings, samples: Sequence[Sample]) -> tuple[EngineModel, float]:
    """The decoding model that explains the replies' durations best, and each reply's fixed overhead.

    Least squares over seconds = overhead + read · p + tokens · (a + c · b), b being the mean number of
    replies under way meanwhile on one engine and `read` the prompt tokens of all that came to it meanwhile,
    its own included: they are read before anybody's next token. A term that comes out negative is left out.
    """
    engines = len(settings.engine.urls) or settings.engine.count
    at_once = _overlap(samples) / engines
    tokens = np.array([one.tokens for one in samples])
    columns = {
        "overhead": np.ones(len(samples)),
        "read": _read_meanwhile(samples) / engines,
        "iteration": tokens,
        "request": tokens * at_once,
    }
    found = _non_negative(columns, np.array([one.seconds for one in samples]))
    model = EngineModel(
        count=engines,
        slots=settings.engine.max_slots,
        iteration_s=max(found["iteration"], 1e-7),
        request_s=found["request"],
        prompt_token_s=found["read"],
    )
    return model, found["overhead"]


def _overlap(samples: Sequence[Sample]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """How many replies were under way on average during each one, itself included; shape [samples]."""
    starts = sorted(one.started for one in samples)
    ends = sorted(one.ended for one in samples)
    sum_starts, sum_ends = np.cumsum([0.0, *starts]), np.cumsum([0.0, *ends])

    def area(moment: float) -> float:
        """Reply-seconds before `moment`."""
        begun, ended = bisect.bisect_right(starts, moment), bisect.bisect_right(ends, moment)
        return float((begun * moment - sum_starts[begun]) - (ended * moment - sum_ends[ended]))

    return np.array([(area(one.ended) - area(one.started)) / max(one.seconds, 1e-6) for one in samples])


def _read_meanwhile(samples: Sequence[Sample]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """The prompt tokens of the replies that began during each one, itself included; shape [samples]."""
    ordered = sorted(samples, key=lambda one: one.started)
    starts = [one.started for one in ordered]
    known = np.cumsum([0.0, *(one.prompt for one in ordered)])
    return np.array(
        [
            known[bisect.bisect_right(starts, one.ended)] - known[bisect.bisect_left(starts, one.started)]
            for one in samples
        ]
    )


def _non_negative(columns: dict[str, Any], wanted: Any) -> dict[str, float]:
    """Least squares without negative coefficients: the most negative column goes, until none is."""
    left = dict(columns)
    while True:
        found, *_ = np.linalg.lstsq(np.stack(list(left.values()), axis=1), wanted, rcond=None)
        worst = int(np.argmin(found))
        if found[worst] >= 0 or len(left) == 1:
            break
        del left[list(left)[worst]]
    return dict.fromkeys(columns, 0.0) | {
        name: max(0.0, float(value)) for name, value in zip(left, found, strict=True)
    }


def _trainer(rows: list[dict[str, Any]]) -> TrainerModel:
    columns = {
        "step": np.ones(len(rows)),
        "token": np.array([row["tokens/trained"] for row in rows], dtype=float),
    }
    found = _non_negative(columns, np.array([row["time/update"] for row in rows]))
    plain = [row for row in rows if "eval/reward" not in row] or rows
    between = [
        row["time/step"] - row["time/update"] - row.get("time/publish", 0.0) - row["time/wait_for_batch"]
        for row in plain
    ]
    published = [row["time/publish"] for row in rows if row.get("time/publish") is not None]
    return TrainerModel(
        step_s=found["step"],
        token_s=found["token"],
        publish_s=float(np.median(published)) if published else 0.0,
        between_s=max(0.0, float(np.median(between))),
    )


def admission_rules(settings: Settings) -> RuleModel:
    """The rules that a run of these settings has."""
    trainer = settings.trainer
    return RuleModel(
        groups_per_batch=trainer.groups_per_batch,
        group_size=trainer.group_size,
        min_group_size=trainer.min_group_size,
        max_staleness=trainer.staleness_bound,
        publish_interval=trainer.publish_interval if isinstance(trainer.publish_interval, int) else 1,
        max_attempts=trainer.max_attempts,
        max_stale_retries=trainer.max_stale_retries,
    )


def _share(counts: Counter[str], state: str) -> float:
    """Among those that came to an end of their own."""
    total = sum(counts.values()) - counts["cancelled"]
    return counts[state] / total if total else 0.0
