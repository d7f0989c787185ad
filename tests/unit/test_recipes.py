"""The recipes of docs/architecture.md, *Where to add*, carried out on a copy of the sources.

Each addition has the files and the registrations that its row names, and no others. Then the additions are
used, and the copy passes the tests of the architecture and of the docs.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import REPO

pytestmark = pytest.mark.slow

AGENT = '''"""An agent that answers without a call."""

from __future__ import annotations

from tidegate.agents.base import Agent, Session, TaskView


class EchoAgent(Agent):
    """Returns the task's last message."""

    async def run(self, task: TaskView, session: Session) -> str | None:
        return str(task.messages[-1]["content"])
'''
ENVIRONMENT = '''"""Tasks that ask for a number."""

from __future__ import annotations

from tidegate.envs.base import Environment
from tidegate.types import Task


class Count(Environment):
    """Asks for the number after the task's index."""

    def train_task(self, index: int) -> Task:
        return Task(f"count-{index}", "", [{"role": "user", "content": f"{index} + 1 ="}], index + 1)

    def eval_sets(self) -> dict[str, list[Task]]:
        return {"next": [self.train_task(index) for index in range(1000, 1008)]}
'''
LOSS = '''def reinforce(settings: ReinforceLoss) -> Loss:
    """REINFORCE (Williams, 1992): A · log π, a mean over tokens, without a correction of staleness."""
    return Loss(token_ratio, weighted(truncated(settings.importance_cap)), token_mean)


'''
LOSS_SETTINGS = '''class ReinforceLoss(LossSettings):
    name: Literal["reinforce"] = "reinforce"
    """Name of the loss (docs/losses.md)."""
    importance_cap: Cap = 2.0


'''
DIALECT = '''"""A dialect whose prompt is a text: `{"input": text}` → Completions."""

from __future__ import annotations

from typing import Any

from tidegate.gateway.dialects import completions
from tidegate.gateway.sessions.session import GatewaySession

error = completions.error


def read(payload: dict[str, Any], session: GatewaySession) -> completions.CompletionsRequest:
    """Parses a body. Raises ApiError that names an unsupported parameter or content."""
    return completions.read({"prompt": payload.pop("input"), **payload}, session)
'''
TOOL_CALLS = '''"""Arrows: the reply is `=>{"name": …, "arguments": {…}}<=`, once for each call."""

from __future__ import annotations

from tidegate.gateway.parsing.reply import SampledCall
from tidegate.gateway.parsing.tool_calls.base import BlockParser, ToolCallFormat, Tools
from tidegate.gateway.parsing.tool_calls.json_formats import all_or_none, load_json, read_call


def _read(text: str, _: Tools) -> list[SampledCall] | None:
    return all_or_none([read_call(load_json(text))])


ARROW = ToolCallFormat("arrow", ("=>", "<="), lambda tools: BlockParser(_read, tools, "=>", "<="))
'''
LOGGER = '''"""Prints the metrics."""

from __future__ import annotations

from collections.abc import Mapping

from tidegate.config import Settings


class _Printed:
    def step(self, metrics: Mapping[str, float]) -> None:
        print(dict(metrics))

    def close(self) -> None: ...


def make(settings: Settings, step: int) -> _Printed:
    """Returns the logger of a run that begins at this step."""
    return _Printed()
'''
COMMAND = '''"""`tidegate hello`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from tidegate.cli.commands import Subparsers


def add(subparsers: Subparsers) -> None:
    """Adds the command."""
    subparsers.add_parser("hello", help="say hello", description="Say hello.").set_defaults(run=run)


def run(arguments: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Says hello."""
    print("hello")
    return 0
'''
ENGINE = '''"""An engine that serves SGLang's protocol, and samples the same ids for every prompt."""

from __future__ import annotations

from aiohttp import web

IDS = [5, 6, 7, 8]


