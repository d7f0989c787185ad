"""Scores groups: requests the logprobs of the sampled tokens from the teachers, while other groups run.

`Hint` renders a text that only a teacher reads, as a system message before the student's prompt.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tidegate.errors import EngineError, StartError, TidegateError, TrainingError, unwrapped
from tidegate.service.backoff import backoff_s
from tidegate.settings.teacher import TeacherSettings
from tidegate.trainer.batch.rows import trained_paths
from tidegate.trainer.teacher.client import ScoreClient, Scores
from tidegate.turn import Turn
from tidegate.types import Group, Trajectory

ANSWER = "{answer}"
"""Stands for the task's gold answer in a hint."""


class Hint:
    """Renders a hint with the student's chat template.

    Raises StartError if the template has no system message.
    """

    def __init__(self, text: str, tokenizer: Any) -> None:
        self._text = text
        self._tokenizer = tokenizer
        # At the start of the run, so that a template without system messages is refused before any sampling.
        self._render(text)

    def prepend(self, ids: list[int], answer: Any) -> list[int]:
        """Return a sequence after the hint, for a task with this gold answer.

        The hint's tokens replace one that begins every text (BOS), so that it is not repeated.
        """
        hint = self._render(self._text.replace(ANSWER, str(answer)))
        repeated = ids[0] == hint[0] == self._tokenizer.bos_token_id
        return [*hint, *ids[repeated:]]

    def _render(self, text: str) -> list[int]:
        try:
            rendered = self._tokenizer.apply_chat_template(
                [{"role": "system", "content": text}], tokenize=False, add_generation_prompt=False
            )
        except Exception as error:  # templates raise what they like
            raise StartError(
                f"trainer.teacher.hint: the chat template renders no system message alone: {error}"
            ) from error
        ids: list[int] = self._tokenizer.encode(rendered, add_special_tokens=False)
        return ids


FIRST_DELAY_S, LONGEST_DELAY_S = 0.25, 8.0
"""Delays before a failed request is repeated."""


