"""Files in the working directory that have the names of installed modules, next to a user's own files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import aiohttp
import pytest

from tests import REPO
from tests.tiny_tokenizer import make_model_dir
from tidegate.service.service import ExternalService, Service

NAMES = ("h2", "json", "asyncio", "signal", "copy", "random", "orjson", "httptools", "starlette", "types")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in NAMES:
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('{name}.py of the working directory')")
    (tmp_path / "helper.py").write_text("VALUE = 3")
    monkeypatch.chdir(tmp_path)
    return tmp_path


async def test_a_gateway_starts_beside_files_of_any_name(folder: Path) -> None:
    """python/cpython#122673, python/cpython#74007"""
    model = make_model_dir(folder / "tiny")
    gateway = Service("gateway", lambda: ["--model.path", str(model)], folder / "run", host="127.0.0.1")
    try:
        url = await gateway.start()
        async with aiohttp.ClientSession() as http, http.get(f"{url}/health") as health:
            assert health.status == 200
    finally:
        await gateway.stop()


@pytest.mark.parametrize("use", ["env.py:find", "mine/env.py:find", "env:find"])
def test_a_users_file_imports_its_siblings_and_no_shadows(folder: Path, use: str) -> None:
    """python/cpython#122673: installed modules win, and other names are found beside the file"""
    source = "import json, helper\ndef find(): return json.dumps(helper.VALUE)"
    (folder / "mine").mkdir()
    for place in (folder / "env.py", folder / "mine" / "env.py"):
        place.write_text(source)
    program = f"from tidegate.loading import load_object; print(load_object({use!r}, {{}}, 'agent')())"
    ended = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True)
    assert (ended.stdout, ended.stderr) == ("3\n", "")


def test_every_process_of_a_run_starts_without_its_working_directory(tmp_path: Path) -> None:
    """python/cpython#122673"""
    sources = {path: path.read_text() for path in (REPO / "tidegate").rglob("*.py")}
    starts = [
        (path.name, line)
        for path, source in sources.items()
        for line in source.splitlines()
        if "sys.executable" in line and '"-m"' in line
    ]
    assert len(starts) >= 6
    assert [one for one in starts if '"-P"' not in one[1]] == []
    assert ExternalService(tmp_path, "sglang").environment()["PYTHONSAFEPATH"] == "1"
