"""The doctor's checks that need no process: each finds its planted fault, and reports nothing else."""

from __future__ import annotations

import asyncio
import json
import math
import shutil
import socket
import threading
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from tests.tiny_tokenizer import make_model_dir
from tidegate.cli import doctor
from tidegate.config import Settings
from tidegate.doctor import environment as rooms
from tidegate.doctor import rewards as grading
from tidegate.doctor import states
from tidegate.doctor.engine import judge_reply
from tidegate.doctor.environment import check_environment
from tidegate.doctor.episode import counted
from tidegate.doctor.findings import Finding, Level
from tidegate.doctor.install import check_install, check_port
from tidegate.doctor.model import check_model
from tidegate.doctor.rewards import check_rewards
from tidegate.doctor.states import check_states
from tidegate.doctor.timeout import within
from tidegate.envs.arithmetic import Arithmetic
from tidegate.envs.base import Environment
from tidegate.envs.rewards import Reward, exact_answer
from tidegate.envs.tools import Tool, tool
from tidegate.errors import ConfigError
from tidegate.gateway.rendering.renderer import Renderer
from tidegate.scaffold.init import TINY_BASE
from tidegate.types import Message, Task


def settings_of(model: Path = TINY_BASE, **more: dict[str, Any]) -> Settings:
    return Settings.model_validate({"model": {"path": str(model)}, **more})


def codes(findings: Sequence[Finding]) -> list[str]:
    return [finding.code for finding in findings if finding.level is not Level.OK]


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return Renderer.load(TINY_BASE)


# -- install and ports


def test_this_install_is_well() -> None:
    assert codes(check_install(settings_of())) == []


def test_a_package_that_is_missing_or_old(monkeypatch: pytest.MonkeyPatch) -> None:
    real = metadata.version

    def version(name: str) -> str:
        if name == "orjson":
            raise metadata.PackageNotFoundError(name)
        return "0.1" if name == "openai" else real(name)

    monkeypatch.setattr(metadata, "version", version)
    found = check_install(settings_of())
    assert sorted(codes(found)) == ["package_missing", "package_version"]
    assert any("openai 0.1 is installed; >=" in one.text for one in found)
    assert any("the package orjson is missing" in one.text for one in found)


@pytest.mark.parametrize(("urls", "level"), [([], Level.ERROR), (["http://gpu:30000"], Level.WARNING)])
def test_torch_is_needed_where_it_is_used(
    monkeypatch: pytest.MonkeyPatch, urls: list[str], level: Level
) -> None:
    real = metadata.version

    def version(name: str) -> str:
        if name == "torch":
            raise metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(metadata, "version", version)
    found = {one.code: one for one in check_install(settings_of(engine={"urls": urls}))}
    assert found["no_torch"].level is level


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        found = check_port(settings_of(gateway={"port": port}))
    assert found.code == "port_taken"
    assert f"127.0.0.1:{port}" in found.text
    assert check_port(settings_of(gateway={"port": port})).level is Level.OK


# -- the model directory


def model_findings(model: Path) -> list[Finding]:
    return check_model(settings_of(model))[0]


def a_model(folder: Path, template: str = "qwen2") -> Path:
    make_model_dir(folder, template)
    (folder / "model.safetensors").touch()  # looked for, not into
    return folder


def test_a_whole_model_is_well() -> None:
    found, renderer = check_model(settings_of())
    assert codes(found) == []
    assert renderer is not None


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    assert codes(model_findings(tmp_path / "nowhere")) == ["no_model"]


@pytest.mark.parametrize("missing", ["config.json", "tokenizer_config.json", "model.safetensors"])
def test_a_directory_that_is_incomplete(tmp_path: Path, missing: str) -> None:
    (a_model(tmp_path) / missing).unlink()
    (found,) = model_findings(tmp_path)
    assert found.code == "model_incomplete"


def test_a_model_without_a_chat_template(tmp_path: Path) -> None:
    model = shutil.copytree(TINY_BASE, tmp_path / "model")
    (model / "chat_template.jinja").unlink()
    (found,) = model_findings(model)
    assert found.code == "no_chat_template"
    assert "has no chat template" in found.text


def test_a_tokenizer_that_is_broken(tmp_path: Path) -> None:
    model = shutil.copytree(TINY_BASE, tmp_path / "model")
    (model / "tokenizer.json").write_text("{}")
    assert codes(model_findings(model)) == ["tokenizer_unreadable"]


