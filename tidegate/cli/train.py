"""`tidegate train`: trains an agent's model."""

from __future__ import annotations

import argparse

from tidegate.cli.verbs import Verbs
from tidegate.errors import ConfigError
from tidegate.service.secrecy import shield_process


def add(verbs: Verbs) -> None:
    verb = verbs.add_parser(
        "train",
        help="train an agent's model",
        usage="tidegate train CONFIG.toml [--resume | --fresh] [--cluster ADDRESS] [--dry-run] "
        "[--section.key value ...]",
        description="Train: starts the engine and the gateway, runs the agent, updates and publishes.",
        epilog="Any setting can be given as --section.key value; `tidegate train --settings` lists them.",
    )
    how = verb.add_mutually_exclusive_group()
    how.add_argument("--resume", action="store_true", help="continue from the run's newest checkpoint")
    how.add_argument("--fresh", action="store_true", help="rename an existing run of this name first")
    verb.add_argument(
        "--cluster",
        metavar="ADDRESS",
        help="run it on a Ray cluster: auto (this machine is a node of it), ray://HOST:PORT, or local",
    )
    verb.add_argument(
        "--dry-run", action="store_true", help="print settings, processes and memory, and start nothing"
    )
    verb.add_argument(
        "--lift-quarantine", action="store_true",
        help="with --resume: issue quarantined tasks again",
    )  # fmt: skip
    verb.add_argument("--settings", action="store_true", help="list every setting with its default")
    verb.set_defaults(run=run, takes_settings=True)


def run(arguments: argparse.Namespace, rest: list[str]) -> int:
    from tidegate.config import Settings, load_settings
    from tidegate.settings.sections import known_keys, split_file

    if arguments.settings:
        for key, default, text in known_keys(Settings):
            print(f"{key:<31} {default:<15} {' '.join(text.split())}")
        return 0
    file, overrides = split_file(rest)
    if arguments.lift_quarantine and not arguments.resume:
        raise ConfigError("--lift-quarantine applies to resumed runs only: add --resume")
    if file is None and not overrides:
        raise ConfigError("name a settings file: tidegate train examples/demo/config.toml")
    settings = load_settings(file, overrides)
    if arguments.dry_run:
        from tidegate.plan.dry_run import describe

        print(describe(settings, resume=arguments.resume, fresh=arguments.fresh, cluster=arguments.cluster))
        return 0
    from tidegate.launch import launch

    shield_process()
    return launch(
        settings, resume=arguments.resume, fresh=arguments.fresh, cluster=arguments.cluster,
        lift_quarantine=arguments.lift_quarantine,
    )  # fmt: skip
