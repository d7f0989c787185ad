"""Schemathesis requests generated from the gateway's OpenAPI: no 5xx and no undocumented response."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.clients.support import ENVIRONMENTS, scripted
from tests.fakes import Stage
from tidegate.types import Sampling, Task

pytestmark = [pytest.mark.clients, pytest.mark.timeout(700)]
CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,response_headers_conformance,"
    "response_schema_conformance,ignored_auth"
)
DEADLINE_S = 600.0


async def document(stage: Stage, where: Path) -> Path:
    """The served OpenAPI, with short waits."""
    async with aiohttp.ClientSession() as http, http.get(f"{stage.url}/openapi.json") as response:
        served: Any = await response.json()
    for name in ("WaitReady", "Lease"):
        served["components"]["schemas"][name]["properties"]["wait_s"]["maximum"] = 0.05
    waits = [
        parameter
        for path in ("/sessions/{session_id}/result", "/v1/groups/{group}")
        for parameter in served["paths"][path]["get"]["parameters"]
        if parameter["name"] == "wait_s"
    ]
    for parameter in waits:
        parameter["schema"]["maximum"] = 0.05
    assert len(waits) == 2
    await asyncio.to_thread(where.write_text, json.dumps(served))
    return where


async def schemathesis(stage: Stage, schema: Path, key: str, *options: str) -> None:
    words = [
        str(ENVIRONMENTS / "schemathesis" / "bin" / "schemathesis"), "run", str(schema), "--url", stage.url,
        "--header", f"Authorization: Bearer {key}", "--checks", CHECKS, "--seed", "3",
        "--request-timeout", "20", "--suppress-health-check", "all", "--no-color", "--max-examples", "15",
        *options,
    ]  # fmt: skip
    process = await asyncio.create_subprocess_exec(
        *words, cwd=schema.parent, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    try:
        async with asyncio.timeout(DEADLINE_S):
            said, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, said.decode()[-20_000:]


async def test_the_control_plane_answers_as_documented(tmp_path: Path) -> None:
    async with scripted(tmp_path, []) as stage:
        schema = await document(stage, tmp_path / "openapi.json")
        await schemathesis(stage, schema, "admin", "--exclude-path-regex", "^/v1/")


async def test_the_data_plane_answers_as_documented(tmp_path: Path) -> None:
    async with scripted(tmp_path, []) as stage:
        access = await stage.client.open_session(
            task=Task("t", "", []), deadline_s=DEADLINE_S, sampling=Sampling(max_tokens=16)
        )
        schema = await document(stage, tmp_path / "openapi.json")
        await schemathesis(stage, schema, access.api_key, "--include-path-regex", "^/v1/")
        await stage.client.finish(access.session_id, reward=1.0)
        turns = (await stage.client.trajectory(access.session_id)).turns
        assert len(turns) > 50
        assert all(len(turn.logprobs) == len(turn.output_ids) for turn in turns)
