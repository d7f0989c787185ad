"""The environment service: states, tools and rewards in real worker processes, which hang and are killed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.waiting import eventually
from tidegate.cli import main
from tidegate.errors import ConfigError, RewardError, RewardUnavailableError, StartError
from tidegate.gateway.environments.base import EpisodeLostError
from tidegate.gateway.environments.client import EnvironmentClient, OwnedEnvironments
from tidegate.service.api_key import ENV_KEY
from tidegate.service.service import Service
from tidegate.types import Outcome, Task, Trajectory

FILE = Path(__file__).with_name("served.py")
TASK = Task("t", "counter", [])
ACTING = Task("t", "acting", [])


@contextlib.asynccontextmanager
async def service(name: str, **settings: Any) -> AsyncIterator[OwnedEnvironments]:
    settings = {"reward_timeout_s": 20.0, "call_timeout_s": 20.0, **settings}
    arguments = [f"--env.use={FILE}:{name}", *(f"--env.{key}={value}" for key, value in settings.items())]
    environments = OwnedEnvironments(arguments, {"options": {}})
    await environments.start()
    try:
        yield environments
    finally:
        await environments.close()


SHARED = pytest.mark.asyncio(loop_scope="module")
"""Marks tests that use a service of all of them, each with episodes of its own."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def counter() -> AsyncIterator[OwnedEnvironments]:
    async with service("Counter") as environments:
        yield environments


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def acting() -> AsyncIterator[OwnedEnvironments]:
    async with service("Acting") as environments:
        yield environments


def ended(output: str = "", env: str = "acting", episode: str = "e") -> Trajectory:
    return Trajectory(episode, "t", env, "train", Outcome.COMPLETED, [], output=output)


async def scored(environments: EnvironmentClient, output: str) -> float:
    episode = f"e-{output.partition(' ')[0]}-{time.monotonic_ns()}"
    return (await environments.score(episode, ACTING, ended(output))).reward


@SHARED
async def test_an_episode_has_a_state_tools_and_another_side(
    counter: OwnedEnvironments, tmp_path: Path
) -> None:
    info = counter.info("counter")
    assert info is not None
    assert info.stateful
    assert info.rewards == ["total"]
    assert [tool["function"]["name"] for tool in info.tools][:2] == ["add", "add_later"]
    file = tmp_path / "torn_down"
    task = Task("t", "counter", [], info={"file": str(file)})
    await counter.setup("a", task, 60.0)
    await counter.setup("b", TASK, 60.0)
    assert (await counter.call_tool("a", "add", {"number": 2})).content == "2"
    assert (await counter.call_tool("b", "add", {"number": 1})).content == "1", "each has a state of its own"
    assert (await counter.respond("a", {"role": "assistant", "content": ""})).message == {
        "role": "user", "content": "more",
    }  # fmt: skip
    await counter.setup("a", task, 60.0)  # repeated: the state stays
    assert (await counter.call_tool("a", "add", {"number": 3})).content == "5"
    last = await counter.respond("a", {"role": "assistant", "content": ""})
    assert (last.done, last.message) == (True, {"role": "user", "content": "thanks"})
    assert (await counter.score("a", task, ended(env="counter", episode="a"))).reward == 5.0
    await counter.teardown("a")
    await counter.teardown("a")
    assert file.read_text() == "5"
    with pytest.raises(EpisodeLostError, match="the episode has ended"):
        await counter.call_tool("a", "add", {"number": 1})


async def test_what_a_tool_refuses_the_agent_reads() -> None:
    async with service("Counter", call_timeout_s=1.0) as env:
        await env.setup("a", TASK, 60.0)
        for name, arguments, why in (
            ("add", {"number": -1}, "only numbers ≥ 0"),
            ("add", {"number": "many"}, "add: number: Input should be a valid integer"),
            ("add", {"number": 1, "twice": True}, "add: twice: Extra inputs"),
            ("ad", {}, "there is no tool 'ad'; did you mean 'add'?"),
            ("wait", {"seconds": 30}, "wait: it took longer than 1 s"),
        ):
            result = await env.call_tool("a", name, arguments)
            assert result.error, name
            assert why in result.content
        result = await env.call_tool("a", "long", {"length": 3_000_000})
        assert len(result.content) < 70_000
        assert "3000000 characters" in result.content
        with pytest.raises(EpisodeLostError, match="the shop's server is down"):
            await env.call_tool("a", "outage", {})
        with pytest.raises(EpisodeLostError, match="respond returned int"):
            await env.respond("a", {"role": "assistant", "content": "bad"})


