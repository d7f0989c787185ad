"""The game of docs/environments.md, played through the gateway."""

from __future__ import annotations

import re
from pathlib import Path

from tests import REPO
from tests.environments import LocalEnvironments
from tests.fakes import staged
from tests.integration.gateway.test_environments import finished, opened
from tests.tiny_tokenizer import make_model_dir
from tidegate.agents.chat import ChatAgent
from tidegate.envs.base import Environment, load_environment
from tidegate.types import Outcome


def documented_game(directory: Path) -> Environment:
    text = (REPO / "docs" / "environments.md").read_text(encoding="utf-8")
    (code,) = [one for one in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "class Guessing" in one]
    file = directory / "guessing.py"
    file.write_text(code, encoding="utf-8")
    return load_environment(f"{file}:Guessing", {})


async def test_the_documented_game_is_played_to_its_end(tmp_path: Path) -> None:
    game = documented_game(tmp_path)
    task = game.train_task(0)
    number = int(task.answer)
    model = make_model_dir(tmp_path / "tiny", "qwen3")
    async with staged(model, environments=LocalEnvironments(game)) as stage:
        for guesses, reward, turns in (
            ((number - 1, "one hundred", number + 1, number, 5), 1.0, 4),
            ((number - 1,) * 9, 0.0, 7),
        ):
            stage.engine.replies.clear()
            for guess in guesses:
                stage.say(str(guess))
            session = await opened(stage, task=task)
            await ChatAgent().run(task.view(), session)
            trajectory = await finished(stage, session, reward=None)
            assert (trajectory.outcome, trajectory.reward) == (Outcome.COMPLETED, reward)
            assert len(trajectory.turns) == turns
            heard = [one["content"] for one in trajectory.messages if one["role"] == "user"][1:4]
            if reward:
                assert heard == ["It is larger.", "That is not a number.", "It is smaller."]
