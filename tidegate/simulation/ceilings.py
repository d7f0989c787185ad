"""Load of the components that are single processes: which of them is the bottleneck.

The rates of a simulation are multiplied by the CPU seconds per event. The simulation itself has no limit of
these components: a run whose load is above 1 is slower than simulated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from tidegate.gateway.engines.engine import PoolOptions
from tidegate.simulation.costs import Costs
from tidegate.simulation.outcome import Figures
from tidegate.simulation.scenario import GatewayModel, Scenario, WeightsModel

ENTRIES = 2
"""Ledger entries of a group, and of an attempt: issued and ended."""
LEAST_ENGINES = 16
"""Engines of the simulated part of a large cluster, at least."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Events of a run per second, and its number of engines."""

    sessions: float
    turns: float
    sampled_tokens: float
    prompt_tokens: float
    groups: float
    steps: float
    publishes: float
    engines: int

    @classmethod
    def of(cls, figures: Figures, scenario: Scenario, parts: int = 1) -> Rates:
        """Returns the rates of a simulated run, or of a cluster of which one of `parts` was simulated."""
        steps = 1 / figures.step_s
        return cls(
            sessions=parts * figures.sessions_per_s,
            turns=parts * figures.turns_per_s,
            sampled_tokens=parts * figures.sampled_tokens_per_s,
            prompt_tokens=parts * figures.prompt_tokens_per_s,
            groups=parts * figures.groups_per_s,
            steps=steps,
            publishes=steps / scenario.rules.publish_interval,
            engines=parts * scenario.engine_count,
        )


@dataclass(frozen=True, slots=True)
class Component:
    """A process, or a thread of one, with the CPU seconds per second of its parts."""

    name: str
    parts: dict[str, float]

    @property
    def load(self) -> float:
        """Share of one core, for publishing of the time; above 1, the component cannot keep up."""
        return math.fsum(self.parts.values())


