"""`tidegate doctor` finds planted faults and names each, with a real gateway, agents' process and openai SDK.

A fake engine serves the cases that need a certain reply of the model, or a certain fault of the engine. Where
the processes of the gateway, the environment and the agent do not matter, they are in the test's process.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests import REPO
from tests.fakes import FakeEngine, Fault
from tests.local_rewards import LocalRewards
from tests.serving import served
from tidegate.agents.attempt_runner import AttemptRunner
from tidegate.agents.base import load_agent
from tidegate.cli import main
from tidegate.config import Settings
from tidegate.doctor.doctor import Examination
from tidegate.doctor.findings import Finding, Level
from tidegate.envs.rewards import exact_answer
from tidegate.gateway.gateway import Gateway
from tidegate.gateway.http.app import create_app
from tidegate.gateway.options import GatewayOptions
from tidegate.gateway.rendering.renderer import Renderer
from tidegate.scaffold.init import TINY_BASE
from tidegate.settings.run import AgentSettings
from tidegate.trainer.processes.agents import AgentProcess
from tidegate.trainer.processes.provider import GatewayAccess
from tidegate.trainer.processes.servers import LocalProcesses
from tidegate.types import Message, Scored, Task, Trajectory

GOOD_AGENT = """
TOOLS = [{"type": "function", "function": {"name": "calculator", "parameters": {
    "type": "object", "properties": {"expression": {"type": "string"}}}}}]

async def agent(task, session):
    llm, messages = session.openai(), [*task.messages]
    for _ in range(3):
        reply = await llm.chat.completions.create(model=session.model, messages=messages, tools=TOOLS)
        message = reply.choices[0].message
        if not message.tool_calls:
            return message.content
        messages.append(message.model_dump(exclude_none=True))
        messages += [{"role": "tool", "tool_call_id": call.id, "content": "4"} for call in message.tool_calls]
"""
ENV = """
from tidegate.envs.base import Environment
from tidegate.envs.rewards import Reward, exact_answer
from tidegate.types import Task

class Env(Environment):
    name = "env"
    rewards = (Reward("exact", exact_answer),)

    def train_task(self, index):
        question = {"role": "user", "content": f"What is {index} + 2?"}
        return Task(f"t{index}", "env", [question], f"#### {index + 2}")

    def eval_sets(self):
        return {"": [Task("h", "env", [{"role": "user", "content": "What is 9000 + 2?"}], "#### 9002")]}
"""
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "2 + 2"}}\n</tool_call>'


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return Renderer.load(TINY_BASE)


@pytest.fixture
async def engine(renderer: Renderer) -> AsyncIterator[FakeEngine]:
    engine = FakeEngine(renderer.decode, vocabulary=600, stop_id=renderer.past_turn_end_ids[0])
    await engine.start()
    yield engine
    engine.release()
    await engine.stop()


class Patient:
    """A configuration with a fault in it; `examine` gives the findings that are not good, by code."""

    def __init__(self, folder: Path, engine: FakeEngine, renderer: Renderer) -> None:
        self.folder, self.engine, self.renderer = folder, engine, renderer
        self.agent, self.env = GOOD_AGENT, ENV
        self.settings: dict[str, dict[str, Any]] = {
            "model": {"path": str(TINY_BASE)},
            "engine": {"urls": [engine.url]},
            "agent": {"use": f"{folder}/agent.py:agent", "deadline_s": 20},
            "env": {"use": f"{folder}/environment.py:Env"},
        }
        self.replies: list[list[int]] = []

    def says(self, text: str, *, ended: bool = True) -> None:
        """Script a reply of the episode."""
        ids = self.renderer.encode(text)
        self.replies.append([*ids, self.renderer.past_turn_end_ids[0]] if ended else ids)

    async def examine(self) -> dict[str, Finding]:
        (self.folder / "agent.py").write_text(self.agent)
        (self.folder / "environment.py").write_text(self.env)
        if not self.engine.replies:  # the engine's own check takes one
            self.engine.replies.append(self.renderer.encode("It is 12 + 30 of them."))
        self.engine.replies.extend(self.replies)
        settings = Settings.model_validate(self.settings)
        findings = await Examination(settings, self.folder / "work", lambda _: None).run()
        return {one.code: one for one in findings if one.level is not Level.OK}


class Exact:
    """The reward of `ENV`."""

    names = ("exact",)

    def score(self, task: Task, _: Trajectory, output: str | None, messages: list[Message]) -> Scored:
        reward = exact_answer(output, task.answer)
        return Scored(reward, {"exact": reward})


class GatewayHere:
    """Stands for the gateway's process."""

    def __init__(self, settings: Settings, _: Path, keys: dict[str, str], journal: None) -> None:
        self.gateway = Gateway(
            GatewayOptions(
                model=settings.model.path,
                admin_key=keys["admin_key"],
                tool_parser=settings.gateway.tool_parser,
                environments=LocalRewards({"env": Exact()}),
            )
        )
        self.stack = contextlib.AsyncExitStack()

    async def start(self) -> str:
        return await self.stack.enter_async_context(served(create_app(self.gateway)))

    async def stop(self) -> None:
        await self.stack.aclose()