@dataclass(slots=True, kw_only=True)
class Teacher:
    """Scores every trained turn of the groups that are given to it, and sets `Turn.teacher_logprobs`.

    A request that fails is repeated with back-off, and its batch waits for it. If it fails for `limit_s`, or
    if the teacher refuses it, its task raises TrainingError, which `watch` reports and `finish` raises.
    """

    settings: TeacherSettings
    urls: Mapping[str, str]
    """Address of the teacher of each environment; "" is that of all others."""
    client: ScoreClient
    watch: Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]]
    """Owns the tasks, and is notified of an error."""
    note: Callable[[str], None]
    limit_s: float
    hint: Hint | None = None
    scored_tokens: int = 0
    """Tokens that the teachers have scored."""
    failures: int = 0
    """Requests that failed."""
    last_progress: float = field(default_factory=time.monotonic)
    _tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    _limits: dict[str, asyncio.Semaphore] = field(default_factory=dict)
    _failing: Counter[str] = field(default_factory=Counter)
    """Number of requests to each teacher that failed and are repeated."""

    @property
    def failing(self) -> bool:
        """Whether a request is repeated, which has a time limit of its own."""
        return self._failing.total() > 0

    def begin(self, group: Group) -> None:
        """Start to score a group in the background."""
        self._tasks[group.id] = self.watch(self._score_group(group), f"teacher {group.id}")

    def drop(self, group_id: str) -> None:
        """Stop to score a group that is not trained on."""
        task = self._tasks.pop(group_id, None)
        if task is not None:
            task.cancel()

    async def finish(self, groups: Collection[str]) -> float:
        """Wait until these groups are scored; returns the seconds waited. Raises TrainingError.

        The wait is bounded, as `limit_s` bounds the time in which a teacher fails, and `deadline_s` that of a
        request.
        """
        began = time.monotonic()
        await asyncio.gather(*(self._tasks[name] for name in groups))
        for name in groups:
            del self._tasks[name]
        return time.monotonic() - began

    async def close(self) -> None:
        """Stop all requests, and close the connections."""
        tasks = list(self._tasks.values())
        for name in list(self._tasks):
            self.drop(name)
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.client.close()

    def metrics(self) -> dict[str, float]:
        return {
            "teacher/scored_total": float(self.scored_tokens),
            "teacher/failures": float(self.failures),
        }

    async def _score_group(self, group: Group) -> None:
        try:
            async with asyncio.TaskGroup() as requests:
                for trajectory in group.trajectories:
                    for path, unscored in _paths(trajectory, self.settings.asked_top_k):
                        requests.create_task(self._score_path(trajectory, path, unscored))
        except* TidegateError as failures:
            raise unwrapped(failures) from None

    async def _score_path(self, trajectory: Trajectory, path: Sequence[Turn], unscored: set[int]) -> None:
        """Score turns of one sequence, by their indices, in one request."""
        spans = [(turn, start, end) for turn, start, end in _spans(path) if turn.index in unscored]
        first, last = spans[0][1], spans[-1][2]
        ids = [int(token) for turn in path for part in (turn.delta_ids, turn.output_ids) for token in part]
        asked = ids[:last] if self.hint is None else self.hint.prepend(ids[:last], trajectory.answer)
        shift = len(asked) - last
        scores = await self._scores(trajectory.env, asked, first + shift - 1)
        for turn, start, end in spans:
            own = slice(start - first, end - first)
            turn.teacher_logprobs = scores.logprobs[own]
            if scores.top_ids is not None and scores.top_logprobs is not None:
                turn.teacher_top_ids = scores.top_ids[own].reshape(-1)
                turn.teacher_top_logprobs = scores.top_logprobs[own].reshape(-1)
        self.scored_tokens += sum(end - start for _, start, end in spans)

    async def _scores(self, env: str, ids: Sequence[int], start: int) -> Scores:
        url = self.urls.get(env, self.urls.get(""))
        if url is None:
            raise TrainingError(
                f"the environment {env!r} has no teacher: set trainer.teacher.by_env.{env}, or url or path "
                "of trainer.teacher for all others"
            )
        async with self._limits.setdefault(url, asyncio.Semaphore(self.settings.max_requests)):
            try:
                scores = await self.client.score(url, ids, start, self.settings.asked_top_k)
            except EngineError as error:
                with self._reported(url, error):
                    # In its place among `max_requests`: a teacher that recovers is not met by all requests at
                    # once.
                    scores = await self._repeat(url, ids, start, error)
        self.last_progress = time.monotonic()
        return scores

    async def _repeat(self, url: str, ids: Sequence[int], start: int, error: EngineError) -> Scores:
        """Repeat a request that failed, with back-off. Raises TrainingError."""
        began = time.monotonic()
        for tries in itertools.count():
            self.failures += 1
            failed_s = time.monotonic() - began
            if not error.retryable:
                raise TrainingError(f"the teacher at {url} refused to score sampled tokens: {error}")
            if failed_s > self.limit_s:
                raise TrainingError(
                    f"the teacher at {url} has failed for {failed_s:.0f} s, longer than trainer.outage_s = "
                    f"{self.limit_s:g}: {error}. When it serves again, continue with --resume"
                )
            delay_s = backoff_s(tries, FIRST_DELAY_S, LONGEST_DELAY_S)
            await asyncio.sleep(min(delay_s, self.limit_s))
            try:
                return await self.client.score(url, ids, start, self.settings.asked_top_k)
            except EngineError as again:
                error = again
        raise AssertionError("unreachable")

    @contextlib.contextmanager
    def _reported(self, url: str, error: EngineError) -> Iterator[None]:
        """Report that a teacher fails, and that it is back when no request fails any more."""
        self._failing[url] += 1
        if self._failing[url] == 1 and error.retryable:
            self.note(
                f"the teacher at {url} fails: {error}. Steps wait for it; requests are repeated for up to "
                f"{self.limit_s:g} s"
            )
        try:
            yield
            if self._failing[url] == 1:
                self.note(f"the teacher at {url} is back")
        finally:
            self._failing[url] -= 1


def _paths(trajectory: Trajectory, top_k: int) -> Iterator[tuple[list[Turn], set[int]]]:
    """Yield the sequences that are trained on: their turns, and the indices of those that are not yet scored.

    A group that was restored by a resume has the logprobs in its file.
    """
    for path, own in trained_paths(trajectory):
        unscored = {turn.index for turn in path if turn.index in own and not _is_scored(turn, top_k)}
        if unscored:
            yield path, unscored


def _is_scored(turn: Turn, top_k: int) -> bool:
    return turn.teacher_logprobs is not None and (not top_k or turn.teacher_top_k == top_k)


def _spans(path: Sequence[Turn]) -> Iterator[tuple[Turn, int, int]]:
    """Yield the turns of a sequence with the beginning and end of their sampled tokens in it."""
    end = 0
    for turn in path:
        start = end + len(turn.delta_ids)
        end = start + len(turn.output_ids)
        yield turn, start, end
