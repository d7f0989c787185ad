"""The simulator against results worked out by hand, and against the invariants of real runs."""

from __future__ import annotations

import functools
import json
import random
from pathlib import Path
from typing import Any

import pytest

from tidegate.cli import main
from tidegate.config import load_settings
from tidegate.errors import ConfigError, TidegateError
from tidegate.simulation import ceilings
from tidegate.simulation.calibrate import Sample, engine_of, scenario_of
from tidegate.simulation.engines import Clock, Pool, SimulatedEngine, SimulatedRequest
from tidegate.simulation.scenario import (
    AgentModel,
    EngineModel,
    PolicyEngines,
    RuleModel,
    Scenario,
    SimulatedTurn,
    Spread,
    TrainerModel,
    WeightsModel,
)
from tidegate.simulation.sweep import Cell, scenarios, splits_of, table
from tidegate.simulation.world import SimulatedRun

LONG_TAIL = Scenario(
    steps=30,
    engine=EngineModel(count=4, slots=32, iteration_s=0.02, request_s=1e-4, prompt_token_s=1e-5),
    agent=AgentModel(tokens=Spread(median=200, sigma=1.0, longest=2000), failed=0.05, alike=0.2),
    trainer=TrainerModel(step_s=1.0, token_s=1e-4, publish_s=0.5),
    rules=RuleModel(groups_per_batch=8, group_size=4),
)


def ends_of(model: EngineModel, arrivals: list[tuple[float, float, float]]) -> list[float]:
    """When each of (at, prompt, tokens) is done on one engine."""
    clock = Clock()
    engine = SimulatedEngine(clock, model)
    ends = [0.0] * len(arrivals)

    def arrive(number: int, prompt: float, tokens: float) -> None:
        engine.add(
            SimulatedRequest(prompt, tokens, lambda: ends.__setitem__(number, clock.now), lambda: None)
        )

    for number, (at, prompt, tokens) in enumerate(arrivals):
        clock.after(at, lambda n=number, p=prompt, t=tokens: arrive(n, p, t))
    while clock.step():
        pass
    return ends


def test_requests_share_the_iterations() -> None:
    model = EngineModel(iteration_s=1.0, request_s=0.5)
    # Alone 1.5 s a token; together 2 s a token.
    assert ends_of(model, [(0, 0, 10)]) == pytest.approx([15.0])
    assert ends_of(model, [(0, 0, 10), (0, 0, 10)]) == pytest.approx([20.0, 20.0])
    assert ends_of(model, [(0, 0, 4), (0, 0, 10)]) == pytest.approx([8.0, 8.0 + 6 * 1.5])


def test_slots_are_limited_and_prompts_stall_the_others() -> None:
    assert ends_of(EngineModel(iteration_s=1.0, slots=1), [(0, 0, 3), (1, 0, 2)]) == pytest.approx([3, 5])
    model = EngineModel(iteration_s=1.0, prompt_token_s=0.1)
    assert ends_of(model, [(0, 0, 10), (2, 50, 1)]) == pytest.approx([15.0, 8.0])


def test_a_pause_stops_progress_and_what_comes_meanwhile_begins_after_it() -> None:
    clock, begun, ends = Clock(), [], []
    engine = SimulatedEngine(clock, EngineModel(iteration_s=1.0))
    engine.add(SimulatedRequest(0, 4, lambda: ends.append(clock.now), lambda: begun.append(clock.now)))
    clock.after(1.0, engine.pause)
    late = SimulatedRequest(0, 1, lambda: ends.append(clock.now), lambda: begun.append(clock.now))
    clock.after(2.0, lambda: engine.add(late))
    clock.after(5.0, engine.resume)
    while clock.step():
        pass
    assert begun == [0.0, 5.0]
    assert ends == pytest.approx([6.0, 8.0])


def test_requests_of_a_lost_engine_go_on_elsewhere_with_what_is_left() -> None:
    clock, ends = Clock(), []
    pool = Pool(clock, EngineModel(count=2, iteration_s=1.0, recover_s=1000.0), random.Random(0))
    pool.engines[0].add(SimulatedRequest(0, 10, lambda: ends.append(clock.now), lambda: None))
    clock.after(4.0, lambda: pool._lose(pool.engines[0]))
    while not ends:
        assert clock.step()
    assert ends == pytest.approx([10.0])


