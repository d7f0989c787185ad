"""`tidegate train`: trains an agent's model."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from tidegate.cli.commands import Subparsers, enter_start_directory, resume_of, takes_resume, takes_settings
from tidegate.errors import ConfigError, StartError
from tidegate.service.process_secrets import shield_process

if TYPE_CHECKING:
    from tidegate.config import Settings


def add(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "train",
        help="train an agent's model",
        usage="tidegate train CONFIG.toml [--resume [auto] | --fresh] [--cluster ADDRESS] [--dry-run] "
        "[--section.key value ...]",
        description="Start engines, a gateway and agents, train the model on the episodes, and publish each "
        "new policy to the engines.",
    )
    takes_resume(parser, "run")
    parser.add_argument(
        "--cluster",
        metavar="ADDRESS",
        help="run on a Ray cluster: auto (this machine is a node), ray://HOST:PORT, or local",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print settings, processes and memory, and start nothing; exits with 3 if it could not",
    )
    parser.add_argument(
        "--lift-quarantine", action="store_true",
        help="with --resume: issue quarantined tasks again",
    )  # fmt: skip
    takes_settings(parser)
    parser.set_defaults(run=run)


def _check_names(settings: Settings) -> None:
    """Raises ConfigError if an agent, environment or function of the settings does not exist. Reads their
    files, and imports none."""
    from tidegate.agents import base as agents
    from tidegate.envs import base as environments
    from tidegate.loading import check_object
    from tidegate.settings.losses import CustomLoss

    if settings.agent.source == "local":
        check_object(settings.agent.use, agents.BUILT_IN, "agent")
    environments.check_name(settings.env.use)
    if settings.env.use == "dataset" and "rewards" in settings.env.options:
        from tidegate.envs.datasets.dataset import check_rewards

        check_rewards(settings.env.options["rewards"])
    named = [(settings.trainer.filter, "filter"), (settings.gateway.redact, "redaction")]
    named += [(use, "reward function") for use in settings.gateway.conversation_rewards]
    if isinstance(settings.trainer.loss, CustomLoss):
        named.append((settings.trainer.loss.use, "loss"))
    for use, what in named:
        if use is not None:
            check_object(use, {}, what)


def run(arguments: argparse.Namespace, rest: list[str]) -> int:
    from tidegate.config import load_settings
    from tidegate.settings.reading import split_file

    resume = resume_of(arguments, rest)
    file, overrides = split_file(rest)
    if arguments.lift_quarantine and not resume:
        raise ConfigError("--lift-quarantine applies to resumed runs only: add --resume")
    if file is None and not overrides:
        raise ConfigError("no settings: name a file, for example tidegate train examples/demo/config.toml")
    if file is not None:
        [file] = enter_start_directory(file, file)
    settings = load_settings(file, overrides)
    if arguments.dry_run:
        from tidegate.plan.dry_run import describe, obstacles

        _check_names(settings)
        start = {"resume": resume, "fresh": arguments.fresh, "cluster": arguments.cluster}
        print(describe(settings, **start))
        return StartError.exit_code if obstacles(settings, **start) else 0
    from tidegate.launch import launch

    shield_process()
    return launch(
        settings, resume=resume, fresh=arguments.fresh, cluster=arguments.cluster,
        lift_quarantine=arguments.lift_quarantine,
    )  # fmt: skip
