"""The text of /metrics, as Prometheus' own parser reads it."""

from __future__ import annotations

import math

from prometheus_client.parser import text_string_to_metric_families

from tidegate.prometheus import Histogram, prometheus


def test_values_that_are_not_finite_are_written_as_the_format_spells_them() -> None:
    seconds = Histogram((1.0, 2.0))
    seconds.add(math.nan)
    text = prometheus(
        "tidegate_x",
        [
            ("ratio", "gauge", math.nan, ""),
            ("by_name", "gauge", {"high": math.inf, "low": -math.inf, "zero": 0.0}, "name"),
            ("seconds", "histogram", seconds, ""),
        ],
    )
    values = {
        (sample.name.removeprefix("tidegate_x_"), *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert math.isnan(values[("ratio",)])
    assert math.isnan(values[("seconds_sum",)])
    assert values[("by_name", "high")] == math.inf
    assert values[("by_name", "low")] == -math.inf
    assert values[("seconds_count",)] == 1
