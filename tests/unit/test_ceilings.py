"""Loads of single processes: by hand, monotone in every rate, and with costs that are read from a file."""

from __future__ import annotations

import json
import os
import random
from dataclasses import fields, replace
from pathlib import Path

import pytest

from tidegate.cli import main
from tidegate.errors import ConfigError
from tidegate.simulation.ceilings import (
    ENTRIES,
    Component,
    Rates,
    bytes_per_s,
    ceilings_table,
    components,
    part_of,
)
from tidegate.simulation.costs import Costs
from tidegate.simulation.scenario import (
    AgentModel,
    EngineModel,
    GatewayModel,
    RuleModel,
    Scenario,
    Spread,
    TrainerModel,
    WeightsModel,
)
from tidegate.simulation.world import SimulatedRun
from tidegate.trainer.admission.core import Admission
from tidegate.trainer.ledger.entries import LedgerEntry
from tidegate.types import Outcome
from tidegate.weights import delta_files

NOTHING = Costs(**dict.fromkeys(Costs.model_fields, 0.0))
RATES = Rates(
    sessions=10.0, turns=80.0, sampled_tokens=16_000.0, prompt_tokens=8_000.0, groups=2.0, steps=0.1,
    publishes=0.05, engines=6,
)  # fmt: skip
ONE = Scenario()


def costs(**values: float) -> Costs:
    return NOTHING.model_copy(update=values)


def with_costs(scenario: Scenario, which: Costs) -> Scenario:
    return scenario.model_copy(update={"costs": which})


def loads(scenario: Scenario, which: Costs, rates: Rates = RATES) -> dict[str, Component]:
    return {one.name: one for one in components(rates, with_costs(scenario, which))}


def test_each_part_of_the_gateway_has_its_rate_times_its_cost() -> None:
    which = costs(
        gateway_turn_s=1e-3, gateway_token_s=1e-5, gateway_prompt_token_s=2e-5, gateway_session_s=3e-3,
        gateway_poll_s=1e-3, gateway_group_s=5e-3, gateway_group_token_s=1e-6, gateway_probe_s=2e-3,
    )  # fmt: skip
    gateway = loads(ONE, which)["gateway"]
    assert gateway.parts == pytest.approx({
        "turns": 0.08, "tokens": 0.16 + 0.16, "sessions": 0.04, "groups": 0.01 + 0.024,
        "probes": 6 / 2 * 2e-3,
    })  # fmt: skip
    assert gateway.load == pytest.approx(0.48)


def test_streamed_turns_have_costs_of_their_own() -> None:
    which = costs(
        gateway_turn_s=1e-3, gateway_streamed_turn_s=3e-3, gateway_token_s=1e-6, gateway_streamed_token_s=5e-6
    )
    parts = loads(Scenario(gateway=GatewayModel(streamed=0.25)), which)["gateway"].parts
    assert parts["turns"] == pytest.approx(80 * 1.5e-3)
    assert parts["tokens"] == pytest.approx(16_000 * 2e-6)


def test_shards_share_all_but_the_probes_and_have_a_router() -> None:
    which = costs(
        gateway_turn_s=1e-3, gateway_token_s=1e-5, gateway_prompt_token_s=1e-5, gateway_session_s=1e-3,
        gateway_group_s=1e-3, gateway_probe_s=1e-3, router_session_s=2e-3, router_poll_s=1e-3,
        router_group_s=5e-3, router_group_token_s=1e-6,
    )  # fmt: skip
    alone = loads(ONE, which)
    found = loads(Scenario(gateway=GatewayModel(shards=4)), which)
    assert "router of the shards" not in alone
    shard = found["gateway, each of 4 shards"].parts
    assert shard == pytest.approx(
        {name: load / (1 if name == "probes" else 4) for name, load in alone["gateway"].parts.items()}
    )
    assert found["router of the shards"].parts == pytest.approx({"sessions": 0.03, "groups": 0.01 + 0.024})


def test_each_part_of_the_trainer_has_its_rate_times_its_cost() -> None:
    which = costs(
        trainer_session_s=2e-3, trainer_group_s=4e-3, trainer_group_token_s=1e-7, admission_group_s=1e-3,
        admission_attempt_s=1e-4, ledger_entry_s=1e-3, rows_token_s=1e-6, trajectory_token_s=2e-6,
        metrics_token_s=5e-7, metrics_line_s=0.1,
    )  # fmt: skip
    assert loads(ONE, which)["trainer"].parts == pytest.approx({
        "sessions": 0.02, "groups": 0.008 + 0.0024, "admission": 0.002 + 0.001, "ledger": 0.024,
        "rows": 0.024, "trajectories": 0.048, "metrics": 0.012 + 0.01,
    })  # fmt: skip