@pytest.mark.parametrize("bound", [0, 1, 2, 4, None])
@pytest.mark.parametrize("interval", [1, 3])
def test_the_bound_holds_and_every_token_is_accounted_for(bound: int | None, interval: int) -> None:
    world = SimulatedRun(LONG_TAIL.with_(rules={"max_staleness": bound, "publish_interval": interval}))
    figures = world.run()
    assert figures.staleness_max <= (bound if bound is not None else 10_000)
    flying = sum(one.sampled for group in world._attempts.values() for one in group.values())
    tally = world._counts
    assert tally.sampled == pytest.approx(tally.trained + sum(tally.lost.values()) + flying)
    assert 0 < figures.goodput <= 1


def test_synchronous_wastes_nothing_on_staleness_and_is_slower() -> None:
    slow, fast = [
        SimulatedRun(LONG_TAIL.with_(rules={"max_staleness": bound}, agent={"alike": 0.0})).run()
        for bound in (0, 4)
    ]
    assert "stale" not in slow.lost
    assert slow.staleness_mean == 0
    assert fast.trained_tokens_per_s > 1.5 * slow.trained_tokens_per_s


def test_what_comes_before_the_first_request_takes_time_and_ages_nothing() -> None:
    alike = LONG_TAIL.with_(agent={"alike": 0.0, "failed": 0.0, "tokens": Spread(median=50)})
    for bound in (0, 4):
        plain = alike.with_(rules={"max_staleness": bound})
        quick, late = (
            SimulatedRun(plain).run(),
            SimulatedRun(plain.with_(agent={"setup": Spread(median=5.0)})).run(),
        )
        if bound == 0:
            assert late.step_s - quick.step_s == pytest.approx(5.0, abs=0.01)
        else:
            assert late.step_s < quick.step_s + 1.5, "others are under way meanwhile"
            assert late.staleness_mean < quick.staleness_mean


def test_the_same_seed_gives_the_same_figures_and_lost_engines_are_counted() -> None:
    shaky = LONG_TAIL.with_(engine={"failures_per_hour": 20.0, "recover_s": 5.0})
    first, second = SimulatedRun(shaky).run(), SimulatedRun(shaky).run()
    assert first == second
    assert first.engines_lost > 0
    assert SimulatedRun(shaky.model_copy(update={"seed": 1})).run() != first


def test_where_every_attempt_fails_it_says_so() -> None:
    hopeless = LONG_TAIL.with_(agent={"alike": 1.0}, rules={"max_staleness": 0})
    with pytest.raises(TidegateError, match="trained on nothing"):
        SimulatedRun(hopeless).run()


def test_a_sweep_tries_every_split_with_every_bound() -> None:
    few = LONG_TAIL.model_copy(update={"steps": 5})
    cells = [Cell.of(one) for one in scenarios(few, splits_of(8, parts=2), [0, 2])]
    assert [(one.engines, one.trainers, one.staleness) for one in cells] == [(4, 4, 0), (4, 4, 2)]
    text = table(cells)
    assert "1.00x" in text
    assert text.count("best") == 1


