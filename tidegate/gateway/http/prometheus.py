"""Collects a gateway's metrics for Prometheus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import Metric

from tidegate.gateway.gateway import Gateway
from tidegate.gateway.http.schemas import group_rows
from tidegate.gateway.metrics import PREFIX
from tidegate.prometheus import counter, gauge, metrics_of

_ACKS = frozenset({"trained", "stepped", "stale", "filtered", "failed", "cancelled"})


def collect(gateway: Gateway) -> Iterator[Metric]:
    """Yields all metrics of a gateway."""
    metrics, groups, pool = gateway.metrics, gateway.groups, gateway.pool
    engines = pool.engines()
    sessions = gateway.sessions.all()
    states = Counter(session.state for session in sessions)
    conversations = sum(session.conversation is not None and session.ending is None for session in sessions)
    group_states = Counter(row["state"] for row in group_rows(gateway.sessions, groups))
    acked: Counter[str] = Counter()
    for outcome, count in groups.acked.items():  # any text: bound the number of labels
        acked[outcome if outcome in _ACKS else "other"] += count
    ratio = metrics.cached_tokens / metrics.prompt_tokens if metrics.prompt_tokens else 0.0
    yield from metrics_of(PREFIX, metrics)
    yield gauge("tidegate_cache_hit_ratio", ratio)
    renderers = list(gateway.policies.renderers())
    yield counter(f"{PREFIX}_shielded_requests", sum(one.escaped_requests for one in renderers))
    yield counter(f"{PREFIX}_dropped_frames", sum(one.invalidated_templates for one in renderers))
    yield gauge(f"{PREFIX}_sessions", states, "state")
    yield gauge(f"{PREFIX}_groups", group_states, "state")
    yield gauge(f"{PREFIX}_conversations", conversations)
    yield counter(f"{PREFIX}_groups_sealed", groups.sealed)
    yield counter(f"{PREFIX}_groups_acked", acked, "outcome")
    yield gauge(f"{PREFIX}_attempts_queued", gateway.attempts.queued)
    yield gauge(f"{PREFIX}_workers", sum(row["connected"] for row in gateway.attempts.workers()))
    yield gauge(f"{PREFIX}_engines", Counter(engine.state for engine in engines), "state")
    yield gauge(f"{PREFIX}_engine_healthy", {engine.url: engine.healthy for engine in engines}, "engine")
    yield gauge(f"{PREFIX}_engine_calls", {engine.url: engine.busy for engine in engines}, "engine")
    yield gauge(f"{PREFIX}_engine_limit", {engine.url: engine.limit for engine in engines}, "engine")
    yield gauge(f"{PREFIX}_waiting_calls", pool.waiting)
    yield counter(f"{PREFIX}_engine_errors", pool.errors)
    yield counter(f"{PREFIX}_continued_calls", pool.continued)
