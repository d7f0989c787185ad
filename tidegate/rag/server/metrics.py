"""Metrics of one retrieval server."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from tidegate.prometheus import Family, Histogram

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


@dataclass(slots=True)
class RetrievalMetrics:
    """Counters and histograms since the start. All label values are fixed in the code."""

    requests: Counter[str] = field(default_factory=Counter)
    """Search requests by route."""
    queries: int = 0
    cache_hits: int = 0
    joined: int = 0
    """Queries that shared the computation of an equal query in progress."""
    dropped: int = 0
    """Queries whose callers had all left before the computation."""
    errors: Counter[str] = field(default_factory=Counter)
    """Error replies by code."""
    reloads: int = 0
    request_seconds: Histogram = field(default_factory=lambda: Histogram(_SECONDS))
    """Duration of successful searches."""
    wait_seconds: Histogram = field(default_factory=lambda: Histogram(_SECONDS))
    """Time from a query to the start of its batch."""
    batch_seconds: Histogram = field(default_factory=lambda: Histogram(_SECONDS))
    batch_size: Histogram = field(default_factory=lambda: Histogram(_BATCHES))

    def families(self) -> Sequence[Family]:
        return [
            ("requests_total", "counter", self.requests, "route"),
            ("queries_total", "counter", self.queries, ""),
            ("cache_hits_total", "counter", self.cache_hits, ""),
            ("joined_queries_total", "counter", self.joined, ""),
            ("dropped_queries_total", "counter", self.dropped, ""),
            ("errors_total", "counter", self.errors, "code"),
            ("reloads_total", "counter", self.reloads, ""),
            ("request_seconds", "histogram", self.request_seconds, ""),
            ("wait_seconds", "histogram", self.wait_seconds, ""),
            ("batch_seconds", "histogram", self.batch_seconds, ""),
            ("batch_size", "histogram", self.batch_size, ""),
        ]
