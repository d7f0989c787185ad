"""A second model that condenses search results to the parts that are relevant for the question.

It has its own OpenAI-compatible endpoints. Each call goes to the endpoint with the fewest calls in flight,
and to another one if that fails.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tidegate.errors import ConfigError, InfrastructureError
from tidegate.service.http_client import RedirectError, describe_failure, refuse_redirect

if TYPE_CHECKING:
    from openai import AsyncOpenAI

log = logging.getLogger("tidegate.agents")

COOLDOWN_S = 10.0
"""Time after a failure during which other endpoints are preferred."""
BACKOFF_S = 0.2
"""Wait before the second attempt; it grows linearly with each attempt."""
PROMPT = (
    "You condense search results for someone who works on the question below. Keep every fact, name, number "
    "and document id in square brackets that may help; leave out the rest; add nothing. If nothing helps, "
    "say so in one sentence.\n\nQuestion: {question}\nQuery: {query}\n\nResults:\n{results}"
)


@dataclass(slots=True)
class RefinerEndpoint:
    """One server of the service, with the number of its calls."""

    url: str
    client: AsyncOpenAI
    in_flight: int = 0
    calls: int = 0
    failures: int = 0
    cooldown_until: float = 0.0


class Refiner:
    """Condenses search results.

    Args:
        urls: Endpoints, as `http://host:8001/v1`.
        model: Model that they serve.
        max_tokens: Limit of a condensed result.
        timeout_s: Timeout of one attempt.
        attempts: Attempts per result.
        api_key_env: Environment variable with the endpoints' key.

    Raises:
        ConfigError: `urls` is empty, or the variable is not set.
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
        from openai import AsyncOpenAI, DefaultAsyncHttpxClient

        if isinstance(urls, str) or not urls:
            raise ConfigError("refine service: urls must be a list of at least one endpoint")
        key = "none" if api_key_env is None else os.environ.get(api_key_env)
        if not key:
            raise ConfigError(f"refine service: api_key_env = {api_key_env!r}, but that variable is not set")
        self.endpoints = [
            RefinerEndpoint(
                url,
                AsyncOpenAI(
                    base_url=url,
                    api_key=key,
                    max_retries=0,
                    timeout=timeout_s,
                    http_client=DefaultAsyncHttpxClient(event_hooks={"response": [refuse_redirect]}),
                ),
            )
            for url in urls
        ]
        self._model = model
        self._max_tokens = max_tokens
        self._timeout_s = timeout_s
        self._attempts = attempts

    async def refine(self, question: str, query: str, results: str) -> str:
        """Returns the condensed results; raises InfrastructureError if all attempts fail."""
        prompt = PROMPT.format(question=question, query=query, results=results)
        failures = []
        for attempt in range(self._attempts):
            await asyncio.sleep(BACKOFF_S * attempt)
            endpoint = self._least_loaded()
            try:
                return await self._call(endpoint, prompt)
            except InfrastructureError as error:
                endpoint.failures += 1
                endpoint.cooldown_until = time.monotonic() + COOLDOWN_S
                failures.append(str(error))
                log.warning(
                    "refine service: %s; %d of its %d calls failed", error, endpoint.failures, endpoint.calls
                )
        raise InfrastructureError(f"the refine service failed: {'; '.join(failures)}")

    def _least_loaded(self) -> RefinerEndpoint:
        """Returns the endpoint with the fewest calls in flight, preferring those that did not just fail."""
        now = time.monotonic()
        return min(
            self.endpoints,
            key=lambda endpoint: (endpoint.cooldown_until > now, endpoint.in_flight, endpoint.calls),
        )

    async def _call(self, endpoint: RefinerEndpoint, prompt: str) -> str:
        from openai import OpenAIError

        endpoint.calls += 1
        endpoint.in_flight += 1
        try:
            async with asyncio.timeout(self._timeout_s):  # the SDK's timeout applies to each read only
                reply = await endpoint.client.chat.completions.create(
                    model=self._model,
                    messages=[{"role": "user", "content": prompt}],
                    max_completion_tokens=self._max_tokens,
                    temperature=0.0,
                )
        except TimeoutError:
            raise InfrastructureError(f"{endpoint.url} took longer than {self._timeout_s:g} s") from None
        except (OpenAIError, RedirectError) as error:
            raise InfrastructureError(f"{endpoint.url}: {describe_failure(error)}") from error
        finally:
            endpoint.in_flight -= 1
        text = _without_reasoning((reply.choices[0].message.content if reply.choices else None) or "")
        if not text:
            raise InfrastructureError(
                f"{endpoint.url} returned no text, or reasoning only; it may need more than "
                f"max_tokens = {self._max_tokens}"
            )
        return text


def _without_reasoning(text: str) -> str:
    """Returns the text after `</think>` (the prompt may contain the opening tag); empty if it was cut."""
    answer = text.rpartition("</think>")[2].strip()
    return "" if answer.startswith("<think>") else answer
