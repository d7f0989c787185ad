"""Parameters of a simulation: engines, agents, trainer and rules. Times are in seconds, lengths in tokens."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal, NamedTuple

from pydantic import Field, model_validator

from tidegate.settings.sections import SettingsSection
from tidegate.settings.servers import PolicyName
from tidegate.simulation.costs import Costs
from tidegate.trainer.admission.rules import Rules

Positive = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(ge=0)]


class Spread(SettingsSection):
    """A log-normal length or duration, limited to `longest`."""

    median: Annotated[float, Field(ge=0)]
    sigma: Annotated[float, Field(ge=0)] = 0.0
    """Standard deviation of the logarithm; 1 has a mean of 1.65 medians and a 99th percentile of 10."""
    longest: Positive = math.inf

    def draw(self, rng: random.Random) -> float:
        if self.sigma == 0 or self.median == 0:
            return min(self.median, self.longest)
        return min(self.median * math.exp(rng.gauss(0.0, self.sigma)), self.longest)


class SimulatedTurn(NamedTuple):
    """One reply: after `before_s`, `prompt` new tokens are read and `tokens` sampled; the agent then takes
    `away_s` until its next request."""

    prompt: float
    tokens: float
    away_s: float
    before_s: float = 0.0
    policy: str = ""
    """Name in `Scenario.engines`."""
    trained: bool = True


class EngineModel(SettingsSection):
    """Engines of one kind. An iteration gives each running request one token."""

    count: Count = 1
    slots: Count = 64
    """Requests that one engine decodes concurrently; the others queue."""
    iteration_s: Positive = 0.01
    """Fixed time of a decoding iteration."""
    request_s: Seconds = 0.0
    """Additional time of an iteration per running request."""
    prompt_token_s: Seconds = 0.0
    """Time to read one new prompt token, during which decoding waits."""
    failures_per_hour: Seconds = 0.0
    """Failures of one engine; its requests move to other engines, which read their prompts again."""
    recover_s: Seconds = 60.0


class PolicyEngines(EngineModel):
    """One of several policies with its engines, or the policies that share engines."""

    turns: Positive = 1.0
    """Number of its turns relative to the other policies; recorded episodes have their own."""
    train: bool = True
    """false: a frozen policy, whose engines a publish does not pause."""


class AgentModel(SettingsSection):
    """Episodes: as recorded (`episodes`), or drawn turn by turn."""

    setup: Spread = Spread(median=0)
    """Time from an attempt's start to its first request."""
    turns: Spread = Spread(median=1)
    prompt: Spread = Spread(median=100)
    tokens: Spread = Spread(median=100)
    away: Spread = Spread(median=0)
    """Time for tools and the agent's work after a reply."""
    episodes: tuple[tuple[SimulatedTurn, ...], ...] = ()
    """Recorded episodes to draw from, instead of the spreads."""
    failed: Share = 0.0
    """Share of attempts that fail and are repeated."""
    alike: Share = 0.0
    """Share of groups with equal rewards, which are filtered and replaced."""
    max_concurrency: Count = 1 << 30
    """Maximum concurrent attempts."""
    deadline_s: Positive = math.inf
    """Deadline of an attempt; one that it ends counts as a timeout of slow engines."""

    def draw(self, rng: random.Random, policies: Mapping[str, PolicyEngines]) -> Sequence[SimulatedTurn]:
        """Returns the turns of an episode, each of one of the policies."""
        if self.episodes:
            return rng.choice(self.episodes)
        turns = max(1, round(self.turns.draw(rng)))
        setup = self.setup.draw(rng)
        weights = [policy.turns for policy in policies.values()]
        names = rng.choices([*policies], weights, k=turns) if policies else [""] * turns
        return [
            SimulatedTurn(
                self.prompt.draw(rng), max(1.0, round(self.tokens.draw(rng))), self.away.draw(rng),
                setup if number == 0 else 0.0, name, not policies or policies[name].train,
            )
            for number, name in enumerate(names)
        ]  # fmt: skip