def test_a_tokenizer_of_another_model(tmp_path: Path) -> None:
    (a_model(tmp_path) / "config.json").write_text(json.dumps({"vocab_size": 3}))
    assert "vocabulary" in codes(model_findings(tmp_path))


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("qwen2", ["template_rewrites"]),
        ("qwen3", ["template_rewrites"]),
        ("shouting", ["template_branches", "template_without_tools"]),
        ("mistral", ["template_rewrites", "template_refuses", "template_without_tools"]),
        ("counting", ["template_without_tools"]),
    ],
)
def test_what_a_template_does_to_a_history(tmp_path: Path, template: str, expected: list[str]) -> None:
    assert codes(model_findings(a_model(tmp_path, template))) == expected


def test_exact_and_inexact_parts_are_named_with_the_reason(tmp_path: Path) -> None:
    told = {
        one.code: one.text for one in model_findings(a_model(tmp_path, "qwen3")) if one.check == "template"
    }
    assert "a tool's result, results of parallel calls" in told["ok"]
    assert "after reasoning (the template renders the past reply differently" in told["template_rewrites"]


# -- environments


class Sound(Environment):
    name: ClassVar[str] = "sound"
    rewards = (Reward("exact", exact_answer),)

    def train_task(self, index: int) -> Task:
        return self.task(f"t{index}", index)

    def eval_sets(self) -> Mapping[str, Sequence[Task]]:
        return {"": [self.task("h", 9000)]}

    def task(self, id: str, number: int) -> Task:
        return Task(id, "sound", [{"role": "user", "content": f"{number} + 2?"}], f"#### {number + 2}")


class Raises(Sound):
    def train_task(self, index: int) -> Task:
        raise LookupError("no more tasks")


class Changes(Sound):
    drawn = 0

    def train_task(self, index: int) -> Task:
        self.drawn += 1
        return self.task(f"t{index}", self.drawn)


class Misnamed(Sound):
    name: ClassVar[str] = "misnamed"


class NotJson(Sound):
    def task(self, id: str, number: int) -> Task:
        return Task(
            id, "sound", [{"role": "user", "content": f"{number}?"}], answer=f"{number}", info={"s": {1}}
        )


class Long(Sound):
    def task(self, id: str, number: int) -> Task:
        return Task(id, "sound", [{"role": "user", "content": f"{number} " * 500}], "#### 1")


class NoHeldOut(Sound):
    def eval_sets(self) -> Mapping[str, Sequence[Task]]:
        return {"other": []}


class Leaks(Sound):
    def eval_sets(self) -> Mapping[str, Sequence[Task]]:
        return {"": [self.train_task(5), self.task("h", 9000)]}


class Arrays(Sound):
    def task(self, id: str, number: int) -> Task:
        asked = [{"role": "user", "content": f"{number}?"}]
        return Task(id, "sound", asked, "#### 1", {"numbers": np.arange(3)})


class Text(Sound):
    def task(self, id: str, number: int) -> Task:
        return Task(id, "sound", "What is 1 + 1?", "#### 2")  # type: ignore[arg-type]


class Images(Sound):
    def task(self, id: str, number: int) -> Task:
        return Task(id, "sound", [{"role": "martian", "content": ["?"]}], "#### 1")


@pytest.mark.parametrize(
    ("name", "code", "text"),
    [
        ("Missing", "environment_unloadable", "has no environment 'Missing'"),
        ("Raises", "environment_raised", "raised LookupError: no more tasks"),
        ("Changes", "tasks_change", "another task for the same index"),
        ("Misnamed", "task_env", "env = 'sound', and the environment's name is 'misnamed'"),
        ("NotJson", "task_not_json", "not JSON serializable"),
        ("Arrays", "task_not_json", "ndarray is not JSON serializable"),
        ("Text", "task_messages", "'What is 1 + 1?', which are not a list of messages"),
        ("Long", "prompt_too_long", "more than engine.max_context = 512"),
        ("NoHeldOut", "no_held_out", "no main held-out set"),
        ("Leaks", "held_out_trained", "1 of 2 held-out tasks"),
    ],
)
def test_an_environment_with_a_fault(renderer: Renderer, name: str, code: str, text: str) -> None:
    settings = settings_of(env={"use": f"{__name__}:{name}"}, engine={"max_context": 512})
    found = {one.code: one for one in check_environment(settings, renderer)[0]}
    assert list(found) == [code]
    assert text in found[code].text


