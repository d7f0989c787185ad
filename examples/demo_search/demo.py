"""The search demo: `make demo-search`, or `python examples/demo_search/demo.py [--section.key value ...]`.

Writes the passages of two worlds (of one the questions are trained on, of the other they are held out),
builds an index of them, starts the retrieval server, trains against it, and ends it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tidegate.config import load_settings
from tidegate.envs.search.synthetic_world import documents, make_world
from tidegate.errors import TidegateError
from tidegate.service.service import Service

CONFIG = Path(__file__).with_name("config.toml")


@contextlib.contextmanager
def served_worlds(directory: Path, seed: int = 0) -> Iterator[str]:
    """The URL of a retrieval server that has the passages of both worlds; `directory` keeps what it needs.

    Raises StartError where it doesn't come up.
    """
    index = build_index(directory, seed)
    server = Service("rag", lambda: ["serve", str(index)], directory)
    with asyncio.Runner() as runner:
        try:
            yield runner.run(server.start())
        finally:
            runner.run(server.stop())


def build_index(directory: Path, seed: int) -> Path:
    """Write the corpus and have it indexed by the encoder that needs no model; the same again is at once."""
    directory.mkdir(parents=True, exist_ok=True)
    corpus, index = directory / "corpus.jsonl", directory / "index"
    passages = documents([make_world(seed, "train"), make_world(seed, "held_out")])
    corpus.write_text("".join(json.dumps(one) + "\n" for one in passages), encoding="utf-8")
    command = ["rag", "build", str(corpus), "--out", str(index), "--encoder", "hash", "--replace"]
    subprocess.run([sys.executable, "-m", "tidegate", *command], check=True, timeout=300)
    return index


def told(url: str) -> list[str]:
    """The settings that say where the retrieval server is."""
    return [f"--agent.options.urls={json.dumps([url])}"]


def main(overrides: Sequence[str]) -> int:
    try:
        plan = load_settings(CONFIG, overrides)
        seed = plan.env.options.get("seed", 0)
        from tidegate.launch import launch  # after the settings were checked: it takes a moment

        with served_worlds(plan.run.dir / f"{plan.run.name}-corpus", seed) as url:
            return launch(load_settings(CONFIG, [*told(url), *overrides]), fresh=True)
    except TidegateError as error:
        print(f"demo-search: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
