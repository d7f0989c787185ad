"""Games of TextArena through Tidegate."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

pytest.importorskip("textarena")

from tests.unit.adapters.scored import equal_scores
from tidegate.envs.adapters.textarena import random_move
from tidegate.envs.base import Done, load_environment
from tidegate.errors import ConfigError

OPPONENT = "def first(observation, random):\n    return observation.rpartition('Moves: ')[2].split(',')[0]\n"


def test_scores_are_the_librarys() -> None:
    equal_scores("textarena")


async def test_a_number_is_found_by_hints() -> None:
    environment = load_environment("textarena:GuessTheNumber-v0", {})
    task = environment.train_task(3)
    assert "[GAME] You are Player 0. You are playing Guess The Number." in task.messages[0]["content"]
    state = await environment.setup(task)
    low, high, answer = 1, 20, ""
    while not isinstance(answer, Done):
        guess = (low + high) // 2
        answer = await environment.respond(state, {"content": f"[{guess}]"})  # type: ignore[assignment]
        if not isinstance(answer, Done):
            hint = answer.removeprefix("[GAME] The target number is ")
            assert hint in ("lower.", "higher."), "neither the history nor the agent's own move is repeated"
            low, high = (low, guess - 1) if hint == "lower." else (guess + 1, high)
    scored = environment.score(task, None, "", [], state)
    assert (scored.reward, scored.metrics["game_ended"]) == (1.0, 1.0)


async def test_games_that_run_at_the_same_time_do_not_share_their_random_numbers() -> None:
    environment = load_environment("textarena:2048-v0", {})
    task = environment.train_task(0)
    moves = ["[up]", "[left]", "[down]", "[right]", "[left]", "[up]"]

    async def played(state: object) -> list[object]:
        return [await environment.respond(state, {"content": move}) for move in moves]

    alone = await played(await environment.setup(task))
    one, other = await environment.setup(task), await environment.setup(task)
    both = []
    for move in moves:
        both.append([await environment.respond(state, {"content": move}) for state in (one, other)])
        random.seed(0)
    assert [pair[0] for pair in both] == [pair[1] for pair in both] == alone
    random.seed(5)
    before = random.getstate()
    await environment.setup(task)
    assert random.getstate() == before


async def test_an_opponent_plays_the_other_players(tmp_path: Path) -> None:
    (tmp_path / "rival.py").write_text(OPPONENT)
    options = {"players": 2, "player": 1, "opponent": f"{tmp_path / 'rival.py'}:first"}
    environment = load_environment("textarena:TicTacToe-v0", options)
    task = environment.train_task(0)
    assert "Player 0 placed their symbol (O) in cell 0." in task.messages[0]["content"]
    state = await environment.setup(task)
    assert "in cell 1." in str(await environment.respond(state, {"content": "[3]"}))
    assert await environment.respond(state, {"content": "[4]"}) == Done()
    assert environment.score(task, None, "", [], state).reward == -1.0, "0, 1 and 2 were the opponent's"


async def test_a_game_without_an_end_has_no_reward() -> None:
    environment = load_environment("textarena:GuessTheNumber-v0", {})
    task = environment.train_task(0)
    scored = environment.score(task, None, "", [], await environment.setup(task))
    assert (scored.reward, scored.metrics["game_ended"]) == (0.0, 0.0)


def test_names_and_options_are_checked() -> None:
    with pytest.raises(ConfigError, match="no game 'GuessTheNumber'; did you mean 'GuessTheNumber-v0'"):
        load_environment("textarena:GuessTheNumber", {})
    with pytest.raises(ConfigError, match=r"cannot be started for 1 players .option 'players'.*has to be 2"):
        load_environment("textarena:TicTacToe-v0", {})
    with pytest.raises(ConfigError, match="player = 2 is not one of 2 players"):
        load_environment("textarena:TicTacToe-v0", {"players": 2, "player": 2})


def test_the_random_opponent_needs_moves_in_brackets() -> None:
    assert random_move("[GAME] one\n[0] [1]\nAvailable: '[7]', '[8]'", random.Random(0)) in ("[7]", "[8]")
    with pytest.raises(ValueError, match=r"set env.options.opponent"):
        random_move("[GAME] your turn", random.Random(0))
