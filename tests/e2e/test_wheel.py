"""The wheel and the sdist of a clean clone, installed into an empty environment outside the repository."""

from __future__ import annotations

import asyncio
import contextlib
import email
import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import time
import venv
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from openai import AsyncOpenAI

from tests import REPO
from tests.certificates import trusting_all
from tests.fakes import FakeEngine
from tests.waiting import announced
from tidegate.gateway.client import GatewayClient

pytestmark = pytest.mark.slow
KEY = "admin"
BUILD = "from setuptools import build_meta as b; print(b.build_sdist({0!r}), b.build_wheel({0!r}))"


def clean(**more: str) -> dict[str, str]:
    """The environment of a user: none of the repository's paths."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "TIDEGATE"))}
    return {**trusting_all(kept), "OMP_NUM_THREADS": "1", **more}


def typed(*command: str | Path, cwd: Path, timeout_s: float = 120) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=timeout_s, env=clean())
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], Path]) -> Path:
    """Makes something in a directory that all workers of pytest-xdist share; the others wait for it."""
    base = factory.getbasetemp()
    root = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    with (root / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        made = root / name / "made"
        if not made.exists():
            shutil.rmtree(made.parent, ignore_errors=True)  # of a worker that failed
            made.parent.mkdir()
            made.write_text(str(make(made.parent)))
        return Path(made.read_text())


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that is built from the sdist of a clean clone."""
    return once(tmp_path_factory, "built", build)


def build(folder: Path) -> Path:
    typed("git", "clone", "-q", REPO, folder / "clone", cwd=folder)
    typed(sys.executable, "-c", BUILD.format(str(folder)), cwd=folder / "clone")
    (sdist,) = folder.glob("*.tar.gz")
    (from_clone,) = folder.glob("*.whl")
    with zipfile.ZipFile(from_clone) as archive:
        names = set(archive.namelist())
    from_clone.unlink()
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "sdist", filter="data")
    (source,) = (folder / "sdist").iterdir()
    typed(sys.executable, "-c", BUILD.format(str(folder)), cwd=source)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert set(archive.namelist()) == names, "the sdist lacks files of the repository"
    return wheel


def environment(folder: Path, requirement: str) -> Path:
    """Makes a virtual environment with a package; returns its `bin`."""
    venv.create(folder / "venv", with_pip=True)
    binaries = folder / "venv" / "bin"
    typed(binaries / "pip", "install", "-q", requirement, cwd=folder, timeout_s=600)
    size = sum(one.stat().st_size for one in packages(binaries).rglob("*") if one.is_file())
    print(f"{requirement.rpartition('/')[2]}: {size / 1e6:.0f} MB, with pip")
    return binaries


def packages(binaries: Path) -> Path:
    (site,) = binaries.parent.glob("lib/python*/site-packages")
    return site