@SHARED
async def test_a_repeated_call_has_one_effect_also_while_the_first_runs(counter: OwnedEnvironments) -> None:
    await counter.setup("repeated", TASK, 60.0)
    calls = [counter.call_tool("repeated", "add", {"number": 1}, key="k") for _ in range(20)]
    assert {result.content for result in await asyncio.gather(*calls)} == {"1"}
    slow = [
        counter.call_tool("repeated", "wait", {"seconds": 0.2}),
        counter.call_tool("repeated", "add", {"number": 1}),
    ]
    assert [result.content for result in await asyncio.gather(*slow)] == ["done", "2"], "one at a time"


@SHARED
async def test_a_setup_that_fails_is_no_fault_of_the_agent_and_is_not_repeated(
    counter: OwnedEnvironments,
) -> None:
    with pytest.raises(EpisodeLostError, match="setup raised ValueError: no database"):
        await counter.setup("fails", Task("t", "counter", [], info={"fails": True}), 60.0)
    with pytest.raises(EpisodeLostError, match="no database"):
        await counter.call_tool("fails", "add", {"number": 1})
    with pytest.raises(EpisodeLostError, match="no state of the episode unknown: it was restarted"):
        await counter.setup("unknown", TASK, 60.0, create=False)


async def test_a_setup_that_ends_as_it_is_cancelled_has_its_state_and_its_teardown(tmp_path: Path) -> None:
    late = Task("t", "counter", [], info={"late": True, "file": str(tmp_path / "gone")})
    async with service("Counter", call_timeout_s=0.5) as env:
        await env.setup("a", late, 60.0)
        assert (await env.call_tool("a", "add", {"number": 3})).content == "3"
        await env.teardown("a")
        assert (tmp_path / "gone").read_text() == "3"


def size_of(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


@SHARED
async def test_an_episode_that_ended_before_its_agent_began_begins_again(
    counter: OwnedEnvironments, tmp_path: Path
) -> None:
    await counter.setup("again", TASK, 60.0)
    await counter.call_tool("again", "add", {"number": 1})
    await counter.teardown("again")
    await counter.setup("again", Task("t", "counter", [], info={"file": str(tmp_path / "gone")}), 60.0)
    assert (await counter.call_tool("again", "add", {"number": 1})).content == "1"

    running = asyncio.create_task(counter.call_tool("again", "add_later", {"number": 5, "seconds": 0.5}))
    await eventually(lambda: size_of(tmp_path / "gone.begun") == 1)
    assert (await counter.score("again", TASK, ended(env="counter", episode="again"))).reward == 6.0, (
        "after the tool"
    )
    assert (await running).content == "6"
    slow = {"number": 10, "seconds": 0.5}
    calls = [asyncio.create_task(counter.call_tool("again", "add_later", slow)) for _ in range(3)]
    await eventually(lambda: size_of(tmp_path / "gone.begun") == 2)
    await counter.teardown("again")
    assert (tmp_path / "gone").read_text() == "16", "it waits for the call that runs, and for no other"
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(one) for one in results[1:]] == [EpisodeLostError] * 2
    assert "the episode has ended" in str(results[1])


@SHARED
async def test_a_state_is_torn_down_at_its_deadline(counter: OwnedEnvironments, tmp_path: Path) -> None:
    await counter.setup("short", Task("t", "counter", [], info={"file": str(tmp_path / "gone")}), 0.2)
    await eventually((tmp_path / "gone").exists)


async def test_a_killed_worker_loses_its_episodes_and_is_replaced() -> None:
    async with service("Counter", workers=2) as env:
        names = [f"e{number}" for number in range(100)]
        await asyncio.gather(*(env.setup(name, TASK, 60.0) for name in names))
        pids = {name: int((await env.call_tool(name, "process", {})).content) for name in names}
        assert sorted(map(list(pids.values()).count, set(pids.values()))) == [50, 50]
        victim = pids["e0"]
        os.kill(victim, signal.SIGKILL)
        for name, pid in pids.items():
            if pid == victim:
                with pytest.raises(EpisodeLostError, match="by SIGKILL; the episode's state is lost"):
                    await env.call_tool(name, "add", {"number": 1})
            else:
                assert (await env.call_tool(name, "add", {"number": 1})).content == "1"
        with pytest.raises(EpisodeLostError, match="SIGKILL"):
            await env.score("e0", TASK, ended(env="counter", episode="e0"))
        with pytest.raises(EpisodeLostError, match="SIGKILL"):
            await env.setup("e0", TASK, 60.0)  # it is never made anew

        async with asyncio.timeout(60.0):
            new = victim
            while new in pids.values():
                await env.setup(name := f"n{time.monotonic_ns()}", TASK, 60.0)
                new = int((await env.call_tool(name, "process", {})).content)


