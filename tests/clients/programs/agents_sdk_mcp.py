"""An agent on the OpenAI Agents SDK whose tools are those of the session's MCP server."""

from __future__ import annotations

import asyncio
import json
import os

from agents import Agent, Runner, set_tracing_disabled
from agents.mcp import MCPServerStreamableHttp
from calculator import MODEL
from calculator import messages as task_messages


async def main() -> str:
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    params = {"url": os.environ["TIDEGATE_MCP_URL"], "headers": headers}
    async with MCPServerStreamableHttp(params=params) as server:
        agent = Agent(name="agent", model=MODEL, mcp_servers=[server])
        return str((await Runner.run(agent, task_messages())).final_output)


if __name__ == "__main__":
    set_tracing_disabled(True)
    print(json.dumps({"answer": asyncio.run(main())}))
