"""An MCP server on stdio with the tools `reverse` and `fail`, written without the SDK.

The texts `stall` and `exit` make it wait for a second, and exit.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

TEXT = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
TOOLS = [
    {"name": "reverse", "description": "Reverses a text.", "inputSchema": TEXT},
    {"name": "fail", "description": "Fails always.", "inputSchema": TEXT},
]


def answer(method: str, params: dict[str, Any]) -> dict[str, Any]:
    if method == "initialize":
        info = {"name": "reverser", "version": "1"}
        return {
            "protocolVersion": params["protocolVersion"], "capabilities": {"tools": {}}, "serverInfo": info
        }  # fmt: skip
    if method == "tools/list":
        return {"tools": TOOLS}
    text = params["arguments"]["text"]
    if text == "stall":
        time.sleep(1)
    if text == "exit":
        sys.exit()
    failed = params["name"] == "fail"
    said = f"cannot do {text}" if failed else text[::-1]
    return {"content": [{"type": "text", "text": said}], "isError": failed}


for line in sys.stdin:
    request = json.loads(line)
    if "id" in request:
        result = answer(request["method"], request.get("params") or {})
        print(json.dumps({"jsonrpc": "2.0", "id": request["id"], "result": result}), flush=True)
