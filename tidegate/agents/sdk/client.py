"""The openai SDK's asynchronous client with less work per call; requests and replies are the same.

Nearly all CPU time of an agent's call is spent in two places. Before a request, the SDK tries each message
against the types of all roles, though plain JSON is sent as it is. And httpx sends the request, for which
aiohttp needs less.
"""

from __future__ import annotations

import functools
import importlib
from functools import cached_property, partial
from pathlib import Path
from types import FunctionType
from typing import Any

import aiohttp
import openai
from openai import AsyncOpenAI
from openai.resources.chat import AsyncChat
from openai.resources.chat.completions import AsyncCompletions
from yarl import URL

_SDK = str(Path(openai.__file__).parent)
_KEEPALIVE_S = 30.0
"""The gateway keeps idle connections for longer."""
_ATOMS = frozenset({str, int, float, bool, type(None)})


class LeanCompletions(AsyncCompletions):
    """Chat completions whose plain messages and tools bypass the SDK's conversion, which would not change
    them."""

    async def create(self, **arguments: Any) -> Any:
        """Creates a completion, with the arguments and results of the SDK."""
        plain = {
            name: value
            for name in ("messages", "tools")
            if type(value := arguments.get(name)) is list and is_plain(value)
        }
        if plain and _is_original():  # sent as they are, in the places that the empty lists have in the body
            arguments |= dict.fromkeys(plain, ())
            arguments["extra_body"] = {**plain, **(arguments.get("extra_body") or {})}
        return await super().create(**arguments)


class LeanChat(AsyncChat):
    @cached_property
    def completions(self) -> AsyncCompletions:
        return LeanCompletions(self._client)


class LeanAsyncOpenAI(AsyncOpenAI):
    """`AsyncOpenAI` with the completions above."""

    @cached_property
    def chat(self) -> AsyncChat:
        return LeanChat(self)

    @property
    def user_agent(self) -> str:
        return super().user_agent.replace(type(self).__name__, AsyncOpenAI.__name__, 1)

    def copy(self, **options: Any) -> LeanAsyncOpenAI:
        """Returns a client with other options, as the SDK does."""
        made: LeanAsyncOpenAI = super().copy(**options)
        # Otherwise each copy determines the platform in a thread at its first call.
        made._platform = self._platform = self._platform or _platform()
        return made

    with_options = copy


def new_openai(**options: Any) -> AsyncOpenAI:
    """Returns a client of the openai SDK that sends requests with aiohttp.

    Args:
        options: Arguments of `AsyncOpenAI`.
    """
    major = int(openai.__version__.partition(".")[0])
    httpx = importlib.import_module("httpx2" if major >= 3 else "httpx")
    limits = httpx.Limits(max_connections=0, keepalive_expiry=_KEEPALIVE_S)  # 0: aiohttp has no limit
    http_client = openai.DefaultAioHttpClient(limits=limits)
    for transport in filter(None, [http_client._transport, *http_client._mounts.values()]):
        _correct_errors(httpx, transport)
    return LeanAsyncOpenAI(http_client=http_client, **options)


def _correct_errors(httpx: Any, transport: Any) -> None:
    """Has a transport raise the errors of httpx's own. The SDK's raises ConnectTimeout for every lost
    connection, and an error of aiohttp for a reply that is not HTTP."""
    send = transport.handle_async_request

    async def corrected(request: Any) -> Any:
        if not isinstance(transport.client, aiohttp.ClientSession):
            transport.client = transport.get_client()
            # Otherwise aiohttp decodes %2E and removes the segment: models make up tools with the name "..".
            transport.client._build_url = partial(URL, encoded=True)
        try:
            return await send(request)
        except httpx.ConnectTimeout as error:
            cause = error.__cause__
            if isinstance(cause, TimeoutError):
                raise
            kind = httpx.ConnectError if isinstance(cause, aiohttp.ClientConnectorError) else httpx.ReadError
            raise kind(str(error)) from cause
        except aiohttp.ClientError as error:
            raise httpx.RemoteProtocolError(str(error)) from error
        except ValueError as error:  # an invalid header
            raise httpx.LocalProtocolError(str(error)) from error

    transport.handle_async_request = corrected


@functools.cache
def _platform() -> Any:
    """Returns the SDK's name of the platform; None if this version determines it in another way."""
    base = importlib.import_module("openai._base_client")
    find = getattr(base, "get_platform", None)
    return None if find is None else find()


def _is_original() -> bool:
    """Returns whether the SDK's method is its own. A library that traces calls may have replaced it, and
    reads its arguments."""
    method = AsyncCompletions.create
    return isinstance(method, FunctionType) and method.__code__.co_filename.startswith(_SDK)


def is_plain(value: Any) -> bool:
    """Returns whether a value consists of lists, dicts with string keys, strings, numbers and None."""
    kind = type(value)
    if kind in _ATOMS:
        return True
    if kind is dict:
        return all(type(key) is str and is_plain(item) for key, item in value.items())
    return kind is list and all(map(is_plain, value))
