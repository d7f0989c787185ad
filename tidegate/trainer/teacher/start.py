"""Starts a run's teachers, and checks that they read the student's token ids."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path

from tidegate.config import Settings
from tidegate.errors import EngineError, StartError
from tidegate.service.process import run_together
from tidegate.settings.teacher import TeacherModel
from tidegate.trainer.processes.launcher import supervise
from tidegate.trainer.processes.provider import ProcessProvider
from tidegate.trainer.processes.supervisor import TaskSupervisor
from tidegate.trainer.teacher.client import ScoreClient
from tidegate.trainer.teacher.teacher import Hint, Teacher
from tidegate.weights.vocabulary import Vocabulary, load_tokenizer, model_vocab_size, tokenizer_hash


async def start_teacher(
    settings: Settings,
    run_dir: Path,
    supervisor: TaskSupervisor,
    note: Callable[[str], None],
    stack: contextlib.AsyncExitStack,
    provider: ProcessProvider,
) -> Teacher | None:
    """Start the engines of teachers given by `path`, and check all teachers; None without a teacher.

    `supervisor` restarts engines that exit, and closing `stack` stops them. Raises StartError.
    """
    teacher = settings.trainer.teacher
    if not teacher.enabled:
        return None
    models = teacher.models
    urls = {env: model.url for env, model in models.items() if model.url is not None}
    servers = provider.teachers(settings, run_dir)
    for server in servers.values():
        stack.push_async_callback(server.stop)
    client = ScoreClient(teacher.deadline_s)
    stack.push_async_callback(client.close)
    tokenizer = await asyncio.to_thread(load_tokenizer, settings.model.path)
    student = Vocabulary(model_vocab_size(settings.model.path), tokenizer_hash(tokenizer))
    hint = None if teacher.hint is None else Hint(teacher.hint, tokenizer)
    await run_together(server.start() for server in servers.values())
    urls |= {env: server.url for env, server in servers.items()}
    for env, model in models.items():
        await check_teacher(client, urls[env], model, student, teacher.asked_top_k)
    for server in servers.values():
        supervisor.watch(supervise(server, note), server.name)
    scores = Teacher(
        settings=teacher,
        urls=urls,
        client=client,
        watch=supervisor.watch,
        note=note,
        limit_s=settings.trainer.outage_s,
        hint=hint,
    )
    stack.push_async_callback(scores.close)
    return scores


async def check_teacher(
    client: ScoreClient, url: str, model: TeacherModel, student: Vocabulary, top_k: int = 0
) -> None:
    """Raises StartError if the engine at `url` does not score the student's tokens."""
    name = f"the teacher at {url}" if model.path is None else f"the teacher {model.path}"
    try:
        info = await client.info(url)
        found = info.get("tokenizer_hash")
        size = info.get("vocab_size")
        if found is None:
            own = await asyncio.to_thread(_read_vocabulary, name, model, info.get("tokenizer_path"))
            found, size = own.tokenizer_hash, own.size
        if found != student.tokenizer_hash:
            raise StartError(
                f"{name} has another tokenizer than the student: their token ids mean different tokens, so "
                "it cannot score them; choose a teacher of the same model family"
            )
        if isinstance(size, int) and size < student.size:
            raise StartError(
                f"{name} has a vocabulary of {size}, the student one of {student.size}: it cannot score all "
                "ids that the student can sample"
            )
        # Two tokens, as the first has no logprob.
        await client.score(url, [0, 0], 0, top_k)
    except EngineError as error:
        raise StartError(
            f"{name} does not score tokens: {error}. It must be an engine that returns logprobs of the "
            "prompt (logprob_start_len): tidegate engine, tidegate vllm or SGLang"
        ) from None


def _read_vocabulary(name: str, model: TeacherModel, reported: object) -> Vocabulary:
    """Return the vocabulary of an engine that reports none, from its files on this machine."""
    directory = model.tokenizer or (Path(reported) if isinstance(reported, str) else None)
    if directory is None or not directory.is_dir():
        raise StartError(
            f"{name} reports no tokenizer_hash, and its tokenizer is not on this machine ({directory}), so "
            "its vocabulary cannot be compared with the student's: set trainer.teacher.tokenizer to a copy "
            "of its tokenizer files"
        )
    # Without a config its size is unknown, and no id of the student is refused for it.
    size = model_vocab_size(directory) if (directory / "config.json").is_file() else 1 << 62
    return Vocabulary(size, tokenizer_hash(load_tokenizer(directory)))