@pytest.fixture(scope="module")
def installed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` of an environment with the wheel and the extra `gateway`."""
    return once(tmp_path_factory, "gateway", lambda folder: environment(folder, f"{built}[gateway]"))


def test_an_installation_without_extras_serves_agents_and_environments(built: Path, tmp_path: Path) -> None:
    binaries = environment(tmp_path, f"{built}")
    names = {one.name for one in packages(binaries).iterdir()}
    assert names.isdisjoint({"torch", "transformers", "tokenizers", "mcp", "uvloop"})
    (tmp_path / "mine.py").write_text("async def agent(task, session):\n    return 'done'\n")
    code = (
        "import tidegate.client, tidegate.agents.attempt_runner\n"
        "from tidegate.agents.base import load_agent\n"
        "load_agent('mine.py:agent', {})"
    )
    typed(binaries / "python", "-c", code, cwd=tmp_path)
    announce = tmp_path / "environment.json"
    command = [binaries / "tidegate", "env", "serve", "arithmetic", "--port", "0", "--announce", announce]
    with subprocess.Popen(command, cwd=tmp_path, env=clean()) as process:
        try:
            announced(announce, process)
        finally:
            process.terminate()
    words = [binaries / "tidegate", "gateway", "--model.path", "none"]
    refused = subprocess.run(words, cwd=tmp_path, env=clean(), capture_output=True, text=True)
    assert refused.returncode != 0
    assert "install Tidegate's extra 'gateway'" in refused.stderr


def test_the_readme_has_no_relative_links(built: Path) -> None:
    with zipfile.ZipFile(built) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        readme = email.message_from_bytes(archive.read(metadata)).get_payload()
    assert isinstance(readme, str)
    prose = re.sub(r"^```.*?^```", "", readme, flags=re.MULTILINE | re.DOTALL)
    links = re.findall(r"\]\(([^)\s]+)", prose)
    assert len(links) > 50
    assert [link for link in links if not link.startswith(("https://", "#"))] == []
    # Each names a file of the repository.
    paths = [found[1] for link in links if (found := re.search(r"/(?:blob|raw)/v[^/]+/([^#]*)", link))]
    assert [path for path in paths if not (REPO / path).exists()] == []


def test_help_of_the_installed_command(installed: Path, tmp_path: Path) -> None:
    typed(installed / "tidegate", "--help", cwd=tmp_path)  # compiles the modules
    started = time.monotonic()
    assert "usage: tidegate" in typed(installed / "tidegate", "--help", cwd=tmp_path)
    print(f"tidegate --help: {time.monotonic() - started:.2f} s")


def test_projects_and_examples_from_the_installed_package(installed: Path, tmp_path: Path) -> None:
    rows = [{"question": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    typed(installed / "tidegate", "init", "mine", "--tiny", cwd=tmp_path)
    assert (tmp_path / "mine/model/model.safetensors").stat().st_size > 1_000_000
    typed(installed / "tidegate", "init", "words", cwd=tmp_path)
    assert (tmp_path / "words/warm-up.jsonl").is_file()
    said = typed(installed / "tidegate", "init", "asked", "--data", "rows.jsonl", cwd=tmp_path)
    assert "held out" in said
    said = typed(installed / "tidegate", "init", "demo", "--example", "demo", cwd=tmp_path)
    assert "tidegate train examples/demo/config.toml" in said
    assert (tmp_path / "demo/examples/tiny_base/model/model.safetensors").is_file()


@contextlib.contextmanager
def gateway(
    command: Path, folder: Path, engine: FakeEngine
) -> Iterator[tuple[Path, subprocess.Popen[bytes]]]:
    """Starts `tidegate gateway`; yields the file that gets its address, and its process."""
    announce = folder / "gateway.json"
    words = ["gateway", "--model.path", "mine/model", "--gateway.port", "0", "--announce", announce]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [command, *words, "--engine.urls", json.dumps([engine.url])],
            cwd=folder,
            stdout=log,
            stderr=log,
            env=clean(TIDEGATE_ADMIN_KEY=KEY),
        )
        try:
            yield announce, process
        finally:
            process.terminate()
            process.wait(30)


async def test_the_installed_gateway_serves_a_chat_request(installed: Path, tmp_path: Path) -> None:
    typed(installed / "tidegate", "init", "mine", "--tiny", cwd=tmp_path)
    engine = FakeEngine(decode=lambda _: "", vocabulary=200)
    await engine.start()
    with gateway(installed / "tidegate", tmp_path, engine) as (announce, process):
        url = await asyncio.to_thread(announced, announce, process)
        async with GatewayClient(url, KEY) as client:
            session = await client.open_session()
            async with AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as llm:
                reply = await llm.chat.completions.create(
                    model="policy", messages=[{"role": "user", "content": "2+3?"}]
                )
    await engine.stop()
    assert reply.usage is not None
    assert reply.usage.completion_tokens > 0
    assert len(engine.requests) == 1


def test_the_installed_scaffold_trains(installed: Path, tmp_path: Path) -> None:
    """With torch from the environment of the tests, because its installation takes minutes."""
    binaries = tmp_path / "venv" / "bin"
    venv.create(tmp_path / "venv", with_pip=False)
    wheel_site = packages(installed)
    # The wheel's packages come first; an editable installation's .pth files are not read.
    (packages(binaries) / "packages.pth").write_text(f"{wheel_site}\n{sysconfig.get_path('purelib')}\n")
    where = typed(binaries / "python", "-c", "import tidegate, torch; print(tidegate.__file__)", cwd=tmp_path)
    assert where.startswith(str(wheel_site))
    tidegate = (binaries / "python", "-m", "tidegate")
    typed(*tidegate, "init", "mine", "--tiny", cwd=tmp_path)
    small = ("--trainer.steps=2", "--eval.every=0", "--eval.tasks=8", "--trainer.groups_per_batch=4")
    typed(*tidegate, "train", "config.toml", *small, cwd=tmp_path / "mine", timeout_s=300)
    rows = (tmp_path / "mine/runs/mine/metrics.jsonl").read_text().splitlines()
    assert json.loads(rows[-1])["step"] == 2
