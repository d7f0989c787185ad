"""Writes a run's report: one self-contained HTML file, and `reward.png`.

Text of models, agents and settings is escaped. The page's content security policy allows only its own
script and style, by their hashes, and no connections.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
import shlex
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from markupsafe import Markup

from tidegate.trainer.ledger.entries import LedgerEntry, State
from tidegate.viewer.clients.service import read_service
from tidegate.viewer.formatting import duration, number, plain, printable
from tidegate.viewer.held_out import episodes_key
from tidegate.viewer.ledger import STATES, LedgerCounts, count_ledger, newest_checkpoint
from tidegate.viewer.plots import health_charts, main_charts, reward_chart, write_reward_png
from tidegate.viewer.run_files import RunFiles, read_run
from tidegate.viewer.signs.watch import watch_of
from tidegate.viewer.summary import continue_command, next_steps, problems
from tidegate.viewer.transcripts import choose


@dataclass(frozen=True, slots=True)
class Tile:
    name: str
    value: str
    more: str = ""


@dataclass(frozen=True, slots=True)
class Score:
    name: str
    before: float | None
    after: float
    over: str
    step: int
    """The step of `after`."""


def write_report(run_dir: Path) -> Path:
    """Writes `report.html` and `reward.png` into the run's directory; returns the report's path.

    The report of a running or interrupted run covers its steps so far. Without matplotlib, `reward.png`
    is not written.

    Raises:
        ConfigError: the directory does not exist or is not a run.
    """
    run = read_run(run_dir)
    counts, service = count_ledger(run_dir, run.remarks), read_service(run)
    page = render(run, counts, None if service is None else service.to_wire())
    write_reward_png(run, run_dir / "reward.png")
    path = run_dir / "report.html"
    # Replace atomically, so that a browser never loads an incomplete page.
    scratch = path.with_name(f".report.{os.getpid()}.html")
    scratch.write_text(page, encoding="utf-8", errors="replace")
    scratch.replace(path)
    return path


def render(run: RunFiles, counts: LedgerCounts | None, service: Mapping[str, Any] | None = None) -> str:
    """Returns the page; reads the run's evaluations for the episodes.

    Args:
        run: The run's files.
        counts: Counts of its ledger.
        service: Tables of its clients (`ServiceData.to_wire`), in place of episodes of evaluations.
    """
    import jinja2

    pages = jinja2.Environment(
        loader=jinja2.PackageLoader("tidegate.viewer", ""),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    pages.filters["number"] = number
    style, script = _asset("report.css"), _asset("report.js")
    trainer = run.settings.get("trainer", {})
    return pages.get_template("report.html").render(
        name=run_name(run),
        opening=opening(run),
        style=Markup(style),
        script=Markup(script),
        style_hash=_hash(style),
        script_hash=_hash(script),
        scores=scores(run),
        signs=watch_of(run.rows).current.values(),
        banners=[printable(text) for text in banners(run, counts)],
        tiles=list(tiles(run, counts)),
        reward=reward_chart(run),
        charts=main_charts(run, staleness_bound(trainer)),
        health=health_charts(run),
        chosen=choose(run.evaluations),
        counts=counts,
        service=service,
        states=STATES,
        meter=meter,
        steps=[(purpose, printable(command)) for purpose, command in _next_steps(run, counts)],
        settings=list(shown_settings(run.settings)),
        footer=f"Written {time.strftime('%Y-%m-%d %H:%M %Z')} from {printable(run.dir)}",
    )


def _asset(name: str) -> str:
    return resources.files("tidegate.viewer").joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    """Returns the source expression with which the page's policy allows this text."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def run_name(run: RunFiles) -> str:
    return printable(run.settings.get("run", {}).get("name") or run.dir.resolve().name)


def staleness_bound(trainer: dict[str, Any]) -> int | None:
    bound = trainer.get("max_staleness")
    return bound if isinstance(bound, int) else None


def opening(run: RunFiles) -> str:
    def at(section: str, key: str) -> str:
        return printable(run.settings.get(section, {}).get(key, "?"))

    if run.is_fine_tuning:
        return f"Fine-tuning of {at('model', 'path')}."
    if run.by_clients:
        return f"Clients' conversations, starting from {at('model', 'path')}."
    return f"Agent {at('agent', 'use')} on {at('env', 'use')}, starting from {at('model', 'path')}."


def scores(run: RunFiles) -> list[Score]:
    """Returns the first and last value of each evaluation score; `before` is None if there is only one."""
    scored = []
    for key, name in run.held_out().items():
        points = run.series(key)
        values = [value for _, value in points]
        counts = [value for _, value in run.series(episodes_key(key))]
        if values:
            over = problems(counts[0], counts[-1]) if counts else ""
            scored.append(
                Score(name, values[0] if len(values) > 1 else None, values[-1], over, int(points[-1][0]))
            )
    return scored


