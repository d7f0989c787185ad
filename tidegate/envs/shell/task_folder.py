"""Tasks in Harbor's format: a folder with instruction.md, task.toml, environment/ and tests/test.sh."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tidegate.errors import ConfigError

WORKDIR = "/app"
"""Working folder of a task that names none."""
BUILD_FILES = ("Dockerfile", ".dockerignore")
COMPOSE = ("docker-compose.yaml", "docker-compose.yml", "singularity-compose.yaml")
RESERVED = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32", "proc", "dev", "etc", "sys", "tmp")
"""Folders of a sandbox that cannot contain the working folder."""
VERIFIER_S = 600.0


@dataclass(frozen=True, slots=True)
class TaskFolder:
    """One task."""

    path: Path
    instruction: str
    workdir: str
    """Absolute path of the working folder."""
    verifier_s: float
    """Time limit of the test script."""
    environment_env: Mapping[str, str] = field(default_factory=dict)
    verifier_env: Mapping[str, str] = field(default_factory=dict)

    def files(self) -> dict[str, tuple[bytes, bool]]:
        """Returns the files of the working folder, as path → (content, whether it is executable)."""
        files = read_files(self.path / "environment")
        return {path: file for path, file in files.items() if path not in BUILD_FILES}

    def tests(self) -> dict[str, tuple[bytes, bool]]:
        """Returns the files of the folder `tests` in the same way."""
        return read_files(self.path / "tests")


def read_task_folders(folder: Path, ignore_dockerfile: bool) -> list[TaskFolder]:
    """Reads all tasks of a folder, in the order of their names.

    Args:
        folder: Folder whose subfolders are tasks, or a single task.
        ignore_dockerfile: Also read tasks whose Dockerfile does more than copy files.

    Raises:
        ConfigError: There is no task, a file is missing or invalid, or a task needs what is not supported.
    """
    paths = [folder] if (folder / "task.toml").is_file() else sorted(folder.glob("*/task.toml"))
    if not paths:
        raise ConfigError(f"harbor: {folder} has no task: there is no {folder}/*/task.toml")
    tasks = [path if path.is_dir() else path.parent for path in paths]
    return [read_task_folder(task.resolve(), ignore_dockerfile) for task in tasks]


def read_task_folder(path: Path, ignore_dockerfile: bool) -> TaskFolder:
    """Reads one task. Arguments and exceptions are those of `read_task_folders`."""
    for name in ("instruction.md", "tests/test.sh"):
        if not (path / name).is_file():
            raise ConfigError(f"harbor: {path} has no file {name}")
    try:
        settings = tomllib.loads((path / "task.toml").read_text(encoding="utf-8"))
        instruction = (path / "instruction.md").read_text(encoding="utf-8").strip()
    except (ValueError, OSError) as error:
        raise ConfigError(f"harbor: {path}: {error}") from None
    environment, verifier = _table(path, settings, "environment"), _table(path, settings, "verifier")
    _check_supported(path, settings, environment)
    workdir, steps = _dockerfile(path / "environment" / "Dockerfile")
    steps += _dockerfile(path / "tests" / "Dockerfile")[1]
    if steps and not ignore_dockerfile:
        raise ConfigError(
            f"harbor: {path}: a Dockerfile has {steps[0]!r}, but no image is built, files are only copied. "
            "Set env.options.ignore_dockerfile = true if the task works without it"
        )
    return TaskFolder(
        path,
        instruction,
        _checked_workdir(path, environment.get("workdir") or workdir or WORKDIR),
        float(verifier.get("timeout_sec", VERIFIER_S)),
        _variables(path, environment),
        _variables(path, verifier),
    )


def read_files(folder: Path) -> dict[str, tuple[bytes, bool]]:
    """Returns the regular files below a folder, as path → (content, whether it is executable)."""
    return {
        path.relative_to(folder).as_posix(): (path.read_bytes(), bool(path.stat().st_mode & 0o100))
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def _table(path: Path, settings: Mapping[str, Any], name: str) -> dict[str, Any]:
    table = settings.get(name, {})
    if not isinstance(table, dict):
        raise ConfigError(f"harbor: {path}/task.toml: {name} is not a table")
    return table


def _check_supported(path: Path, settings: Mapping[str, Any], environment: Mapping[str, Any]) -> None:
    found = {
        "several steps ([[steps]])": settings.get("steps"),
        "MCP servers ([[environment.mcp_servers]])": environment.get("mcp_servers"),
        "GPUs (environment.gpus)": environment.get("gpus"),
        "Windows (environment.os)": str(environment.get("os", "linux")).lower() != "linux",
        "several containers": any((path / "environment" / name).exists() for name in COMPOSE),
    }
    for what, present in found.items():
        if present:
            raise ConfigError(f"harbor: {path} needs {what}, which is not supported")


def _dockerfile(path: Path) -> tuple[str | None, list[str]]:
    """Returns a Dockerfile's working folder, and its instructions that do more than copy the whole folder."""
    if not path.is_file():
        return None, []
    workdir, steps = None, []
    for line in re.sub(r"\\\n", " ", path.read_text(encoding="utf-8")).splitlines():
        word, _, rest = line.strip().partition(" ")
        if word.upper() == "WORKDIR":
            workdir = rest.strip()
        elif word.upper() in ("COPY", "ADD"):
            if rest.rstrip("/") not in (". .", f". {workdir}", ". /tests"):
                steps.append(" ".join(line.split()))
        elif word and not word.startswith("#") and word.upper() not in ("FROM", "CMD", "ENTRYPOINT", "LABEL"):
            steps.append(" ".join(line.split()))
    return workdir, steps


def _checked_workdir(path: Path, workdir: str) -> str:
    parts = Path(workdir).parts
    if not workdir.startswith("/") or len(parts) < 2 or parts[1] in RESERVED or ".." in parts:
        raise ConfigError(
            f"harbor: {path}: the working folder {workdir!r} must be an absolute path outside of the folders "
            f"of the system: /{', /'.join(RESERVED)}"
        )
    return workdir.rstrip("/")


def _variables(path: Path, table: Mapping[str, Any]) -> dict[str, str]:
    variables = {name: str(value) for name, value in table.get("env", {}).items()}
    for name, value in variables.items():
        if "${" in value:
            raise ConfigError(
                f"harbor: {path}/task.toml: the variable {name} = {value!r} refers to the host's "
                "environment, which is not passed to sandboxes"
            )
    return variables