@SHARED
async def test_a_call_while_a_worker_ends_says_how_it_ended(counter: OwnedEnvironments) -> None:
    await counter.setup("dies", TASK, 60.0)
    pid = int((await counter.call_tool("dies", "process", {})).content)
    child = (
        await counter.call_tool("dies", "fork", {})
    ).content  # keeps the stream open past the worker's end
    os.kill(pid, signal.SIGKILL)
    await eventually(lambda: not Path(f"/proc/{pid}").exists())
    with pytest.raises(EpisodeLostError, match="by SIGKILL; the episode's state is lost"):
        await counter.call_tool("dies", "add", {"number": 1})
    await eventually(lambda: not Path(f"/proc/{child}").exists())


async def test_a_worker_whose_tool_hangs_keeps_its_other_episodes() -> None:
    async with service("Counter", call_timeout_s=0.5) as env:
        await env.setup("a", TASK, 60.0)
        await env.setup("b", TASK, 60.0)
        pid = (await env.call_tool("b", "process", {})).content
        assert (await env.call_tool("a", "wait", {"seconds": 60})).error
        assert (await env.call_tool("b", "add", {"number": 1})).content == "1"
        await env.setup("c", TASK, 60.0)
        assert (await env.call_tool("c", "process", {})).content != pid, "new episodes go to another one"
        await env.teardown("a")
        await env.teardown("b")
        await eventually(lambda: not Path(f"/proc/{pid}").exists())


async def test_rewards_that_queue_are_not_late() -> None:
    async with service("Acting", reward_timeout_s=1.0) as env:
        began = time.monotonic()
        rewards = await asyncio.gather(*(scored(env, "sleep 0.3") for _ in range(64)))
        assert set(rewards) == {1.0}
        assert time.monotonic() - began > 1.0, "the last ones waited for longer than a deadline"


@SHARED
async def test_a_judge_that_does_not_respond_is_told_from_a_reward_that_raises(
    acting: OwnedEnvironments,
) -> None:
    with pytest.raises(RewardUnavailableError, match="Connection refused"):
        await scored(acting, "fetch http://127.0.0.1:9/")
    with pytest.raises(RewardError, match="ValueError: bad") as raised:
        await scored(acting, "raise bad")
    assert not isinstance(raised.value, RewardUnavailableError)


async def test_rewards_are_computed_by_all_workers(tmp_path: Path) -> None:
    async with service("Acting", workers=2) as env:
        await asyncio.gather(*(scored(env, f"process {tmp_path / 'pids'}") for _ in range(8)))
    pids = (tmp_path / "pids").read_text().split()
    assert sorted(map(pids.count, set(pids))) == [4, 4]


async def test_a_reward_that_hangs_or_ends_its_process_costs_itself_alone() -> None:
    async with service("Acting", reward_timeout_s=3.0) as env:
        outputs = ["fine", "sleep 60", "exit", "raise it", "sleep 0.1", "fine"]
        results = await asyncio.gather(*(scored(env, text) for text in outputs), return_exceptions=True)
        assert [results[0], results[4], results[5]] == [1.0, 1.0, 1.0]
        assert all(isinstance(results[index], RewardError) for index in (1, 2, 3))
        assert "longer than 3 s" in str(results[1])
        assert "2 times while it computed this reward" in str(results[2])
        assert "raised ValueError: it" in str(results[3])
        assert await scored(env, "fine") == 1.0


@SHARED
async def test_a_worker_that_leaves_a_forked_process_is_replaced_and_the_process_ends(
    acting: OwnedEnvironments, tmp_path: Path
) -> None:
    async with asyncio.timeout(60.0):
        with pytest.raises(RewardError, match="exit code 3, 2 times"):
            await acting.score("e", ACTING, ended(f"fork {tmp_path / 'pids'}"))
        assert await scored(acting, "fine") == 1.0
    children = (tmp_path / "pids").read_text().split()
    assert len(children) == 2
    await eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children))


@SHARED
async def test_a_repeated_score_joins_the_one_in_progress(acting: OwnedEnvironments, tmp_path: Path) -> None:
    note = ended(f"note {tmp_path / 'notes'}")
    scores = await asyncio.gather(*(acting.score("e", ACTING, note) for _ in range(5)))
    assert {one.reward for one in scores} == {1.0}
    assert (tmp_path / "notes").read_text() == "scored\n"
    other = ended(f"note {tmp_path / 'others'}")
    await asyncio.gather(acting.score("e", ACTING, note), acting.score("e", ACTING, other))
    assert (tmp_path / "others").exists(), "the same episode's name, and another trajectory"


