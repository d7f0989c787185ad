"""An environment on a real OpenEnv server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("openenv")

from tests.unit.adapters.scored import equal_scores, openenv_server
from tidegate.envs.adapters.openenv import OpenEnvError
from tidegate.envs.base import Done, load_environment
from tidegate.errors import ConfigError

LETTERS = "abcdefgh"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with openenv_server() as url:
        yield url


def test_scores_are_the_librarys() -> None:
    equal_scores("openenv")


async def test_an_episode_is_played_on_the_server(url: str) -> None:
    environment = load_environment(f"openenv:{url}", {"tasks": 5, "held_out": 3})
    assert environment.train_size() == 5
    task = environment.train_task(7)
    assert task == environment.train_task(2)
    shown: Any = task.messages[-1]["content"]
    state = await environment.setup(task)
    for _ in range(2):
        reply = LETTERS[(LETTERS.index(shown) + 1) % len(LETTERS)]
        shown = await environment.respond(state, {"content": f" {reply}\n"})
    assert shown == Done()
    scored = environment.score(task, None, "", [], state)
    assert (scored.reward, scored.metrics) == (1.0, {"game_steps": 2, "game_ended": 1.0})
    await environment.teardown(state)
    assert state.socket.closed
    held_out = {task.id for task in environment.eval_sets()[""]}
    assert not held_out & {environment.train_task(index).id for index in range(5)}


async def test_a_reply_may_be_a_whole_action(url: str) -> None:
    environment = load_environment(f"openenv:{url}", {"tasks": 1, "held_out": 1})
    state = await environment.setup(environment.train_task(0))
    assert isinstance(await environment.respond(state, {"content": '{"text": "a"}'}), str)
    with pytest.raises(OpenEnvError, match="refused 'step'"):
        await environment.respond(state, {"content": '{"letter": "a"}'})
    await environment.teardown(state)


async def test_a_server_that_ignores_the_seed_is_found_out(url: str) -> None:
    environment = load_environment(f"openenv:{url}", {"tasks": 1, "held_out": 1})
    task = environment.train_task(0)
    task.messages[-1]["content"] = "another letter"
    with pytest.raises(OpenEnvError, match="must be deterministic by the seed"):
        await environment.setup(task)


def test_addresses_and_fields_are_checked(url: str) -> None:
    with pytest.raises(
        ConfigError, match=r"there is no OpenEnv server at http://127.0.0.1:9: Cannot connect"
    ):
        load_environment("openenv:http://127.0.0.1:9", {})
    with pytest.raises(ConfigError, match="is not an address; write openenv:http://host:port"):
        load_environment("openenv:letters", {})
    with pytest.raises(ConfigError, match="have no field 'letter', but text"):
        load_environment(f"openenv:{url}", {"action": "letter"})
