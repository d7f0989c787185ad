"""Environments of other libraries: equal scores, and what tiny models learn by settings alone.

200 episodes of each library are scored through Tidegate and by the library's own runner. Then a tiny base
model is taught the form of replies (adapting/lessons.py) and trained by `tidegate train`, by settings alone.
It needs requirements/adapters.txt.

    python benchmarks/adapters.py [--json] [--scores] [--only LIBRARY] [--keep DIRECTORY]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import tomli_w
from adapting.lessons import LESSONS, Lesson, environment_of, teach
from adapting.scores import EPISODES, PEERS, SCORES, mismatches, openenv_server
from common import Check, report

REPO = Path(__file__).parents[1]
GAIN = 0.2
SETTINGS: dict[str, Any] = {
    "agent": {"use": "chat", "options": {"max_turns": 12}, "deadline_s": 60},
    "engine": {"max_slots": 64, "max_context": 768},
    "sampling": {"temperature": 1.0, "max_tokens": 12},
    "trainer": {
        "steps": 30, "groups_per_batch": 8, "group_size": 8, "max_staleness": 2, "learning_rate": 1e-3,
        "schedule": "linear", "checkpoint_every": 30,
    },
    "eval": {"every": 30, "tasks": 100, "max_concurrency": 64},
}  # fmt: skip


def trained(library: str, lesson: Lesson, directory: Path, url: str) -> dict[str, Any]:
    """Teaches a base, trains it, and returns its held-out rewards before and after."""
    began = time.monotonic()
    use, environment = environment_of(lesson, url)
    base = directory / f"{library}-base"
    with contextlib.redirect_stdout(sys.stderr):
        teach(lesson, environment, base)
    taught = time.monotonic()
    config = {
        **SETTINGS,
        "run": {"name": library, "dir": str(directory), "live_view": False},
        "model": {"path": str(base)},
        "env": {"use": use, "options": dict(lesson.options)},
    }
    for section, values in lesson.settings.items():
        config[section] = {**config[section], **values}
    path = directory / f"{library}.toml"
    path.write_text(tomli_w.dumps(config))
    paths = os.pathsep.join((str(PEERS), os.environ.get("PYTHONPATH", ""))).rstrip(os.pathsep)
    process = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "tidegate", "train", str(path)]
    with open(directory / f"{library}.out", "wb") as out:
        subprocess.run(command, cwd=REPO, env=process, stdout=out, stderr=out, check=True, timeout=600)
    lines = (directory / library / "metrics.jsonl").read_text().splitlines()
    rewards = [line["eval/reward"] for line in map(json.loads, lines) if "eval/reward" in line]
    return {
        "library": library,
        "environment": lesson.use,
        "before": rewards[0],
        "after": rewards[-1],
        "teaching_s": round(taught - began, 1),
        "training_s": round(time.monotonic() - taught, 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object last")
    parser.add_argument("--only", choices=sorted(LESSONS), help="one library")
    parser.add_argument("--scores", action="store_true", help="compare the scores; train nothing")
    parser.add_argument("--keep", type=Path, help="directory for models and runs, which is kept")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    results, checks, differing = [], [], 0
    with contextlib.ExitStack() as stack:
        temporary = stack.enter_context(tempfile.TemporaryDirectory())
        directory = arguments.keep or Path(temporary)
        directory.mkdir(parents=True, exist_ok=True)
        for library in [arguments.only] if arguments.only else LESSONS:
            pairs = SCORES[library]()
            wrong = mismatches(pairs)
            differing += wrong
            result = {"library": library, "episodes_compared": len(pairs), "score_mismatches": wrong}
            checks.append(Check(f"compared_{library}", len(pairs), "==", EPISODES))
            if not arguments.scores:
                url = stack.enter_context(openenv_server()) if library == "openenv" else ""
                result |= trained(library, LESSONS[library], directory, url)
                checks.append(Check(f"gain_{library}", result["after"] - result["before"], ">=", GAIN))
            results.append(result)
            print(result, file=sys.stderr, flush=True)
    checks.append(Check("score_mismatches", differing, "==", 0))
    return report(results, checks, as_json=arguments.json)


if __name__ == "__main__":
    sys.exit(main())