def test_publishing_grows_with_the_weights_and_sending_with_the_engines() -> None:
    which = costs(
        publish_full_byte_s=1e-9, publish_difference_byte_s=4e-9, difference_share=0.1,
        broadcast_gather_byte_s=2e-9, broadcast_byte_s=1e-9, broadcast_difference_byte_s=3e-9,
    )  # fmt: skip
    files = WeightsModel(
        gigabytes=10, full_every=5, threads=2
    )  # 0.5 GB/s in the mean: 0.1 in full, 0.4 as differences
    assert loads(Scenario(weights=files), which)["publishing"].parts == pytest.approx(
        {"all weights": 0.1, "differences": 0.8}
    )
    sent = files.model_copy(update={"transport": "broadcast"})
    assert loads(Scenario(weights=sent), which)["publishing"].parts == pytest.approx({
        "all weights": 0.1, "differences": 0.8, "sending all weights": 0.1 * (2 + 6),
        "sending differences": 6 * 0.04 * 3,
    })  # fmt: skip
    without = Scenario(weights=WeightsModel(gigabytes=10, full_every=1))
    assert loads(without, which)["publishing"].parts == pytest.approx({"all weights": 0.5, "differences": 0})


def test_bytes_are_those_by_hand() -> None:
    which = costs(
        journal_turn_bytes=100, journal_token_bytes=8, trajectory_token_bytes=15, difference_share=0.25
    )
    scenario = Scenario(weights=WeightsModel(gigabytes=2, full_every=4))
    version = 2e9 * (0.25 + 0.75 * 0.25)
    assert bytes_per_s(RATES, with_costs(scenario, which)) == pytest.approx({
        "journal": 8_000 + 192_000, "trajectories": 360_000, "weights": 0.05 * version,
        "weights to engines": 0.3 * version,
    })  # fmt: skip


@pytest.mark.parametrize("seed", range(50))
def test_more_of_anything_never_lowers_a_load(seed: int) -> None:
    rng = random.Random(seed)
    scenario = Scenario(
        gateway=GatewayModel(shards=rng.randint(1, 8), streamed=rng.random()),
        weights=WeightsModel(
            gigabytes=rng.uniform(0, 100), transport=rng.choice(["files", "broadcast"]),
            full_every=rng.randint(1, 20),
        ),
    )  # fmt: skip
    which = Costs(**{name: rng.random() for name in Costs.model_fields})
    rates = Rates(**{one.name: rng.randint(0, 1000) for one in fields(Rates)})
    before, sizes = loads(scenario, which, rates), bytes_per_s(rates, with_costs(scenario, which))
    more = [
        (replace(rates, **{one.name: getattr(rates, one.name) + rng.randint(1, 50)}), scenario, which)
        for one in fields(Rates)
    ]
    heavier = scenario.weights.model_copy(update={"gigabytes": scenario.weights.gigabytes + 1})
    more.append((rates, scenario.model_copy(update={"weights": heavier}), which))
    more += [(rates, scenario, which.model_copy(update={name: 1.0})) for name in Costs.model_fields]
    for changed, world, prices in more:
        after = loads(world, prices, changed)
        assert all(after[name].load >= before[name].load for name in before)
        assert all(
            size >= sizes[name] for name, size in bytes_per_s(changed, with_costs(world, prices)).items()
        )
        order = [one.load for one in components(changed, with_costs(world, prices))]
        assert order == sorted(order, reverse=True)


@pytest.mark.parametrize("name", sorted(Costs.model_fields))
def test_every_cost_counts(name: str) -> None:
    scenario = Scenario(
        gateway=GatewayModel(shards=2, streamed=0.5), weights=WeightsModel(transport="broadcast")
    )
    before, after = (Costs(**dict.fromkeys(Costs.model_fields, 0.1) | {name: value}) for value in (0.1, 0.2))

    def total(which: Costs) -> float:
        loaded = sum(one.load for one in components(RATES, with_costs(scenario, which)))
        return loaded + sum(bytes_per_s(RATES, with_costs(scenario, which)).values())

    assert total(after) > total(before)


def test_a_difference_has_at_most_as_many_threads_as_it_is_encoded_by() -> None:
    bound = next(limit.le for limit in WeightsModel.model_fields["threads"].metadata if hasattr(limit, "le"))
    assert min(bound, os.cpu_count() or 1) == delta_files.THREADS


