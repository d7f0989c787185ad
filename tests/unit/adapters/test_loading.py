"""Names of other libraries' environments in `env.use`, and errors where a library is missing."""

from __future__ import annotations

import asyncio
import sys
import tomllib
from pathlib import Path

import pytest

from tests import REPO
from tidegate.envs.adapters.library import require, run_apart, task_seed
from tidegate.envs.base import load_environment
from tidegate.errors import ConfigError
from tidegate.program import advise_extra

EXTRAS = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]["optional-dependencies"]


@pytest.mark.parametrize("library", ["gymnasium", "reasoning_gym", "textarena", "verifiers"])
def test_a_missing_library_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch, library: str) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ConfigError) as raised:
        load_environment(f"{library}:anything", {})
    extra = library.replace("_", "-")
    how = advise_extra(extra) if extra in EXTRAS else "docs/adapters.md describes how to"
    assert str(raised.value) == f"the library {library!r} is not installed; {how}"
    assert (extra in EXTRAS) == (library != "verifiers")


def test_a_library_that_fails_to_import_is_not_called_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "half_installed.py").write_text("import no_such_dependency\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"'half_installed' cannot be imported: No module.*dependency"):
        require("half_installed", "half")


def test_a_prefix_needs_a_name_and_no_option_id() -> None:
    for use in ("textarena", "textarena:"):
        with pytest.raises(ConfigError, match="names no environment: write 'textarena:<environment>'"):
            load_environment(use, {})
    with pytest.raises(ConfigError, match=r"no option 'id': env.use names it"):
        load_environment("textarena:Nim-v0", {"id": "Nim-v0"})


def test_unknown_options_are_refused_by_name() -> None:
    pytest.importorskip("gymnasium")
    with pytest.raises(ConfigError, match="'gymnasium:FrozenLake-v1' has no option 'held'; did you mean"):
        load_environment("gymnasium:FrozenLake-v1", {"held": 3})


def test_seeds_of_training_and_held_out_tasks_differ() -> None:
    train = {task_seed(0, "train", index) for index in range(2000)}
    held_out = {task_seed(0, "eval", index) for index in range(2000)}
    assert not train & held_out
    assert all(0 <= seed < 2**31 for seed in train | held_out)
    assert task_seed(0, "train", 1) != task_seed(1, "train", 1)


def test_run_apart_has_a_deadline() -> None:
    with pytest.raises(TimeoutError):
        run_apart(asyncio.sleep(30), 0.05)
