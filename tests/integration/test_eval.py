"""`tidegate eval` as a command: gold answers, an endpoint, a run; real processes, none left over."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from tests import REPO
from tests.http_app import served_app
from tests.scripted_llm import scripted_llm
from tidegate.cli import main
from tidegate.errors import ConfigError
from tidegate.evaluation.attempts import ModelEndpoint, describe_endpoint
from tidegate.evaluation.evaluate import _line
from tidegate.evaluation.sampler import SampledEpisode
from tidegate.types import Outcome, Task, Trajectory

TINY = REPO / "examples" / "tiny_base" / "model"

AGENTS = '''
import asyncio, json, os, signal
from pathlib import Path

async def access(task, session):
    """Says what it was given."""
    return json.dumps([session.base_url, session.api_key, session.model])

async def impatient(task, session):
    """Asks once."""
    llm = session.openai().with_options(max_retries=0)
    reply = await llm.chat.completions.create(model=session.model, messages=task.messages)
    return reply.choices[0].message.content

async def first_only(task, session):
    if task.id != "eval-1":
        await asyncio.sleep(600)
    return "yes"

async def murderer(task, session, address):
    """Kills the process that announced itself there, the first time, and asks the model then."""
    try:
        os.mkdir(address + ".killed")
    except FileExistsError:
        pass
    else:
        os.kill(json.loads(Path(address).read_text())["pid"], signal.SIGKILL)
    llm = session.openai()
    reply = await llm.chat.completions.create(model=session.model, messages=task.messages)
    return reply.choices[0].message.content
'''


@pytest.fixture
def agents(tmp_path: Path) -> Path:
    path = tmp_path / "eval_agents.py"
    path.write_text(AGENTS)
    return path


def rows(path: Path, count: int, **more: Any) -> str:
    lines = [json.dumps({"prompt": f"Is {n} a number?", "answer": "yes", **more}) for n in range(count)]
    path.write_text("\n".join(lines))
    return str(path)


async def cli(*words: str) -> tuple[int, str, str]:
    """The command in a process of its own: exit code, stdout, stderr."""
    process = await start(*words)
    try:
        out, err = await asyncio.wait_for(process.communicate(), 100)
    finally:
        await end(process)
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def start(*words: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tidegate", "eval", *words,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


async def end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.kill()
        await process.wait()


def episodes(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "episodes.jsonl").read_text().splitlines()]


# ---------------------------------------------------------------- gold answers


def test_a_gold_answer_that_is_refused_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for split in ("train", "test"):
        lines = [
            {"question": "q", "answer": "So #### 4\nNo:\n#### 5"},
            {"question": "q", "answer": "#### 1,200"},
        ]
        (tmp_path / f"{split}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    words = ["eval", "--env.use", "gsm8k", "--gold", f"--env.options.path={tmp_path}"]
    assert main(words) == 1
    assert "train-0: the answer is '4'; reward 0" in capsys.readouterr().out
    assert main([*words, "--env.options.mode=verl_strict", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["right"], found["total"], found["extractors"]) == (4, 4, {"verl_strict": 4})


def test_other_environments_have_gold_answers_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = rows(tmp_path / "d.jsonl", 10)
    parts = f"[{{use = 'arithmetic'}}, {{use = 'dataset', options = {{path = '{data}'}}}}]"
    assert main(["eval", "--env.use", "mixture", "--env.options.parts", parts, "--gold"]) == 0
    assert "train (first 1,000)" in capsys.readouterr().out
    words = ["eval", "--env.use", "dataset", "--env.options.path", data, "--gold", "--threshold", "2"]
    assert main(words) == 1
    assert "reward 1 (exact_match 1)" in capsys.readouterr().out


TWINS = """
from tidegate.envs.base import Environment
from tidegate.envs.rewards import Reward
from tidegate.types import Task

def tasks(word, count):
    asked = [[{"role": "user", "content": f"{word} {n}"}] for n in range(count)]
    return [Task(f"{n}", "twins", messages, f"{word}") for n, messages in enumerate(asked)]

class Twins(Environment):
    name = "twins"
    rewards = (Reward("said", lambda output, answer: float(output == answer)),)

    def train_size(self):
        return 3

    def train_task(self, index):
        return tasks("train", 3)[index % 3]

    def eval_sets(self):
        return {"": tasks("held out", 2), "again": tasks("train", 3), "twice": tasks("a", 2) + tasks("b", 1)}