def test_an_environment_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()

    class Hangs(Sound):
        def train_task(self, index: int) -> Task:
            ended.wait(20)
            raise AssertionError

    monkeypatch.setattr(rooms, "CALL_S", 0.05)
    monkeypatch.setattr(rooms, "load_environment", lambda *_: Hangs())
    assert codes(check_environment(settings_of(), None)[0]) == ["environment_hung"]
    ended.set()


@pytest.mark.parametrize("environment", [Sound(), Arithmetic(held_out=10)])
def test_a_sound_environment_is_well(environment: Environment, renderer: Renderer) -> None:
    assert codes(check_rewards(environment)) == []
    if isinstance(environment, Sound):
        settings = settings_of(env={"use": f"{__name__}:Sound"})
        assert codes(check_environment(settings, renderer)[0]) == []


# -- rewards


def graded_by(fn: Any) -> list[Finding]:
    class Graded(Sound):
        rewards = (Reward("mine", fn),)

    return check_rewards(Graded())


def raises(output: str, answer: str) -> float:
    return 1 / 0 if output == answer else 0.0


@pytest.mark.parametrize(
    ("fn", "code", "text"),
    [
        (raises, "reward_raised", "'mine' raised ZeroDivisionError: division by zero"),
        (lambda output: int(output), "reward_raised", "on the output '#### 2' of task t0"),
        (lambda output: math.nan, "reward_not_finite", "returned nan, not a finite number"),
        (lambda output: None, "reward_not_finite", "returned None, not a finite number"),
        (lambda output: 0.5, "reward_constant", "gold answers and garbage all earn 0.5"),
        (lambda output, answer: output != answer, "gold_no_better", "gold scores no better than garbage"),
        (lambda output: "####" in output, "gold_no_better", "gold earns 1 and the best garbage 1"),
        (
            lambda output, answer, task: output == answer and task.id != "t3",
            "gold_sometimes_no_better",
            "on 1 of 8 tasks, such as t3",
        ),
    ],
)  # fmt: skip
def test_a_reward_with_a_fault(fn: Any, code: str, text: str) -> None:
    (found,) = graded_by(fn)
    assert found.code == code
    assert text in found.text


def test_a_reward_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()
    monkeypatch.setattr(grading, "SCORE_S", 0.05)
    (found,) = graded_by(lambda output: float(ended.wait(20)))
    ended.set()
    assert found.code == "reward_hung"


def test_a_reward_may_ask_for_everything() -> None:
    def asks(output: str, answer: str, messages: Any, trajectory: Any, task: Any, info: Any) -> float:
        assert messages[-1] == {"role": "assistant", "content": output}
        assert trajectory.task_id == task.id
        return float(output == answer)

    assert codes(graded_by(asks)) == []


def test_tasks_without_answers_still_have_their_rewards_tried() -> None:
    class Open(Sound):
        rewards = (Reward("mine", lambda output: len(output) / 0),)

        def task(self, id: str, number: int) -> Task:
            return Task(id, "sound", [{"role": "user", "content": "Write."}])

    assert codes(check_rewards(Open())) == ["reward_raised"]


@pytest.mark.parametrize(
    ("fn", "code"),
    [
        (lambda trajectory: -float(len(trajectory.turns)), "reward_constant"),
        (lambda trajectory, output: float(output == ""), "gold_no_better"),
    ],
)
def test_a_reward_of_trajectories_cannot_be_judged_without_one(fn: Any, code: str) -> None:
    (found,) = graded_by(fn)
    assert (found.code, found.level) == (code, Level.WARNING)


@pytest.mark.parametrize("gold", [LookupError("none"), 12])
def test_gold_that_is_no_output(gold: Any) -> None:
    class Odd(Sound):
        def gold_output(self, task: Task) -> Any:
            if isinstance(gold, Exception):
                raise gold
            return gold

    assert codes(check_rewards(Odd())) == ["gold_raised"]


def test_an_environment_may_leave_rewards_to_the_agent() -> None:
    class Bare(Sound):
        rewards = ()

    assert codes(check_rewards(Bare())) == ["agent_rewards"]


# -- states


async def known(output: str, answer: str, state: Any) -> float:
    return float(state["answer"] == answer == output)


