"""The verbs. Each imports what it needs when it is called, so that `--help` answers at once."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tidegate import __version__
from tidegate.errors import ConfigError, TidegateError

if TYPE_CHECKING:
    Verbs = argparse._SubParsersAction[argparse.ArgumentParser]


def main(argv: Sequence[str] | None = None) -> int:
    """Run a verb; returns the exit code. A `TidegateError` is shown as its sentence, not as a traceback."""
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    if rest and arguments.verb != "train":
        parser.error(f"unknown arguments for {arguments.verb}: {' '.join(rest)}")
    run: Callable[[argparse.Namespace, list[str]], int] = arguments.run
    try:
        return run(arguments, rest)
    except TidegateError as error:
        print(f"tidegate: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tidegate", description="Point any agent's base_url at Tidegate and it learns."
    )
    parser.add_argument("--version", action="version", version=f"tidegate {__version__}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    _train(verbs)
    _gateway(verbs)
    _engine(verbs)
    _audit(verbs)
    _report(verbs)
    return parser


def _train(verbs: Verbs) -> None:
    verb = verbs.add_parser(
        "train",
        help="train an agent's model",
        description="Train: starts the engine and the gateway, runs the agent, updates and publishes.",
        epilog="Any setting can be given as --section.key value; `tidegate train --settings` lists them.",
    )
    verb.add_argument("config", type=Path, nargs="?", help="a TOML file of settings")
    how = verb.add_mutually_exclusive_group()
    how.add_argument("--resume", action="store_true", help="go on from the run's newest checkpoint")
    how.add_argument("--fresh", action="store_true", help="set an existing run of this name aside first")
    verb.add_argument("--settings", action="store_true", help="list every setting with its default")
    verb.set_defaults(run=_run_train)


def _run_train(arguments: argparse.Namespace, overrides: list[str]) -> int:
    from tidegate.config import known_keys, load_settings

    if arguments.settings:
        for key, default, text in known_keys():
            print(f"{key:<32}{default:<16}{' '.join(text.split())}")
        return 0
    if arguments.config is None and not overrides:
        raise ConfigError("name a settings file: tidegate train examples/demo/config.toml")
    settings = load_settings(arguments.config, overrides)
    from tidegate.launch import launch

    return launch(settings, resume=arguments.resume, fresh=arguments.fresh)


def _server(verb: argparse.ArgumentParser, port: int) -> None:
    verb.add_argument("--host", default="127.0.0.1")
    verb.add_argument("--port", type=int, default=port, help="0 takes a free one")
    verb.add_argument("--announce", type=Path, help="write {url, pid} to this file once it serves")
    verb.add_argument("--owned", action="store_true", help="end when stdin closes")


def _gateway(verbs: Verbs) -> None:
    verb = verbs.add_parser("gateway", help="serve the gateway", description="Serve the gateway.")
    verb.add_argument("--model", type=Path, required=True, help="a directory with the model's tokenizer")
    verb.add_argument("--engine", action="append", default=[], metavar="URL", help="may be repeated")
    verb.add_argument("--env", help="the environment whose rewards are given")
    verb.add_argument("--env-options", type=json.loads, default={}, metavar="JSON")
    verb.add_argument("--tool-parser", choices=["hermes", "none"], default="hermes")
    verb.add_argument("--admin-key", help="guards the control plane; needed beyond loopback")
    _server(verb, 8000)
    verb.set_defaults(run=_run_gateway)


def _run_gateway(arguments: argparse.Namespace, _: list[str]) -> int:
    from tidegate.envs.base import load_environment
    from tidegate.gateway.server import GatewayOptions, serve
    from tidegate.serve import Listen

    if arguments.host not in ("127.0.0.1", "localhost", "::1") and arguments.admin_key is None:
        raise ConfigError(f"--host {arguments.host} is reachable by others: set --admin-key")
    _log_to_stderr()
    rewarders = {}
    if arguments.env is not None:
        environment = load_environment(arguments.env, arguments.env_options)
        rewarders[environment.name] = environment
    options = GatewayOptions(
        model=arguments.model,
        engine_urls=arguments.engine,
        admin_key=arguments.admin_key,
        tool_parser=arguments.tool_parser,
        rewarders=rewarders,
    )
    serve(options, Listen(arguments.host, arguments.port, arguments.announce, arguments.owned))
    return 0


def _engine(verbs: Verbs) -> None:
    verb = verbs.add_parser(
        "engine", help="serve a model", description="Serve a model with SGLang's HTTP protocol."
    )
    verb.add_argument("--model", type=Path, required=True, help="a directory in Hugging Face format")
    verb.add_argument("--weight-version", type=int, default=0, help="the label of these weights")
    verb.add_argument("--device", default="cpu")
    verb.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    verb.add_argument("--threads", type=int, default=1)
    verb.add_argument("--max-slots", type=int, default=64, help="requests decoded at the same time")
    verb.add_argument("--max-context", type=int, default=1024, help="prompt + output tokens of a request")
    _server(verb, 30000)
    verb.set_defaults(run=_run_engine)


def _run_engine(arguments: argparse.Namespace, _: list[str]) -> int:
    from tidegate.engine.options import EngineOptions
    from tidegate.engine.server import serve
    from tidegate.serve import Listen

    _log_to_stderr()
    options = EngineOptions(
        model=arguments.model,
        device=arguments.device,
        dtype=arguments.dtype,
        threads=arguments.threads,
        max_slots=arguments.max_slots,
        max_context=arguments.max_context,
        weight_version=arguments.weight_version,
    )
    serve(options, Listen(arguments.host, arguments.port, arguments.announce, arguments.owned))
    return 0


def _audit(verbs: Verbs) -> None:
    verb = verbs.add_parser(
        "audit",
        help="prove a run's ledger from its files",
        description="Prove a run's ledger from its files; exits with 1 where it does not hold.",
    )
    verb.add_argument("run_dir", type=Path)
    verb.set_defaults(run=_run_audit)


def _run_audit(arguments: argparse.Namespace, _: list[str]) -> int:
    from tidegate.trainer.audit import audit_run, table

    audit = audit_run(arguments.run_dir)
    print(table(audit))
    return 0 if audit.holds else 1


def _report(verbs: Verbs) -> None:
    verb = verbs.add_parser(
        "report", help="write a run's report.html again", description="Write report.html and reward.png."
    )
    verb.add_argument("run_dir", type=Path)
    verb.set_defaults(run=_run_report)


def _run_report(arguments: argparse.Namespace, _: list[str]) -> int:
    from tidegate.viewer.report import write_report

    print(write_report(arguments.run_dir))
    return 0


def _log_to_stderr() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