"""


STATED = '''
from tidegate.envs.base import Environment
from tidegate.envs.rewards import Reward
from tidegate.envs.tools import tool
from tidegate.types import Task

async def awaited(output, answer):
    return float(output == answer)

class Awaited(Environment):
    name = "awaited"
    rewards = (Reward("said", awaited),)

    def train_size(self):
        return 1

    def train_task(self, index):
        return Task("t", self.name, [{"role": "user", "content": "?"}], "7")

    def eval_sets(self):
        return {"": [Task("h", self.name, [{"role": "user", "content": "!"}], "8")]}

class Stated(Awaited):
    rewards = (Reward("opened", lambda state: 1.0),)

    @tool
    def open(self, state) -> str:
        """Opens it."""
        return "opened"
'''


def test_gold_answers_of_async_rewards_and_of_rewards_that_read_a_state(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "stated.py"
    file.write_text(STATED)
    assert main(["eval", "--env.use", f"{file}:Awaited", "--gold"]) == 0
    assert "2 of 2" in capsys.readouterr().out
    assert main(["eval", "--env.use", f"{file}:Stated", "--gold"]) == ConfigError.exit_code
    assert "the reward 'opened' reads an episode's state" in " ".join(capsys.readouterr().err.split())


def test_tasks_that_share_an_id_alone_are_graded_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "twins.py").write_text(TWINS)
    assert main(["eval", "--env.use", f"{tmp_path / 'twins.py'}:Twins", "--gold"]) == 0
    assert re.search(
        r"train +3 of 3\n +held-out +2 of 2\n +twice +3 of 3\n8 of 8\n$", capsys.readouterr().out
    )


def test_a_held_out_set_in_which_an_id_stands_for_two_tasks_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "twins.py").write_text(TWINS)
    words = ["eval", "--env.use", f"{tmp_path / 'twins.py'}:Twins", "--url", "http://x", "--model", "m"]
    assert main([*words, "--sets", "twice", "--out", str(tmp_path / "out")]) == 2
    assert "1 ids stand for several tasks of the held-out set 'twice', the first is '0'" in (
        capsys.readouterr().err
    )
    assert not (tmp_path / "out").exists()


# ---------------------------------------------------------------- what cannot be evaluated


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "nothing to evaluate"),
        (["--sampling.max_tokens", "5"], "nothing to evaluate"),
        (["nowhere"], "nowhere: there is no such directory"),
        (
            ["tests", "examples"],
            "expected at most one run, checkpoint or model directory, got tests and examples",
        ),
        (["TMP"], "is neither a run (config.toml, checkpoints/) nor a model"),
        (["TMP/empty_run"], "has no committed checkpoint"),
        (["--model", "x"], "--model requires --url"),
        (["--url", "http://x"], "--url needs --model"),
        (
            ["--url", "http://x", "--model", "m", "--api-key-env", "NOT_SET_AT_ALL"],
            "NOT_SET_AT_ALL is not set",
        ),
        (
            ["--url", "http://x", "--model", "m", "--greedy"],
            "--greedy has no effect with --url",
        ),
        (["--url", "http://x", "--model", "m", "--k", "4", "--n", "2"], "pass@k needs 1 ≤ k ≤ n"),
        (["--url", "http://x", "--model", "m", "--k", "two"], "not a list of numbers"),
        (["--url", "http://x", "--model", "m", "--n", "0"], "at least 1"),
        (
            ["--url", "http://x", "--model", "m", "--sets", "unseen_template"],
            "did you mean 'unseen_templates'",
        ),
        (
            ["--url", "http://x", "--model", "m", "--env.use", "gsm8k", "--env.options.path=no/../where"],
            "no such directory",
        ),
        (["--sampling.max_token", "5"], "did you mean 'sampling.max_tokens'"),
        (["--env", "gsm8k"], "env is a section, not a value; its settings are env.use, env.options"),
        (["--url", "localhost:8000", "--model", "m"], "--url localhost:8000: it must begin with http://"),
        (["--data", "x"], "there is no setting 'data'; did you mean 'env.options'?"),
        (["--env-options", "{}"], "did you mean 'env.options'?"),
        (["--env.options", "[1]"], "env.options = [1]: "),
        (["--temperature", "0"], "did you mean 'sampling.temperature'?"),
    ],
)
def test_what_is_wrong_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    (tmp_path / "empty_run" / "checkpoints" / "step_1").mkdir(parents=True)
    (tmp_path / "empty_run" / "config.toml").write_text("")
    assert main(["eval", *(word.replace("TMP", str(tmp_path)) for word in words)]) == 2
    assert message in capsys.readouterr().err


# ---------------------------------------------------------------- an endpoint


async def test_an_endpoint_is_asked_directly_and_graded_here(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The solver on GSM8K's form; the endpoint knows half of the answers, and once says no number."""
    lines = [json.dumps({"question": f"What is {n} + {n}?", "answer": f"#### {2 * n}"}) for n in range(8)]
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text("\n".join(lines))

    def reply(body: dict[str, Any]) -> dict[str, Any]:
        n = int(re.findall(r"\d+", body["messages"][0]["content"])[0])
        if n == 7:
            return {"content": "I don't know"}
        return {"content": f"\\boxed{{{2 * n if n % 2 == 0 else 99}}}"}

    out = tmp_path / "out"
    async with scripted_llm(reply) as (url, requests):
        code, printed, err = await cli(
            "--url", url, "--model", "m", "--env.use=gsm8k", f"--env.options.path={tmp_path}", "--n", "2",
            "--out", str(out), "--json",
        )  # fmt: skip
    assert code == 0, err
    found = json.loads(printed)["sets"]["main"]
    assert (found["tasks"], found["episodes"], found["failed"]) == (8, 16, 0)
    assert (found["reward"]["mean"], found["pass"]["1"]["mean"], found["pass"]["2"]["mean"]) == (
        0.5,
        0.5,
        0.5,
    )
    assert (found["metrics"]["extractor/boxed"], found["metrics"]["unparseable"]) == (0.875, 0.125)
    assert len(requests) == 16
    assert {request["model"] for request in requests} == {"m"}
    kept = episodes(out)
    assert len(kept) == 16
    assert {one["output"] for one in kept if one["task_id"] == "test-7"} == {"I don't know"}
    assert json.loads((out / "results.json").read_text())["status"] == "completed"
    assert await asyncio.to_thread(main, ["eval", "--url", url, "--model", "m", "--out", str(out)]) == 2
    assert "already contains results" in capsys.readouterr().err


