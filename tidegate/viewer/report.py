"""Writes a run's report: pages of its dashboard and their data as one HTML file, and `reward.png`.

Text of models, agents and settings is inserted as text by the page's script. The page's content security
policy allows only its own script and style, by their hashes, and no connections.
"""

from __future__ import annotations

import base64
import hashlib
import html
import os
import re
import shlex
import time
from collections.abc import Mapping
from pathlib import Path
from string import Template
from typing import Any

from tidegate.service import exact
from tidegate.viewer.dashboard import views
from tidegate.viewer.dashboard.app import page_files
from tidegate.viewer.dashboard.run import FollowedRun
from tidegate.viewer.dashboard.service import service
from tidegate.viewer.formatting import printable
from tidegate.viewer.ledger import newest_checkpoint
from tidegate.viewer.plots import write_reward_png
from tidegate.viewer.run_files import evaluations, run_directory
from tidegate.viewer.summary import continue_command, next_steps
from tidegate.viewer.transcripts import choose

_IMPORT = re.compile(r'^import (\{.*\}) from "\./(\w+)\.js";$', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async )?(?:function|const|class) (\w+))", re.MULTILINE)


def write_report(run_dir: Path) -> Path:
    """Writes `report.html` and `reward.png` into the run's directory; returns the report's path.

    The report of a running or interrupted run covers its steps so far. Without matplotlib, `reward.png`
    is not written.

    Raises:
        ConfigError: the directory does not exist or is not a run.
    """
    run_directory(run_dir)
    run = FollowedRun(run_dir)
    page = render(run)
    write_reward_png(run.files, run_dir / "reward.png")
    path = run_dir / "report.html"
    # Replace atomically, so that a browser never loads an incomplete page.
    scratch = path.with_name(f".report.{os.getpid()}.html")
    scratch.write_text(page, encoding="utf-8", errors="replace")
    scratch.replace(path)
    return path


def render(run: FollowedRun) -> str:
    """Returns the page, with the answers that the dashboard's server would give; reads the run's evaluations
    for the episodes."""
    state = views.state(run)
    chosen = choose(evaluations(run.dir, run.files.last("step")))
    data: dict[str, Any] = {
        "state": state,
        "overview": {
            **views.overview_of(run, progress=True),
            "chosen": None if state["service"] else chosen.to_wire(),
            "steps": [(purpose, printable(command)) for purpose, command in _next_steps(run)],
            "footer": f"Written {time.strftime('%Y-%m-%d %H:%M %Z')} from {printable(run.dir)}",
        },
        "settings": views.settings(run),
        "service": service(run) if state["service"] else None,
        "notes": {"notes": []},  # texts of users, who may have them erased: not for a file that is passed on
    }
    files = {name: text.decode() for name, text in page_files().items()}
    style, script = files["style.css"], _bundle("report", files)
    return Template(files["report.html"]).substitute(
        title=html.escape(state["name"]),
        style=style,
        script=script,
        style_hash=_hash(style),
        script_hash=_hash(script),
        data=exact.dumps(data).decode().replace("<", "\\u003c"),
    )


def _bundle(name: str, files: Mapping[str, str]) -> str:
    """Returns a script of the page and those that it imports as one: a page that is opened as a file can
    import no other file. Each becomes a function that is called once and returns what it exports."""
    modules: dict[str, str] = {}

    def add(name: str) -> None:
        source = files[f"{name}.js"]
        for _, other in _IMPORT.findall(source):
            if other not in modules:
                add(other)
        body = _EXPORT.sub("", _IMPORT.sub(r"const \1 = $\2;", source))
        exports = ", ".join(_EXPORT.findall(source))
        modules[name] = f"const ${name} = await (async () => {{\n{body}return {{ {exports} }};\n}})();\n"

    add(name)
    return "".join(modules.values())


def _hash(text: str) -> str:
    """Returns the source expression with which the page's policy allows this text."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _next_steps(run: FollowedRun) -> list[tuple[str, str]]:
    files, counts = run.files, run.counts()
    if files.is_fine_tuning:
        config, model = (shlex.quote(str(run.dir / name)) for name in ("config.toml", "model"))
        return [("train from the result", f"tidegate train {config} --model.path {model}")]
    end = None if counts is None else counts.end
    status = None if end is None else end.get("status")
    reached = end is not None and status == "completed" and bool(end.get("why"))  # trainer.until
    result: dict[str, object] = {"checkpoint": newest_checkpoint(run.dir), "status": status}
    if result["checkpoint"] is not None:
        planned, done = files.planned, files.last("step")
        finished = planned is not None and done is not None and done >= planned
        if not reached:
            result["resume"] = continue_command(run.dir, 2 * planned if planned and finished else None)
    return next_steps(result, run.dir)