def banners(run: RunFiles, counts: LedgerCounts | None, *, progress: bool = True) -> Iterator[str]:
    """Yields remarks on the run; with `progress`, also one on steps that are not taken yet."""
    planned, done = run.planned, run.last("step")
    end = None if counts is None else counts.end
    if end is not None:
        yield from _ending(end)
    if not run.rows:
        yield f"This run has no completed step{'' if end else ' yet'}."
    elif end is None and progress and planned and done is not None and done < planned:
        yield (
            f"This run has taken {int(done)} of {planned} steps: it is running, or was killed. "
            "This report shows the steps so far."
        )
    resumed = max(len(run.redone), len(counts.starts) - 1 if counts is not None else 0)
    if resumed:
        times = "once" if resumed == 1 else f"{resumed} times"
        yield f"The run was resumed {times}. The curves omit discarded steps."
    for remark in run.remarks:
        yield f"{remark[:1].upper()}{remark[1:]}."


def _ending(end: LedgerEntry) -> Iterator[str]:
    """Yields a remark on a run that did not take all its steps."""
    status, why = end.get("status"), end.get("why") or ""
    if status == "failed":
        yield f"The run failed after step {end.get('step', '?')}: {why}"
    elif status == "interrupted":
        yield f"The run was interrupted after step {end.get('step', '?')}; --resume continues it."
    elif why:
        yield f"The run completed: {why}."


def tiles(run: RunFiles, counts: LedgerCounts | None) -> Iterator[Tile]:
    for score in scores(run)[1:]:
        before = "" if score.before is None else f"{number(score.before)} → "
        once = f"at step {score.step}" if score.before is None else ""
        yield Tile(score.name.capitalize(), f"{before}{number(score.after)}", once)
    of = f"of {run.planned}" if run.planned else ""
    yield Tile("Steps", number(run.last("step") or 0, 0), of)
    seconds = run.seconds(counts.starts if counts is not None else ())
    if seconds is not None:
        yield Tile("Training time", duration(seconds))
    version = run.last("version")
    if version is not None and not run.is_fine_tuning:
        yield Tile("Policy version", plain(version), "published last")
    sampled = run.sampled_tokens()
    trained = sum(value for _, value in run.series("tokens/trained"))
    if sampled:
        yield Tile("Tokens sampled", number(sampled, 0), f"{number(trained, 0)} trained on")
    if counts is not None:
        used = counts.groups[State.TRAINED] + counts.groups[State.STEPPED]
        yield Tile("Groups trained on", number(used, 0), f"of {number(counts.groups.total(), 0)} issued")
    largest = max((value for _, value in run.series("staleness/max")), default=None)
    if largest is not None:
        bound = run.settings.get("trainer", {}).get("max_staleness")
        yield Tile("Largest staleness", number(largest, 0), f"bound {bound}" if bound is not None else "")


def meter(share: float) -> Markup:
    """Returns a bar filled to `share`."""
    return Markup(
        '<svg class="meter" viewBox="0 0 160 9" aria-hidden="true">'
        '<rect class="track" width="160" height="9" rx="3"/>'
        '<rect class="value" width="{:.1f}" height="9" rx="3"/></svg>'
    ).format(160 * min(1.0, max(0.0, share)))


def _next_steps(run: RunFiles, counts: LedgerCounts | None) -> list[tuple[str, str]]:
    if run.is_fine_tuning:
        config, model = (shlex.quote(str(run.dir / name)) for name in ("config.toml", "model"))
        return [("train from the result", f"tidegate train {config} --model.path {model}")]
    end = None if counts is None else counts.end
    status = None if end is None else end.get("status")
    reached = end is not None and status == "completed" and bool(end.get("why"))  # trainer.until
    result: dict[str, object] = {"checkpoint": newest_checkpoint(run.dir), "status": status}
    if result["checkpoint"] is not None:
        planned, done = run.planned, run.last("step")
        finished = planned is not None and done is not None and done >= planned
        if not reached:
            result["resume"] = continue_command(run.dir, 2 * planned if planned and finished else None)
    return next_steps(result, run.dir)


SECRET = ("key", "token", "secret", "password")
"""Last words of the names of secrets, as in `api_key` and `--api-key`."""
CREDENTIALS = re.compile(r"://[^/@\s]+@")


def shown_settings(settings: dict[str, Any]) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Yields the sections with their settings as texts. Hides secrets, because reports are shared."""
    for section, values in settings.items():
        rows = values.items() if isinstance(values, dict) else [("", values)]
        yield printable(section), [(printable(key), shown_value(key, value)) for key, value in rows]


def shown_value(key: str, value: object) -> str:
    """Returns the text of a setting; that of a secret is `(hidden)`."""
    if isinstance(value, dict):
        return (
            ", ".join(f"{printable(name)} = {shown_value(name, part)}" for name, part in value.items())
            or "{}"
        )
    return printable(_without_secrets(value, key))


def _without_secrets(value: object, name: str) -> object:
    """Hides secrets in the value of a setting, or of the command-line argument `name`."""
    if isinstance(value, list):  # the value of an argument follows its name
        return [
            _without_secrets(one, str(before)) for before, one in zip([name, *value], value, strict=False)
        ]
    if not isinstance(value, str):
        return value
    argument, equals, _ = value.partition("=")
    if equals and _is_secret(argument):
        return f"{argument}=(hidden)"
    if _is_secret(name) and not value.startswith("-"):
        return "(hidden)"
    return CREDENTIALS.sub("://(hidden)@", value)


def _is_secret(name: str) -> bool:
    return re.split("[_-]", name)[-1].lower() in SECRET
