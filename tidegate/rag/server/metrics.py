"""Metrics of one retrieval server."""

from __future__ import annotations

from collections import Counter
from dataclasses import KW_ONLY, dataclass

from prometheus_client import Histogram

from tidegate.prometheus import histogram, labelled

PREFIX = "tidegate_rag"
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


@dataclass(slots=True)
class RetrievalMetrics:
    """Counts since the start, each the metric `tidegate_rag_<field>_total`. Label values are fixed."""

    requests: Counter[str] = labelled("route")
    """Search requests."""
    queries: int = 0
    cache_hits: int = 0
    joined_queries: int = 0
    """Queries that shared the computation of an equal query in progress."""
    dropped_queries: int = 0
    """Queries whose callers had all left before the computation."""
    errors: Counter[str] = labelled("code")
    """Error replies."""
    reloads: int = 0
    request_seconds: Histogram = histogram(f"{PREFIX}_request_seconds", _SECONDS)
    """Duration of successful searches."""
    _: KW_ONLY
    wait_seconds: Histogram = histogram(f"{PREFIX}_wait_seconds", _SECONDS)
    """Time from a query to the start of its batch."""
    batch_seconds: Histogram = histogram(f"{PREFIX}_batch_seconds", _SECONDS)
    batch_size: Histogram = histogram(f"{PREFIX}_batch_size", _BATCHES)