class TrainerModel(SettingsSection):
    """Steps of the trainer, and the publish that follows."""

    count: Count = 1
    """Accelerators, which share a step's tokens."""
    step_s: Seconds = 0.0
    """Fixed time of a step."""
    token_s: Seconds = 1e-4
    """Additional time per sampled token of the batch on one accelerator."""
    publish_s: Seconds = 0.0
    """Time for which a publish pauses the engines."""
    between_s: Seconds = 0.0
    """Time between steps for records and checkpoints."""


class GatewayModel(SettingsSection):
    """Processes of the gateway."""

    shards: Count = 1
    streamed: Share = 0.0
    """Share of turns whose reply is streamed to the agent."""


class WeightsModel(SettingsSection):
    """Published versions."""

    gigabytes: Annotated[float, Field(ge=0)] = 1.2
    """Size of all weights in the engines' data type."""
    transport: Literal["files", "broadcast"] = "files"
    full_every: Count = 8
    """Versions from one with all weights to the next; 1: no differences."""
    threads: Annotated[int, Field(ge=1, le=8)] = 8
    """Threads that encode a difference: the cores of the trainer's machine, at most 8."""


class RuleModel(SettingsSection):
    """Admission rules, with the names of the trainer's settings."""

    groups_per_batch: Count = 16
    group_size: Count = 8
    min_group_size: Count | None = None
    max_staleness: Annotated[int, Field(ge=0)] | None = 2
    """None means no bound."""
    publish_interval: Count = 1
    max_attempts: Count = 3
    max_stale_retries: Annotated[int, Field(ge=0)] = 2

    @model_validator(mode="after")
    def _consistent(self) -> RuleModel:
        if self.min_group_size is not None and self.min_group_size > self.group_size:
            raise ValueError(
                f"min_group_size = {self.min_group_size} is more than group_size = {self.group_size}"
            )
        return self


class Scenario(SettingsSection):
    """A complete scenario of `steps` steps; the figures omit the first tenth."""

    seed: int = 0
    steps: Annotated[int, Field(ge=2)] = 100
    engine: EngineModel = EngineModel()
    policies: dict[PolicyName, PolicyEngines] = {}
    """Policies by name, with their engines; empty: there is one, with those of `engine`."""
    agent: AgentModel = AgentModel()
    trainer: TrainerModel = TrainerModel()
    rules: RuleModel = RuleModel()
    gateway: GatewayModel = GatewayModel()
    weights: WeightsModel = WeightsModel()
    costs: Costs = Costs()

    @model_validator(mode="after")
    def _consistent(self) -> Scenario:
        if not self.policies:
            return self
        if idle := self.engine.other_than_default(*EngineModel.model_fields):
            raise ValueError(f"engine.{idle[0]} has no effect with policies: set policies.NAME.{idle[0]}")
        if not any(policy.train for policy in self.policies.values()):
            raise ValueError("policies: none is trained, so the run has nothing to do")
        return self

    @property
    def engines(self) -> Mapping[str, EngineModel]:
        """The engines of each policy; of one policy under the name ""."""
        return self.policies or {"": self.engine}

    @property
    def engine_count(self) -> int:
        return sum(model.count for model in self.engines.values())

    def admission_rules(self) -> Rules:
        smallest = self.rules.min_group_size or self.rules.group_size
        rules = {**self.rules.model_dump(), "min_group_size": smallest}
        return Rules(**rules, max_running=self.agent.max_concurrency, deadline_s=self.agent.deadline_s)

    def with_(self, **sections: dict[str, object]) -> Scenario:
        """Returns a copy with changed keys, for example `with_(rules={"max_staleness": 4})`."""
        changed = {name: getattr(self, name).model_copy(update=values) for name, values in sections.items()}
        return self.model_copy(update=changed)
