"""Checks of teachers before a run starts: their vocabulary, and whether they score tokens."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from tests.integration.engine.engine_http import serving
from tests.serving import served
from tests.unit.trainer.learning_fixtures import VOCABULARY, make_model
from tidegate.engine.engine import Engine
from tidegate.engine.options import EngineOptions
from tidegate.errors import ConfigError, StartError
from tidegate.settings.teacher import TeacherModel, TeacherSettings
from tidegate.trainer.preflight import check_teachers
from tidegate.trainer.teacher.client import ScoreClient
from tidegate.trainer.teacher.start import check_teacher
from tidegate.trainer.teacher.teacher import Hint
from tidegate.weights.vocabulary import Vocabulary, load_tokenizer, model_vocab_size, tokenizer_hash


@pytest.fixture(scope="module")
def student(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("student"))


def vocabulary(model: Path) -> Vocabulary:
    return Vocabulary(model_vocab_size(model), tokenizer_hash(load_tokenizer(model)))


async def check(url: str, student: Path, **given: Any) -> None:
    async with ScoreClient(10.0) as client:
        await check_teacher(client, url, TeacherModel(url=url, **given), vocabulary(student))


def renamed(model: Path, place: Path) -> Path:
    """The model with two tokens of its tokenizer exchanged."""
    shutil.copytree(model, place)
    file = place / "tokenizer.json"
    file.write_text(file.read_text().replace('"w3"', '"w?"').replace('"w4"', '"w3"').replace('"w?"', '"w4"'))
    return place


async def test_the_embedded_engine_reports_its_vocabulary_and_is_compared(
    student: Path, tmp_path: Path
) -> None:
    options = EngineOptions(student, max_slots=2, max_context=64)
    async with serving(Engine.load(options)) as client:
        await check(client.url, student)
        with pytest.raises(StartError, match=rf"the teacher at {client.url} has another tokenizer than the"):
            await check(client.url, renamed(student, tmp_path / "renamed"))
        larger = tmp_path / "larger"
        shutil.copytree(student, larger)
        config = json.loads((larger / "config.json").read_text())
        (larger / "config.json").write_text(json.dumps({**config, "vocab_size": VOCABULARY + 1}))
        with pytest.raises(
            StartError, match=f"a vocabulary of {VOCABULARY}, the student one of {VOCABULARY + 1}"
        ):
            await check(client.url, larger)


@contextlib.asynccontextmanager
async def reporting(info: dict[str, Any], status: int = 200) -> AsyncIterator[str]:
    """An engine that reports this, as SGLang does, and scores two tokens or refuses."""

    async def model_info(_: Request) -> JSONResponse:
        return JSONResponse(info)

    async def generate(_: Request) -> JSONResponse:
        entries = [[None, 0, None], [-1.0, 0, None]]
        return JSONResponse({"meta_info": {"input_token_logprobs": entries}}, status)

    routes = [Route("/model_info", model_info), Route("/generate", generate, methods=["POST"])]
    async with served(Starlette(routes=routes)) as url:
        yield url


async def test_an_engine_that_reports_no_table_is_compared_by_its_files(
    student: Path, tmp_path: Path
) -> None:
    other = renamed(student, tmp_path / "renamed")
    async with reporting({"tokenizer_path": str(student)}) as url:
        await check(url, student)
        await check(url, other, tokenizer=other)
        with pytest.raises(StartError, match="another tokenizer"):
            await check(url, other)
    async with reporting({"tokenizer_path": "/on/another/machine"}) as url:
        await check(url, student, tokenizer=student)
        with pytest.raises(StartError, match=r"reports no tokenizer_hash.*set trainer\.teacher\.tokenizer"):
            await check(url, student)


async def test_an_engine_that_does_not_score_tokens_is_refused(student: Path) -> None:
    async with reporting({"tokenizer_path": str(student)}, 400) as url:
        with pytest.raises(StartError, match=r"does not score tokens: .*HTTP 400.*logprob_start_len"):
            await check(url, student)
    with pytest.raises(StartError, match=r"the teacher at http://127.0.0.1:1 does not score tokens"):
        await check("http://127.0.0.1:1", student)


def test_a_teacher_that_does_not_exist_is_named_before_anything_starts(student: Path) -> None:
    check_teachers(TeacherSettings(path=student, by_env={"a": {"url": "http://t"}}), ["a"])
    with pytest.raises(StartError, match=r"path = nowhere has no config\.json"):
        check_teachers(TeacherSettings(path=student, by_env={"a": {"path": "nowhere"}}), ["a"])


def test_environments_and_their_teachers_must_fit() -> None:
    check_teachers(TeacherSettings(), ["a", "b"])
    check_teachers(TeacherSettings(url="http://t", by_env={"a": {"url": "http://t"}}), ["a", "b"])
    only_a = TeacherSettings(by_env={"a": {"url": "http://t"}})
    with pytest.raises(ConfigError, match=r"by_env\.a: there is no such environment; .* are: b, c"):
        check_teachers(only_a, ["b", "c"])
    with pytest.raises(
        ConfigError, match=r"the environment b has no teacher: set trainer\.teacher\.by_env\.b"
    ):
        check_teachers(only_a, ["a", "b"])


def test_a_hint_is_rendered_with_the_students_template(student: Path) -> None:
    tokenizer = load_tokenizer(student)
    assert Hint("w5 w6 {answer}", tokenizer).prepend([1, 2], "w7") == [5, 6, 7, 1, 2]
    tokenizer.chat_template = "{{ raise_exception('no system message') }}"
    with pytest.raises(StartError, match="renders no system message alone"):
        Hint("w5", tokenizer)
