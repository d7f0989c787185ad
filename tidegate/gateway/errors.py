"""What the gateway refuses on the data plane; each dialect gives it the dialect's own shape."""

from __future__ import annotations

import re
from collections.abc import Mapping

from tidegate.errors import TidegateError


class ApiError(TidegateError):
    """A call that is answered with an error.

    Unless it may be retried, `status` is never 408, 409, 429 or 5xx, which SDKs retry on their own.
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


def unsupported(param: str, why: str) -> ApiError:
    """A parameter or content that cannot be honoured, refused by name."""
    return ApiError(f"{param}: {why}", code="unsupported_parameter", param=param)


def wrong_key() -> ApiError:
    return ApiError(
        "the API key does not open this session",
        status=401,
        type="authentication_error",
        code="invalid_api_key",
    )


def unknown_model(name: str, served: str) -> ApiError:
    return ApiError(
        f"model: {name!r} is not served here; the only model is {served!r}"[:300],
        status=404,
        code="model_not_found",
        param="model",
    )


def session_closed(why: str) -> ApiError:
    return ApiError(
        f"this session is over ({why}); its turns are no longer recorded",
        status=403,
        type="session_over",
        code="session_over",
    )


def context_exceeded(prompt_tokens: int, max_context: int, at_least: bool = False) -> ApiError:
    return ApiError(
        f"This model's maximum context length is {max_context} tokens, and the prompt alone has "
        f"{'at least ' * at_least}{prompt_tokens}. Shorten the messages; nothing is ever cut from them.",
        code="context_length_exceeded",
        param="messages",
    )


def refused_by_engine(asked: Mapping[str, str], reason: str) -> ApiError | None:
    """The refusal of what the agent asked for, by the agent's own name for it; `asked` maps engines' names
    to those. None where the engine's reason names nothing of it: then the agent is not to blame."""
    for name, param in asked.items():
        words = f"{name}|grammar" if name == "json_schema" else name
        if re.search(rf"\b({words})\b", reason):
            return unsupported(param, f"the engine refuses it: {reason}")
    return None


def engine_failure(message: str) -> ApiError:
    return ApiError(message, status=424, type="engine_error", code="engine_error")


def queue_full(message: str) -> ApiError:
    """Nothing of it was sampled, and the line gets shorter: a retry may be let in."""
    return ApiError(message, status=503, type="overloaded", code="queue_full", retryable=True)


def not_recorded(message: str) -> ApiError:
    """The reply is there but could not be written down, so it is kept back: a retry may have it."""
    return ApiError(message, status=503, type="journal_error", code="journal_error", retryable=True)
