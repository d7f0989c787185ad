"""A second model that condenses what a search found to what matters for the question.

It has OpenAI-compatible endpoints of its own: each call goes to the one with the fewest in flight, and on to
another where that one fails.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tidegate.errors import ConfigError, InfrastructureError

if TYPE_CHECKING:
    from openai import AsyncOpenAI

log = logging.getLogger("tidegate.agents")

COOL_S = 10.0
"""How long an endpoint that failed is passed over while others are there."""
BACKOFF_S = 0.2
"""Before another attempt, longer each time."""
PROMPT = (
    "You condense search results for someone who works on the question below. Keep every fact, name, number "
    "and document id in square brackets that may help; leave out the rest; add nothing. If nothing helps, "
    "say so in one sentence.\n\nQuestion: {question}\nQuery: {query}\n\nResults:\n{results}"
)


@dataclass(slots=True)
class RefinerEndpoint:
    """One server of the service, and how it has done."""

    url: str
    client: AsyncOpenAI
    in_flight: int = 0
    calls: int = 0
    failures: int = 0
    seconds: float = 0.0
    cool_until: float = field(default=0.0)


class Refiner:
    """Condenses results.

    `urls`: endpoints (`http://host:8001/v1`) that serve `model`; `api_key_env` names the variable with their
    key. `attempts` endpoints are tried, each for `timeout_s`.
    """

    def __init__(
        self,
        urls: Sequence[str],
        model: str,
        max_tokens: int = 512,
        timeout_s: float = 60.0,
        attempts: int = 3,
        api_key_env: str | None = None,
    ) -> None:
        from openai import AsyncOpenAI

        if isinstance(urls, str) or not urls:
            raise ConfigError("refine service: urls is a list of endpoints, at least one")
        key = "none" if api_key_env is None else os.environ.get(api_key_env)
        if not key:
            raise ConfigError(f"refine service: api_key_env = {api_key_env!r}, but that variable is not set")
        self.endpoints = [
            RefinerEndpoint(url, AsyncOpenAI(base_url=url, api_key=key, max_retries=0, timeout=timeout_s))
            for url in urls
        ]
        self._model = model
        self._max_tokens = max_tokens
        self._timeout_s = timeout_s
        self._attempts = attempts

    async def refine(self, question: str, query: str, results: str) -> str:
        """The condensed results. Raises InfrastructureError where no attempt gave any."""
        prompt = PROMPT.format(question=question, query=query, results=results)
        failures = []
        for attempt in range(self._attempts):
            await asyncio.sleep(BACKOFF_S * attempt)
            endpoint = self._least_loaded()
            try:
                return await self._ask(endpoint, prompt)
            except InfrastructureError as error:
                endpoint.failures += 1
                endpoint.cool_until = time.monotonic() + COOL_S
                failures.append(str(error))
                log.warning(
                    "refine service: %s; %d of its %d calls failed", error, endpoint.failures, endpoint.calls
                )
        raise InfrastructureError(f"the refine service failed: {'; '.join(failures)}")

    def statistics(self) -> dict[str, dict[str, float]]:
        """What became of the calls, by endpoint; `seconds` is the mean of those that were answered."""
        return {
            one.url: {
                "calls": one.calls,
                "failures": one.failures,
                "in_flight": one.in_flight,
                "seconds": one.seconds / max(1, one.calls - one.failures - one.in_flight),
            }
            for one in self.endpoints
        }

    def _least_loaded(self) -> RefinerEndpoint:
        """The endpoint with the fewest calls in flight, of those that didn't just fail if there are any."""
        now = time.monotonic()
        return min(self.endpoints, key=lambda one: (one.cool_until > now, one.in_flight, one.calls))

    async def _ask(self, endpoint: RefinerEndpoint, prompt: str) -> str:
        from openai import OpenAIError

        began = time.monotonic()
        endpoint.calls += 1
        endpoint.in_flight += 1
        try:
            async with asyncio.timeout(self._timeout_s):  # the SDK's own bounds each read, not the whole
                reply = await endpoint.client.chat.completions.create(
                    model=self._model,
                    messages=[{"role": "user", "content": prompt}],
                    max_completion_tokens=self._max_tokens,
                    temperature=0.0,
                )
        except TimeoutError:
            raise InfrastructureError(f"{endpoint.url} took longer than {self._timeout_s:g} s") from None
        except OpenAIError as error:
            raise InfrastructureError(f"{endpoint.url}: {type(error).__name__}: {error}") from error
        finally:
            endpoint.in_flight -= 1
        text = _without_reasoning((reply.choices[0].message.content if reply.choices else None) or "")
        if not text:
            raise InfrastructureError(
                f"{endpoint.url} answered nothing, or reasoning alone, which may need more than "
                f"max_tokens = {self._max_tokens}"
            )
        endpoint.seconds += time.monotonic() - began
        return text


def _without_reasoning(text: str) -> str:
    """What follows `</think>`, which a prompt may have opened; nothing where reasoning was cut."""
    answer = text.rpartition("</think>")[2].strip()
    return "" if answer.startswith("<think>") else answer
