"""What MCP servers list and return reaches the agent: all pages, all texts, tools of any name."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tidegate.envs.adapters.mcp import McpTools
from tidegate.envs.base import load_environment
from tidegate.envs.tools import NAME, ToolError
from tidegate.errors import ConfigError

SERVER = r"""
import json, sys
pages, results, errors = json.load(open(sys.argv[1]))
for line in sys.stdin:
    call = json.loads(line)
    if "id" not in call:
        continue
    params = call.get("params") or {}
    if call["method"] == "initialize":
        version, info = params["protocolVersion"], {"name": "pages", "version": "1"}
        result = {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": info}
    elif call["method"] == "tools/list":
        page = int(params.get("cursor") or 0)
        schema = {"type": "object", "properties": {}}
        result = {"tools": [{"name": name, "inputSchema": schema} for name in pages[page]]}
        if page + 1 < len(pages):
            result["nextCursor"] = str(page if "again" in pages[page] else page + 1)
    elif call["method"] == "tools/call":
        name = params["name"]
        result = results.get(name, {"content": [{"type": "text", "text": name}]})
        result["isError"] = name in errors
    else:
        result = {}
    print(json.dumps({"jsonrpc": "2.0", "id": call["id"], "result": result}), flush=True)
"""


def load(
    folder: Path, pages: list[list[str]], results: Any = None, errors: Any = (), **options: Any
) -> McpTools:
    (folder / "server.py").write_text(SERVER)
    (folder / "tasks.jsonl").write_text('{"prompt": "p", "answer": "a"}\n{"prompt": "q", "answer": "b"}\n')
    (folder / "script.json").write_text(json.dumps([pages, results or {}, [*errors]]))
    tasks = {"use": "dataset", "options": {"path": str(folder / "tasks.jsonl")}}
    server = f"mcp:{sys.executable} {folder / 'server.py'} {folder / 'script.json'}"
    environment = load_environment(server, {"tasks": tasks, **options})
    assert isinstance(environment, McpTools)
    return environment


async def result(folder: Path, of_call: dict[str, Any], *, error: bool = False) -> str:
    environment = load(folder, [["get"]], {"get": of_call}, ["get"] if error else [])
    state = await environment.setup(environment.train_task(0))
    try:
        return str(await environment.tools()[0].fn(state, {}))
    finally:
        await environment.teardown(state)


def test_tools_of_all_pages(tmp_path: Path) -> None:
    """openai/openai-agents-python#4085, ag2ai/ag2#3262, anthropics/claude-code#24785"""
    pages = [["a", "b"], [], ["c"], ["d"]]
    assert [tool.name for tool in load(tmp_path, pages).tools()] == ["a", "b", "c", "d"]
    assert [tool.name for tool in load(tmp_path, pages, tools=["d"]).tools()] == ["d"]
    with pytest.raises(ConfigError, match="has no tool 'e'"):
        load(tmp_path, pages, tools=["e"])


def test_a_list_without_end_is_refused(tmp_path: Path) -> None:
    """ag2ai/ag2#3262: a server that returns a cursor again"""
    with pytest.raises(ConfigError, match="returned the cursor '1' twice"):
        load(tmp_path, [["a"], ["again"], ["b"]])


TEXT = {"type": "text", "text": "saved"}
FILE = {"uri": "file:///a", "mimeType": "text/plain", "text": "BODY"}
STRUCTURED = {"status": "available", "accounts": [{"id": 123456789012345678901, "é": None}]}


@pytest.mark.parametrize(
    ("of_call", "text"),
    [
        # google/adk-go#1391, docker/docker-agent#2612: embedded resources
        ({"content": [TEXT, {"type": "resource", "resource": FILE}]}, "saved\nBODY"),
        # agno-agi/agno#8653: links to resources
        (
            {"content": [{"type": "resource_link", "uri": "file:///b", "name": "b", "description": "Log."}]},
            "file:///b: b: Log.",
        ),
        # NousResearch/hermes-agent#30601, nicobailon/pi-mcp-adapter#113, ggml-org/llama.cpp#26410
        ({"content": [], "structuredContent": STRUCTURED}, json.dumps(STRUCTURED, ensure_ascii=False)),
        # open-webui/open-webui#28926, usememos/memos#6226: a summary as text
        ({"content": [TEXT], "structuredContent": {"pages": 3}}, 'saved\n{"pages": 3}'),
        # A value that is there as text, too, is not repeated.
        ({"content": [{"type": "text", "text": '{"a":1}'}], "structuredContent": {"a": 1}}, '{"a":1}'),
        ({"content": [TEXT], "structuredContent": {"result": "saved"}}, "saved"),
        (
            {"content": [TEXT, {"type": "text", "text": "7"}], "structuredContent": {"result": ["saved", 7]}},
            "saved\n7",
        ),
        ({"content": [], "structuredContent": {"result": []}}, '{"result": []}'),
        ({"content": [{"type": "image", "data": "AAAA", "mimeType": "image/png"}, TEXT]}, "saved"),
        (
            {"content": [{"type": "resource", "resource": {"uri": "file:///c", "blob": "AAAA"}}, TEXT]},
            "saved",
        ),
        ({"content": []}, ""),
    ],
)
async def test_texts_of_results(tmp_path: Path, of_call: dict[str, Any], text: str) -> None:
    """The threads beside the cases"""
    assert await result(tmp_path, of_call) == text


async def test_an_error_has_its_structured_reason(tmp_path: Path) -> None:
    """dapr/dapr-agents#287"""
    with pytest.raises(ToolError, match=r'^\{"reason": "closed"\}$'):
        await result(tmp_path, {"content": [], "structuredContent": {"reason": "closed"}}, error=True)
    with pytest.raises(ToolError, match="'get' failed and gave no reason"):
        await result(tmp_path, {"content": []}, error=True)


async def test_tools_with_names_that_models_cannot_be_given(tmp_path: Path) -> None:
    """openai/codex#8174, xorbitsai/xagent#1340, defilantech/LLMKube#1525: the protocol allows dots"""
    names = ["fs.read", "fs/read", "fs_read", "é" * 3, "x" * 100, "x" * 101]
    environment = load(tmp_path, [names], tools=names)
    offered = [tool.name for tool in environment.tools()]
    assert offered == ["fs_read_2", "fs_read_3", "fs_read", "___", "x" * 64, "x" * 60 + "_2"]
    assert all(NAME.fullmatch(name) for name in offered)
    state = await environment.setup(environment.train_task(0))
    try:
        # Each call reaches the tool by the server's own name.
        assert [await tool.fn(state, {}) for tool in environment.tools()] == names
    finally:
        await environment.teardown(state)
