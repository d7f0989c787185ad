"""Task folders in Harbor's format: what is read, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from tidegate.envs.shell.task_folder import read_task_folders
from tidegate.errors import ConfigError


def write(parent: Path, files: dict[str, str]) -> Path:
    texts = {"task.toml": "", "instruction.md": "Do it.\n", "tests/test.sh": "", **files}
    for name, text in texts.items():
        path = parent / "task" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return parent


def test_a_task_and_its_files(tmp_path: Path) -> None:
    files = {"environment/Dockerfile": "FROM x", "environment/b/a.txt": "a", "environment/run.sh": "r"}
    write(tmp_path, files)
    (tmp_path / "task/environment/run.sh").chmod(0o755)
    (task,) = read_task_folders(tmp_path, False)
    assert read_task_folders(tmp_path / "task", False) == [task]
    assert (task.instruction, task.workdir, task.verifier_s) == ("Do it.", "/app", 600.0)
    assert task.files() == {"b/a.txt": (b"a", False), "run.sh": (b"r", True)}
    assert task.tests() == {"test.sh": (b"", False)}


@pytest.mark.parametrize(
    ("dockerfile", "toml", "workdir"),
    [
        ("FROM x\nWORKDIR /srv/shop/\nCOPY . .", "", "/srv/shop"),
        ("FROM x\nWORKDIR /srv\n# RUN nothing\ncopy . /srv/", "", "/srv"),
        ("FROM x\nWORKDIR /srv", 'environment.workdir = "/data"', "/data"),
    ],
)
def test_working_folders(tmp_path: Path, dockerfile: str, toml: str, workdir: str) -> None:
    write(tmp_path, {"environment/Dockerfile": dockerfile, "task.toml": toml})
    assert read_task_folders(tmp_path, False)[0].workdir == workdir


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            {"environment/Dockerfile": "FROM x\nRUN apt-get \\\n  install vim"},
            "'RUN apt-get install vim', but no image",
        ),
        ({"environment/Dockerfile": "FROM x\nCOPY a /etc/a"}, "'COPY a /etc/a', but no image is built"),
        ({"tests/Dockerfile": "FROM x\nRUN pip install pytest"}, "'RUN pip install pytest', but no image"),
        (
            {"environment/Dockerfile": "WORKDIR /usr/src"},
            "the working folder '/usr/src' must be",
        ),
        ({"task.toml": 'environment.workdir = "app"'}, "the working folder 'app' must be an absolute path"),
        ({"task.toml": 'environment.workdir = "/a/../etc"'}, "the working folder '/a/../etc' must be"),
        ({"task.toml": "environment = 3"}, "environment is not a table"),
        ({"task.toml": "steps = 3 4"}, "task: "),
        ({"task.toml": '[[steps]]\nname = "one"'}, "needs several steps"),
        ({"task.toml": "environment.gpus = 1"}, "needs GPUs"),
        ({"task.toml": 'environment.os = "windows"'}, "needs Windows"),
        ({"task.toml": '[[environment.mcp_servers]]\nname = "x"'}, "needs MCP servers"),
        ({"environment/docker-compose.yaml": ""}, "needs several containers"),
        (
            {"task.toml": 'verifier.env = {KEY = "${OPENAI_API_KEY}"}'},
            "KEY = '${OPENAI_API_KEY}' refers",
        ),
    ],
)
def test_tasks_that_are_not_supported_are_refused(
    tmp_path: Path, files: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError) as error:
        read_task_folders(write(tmp_path, files), False)
    assert message in str(error.value)
    if "no image" in message:
        assert read_task_folders(tmp_path, True)


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no task"):
        read_task_folders(tmp_path, False)
    write(tmp_path, {})
    (tmp_path / "task/tests/test.sh").unlink()
    with pytest.raises(ConfigError, match=r"has no file tests/test\.sh"):
        read_task_folders(tmp_path, False)
