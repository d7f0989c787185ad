"""`tidegate doctor`: checks settings, agent, environment and model before a run."""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from tidegate.cli.commands import Subparsers, takes_settings
from tidegate.service.process_secrets import shield_process

if TYPE_CHECKING:
    from tidegate.config import Settings
    from tidegate.doctor.findings import Finding


def add(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "doctor",
        help="check settings, agent, environment and model before a run",
        usage="tidegate doctor [CONFIG.toml] [--episodes N] [--json] [--section.key value ...]",
        description="Check install, ports, model, environment, rewards and engine, then run one real episode "
        "of the agent. Exits with 1 if a check finds an error.",
        epilog="Without a settings file, ./config.toml is used if it exists, else the bundled model with "
        "`arithmetic` and `solver`. An engine is started unless engine.urls names running ones.",
    )
    parser.add_argument("--episodes", type=int, default=1, metavar="N", help="number of episodes to run (1)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines")
    takes_settings(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, rest: list[str]) -> int:
    from tidegate.doctor.doctor import Examination
    from tidegate.doctor.findings import failed

    settings = settings_of(rest)
    shield_process()
    folder = Path(tempfile.mkdtemp(prefix="tidegate-doctor-"))
    tell = (lambda _: None) if arguments.json else _print
    kept = False
    try:
        examination = Examination(settings, folder, tell, max(1, arguments.episodes))
        findings = asyncio.run(examination.run())
        faulty = failed(findings)
        kept = faulty and (folder / "logs").is_dir()
    finally:
        if not kept:
            shutil.rmtree(folder, ignore_errors=True)
    logs = str(folder / "logs") if kept else None
    if arguments.json:
        wire = [asdict(finding) for finding in findings]
        print(json.dumps({"ok": not faulty, "logs": logs, "findings": wire}))
    else:
        print(_summary(findings, logs))
    return 1 if faulty else 0


def settings_of(words: list[str]) -> Settings:
    """Returns the settings to check: of the named file or `config.toml` here, with the overrides."""
    from tidegate.config import load_settings
    from tidegate.scaffold.example_files import TINY_BASE
    from tidegate.settings.reading import split_file

    config, overrides = split_file(words)
    if config is None and Path("config.toml").is_file():
        config = Path("config.toml")
    bundled = [f"--model.path={TINY_BASE}"] if config is None else []
    return load_settings(config, [*bundled, *overrides])


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
    return f"\n{', '.join(counts) or 'no problem found'}{where}"
