"""Formats a gateway's counters as Prometheus text."""

from __future__ import annotations

from collections import Counter

from tidegate.gateway.gateway import Gateway
from tidegate.gateway.http.schemas import group_rows
from tidegate.prometheus import Family, prometheus

PREFIX = "tidegate_gateway"
_ACKS = frozenset({"trained", "stepped", "stale", "filtered", "failed", "cancelled"})


def exposition(gateway: Gateway) -> str:
    """Returns all metrics of a gateway."""
    return prometheus(PREFIX, [*_turns(gateway), *_sessions(gateway), *_engines(gateway)])


def _turns(gateway: Gateway) -> list[Family]:
    metrics = gateway.metrics
    ratio = metrics.cached_tokens / metrics.prompt_tokens if metrics.prompt_tokens else 0.0
    return [
        ("turns_total", "counter", metrics.turns, ""),
        ("turn_seconds", "histogram", metrics.turn_seconds, ""),
        ("undelivered_turns", "gauge", metrics.undelivered_turns, ""),
        ("abandoned_calls_total", "counter", metrics.abandoned_calls, ""),
        ("client_closed_turns_total", "counter", metrics.client_closed_turns, ""),
        ("retries_joined_total", "counter", metrics.retries_joined, ""),
        ("prompt_tokens_total", "counter", metrics.prompt_tokens, ""),
        ("rendered_tokens_total", "counter", metrics.rendered_tokens, ""),
        ("rerendered_tokens_total", "counter", metrics.rerendered_tokens, ""),
        ("drifted_turns_total", "counter", metrics.drifted_turns, ""),
        ("shielded_requests_total", "counter", gateway.renderer.escaped_requests, ""),
        ("dropped_frames_total", "counter", gateway.renderer.invalidated_templates, ""),
        ("output_tokens_total", "counter", metrics.output_tokens, ""),
        ("cached_tokens_total", "counter", metrics.cached_tokens, ""),
        ("tidegate_cache_hit_ratio", "gauge", ratio, ""),
        ("unknown_version_turns_total", "counter", metrics.unknown_version_turns, ""),
        ("branches_total", "counter", metrics.branches, "reason"),
        ("tool_call_parses_total", "counter", metrics.parses, "status"),
        ("refusals_total", "counter", metrics.refusals, "code"),
        ("overridden_parameters_total", "counter", metrics.overridden, "parameter"),
    ]


def _sessions(gateway: Gateway) -> list[Family]:
    states = Counter(session.state for session in gateway.sessions.all())
    groups = Counter(row["state"] for row in group_rows(gateway.sessions, gateway.groups))
    acked: Counter[str] = Counter()
    for outcome, count in gateway.groups.acked.items():  # any text: bound the number of labels
        acked[outcome if outcome in _ACKS else "other"] += count
    return [
        ("outcomes_total", "counter", gateway.metrics.outcomes, "outcome"),
        ("sessions", "gauge", states, "state"),
        ("groups", "gauge", groups, "state"),
        ("groups_sealed_total", "counter", gateway.groups.sealed, ""),
        ("groups_acked_total", "counter", acked, "outcome"),
        ("stuck_rewards", "gauge", gateway.scorer.stuck, ""),
    ]


def _engines(gateway: Gateway) -> list[Family]:
    pool = gateway.pool
    engines = pool.engines()
    return [
        ("engines", "gauge", Counter(engine.state for engine in engines), "state"),
        ("engine_healthy", "gauge", {engine.url: int(engine.healthy) for engine in engines}, "engine"),
        ("engine_calls", "gauge", {engine.url: engine.busy for engine in engines}, "engine"),
        ("engine_limit", "gauge", {engine.url: engine.limit for engine in engines}, "engine"),
        ("waiting_calls", "gauge", pool.waiting, ""),
        ("engine_errors_total", "counter", pool.errors, ""),
        ("continued_calls_total", "counter", pool.continued, ""),
    ]