def part_of(scenario: Scenario) -> tuple[Scenario, int]:
    """Divides a large cluster into equal parts of at least LEAST_ENGINES engines.

    Engines, trainers, groups of a batch and concurrent attempts are divided by the same number, so that the
    parts have the same rates. A cluster whose numbers have no common divisor is not divided, nor is one of
    several policies.

    Returns:
        The scenario of one part, and the number of parts.
    """
    engines, trainers, groups = (
        scenario.engine.count, scenario.trainer.count, scenario.rules.groups_per_batch,
    )  # fmt: skip
    common = 1 if scenario.policies else math.gcd(engines, trainers, groups)
    parts = max(
        n for n in range(1, common + 1) if common % n == 0 and (n == 1 or engines // n >= LEAST_ENGINES)
    )
    attempts = math.ceil(scenario.agent.max_concurrency / parts)
    part = scenario.with_(
        engine={"count": engines // parts},
        trainer={"count": trainers // parts},
        rules={"groups_per_batch": groups // parts},
        agent={"max_concurrency": attempts},
    )
    return part, parts


def components(rates: Rates, scenario: Scenario) -> list[Component]:
    """Returns the loads of all components, the highest first."""
    costs = scenario.costs
    found = [
        _gateway(rates, scenario.gateway, costs),
        _trainer(rates, costs),
        _publishing(rates, scenario.weights, costs),
    ]
    if scenario.gateway.shards > 1:
        found.append(_router(rates, costs))
    return sorted(found, key=lambda one: -one.load)


def _gateway(rates: Rates, gateway: GatewayModel, costs: Costs) -> Component:
    """The gateway's process, or one of its shards. Every shard probes all engines."""
    shards, streamed = gateway.shards, gateway.streamed
    turn = _mean(costs.gateway_streamed_turn_s, costs.gateway_turn_s, streamed)
    token = _mean(costs.gateway_streamed_token_s, costs.gateway_token_s, streamed)
    tokens = rates.sampled_tokens * token + rates.prompt_tokens * costs.gateway_prompt_token_s
    parts = {
        "turns": rates.turns * turn / shards,
        "tokens": tokens / shards,
        "sessions": rates.sessions * (costs.gateway_session_s + costs.gateway_poll_s) / shards,
        "groups": _groups(rates, costs.gateway_group_s, costs.gateway_group_token_s) / shards,
        "probes": rates.engines / PoolOptions().probe_every_s * costs.gateway_probe_s,
    }
    return Component("gateway" if shards == 1 else f"gateway, each of {shards} shards", parts)


def _router(rates: Rates, costs: Costs) -> Component:
    """The shards' router; turns do not pass through it."""
    parts = {
        "sessions": rates.sessions * (costs.router_session_s + costs.router_poll_s),
        "groups": _groups(rates, costs.router_group_s, costs.router_group_token_s),
    }
    return Component("router of the shards", parts)


def _trainer(rates: Rates, costs: Costs) -> Component:
    """The Python code of the trainer's process, which shares one interpreter lock."""
    tokens = rates.sampled_tokens + rates.prompt_tokens
    parts = {
        "sessions": rates.sessions * costs.trainer_session_s,
        "groups": _groups(rates, costs.trainer_group_s, costs.trainer_group_token_s),
        "admission": rates.groups * costs.admission_group_s + rates.sessions * costs.admission_attempt_s,
        "ledger": ENTRIES * (rates.groups + rates.sessions) * costs.ledger_entry_s,
        "rows": tokens * costs.rows_token_s,
        "trajectories": tokens * costs.trajectory_token_s,
        "metrics": tokens * costs.metrics_token_s + rates.steps * costs.metrics_line_s,
    }
    return Component("trainer", parts)


def _publishing(rates: Rates, weights: WeightsModel, costs: Costs) -> Component:
    """The trainer's work for versions, as a share of time: one of `full_every` versions has all weights.

    Differences are encoded by several threads; that these share the work evenly is assumed.
    """
    size = rates.publishes * weights.gigabytes * 1e9
    full, difference = size / weights.full_every, size * (1 - 1 / weights.full_every)
    parts = {
        "all weights": full * costs.publish_full_byte_s,
        "differences": difference * costs.publish_difference_byte_s / weights.threads,
    }
    if weights.transport == "broadcast":
        sent = rates.engines * difference * costs.difference_share
        parts |= {
            "sending all weights": full
            * (costs.broadcast_gather_byte_s + rates.engines * costs.broadcast_byte_s),
            "sending differences": sent * costs.broadcast_difference_byte_s,
        }
    return Component("publishing", parts)


def _groups(rates: Rates, group_s: float, token_s: float) -> float:
    """CPU seconds per second of groups' leases; a prompt's token is charged like a sampled one."""
    return rates.groups * group_s + (rates.sampled_tokens + rates.prompt_tokens) * token_s


def _mean(one: float, other: float, share: float) -> float:
    return share * one + (1 - share) * other


def bytes_per_s(rates: Rates, scenario: Scenario) -> dict[str, float]:
    """Returns bytes per second: written by the gateway and the trainer, and received by all engines."""
    tokens, costs = rates.sampled_tokens + rates.prompt_tokens, scenario.costs
    share = 1 / scenario.weights.full_every
    version = scenario.weights.gigabytes * 1e9 * (share + (1 - share) * costs.difference_share)
    return {
        "journal": rates.turns * costs.journal_turn_bytes + tokens * costs.journal_token_bytes,
        "trajectories": tokens * costs.trajectory_token_bytes,
        "weights": rates.publishes * version,
        "weights to engines": rates.publishes * version * rates.engines,
    }


def to_wire(rates: Rates, scenario: Scenario) -> dict[str, Any]:
    """Returns the loads and bytes for JSON."""
    loads = components(rates, scenario)
    return {
        "bottleneck": loads[0].name,
        "loads": {one.name: {"load": one.load, "parts": one.parts} for one in loads},
        "bytes_per_s": bytes_per_s(rates, scenario),
    }


def ceilings_table(rates: Rates, scenario: Scenario) -> str:
    """Formats the loads of all components, the highest first."""
    loads = components(rates, scenario)
    lines = [
        f"{rates.engines} engines: {rates.sampled_tokens:,.0f} tokens/s sampled, {rates.turns:,.1f} turns/s, "
        f"{rates.sessions:,.2f} sessions/s, {rates.groups:,.3f} groups/s, {rates.publishes:.4f} publishes/s",
        f"{'component':<28}{'load':>8}  parts",
    ]
    for one in loads:
        parts = sorted(one.parts.items(), key=lambda part: -part[1])
        shown = ", ".join(f"{name} {value:.3g}" for name, value in parts if value > 0)
        lines.append(f"{one.name:<28}{one.load:>8.3f}  {shown}")
    first = loads[0]
    factor = f"{1 / first.load:,.3g} times this load" if first.load > 0 else "no load"
    lines.append(f"bottleneck: {first.name}, at {factor}")
    sizes = bytes_per_s(rates, scenario)
    lines.append("MB/s: " + ", ".join(f"{name} {size / 1e6:,.4g}" for name, size in sizes.items()))
    return "\n".join(lines)
