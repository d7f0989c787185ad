"""A language model that decides whether an answer means the same as a gold answer."""

from __future__ import annotations

import os
import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from functools import cached_property
from typing import TYPE_CHECKING

from tidegate.envs.unavailable import is_unavailable
from tidegate.errors import ConfigError, RewardError, RewardUnavailableError

if TYPE_CHECKING:
    from openai import OpenAI

CACHED = 50_000
"""Number of cached verdicts; the oldest are evicted."""
MAX_ANSWER = 4_000
"""Number of characters of an answer that are judged."""
PROMPT = """Judge whether the response answers the question correctly. It is correct if it means the same as \
one of the correct answers; small differences in wording, form or precision don't matter. Don't solve the \
question yourself.

Question: {question}
Correct answers: {golds}
Response: {answer}

Give one sentence of reasoning, then a last line that is either "correct: yes" or "correct: no"."""
# A whole line, so that neither "Incorrect: yes" nor a verdict that the reasoning quotes counts.
_VERDICT = re.compile(
    r"^[\W_]*(?:(?:final )?(?:answer|verdict)\W+)?(?:the response is )?correct[\W_]*:[\W_]*(yes|no)[\W_]*$",
    re.IGNORECASE | re.MULTILINE,
)


class Judge:
    """Judges answers with a model. Verdicts are cached, also between concurrent threads.

    Args:
        url: Endpoint of the model, as `http://host:8002/v1`.
        model: Name of the model.
        timeout_s: Timeout of one call.
        attempts: Calls before a verdict fails.
        api_key_env: Environment variable with the endpoint's key.

    Raises:
        ConfigError: The variable is not set.
    """

    def __init__(
        self, url: str, model: str, timeout_s: float = 15.0, attempts: int = 3, api_key_env: str | None = None
    ) -> None:
        if api_key_env is not None and not os.environ.get(api_key_env):
            raise ConfigError(f"judge: api_key_env = {api_key_env!r}, but that variable is not set")
        self._url = url
        self._model = model
        self._timeout_s = timeout_s
        self._attempts = attempts
        self.limit_s = attempts * timeout_s
        """Longest duration of a verdict."""
        self._key = "none" if api_key_env is None else os.environ[api_key_env]
        self._verdicts: OrderedDict[tuple[str, ...], Future[float]] = OrderedDict()
        self._lock = threading.Lock()

    def verdict(self, question: str, golds: Sequence[str], answer: str) -> float:
        """Returns 1 if the answer is right, 0 if wrong; raises RewardError if all attempts fail, and
        RewardUnavailableError if the endpoint did not respond to one of them."""
        answer = answer[:MAX_ANSWER]
        key = (question, *golds, answer)
        with self._lock:
            verdict = self._verdicts.get(key)
            is_new = verdict is None
            if verdict is None:
                verdict = self._verdicts[key] = Future()
                if len(self._verdicts) > CACHED:
                    self._verdicts.popitem(last=False)
        if is_new:
            prompt = PROMPT.format(question=question, golds="; ".join(golds), answer=answer)
            self._settle(key, verdict, prompt)
        return verdict.result(timeout=self.limit_s + 1.0)

    def _settle(self, key: tuple[str, ...], verdict: Future[float], prompt: str) -> None:
        try:
            verdict.set_result(self._call(prompt))
        except BaseException as error:
            with self._lock:  # failures are not cached
                self._verdicts.pop(key, None)
            verdict.set_exception(error)
            if not isinstance(error, RewardError):
                raise

    def _call(self, prompt: str) -> float:
        from openai import OpenAIError

        failures, kind = [], RewardError
        for _ in range(self._attempts):
            try:
                reply = self._client.chat.completions.create(
                    model=self._model, messages=[{"role": "user", "content": prompt}], temperature=0.0
                )
            except OpenAIError as error:
                failures.append(f"{type(error).__name__}: {error}")
                kind = RewardUnavailableError if is_unavailable(error) else kind
                continue
            text = (reply.choices[0].message.content if reply.choices else None) or ""
            verdicts = {verdict.lower() for verdict in _VERDICT.findall(text)}
            if len(verdicts) == 1:
                return float(verdicts == {"yes"})
            failures.append(f"no verdict in {text[:200]!r}")
        raise kind(
            f"the judge at {self._url} gave no verdict in {self._attempts} attempts: {'; '.join(failures)}"
        )

    @cached_property
    def _client(self) -> OpenAI:
        from openai import OpenAI

        return OpenAI(base_url=self._url, api_key=self._key, timeout=self._timeout_s, max_retries=0)
