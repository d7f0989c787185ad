"""The search demo: `make demo-search`, or `python examples/demo_search/demo.py [--section.key value ...]`.

Writes the passages of two worlds (one for training questions, one for held-out questions), builds an index of
them, starts the retrieval server, trains with it, and stops it.
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
from tidegate.errors import TidegateError
from tidegate.service.service import Service

sys.path.append(str(Path(__file__).parents[2]))  # a script has only its own folder on its path

from examples.demo_search.synthetic_world import documents, make_world

CONFIG = Path(__file__).with_name("config.toml")


@contextlib.contextmanager
def serve_worlds(directory: Path, seed: int = 0) -> Iterator[str]:
    """Runs a retrieval server on the passages of both worlds; yields its URL. Its files are in `directory`.

    Raises StartError if the server does not start.
    """
    index = build_index(directory, seed)
    server = Service("rag", lambda: ["serve", str(index)], directory)
    with asyncio.Runner() as runner:
        try:
            yield runner.run(server.start())
        finally:
            runner.run(server.stop())


def build_index(directory: Path, seed: int) -> Path:
    """Writes the corpus and indexes it with the encoder that needs no model; keeps an identical index."""
    directory.mkdir(parents=True, exist_ok=True)
    corpus, index = directory / "corpus.jsonl", directory / "index"
    passages = documents([make_world(seed, "train"), make_world(seed, "held_out")])
    corpus.write_text("".join(json.dumps(one) + "\n" for one in passages), encoding="utf-8")
    command = ["rag", "build", str(corpus), "--out", str(index), "--encoder", "hash", "--replace"]
    subprocess.run([sys.executable, "-m", "tidegate", *command], check=True, timeout=300)
    return index


def retrieval_overrides(url: str) -> list[str]:
    """Settings with the address of the retrieval server."""
    return [f"--agent.options.urls={json.dumps([url])}"]


def main(overrides: Sequence[str]) -> int:
    try:
        settings = load_settings(CONFIG, overrides)
        seed = settings.env.options.get("seed", 0)
        from tidegate.launch import launch  # a slow import, after the check of the settings

        with serve_worlds(settings.run.dir / f"{settings.run.name}-corpus", seed) as url:
            return launch(load_settings(CONFIG, [*retrieval_overrides(url), *overrides]), fresh=True)
    except TidegateError as error:
        print(f"demo-search: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