def test_the_agent_is_given_the_endpoint_and_its_key(
    tmp_path: Path, agents: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = rows(tmp_path / "d.jsonl", 3)
    monkeypatch.setenv("THE_KEY", "sk-1")
    words = [
        "eval", "--url", "http://there/v1/", "--model", "m", "--api-key-env", "THE_KEY", "--env.use=dataset",
        "--env.options.path", data, "--agent.use", f"{agents}:access", "--out", str(tmp_path / "out"),
        '--env.options.rewards=["contains"]',
    ]  # fmt: skip
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert [one["output"] for one in episodes(tmp_path / "out")] == ['["http://there/v1", "sk-1", "m"]']
    assert "reward                    0.0000   95% [0.0000, 0.7935]  Wilson score interval" in printed
    assert "sk-1" not in (tmp_path / "out" / "results.json").read_text()


def test_an_answer_that_json_lacks_is_kept_as_text() -> None:
    trajectory = Trajectory("s", "t", "twins", "eval", Outcome.COMPLETED, [])
    episode = SampledEpisode("", Task("t", "twins", [], {2: 70}), 0, trajectory)
    assert json.loads(_line(episode, 1.0))["answer"] == repr({2: 70})


def test_an_endpoint_that_is_not_there_ends_it_soon(
    tmp_path: Path, agents: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "eval", "--url", "http://127.0.0.1:9/v1", "--model", "m", "--tasks", "20", "--sets", "main",
        "--agent.use", f"{agents}:impatient", "--out", str(tmp_path / "out"),
    ]  # fmt: skip
    assert main(words) == 1
    err = capsys.readouterr().err
    assert re.search(r"none of 16 episodes succeeded; 16 of them: agent_error: .*[Cc]onnection", err)
    nothing = r"--url: nothing answers at http://127.0.0.1:9/v1/models: .*refused; start the server"
    assert len(re.findall(nothing, err)) == 2, "at once, and with the error"
    assert json.loads((tmp_path / "out" / "results.json").read_text())["status"] == "failed"


@pytest.mark.parametrize(
    ("path", "said"),
    [
        (
            "",
            r"http://[0-9.:]+/models answers with status 404 \(Python/.*\): 404: .* ends in /v1 .*",
        ),
        ("/v1", r"http://[0-9.:]+/v1/models lists the models one, two$"),
    ],
)
async def test_an_endpoint_is_described(path: str, said: str) -> None:
    async def models(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "one"}, {"id": "two"}]})

    app = web.Application()
    app.router.add_get("/v1/models", models)
    async with served_app(app) as url:
        found = await asyncio.to_thread(describe_endpoint, ModelEndpoint(url + path, "m", "key"))
    assert found[0]
    assert re.fullmatch(f"--url: {said}", found[1]), found