async def test_a_reward_that_holds_the_interpreters_lock_fails_alone(tmp_path: Path) -> None:
    lock = f"lock {tmp_path / 'notes'}"
    async with service("Acting", reward_timeout_s=3.0) as env:
        jobs = [asyncio.create_task(scored(env, text)) for text in (lock, "sleep 0.2", "sleep 0.3")]
        results = await asyncio.gather(*jobs, return_exceptions=True)
        assert results[1:] == [1.0, 1.0], "they were computed again, by another process"
        assert isinstance(results[0], RewardError)
        assert (tmp_path / "notes").read_text() == "scored\n" * 2, "the second time in a process of its own"
        assert await scored(env, "fine") == 1.0


async def test_a_reward_that_holds_the_lock_of_a_process_without_others_is_computed_once(
    tmp_path: Path,
) -> None:
    async with service("Acting", reward_timeout_s=0.5) as env:
        with pytest.raises(RewardError, match=r"longer than 0\.5 s"):
            await scored(env, f"lock {tmp_path / 'notes'}")
        assert (tmp_path / "notes").read_text() == "scored\n"
    async with service("Counter", reward_timeout_s=0.5) as env:
        await env.setup("a", TASK, 60.0)
        with pytest.raises(RewardError, match=r"longer than 0\.5 s"):
            await env.score("a", TASK, ended("lock", env="counter", episode="a"))


async def test_a_stopped_worker_is_replaced() -> None:
    async with service("Counter", call_timeout_s=1.0, reward_timeout_s=1.0) as env:
        await env.setup("a", TASK, 60.0)
        os.kill(int((await env.call_tool("a", "process", {})).content), signal.SIGSTOP)
        with pytest.raises(EpisodeLostError, match="SIGKILL"):
            await env.call_tool("a", "add", {"number": 1})


async def test_a_killed_service_leaves_no_worker_and_its_episodes_are_lost() -> None:
    async with service("Counter") as env:
        await env.setup("a", TASK, 60.0)
        pid = int((await env.call_tool("a", "process", {})).content)
        owned: Service = env._service
        assert owned.pid is not None
        os.kill(owned.pid, signal.SIGKILL)
        await eventually(lambda: not Path(f"/proc/{pid}").exists())
        with pytest.raises(EpisodeLostError):
            await env.call_tool("a", "add", {"number": 1})
        await env.setup("b", TASK, 60.0)
        assert (await env.call_tool("b", "add", {"number": 1})).content == "1"


async def test_an_environment_that_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import nothing_of_this_name\n")
    environments = OwnedEnvironments([f"--env.use={tmp_path}/broken.py:Env"], {"options": {}})
    with pytest.raises((StartError, ConfigError), match="did not start"):
        await environments.start()
    await environments.close()


@SHARED
async def test_other_processes_need_the_key(acting: OwnedEnvironments) -> None:
    stranger = EnvironmentClient([acting._service.url], "wrong")
    with pytest.raises(StartError, match="needs its key"):
        await stranger.start()
    await stranger.close()


def test_the_command_tells_in_one_line_why_an_environment_cannot_be_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "own.py"
    file.write_text(
        "from tidegate.envs.base import Environment\n"
        "class Broken(Environment):\n"
        "    train_task = eval_sets = None\n"
        "    def __init__(self):\n"
        "        raise KeyError('style')\n"
    )
    assert main(["env", "serve", f"{file}:Broken", "--port=0"]) == 2
    cause = (
        f"the environment '{file}:Broken' cannot be constructed: KeyError: 'style' ({file}:5, in __init__)"
    )
    assert capsys.readouterr().err == f"tidegate: {cause}\n"


@contextlib.asynccontextmanager
async def served_by_command(folder: Path, name: str, key: str) -> AsyncIterator[tuple[str, int]]:
    """Runs `tidegate env serve` as on another machine; yields its address and process id."""
    announced = folder / f"{name}.json"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tidegate", "env", "serve", f"{FILE}:Counter", "--port=0",
        f"--announce={announced}", env={**os.environ, ENV_KEY: key},
    )  # fmt: skip
    try:
        await eventually(announced.exists, 60)
        yield json.loads(announced.read_text())["url"], process.pid
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def test_services_of_several_machines_share_the_episodes(tmp_path: Path) -> None:
    async with (
        served_by_command(tmp_path, "one", "shared") as (one, one_pid),
        served_by_command(tmp_path, "two", "shared") as (two, _),
        EnvironmentClient([one, two], "shared") as env,
    ):
        await env.start()
        names = [f"e{number}" for number in range(8)]
        for name in names:
            await env.setup(name, TASK, 60.0)
            assert (await env.call_tool(name, "add", {"number": 2})).content == "2"
        of_one = [name for name in names if env._path(name).startswith(one)]
        assert 0 < len(of_one) < len(names)
        os.kill(one_pid, signal.SIGKILL)
        for name in set(names) - set(of_one):
            score = await env.score(name, TASK, ended(env="counter", episode=name))
            assert score.reward == 2.0, "the other one continues with the states that it has"
