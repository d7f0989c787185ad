"""Errors that the data plane returns to agents; each dialect formats them in its own way."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from tidegate.errors import TidegateError

UNRANKED = 424
"""Status of the sealing of a group whose ranking failed."""


class ApiError(TidegateError):
    """An error response to a call.

    Unless `retryable`, `status` must not be 408, 409, 429 or 5xx, which SDKs retry on their own.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        type: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
        retryable: bool = False,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.type = type
        self.code = code
        self.param = param
        self.retryable = retryable


def unsupported(param: str, reason: str) -> ApiError:
    """Returns the error for an unsupported parameter or content."""
    return ApiError(f"{param}: {reason}", code="unsupported_parameter", param=param)


_ADDRESSES = (
    "an OpenAI client's base URL is http://HOST:PORT/s/SESSION/v1 for an episode (session.base_url) or "
    "http://HOST:PORT/v1, and an Anthropic client's is the same without /v1"
)
_DATA_PLANE = re.compile(r"/(chat/completions|completions|responses|messages|models|embeddings)(/|$)")


def wrong_address(method: str, path: str) -> ApiError | None:
    """Returns the error for a path that an SDK calls with a wrong base URL; None if no SDK calls it."""
    if not path.startswith(("/v1/", "/s/")) and not _DATA_PLANE.search(path):
        return None
    return ApiError(
        f"{method} {path[:200]}: there is no such route; {_ADDRESSES}", status=404, code="wrong_address"
    )


def wrong_key() -> ApiError:
    return ApiError(
        "the API key is not valid for this session: an episode's key is session.api_key, and opens its "
        f"session only; {_ADDRESSES}",
        status=401,
        type="authentication_error",
        code="invalid_api_key",
    )


def wrong_project_key() -> ApiError:
    """Returns the error of a gateway with project keys for a call that names no session."""
    return ApiError(
        "the API key is no project key of this gateway, or it was revoked: `tidegate keys create NAME` adds "
        "one to the file gateway.keys and prints it, and no restart is needed. An episode's key is "
        f"session.api_key; {_ADDRESSES}",
        status=401,
        type="authentication_error",
        code="invalid_api_key",
    )


def unknown_model(name: object, served: Sequence[str]) -> ApiError:
    """Returns the error for a model that is none of those `served`; `name` is None if a request has none."""
    there = f"the only model is {served[0]!r}" if len(served) == 1 else f"the models are {', '.join(served)}"
    if len(served) > 1:
        there += "; a call that must not be trained on has the header x-tidegate-train: no"
    what = "is missing" if name is None else f"{name!r:.100} is not served"
    return ApiError(
        f"model: {what}; {there}",
        status=404,
        code="model_not_found",
        param="model",
    )


def session_closed(reason: str) -> ApiError:
    return ApiError(
        f"this session is over ({reason}); it accepts no more calls",
        status=403,
        type="session_over",
        code="session_over",
    )


def context_exceeded(prompt_tokens: int, max_context: int, at_least: bool = False) -> ApiError:
    return ApiError(
        f"This model's maximum context length is {max_context} tokens, and the prompt alone has "
        f"{'at least ' * at_least}{prompt_tokens}. Shorten the messages; the gateway never truncates them.",
        code="context_length_exceeded",
        param="messages",
    )


def refused_by_engine(requested: Mapping[str, str], reason: str) -> ApiError | None:
    """Returns the error for a parameter that the engine refuses, under the agent's name for it.

    `requested` maps the engine's parameter names to the agent's. Returns None if the engine's reason names
    none of them: then the agent is not at fault.
    """
    for name, param in requested.items():
        words = f"{name}|grammar" if name == "json_schema" else name
        if re.search(rf"\b({words})\b", reason):
            return unsupported(param, f"refused by the engine: {reason}")
    return None


def engine_failure(message: str) -> ApiError:
    return ApiError(message, status=424, type="engine_error", code="engine_error")


def queue_full(message: str) -> ApiError:
    """Returns the error for a full queue. Nothing was sampled, and a retry may succeed."""
    return ApiError(message, status=503, type="overloaded", code="queue_full", retryable=True)


def not_recorded(message: str) -> ApiError:
    """Returns the error for a reply that the journal could not record. A retry may get the reply."""
    return ApiError(message, status=503, type="journal_error", code="journal_error", retryable=True)


def environment_failure(message: str) -> ApiError:
    """Returns the error for a session whose environment lost its state; a retry cannot succeed."""
    return ApiError(message, status=424, type="environment_error", code="environment_error")