class Stateful(Sound):
    """Its reward is async and reads the state."""

    rewards = (Reward("known", known),)

    def __init__(self) -> None:
        self.made: list[Any] = []
        self.released: list[Any] = []

    async def setup(self, task: Task) -> Any:
        self.made.append({"answer": task.answer, "lock": None})
        return self.made[-1]

    async def teardown(self, state: Any) -> None:
        self.released.append(state)

    @tool
    async def look(self, state: Any, place: int) -> str:
        """Looks at a place.

        Args:
            place: From 0 to 9.
        """
        return "nothing"


def test_a_sound_stateful_environment_is_well_and_its_states_are_released() -> None:
    environment = Stateful()
    assert [one.level for one in check_states(environment)] == [Level.OK]
    assert codes(check_rewards(environment)) == []
    assert len(environment.made) > 2 + 8
    assert len(environment.released) == len(environment.made)
    assert check_states(Sound()) == []


class Undescribed(Stateful):
    @tool
    def peek(self, place: int) -> str:
        return ""


class NoSetup(Sound):
    rewards = (Reward("known", lambda state: 1.0),)


class DrawsAgain(Stateful):
    async def setup(self, task: Task) -> Any:
        return {"made": len(self.made), **await super().setup(task)}


class Incomparable(Stateful):
    async def setup(self, task: Task) -> Any:
        return {**await super().setup(task), "lock": threading.Lock(), "at": object()}


class Arrayed(Stateful):
    async def setup(self, task: Task) -> Any:
        return {**await super().setup(task), "board": np.arange(3)}


class NoAnswer(Stateful):
    async def respond(self, state: Any, reply: Message) -> Message:
        return state["question"]


class Double(Stateful):
    def tools(self) -> Sequence[Tool]:
        return [*super().tools(), *super().tools()]


class Untyped(Stateful):
    @tool
    def peek(self, place) -> str:  # type: ignore[no-untyped-def]
        """Peeks."""
        return str(place)


class NoDatabase(Stateful):
    async def setup(self, task: Task) -> Any:
        raise ConnectionError("no database")


class NotReleased(Stateful):
    async def teardown(self, state: Any) -> None:
        raise OSError("it is in use")


@pytest.mark.parametrize(
    ("environment", "level", "found"),
    [
        (
            Incomparable,
            Level.NOTE,
            {"setup_not_compared": "state['lock'] is a lock, which cannot be compared"},
        ),
        (Arrayed, Level.OK, {"ok": "setup, respond and teardown work"}),
        (
            NoSetup,
            Level.ERROR,
            {"state_without_setup": "'known' asks for the state, and 'sound' has no setup"},
        ),
        (DrawsAgain, Level.WARNING, {"setup_changes": "for the same task t0: state['made'] differs"}),
        (NoAnswer, Level.ERROR, {"state_raised": "respond raised KeyError: 'question'"}),
        (Double, Level.ERROR, {"tools_double": "'sound' has 2 tools named 'look'"}),
        (Untyped, Level.ERROR, {"tools_invalid": "the parameter 'place' needs a type hint"}),
        (NoDatabase, Level.ERROR, {"state_raised": "setup raised ConnectionError: no database"}),
        (NotReleased, Level.ERROR, {"state_raised": "teardown raised OSError: it is in use"}),
    ],
)
def test_a_stateful_environment_with_a_fault(
    environment: type[Sound], level: Level, found: dict[str, str]
) -> None:
    (one,) = check_states(environment())
    assert (one.level, one.code) == (level, next(iter(found)))
    assert found[one.code] in one.text


def test_tools_without_descriptions() -> None:
    found = check_states(Undescribed())
    assert [(one.level, one.code) for one in found] == [(Level.WARNING, "tool_undescribed")] * 2
    assert "'peek' has no description" in found[0].text
    assert "'peek' does not describe 'place'" in found[1].text


def test_a_setup_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    class Hangs(Stateful):
        async def setup(self, task: Task) -> Any:
            await asyncio.sleep(20)

    monkeypatch.setattr(states, "EPISODE_S", 0.05)
    assert codes(check_states(Hangs())) == ["state_hung"]


def test_rewards_of_a_state_that_no_episode_changed_cannot_be_judged() -> None:
    class Untouched(Stateful):
        rewards = (Reward("opened", lambda state: float(state["answer"] is None)),)

    (one,) = check_rewards(Untouched())
    assert (one.level, one.code) == (Level.NOTE, "reads_state")
    assert codes(check_rewards(NotReleased())) == ["state_raised"]