def test_the_ledger_has_as_many_entries_of_groups_and_attempts_as_counted() -> None:
    entries: list[LedgerEntry] = []
    core = Admission(
        Scenario(rules=RuleModel(groups_per_batch=1, group_size=3)).admission_rules(), entries.append
    )
    group = core.start_group(core.cursor.next(), "t")
    assert group is not None
    for attempt in [core.start_attempt(group.id, slot) for slot in range(3)]:
        core.end_attempt(attempt, Outcome.COMPLETED)
    core.lease(group.id, 0)
    selection = core.select_batch()
    assert selection is not None
    core.step(selection, 1)
    assert len([one for one in entries if one["kind"] != "run"]) == ENTRIES * (1 + 3)


CLUSTER = Scenario(
    steps=30,
    engine=EngineModel(count=48, slots=8, iteration_s=0.02, request_s=1e-4, prompt_token_s=1e-5),
    agent=AgentModel(turns=Spread(median=3), tokens=Spread(median=50), prompt=Spread(median=20)),
    trainer=TrainerModel(count=12, step_s=1.0, token_s=1e-4, publish_s=0.5),
    rules=RuleModel(groups_per_batch=48, group_size=4, publish_interval=2),
)


def test_a_simulated_run_counts_its_events() -> None:
    figures = SimulatedRun(CLUSTER).run()
    rates = Rates.of(figures, CLUSTER)
    assert rates.turns == pytest.approx(3 * rates.sessions, rel=0.05)
    assert rates.sampled_tokens == pytest.approx(50 * rates.turns)
    assert rates.prompt_tokens == pytest.approx(20 * rates.turns)
    assert rates.groups == pytest.approx(rates.sessions / 4, rel=0.05)
    assert rates.groups == pytest.approx(48 * rates.steps, rel=0.1)
    assert rates.publishes == pytest.approx(rates.steps / 2)


def test_a_part_of_a_cluster_has_its_share_of_the_rates() -> None:
    part, parts = part_of(CLUSTER)
    assert (parts, part.engine.count, part.trainer.count, part.rules.groups_per_batch) == (3, 16, 4, 16)
    whole = Rates.of(SimulatedRun(CLUSTER).run(), CLUSTER)
    scaled = Rates.of(SimulatedRun(part).run(), part, parts)
    assert scaled.engines == whole.engines == 48
    for name in ("sessions", "turns", "sampled_tokens", "prompt_tokens", "groups", "steps", "publishes"):
        assert getattr(scaled, name) == pytest.approx(getattr(whole, name), rel=0.05), name


def test_attempts_are_divided_and_an_odd_cluster_is_not() -> None:
    few = CLUSTER.with_(agent={"max_concurrency": 100})
    assert part_of(few)[0].agent.max_concurrency == 34
    odd = CLUSTER.with_(engine={"count": 47})
    assert part_of(odd) == (odd.with_(engine={"count": 47}), 1)
    small = CLUSTER.with_(engine={"count": 24})
    assert part_of(small)[1] == 1


# ---------------------------------------------------------------------- command


def test_the_command_prints_the_bottleneck(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "s.toml"
    file.write_text("steps = 4\n[rules]\ngroups_per_batch = 4\ngroup_size = 2\n")
    assert main(["simulate", str(file), "--ceilings", "--staleness", "0,2"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("bottleneck: ") == 2
    assert printed.count("costs: measured on 2026-") == 2
    costs = "".join(f"{name} = 0.0\n" for name in Costs.model_fields if name != "publish_full_byte_s")
    file.write_text(f"{file.read_text()}[costs]\n{costs}")
    words = ["--costs.publish_full_byte_s", "1", "--weights.gigabytes", "4"]
    assert main(["simulate", str(file), "--ceilings", *words]) == 0
    assert "publish_full_byte_s" in capsys.readouterr().out.partition("costs: measured on 2026-")[2]
    assert main(["simulate", str(file), "--ceilings", *words, "--json"]) == 0
    [cell] = json.loads(capsys.readouterr().out)["cells"]
    assert cell["bottleneck"] == "publishing"
    assert cell["loads"]["publishing"]["load"] > 1
    assert cell["loads"]["gateway"]["load"] == 0


def test_the_command_refuses_what_makes_no_sense(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, said in (
        (["--ceilings", "--plot", str(tmp_path / "p.png")], "which --ceilings replaces"),
        (["--costs.gateway_trun_s", "1"], "did you mean 'costs.gateway_turn_s'"),
        (["--costs.rows_token_s", "-1"], "costs.rows_token_s = "),
        (["--weights.transport", "pigeon"], "weights.transport"),
        (["--gateway.streamed", "1.5"], "gateway.streamed"),
        (["--gateway.shard", "2"], "gateway.shards"),
    ):
        assert main(["simulate", *words]) == ConfigError.exit_code
        assert said in capsys.readouterr().err


def test_a_load_of_nothing_is_no_error() -> None:
    assert "bottleneck: gateway, at no load" in ceilings_table(RATES, with_costs(ONE, NOTHING))