async def test_an_interrupted_evaluation_keeps_what_it_has(tmp_path: Path, agents: Path) -> None:
    data = rows(tmp_path / "d.jsonl", 10)
    out = tmp_path / "out"
    process = await start(
        "--url", "http://there/v1", "--model", "m", "--env.use=dataset",
        "--agent.use", f"{agents}:first_only",
        f"--env.options={{path = '{data}', eval_path = '{data}'}}", "--out", str(out),
    )  # fmt: skip
    assert process.stderr is not None
    try:
        async with asyncio.timeout(60):
            assert b"nothing answers at http://there/v1/models" in await process.stderr.readline()
            assert (await process.stderr.readline()).decode() == "evaluation: 1 of 10\n"
            process.send_signal(signal.SIGINT)
            printed, _ = await process.communicate()
    finally:
        await end(process)
    assert process.returncode == 130
    assert "interrupted: these are the episodes until then" in printed.decode()
    assert [one["task_id"] for one in episodes(out)] == ["eval-1"]
    found = json.loads((out / "results.json").read_text())
    assert (found["status"], found["sets"]["main"]["reward"]["mean"]) == ("interrupted", 1.0)


# ---------------------------------------------------------------- a run: an engine and a gateway of its own


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run with two committed checkpoints and one that was not finished; the weights are the tiny base's."""
    run = tmp_path / "run"
    for name in ("step_9", "step_10", "step_11"):
        shutil.copytree(TINY, run / "checkpoints" / name, copy_function=os.symlink)
    for name in ("step_9", "step_10"):
        (run / "checkpoints" / name / "COMMITTED").write_text("{}")
    settings = f"""
    [run]
    dir = "{tmp_path}"
    name = "run"
    [model]
    path = "gone/by/now"
    [engine]
    urls = ["http://127.0.0.1:9"]
    max_context = 512
    max_slots = 16
    [env]
    use = "arithmetic"
    options = {{ held_out = 6 }}
    [sampling]
    max_tokens = 48
    """
    (run / "config.toml").write_text(settings)
    return run


def alive(address: Path) -> bool:
    return Path(f"/proc/{json.loads(address.read_text())['pid']}").exists()


def test_a_run_is_evaluated_with_its_own_agent_and_environment(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", str(run_dir), "--n", "2", "--sets", "main", "--json"]) == 0
    results = json.loads(capsys.readouterr().out)
    assert results["target"].endswith("run/checkpoints/step_10")
    assert results["directory"] == str(run_dir / "evals" / "1")
    found = results["sets"]["main"]
    assert (found["tasks"], found["episodes"], found["failed"]) == (6, 12, 0), results["failures"]
    assert set(found["pass"]) == {"1", "2"}
    assert found["metrics"]["turns"] >= 1.0
    kept = episodes(run_dir / "evals" / "1")
    assert all(one["split"] == "eval" and one["turns"][0]["output_ids"] for one in kept)
    assert all(turn["temperature"] == 1.0 for one in kept for turn in one["turns"])
    assert sum(one["reward"] for one in kept) / 12 == pytest.approx(found["reward"]["mean"])
    for service in ("engine", "gateway"):
        assert not alive(run_dir / "evals" / "1" / "logs" / f"{service}.address")


@pytest.mark.slow
async def test_a_checkpoint_greedily_gives_the_same_twice(run_dir: Path) -> None:
    said = []
    for number in ("1", "2"):
        code, _, err = await cli(
            str(run_dir / "checkpoints" / "step_9"), "--greedy", "--tasks", "4", "--sets", "main"
        )
        assert code == 0, err
        kept = episodes(run_dir / "evals" / number)
        assert {one["mode"] for one in kept} == {"greedy"}
        said.append(sorted((one["task_id"], one["output"]) for one in kept))
    assert said[0] == said[1]


async def with_a_murder(run_dir: Path, agents: Path, service: str) -> tuple[int, str, dict[str, Any]]:
    out = run_dir / "out"
    address = f"--agent.options.address={out / 'logs' / service}.address"
    code, _, err = await cli(
        str(run_dir), "--agent.use", f"{agents}:murderer", address, "--out", str(out),
        "--sets", "main",
    )  # fmt: skip
    for name in ("engine", "gateway"):
        assert not alive(out / "logs" / f"{name}.address")
    results: dict[str, Any] = json.loads((out / "results.json").read_text())
    return code, err, results


@pytest.mark.slow
async def test_an_engine_that_dies_is_started_again(run_dir: Path, agents: Path) -> None:
    code, err, results = await with_a_murder(run_dir, agents, "engine")
    assert code == 0, err
    assert "the engine was killed by SIGKILL; starting it again" in err
    assert (results["status"], results["sets"]["main"]["failed"]) == ("completed", 0), results["failures"]


@pytest.mark.slow
async def test_a_gateway_that_dies_is_started_again(run_dir: Path, agents: Path) -> None:
    code, err, results = await with_a_murder(run_dir, agents, "gateway")
    assert code == 0, err
    assert "the gateway was killed by SIGKILL" in err
    assert results["status"] == "completed"
