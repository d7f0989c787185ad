"""`tidegate doctor`: checks settings, agent, environment and model before a run."""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from tidegate.cli.commands import Subparsers
from tidegate.service.process_secrets import shield_process

if TYPE_CHECKING:
    from tidegate.config import Settings
    from tidegate.doctor.findings import Finding


def add(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "doctor",
        help="check settings, agent, environment and model before a run",
        usage="tidegate doctor [CONFIG.toml] [--agent FILE.py:NAME] [--env FILE.py:NAME] [--engine URL] "
        "[--episodes N] [--json] [--section.key value ...]",
        description="Check install, ports, model, environment, rewards and engine, then run one real episode "
        "of the agent. Exits with 1 if a check finds an error.",
        epilog="Without a settings file, ./config.toml is used if it exists, else the bundled model with "
        "`arithmetic` and `solver`. Any setting can be given as --section.key value.",
    )
    parser.add_argument("--agent", metavar="FILE.py:NAME", help="agent to check (agent.use)")
    parser.add_argument("--env", metavar="FILE.py:NAME", help="environment to check (env.use)")
    parser.add_argument("--engine", metavar="URL", help="URL of a running engine; without it, one is started")
    parser.add_argument("--episodes", type=int, default=1, metavar="N", help="number of episodes to run (1)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines")
    parser.set_defaults(run=run, takes_settings=True)


def run(arguments: argparse.Namespace, rest: list[str]) -> int:
    from tidegate.doctor.doctor import Examination
    from tidegate.doctor.findings import failed

    settings = settings_of(arguments, rest)
    shield_process()
    folder = Path(tempfile.mkdtemp(prefix="tidegate-doctor-"))
    tell = (lambda _: None) if arguments.json else _print
    sick = True
    try:
        examination = Examination(settings, folder, tell, max(1, arguments.episodes))
        findings = asyncio.run(examination.run())
        sick = failed(findings)
    finally:
        if not sick:
            shutil.rmtree(folder, ignore_errors=True)
    logs = str(folder / "logs") if sick and (folder / "logs").is_dir() else None
    if arguments.json:
        print(json.dumps({"ok": not sick, "logs": logs, "findings": [one.to_wire() for one in findings]}))
    else:
        print(_summary(findings, logs))
    return 1 if sick else 0


def settings_of(arguments: argparse.Namespace, rest: list[str]) -> Settings:
    """Returns the settings to check: of the named file or `config.toml` here, with the overrides."""
    from tidegate.config import load_settings
    from tidegate.scaffold.init import TINY_BASE
    from tidegate.settings.sections import split_file

    config, settings = split_file(rest)
    if config is None and Path("config.toml").is_file():
        config = Path("config.toml")
    given = {"agent.use": arguments.agent, "env.use": arguments.env}
    words = [f"--{key}={json.dumps(value)}" for key, value in given.items() if value is not None]
    if arguments.engine is not None:
        words.append(f"--engine.urls={json.dumps([arguments.engine])}")
    if config is None:
        words.insert(0, f"--model.path={json.dumps(str(TINY_BASE))}")
    return load_settings(config, [*words, *settings])


def _print(finding: Finding) -> None:
    level = finding.level.value
    shown = level.upper() if level == "error" else level
    print(f"{finding.check:<12}{shown:<9}{finding.text}", flush=True)
    if finding.fix:
        print(f"{'':<21}→ {finding.fix}", flush=True)


def _summary(findings: list[Finding], logs: str | None) -> str:
    levels = [finding.level.value for finding in findings]
    numbers = {level: levels.count(level) for level in ("error", "warning") if level in levels}
    counts = [f"{number} {level}{'s' if number > 1 else ''}" for level, number in numbers.items()]
    where = f"; the processes' logs: {logs}" if logs else ""
    return f"\n{', '.join(counts) or 'nothing is wrong'}{where}"
