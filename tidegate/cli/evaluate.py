"""`tidegate eval`: evaluates an agent with a run, a model or an endpoint, or grades the gold answers."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from tidegate.cli.commands import Subparsers, enter_start_directory, existing_directory, takes_settings
from tidegate.errors import STOPPED, ConfigError
from tidegate.service.process_secrets import shield_process

if TYPE_CHECKING:
    from tidegate.config import Settings
    from tidegate.evaluation.attempts import ModelEndpoint


def add(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "eval",
        help="evaluate a run, a model or an endpoint; --gold grades the gold answers",
        usage="tidegate eval [RUN | CHECKPOINT | MODEL_DIR] [options] [--section.key value ...]",
        description="Evaluate an agent on an environment's held-out tasks, with a run (its newest "
        "checkpoint, agent and environment), a checkpoint or model directory (an engine and a gateway are "
        "started for it), or an OpenAI-compatible endpoint (--url, --model).",
    )
    what = parser.add_argument_group("what to evaluate")
    what.add_argument("--config", type=Path, help="settings file; a run uses its own by default")
    what.add_argument("--url", help="OpenAI-compatible base URL, for example http://host:8000/v1")
    what.add_argument("--model", help="model name at --url")
    what.add_argument("--api-key-env", metavar="NAME", help="environment variable with the API key")
    what.add_argument("--gold", action="store_true", help="grade every gold answer; no model is needed")
    how = parser.add_argument_group("how to evaluate")
    how.add_argument("--n", type=int, default=1, metavar="N", help="samples per task (1)")
    how.add_argument("--k", metavar="K,K", help="values of k for pass@k (powers of two up to n, and n)")
    how.add_argument("--tasks", type=int, metavar="N", help="only the first N tasks of each set")
    how.add_argument("--sets", metavar="NAME,NAME", help="held-out sets (all); main is the default set")
    how.add_argument("--greedy", action="store_true", help="decode greedily, not at sampling.temperature")
    how.add_argument("--threshold", type=float, default=1.0, help="lowest reward that counts as correct (1)")
    how.add_argument("--out", type=Path, metavar="DIR", help="output directory (evals/N of the run)")
    how.add_argument("--json", action="store_true", help="print the results as one JSON object")
    takes_settings(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, rest: list[str]) -> int:
    from tidegate.settings.reading import split_words

    words, overrides = split_words(rest)
    if len(words) > 1:
        raise ConfigError(
            f"expected at most one run, checkpoint or model directory, got {' and '.join(words)}"
        )
    target = _find_target(existing_directory(Path(words[0]))) if words else None
    if arguments.config is None and target is not None and target.config is not None:
        weights, run_dir, arguments.out = enter_start_directory(
            target.config, target.weights, target.run_dir, arguments.out
        )
        target = replace(target, weights=weights, run_dir=run_dir)
    settings = _settings(arguments, target, overrides)
    if arguments.gold:
        return _gold(arguments, settings)
    return _evaluate(arguments, target, settings)


def _gold(arguments: argparse.Namespace, settings: Settings) -> int:
    from tidegate.envs.base import load_environment
    from tidegate.evaluation.gold import gold_lines, gold_results, grade_gold

    environment = load_environment(settings.env.use, settings.env.options)
    splits = grade_gold(environment, arguments.threshold)
    if arguments.json:
        print(json.dumps(gold_results(settings.env.model_dump(), splits), default=str))
    else:
        print("\n".join(gold_lines(settings.env.use, splits)))
    return 1 if any(split.misses for split in splits) else 0


@dataclass(frozen=True, slots=True)
class Target:
    """The weights, and the run that they are of (None: of none)."""

    weights: Path
    run_dir: Path | None = None

    @property
    def config(self) -> Path | None:
        """The run's own settings."""
        return None if self.run_dir is None else self.run_dir / "config.toml"


def _find_target(path: Path) -> Target:
    """A run's newest committed checkpoint, a checkpoint within a run, or a directory with a model.

    Raises ConfigError where there is none of them.
    """
    from tidegate.trainer.checkpoint.checkpoint import committed

    if path.is_file():
        raise ConfigError(
            f"{path} is a file; name a run, a checkpoint or a model, and give settings with --config {path}"
        )
    if not path.is_dir():
        raise ConfigError(f"{path}: there is no such directory; name a run, a checkpoint or a model")
    if (path / "config.json").is_file():
        run_dir = path.absolute().parent.parent
        of_run = path.absolute().parent.name == "checkpoints" and (run_dir / "config.toml").is_file()
        return Target(path, run_dir if of_run else None)
    if (path / "checkpoints").is_dir() and (path / "config.toml").is_file():
        steps = committed(path)
        if not steps:
            raise ConfigError(f"{path} has no committed checkpoint to evaluate; was it trained at all?")
        return Target(steps[max(steps)], path)
    raise ConfigError(
        f"{path.resolve()} is neither a run (config.toml, checkpoints/) nor a model (config.json)"
    )


