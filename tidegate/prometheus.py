"""Builds metric families for Prometheus' text format; no registry is shared between servers of a process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from prometheus_client import Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

CONTENT_TYPE = "text/plain; version=0.0.4"
Values = float | Mapping[str, float]
"""A value, or values by label."""


def counter(name: str, values: Values, label: str = "") -> Metric:
    """Returns a counter; `name` is without `_total`."""
    return _filled(CounterMetricFamily(name, "", labels=[label]), values)


def gauge(name: str, values: Values, label: str = "") -> Metric:
    return _filled(GaugeMetricFamily(name, "", labels=[label]), values)


def _filled(family: CounterMetricFamily | GaugeMetricFamily, values: Values) -> Metric:
    if isinstance(values, Mapping):
        for key in sorted(values):
            family.add_metric([key], values[key])
    else:
        family.add_metric([], values)
    return family


def labelled(label: str) -> Any:
    """Returns a dataclass field that counts by the values of a label."""
    return field(default_factory=Counter, metadata={"label": label})


def level() -> Any:
    """Returns a dataclass field with a number that may fall."""
    return field(default=0, metadata={"make": gauge})


def histogram(name: str, bounds: tuple[float, ...]) -> Any:
    """Returns a dataclass field with a histogram."""
    return field(default_factory=lambda: Histogram(name, "", buckets=bounds, registry=None))


def metrics_of(prefix: str, counts: Any) -> Iterator[Metric]:
    """Yields the fields of a dataclass as metrics `<prefix>_<field>`."""
    for count in fields(counts):
        value = getattr(counts, count.name)
        if isinstance(value, Histogram):
            yield from value.collect()
        else:
            make = count.metadata.get("make", counter)
            yield make(f"{prefix}_{count.name}", value, count.metadata.get("label", ""))


def merged(texts: Mapping[str, str], label: str) -> list[Metric]:
    """Returns the metrics of several processes; every sample gets `label` with its process.

    Samples are not added up, because ratios and quantiles cannot be; PromQL can do it with `sum without (…)`.
    """
    families: dict[str, Metric] = {}
    for key, text in texts.items():
        for family in text_string_to_metric_families(text):
            whole = families.setdefault(family.name, Metric(family.name, "", family.type))
            for sample in family.samples:
                whole.add_sample(sample.name, {**sample.labels, label: key}, sample.value)
    return list(families.values())


@dataclass(frozen=True, slots=True)
class _Families(Collector):
    families: Iterable[Metric]

    def collect(self) -> Iterable[Metric]:
        return self.families


def exposition(families: Iterable[Metric]) -> bytes:
    """Returns metrics in the text format."""
    return generate_latest(_Families(families))
