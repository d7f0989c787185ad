"""`python -m tests.fuzzing`: runs the fuzzer alone, in any number of processes."""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from tests.fuzzing.drive import CASES_A_STORY, Plan, drive, told
from tests.fuzzing.stories import Failure
from tests.tiny_tokenizer import TEMPLATES, make_model_dir


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzzing", description=__doc__)
    parser.add_argument("--cases", type=int, default=100_000, help="requests in all")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--template", choices=sorted(TEMPLATES), help="only this one")
    parser.add_argument("--story", type=int, help="only this one")
    arguments = parser.parse_args()
    templates = [arguments.template] if arguments.template else sorted(TEMPLATES)
    if arguments.story is not None:
        plans = [Plan(arguments.seed, name, 1, arguments.story) for name in templates]
    else:
        plans = _plans(arguments.seed, templates, arguments.cases)
    began = time.monotonic()
    seen: Counter[str] = Counter()
    with ProcessPoolExecutor(arguments.jobs) as pool:
        for plan, (statuses, failure) in zip(plans, pool.map(_run, plans), strict=True):
            seen += statuses
            if failure is not None:
                print(failure)
                pool.shutdown(cancel_futures=True)
                return 1
            print(f"{plan.template}: stories {plan.first} to {plan.first + plan.count - 1} hold", flush=True)
    print(", ".join(f"{status}: {count}" for status, count in seen.most_common()))
    print(f"{seen.total()} cases in {time.monotonic() - began:.0f} s: no failure, no reply unrecorded")
    return 0


def _plans(seed: int, templates: list[str], cases: int) -> list[Plan]:
    """Stories in portions, the templates taking turns."""
    portion = 25
    portions = -(-cases // (portion * CASES_A_STORY))
    return [Plan(seed, templates[n % len(templates)], portion, n * portion) for n in range(portions)]


def _run(plan: Plan) -> tuple[Counter[str], str | None]:
    with tempfile.TemporaryDirectory() as name:
        try:
            return asyncio.run(drive(make_model_dir(Path(name) / "tiny", plan.template), plan)), None
        except Failure as failure:
            return Counter(), told(failure)


if __name__ == "__main__":
    sys.exit(main())
