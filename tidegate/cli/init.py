"""`tidegate init`: creates a project that is ready to train."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from tidegate.cli.commands import Subparsers
from tidegate.errors import ConfigError
from tidegate.program import extra_requirement

if TYPE_CHECKING:
    from tidegate.envs.datasets.columns import DataFile

PROJECT_NEEDS = {"torch": extra_requirement("train"), "pytest": "pytest"}
"""Module → what to install, of a project with a test."""
CONVERT_NEEDS = {"accelerate": extra_requirement("gguf")}
"""The same, of `tidegate convert`."""


def add(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "init",
        help="create a project",
        description="Create a directory with an agent, an environment, settings and a test, and print the "
        "commands that fetch a language model of 135 million parameters and train it. Edit the files to make "
        "it your own.",
    )
    parser.add_argument("name", help="name of the directory, created in the current one")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument(
        "--tiny", action="store_true", help="a bundled model of one million parameters, and a calculator"
    )
    kind.add_argument(
        "--stateful", action="store_true", help="an environment with a state and tools, and the agent `chat`"
    )
    kind.add_argument(
        "--data", type=Path, metavar="FILE", help="train on the questions of a .jsonl, .csv or .parquet file"
    )
    kind.add_argument(
        "--example", metavar="NAME", help="an example of the repository with its model, such as demo"
    )
    parser.add_argument("--question", metavar="COLUMN", help="column of the questions in --data")
    parser.add_argument("--answer", metavar="COLUMN", help="column of the answers in --data")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, _: list[str]) -> int:
    from tidegate.program import program, python
    from tidegate.scaffold.init import FILES, MODEL, STATEFUL_FILES, TINY_FILES, make_project

    if arguments.data is not None:
        return _with_data(arguments)
    if arguments.example is not None:
        return _with_example(arguments)
    for flag in ("question", "answer"):
        if getattr(arguments, flag) is not None:
            raise ConfigError(f"--{flag} names a column of a data file: give the file with --data FILE")
    if not (arguments.tiny or arguments.stateful):
        project = make_project(arguments.name, Path.cwd())
        needed = PROJECT_NEEDS | CONVERT_NEEDS
        print(
            f"Made {project.name}/: {', '.join(FILES)}.\n\n"
            "Next:\n"
            f"  cd {project.name}{_missing(python(), needed)}\n"
            f"  {python()} -m pytest\n"
            f"  {program()} convert smollm2 --out {MODEL}   # 93 MB\n"
            f"  {program()} doctor\n"
            f"  {program()} sft config.toml --then train"
        )
        return 0
    project = make_project(arguments.name, Path.cwd(), "stateful" if arguments.stateful else "tiny")
    files = STATEFUL_FILES if arguments.stateful else TINY_FILES
    print(
        f"Made {project.name}/: {', '.join(files)} and a base model.\n\n"
        "Next:\n"
        f"  cd {project.name}{_missing(python())}\n"
        f"  {python()} -m pytest\n"
        f"  {program()} doctor\n"
        f"  {program()} train config.toml"
    )
    return 0


def _with_example(arguments: argparse.Namespace) -> int:
    from tidegate.program import program, python
    from tidegate.scaffold.init import make_project

    example = f"examples/{arguments.example}"
    project = make_project(arguments.name, Path.cwd(), example=arguments.example)
    page = project / example / "README.md"
    print(
        f"Made {project.name}/{example}, with the files of the repository that it uses.\n\n"
        "Next:\n"
        f"  cd {project.name}{_missing(python(), {'torch': PROJECT_NEEDS['torch']})}"
    )
    if page.is_file():
        print(f"  less {example}/README.md")
    if (project / example / "demo.py").is_file():  # it starts what the settings alone do not
        print(f"  {python()} {example}/demo.py")
    elif (config := _complete(project, example)) is not None:
        print(f"  {program()} doctor {config}\n  {program()} train {config}")
    return 0


def _complete(project: Path, example: str) -> str | None:
    """Returns the example's settings file with a model that is there and an agent that the run starts."""
    from tidegate.config import load_settings

    for config in sorted((project / example).glob("config*.toml")):
        settings = load_settings(config)
        if (project / settings.model.path).is_dir() and settings.agent.source == "local":
            return f"{example}/{config.name}"
    return None


def _with_data(arguments: argparse.Namespace) -> int:
    from tidegate.envs.datasets.columns import inspect_data
    from tidegate.program import program, python
    from tidegate.scaffold.init import make_project
    from tidegate.settings.sections import to_toml

    data = inspect_data(arguments.data, arguments.question, arguments.answer)
    (reward,) = data.options["rewards"]
    agent = "chat" if reward == "exact_match" else "solver"
    sections = {"agent": {"use": agent}, "env": {"use": "dataset", "options": data.options}}
    project = make_project(arguments.name, Path.cwd(), sections=to_toml(sections))
    needed = {"torch": PROJECT_NEEDS["torch"], **CONVERT_NEEDS}
    if reward == "math_verify":
        needed["math_verify"] = extra_requirement("math")
    print(
        f"Made {project.name}/: config.toml and a base model.\n\n{_described(data, agent)}\n\n"
        "Next:\n"
        f"  cd {project.name}{_missing(python(), needed)}\n"
        f"  {program()} eval --config config.toml --gold\n"
        f"  {program()} doctor\n"
        f"  {program()} convert smollm2 --out smollm2   # or a model of your own\n"
        f"  {program()} train config.toml --model.path smollm2 --dry-run\n"
        f"  {program()} train config.toml --model.path smollm2"
    )
    return 0


def _described(data: DataFile, agent: str) -> str:
    options = data.options
    lines = [
        f"Prompt: {options['prompt']!r}; answer: {options['answer']!r} (env.options)",
        f"Tasks: {data.train} for training, {data.held_out} held out (env.options.eval_fraction)",
        f"Reward: {options['rewards'][0]}, because {data.reason}. Others are exact_match, contains, numeric, "
        "math_verify and your own 'rewards.py:function' (env.options.rewards).",
        f"Agent: {agent} (agent.use)",
    ]
    if data.skipped:
        lines.append(
            f"Rows that cannot be used and are skipped: {len(data.skipped)}; first: {data.skipped[0]}"
        )
    if data.long_answers:
        lines.append(
            "Half of the answers have more than 60 characters, and few outputs will equal them: consider "
            "another reward, or a judge ([env.judge])."
        )
    return "\n".join(lines)


def _missing(python: str, needed: Mapping[str, str] = PROJECT_NEEDS) -> str:
    """Returns the command that installs missing dependencies; empty if there are none."""
    missing = [package for module, package in needed.items() if find_spec(module) is None]
    return f"\n  {python} -m pip install {' '.join(missing)}" if missing else ""
