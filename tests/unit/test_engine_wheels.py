"""The engines' sources have the routes and fields that Tidegate uses."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests import engine_wheels


def test_routes_and_fields_that_are_missing_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = {"/a": ("Body", "one two"), "/b": ("Gone", ""), "/c": ("", ""), "/d": ("", "")}
    monkeypatch.setitem(engine_wheels.USED, "sglang", used)
    with zipfile.ZipFile(tmp_path / "sglang-1-py3-none-any.whl", "w") as archive:
        archive.writestr(
            "sglang/io.py",
            "class Base:\n    one: int\nclass Body(Base):\n    three: int\n    four = 4\n    five: int = 5\n",
        )
        archive.writestr(
            "sglang/http.py", '@app.post("/a")\n@app.api_route("/b", methods=[])\n@app.get(\n    "/c",\n)\n'
        )
    found = engine_wheels.missing(tmp_path / "sglang-1-py3-none-any.whl")
    assert found == ["/d", "/a: two", "/a: three, which is required", "/b: class Gone"]


@pytest.mark.slow
def test_the_pinned_engines_have_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert engine_wheels.main([]) == 0, capsys.readouterr().out


def required(requirement: str, name: str) -> str:
    """Returns the version of a package that another one requires, by the index; nothing is installed."""
    command = [
        sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", "--disable-pip-version-check",
        "--ignore-installed", "--no-deps", "--only-binary=:all:", "--report", "-", requirement,
    ]  # fmt: skip
    found = subprocess.run(command, timeout=300, capture_output=True, text=True, check=False)
    if found.returncode and "connection broken" in found.stderr:
        pytest.skip(f"no package index can be reached: {found.stderr.splitlines()[-1]}")
    assert found.returncode == 0, found.stderr
    (package,) = json.loads(found.stdout)["install"]
    (version,) = {
        match[1]
        for line in package["metadata"]["requires_dist"]
        if (match := re.match(rf"{name}==([\w.]+)", line))
    }
    return str(version)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_pinned_packages_have_the_documented_versions_of_nccl() -> None:
    repo = engine_wheels.REPO
    own = re.search(r'"torch==([\d.]+)"', (repo / "pyproject.toml").read_text())
    (sglang,) = (one.partition("==")[2] for one in engine_wheels.pinned() if one.startswith("sglang=="))
    assert own
    assert f"ARG SGLANG_VERSION={sglang}\n" in (repo / "docker" / "cuda-sglang.Dockerfile").read_text()
    other = required(f"sglang=={sglang}", "torch")
    # === because == takes a build for CPUs (+cpu), too.
    ours, theirs = (required(f"torch==={torch}", "nvidia-nccl-cu13") for torch in (own[1], other))
    scaling = " ".join((repo / "docs" / "scaling.md").read_text().split())
    for words in (
        f"torch {own[1]}, which the trainer installs, has NCCL {ours}",
        f"torch {other}, which SGLang {sglang} installs, has {theirs}",
        f"pip install --no-deps nvidia-nccl-cu13=={theirs}",
    ):
        assert words in scaling