def _evaluate(arguments: argparse.Namespace, target: Target | None, settings: Settings) -> int:
    import asyncio

    from tidegate.evaluation.evaluate import EvalJob, evaluate, next_directory
    from tidegate.evaluation.results import result_lines
    from tidegate.progress import Progress
    from tidegate.service.directory_lock import refuse_if_in_use

    if settings.agent.source == "remote":
        raise ConfigError(
            'agent.source = "remote": an evaluation runs its agent here; add --agent.source local and '
            "--agent.use FILE.py:NAME"
        )
    endpoint = _endpoint(arguments, target)
    if endpoint is None and not settings.engine.urls:
        _check_weights(settings)
    if arguments.n < 1 or (arguments.tasks is not None and arguments.tasks < 1):
        raise ConfigError("--n and --tasks must be at least 1")
    if arguments.out is not None:
        refuse_if_in_use(arguments.out)
    parent = target.run_dir if target is not None and target.run_dir is not None else settings.run.dir
    job = EvalJob(
        settings=settings,
        directory=arguments.out or next_directory(parent / "evals"),
        endpoint=endpoint,
        temperature=0.0 if arguments.greedy else settings.sampling.temperature,
        samples=arguments.n,
        ks=_ks(arguments),
        threshold=arguments.threshold,
        sets=[name for name in (arguments.sets or "").split(",") if name],
        tasks=arguments.tasks,
    )
    shield_process()
    with Progress() as progress:
        results = asyncio.run(evaluate(job, progress.stage("evaluation"), progress.print))
    if arguments.json:
        print(json.dumps({**results, "directory": str(job.directory)}))
    else:
        print("\n".join(result_lines(results)))
        print(f"episodes and results: {job.directory}")
    return 0 if results["status"] == "completed" else STOPPED


def _settings(arguments: argparse.Namespace, target: Target | None, overrides: list[str]) -> Settings:
    """Returns the settings of the run or the file, overridden by the command line."""
    from tidegate.config import load_settings

    config = arguments.config or (target.config if target is not None else None)
    words = list(overrides)
    if target is not None:
        words.append(f"--model.path={json.dumps(str(target.weights))}")
    elif arguments.config is None:
        words.insert(0, "--model.path=''")  # required; `_check_weights` reports a missing model
    if not any(word.startswith("--engine.urls") for word in overrides):
        words.append("--engine.urls=[]")  # a run's engines may have exited, or have loaded other weights
    return load_settings(config, words)


def _endpoint(arguments: argparse.Namespace, target: Target | None) -> ModelEndpoint | None:
    from tidegate.evaluation.attempts import ModelEndpoint

    if arguments.url is None:
        for name in ("model", "api_key_env"):
            if getattr(arguments, name) is not None:
                raise ConfigError(
                    f"--{name.replace('_', '-')} requires --url; to evaluate a model directory, use "
                    "tidegate eval DIRECTORY"
                )
        return None
    if not arguments.url.startswith(("http://", "https://")):
        raise ConfigError(
            f"--url {arguments.url}: it must begin with http:// or https://, as http://host:8000/v1"
        )
    if target is not None:
        raise ConfigError(f"give either {target.weights} or --url, not both")
    if arguments.model is None:
        raise ConfigError("--url needs --model, the model name at that endpoint")
    if arguments.greedy:
        raise ConfigError(
            "--greedy has no effect with --url, which the agent calls directly; set it in the agent"
        )
    key = "none"
    if arguments.api_key_env is not None:
        key = os.environ.get(arguments.api_key_env, "")
        if not key:
            raise ConfigError(f"--api-key-env: the environment variable {arguments.api_key_env} is not set")
    return ModelEndpoint(arguments.url.rstrip("/"), arguments.model, key)


def _check_weights(settings: Settings) -> None:
    path = settings.model.path
    if path == Path():
        raise ConfigError(
            "nothing to evaluate: name a run, a checkpoint or a model directory, or an endpoint with "
            "--url and --model"
        )
    if not (path / "config.json").is_file():
        raise ConfigError(f"model.path = {path}: not a model directory (no config.json)")


def _ks(arguments: argparse.Namespace) -> list[int]:
    n = arguments.n
    if arguments.k is None:
        return sorted({1 << power for power in range(n.bit_length()) if 1 << power <= n} | {n})
    try:
        ks = sorted({int(word) for word in arguments.k.split(",")})
    except ValueError:
        raise ConfigError(f"--k {arguments.k} is not a list of numbers such as 1,4") from None
    if not 1 <= ks[0] <= ks[-1] <= n:
        raise ConfigError(f"--k {arguments.k}: pass@k needs 1 ≤ k ≤ n, and --n is {n}")
    return ks