class AgentHere(AgentProcess):
    """Stands for the agents' process."""

    def __init__(self, agent: AgentSettings, gateway: GatewayAccess, directory: Path, name: str) -> None:
        super().__init__(agent, gateway, directory, name)
        self.agent, self.gateway = agent, gateway
        self.ending = asyncio.Event()
        self.running: asyncio.Task[None] | None = None

    async def start(self) -> str:
        agent = load_agent(self.agent.use, self.agent.options)
        runner = AttemptRunner(self.gateway.url, self.gateway.key, agent, 1, lambda _: None)
        self.running = asyncio.create_task(runner.run(self.ending))
        return runner.name

    async def wait_for_exit(self) -> str:
        await self.ending.wait()
        return "it was stopped"

    async def stop(self) -> None:
        self.ending.set()
        if self.running is not None:
            await self.running


@pytest.fixture
def processes() -> None:
    """Marks tests with processes of the gateway, of its environment and of the agent."""


@pytest.fixture
def agent_process() -> None:
    """Marks tests with a process of the agent."""


@pytest.fixture(autouse=True)
def parts_here(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "processes" in request.fixturenames:
        return
    monkeypatch.setattr(LocalProcesses, "gateway", staticmethod(GatewayHere))
    if "agent_process" not in request.fixturenames:
        monkeypatch.setattr("tidegate.doctor.doctor.AgentProcess", AgentHere)


@pytest.fixture
def patient(tmp_path: Path, engine: FakeEngine, renderer: Renderer) -> Patient:
    return Patient(tmp_path, engine, renderer)


async def test_a_valid_setup_has_no_finding(patient: Patient) -> None:
    patient.says(CALL)
    patient.says("#### 2")
    assert await patient.examine() == {}


# -- agents


async def test_an_agent_that_never_calls_the_gateway(patient: Patient) -> None:
    patient.agent = "async def agent(task, session): return '#### 2'"
    found = await patient.examine()
    assert list(found) == ["never_called"]
    assert found["never_called"].level is Level.ERROR
    assert "your agent never called the gateway" in found["never_called"].text


async def test_an_agent_that_calls_another_address(patient: Patient) -> None:
    patient.agent = GOOD_AGENT.replace(
        "session.openai()",
        "__import__('openai').AsyncOpenAI(base_url='http://127.0.0.1:9/v1', api_key='x', max_retries=0)",
    )
    found = await patient.examine()
    assert "your agent raised" in found["agent_raised"].text
    assert "APIConnectionError" in found["agent_raised"].text
    assert "never called the gateway" in found["agent_raised"].text
    assert "session.base_url" in found["agent_raised"].fix


async def test_an_agent_that_raises(patient: Patient) -> None:
    patient.agent = GOOD_AGENT.replace("reply.choices[0].message", "reply.choices[7].message")
    patient.says("#### 2")
    found = await patient.examine()
    assert list(found) == ["agent_raised"]
    assert "your agent raised IndexError" in found["agent_raised"].text


async def test_an_agent_whose_call_is_refused(patient: Patient) -> None:
    picture = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    patient.agent = GOOD_AGENT.replace("messages=messages", f"messages={picture}")
    found = await patient.examine()
    assert list(found) == ["agent_raised", "calls_refused"]
    assert "'image_url' parts are not supported" in found["agent_raised"].text
    assert "never called" not in found["agent_raised"].text


async def test_an_agent_whose_every_call_is_refused_and_that_raises_nothing(patient: Patient) -> None:
    patient.agent = """
async def agent(task, session):
    for _ in range(2):
        try:
            await session.openai().chat.completions.create(
                model=session.model, messages=[*task.messages], logit_bias={"5": 1}
            )
        except Exception:
            pass
"""
    found = await patient.examine()
    assert list(found) == ["all_refused", "calls_refused"]
    assert "its 2 calls were refused, the last one with: logit_bias" in found["all_refused"].text


async def test_an_agent_that_hangs(patient: Patient) -> None:
    patient.agent = "import asyncio\nasync def agent(task, session): await asyncio.sleep(100)"
    patient.settings["agent"]["deadline_s"] = 1
    found = await patient.examine()
    assert list(found) == ["agent_hung"]
    assert "your agent hung" in found["agent_hung"].text
    assert "never called the gateway" in found["agent_hung"].text


@pytest.mark.slow
@pytest.mark.usefixtures("agent_process")
async def test_an_agent_that_blocks_its_process(patient: Patient) -> None:
    patient.agent = "import time\nasync def agent(task, session): time.sleep(100)"
    patient.settings["agent"]["deadline_s"] = 1
    assert "your agent blocked its process" in (await patient.examine())["agent_blocked"].text


@pytest.mark.slow
@pytest.mark.usefixtures("agent_process")
async def test_an_agent_that_ends_its_process(patient: Patient) -> None:
    patient.agent = "import os\nasync def agent(task, session): os._exit(3)"
    found = await patient.examine()
    assert list(found) == ["agent_exited"]


async def test_an_agent_that_cannot_be_loaded(patient: Patient) -> None:
    patient.agent = "import no_such_package"
    found = await patient.examine()
    assert "No module named 'no_such_package'" in found["agent_unloadable"].text
    assert found["skipped"].check == "episode"


async def test_an_agent_that_rewords_history(patient: Patient) -> None:
    patient.agent = GOOD_AGENT.replace(
        "messages.append(message.model_dump(exclude_none=True))",
        "messages = [{**messages[0], 'content': messages[0]['content'] + ' Think.'}]",
    ).replace("messages += [", "[")
    for _ in range(3):
        patient.says(CALL)
    found = await patient.examine()
    assert "every turn is a branch" in found["every_turn_branches"].text
    assert "edited: message 0 (user)" in found["every_turn_branches"].text
    assert found["every_turn_branches"].level is Level.WARNING
    assert "agent_no_output" in found


@pytest.mark.slow
async def test_an_agent_whose_calls_are_refused(patient: Patient) -> None:
    patient.agent = GOOD_AGENT.replace("tools=TOOLS)", "tools=TOOLS, logit_bias={'5': 1})")
    found = await patient.examine()
    assert "unsupported_parameter" in found["calls_refused"].text
    assert "logit_bias" in found["agent_raised"].text


# -- replies


async def test_a_reply_cut_by_length(patient: Patient) -> None:
    patient.settings["sampling"] = {"max_tokens": 4}
    patient.says("#### 1 2 3 4 5 6", ended=False)
    found = await patient.examine()
    assert list(found) == ["cut_by_length"]
    assert "1 of 1 replies was cut by length: sampling.max_tokens = 4" in found["cut_by_length"].text


async def test_a_reply_cut_by_the_agent_s_own_max_tokens(patient: Patient) -> None:
    patient.agent = GOOD_AGENT.replace("tools=TOOLS)", "tools=TOOLS, max_tokens=3)")
    patient.says("#### 1 2 3 4 5 6", ended=False)
    found = await patient.examine()
    assert list(found) == ["cut_by_agent"]
    assert "after 3 tokens: your agent's own max_tokens" in found["cut_by_agent"].text


async def test_sampling_parameters_that_have_no_effect(patient: Patient) -> None:
    patient.agent = GOOD_AGENT.replace("tools=TOOLS)", "tools=TOOLS, temperature=0.2, top_p=0.9, seed=7)")
    patient.says("#### 2")
    found = await patient.examine()
    assert list(found) == ["sampling_overridden"]
    assert "your agent's seed, temperature, top_p had no effect" in found["sampling_overridden"].text


async def test_tool_calls_that_cannot_be_parsed(patient: Patient) -> None:
    patient.says('<tool_call>\n{"name": "calculator", "arguments": {"expr\n</tool_call>')
    found = await patient.examine()
    assert list(found) == ["tool_calls_malformed"]
    assert "tool calls could not be parsed" in found["tool_calls_malformed"].text


async def test_tool_calls_of_an_agent_that_passes_no_tools(patient: Patient) -> None:
    patient.agent = GOOD_AGENT.replace(", tools=TOOLS", "")
    patient.says(CALL)
    found = await patient.examine()
    assert "1 of 1 replies: your agent passed no tools" in found["tool_calls_unread"].text


async def test_a_closing_marker_alone_is_no_call(patient: Patient) -> None:
    patient.says("The result is 4.\n</tool_call>")
    assert await patient.examine() == {}


@pytest.mark.slow
async def test_tool_calls_that_no_parser_reads(patient: Patient) -> None:
    patient.settings["gateway"] = {"tool_parser": "none"}
    patient.says(CALL)
    found = await patient.examine()
    assert "gateway.tool_parser is 'none'" in found["tool_calls_unread"].text


# -- engines


@pytest.mark.parametrize(
    ("fault", "code", "text"),
    [
        (Fault("no_logprobs"), "engine_no_logprobs", "the engine at .* returned no logprobs"),
        (Fault("no_versions"), "engine_no_versions", "reports no weight version"),
        (Fault("version", "default"), "engine_bad_versions", "which is not a number"),
        (Fault("version", "7"), "engine_two_versions", "reports version '0', but sampled with '7'"),
        (Fault("status", 400), "engine_refuses", "answered 400 to POST .*/generate.*as asked"),
        (Fault("garbage"), "engine_refuses", "with invalid JSON"),
        (Fault("drop"), "engine_unreachable", "no engine answers at"),
    ],
    ids=lambda one: one.kind if isinstance(one, Fault) else "",
)
async def test_an_engine_with_a_fault(patient: Patient, fault: Fault, code: str, text: str) -> None:
    patient.settings["agent"]["use"] = "no_such_agent"  # not come to, or told apart
    patient.engine.faults.append(fault)
    found = await patient.examine()
    assert code in found
    assert re.search(text, found[code].text)


@pytest.mark.parametrize(
    ("settings", "fault", "text"),
    [
        (
            {"trainer": {"loss": {"name": "cispo", "score_centering": "auto"}}},
            "no_top",
            "its likeliest ids .* = 32",
        ),
        ({"sampling": {"top_p": 0.9}}, "no_kept", "the ids that top-p and top-k kept"),
        ({"trainer": {"routing_replay": True}}, "none", "--enable-return-routed-experts"),
    ],
)
async def test_an_engine_without_what_training_needs(
    patient: Patient, settings: dict[str, Any], fault: str, text: str
) -> None:
    patient.settings |= settings
    patient.engine.faults += [Fault("none"), Fault(fault)]
    found = await patient.examine()
    assert list(found) == ["engine_lacks_values", "skipped"]
    assert re.search(text, found["engine_lacks_values"].text)


async def test_an_engine_that_is_not_there(patient: Patient) -> None:
    await patient.engine.stop()
    found = await patient.examine()
    assert list(found) == ["engine_unreachable", "skipped"]


async def test_an_engine_that_hangs(patient: Patient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidegate.doctor.engine.GENERATE_S", 0.3)
    patient.engine.faults.append(Fault("hang"))
    assert "does not answer in time" in (await patient.examine())["engine_hangs"].text


async def test_an_engine_that_makes_logprobs_up(patient: Patient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.fakes.logprob_of", lambda token, position: 0.0)
    assert "logprob 0 for all 12 tokens" in (await patient.examine())["engine_bad_logprobs"].text


async def test_an_engine_of_another_model(patient: Patient) -> None:
    patient.engine.decode = lambda ids: "Bonjour le monde"
    found = await patient.examine()
    assert "'Bonjour le monde'" in found["engine_other_tokenizer"].text


@pytest.mark.slow
async def test_an_engine_that_fails_in_the_episode(patient: Patient) -> None:
    patient.engine.faults.extend([Fault("none"), Fault("no_logprobs")])
    found = await patient.examine()
    assert "the engine returned no logprobs" in found["engine_failed"].text


# -- rewards and ports, found together with the rest


@pytest.mark.usefixtures("processes")
async def test_a_port_that_is_taken_does_not_hide_that_a_reward_fails_on_what_the_agent_says(
    patient: Patient,
) -> None:
    patient.env = ENV.replace("exact_answer)", "lambda output, answer: 1 / (output != 'So 7') + len(output))")
    patient.says("So 7")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        patient.settings["gateway"] = {"port": taken.getsockname()[1]}
        found = await patient.examine()
    assert list(found) == ["port_taken", "gold_no_better", "reward_failed"]
    assert "the port is taken" in found["port_taken"].text
    assert "'exact' raised ZeroDivisionError" in found["reward_failed"].text


# -- the command


@pytest.mark.usefixtures("processes")
async def test_the_command_tells_in_words_and_ends_with_1(
    tmp_path: Path, engine: FakeEngine, renderer: Renderer, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    (tmp_path / "mine.py").write_text("def agent(task, session): raise KeyError('knowledge')")
    engine.replies.append(renderer.encode("It is 12 + 30 of them."))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    words = ["doctor", "--agent.use", "mine.py:agent", f'--engine.urls=["{engine.url}"]']
    assert await asyncio.to_thread(main, words) == 1
    check_words(capsys.readouterr().out, "gateway.log")


def check_words(said: str, log: str) -> None:
    assert "ERROR    your agent raised KeyError: 'knowledge'" in said
    assert "\n1 error" in said
    logs = Path(said.strip().rpartition("logs: ")[2])
    assert (logs / log).is_file()


def doctor(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tidegate", "doctor", *words],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=110,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(cwd)},
    )


@pytest.mark.slow
def test_the_command_without_arguments_has_no_finding(tmp_path: Path) -> None:
    done = doctor("--json", cwd=tmp_path)
    said = json.loads(done.stdout)
    assert done.returncode == 0, said
    assert said["ok"] is True
    assert {one["check"] for one in said["findings"]} == {
        "install", "port", "model", "template", "environment", "rewards", "engine", "gateway", "agent",
        "episode", "speed",
    }  # fmt: skip
    assert list(tmp_path.glob("tidegate-doctor-*")) == []  # nothing is left behind


@pytest.mark.slow
def test_the_command_tells_in_words_with_an_engine_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def agent(task, session): raise KeyError('knowledge')")
    words = ["--agent.use", "mine.py:agent", "--sampling.max_tokens", "8"]
    done = doctor(*words, cwd=tmp_path)
    assert done.returncode == 1
    check_words(done.stdout, "engine.log")


@pytest.mark.slow
def test_each_of_several_policies_has_an_engine() -> None:
    done = doctor(str(REPO / "examples" / "duo" / "config.toml"), "--json", cwd=REPO)
    said = json.loads(done.stdout)
    assert done.returncode == 0, said
    assert sum("returns ids, logprobs and versions" in one["text"] for one in said["findings"]) == 2
