"""The Grafana dashboard queries metrics and labels that the gateway has."""

from __future__ import annotations

import json
import re
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from tests import REPO
from tests.fakes import staged
from tests.integration.gateway.test_journal import ASK, TASK, model
from tidegate.types import Outcome

__all__ = ["model"]
DASHBOARD = REPO / "examples" / "monitoring" / "grafana.json"
METRIC = re.compile(r"tidegate_\w+")
LABELS = re.compile(r"by \((\w+)\)[^{]*?(tidegate_\w+)")


async def test_every_query_is_of_a_metric_with_its_label(model: Path) -> None:
    queries = [
        target["expr"] for panel in json.loads(DASHBOARD.read_text())["panels"] for target in panel["targets"]
    ]
    assert len(queries) > 20
    async with staged(model) as stage:
        access = await stage.client.open_session(task=TASK)
        await (await stage.llm(access)).chat.completions.create(model="m", messages=ASK)
        await stage.client.finish(access.session_id, outcome=Outcome.COMPLETED, reward=1.0)
        text = await stage.client.metrics()
    families = list(text_string_to_metric_families(text))
    labels = {sample.name: set(sample.labels) for family in families for sample in family.samples}
    known = (
        {family.name for family in families} | {f"{family.name}_total" for family in families} | set(labels)
    )
    for query in queries:
        assert (found := METRIC.findall(query))
        assert set(found) <= known, query
        for label, name in LABELS.findall(query):
            assert label in labels.get(name, {label}), f"{query}: {name} has {labels[name]}"