# -- an engine's reply


def a_reply(renderer: Renderer) -> dict[str, Any]:
    ids = renderer.encode("#### 12 + 3")
    return {
        "output_ids": ids,
        "text": renderer.decode(ids),
        "meta_info": {
            "output_token_logprobs": [[-0.1 * (at + 1), one, None] for at, one in enumerate(ids)],
            "weight_version": "3",
            "weight_versions": [
                {"version": "2", "start": 0, "end": 2},
                {"version": "3", "start": 2, "end": len(ids)},
            ],
        },
    }


def judged(renderer: Renderer, reply: dict[str, Any]) -> list[str]:
    return codes(judge_reply("http://engine", reply, {"weight_version": "3"}, renderer))


def test_a_good_reply_is_well(renderer: Renderer) -> None:
    assert judged(renderer, a_reply(renderer)) == []


@pytest.mark.parametrize(
    ("key", "value", "code"),
    [
        ("output_ids", None, "engine_no_ids"),
        ("output_ids", [], "engine_no_ids"),
        ("output_ids", ["a"], "engine_no_ids"),
        ("meta_info", None, "engine_no_ids"),
        ("text", "Bonjour", "engine_other_tokenizer"),
        ("output_token_logprobs", [], "engine_no_logprobs"),
        ("output_token_logprobs", [[None, 1, None]], "engine_no_logprobs"),
        ("output_token_logprobs", [[-1.0, 1, None], [-2.0, 2, None]], "engine_other_logprobs"),
        ("weight_versions", None, "engine_no_versions"),
        ("weight_versions", [{"version": "default", "start": 0, "end": 6}], "engine_bad_versions"),
        ("weight_versions", [{"version": "3", "start": 0, "end": 1}], "engine_bad_versions"),
        ("weight_versions", [{"version": "3", "start": 1, "end": 6}], "engine_bad_versions"),
    ],
)
def test_a_reply_with_a_fault(renderer: Renderer, key: str, value: Any, code: str) -> None:
    reply = a_reply(renderer)
    (reply if key in reply else reply["meta_info"])[key] = value
    assert judged(renderer, reply) == [code]


@pytest.mark.parametrize("logprob", [0.5, -1000.0, math.nan])
def test_a_logprob_that_no_token_has(renderer: Renderer, logprob: float) -> None:
    reply = a_reply(renderer)
    reply["meta_info"]["output_token_logprobs"][1][0] = logprob
    assert judged(renderer, reply) == ["engine_bad_logprobs"]


# -- the command's settings


def asked(*words: str) -> Settings:
    return doctor.settings_of(list(words))


def test_the_command_takes_the_settings_that_lie_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert asked().model.path == TINY_BASE
    (tmp_path / "config.toml").write_text('[model]\npath = "mine"\n[agent]\nuse = "one.py:a"\n')
    assert (asked().model.path, asked().agent.use) == (Path("mine"), "one.py:a")
    odd = 'it\'s "odd".py:a'
    given = asked(
        "--agent.use", odd, "--env.use=e.py:E", "--engine.urls=http://x:1", "--sampling.max_tokens", "9"
    )
    assert (given.agent.use, given.env.use, given.engine.urls) == (odd, "e.py:E", ["http://x:1"])
    assert given.sampling.max_tokens == 9


def test_the_command_takes_a_named_file_as_train_does(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('[model]\npath = "somewhere"\n[gateway]\nport = 7001\n')
    settings = asked(str(file), "--gateway.port", "7002")
    assert (settings.model.path, settings.gateway.port) == (Path("somewhere"), 7002)
    with pytest.raises(ConfigError, match="expected one settings file"):
        asked("a.toml", "b.toml")


# -- small parts


def test_within_returns_raises_and_gives_up() -> None:
    assert within(5, lambda: 3) == 3
    with pytest.raises(SystemExit):
        within(5, lambda: (_ for _ in ()).throw(SystemExit()))
    ended = threading.Event()
    with pytest.raises(TimeoutError):
        within(0.02, lambda: ended.wait(20))
    ended.set()


def test_refusals_are_read_from_the_metrics() -> None:
    text = 'tidegate_gateway_turns_total 3\ntidegate_gateway_refusals_total{code="a b"} 2\n'
    assert counted(text, "refusals_total") == {"a b": 2}