@pytest.mark.parametrize("policies", [{"": 0.004}, {"solver": 0.004, "rival": 0.008}])
def test_calibration_finds_the_speeds_that_a_run_had(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], policies: dict[str, float]
) -> None:
    """Episodes made with known speeds by the engine model itself, written as a run writes them.

    Each episode is of one policy; the rival is frozen, and its engine is slower.
    """
    rng, clock = random.Random(1), Clock()
    lines: list[dict[str, Any]] = []
    issued = []
    models = {
        name: EngineModel(iteration_s=speed, request_s=0.0005, prompt_token_s=1e-5, slots=64)
        for name, speed in policies.items()
    }
    engines = [(name, SimulatedEngine(clock, model)) for name, model in models.items()]

    def episode(policy: str, engine: SimulatedEngine) -> None:
        prompt, tokens, started = rng.randint(1, 60), rng.randint(5, 60), clock.now

        def done() -> None:
            turn = {
                "started": 1000 + started, "seconds": clock.now - started + 0.01,
                "delta_ids": [0] * prompt, "output_ids": [0] * tokens,
                **({"policy": policy} if policy else {}),
            }  # fmt: skip
            issued.append(1000 + started - 0.05)
            attempt = {"attempt": f"a{len(lines)}"}
            lines.append({"turns": [turn], "seconds": clock.now - started + 0.03, "metadata": attempt})

        engine.add(SimulatedRequest(prompt, tokens, done, lambda: None))

    for number in range(800 * len(engines)):
        clock.after(rng.triangular(0, 40, 5), functools.partial(episode, *engines[number % len(engines)]))
    while clock.step():
        pass
    (tmp_path / "trajectories").mkdir()
    (tmp_path / "trajectories" / "step_000001.jsonl").write_text("\n".join(map(json.dumps, lines)))
    text = '[model]\npath = "m"\n[trainer]\nmax_staleness = 3\npublish_full_every = 4\n'
    of_policies = "[policies.solver]\n[policies.rival]\ntrain = false\n"
    text += "[gateway]\nshards = 2\n" if "" in policies else of_policies
    (tmp_path / "config.toml").write_text(text)
    for name, size in (("v000000", 10), ("v000008", 30), ("delta-v000009", 5)):
        (tmp_path / "weights" / name).mkdir(parents=True)
        (tmp_path / "weights" / name / "model.safetensors").write_bytes(bytes(size))
    rows = [
        {
            "step": n, "version": n, "time/update": 0.5 + 0.002 * (1000 + 100 * n), "time/publish": 0.25,
            "time/step": 5.0, "time/wait_for_batch": 1.0, "tokens/trained": 1000 + 100 * n,
        }
        for n in range(1, 6)
    ]  # fmt: skip
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    ends = [("g1", "stepped"), ("g2", "filtered"), ("g3", "stepped"), ("g4", "cancelled")]
    book: list[dict[str, Any]] = []
    for group, state in ends:
        book.append({"kind": "group", "event": "issued", "id": group})
        book.append({"kind": "group", "event": "ended", "id": group, "state": state})
    book += [
        {"kind": "attempt", "event": "issued", "id": f"a{n}", "group": "g1", "time": time}
        for n, time in enumerate(issued)
    ]
    book = [{"seq": seq, **one} for seq, one in enumerate(book)]
    (tmp_path / "ledger.jsonl").write_text("".join(json.dumps(one) + "\n" for one in book))

    found = scenario_of(tmp_path)

    assert {*found.engines} == {*policies}
    for name, speed in policies.items():
        assert found.engines[name].iteration_s == pytest.approx(speed, rel=0.25)
        assert found.engines[name].request_s == pytest.approx(0.0005, rel=0.25)
    assert found.trainer.step_s == pytest.approx(0.5, rel=0.01)
    assert found.trainer.token_s == pytest.approx(0.002, rel=0.01)
    assert found.trainer.publish_s == 0.25
    assert found.rules.max_staleness == 3
    assert found.gateway.shards == (2 if "" in policies else 1)
    assert found.weights == WeightsModel(gigabytes=3e-8, full_every=4 if "" in policies else 1)
    assert found.agent.alike == pytest.approx(1 / 3)
    assert len(found.agent.episodes) == len(lines) == 800 * len(policies)
    assert [turn.before_s for (turn,) in found.agent.episodes] == pytest.approx([0.05] * len(lines), abs=1e-3)
    trained = {turn.policy: turn.trained for (turn,) in found.agent.episodes}
    assert trained == {name: name != "rival" for name in policies}
    words = ["--steps=5", "--agent.alike=0", *(f"--policies.{name}.count=2" for name in policies if name)]
    assert main(["simulate", "--from", str(tmp_path), "--json", *words]) == 0
    (cell,) = json.loads(capsys.readouterr().out)["cells"]
    assert (cell["steps"], cell["engines"]) == (4, 4 if len(policies) > 1 else 1)


def test_a_step_waits_for_the_engines_of_every_policy() -> None:
    """10 tokens of one policy's engine take 10 s, 5 of the other's too, and a step and its publish 3 + 2."""
    rival = SimulatedTurn(0, 5, 0, policy="rival", trained=False)
    turns = (SimulatedTurn(0, 10, 0, policy="solver"), rival)
    scenario = Scenario(
        steps=10,
        policies={
            "solver": PolicyEngines(iteration_s=1),
            "rival": PolicyEngines(iteration_s=2, count=3, train=False),
        },
        agent=AgentModel(episodes=(turns,)),
        trainer=TrainerModel(step_s=3, token_s=0, publish_s=2),
        rules=RuleModel(groups_per_batch=1, group_size=1, max_staleness=0),
    )
    found = SimulatedRun(scenario).run()
    assert found.step_s == pytest.approx(10 + 10 + 3 + 2)
    assert found.trained_tokens_per_s == pytest.approx(10 / 25)
    assert found.sampled_tokens_per_s == pytest.approx(15 / 25)
    assert found.lost == {"frozen": pytest.approx(1 / 3)}
    assert found.goodput == pytest.approx(2 / 3)
    assert found.engines_busy == pytest.approx(20 / 25 / 4)


def test_drawn_turns_are_of_the_policies_by_their_weights() -> None:
    policies = {"solver": PolicyEngines(turns=3, count=2), "judge": PolicyEngines(train=False)}
    scenario = LONG_TAIL.model_copy(update={"engine": EngineModel(), "policies": policies})
    drawn = AgentModel(turns=Spread(median=4000)).draw(random.Random(0), policies)
    share = sum(turn.policy == "solver" for turn in drawn) / len(drawn)
    assert share == pytest.approx(0.75, abs=0.03)
    assert all(turn.trained == (turn.policy == "solver") for turn in drawn)
    found = SimulatedRun(scenario).run()
    assert found.lost["frozen"] > 0
    assert found.staleness_max <= 2
    assert ceilings.part_of(scenario) == (scenario, 1)
    assert scenario.engine_count == 3


