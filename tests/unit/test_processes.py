"""The engines of a run: how many, under which names, with which command line."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tidegate.config import load_settings
from tidegate.trainer.local import Local
from tidegate.trainer.servers import engine_arguments, pinned


@pytest.mark.parametrize(("count", "names"), [(1, ["engine"]), (3, ["engine-1", "engine-2", "engine-3"])])
def test_several_engines_from_one_setting(tmp_path: Path, count: int, names: list[str]) -> None:
    settings = load_settings(None, ["--model.path=x", f"--engine.count={count}", "--engine.threads=2"])
    services = Local().engines(settings, tmp_path, lambda: (tmp_path / "v7", 7))
    assert [one.name for one in services] == names
    assert len({one.log for one in services}) == count
    command = engine_arguments(settings, lambda: (tmp_path / "v7", 7))
    assert command[command.index("--threads") + 1] == "2", "each has its own"
    assert command[command.index("--weight-version") + 1] == "7"


def test_weights_that_an_engine_starts_with_outlive_the_version(tmp_path: Path) -> None:
    for version in ("v1", "v2"):
        (tmp_path / version).mkdir()
        (tmp_path / version / "model.safetensors").write_text(version)
    place, version = pinned(lambda: (tmp_path / "v1", 1), tmp_path, "engine-1")
    shutil.rmtree(tmp_path / "v1")
    assert ((place / "model.safetensors").read_text(), version) == ("v1", 1)
    again, version = pinned(lambda: (tmp_path / "v2", 2), tmp_path, "engine-1")
    assert ((again / "model.safetensors").read_text(), version, again) == ("v2", 2, place)
    base = tmp_path / "elsewhere" / "base"
    assert pinned(lambda: (base, 0), tmp_path, "engine-1") == (base, 0)
