"""Calls a judge: cached replies, one call for equal prompts, a bound on concurrency, retries."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp

from tidegate.envs.judge.cache import ReplyCache
from tidegate.envs.judge.prompts import JudgePrompt, UnreadableReplyError, read_scores
from tidegate.errors import RewardError, RewardUnavailableError, StorageError
from tidegate.service.backoff import backoff_s
from tidegate.service.http_client import HttpClient, RedirectError, error_in
from tidegate.settings.judge import LONGEST_DELAY_S, JudgeSettings

log = logging.getLogger("tidegate.envs.judge")
FIRST_DELAY_S = 0.5
MAX_REPLY = 1_000_000
"""Bytes of a response that are read."""
RETRIED = (408, 409, 425, 429)
"""Statuses below 500 after which a call is repeated."""
REFUSED_PROMPT = (400, 413, 422)
"""Statuses that refuse the prompt, which has the attempt's text."""


class _FailedCallError(Exception):
    def __init__(
        self, message: str, *, final: bool = False, of_prompt: bool = False, after_s: float = 0.0
    ) -> None:
        super().__init__(message)
        self.final, self.of_prompt, self.after_s = final, of_prompt, after_s


class Verdicts(HttpClient):
    """The verdicts of one judge.

    Args:
        settings: The judge, with its rubric resolved.
        cache: Database of replies; None: in memory.
    """

    def __init__(self, settings: JudgeSettings, cache: Path | None) -> None:
        super().__init__(None if settings.api_key_env is None else os.environ[settings.api_key_env])
        assert settings.url is not None, "there is a judge"
        self._settings = settings
        self._url = f"{settings.url}/chat/completions"
        self._cache = ReplyCache(cache)
        self._slots = asyncio.Semaphore(settings.max_concurrency)
        self._asking: dict[str, asyncio.Task[tuple[dict[str, float], Counter[str]]]] = {}

    async def scores(
        self, prompt: JudgePrompt, group: str | None = None
    ) -> tuple[dict[str, float], dict[str, float]]:
        """Returns the scores by name, and what they cost as metrics of an episode: `judge/calls`,
        `judge/cached`, `judge/errors` (calls that failed), `judge/prompt_tokens`, `judge/completion_tokens`
        and `judge/seconds`.

        A prompt that equals one in progress shares its call, and counts as cached.

        Args:
            prompt: The request to the judge.
            group: Group of the episodes that it judges; None: an episode without one.

        Raises:
            RewardError: Every call failed; its `metrics` are the costs.
        """
        began = time.monotonic()
        key = self._key(prompt)
        joined = key in self._asking
        if not joined:
            task = asyncio.create_task(self._ask(key, prompt, group), name="judge")
            self._asking[key] = task
            task.add_done_callback(lambda done: self._ended(key, done))
        try:
            scores, spent = await asyncio.shield(self._asking[key])
        except RewardError as error:
            spent = Counter() if joined else Counter(error.metrics)
            raise type(error)(str(error), _costs(spent, began)) from None
        if joined:
            await self._read(key, prompt, group)  # the reply is this group's, too
        return scores, _costs(Counter(cached=1) if joined else spent, began)

    async def close(self) -> None:
        asking = list(self._asking.values())
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        self._cache.close()
        await super().close()

    def _ended(self, key: str, task: asyncio.Task[Any]) -> None:
        del self._asking[key]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.warning("%s", error)

    def _key(self, prompt: JudgePrompt) -> str:
        asked = [self._settings.url, self._body(prompt), list(prompt.names)]
        return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()

    def _body(self, prompt: JudgePrompt) -> dict[str, Any]:
        return {
            **self._settings.options, "model": self._settings.model, "messages": list(prompt.messages),
        }  # fmt: skip

    async def _ask(
        self, key: str, prompt: JudgePrompt, group: str | None
    ) -> tuple[dict[str, float], Counter[str]]:
        spent: Counter[str] = Counter()
        if (known := await self._read(key, prompt, group)) is not None:
            return known, Counter(cached=1)
        failures: list[str] = []
        kind = RewardError
        async with self._slots:
            for attempt in range(self._settings.attempts):
                spent["calls"] += 1
                try:
                    text = await self._call(prompt, spent)
                    scores = read_scores(text, prompt.names)
                except (_FailedCallError, UnreadableReplyError) as error:
                    spent["errors"] += 1
                    failures.append(str(error))
                    # A refused prompt, or an invalid reply, may have its cause in the attempt.
                    unavailable = isinstance(error, _FailedCallError) and not error.of_prompt
                    kind = RewardUnavailableError if unavailable else RewardError
                    last = attempt + 1 == self._settings.attempts
                    if last or (isinstance(error, _FailedCallError) and error.final):
                        break
                    asked_s = error.after_s if isinstance(error, _FailedCallError) else 0.0
                    delay_s = max(asked_s, backoff_s(attempt, FIRST_DELAY_S, LONGEST_DELAY_S))
                    await asyncio.sleep(min(delay_s, LONGEST_DELAY_S))
                else:
                    await self._write(key, text, group)
                    return scores, spent
        raise kind(
            f"the judge {self._settings.model} at {self._settings.url} gave no verdict in {len(failures)} of "
            f"at most {self._settings.attempts} calls (env.judge.attempts): {'; '.join(failures)[:1000]}",
            spent,
        )

    async def _call(self, prompt: JudgePrompt, spent: Counter[str]) -> str:
        """Returns the text of a reply. Raises _FailedCallError."""
        timeout = aiohttp.ClientTimeout(total=self._settings.timeout_s)
        try:
            async with self.http.post(self._url, json=self._body(prompt), timeout=timeout) as response:
                content = await response.content.read(MAX_REPLY)
                while len(content) < MAX_REPLY and (more := await response.content.read(MAX_REPLY)):
                    content += more
        except TimeoutError:
            limit_s = self._settings.timeout_s
            raise _FailedCallError(f"no reply within {limit_s:g} s (env.judge.timeout_s)") from None
        except aiohttp.ClientError as error:
            final = isinstance(error, RedirectError)
            raise _FailedCallError(f"{type(error).__name__}: {error}", final=final) from None
        if response.status != 200:
            said = error_in(content).get("message") or content[:200].decode("utf-8", "replace")
            final = response.status < 500 and response.status not in RETRIED
            after_s = _seconds(response.headers.get("Retry-After"))
            raise _FailedCallError(
                f"status {response.status}: {said}",
                final=final, of_prompt=response.status in REFUSED_PROMPT, after_s=after_s,
            )  # fmt: skip
        return _text(content, spent)

    async def _read(self, key: str, prompt: JudgePrompt, group: str | None) -> dict[str, float] | None:
        try:
            known = await asyncio.to_thread(self._cache.get, key, group)
            return None if known is None else read_scores(known, prompt.names)
        except (StorageError, UnreadableReplyError) as error:
            log.error("%s; the judge is called again", error)
            return None

    async def _write(self, key: str, text: str, group: str | None) -> None:
        try:
            await asyncio.to_thread(self._cache.put, key, text, group)
        except StorageError as error:
            log.error("%s; the reply is not cached", error)


def _text(content: bytes, spent: Counter[str]) -> str:
    """Returns the reply in a response, and adds its tokens to `spent`. Raises _FailedCallError."""
    try:
        body = json.loads(content)
        usage = body.get("usage") or {}
        for name in ("prompt_tokens", "completion_tokens"):
            spent[name] += int(usage.get(name) or 0)
        text = body["choices"][0]["message"]["content"]
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, OverflowError, RecursionError):
        raise _FailedCallError(f"not a chat completion: {content[:200]!r}") from None
    if not isinstance(text, str):
        raise _FailedCallError("the reply has no text")
    return text


def _costs(spent: Mapping[str, float], began: float) -> dict[str, float]:
    names = ("calls", "cached", "errors", "prompt_tokens", "completion_tokens")
    costs = {f"judge/{name}": float(spent.get(name, 0)) for name in names}
    return {**costs, "judge/seconds": time.monotonic() - began}


def _seconds(text: str | None) -> float:
    try:
        return max(0.0, float(text or 0))
    except ValueError:
        return 0.0
