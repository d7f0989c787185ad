"""Counters of one gateway, and their Prometheus text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tidegate.gateway.gateway import Gateway


@dataclass(slots=True)
class Metrics:
    """What was counted since the start."""

    turns: int = 0
    undelivered_turns: int = 0
    abandoned_calls: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    rendered_tokens: int = 0
    rerendered_tokens: int = 0
    """Of roots after a session's first: what branches cost."""
    drifted_turns: int = 0
    """Prompts that did not start with the recorded ids; anything but 0 is a fault of the gateway's."""
    unknown_version_turns: int = 0
    retries_joined: int = 0
    branches: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    parses: Counter[str] = field(default_factory=Counter)


def prometheus(values: Iterable[tuple[str, str, Mapping[str, float] | float, str]]) -> str:
    """Prometheus' text of `(name, type, value or values by label, label)`."""
    lines = []
    for name, kind, value, label in values:
        full = f"tidegate_gateway_{name}"
        lines.append(f"# TYPE {full} {kind}")
        if isinstance(value, Mapping):
            lines += [f'{full}{{{label}="{_escape(key)}"}} {value[key]:g}' for key in sorted(value)]
        else:
            lines.append(f"{full} {value:g}")
    return "\n".join(lines) + "\n"


def _escape(label: str) -> str:
    return label.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def merged(texts: Mapping[str, str], label: str) -> str:
    """The texts of several gateways as one: every sample says by `label` whose it is.

    Samples are not added up here: `sum without (shard)` does that where they are read, for those also
    that must not be added, like ratios and quantiles.
    """
    families: dict[str, list[str]] = {}
    for key, text in texts.items():
        family: list[str] = []
        for line in text.splitlines():
            if line.startswith("#"):
                family = families.setdefault(line, [])
                continue
            name, space, value = line.rpartition(" ")
            mine = f'{label}="{_escape(key)}"'
            labels = f"{name[:-1]},{mine}}}" if name.endswith("}") else f"{name}{{{mine}}}"
            family.append(f"{labels}{space}{value}")
    return "".join("\n".join([head, *samples]) + "\n" for head, samples in families.items())


def exposition(gateway: Gateway) -> str:
    """Everything a gateway counts, as Prometheus' text."""
    metrics = gateway.metrics
    states = Counter(session.state for session in gateway.sessions.all())
    groups = Counter(row["state"] for row in gateway.list_groups())
    engines = Counter("healthy" if one.healthy else "quarantined" for one in gateway.pool.engines())
    ratio = metrics.cached_tokens / metrics.prompt_tokens if metrics.prompt_tokens else 0.0
    return prometheus(
        [
            ("turns_total", "counter", metrics.turns, ""),
            ("undelivered_turns", "gauge", metrics.undelivered_turns, ""),
            ("abandoned_calls_total", "counter", metrics.abandoned_calls, ""),
            ("retries_joined_total", "counter", metrics.retries_joined, ""),
            ("prompt_tokens_total", "counter", metrics.prompt_tokens, ""),
            ("rendered_tokens_total", "counter", metrics.rendered_tokens, ""),
            ("rerendered_tokens_total", "counter", metrics.rerendered_tokens, ""),
            ("drifted_turns_total", "counter", metrics.drifted_turns, ""),
            ("shielded_requests_total", "counter", gateway.renderer.shielded, ""),
            ("dropped_frames_total", "counter", gateway.renderer.dropped_frames, ""),
            ("output_tokens_total", "counter", metrics.output_tokens, ""),
            ("cached_tokens_total", "counter", metrics.cached_tokens, ""),
            ("cache_hit_ratio", "gauge", ratio, ""),
            ("unknown_version_turns_total", "counter", metrics.unknown_version_turns, ""),
            ("branches_total", "counter", metrics.branches, "reason"),
            ("tool_call_parses_total", "counter", metrics.parses, "status"),
            ("outcomes_total", "counter", metrics.outcomes, "outcome"),
            ("refusals_total", "counter", metrics.refusals, "code"),
            ("sessions", "gauge", states, "state"),
            ("groups", "gauge", groups, "state"),
            ("groups_sealed_total", "counter", gateway.groups.sealed, ""),
            ("groups_acked_total", "counter", gateway.groups.acked, "outcome"),
            ("engines", "gauge", engines, "state"),
            ("engine_errors_total", "counter", gateway.pool.errors, ""),
            ("stuck_rewards", "gauge", gateway.scorer.stuck, ""),
        ]
    )
