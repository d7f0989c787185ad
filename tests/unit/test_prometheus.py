"""The text of /metrics, read by Prometheus' own parser."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from prometheus_client import Histogram
from prometheus_client.parser import text_string_to_metric_families

from tidegate.prometheus import counter, exposition, gauge, histogram, labelled, merged, metrics_of


@dataclass
class Counts:
    queries: int = 0
    errors: Counter[str] = labelled("code")
    seconds: Histogram = histogram("tidegate_x_seconds", (1.0, 2.0))


def values_of(text: bytes) -> dict[tuple[str, ...], float]:
    return {
        (sample.name.removeprefix("tidegate_x_"), *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def test_values_that_are_not_finite_are_written_as_the_format_spells_them() -> None:
    counts = Counts()
    counts.seconds.observe(math.inf)
    by_name = gauge("tidegate_x_by_name", {"high": math.inf, "low": -math.inf, "zero": 0.0}, "name")
    ratio = gauge("tidegate_x_ratio", math.nan)
    values = values_of(exposition([ratio, by_name, *metrics_of("tidegate_x", counts)]))
    assert math.isnan(values[("ratio",)])
    assert values[("seconds_sum",)] == math.inf
    assert values[("by_name", "high")] == math.inf
    assert values[("by_name", "low")] == -math.inf
    assert values[("seconds_count",)] == values[("seconds_bucket", "+Inf")] == 1


def test_every_server_counts_for_itself() -> None:
    first, second = Counts(queries=12_345_678), Counts()
    first.errors['a "quoted"\nline'] += 2
    first.seconds.observe(1.5)
    values = values_of(exposition(metrics_of("tidegate_x", first)))
    assert values[("queries_total",)] == 12_345_678, "no digit is lost"
    assert values[("errors_total", 'a "quoted"\nline')] == 2
    assert (values[("seconds_bucket", "1.0")], values[("seconds_bucket", "2.0")]) == (0, 1)
    assert values_of(exposition(metrics_of("tidegate_x", second)))[("seconds_count",)] == 0


def test_processes_are_distinguished_by_a_label() -> None:
    texts = {str(index): exposition([counter("tidegate_x_a", index, "")]).decode() for index in range(2)}
    text = exposition(merged(texts, "shard"))
    assert text.count(b"# TYPE tidegate_x_a_total counter") == 1
    assert values_of(text) == {("a_total", "0"): 0, ("a_total", "1"): 1}