@pytest.mark.parametrize("prompt_token_s", [0.0, 5e-4])
def test_the_cost_of_prompts_is_separated_from_that_of_replies(prompt_token_s: float) -> None:
    """All prompts are of one length, as a task's often are; 0.05 s of each reply are spent outside."""
    rng = random.Random(2)
    model = EngineModel(iteration_s=0.004, request_s=0.0002, prompt_token_s=prompt_token_s, slots=64)
    arrivals = [(rng.triangular(0, 20, 5), 40.0, float(rng.randint(5, 60))) for _ in range(400)]
    samples = [
        Sample(at, end - at + 0.05, prompt, tokens)
        for (at, prompt, tokens), end in zip(arrivals, ends_of(model, arrivals), strict=True)
    ]
    found, overhead = engine_of(load_settings(None, ["--model.path=m"]), samples)
    assert found.prompt_token_s == pytest.approx(prompt_token_s, rel=0.4, abs=5e-5)
    assert overhead == pytest.approx(0.05, abs=0.04)


def test_replies_of_several_engines_are_distinguished_from_those_of_one() -> None:
    """Two engines that the run started, each with one of every two requests that are alike."""
    rng = random.Random(3)
    model = EngineModel(iteration_s=0.004, request_s=0.0005, slots=64)
    arrivals = [(rng.triangular(0, 20, 5), 40.0, float(rng.randint(5, 60))) for _ in range(400)]
    ended = zip(arrivals, ends_of(model, arrivals), strict=True)
    samples = [Sample(at, end - at, prompt, tokens) for (at, prompt, tokens), end in ended for _ in range(2)]
    found, _ = engine_of(load_settings(None, ["--model.path=m", "--engine.count=2"]), samples)
    assert found.count == 2
    assert found.request_s == pytest.approx(0.0005, rel=0.25)


def test_a_damaged_file_of_episodes_is_named(tmp_path: Path) -> None:
    (tmp_path / "trajectories").mkdir()
    (tmp_path / "trajectories" / "step_000001.jsonl").write_text('{"turns": [\n')
    (tmp_path / "config.toml").write_text('[model]\npath = "m"\n')
    (tmp_path / "ledger.jsonl").touch()
    with pytest.raises(TidegateError, match=r"step_000001\.jsonl, line 1: not JSON"):
        scenario_of(tmp_path)


def test_too_small_a_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text('[model]\npath = "m"\n')
    with pytest.raises(TidegateError, match="there is no ledger"):
        scenario_of(tmp_path)
    (tmp_path / "ledger.jsonl").touch()
    with pytest.raises(TidegateError, match="too few to calibrate"):
        scenario_of(tmp_path)


def test_the_verb_prints_a_table_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "s.toml"
    file.write_text("steps = 4\n[rules]\ngroups_per_batch = 4\ngroup_size = 2\n")
    picture = tmp_path / "s.png"
    words = ["simulate", str(file), "--staleness", "0,2,none", "--plot", str(picture)]
    assert main([*words, "--agent.tokens.median", "50"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("\n") == 5
    assert picture.stat().st_size > 1000
    assert main(["simulate", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["cells"][0]["max_staleness"] == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--engine.cuont", "2"], "engine.count"),
        (["--staleness", "-1"], "less than 0"),
        (["--split", "4:x"], "not a whole number"),
        (["--accelerators", "1"], "less than 2"),
        (["--agent.failed", "1.5"], "agent.failed"),
        (["--steps", "1"], "steps = 1"),
        (["--policies.a.train", "false"], "policies: none is trained"),
        (["--policies.a.count", "2", "--engine.slots", "8"], "set policies.NAME.slots"),
        (["--policies.a.count", "2", "--split", "2:1"], "set policies.NAME.count instead"),
        (["--rules.min_group_size", "9"], "more than group_size = 8"),
        (["--plot", "picture.gif"], "must end in one of .png, .svg, .pdf"),
        (["--plot", "/nowhere/picture.png"], "no such directory"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", *words]) == ConfigError.exit_code
    assert said in capsys.readouterr().err


def test_a_run_that_is_given_as_a_scenario_is_answered_with_the_option(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", str(tmp_path)]) == 2
    assert f"for a run, tidegate simulate --from {tmp_path}" in capsys.readouterr().err
