"""Summary at the end of a run: results, three episodes, and commands for the next steps."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Mapping
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tidegate.config import SERVICE_SETTINGS
from tidegate.program import program
from tidegate.viewer.console import SafeConsole
from tidegate.viewer.formatting import known, number, printable
from tidegate.viewer.held_out import episodes_key, held_out_names
from tidegate.viewer.run_files import evaluations, read_settings
from tidegate.viewer.signs.watch import watch_of_run
from tidegate.viewer.transcripts import as_text, choose

ACCENT = "cyan"

STATUS = {"completed": "bold green", "interrupted": "bold yellow", "failed": "bold red"}


def scores_of(metrics: object) -> dict[str, float]:
    """Returns the numbers of an evaluation's metrics by their names in `metrics.jsonl`.

    Accepts names without `eval/`, too.
    """
    if not isinstance(metrics, Mapping):
        return {}
    numbers = {str(key): number for key, value in metrics.items() if (number := known(value)) is not None}
    return {f"eval/{key.removeprefix('eval/')}": value for key, value in numbers.items()} | {
        key: value for key, value in numbers.items() if key.startswith("eval/")
    }


def problems(before: float | None, after: float | None) -> str:
    """Returns how many problems two scores cover, in words; empty if both counts are unknown."""
    counts = [number(count, 0) for count in (before, after) if count is not None]
    distinct = list(dict.fromkeys(counts))
    return f"over {', then '.join(distinct)} problems" if distinct else ""


def final_summary(out: SafeConsole, result: Mapping[str, object], run_dir: Path | None) -> None:
    """Prints how a run ended; reads the run's evaluations for the episodes."""
    parts: list[RenderableType] = [Text(""), _headline(result), Text(""), _scores(result), Text("")]
    if run_dir is None:
        out.show(Group(*parts))
        return
    out.show(Group(*parts, *_signs(run_dir), *_episodes(run_dir)))
    out.show(Text("Next steps", f"bold {ACCENT}"))
    for purpose, command in next_steps(result, run_dir):
        if command.startswith("tidegate "):
            command = program() + command.removeprefix("tidegate")
        out.show(Text.assemble((f"  {purpose}:\n", "dim"), f"    {printable(command)}"), wrap=False)


def _headline(result: Mapping[str, object]) -> Text:
    status = str(result.get("status", "ended"))
    line = Text.assemble((printable(status).capitalize(), STATUS.get(status, "bold")))
    if result.get("why"):
        line.append(f": {printable(result['why'])}")
    return line


def _scores(result: Mapping[str, object]) -> RenderableType:
    """Returns the scores before and after training, or a line that there are none."""
    table = Table.grid(padding=(0, 2))
    for justify in ("left", "right", "left", "right", "right", "left"):
        table.add_column(justify=justify)
    first, last = scores_of(result.get("before")), scores_of(result.get("after"))
    for key, name in held_out_names([*first, *last]).items():
        before, after, counted = first.get(key), last.get(key), episodes_key(key)
        gain = "" if before is None or after is None else f"({after - before:+.3f})"
        over = problems(first.get(counted), last.get(counted))
        shown = Text(number(after, 3), f"bold {ACCENT}")
        table.add_row(name, number(before, 3), "→", shown, Text(gain, "dim"), Text(over, "dim"))
    if not table.row_count:
        return Text("No evaluation was made.", "dim")
    return Group(Text("Mean reward before → after", f"bold {ACCENT}"), table)


def _signs(run_dir: Path) -> list[RenderableType]:
    """Returns the signs that hold at the end of the run, and the age of the groups that were dropped."""
    watch = watch_of_run(run_dir)
    signs = [Text(f"  {held.sign}") for held in watch.current.values()]
    lines: list[RenderableType] = [Text("Warnings", "bold yellow"), *signs, Text("")] if signs else []
    groups, oldest = watch.newest("groups/stale"), watch.newest("staleness_dropped/max")
    if groups and oldest is not None:
        mean = number(watch.newest("staleness_dropped/mean"), 1)
        dropped = f"{number(groups, 0)} groups were dropped as stale: {mean} versions old on average, "
        lines += [Text(f"{dropped}{number(oldest, 0)} at most.", "dim"), Text("")]
    return lines


def _episodes(run_dir: Path) -> list[RenderableType]:
    chosen = choose(evaluations(run_dir))
    if not chosen.pairs:
        return []
    parts: list[RenderableType] = [Text("Episodes", f"bold {ACCENT}"), Text(chosen.how, "dim"), Text("")]
    for pair in chosen.pairs:
        parts += [as_text(pair), Text("")]
    return parts


