"""`tidegate init` creates a complete project or none, and never changes existing files."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import pytest

from tidegate.agents.base import load_agent
from tidegate.cli import main
from tidegate.config import load_settings
from tidegate.doctor.findings import Finding, Level
from tidegate.doctor.rewards import check_rewards
from tidegate.doctor.states import check_states
from tidegate.envs.base import load_environment
from tidegate.errors import ConfigError
from tidegate.scaffold import init
from tidegate.scaffold.example_files import TINY_BASE, copy_example, examples
from tidegate.scaffold.init import FILES, STATEFUL_FILES, TINY_FILES, make_project
from tidegate.scaffold.links import absolute_links


@pytest.mark.parametrize("kind", ["words", "tiny"])
def test_a_project_has_what_it_says(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert main(["init", "my-shop", *(["--tiny"] if kind == "tiny" else [])]) == 0
    said = capsys.readouterr().out
    commands = {
        "words": [
            "tidegate convert smollm2 --out smollm2   # 93 MB",
            "tidegate doctor",
            "tidegate sft config.toml --then train",
        ],
        "tiny": ["tidegate doctor", "tidegate train config.toml"],
    }[kind]
    expected = ["cd my-shop", "python -m pytest", *commands]
    assert [line.strip() for line in said.splitlines()[-len(expected) :]] == expected
    project = tmp_path / "my-shop"
    files = [*FILES] if kind == "words" else [*TINY_FILES, "model"]
    assert sorted(one.name for one in project.iterdir()) == sorted([*files, ".gitignore"])
    assert [one.name for one in tmp_path.iterdir()] == ["my-shop"]
    assert not any(one.is_symlink() for one in project.rglob("*"))


def test_the_suggested_commands_can_be_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")  # neither this python nor its tidegate is found there
    monkeypatch.setitem(sys.modules, "torch", None)
    assert main(["init", "bare", "--tiny"]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()[-5:]]
    source = "'tidegate[train] @ git+https://github.com/tidegate/tidegate'"
    assert lines[1] == f"{sys.executable} -m pip install {source}"
    monkeypatch.delitem(sys.modules, "torch")
    subprocess.run(f"{lines[0]} && {lines[2]} -q", shell=True, check=True, timeout=300)
    assert lines[3].endswith(" doctor")
    subprocess.run(lines[3].replace(" doctor", " --version"), shell=True, check=True, timeout=60)


@pytest.mark.parametrize("kind", ["words", "tiny"])
def test_its_settings_agent_and_environment_load(
    kind: Literal["words", "tiny"], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(make_project("p1", tmp_path, kind))
    settings = load_settings(Path("config.toml"))
    assert settings.run_dir == Path("runs/p1")
    assert settings.model.path == Path("model" if kind == "tiny" else "smollm2")
    assert all(path.is_file() for path in settings.sft.chats)
    load_agent(settings.agent.use, settings.agent.options)
    environment = load_environment(settings.env.use, settings.env.options)
    assert environment.names == ["correct"]
    assert len(environment.eval_sets()[""]) >= settings.eval.tasks


def test_a_project_with_a_stateful_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["init", "s1", "--stateful"]) == 0
    assert sorted(one.name for one in Path("s1").iterdir()) == sorted(
        [*STATEFUL_FILES, "model", ".gitignore"]
    )
    monkeypatch.chdir("s1")
    settings = load_settings(Path("config.toml"))
    load_agent(settings.agent.use, settings.agent.options)
    environment = load_environment(settings.env.use, settings.env.options)
    assert environment.stateful
    assert [tool.name for tool in environment.tools()] == ["calculator", "undo"]
    assert codes(check_states(environment)) == []
    assert codes(check_rewards(environment)) == ["reads_state"]


def codes(findings: Sequence[Finding]) -> list[str]:
    return [finding.code for finding in findings if finding.level is not Level.OK]


@pytest.mark.parametrize(
    "name", ["", "1st", "-x", "_x", "a/b", "../a", "a b", "a.b", ".", "..", "é", "a\n", "x" * 65, "$(id)"]
)
def test_an_invalid_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="is not a name for a project"):
        make_project(name, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["folder", "file", "broken link"])
def test_init_leaves_an_existing_path_unchanged(tmp_path: Path, kind: str) -> None:
    taken = tmp_path / "mine"
    if kind == "folder":
        taken.mkdir()
    elif kind == "file":
        taken.write_text("dear to me")
    else:
        taken.symlink_to("nowhere")
    before = os.lstat(taken)
    with pytest.raises(ConfigError, match="already exists"):
        make_project("mine", tmp_path)
    assert os.lstat(taken) == before


def test_a_project_that_cannot_be_made_whole_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(init.shutil, "copytree", fails)
    with pytest.raises(ConfigError, match="mine cannot be created: No space left on device"):
        make_project("mine", tmp_path, "tiny")
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be created: No such file"):
        make_project("mine", tmp_path / "nowhere")


def test_the_bundled_model_is_small() -> None:
    assert sum(one.stat().st_size for one in TINY_BASE.iterdir()) <= 4_000_000


def test_an_example_brings_the_files_that_it_uses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["init", "shop", "--example", "service"]) == 0
    assert "train examples/service/config.toml" in capsys.readouterr().out
    folders = sorted(one.name for one in (tmp_path / "shop/examples").iterdir() if one.is_dir())
    assert folders == ["bases", "service", "service_base"]
    monkeypatch.chdir("shop")
    settings = load_settings(Path("examples/service/config.toml"))
    assert (settings.model.path / "model.safetensors").is_file()
    load_agent(settings.agent.use, settings.agent.options)
    code = f"from tidegate.envs.base import load_environment; load_environment({settings.env.use!r}, {{}})"
    subprocess.run([sys.executable, "-P", "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("service", ["doctor examples/service/config.toml", "train examples/service/config.toml"]),
        ("words", ["python examples/words/demo.py"]),  # no model before it
        ("notebook", []),  # a key and a client are needed, too
        ("search", []),  # no model, no data
    ],
)
def test_the_commands_after_an_example_are_complete(
    name: str,
    expected: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert main(["init", "mine", "--example", name]) == 0
    said = [line.strip().removeprefix("tidegate ") for line in capsys.readouterr().out.splitlines()]
    assert said[said.index(f"less examples/{name}/README.md") + 1 :] == expected


@pytest.mark.parametrize("name", examples())
def test_settings_of_each_example_find_their_model(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy_example(name, tmp_path)
    monkeypatch.chdir(tmp_path)
    for config in Path("examples", name).glob("config*.toml"):
        model = load_settings(config).model.path
        assert model.is_dir() or not str(model).startswith("examples/"), config


def test_pages_of_a_copied_example_have_no_broken_links(tmp_path: Path) -> None:
    copy_example("service", tmp_path)
    for page in tmp_path.rglob("*.md"):
        links = re.findall(r"\]\(([^)\s#]+)", page.read_text())
        broken = [one for one in links if "://" not in one and not (page.parent / one).exists()]
        assert broken == []


def test_an_unknown_example_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no example 'tiny_base'; examples: custom_agent, .*demo"):
        make_project("mine", tmp_path, example="tiny_base")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("markdown", "expected"),
    [
        ("[a](docs/a.md#b)", "[a](https://github.com/tidegate/tidegate/blob/v1/docs/a.md#b)"),
        ("![a](docs/a.png)", "![a](https://github.com/tidegate/tidegate/raw/v1/docs/a.png)"),
        ("[a [b]](../LICENSE)", "[a [b]](https://github.com/tidegate/tidegate/blob/v1/LICENSE)"),
        ("[`a`](#b) [c](https://d) [e](mailto:f)", "[`a`](#b) [c](https://d) [e](mailto:f)"),
        ("```\nx[0](y)\n```\n", "```\nx[0](y)\n```\n"),
    ],
)
def test_links_of_a_page_outside_the_repository(markdown: str, expected: str) -> None:
    folder = "examples" if "../" in markdown else ""
    assert absolute_links(markdown, folder, "1") == expected
