"""`tidegate sft`: fine-tunes a model on recorded episodes and chats."""

from __future__ import annotations

import argparse
import asyncio
import os
import shlex
from typing import TYPE_CHECKING

from tidegate.cli.commands import Subparsers, resume_of, takes_resume, takes_settings
from tidegate.errors import STOPPED, ConfigError
from tidegate.service.process_secrets import shield_process

if TYPE_CHECKING:
    from pathlib import Path

    from tidegate.config import Settings
    from tidegate.progress import Progress
    from tidegate.service.directory_lock import DirectoryLock
    from tidegate.sft.finetuning import FineTuning


def add(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "sft",
        help="fine-tune a model on recorded episodes and chats, before or between runs",
        usage="tidegate sft CONFIG.toml [--resume [auto] | --fresh] [--then train] [--section.key value ...]",
        description="Train the model of a run's settings on recorded episodes (sft.episodes) and on chats "
        "(sft.chats). The result is the directory <run.dir>/<run.name>-sft/model, in Hugging Face format.",
    )
    takes_resume(parser, "fine-tuning")
    parser.add_argument(
        "--then", choices=["train"], help="continue with tidegate train, from the result as the base model"
    )
    takes_settings(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, rest: list[str]) -> int:
    from tidegate.config import load_settings
    from tidegate.launch import check, check_environment, check_surroundings
    from tidegate.settings.reading import split_file

    resume = resume_of(arguments, rest)
    file, overrides = split_file(rest)
    if file is None and not overrides:
        raise ConfigError("no settings: name a file, for example tidegate sft examples/demo/config.toml")
    settings = load_settings(file, overrides)
    check(settings)
    if arguments.then is not None:  # what refuses the training is found before the fine-tuning, not after it
        from tidegate.service.directory_lock import refuse_if_in_use
        from tidegate.trainer.preflight import check_writable
        from tidegate.trainer.start import Start

        _, environment = check_environment(settings)
        refuse_if_in_use(settings.run_dir)
        if not (resume or arguments.fresh):
            Start.of(settings, resume=False)
        check_writable(settings.run_dir)
        check_surroundings(settings, environment, own_gateway=True)
    shield_process()
    code = _fine_tune(settings, arguments)
    return code if code or arguments.then is None else _train(settings, arguments)


def _fine_tune(settings: Settings, arguments: argparse.Namespace) -> int:
    """Returns the exit code: 0 if the result is complete."""
    from tidegate.launch import check_model
    from tidegate.observer import CompositeObserver
    from tidegate.progress import Progress
    from tidegate.service.directory_lock import DirectoryLock, refuse_if_in_use
    from tidegate.sft.finetuning import FineTuning, with_own_directory
    from tidegate.sft.progress_lines import ProgressLines
    from tidegate.trainer.loggers.registry import make_loggers
    from tidegate.trainer.preflight import check_writable, saved_model_path

    own = with_own_directory(settings)
    check_writable(own.run_dir)
    learner = saved_model_path(settings.run_dir)
    if learner is not None and own.run_dir.resolve() in learner.resolve().parents:
        refuse_if_in_use(settings.run_dir)  # the run reads the result of the fine-tuning
    check_model(settings, engines=False)
    with Progress() as progress:
        lines = ProgressLines(progress)
        observer = CompositeObserver([lines, *make_loggers(own, lines.note)])
        try:
            wait = progress.print if arguments.resume == "auto" else None
            with DirectoryLock(own.run_dir, "tidegate sft", wait=wait) as lock:
                tuning = FineTuning(settings, observer, resume=arguments.resume, fresh=arguments.fresh)
                return _stages(tuning, arguments, progress, lock)
        finally:
            observer.close()


def _stages(
    tuning: FineTuning, arguments: argparse.Namespace, progress: Progress, lock: DirectoryLock
) -> int:
    """Evaluates, trains and evaluates again, as far as that is not done yet."""
    from tidegate.program import program

    if arguments.fresh:
        lock.set_aside()
    settings, model = tuning.settings, tuning.dir / "model"
    evaluates = settings.sft.held_out
    if tuning.is_complete and (not evaluates or tuning.evaluated(tuning.steps)):
        if arguments.then is None:
            raise tuning.nothing_to_do()
        return 0
    training, validation = len(tuning.dataset.training), len(tuning.dataset.validation)
    progress.print(
        f"fine-tuning {settings.model.path}: {training:,} sequences, {validation:,} for validation, "
        f"{tuning.steps:,} steps; files in {tuning.dir}"
    )
    tuning.prepare()
    done = not evaluates or tuning.evaluated(0) or _evaluate(tuning, 0, settings.model.path, progress)
    done = done and (tuning.is_complete or asyncio.run(_with_signals(tuning, progress)))
    done = done and (not evaluates or _evaluate(tuning, tuning.steps, model, progress))
    if not done:
        config = shlex.quote(str(tuning.dir / "config.toml"))
        progress.print(f"interrupted; continue with {program()} sft {config} --resume")
        return STOPPED
    progress.print(f"the model is {model}")
    return 0


def _evaluate(tuning: FineTuning, step: int, model: Path, progress: Progress) -> bool:
    """Records the held-out reward of a model; returns False if the evaluation was interrupted."""
    from tidegate.config import ModelSettings
    from tidegate.evaluation.evaluate import EvalJob, evaluate, next_directory

    settings = tuning.settings
    engine = settings.engine.model_copy(update={"urls": []})  # running engines have other weights
    job = EvalJob(
        settings.model_copy(update={"model": ModelSettings(path=model), "engine": engine}),
        next_directory(tuning.dir / "evals"),
        temperature=settings.sampling.temperature,
        tasks=settings.eval.tasks,
    )
    results = asyncio.run(evaluate(job, progress.stage("evaluation"), progress.print))
    if results["status"] != "completed":
        return False
    metrics = {}
    for name, summary in results["sets"].items():
        suffix = "" if name == "main" else f"_{name}"
        if "reward" in summary:
            metrics[f"eval/reward{suffix}"] = summary["reward"]["mean"]
        metrics[f"eval/episodes{suffix}"] = summary["episodes"] - summary["failed"]
    tuning.record_evaluation(step, metrics | {"eval/seconds": results["seconds"]})
    return True


async def _with_signals(tuning: FineTuning, progress: Progress) -> bool:
    """Trains; Ctrl-C finishes the step and writes a checkpoint, a second one exits at once."""
    from tidegate.launch import stop_on_signals

    def stop() -> None:
        if tuning.stop.is_set():
            os._exit(STOPPED)
        progress.print("finishing the current step and writing a checkpoint; Ctrl-C again exits at once")
        tuning.stop.set()

    stop_on_signals(stop)
    return await tuning.run()


def _train(settings: Settings, arguments: argparse.Namespace) -> int:
    """Trains from the result; continues a run of this name if the fine-tuning was resumed."""
    from tidegate.config import ModelSettings
    from tidegate.launch import launch
    from tidegate.sft.finetuning import model_of

    settings = settings.model_copy(update={"model": ModelSettings(path=model_of(settings))})
    return launch(settings, resume="auto" if arguments.resume else False, fresh=arguments.fresh)
