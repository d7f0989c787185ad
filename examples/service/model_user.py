"""The simulated user that is a language model behind an OpenAI-compatible endpoint."""

from __future__ import annotations

import asyncio
import os
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

from examples.service.scenario import UserScenario, Wish
from tidegate.errors import ConfigError, InfrastructureError
from tidegate.service.http_client import RedirectError, describe_failure, refuse_redirect
from tidegate.types import Message

if TYPE_CHECKING:
    from openai import AsyncOpenAI

END = "[END]"
"""The model writes it to end the conversation."""
PROMPT = """You are a customer of a shop and write to its service desk. Play this customer: never say that \
you are a model, and never do the service desk's work. Write one short message at a time.

Your name is {name}, your zip code is {zip_code}. State them only if you are asked.
Your wishes, one after the other:
{wishes}
{manner}
When all your wishes were granted or refused for good, write only {end}."""
WISHES = {
    "cancel": "cancel order {order}",
    "readdress": "have order {order} sent to the address {target}",
    "refund": "get your money back for order {order}",
    "exchange": "exchange order {order} for a {target}",
    "price": "know what order {order} cost",
}
INSIST = "If a wish is refused, insist on it once."
ACCEPT = "If a wish is refused, accept that."


class ModelUser:
    """Plays users with a model. It is sampled outside the session, so its tokens are never trained on.

    Args:
        url: Endpoint of the model, as `http://host:8002/v1`.
        model: Name of the model.
        api_key_env: Environment variable with the endpoint's key.
        timeout_s: Timeout of one call.
        attempts: Calls before an answer fails. All together must end within `env.call_timeout_s`.
        temperature: Temperature of the sampling.
        max_tokens: Limit of one answer.

    Raises:
        ConfigError: The variable is not set, or a number is out of range.
    """

    def __init__(
        self,
        url: str,
        model: str,
        api_key_env: str | None = None,
        timeout_s: float = 8.0,
        attempts: int = 3,
        temperature: float = 0.0,
        max_tokens: int = 128,
    ) -> None:
        if api_key_env is not None and not os.environ.get(api_key_env):
            raise ConfigError(f"user: api_key_env = {api_key_env!r}, but that variable is not set")
        if attempts < 1 or timeout_s <= 0 or max_tokens < 1:
            raise ConfigError(
                f"user: attempts = {attempts} and max_tokens = {max_tokens} must be at least 1, "
                f"timeout_s = {timeout_s:g} above 0"
            )
        self._url = url
        self._model = model
        self._key = "none" if api_key_env is None else os.environ[api_key_env]
        self._timeout_s = timeout_s
        self._attempts = attempts
        self._temperature = temperature
        self._max_tokens = max_tokens
        # Connections belong to an event loop, so there is one client per loop.
        self._clients: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, AsyncOpenAI] = (
            weakref.WeakKeyDictionary()
        )

    async def answer(self, scenario: UserScenario, messages: Sequence[Message]) -> str | None:
        """Returns the user's next message; None: the user ends the conversation.

        Args:
            scenario: The scenario of the episode.
            messages: The conversation so far, from the agent's side: the user's messages and the agent's
                replies.

        Raises:
            InfrastructureError: The endpoint failed in all attempts.
        """
        from openai import OpenAIError

        turned = {"user": "assistant", "assistant": "user"}
        request = [
            {"role": "system", "content": instructions(scenario)},
            *({"role": turned[one["role"]], "content": one["content"] or ""} for one in messages),
        ]
        failures: list[str] = []
        for attempt in range(self._attempts):
            if attempt:
                await asyncio.sleep(min(2.0, 0.25 * 2**attempt))
            try:
                reply = await self._client().chat.completions.create(
                    model=self._model,
                    messages=request,  # type: ignore[arg-type]
                    temperature=self._temperature,
                    max_tokens=self._max_tokens,
                )
            except (OpenAIError, RedirectError) as error:
                failures.append(describe_failure(error))
                continue
            text = (reply.choices[0].message.content if reply.choices else None) or ""
            said = text.split(END)[0].strip()
            if said or END in text:
                return None if END in text else said
            failures.append("an empty answer")
        raise InfrastructureError(
            f"the user's model at {self._url} gave no answer in {self._attempts} attempts: "
            f"{'; '.join(failures)}"
        )

    def _client(self) -> AsyncOpenAI:
        from openai import AsyncOpenAI, DefaultAsyncHttpxClient

        loop = asyncio.get_running_loop()
        if loop not in self._clients:
            self._clients[loop] = AsyncOpenAI(
                base_url=self._url, api_key=self._key, timeout=self._timeout_s, max_retries=0,
                http_client=DefaultAsyncHttpxClient(event_hooks={"response": [refuse_redirect]}),
            )  # fmt: skip
        return self._clients[loop]


def instructions(scenario: UserScenario) -> str:
    """Returns the model's system prompt."""
    return PROMPT.format(
        name=scenario.name,
        zip_code=scenario.zip_code,
        wishes="\n".join(f"- {_worded(wish)}" for wish in scenario.wishes),
        manner=INSIST if scenario.insists else ACCEPT,
        end=END,
    )


def _worded(wish: Wish) -> str:
    return WISHES[wish.kind].format(order=wish.order, target=wish.target)
