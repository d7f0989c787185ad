"""A run at a glance: scores, remarks, numbers and settings, for its dashboard and its report."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from tidegate.trainer.ledger.entries import LedgerEntry, State
from tidegate.viewer.formatting import duration, number, plain, printable
from tidegate.viewer.held_out import episodes_key
from tidegate.viewer.ledger import LedgerCounts
from tidegate.viewer.run_files import RunFiles
from tidegate.viewer.summary import problems


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


def banners(
    run: RunFiles, counts: LedgerCounts | None, remarks: Iterable[str], *, progress: bool
) -> Iterator[str]:
    """Yields remarks on the run, then `remarks`; with `progress`, also one on steps not taken yet."""
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
    resumed = 0 if counts is None else len(counts.starts) - 1
    if resumed > 0:
        times = "once" if resumed == 1 else f"{resumed} times"
        yield f"The run was resumed {times}. The curves omit discarded steps."
    for remark in remarks:
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