def next_steps(result: Mapping[str, object], run_dir: Path) -> list[tuple[str, str]]:
    """Returns (purpose, command or path) pairs."""
    if result.get("status") == "failed":
        return _after_failure(result, run_dir)
    steps = []
    if result.get("report"):
        steps.append(("read the report", str(result["report"])))
    steps += _continue(result)
    if result.get("checkpoint"):
        steps += _serving("serve the checkpoint", Path(str(result["checkpoint"])), run_dir)
    if (best := run_dir / "checkpoints" / "best").exists():
        steps += _serving("serve the best policy so far", best, run_dir)
    here = shlex.quote(str(run_dir))
    if (run_dir / "metrics.jsonl").exists():
        steps.append(("view the run in the browser", f"tidegate view {here}"))
    if (run_dir / "ledger.jsonl").exists():
        steps.append(("check the ledger", f"tidegate audit {here}"))
    return [*steps, _another_run(run_dir)]


def _serving(purpose: str, directory: Path, run_dir: Path) -> list[tuple[str, str]]:
    """Returns the command that serves a checkpoint, or of several policies that of each."""
    policies = [] if (directory / "config.json").exists() else sorted(directory.glob("*/config.json"))
    if not policies:
        return [(purpose, _serve(str(directory), run_dir))]
    return [(f"{purpose}: {one.parent.name}", _serve(str(one.parent), run_dir)) for one in policies]


def _serve(model: str, run_dir: Path) -> str:
    """Returns the command that serves a checkpoint: here, or from the service that has its weights."""
    trainer = read_settings(run_dir, []).get("trainer", {})
    command, path = trainer.get("backend", "own"), f"--model.path {shlex.quote(model)}"
    if command == "own":
        return f"tidegate engine {path}"
    service = trainer.get(command, {})
    names = [name for name in ("base_model", "base_url", "api_key_file") if name in service]
    return " ".join(
        [f"tidegate {command} {path}", *(f"--{command}.{one} {shlex.quote(service[one])}" for one in names)]
    )


def _after_failure(result: Mapping[str, object], run_dir: Path) -> list[tuple[str, str]]:
    """Returns the steps that help to find the cause of a failure, then the command that continues the run."""
    here, steps = shlex.quote(str(run_dir)), []
    if any((run_dir / name).exists() for name in ("metrics.jsonl", "ledger.jsonl")):
        steps.append(("view the run and its failed episodes in the browser", f"tidegate view {here}"))
    if any((run_dir / "logs").glob("*.log")):
        steps.append(("read the logs of its processes", str(run_dir / "logs")))
    if (run_dir / "dead_letters.jsonl").exists():
        steps.append(("list the quarantined tasks", f"tidegate tasks {here} --quarantined"))
    if (run_dir / "config.toml").exists():
        config = shlex.quote(str(run_dir / "config.toml"))
        steps.append(("check agent, environment, model and engine", f"tidegate doctor {config}"))
    if (run_dir / "ledger.jsonl").exists():
        steps.append(("check the ledger", f"tidegate audit {here}"))
    steps += [(f"then {purpose}", command) for purpose, command in _continue(result)]
    if result.get("report"):
        steps.append(("read the report", str(result["report"])))
    return steps


def _continue(result: Mapping[str, object]) -> list[tuple[str, str]]:
    """Returns the step that continues the run; none if it needs none."""
    resume = str(result.get("resume") or "")
    how = "serve clients and train" if resume.startswith("tidegate serve") else "train"
    where = "from the checkpoint" if result.get("checkpoint") else "from the start"
    return [(f"{how} {where}", resume)] if resume else []


def continue_command(run_dir: Path, steps: int | None) -> str:
    """Returns the command that continues a run, or the service that it belongs to.

    A run without a ledger failed before it began, and is started again.

    Args:
        run_dir: Directory of the run.
        steps: New limit of its steps; None keeps the present one.
    """
    more = "" if steps is None else f" --trainer.steps {steps}"
    service = run_dir / SERVICE_SETTINGS
    if service.exists():
        return f"tidegate serve {shlex.quote(str(service))}{more}"
    resume = " --resume" if (run_dir / "ledger.jsonl").exists() else ""
    return f"tidegate train {shlex.quote(str(run_dir / 'config.toml'))}{resume}{more}"


def _another_run(run_dir: Path) -> tuple[str, str]:
    """Returns the step after a run: with one's own agent, else, if the run had one, with other settings."""
    agent, name = read_settings(run_dir, []).get("agent", {}), shlex.quote(_free(run_dir).name)
    service = run_dir / SERVICE_SETTINGS
    if service.exists():
        return (
            "start anew, with other settings",
            f"tidegate serve {shlex.quote(str(service))} --run.name {name}",
        )
    if ":" not in agent.get("use", "") and agent.get("source") != "client":
        return "train your own agent", f"tidegate init {_free(Path('my-agent')).name}"
    config = shlex.quote(str(run_dir / "config.toml"))
    return "train again, with other settings", f"tidegate train {config} --run.name {name}"


def _free(path: Path) -> Path:
    """Returns the path, or the first numbered variant of it that does not exist."""
    numbered = (path.with_name(f"{path.name}-{number}") for number in itertools.count(2))
    return next(free for free in itertools.chain([path], numbered) if not free.exists())
