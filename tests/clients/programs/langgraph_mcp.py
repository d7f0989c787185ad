"""A LangGraph agent whose tools are those of the session's MCP server."""

from __future__ import annotations

import asyncio
import json
import os

from calculator import MODEL
from calculator import messages as task_messages
from langchain.agents import create_agent
from langchain_mcp_adapters.client import MultiServerMCPClient
from langchain_openai import ChatOpenAI


async def main() -> str:
    server = {
        "transport": "streamable_http",
        "url": os.environ["TIDEGATE_MCP_URL"],
        "headers": {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"},
    }
    tools = await MultiServerMCPClient({"env": server}).get_tools()
    state = await create_agent(ChatOpenAI(model=MODEL), tools=tools).ainvoke({"messages": task_messages()})
    return str(state["messages"][-1].text)


if __name__ == "__main__":
    print(json.dumps({"answer": asyncio.run(main())}))