async def model_info(_: web.Request) -> web.Response:
    return web.json_response({"weight_version": "0"})


async def generate(request: web.Request) -> web.Response:
    ids = IDS[: (await request.json())["sampling_params"]["max_new_tokens"]]
    meta = {
        "finish_reason": {"type": "length"},
        "output_token_logprobs": [[-1.0 / token, token, None] for token in ids],
        "weight_versions": [{"version": "0", "start": 0, "end": len(ids)}],
    }
    return web.json_response({"output_ids": ids, "meta_info": meta})


app = web.Application()
app.add_routes([web.get("/model_info", model_info), web.post("/generate", generate)])
'''
FILES = {
    "engine.py": ENGINE,
    "tidegate/agents/echo.py": AGENT,
    "tidegate/envs/count.py": ENVIRONMENT,
    "tidegate/gateway/dialects/texts.py": DIALECT,
    "tidegate/gateway/parsing/tool_calls/arrow.py": TOOL_CALLS,
    "tidegate/trainer/loggers/calendar.py": LOGGER,
    "tidegate/cli/hello.py": COMMAND,
}
ENDPOINTS, OPENAPI = "tidegate/gateway/http/endpoints.py", "tidegate/gateway/http/openapi.py"
LOSSES, FORMATS = "tidegate/settings/losses.py", "tidegate/gateway/parsing/tool_calls/registry.py"
JOURNAL = "tests/unit/gateway/test_journal_schema.py"
_FILLED = "            prompt_tokens=self.prompt_tokens,\n"
MAKE = "tidegate/trainer/losses/built_in.py"
WRITTEN = "tests/unit/gateway/test_tool_call_formats.py"
FORMULAS = "tests/unit/trainer/losses/test_formulas.py"
REGISTRATIONS = [
    ("tidegate/agents/base.py", '    "command":', '    "echo": "tidegate.agents.echo:EchoAgent",\n'),
    ("tidegate/envs/base.py", '    "dataset":', '    "count": "tidegate.envs.count:Count",\n'),
    (LOSSES, "class MaskedISLoss(", LOSS_SETTINGS),
    (MAKE, "def masked_is(", LOSS),
    (MAKE, "    TruncatedISLoss,\n", "    ReinforceLoss,\n"),
    (MAKE, "masked_is, truncated_is, nll", "reinforce, "),
    (LOSSES, "TruncatedISLoss, Mask", "ReinforceLoss, "),
    (
        FORMULAS,
        '"masked_is": lambda',
        '"reinforce": lambda t: token_mean(t, lambda x: weighted([min(r, CAP) for r in ratios(x)], x)),\n',
    ),
    (
        "docs/losses.md",
        "| `truncated_is` | sg[min",
        "| `reinforce` | A · log π | tokens | `importance_cap` |\n",
    ),
    (ENDPOINTS, "chat, completions, messages, responses\n", "texts, "),
    (
        ENDPOINTS,
        '("POST", "/responses",',
        '("POST", "/texts", DialectEndpoint(gateway, texts, conversations)),\n',
    ),
    (OPENAPI, '    "POST /v1/responses":', '    "POST /v1/texts": "Samples a continuation of a text.",\n'),
    (
        OPENAPI,
        '("/responses", _reply',
        '("/texts", _reply("choices"), _OPENAI, _object({"input": _TEXT})),\n',
    ),
    (FORMATS, "json_formats, tagged_formats", "arrow, "),
    (FORMATS, "json_formats.GRANITE,", "arrow.ARROW, "),
    (
        WRITTEN,
        '        case "granite":',
        '        case "arrow":\n            return "".join(f"=>{_json(*call)}<=" for call in calls)\n',
    ),
    (
        "tidegate/turn.py",
        "\n    @property\n    def routed_tokens(",
        '    prompt_tokens: int = 0\n    """Number of tokens of the whole prompt."""\n',
    ),
    ("tidegate/gateway/sessions/model_calls.py", "            started=self.started,\n", _FILLED),
    ("tidegate/gateway/journal/schema.py", '\n"""Version of this schema;', " + 1"),
    (JOURNAL, '}\n"""A value of each field', '    "prompt_tokens": 3,\n'),
    (JOURNAL, ', 10), "a turn with other', " + 1"),
    (JOURNAL, '), "a turn with other', " + 1"),
    ("tidegate/settings/run.py", '"tensorboard",', '"calendar", '),
    ("pyproject.toml", "tensorboard = [", "calendar = []\n"),
    ("tidegate/cli/__init__.py", '"init", "convert",', '"hello", '),
]
"""Files with what is added to them: the text before which it stands, and the addition."""
USE = """
from pathlib import Path

import tidegate
from tidegate.agents.base import load_agent
from tidegate.config import load_settings
from tidegate.envs.base import load_environment
from tidegate.gateway.parsing.tool_calls.registry import FORMATS

assert Path(tidegate.__file__).is_relative_to(Path.cwd()), tidegate.__file__
assert type(load_agent("echo", {})).__name__ == "EchoAgent"
assert load_environment("count", {}).train_task(4).answer == 5
settings = load_settings(
    None,
    ["--trainer.loss.name=reinforce", "--trainer.loss.importance_cap=2", "--gateway.tool_parser=arrow",
     "--model.path=m", "--agent.use=echo", "--env.use=count", '--run.loggers=["calendar"]'],
)
assert settings.trainer.loss.importance_cap == 2
parser = FORMATS["arrow"].parser([])
text = '=>{"name": "f", "arguments": {}}<='
assert [call.name for call in parser.feed(text) + parser.finish()] == ["f"]
"""
SAMPLE = """
import asyncio
from pathlib import Path

from engine import IDS, app
from tests.fakes import staged
from tests.http_app import served_app


async def main() -> None:
    async with served_app(app) as engine, staged(Path("examples/tiny_base/model")) as stage:
        await stage.client.remove_engine(stage.engine.url)
        await stage.client.add_engine(engine)
        access = await stage.client.open_session()
        llm = await stage.llm(access)
        await llm.chat.completions.create(model="policy", messages=[{"role": "user", "content": "a"}])
        await stage.client.finish(access.session_id)
        turn = (await stage.client.trajectory(access.session_id)).turns[0]
        assert turn.output_ids.tolist() == IDS
        assert turn.prompt_tokens == len(turn.delta_ids) > 0


asyncio.run(main())
"""
PASS = [
    "tests/unit/gateway/test_journal_schema.py",
    WRITTEN,
    "tests/unit/test_formats.py",
    "tests/unit/test_architecture.py",
    "tests/unit/test_docs.py",
    "tests/unit/trainer/losses/test_formulas.py",
    "tests/integration/gateway/test_control.py::test_the_openapi_tells_of_every_route",
]


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("recipes") / "copy"
    left_out = shutil.ignore_patterns(".*_cache", ".venv*", ".git", "__pycache__", "runs", "build", "dist")
    shutil.copytree(REPO, place, ignore=left_out, symlinks=True)
    for name, text in FILES.items():
        (place / name).write_text(text)
    for name, follows, addition in REGISTRATIONS:
        text = (place / name).read_text()
        assert text.count(follows) == 1, (name, follows)
        (place / name).write_text(text.replace(follows, addition + follows))
    return place


def test_the_additions_work_and_the_tests_pass(copy: Path) -> None:
    def run(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, *arguments], cwd=copy, env={**os.environ, "PYTHONPATH": str(copy)},
            capture_output=True, text=True, timeout=600,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
        return done.stdout

    run("-c", USE)
    run("-c", SAMPLE)
    assert run("-m", "tidegate", "hello") == "hello\n"
    run("-m", "pytest", "-q", "-p", "no:cacheprovider", *PASS)
