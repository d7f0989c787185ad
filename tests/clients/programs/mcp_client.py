"""The official MCP client, of the SDK's line 1.x or 2.x: lists the tools and makes the given calls."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import json
import os
import sys
from collections.abc import AsyncIterator
from typing import Any

from mcp import ClientSession

VERSION = importlib.metadata.version("mcp")
URL = os.environ["TIDEGATE_MCP_URL"]
HEADERS = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}


@contextlib.asynccontextmanager
async def connected() -> AsyncIterator[tuple[Any, Any]]:
    if VERSION.startswith("1."):
        from mcp.client.streamable_http import streamablehttp_client

        async with streamablehttp_client(URL, headers=HEADERS) as (read, write, _):
            yield read, write
    else:
        from mcp.client.streamable_http import streamable_http_client
        from mcp.shared._httpx_utils import create_mcp_http_client

        async with (
            create_mcp_http_client(headers=HEADERS) as http,
            streamable_http_client(URL, http_client=http) as streams,
        ):
            yield streams


async def main(calls: list[Any]) -> None:
    async with connected() as (read, write), ClientSession(read, write) as client:
        await client.initialize()
        tools = [tool.name for tool in (await client.list_tools()).tools]
        answers = []
        for name, arguments in calls:
            result = json.loads((await client.call_tool(name, arguments)).model_dump_json(by_alias=True))
            answers.append([result["content"][0]["text"], result["isError"]])
    print(json.dumps({"tools": tools, "answers": answers, "version": VERSION}))


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
